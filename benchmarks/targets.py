"""Speed and memory targets of training against the peers, and whether the comparison is fair."""

import statistics
from typing import NamedTuple

from benchmarks.results import markdown, short

OURS = "Rawtree"
JAX_PEERS = ("Flax NNX", "Equinox", "Haiku", "Keras on JAX")
# How far a peer may differ from ours: a factor, an absolute difference, a relative difference.
TOLERANCES = {"loss": 2.0, "accuracy": 0.1, "parameters": 0.01}


class SpeedTarget(NamedTuple):
    """At least this many times the images per second of the fastest of these peers."""

    peers: tuple[str, ...]
    at_least: float


SPEED_TARGETS = {
    "convnext": (
        SpeedTarget(("Flax NNX", "Equinox", "Keras on JAX"), 11),
        SpeedTarget(("PyTorch, compiled",), 2.2),
    ),
    "resnet": (SpeedTarget(JAX_PEERS, 1.3), SpeedTarget(("PyTorch",), 0.65)),
    "vit": (SpeedTarget(JAX_PEERS, 1.7), SpeedTarget(("PyTorch, compiled",), 1.2)),
    "gpt": (
        SpeedTarget(("Flax NNX",), 2),
        SpeedTarget(("PyTorch", "PyTorch, compiled"), 1.2),
    ),
    "gpt_short": (SpeedTarget(("PyTorch", "PyTorch, compiled"), 1.5),),
    "mobilenet_v1": (
        SpeedTarget(("Flax NNX",), 9),
        SpeedTarget(("PyTorch", "PyTorch, channels last", "PyTorch, compiled"), 0.9),
    ),
    "mlp": (SpeedTarget(JAX_PEERS, 2), SpeedTarget(("PyTorch",), 3)),
}
# Each workload's peer, and the most peak memory as a multiple of that peer's.
MEMORY_TARGETS = {"convnext": ("Flax NNX", 1.2)}


def targets_table(workload, clients):
    """The targets of a workload, and whether they are reached without and with huge pages."""
    rows = []
    unit = "tokens" if workload.startswith("gpt") else "images"
    for peers, at_least in SPEED_TARGETS[workload]:
        values = [smallest_multiple(clients, peers, huge) for huge in (False, True)]
        reached = [value is not None and value >= at_least for value in values]
        label = f"{unit}/s, ours / {' or '.join(peers)}"
        rows.append([label, f"at least {at_least}", *result_cells(values, reached)])
    if workload in MEMORY_TARGETS:
        peer, at_most = MEMORY_TARGETS[workload]
        values = [memory_ratio(clients, peer, huge) for huge in (False, True)]
        reached = [value is not None and value <= at_most for value in values]
        label = f"peak memory, ours / {peer}"
        rows.append([label, f"at most {at_most}", *result_cells(values, reached)])
    return markdown(["target", "", "measured", "reached", "with huge pages", "reached"], rows)


def smallest_multiple(clients, peers, huge):
    """Our speed as a multiple of the fastest of these peers; None if none was measured."""
    multiples = (
        statistics.median(clients[name][huge].multiples) for name in peers if name in clients
    )
    return min(multiples, default=None)


def memory_ratio(clients, peer, huge):
    if peer not in clients:
        return None
    return clients[OURS][huge].learned["memory"] / clients[peer][huge].learned["memory"]


def result_cells(values, reached):
    """Two cells for each measurement: its value, and whether the target is reached."""
    cells = []
    for value, is_reached in zip(values, reached, strict=True):
        if value is None:
            cells += ["-", "not measured"]
        else:
            cells += [short(value), "yes" if is_reached else "**no**"]
    return cells


def unfair_peers(clients):
    """One message for each peer whose model differs from ours or does not learn as ours does."""
    ours, messages = clients[OURS][False], []
    for name, pair in clients.items():
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
        "loss": max(losses[0] / losses[1], losses[1] / losses[0]),
        "accuracy": abs(peer.learned["accuracy"] - ours.learned["accuracy"]),
        "parameters": abs(peer.parameters / ours.parameters - 1),
    }
