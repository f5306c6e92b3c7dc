"""Training speed against other frameworks: the same models, data and recipes, taking turns.

Each framework runs in a process of its own.

python -m benchmarks.training [--peers flax,equinox,...] [--workloads convnext,resnet,vit,mlp]
                              [--rounds 7] [--data DIR]
needs training/requirements.txt and benchmarks/requirements.txt; DIR holds mnist/, and without it
the program's drawn digits are the data
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version

from benchmarks.results import markdown, record, short, spread
from benchmarks.serving import Client, PeerError
from benchmarks.speed_chart import draw
from benchmarks.targets import OURS, targets_table, unfair_peers
from benchmarks.workloads import WORKLOADS

NAMES = {  # {peer: {variant: its name in the tables}}
    "ours": {"": OURS},
    "flax": {"": "Flax NNX"},
    "equinox": {"": "Equinox"},
    "haiku": {"": "Haiku"},
    "keras": {"": "Keras on JAX"},
    "torch": {
        "eager": "PyTorch",
        "channels_last": "PyTorch, channels last",
        "compile": "PyTorch, compiled",
        "compile channels_last": "PyTorch, compiled, channels last",
    },
}
CONVOLUTIONAL = (
    "convnext",
    "resnet",
    "mobilenet_v1",
)  # channels_last changes nothing in the other models
PACKAGES = ("optax", "flax", "equinox", "dm-haiku", "keras", "torch")
NOTES = """\
Ratios compare two consecutive turns: median (smallest - largest). Huge pages are enabled by \
`GLIBC_TUNABLES=glibc.malloc.hugetlb=1`; both sides of a ratio use them, or neither does. \
Memory is that of training alone."""


def main():
    args = arguments()
    measured, messages = {}, []
    for name in args.workloads:
        clients, missing = compare(WORKLOADS[name], peers_of(name, args), args.data, args.rounds)
        measured[name] = clients
        messages += [f"{name}: {message}" for message in unfair_peers(clients)]
        table = section(name, clients, missing, args.data)
        record(f"Training: {name}", "python -m benchmarks.training", table)
    if list(measured) == list(WORKLOADS) and len(args.peers) == len(NAMES) - 1:
        draw(measured)
    if messages:
        sys.exit("\n".join(messages))


def arguments():
    def comma_separated(choices):
        def parse(text):
            if unknown := [name for name in text.split(",") if name not in choices]:
                raise argparse.ArgumentTypeError(
                    f"no {', '.join(unknown)}; there are {', '.join(choices)}"
                )
            return [name for name in choices if name in text.split(",")]

        return parse

    peers, workloads = [name for name in NAMES if name != "ours"], list(WORKLOADS)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=comma_separated(peers), default=peers)
    parser.add_argument("--workloads", type=comma_separated(workloads), default=workloads)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--data", help="the folder that holds mnist/")
    return parser.parse_args()


def peers_of(name, args):
    return ["ours", *(peer for peer in args.peers if peer in WORKLOADS[name].peers)]


def compare(workload, peers, data, rounds):
    """({name: {huge pages: ended Client}}, {name: why it was not measured})."""
    clients, missing = start_all(workload, peers, data)
    for i in range(rounds):
        print_progress(f"{workload.name}: round {i + 1} of {rounds}")
        for name in [name for name in clients if name != OURS][:: -1 if i % 2 else 1]:
            side_by_side(clients, missing, name)
    for name in list(clients):
        with dropped_on_error(clients, missing, name):
            for client in clients[name].values():
                client.end()
    return clients, missing


def start_all(workload, peers, data):
    """Start the clients that `compare` needs: one by one without huge pages, since the tables show
    this time, then two at a time with them."""
    clients, missing = {}, {}

    def start(peer, variant, huge):
        name = NAMES[peer][variant]
        print_progress(f"{workload.name}: starting {name}{', huge pages' if huge else ''}")
        with recorded_error(missing, name):
            clients.setdefault(name, {})[huge] = Client(workload, peer, variant, data, huge)

    forms = [
        (peer, variant) for peer in peers for variant in NAMES[peer] if differs(variant, workload)
    ]
    for form in forms:
        start(*form, False)
    forms = [form for form in forms if NAMES[form[0]][form[1]] not in missing]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda form: start(*form, True), forms))
    return {name: pair for name, pair in clients.items() if name not in missing}, missing


def side_by_side(clients, missing, name):
    """One turn of ours and one of a peer right after it: the speed of a shared machine varies."""
    for huge, client in list(clients[name].items()):
        with dropped_on_error(clients, missing, OURS):
            rate = clients[OURS][huge].take_turn()
        with dropped_on_error(clients, missing, name):
            client.multiples.append(rate / client.take_turn())
        if name in missing:
            return


@contextmanager
def dropped_on_error(clients, missing, name):
    """Leave out a framework that fails."""
    with recorded_error(missing, name):
        yield
    if name in missing:
        del clients[name]


def differs(variant, workload):
    """Whether a variant differs from the others for this model."""
    return "channels_last" not in variant or workload.name in CONVOLUTIONAL


@contextmanager
def recorded_error(missing, name):
    """Note why a framework fails, for the table; exit if ours fails."""
    try:
        yield
    except PeerError as error:
        print_progress(f"{name}: {error}")
        missing[name] = str(error)
        if name == OURS:
            raise SystemExit(1) from error


def print_progress(line):
    print(line, file=sys.stderr)


def section(name, clients, missing, data):
    """A workload's section of RESULTS.md."""
    workload = WORKLOADS[name]
    images = "MNIST" if data else "the digits that the program draws"
    data = "stories that the program writes" if workload.is_text else images
    arguments = ", ".join(f"{key} {value}" for key, value in workload.args.items())
    shape = " x ".join(map(str, workload.shape))
    recipe = f"batch {workload.batch_size}, {shape}, AdamW, float32, {data}"
    tables = [
        speed_table(workload.unit, clients, missing),
        learning_table(workload, clients),
        targets_table(name, clients),
    ]
    about = f"{workload.model} of {arguments}, {recipe}."
    return "\n\n".join([about, *tables, f"{NOTES} {versions()}."])


def speed_table(unit, clients, missing):
    """Speeds, and ours as a multiple of each, under the same conditions."""
    rows = []
    for name, pair in clients.items():
        rates = [spread(client.rates) for client in pair.values()]
        ratios = ["1" if name == OURS else spread(client.multiples) for client in pair.values()]
        rows.append([name, rates[0], ratios[0], rates[1], ratios[1]])
    rows += [[name, f"none: {why}", "", "", ""] for name, why in missing.items()]
    head = ["", f"{unit}/s", "ours / theirs", f"{unit}/s, huge pages", "ours / theirs, huge pages"]
    return markdown(head, rows)


def learning_table(workload, clients):
    """What was learned, and how much time and memory it took."""
    rows = []
    for name, pair in clients.items():
        plain, huge = pair.values()
        memory = [f"{client.learned['memory'] / 2**20:,.0f}" for client in (plain, huge)]
        learned = [f"{plain.learned['loss']:.3f}", f"{plain.learned['accuracy']:.3f}"]
        rows.append([name, f"{plain.parameters:,}", *learned, short(plain.first_epoch), *memory])
    loss = f"loss after {workload.learning} epochs of {workload.examples:,} examples"
    first_epoch = "s from process start to the end of the first epoch"
    head = ["", "parameters", loss, "test accuracy", first_epoch]
    return markdown([*head, "peak memory, MiB", "with huge pages"], rows)


def versions():
    installed = []
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed.append(f"{package} {version(package)}")
    return ", ".join(installed)


if __name__ == "__main__":
    main()
