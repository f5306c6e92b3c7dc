"""Where the time of a training step goes: XLA's own profile of an epoch of each workload, by part and by kind of operation.

python -m benchmarks.shares [--workloads convnext,resnet,vit,mlp] [--data DIR]
"""

import argparse
import collections
import importlib
import re
import tempfile
import time
from functools import partial
from pathlib import Path

import jax

from benchmarks.results import markdown, record
from benchmarks.workloads import WORKLOADS, data_for
from data_loader.base import Arrays
from training.fit import compose
from training.loss import cross_entropy
from training.metrics import accuracy
from training.objective import supervised
from training.optimizers import adamw
from training.options import LoaderOptions
from training.runner import Runner
from training.update import gradient_update

KINDS = {  # of an operation, by what XLA calls it and by what of JAX's it came from, the first that fits
    "convolutions": r"convolution|conv_general",
    "matrix products": r"dot",
    "sums and maxima": r"reduce",
    "gathers": r"gather|dynamic",
    "moving of numbers": r"copy|transpose|pad|slice|concatenate|reshape",
}
OTHER = "other arithmetic"
PARTS = {"backward": r"transpose\(", "forward": r"jvp\("}
LAST, UNNAMED = (
    "update and its books",
    "XLA's own",
)  # what comes from no line of the program, such as another layout


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--data", help="the folder that holds mnist/ (default: drawn digits)")
    args = parser.parse_args()
    rows = []
    for name in args.workloads.split(","):
        runner, steps = engine(WORKLOADS[name], data_for(WORKLOADS[name], args.data)["train"])
        seconds, spent = profiled(runner, steps)
        total = sum(spent.values())
        for part in ("forward", "backward", LAST, UNNAMED):
            shares = {kind: spent[part, kind] / total for kind in (*KINDS, OTHER)}
            cells = [f"{100 * share:.0f} %" for share in (sum(shares.values()), *shares.values())]
            rows.append([name, f"{1e3 * seconds:.3g}", part, *cells])
    head = ["workload", "ms a step", "part", "all of it", *KINDS, OTHER]
    record(
        "Where the time goes",
        "python -m benchmarks.shares",
        markdown(head, rows) + f"\n\nOn {jax.devices()[0].device_kind}.",
    )


def engine(workload, train):
    """(a Runner of the workload, how many steps an epoch has)."""
    factory = getattr(importlib.import_module(f"model.{workload.model}"), workload.model)
    model = factory(workload.shape, 10, **workload.args)
    objective = compose(supervised, model, cross_entropy, {"accuracy": accuracy}, (), ())
    update = partial(
        gradient_update, objective, adamw(workload.lr, weight_decay=workload.weight_decay)
    )
    runner = Runner(
        model,
        objective,
        update,
        {"train": Arrays(*train)},
        LoaderOptions(batch_size=workload.batch_size),
    )
    return runner, runner.feed.steps


def profiled(runner, steps):
    """(seconds of a step without the profiler, {(part, kind): time}) of an epoch."""
    epoch(runner)
    start = time.perf_counter()
    epoch(runner)
    seconds = (time.perf_counter() - start) / steps
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            epoch(runner)
        file = next(Path(folder).rglob("*.xplane.pb"))
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        events = [
            (event.name, event.duration_ns)
            for plane in planes
            for line in plane.lines
            for event in line.events
        ]
    origins, spent = origins_of(runner.program.compiled.as_text()), collections.Counter()
    for name, duration in events:
        if name in origins:
            spent[origins[name]] += duration
    return seconds, spent


def epoch(runner):
    runner.begin(epoch=1)
    taken = 1
    while taken:
        taken, _ = runner.train(10**9)
    jax.block_until_ready(runner.states)


def origins_of(text):
    """{operation: (part, kind)} of a compiled program, by its text; loops and calls are left out, since what is inside counts."""
    found = {}
    for line in text.splitlines():
        if not (match := re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = .*? ([\w\-]+)\(", line)):
            continue
        (name, operation), source = match.groups(), re.search(r'op_name="([^"]*)"', line)
        source = source.group(1) if source else ""
        if operation not in ("while", "call", "conditional"):
            part = next(
                (part for part, pattern in PARTS.items() if re.search(pattern, source)),
                LAST if source else UNNAMED,
            )
            told = f"{name} {operation} {source.rsplit('/', 1)[-1]}"
            kind = next(
                (kind for kind, pattern in KINDS.items() if re.search(pattern, told)), OTHER
            )
            found[name] = part, kind
    return found


if __name__ == "__main__":
    main()
