"""How long a step takes, from its shapes: products at a share of the peak, what goes through memory, exchanges along rings."""

from typing import NamedTuple

from benchmarks.cost.hardware import link
from benchmarks.cost.memory import activations
from benchmarks.cost.vit_step import flops

EFFICIENCY = 0.7  # of the peak, in large products: an assumption
# Each parameter's gradient is written, read with the parameter and two moments, and three new ones are written; all four are
# looked at for what is not finite; then new and old ones are read and the ones that stand are written.
PASSES = 1 + 4 + 3 + 4 + 3 + 3 + 3
# What a block keeps is written and read again, and a gradient of the same size with it.
VISITS = 4
LATENCY = 10e-6  # seconds to begin an exchange, one for each block: an assumption


class Duration(NamedTuple):
    """Seconds of a step. The exchanges of weights and gradients go on beside arithmetic, those within products do not."""

    products: float
    memory: float
    all_reduce: float  # gradients over `data`
    gather: float  # weights over `fsdp`, twice, and their gradients added up and scattered
    tensor: float  # all-reduces between the products of a block
    mfu: float  # of the peak, what the model's own operations take of the step

    @property
    def exposed(self):
        """What exchanges add to the step."""
        return exposed(self.products + self.memory, self.all_reduce + self.gather, self.tensor)

    @property
    def total(self):
        return self.products + self.memory + self.exposed


def exposed(busy, beside, within):
    """Seconds of exchanges that arithmetic does not hide."""
    return within + max(0.0, beside - busy)


def duration(layout, device, efficiency=EFFICIENCY):
    step, devices = layout.step, layout.split * layout.sizes["tensor"]
    model, computed = (number / devices for number in flops(step))
    peak = device.flops[step.precision]
    moved = VISITS * step.depth * activations(layout).block + 4 * PASSES * layout.numbers()
    parts = Duration(
        computed / (efficiency * peak),
        moved / device.bandwidth,
        of_gradients(layout, device),
        of_weights(layout, device),
        of_products(layout, device),
        0.0,
    )
    return parts._replace(mfu=model / peak / parts.total)


def all_reduce(size, members, stride, device):
    """A ring: every number goes round twice."""
    return 2 * (members - 1) / members * size / link(device, members, stride)


def all_gather(size, members, stride, device):
    """A ring: every number goes round once; to add up and scatter takes as long."""
    return (members - 1) / members * size / link(device, members, stride)


def of_gradients(layout, device):
    """All-reduce over `data` of what a device holds, and over `fsdp` too of what that leaves whole; as the products make them, in
    the type that the model computes in."""
    sizes, item = layout.sizes, layout.step.itemsize
    cut = item * sum(
        leaf.times * leaf.held for leaf in layout.leaves.values() if "fsdp" in leaf.cut
    )
    whole = item * layout.numbers() - cut
    over_data = all_reduce(cut, sizes["data"], sizes["fsdp"] * sizes["tensor"], device)
    return (
        over_data
        + all_reduce(whole, layout.split, sizes["tensor"], device)
        + begun(layout.split, layout.step.depth)
    )


def of_weights(layout, device):
    """All-gathers for the forward and for the backward pass, and a reduce-scatter of gradients."""
    sizes = layout.sizes
    whole = layout.step.itemsize * sum(
        leaf.times * leaf.whole for leaf in layout.leaves.values() if "fsdp" in leaf.cut
    )
    return 3 * all_gather(whole, sizes["fsdp"], sizes["tensor"], device) + begun(
        sizes["fsdp"], 3 * layout.step.depth
    )


def of_products(layout, device):
    """All-reduces of the residual stream: two a block, forward and backward; computed again, attention's once more."""
    tensor, times = layout.sizes["tensor"], layout.step.depth * (5 if layout.step.remat else 4)
    return times * all_reduce(activations(layout).stream, tensor, 1, device) + begun(tensor, times)


def begun(members, exchanges):
    """Seconds to begin so many."""
    return LATENCY * exchanges if members > 1 else 0.0
