"""Training speed against other frameworks: the same models, data and recipes, taking turns.

Each framework runs in a process of its own.

python -m benchmarks.training [--peers flax,equinox,...] [--workloads convnext,resnet,vit,mlp]
                              [--rounds 7] [--data DIR]
needs training/requirements.txt and benchmarks/requirements.txt; DIR holds mnist/, and without it
the program's drawn digits are the data
"""

import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

from benchmarks.harness import Worker, WorkerError, print_progress
from benchmarks.results import arguments, markdown, record, short, spread, target_cells, versions
from benchmarks.workloads import WORKLOADS, data_of, from_json
from utils import peak_of_process

OURS = "Rawtree"
NAMES = {  # {peer: {variant: its name in the tables}}
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
CONVOLUTIONAL = ("convnext", "resnet", "net")  # channels_last changes nothing in others
PACKAGES = ("optax", "flax", "equinox", "dm-haiku", "keras", "torch")
TURN = 0.5  # seconds of measured training per turn, in whole epochs
# How far a peer may differ from ours: a factor, an absolute difference, a relative difference.
TOLERANCES = {"loss": 2.0, "accuracy": 0.1, "parameters": 0.01}
JAX_PEERS = ("Flax NNX", "Equinox", "Haiku", "Keras on JAX")
# {workload: {these peers: the multiple of the fastest one's speed that ours should reach}}
SPEED_TARGETS = {
    "convnext": {("Flax NNX", "Equinox", "Keras on JAX"): 11, ("PyTorch, compiled",): 2.2},
    "resnet": {JAX_PEERS: 1.3, ("PyTorch",): 0.65},
    "vit": {JAX_PEERS: 1.7, ("PyTorch, compiled",): 1.2},
    "mlp": {JAX_PEERS: 2, ("PyTorch",): 3},
    "mobilenet_v1": {
        ("Flax NNX",): 9,
        ("PyTorch", "PyTorch, channels last", "PyTorch, compiled"): 0.9,
    },
    "gpt": {("Flax NNX",): 2, ("PyTorch", "PyTorch, compiled"): 1.2},
    "gpt_short": {("PyTorch", "PyTorch, compiled"): 1.5},
}
# Each workload's peer, and the most peak memory as a multiple of that peer's.
MEMORY_TARGETS = {"convnext": ("Flax NNX", 1.2)}
CHART = Path(__file__).parents[1] / "docs" / "speed.png"
# {whether it is ours: (colour of the bar, colour of what huge pages add)}
COLOURS = {True: ("#c2410c", "#fdba74"), False: ("#475569", "#cbd5e1")}
NOTES = """\
Ratios compare two consecutive turns: median (smallest - largest). Huge pages are enabled by \
`GLIBC_TUNABLES=glibc.malloc.hugetlb=1`; both sides of a ratio use them, or neither does. \
Memory is that of training alone."""


class Training:
    """A framework's training of a workload, in a worker process."""

    def __init__(self, peer, variant, workload, folder=None):
        self.workload = from_json(workload)
        self.data = data_of(self.workload, folder)
        module = import_module(f"benchmarks.peers.{peer}")
        self.trainer = module.trainer(self.workload, self.data, variant)
        self.epochs, self.results = 0, None

    def parameters(self):
        return self.trainer.parameters

    def epoch(self):
        """The seconds of one epoch; after `learning` epochs the results are recorded."""
        start = time.perf_counter()
        loss = self.trainer.epoch(self.epochs)
        seconds = time.perf_counter() - start
        self.epochs += 1
        if self.epochs == self.workload.learning:
            memory = peak_of_process()  # before the evaluation, so that it counts training alone
            self.results = {"loss": loss, "accuracy": self.trainer.accuracy(), "memory": memory}
        return seconds

    def turn(self):
        """Images or tokens per second, after one unmeasured epoch: while the others ran, the
        caches and pages of this process went cold."""
        self.epoch()
        seconds = [self.epoch()]
        while sum(seconds) < TURN:
            seconds.append(self.epoch())
        size = self.workload.batch_size
        examples = len(self.data["train"][0]) // size * size
        return self.workload.units * examples * len(seconds) / sum(seconds)

    def accuracy_after_epoch(self, seed):
        self.trainer.epoch(seed)
        return self.trainer.accuracy()

    def learned(self):
        """{"loss", "accuracy", "memory"} after `learning` epochs."""
        while self.results is None:
            self.epoch()
        return self.results

    def memory(self):
        """{"memory"} up to now, with the other results if they are already recorded."""
        return self.results or {"memory": peak_of_process()}

    def device_memory(self):
        return self.trainer.device_memory()


class Runner:
    """A Training in a worker that has trained for one epoch, and what it has measured."""

    def __init__(self, peer, variant, workload, folder=None, huge_pages=False, **options):
        words = peer, variant, workload._asdict(), folder
        target = "benchmarks.training:Training"
        self.worker = Worker(target, *words, huge_pages=huge_pages, **options)
        self.parameters = self.worker.call("parameters")
        self.worker.call("epoch")
        self.first_epoch = (
            time.perf_counter() - self.worker.started
        )  # from the start of the process
        self.rates = []  # images or tokens per second in each turn
        self.multiples = []  # our speed in the turn right before, as a multiple of this one's
        # Huge pages do not change what is learned, so only the memory is measured with them.
        self.last_request = "memory" if huge_pages else "learned"

    def take_turn(self):
        """Images or tokens per second."""
        self.rates.append(self.worker.call("turn"))
        return self.rates[-1]

    def end(self):
        self.learned = self.worker.call(self.last_request)
        self.worker.close()


class Comparison:
    """The runners of a workload, {name: {huge pages: Runner}}; in `missing`, {name: why} of the
    frameworks that cannot train it. If ours cannot, the program ends."""

    def __init__(self, title, workload, peers, folder):
        self.title, self.runners, self.missing = title, {}, {}
        forms = {name: (peer, v) for peer in peers for v, name in NAMES[peer].items()}
        forms = {OURS: ("ours", "")} | {
            name: form
            for name, form in forms.items()
            if form[0] in workload.peers
            and ("channels_last" not in form[1] or workload.model in CONVOLUTIONAL)
        }

        def start(name, huge):
            print_progress(f"{title}: starting {name}{', huge pages' if huge else ''}")
            try:
                runner = Runner(*forms[name], workload, folder, huge_pages=huge)
                self.runners.setdefault(name, {})[huge] = runner
            except WorkerError as error:
                print_progress(f"{name}: {error}")
                self.missing[name] = str(error)

        # One by one without huge pages, since the tables show this time, then two at a time.
        for name in forms:
            start(name, False)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda name: start(name, True), list(self.runners)))
        if OURS in self.missing:
            raise SystemExit(1)
        for name in self.missing:
            self.runners.pop(name, None)

    def measure(self, rounds):
        for i in range(rounds):
            print_progress(f"{self.title}: round {i + 1} of {rounds}")
            for name in [name for name in self.runners if name != OURS][:: -1 if i % 2 else 1]:
                # One turn of ours and one of a peer right after it: the speed of a shared machine
                # varies.
                for huge, runner in self.runners[name].items():
                    rate = self.runners[OURS][huge].take_turn()
                    runner.multiples.append(rate / runner.take_turn())
        for pair in self.runners.values():
            for runner in pair.values():
                runner.end()


