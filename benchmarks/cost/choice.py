"""Which mesh, and with it which preset, trains a model fastest on so many devices, if it fits at all."""

import math
from typing import NamedTuple

from benchmarks.cost.duration import Duration, duration
from benchmarks.cost.memory import Memory, memory
from benchmarks.cost.vit_step import Layout, laid_out

USABLE = 0.9  # of a device's memory: the rest goes to the runtime, and is lost between arrays
WORTH = 1.1  # what a more involved arrangement must gain: the times are no finer than that
PRESETS = ("data_parallel", "fsdp", "tensor")
MOST = 2**14  # devices that are thought of


class Plan(NamedTuple):
    """A step that was priced."""

    layout: Layout
    memory: Memory
    time: Duration

    def devices(self):
        return math.prod(self.layout.sizes.values())

    def involved(self):
        """How much there is to it."""
        sizes = self.layout.sizes
        return (
            PRESETS.index(self.layout.preset),
            sizes["tensor"],
            self.layout.step.remat,
            sizes["fsdp"],
        )


def priced(step, shape, device, efficiency):
    layout = laid_out(step, shape)
    return Plan(layout, memory(layout), duration(layout, device, efficiency))


def plans(step, devices, device, efficiency):
    """Every mesh over all devices, with and without remat; `tensor` stays among devices that the fast links join."""
    for tensor in powers(min(devices, device.near, 16)):
        for fsdp in powers(devices // tensor):
            data = devices // tensor // fsdp
            if data * fsdp * tensor != devices or step.batch % (data * fsdp) or step.heads % tensor:
                continue
            for remat in (False, True):
                yield priced(step._replace(remat=remat), (data, fsdp, tensor), device, efficiency)


def powers(most):
    """1, 2, 4, ... up to a number."""
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def fits(plan, device):
    return plan.memory.total <= USABLE * device.memory


def choose(step, devices, device, efficiency):
    """(the plan to take, or None; the one that needs the least memory). Of those about as fast as the fastest, the simplest."""
    found = list(plans(step, devices, device, efficiency))
    least = min(found, key=lambda plan: plan.memory.total, default=None)
    fitting = [plan for plan in found if fits(plan, device)]
    if not fitting:
        return None, least
    fastest = min(plan.time.total for plan in fitting)
    return min(
        (plan for plan in fitting if plan.time.total <= WORTH * fastest), key=Plan.involved
    ), least


def enough(step, devices, device, efficiency):
    """The plan on the fewest devices that it fits on, doubling their number, or None."""
    while devices <= MOST:
        if found := choose(step, devices, device, efficiency)[0]:
            return found
        devices *= 2
    return None
