"""Chooses the mesh, and with it the preset, that trains a model fastest on a number of devices."""

import math
from typing import NamedTuple

from benchmarks.cost.duration import Duration, duration
from benchmarks.cost.memory import Memory, memory
from benchmarks.cost.vit_step import Layout, laid_out

USABLE = 0.9  # of a device's memory: the runtime and fragmentation need the rest
WORTH = 1.1  # the speedup that a more complex plan must reach: the estimates are not more precise
PRESETS = ("data_parallel", "fsdp", "tensor")
MOST_DEVICES = 2**14


class Plan(NamedTuple):
    """A step on a mesh, with its estimated cost."""

    layout: Layout
    memory: Memory
    time: Duration

    def devices(self):
        return math.prod(self.layout.sizes.values())

    def complexity(self):
        """A sort key: simpler plans come first."""
        preset, sizes = PRESETS.index(self.layout.preset), self.layout.sizes
        return preset, sizes["tensor"], self.layout.step.remat, sizes["fsdp"]


def estimate(step, shape, device, efficiency):
    layout = laid_out(step, shape)
    return Plan(layout, memory(layout), duration(layout, device, efficiency))


def plans(step, devices, device, efficiency):
    """The plans of every mesh over all devices, with and without remat; `tensor` stays among
    devices that the fast links connect."""
    for tensor in powers(min(devices, device.near, 16)):
        for fsdp in powers(devices // tensor):
            data = devices // tensor // fsdp
            if data * fsdp * tensor != devices or step.batch % (data * fsdp) or step.heads % tensor:
                continue
            for remat in (False, True):
                shape = (data, fsdp, tensor)
                yield estimate(step._replace(remat=remat), shape, device, efficiency)


def powers(maximum):
    """1, 2, 4, ... up to `maximum`."""
    return [2**i for i in range(maximum.bit_length()) if 2**i <= maximum]


def fits(plan, device):
    return plan.memory.total <= USABLE * device.memory


def choose(step, devices, device, efficiency):
    """(the chosen plan, or None; the plan with the least memory): the simplest of those about as
    fast as the fastest."""
    candidates = list(plans(step, devices, device, efficiency))
    smallest = min(candidates, key=lambda plan: plan.memory.total, default=None)
    fitting = [plan for plan in candidates if fits(plan, device)]
    if not fitting:
        return None, smallest
    limit = WORTH * min(plan.time.total for plan in fitting)
    fast = [plan for plan in fitting if plan.time.total <= limit]
    return min(fast, key=Plan.complexity), smallest


def enough(step, devices, device, efficiency):
    """The chosen plan on the first number of devices on which the step fits, starting with
    `devices` and doubling; or None."""
    while devices <= MOST_DEVICES:
        if plan := choose(step, devices, device, efficiency)[0]:
            return plan
        devices *= 2
    return None