def main():
    args = arguments(
        "training", __doc__, peers=list(NAMES), workloads=list(WORKLOADS), rounds=7, data=None
    )
    measured, messages = {}, []
    for name in args.workloads:
        workload = WORKLOADS[name]
        compared = Comparison(name, workload, args.peers, args.data)
        compared.measure(args.rounds)
        measured[name] = compared.runners
        messages += [f"{name}: {message}" for message in unfair_peers(compared.runners)]
        record(args, f"Training: {name}", *section(name, workload, compared, args.data))
    if list(measured) == list(WORKLOADS) and args.peers == list(NAMES):
        draw(measured)
    if messages:
        sys.exit("\n".join(messages))


def section(name, workload, compared, folder):
    """The blocks of a workload's section."""
    images = "MNIST" if folder else "the digits that the program draws"
    data = "stories that the program writes" if workload.is_text else images
    sizes = ", ".join(f"{key} {value}" for key, value in workload.args.items())
    shape = " x ".join(map(str, workload.shape))
    recipe = f"batch {workload.batch_size}, {shape}, AdamW, float32, {data}"
    return (
        f"{workload.model} of {sizes}, {recipe}.",
        speed_table(workload.unit, compared),
        learning_table(workload, compared.runners),
        targets_table(name, workload.unit, compared.runners),
        f"{NOTES} {versions(*PACKAGES)}.",
    )


