"""Training against other frameworks: the same models, data and recipes, each framework in a process of its own, taking turns.

python -m benchmarks.training [--peers flax,equinox,...] [--workloads convnext,resnet,vit,mlp] [--rounds 7] [--data DIR]
needs requirements.txt and benchmarks/requirements.txt; DIR holds mnist/, else the program's drawn digits are learned
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version

from benchmarks.marks import OURS, faults, marks_table
from benchmarks.results import markdown, record, short, spread
from benchmarks.serving import Failed, Runner
from benchmarks.speed_chart import draw
from benchmarks.workloads import WORKLOADS

NAMES = {  # {peer: {variant: what it is called}}
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
CONVOLUTIONS = ("convnext", "resnet")  # elsewhere channels_last changes nothing
PACKAGES = ("optax", "flax", "equinox", "dm-haiku", "keras", "torch")
NOTES = (
    "Ratios are those of turns one right after the other: median (smallest - largest). Huge pages are those of "
    "`GLIBC_TUNABLES=glibc.malloc.hugetlb=1`; both sides of a ratio have them, or neither. Memory is that of training alone."
)


def main():
    args = arguments()
    measured, wrong = {}, []
    for name in args.workloads:
        runners, missing = compare(WORKLOADS[name], ["ours", *args.peers], args.data, args.rounds)
        measured[name] = runners
        wrong += [f"{name}: {fault}" for fault in faults(runners)]
        record(
            f"Training: {name}",
            "python -m benchmarks.training",
            section(name, runners, missing, args.data),
        )
    if list(measured) == list(WORKLOADS) and len(args.peers) == len(NAMES) - 1:
        draw(measured)
    if wrong:
        sys.exit("\n".join(wrong))


def arguments():
    def listed(known):
        def names(text):
            if unknown := [name for name in text.split(",") if name not in known]:
                raise argparse.ArgumentTypeError(
                    f"no {', '.join(unknown)}; there are {', '.join(known)}"
                )
            return [name for name in known if name in text.split(",")]

        return names

    peers = [name for name in NAMES if name != "ours"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=listed(peers), default=peers)
    parser.add_argument("--workloads", type=listed(list(WORKLOADS)), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--data", help="the folder that holds mnist/")
    return parser.parse_args()


def compare(workload, peers, data, rounds):
    """({name: {huge pages: Runner, ended}}, {name: why there is none}), each framework without and with huge pages."""
    runners, missing = started(workload, peers, data)
    for i in range(rounds):
        say(f"{workload.name}: round {i + 1} of {rounds}")
        for name in [name for name in runners if name != OURS][:: -1 if i % 2 else 1]:
            side_by_side(runners, missing, name)
    for name in list(runners):
        with kept(runners, missing, name):
            for runner in runners[name].values():
                runner.end()
    return runners, missing


def started(workload, peers, data):
    """As `compare`, before the first round: one by one without huge pages, as its time is told, then two at a time."""
    runners, missing = {}, {}

    def start(peer, variant, huge):
        name = NAMES[peer][variant]
        say(f"{workload.name}: starting {name}{', huge pages' if huge else ''}")
        with noted(missing, name):
            runners.setdefault(name, {})[huge] = Runner(workload, peer, variant, data, huge)

    forms = [
        (peer, variant) for peer in peers for variant in NAMES[peer] if suits(variant, workload)
    ]
    for form in forms:
        start(*form, False)
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                lambda form: start(*form, True),
                [form for form in forms if NAMES[form[0]][form[1]] not in missing],
            )
        )
    return {name: pair for name, pair in runners.items() if name not in missing}, missing


def side_by_side(runners, missing, name):
    """A turn of ours and right after it one of a peer, since a shared machine is not as fast at every moment."""
    for huge, runner in list(runners[name].items()):
        with kept(runners, missing, OURS):
            rate = runners[OURS][huge].take_turn()
        with kept(runners, missing, name):
            runner.multiples.append(rate / runner.take_turn())
        if name in missing:
            return


@contextmanager
def kept(runners, missing, name):
    """A framework that fails is left out."""
    with noted(missing, name):
        yield
    if name in missing:
        del runners[name]


def suits(variant, workload):
    """Whether a variant is another one for this model."""
    return "channels_last" not in variant or workload.name in CONVOLUTIONS


@contextmanager
def noted(missing, name):
    """Why a framework fails is told in the table; without ours there is nothing to tell."""
    try:
        yield
    except Failed as error:
        say(f"{name}: {error}")
        missing[name] = str(error)
        if name == OURS:
            raise SystemExit(1) from error


def say(line):
    print(line, file=sys.stderr)


def section(name, runners, missing, data):
    """What RESULTS.md tells of a workload."""
    workload = WORKLOADS[name]
    images = "MNIST" if data else "the digits that the program draws"
    recipe = f"{', '.join(f'{key} {value}' for key, value in workload.args.items())}, batch {workload.batch_size}"
    about = f"{workload.model} of {recipe}, {' x '.join(map(str, workload.shape))}, AdamW, float32, {images}."
    tables = [
        speed_table(runners, missing),
        learning_table(workload, runners),
        marks_table(name, runners),
    ]
    return "\n\n".join([about, *tables, f"{NOTES} {versions()}."])


def speed_table(runners, missing):
    """Images a second, and how many times as many are ours, in equal conditions."""
    rows = []
    for name, pair in runners.items():
        rates = [spread(runner.rates) for runner in pair.values()]
        ratios = ["1" if name == OURS else spread(runner.multiples) for runner in pair.values()]
        rows.append([name, rates[0], ratios[0], rates[1], ratios[1]])
    rows += [[name, f"none: {why}", "", "", ""] for name, why in missing.items()]
    return markdown(
        ["", "images/s", "ours / it", "images/s, huge pages", "ours / it, huge pages"], rows
    )


def learning_table(workload, runners):
    """What was learned, and what it took."""
    rows = []
    for name, pair in runners.items():
        plain, huge = pair.values()
        memory = [f"{runner.learned['memory'] / 2**20:,.0f}" for runner in (plain, huge)]
        learned = [f"{plain.learned['loss']:.3f}", f"{plain.learned['accuracy']:.3f}"]
        rows.append([name, f"{plain.parameters:,}", *learned, short(plain.first_epoch), *memory])
    after = f"after {workload.learning} epochs of {workload.examples:,} images"
    head = [
        "",
        "parameters",
        f"loss {after}",
        "test accuracy",
        "s from process start to the end of the first epoch",
    ]
    return markdown([*head, "peak memory, MiB", "with huge pages"], rows)


def versions():
    found = []
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)


if __name__ == "__main__":
    main()
