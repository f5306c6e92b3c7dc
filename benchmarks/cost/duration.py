"""Estimates how long a step takes from its shapes: matrix products at a fraction of the peak,
memory traffic, and collectives along rings."""

from typing import NamedTuple

from benchmarks.cost.hardware import link
from benchmarks.cost.memory import activations
from benchmarks.cost.vit_step import flops

EFFICIENCY = 0.7  # of the peak, in large matrix products: an assumption
# Numbers read or written per parameter: the gradient is written (1); it is read with the parameter
# and two moments (4), and the three new values are written (3); these four are checked for being
# finite (4); then the new and the old values are read (3 + 3) and the kept ones are written (3).
PASSES = 1 + 4 + 3 + 4 + 3 + 3 + 3
# The activations that a block stores are written and read, and so is a gradient of the same size.
VISITS = 4
LATENCY = 10e-6  # seconds to start a collective, one for each block: an assumption


class Duration(NamedTuple):
    """Seconds of a step. The collectives of weights and gradients overlap with arithmetic, those
    between products do not."""

    products: float
    memory: float
    all_reduce: float  # of gradients over `data`
    gather: float  # of weights over `fsdp`, twice, and the reduce-scatter of their gradients
    tensor: float  # all-reduces between the products of a block
    mfu: float  # the model's own operations, as a fraction of the peak

    @property
    def exposed(self):
        """Seconds that collectives add to the step."""
        return exposed(self.products + self.memory, self.all_reduce + self.gather, self.tensor)

    @property
    def total(self):
        return self.products + self.memory + self.exposed


def exposed(arithmetic, overlapping, blocking):
    """Seconds of collectives that arithmetic does not hide."""
    return blocking + max(0.0, overlapping - arithmetic)


def duration(layout, device, efficiency=EFFICIENCY):
    step, devices = layout.step, layout.batch_shards * layout.sizes["tensor"]
    model, computed = (count / devices for count in flops(step))
    peak = device.flops[step.precision]
    traffic = VISITS * step.depth * activations(layout).block + 4 * PASSES * layout.numbers()
    parts = Duration(
        computed / (efficiency * peak),
        traffic / device.bandwidth,
        gradients_time(layout, device),
        weights_time(layout, device),
        products_time(layout, device),
        0.0,
    )
    return parts._replace(mfu=model / peak / parts.total)


def all_reduce(size, members, stride, device):
    """Seconds on a ring, which every byte passes twice."""
    return 2 * (members - 1) / members * size / link(device, members, stride)


def all_gather(size, members, stride, device):
    """Seconds on a ring, which every byte passes once; a reduce-scatter takes as long."""
    return (members - 1) / members * size / link(device, members, stride)


def gradients_time(layout, device):
    """All-reduces of the gradients, in the type that the model computes in: of leaves that `fsdp`
    shards over `data`, of the others over `data` and `fsdp`."""
    sizes, itemsize = layout.sizes, layout.step.itemsize
    sharded = itemsize * sum(
        leaf.times * leaf.held for leaf in layout.leaves.values() if "fsdp" in leaf.spec
    )
    others = itemsize * layout.numbers() - sharded
    return (
        all_reduce(sharded, sizes["data"], sizes["fsdp"] * sizes["tensor"], device)
        + all_reduce(others, layout.batch_shards, sizes["tensor"], device)
        + latency(layout.batch_shards, layout.step.depth)
    )


def weights_time(layout, device):
    """All-gathers for the forward and the backward pass, and a reduce-scatter of the gradients."""
    sizes = layout.sizes
    gathered = layout.step.itemsize * sum(
        leaf.times * leaf.gathered for leaf in layout.leaves.values() if "fsdp" in leaf.spec
    )
    seconds = 3 * all_gather(gathered, sizes["fsdp"], sizes["tensor"], device)
    return seconds + latency(sizes["fsdp"], 3 * layout.step.depth)


def products_time(layout, device):
    """All-reduces of the residual stream: two per block in the forward and two in the backward
    pass; with remat, one more when attention is recomputed."""
    tensor, count = layout.sizes["tensor"], layout.step.depth * (5 if layout.step.remat else 4)
    seconds = count * all_reduce(activations(layout).stream, tensor, 1, device)
    return seconds + latency(tensor, count)


def latency(members, collectives):
    """Seconds to start this many collectives."""
    return LATENCY * collectives if members > 1 else 0.0
