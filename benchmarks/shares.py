"""Where the time of a training step goes: XLA's own profile of one epoch of each workload, by part
of the step and by kind of operation.

python -m benchmarks.shares [--workloads convnext,resnet,vit,mlp] [--data DIR]
"""

import argparse
import collections
import re
import tempfile
import time
from pathlib import Path

import jax

from benchmarks.peers.ours import factory_of
from benchmarks.results import markdown, record
from benchmarks.workloads import WORKLOADS, data_for
from data_loader.base import Arrays
from training.engine import Trainer
from training.fit import recipe_of
from training.optimizers import adamw

# The kind of an operation: the first pattern found in its XLA name or in its JAX name.
KINDS = {
    "convolutions": r"convolution|conv_general",
    "matrix products": r"dot",
    "sums and maxima": r"reduce",
    "gathers": r"gather|dynamic",
    "data movement": r"copy|transpose|pad|slice|concatenate|reshape",
}
OTHER = "other arithmetic"
PARTS = {"backward": r"transpose\(", "forward": r"jvp\("}
# "XLA's own" operations, such as a change of layout, come from no line of the program.
UPDATE, UNNAMED = "update and metrics", "XLA's own"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--data", help="the folder that holds mnist/ (default: drawn digits)")
    args = parser.parse_args()
    rows = []
    for name in args.workloads.split(","):
        trainer, steps = trainer_of(WORKLOADS[name], data_for(WORKLOADS[name], args.data)["train"])
        seconds, nanoseconds = profiled(trainer, steps)
        total = sum(nanoseconds.values())
        for part in ("forward", "backward", UPDATE, UNNAMED):
            shares = [nanoseconds[part, kind] / total for kind in (*KINDS, OTHER)]
            cells = [f"{100 * share:.0f} %" for share in (sum(shares), *shares)]
            rows.append([name, f"{1e3 * seconds:.3g}", part, *cells])
    head = ["workload", "ms per step", "part", "total", *KINDS, OTHER]
    table = f"{markdown(head, rows)}\n\nOn {jax.devices()[0].device_kind}."
    record("Where the time goes", "python -m benchmarks.shares", table)


def trainer_of(workload, train):
    """(a started Trainer of the workload, its number of steps per epoch)."""
    optimizer = adamw(workload.lr, weight_decay=workload.weight_decay)
    model = factory_of(workload.model)(workload.shape, workload.classes, **workload.args)
    recipe = recipe_of(model, optimizer=optimizer, batch_size=workload.batch_size)
    sets = {"train": Arrays(*train)}
    trainer = Trainer(recipe, sets)
    trainer.start()
    return trainer, trainer.feed.steps


def profiled(trainer, steps):
    """(seconds per step without the profiler, {(part, kind): nanoseconds of an epoch})."""
    epoch(trainer)
    start = time.perf_counter()
    epoch(trainer)
    seconds = (time.perf_counter() - start) / steps
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            epoch(trainer)
        file = next(Path(folder).rglob("*.xplane.pb"))
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        events = [
            (event.name, event.duration_ns)
            for plane in planes
            for line in plane.lines
            for event in line.events
        ]
    origins, nanoseconds = origins_of(trainer.program.compiled.as_text()), collections.Counter()
    for name, duration in events:
        if name in origins:
            nanoseconds[origins[name]] += duration
    return seconds, nanoseconds


def epoch(trainer):
    trainer.begin(epoch=1)
    taken = 1
    while taken:
        taken, _ = trainer.train(10**9)
    jax.block_until_ready(trainer.states)


def origins_of(text):
    """{operation: (part, kind)} from the text of a compiled program; loops and calls are left out,
    since the operations inside them are counted."""
    origins = {}
    for line in text.splitlines():
        if not (match := re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = .*? ([\w\-]+)\(", line)):
            continue
        (name, operation), source = match.groups(), re.search(r'op_name="([^"]*)"', line)
        source = source.group(1) if source else ""
        if operation not in ("while", "call", "conditional"):
            part = first_match(PARTS, source, UPDATE if source else UNNAMED)
            names = f"{name} {operation} {source.rsplit('/', 1)[-1]}"
            origins[name] = part, first_match(KINDS, names, OTHER)
    return origins


def first_match(patterns, text, default):
    """The first name whose pattern occurs in the text."""
    return next((name for name, pattern in patterns.items() if re.search(pattern, text)), default)


if __name__ == "__main__":
    main()