def speed_table(unit, compared):
    """Speeds, and ours as a multiple of each, under the same conditions."""
    rows = []
    for name, pair in compared.runners.items():
        cells = [
            (spread(each.rates), "1" if name == OURS else spread(each.multiples))
            for each in pair.values()
        ]
        rows.append([name, *cells[0], *cells[1]])
    rows += [[name, f"none: {why}", "", "", ""] for name, why in compared.missing.items()]
    head = ["", f"{unit}/s", "ours / theirs", f"{unit}/s, huge pages", "ours / theirs, huge pages"]
    return markdown(head, rows)


def learning_table(workload, runners):
    """What was learned, and how much time and memory it took."""
    rows = []
    for name, pair in runners.items():
        plain = pair[False]
        memory = [f"{each.learned['memory'] / 2**20:,.0f}" for each in pair.values()]
        learned = [f"{plain.learned['loss']:.3f}", f"{plain.learned['accuracy']:.3f}"]
        rows.append([name, f"{plain.parameters:,}", *learned, short(plain.first_epoch), *memory])
    loss = f"loss after {workload.learning} epochs of {workload.examples:,} examples"
    first_epoch = "s from process start to the end of the first epoch"
    head = ["", "parameters", loss, "test accuracy", first_epoch]
    return markdown([*head, "peak memory, MiB", "with huge pages"], rows)


def targets_table(name, unit, runners):
    """The targets of a workload, and whether they are reached without and with huge pages."""
    rows = []
    for peers, at_least in SPEED_TARGETS[name].items():
        values = [smallest_multiple(runners, peers, huge) for huge in (False, True)]
        rows.append(target_row(f"{unit}/s, ours / {' or '.join(peers)}", values, at_least, False))
    if name in MEMORY_TARGETS:
        peer, at_most = MEMORY_TARGETS[name]
        values = [memory_ratio(runners, peer, huge) for huge in (False, True)]
        rows.append(target_row(f"peak memory, ours / {peer}", values, at_most, True))
    return markdown(["target", "", "measured", "reached", "with huge pages", "reached"], rows)


def target_row(label, values, bound, at_most):
    plain, huge = (target_cells(value, bound, at_most) for value in values)
    return [label, *plain, *huge[1:]]


def smallest_multiple(runners, peers, huge):
    """Our speed as a multiple of the fastest of these peers; None if none was measured."""
    measured = [runners[name][huge].multiples for name in peers if name in runners]
    return min(map(statistics.median, measured), default=None)


def memory_ratio(runners, peer, huge):
    if peer not in runners:
        return None
    return runners[OURS][huge].learned["memory"] / runners[peer][huge].learned["memory"]


def unfair_peers(runners):
    """One message for each peer whose model differs from ours or does not learn as ours does."""
    ours, messages = runners[OURS][False], []
    for name, pair in runners.items():
        for quantity, difference in differences(ours, pair[False]).items():
            if not difference <= TOLERANCES[quantity]:  # written so that NaN fails too
                messages.append(
                    f"{name}: {quantity} differs from ours by {difference:.3g}, "
                    f"at most {TOLERANCES[quantity]} is allowed"
                )
    return messages


def differences(ours, peer):
    """How far a peer's size and learning results are from ours."""
    losses = ours.learned["loss"], peer.learned["loss"]
    return {
        "loss": max(losses) / min(losses),
        "accuracy": abs(peer.learned["accuracy"] - ours.learned["accuracy"]),
        "parameters": abs(peer.parameters / ours.parameters - 1),
    }


def draw(measured):
    """Draw the rates of {workload: {name: {huge pages: Runner}}}, one panel per workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-len(measured) // 2)
    figure, panels = pyplot.subplots(rows, 2, figsize=(10, 3.1 * rows), layout="constrained")
    for panel in panels.flat[len(measured) :]:
        panel.axis("off")
    for panel, (workload, runners) in zip(panels.flat, measured.items(), strict=False):
        for name, pair in runners.items():
            rate, huge = (statistics.median(pair[pages].rates) for pages in (False, True))
            bar, added = COLOURS[name == OURS]
            panel.barh(name, huge, color=added)
            panel.barh(name, min(rate, huge), color=bar)
            panel.text(huge, name, f" {huge:,.0f}", va="center", fontsize=9)
        panel.invert_yaxis()
        panel.set_title(workload, fontsize=11, loc="left", fontweight="bold")
        panel.set_xlim(0, 1.18 * panel.dataLim.x1)
        panel.set_xticks([])
        panel.spines[["top", "right", "bottom"]].set_visible(False)
    figure.suptitle("Images or tokens per second on the CPU; the pale part is what huge pages add")
    figure.savefig(CHART, dpi=110)


if __name__ == "__main__":
    main()
