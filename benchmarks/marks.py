"""What training must reach against the peers, and whether they were compared fairly."""

import statistics
from typing import NamedTuple

from benchmarks.results import markdown, short

OURS = "Rawtree"
JAX_PEERS = ("Flax NNX", "Equinox", "Haiku", "Keras on JAX")
ALIKE = {
    "loss": 2.0,
    "accuracy": 0.1,
    "parameters": 0.01,
}  # how far a peer's may be off: a factor, a difference, a share


class Mark(NamedTuple):
    """At least so many times the images per second of the fastest of some peers."""

    peers: tuple[str, ...]
    least: float


MARKS = {
    "convnext": (
        Mark(("Flax NNX", "Equinox", "Keras on JAX"), 11),
        Mark(("PyTorch, compiled",), 2.2),
    ),
    "resnet": (Mark(JAX_PEERS, 1.3), Mark(("PyTorch",), 0.65)),
    "vit": (Mark(JAX_PEERS, 1.7), Mark(("PyTorch, compiled",), 1.2)),
    "mlp": (Mark(JAX_PEERS, 2), Mark(("PyTorch",), 3)),
}
MOST_MEMORY = {"convnext": ("Flax NNX", 1.2)}  # at most so many times the peak memory of a peer


def marks_table(workload, runners):
    """What must be reached, without and with huge pages."""
    rows = []
    for peers, least in MARKS[workload]:
        found = [least_multiple(runners, peers, huge) for huge in (False, True)]
        held = [value is not None and value >= least for value in found]
        rows.append(
            [f"images/s, ours / {' or '.join(peers)}", f"at least {least}", *verdicts(found, held)]
        )
    if workload in MOST_MEMORY:
        peer, most = MOST_MEMORY[workload]
        found = [memory_ratio(runners, peer, huge) for huge in (False, True)]
        held = [value is not None and value <= most for value in found]
        rows.append([f"peak memory, ours / {peer}", f"at most {most}", *verdicts(found, held)])
    return markdown(
        ["what it must reach", "", "found", "reached", "with huge pages", "reached"], rows
    )


def least_multiple(runners, peers, huge):
    """How many times as fast as the fastest of some peers ours is; None where there is none of them."""
    found = (statistics.median(runners[name][huge].multiples) for name in peers if name in runners)
    return min(found, default=None)


def memory_ratio(runners, peer, huge):
    return (
        runners[OURS][huge].learned["memory"] / runners[peer][huge].learned["memory"]
        if peer in runners
        else None
    )


def verdicts(found, held):
    """The cells of each measurement, and whether it holds."""
    cells = []
    for value, holds in zip(found, held, strict=True):
        cells += (
            ["-", "not measured"] if value is None else [short(value), "yes" if holds else "**no**"]
        )
    return cells


def faults(runners):
    """What makes the comparison unfair: another model, or one that does not learn as ours does."""
    ours, wrong = runners[OURS][False], []
    for name, pair in runners.items():
        for what, off in differences(ours, pair[False]).items():
            if not off <= ALIKE[what]:  # nor is a nan
                wrong.append(
                    f"{name} is not alike: its {what} is off by {off:.3g}, at most {ALIKE[what]}"
                )
    return wrong


def differences(ours, runner):
    """How far what a peer learned is from what ours learned."""
    losses = ours.learned["loss"], runner.learned["loss"]
    return {
        "loss": max(losses[0] / losses[1], losses[1] / losses[0]),
        "accuracy": abs(runner.learned["accuracy"] - ours.learned["accuracy"]),
        "parameters": abs(runner.parameters / ours.parameters - 1),
    }
