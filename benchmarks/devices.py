"""What splitting a step over a mesh costs: the same step of a vision transformer over meshes of 8
simulated devices, which share the cores that one device has alone. Each mesh is a run of `fit` in a
process of its own; they take turns.

python -m benchmarks.devices [--rounds 15]
"""

from functools import partial

import jax

from benchmarks.harness import EIGHT_DEVICES, Worker, seconds, take_turns
from benchmarks.peers.ours import Trainer
from benchmarks.results import arguments, markdown, ratios, record, spread
from benchmarks.workloads import COLOURED, Workload, data_of
from utils import format_bytes

STEPS, BATCH = 4, 64  # of an epoch, which is a turn
WIDTH = {"patch": 4, "dim": 128, "depth": 4, "heads": 4}
WORKLOAD = Workload("vit", WIDTH, COLOURED, BATCH, 0.001, examples=STEPS * BATCH, random=True)
MESHES = {
    "one device": None,
    "data 8": {"data": 8},
    "fsdp 8": {"fsdp": 8},
    "data 2 x fsdp 4": {"data": 2, "fsdp": 4},
    "data 4 x tensor 2": {"data": 4, "tensor": 2},
}
NOTE = f"""\
A vision transformer ({", ".join(f"{name} {value}" for name, value in WIDTH.items())}) on batches \
of {BATCH} images of 32x32x3, over meshes of 8 simulated devices: the work is the same, so the \
ratio shows what splitting it and communicating cost, and what more threads gain. State: \
parameters, moments and sums on one device. Median (smallest - largest); ratios are computed round \
by round."""


class Mesh:
    """A run on a mesh, in a worker process."""

    def __init__(self, mesh):
        self.trainer = Trainer(WORKLOAD, data_of(WORKLOAD), **({"mesh": mesh} if mesh else {}))

    def milliseconds(self):
        """Of a step."""
        return 1e3 * seconds(self.trainer.epoch) / STEPS

    def state_bytes(self):
        """The bytes of the state on the first device."""
        leaves = jax.tree.leaves(self.trainer.turns.run.states())
        shards = [leaf.addressable_shards[0].data for leaf in leaves]
        return sum(shard.nbytes for shard in shards)


def main():
    args = arguments("devices", __doc__, rounds=15)
    workers = {}
    for name, mesh in MESHES.items():
        variables = EIGHT_DEVICES if mesh else {}
        workers[name] = Worker("benchmarks.devices:Mesh", mesh, variables=variables)
    calls = {name: partial(worker.call, "milliseconds") for name, worker in workers.items()}
    times, rows = take_turns(calls, args.rounds), []
    for name, values in times.items():
        ratio = spread(ratios(values, times["one device"]), "{:.3f}".format)
        state = format_bytes(workers[name].call("state_bytes"))
        workers[name].close()
        rows.append([name, spread(values), ratio, state])
    head = ["mesh", "ms per step", "x one device", "state"]
    record(args, "Devices", markdown(head, rows), NOTE)


if __name__ == "__main__":
    main()
