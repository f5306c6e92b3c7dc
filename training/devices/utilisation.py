"""Model FLOPs utilisation (MFU): the share of the devices' peak that the useful products of a run
take.

The matrix products and convolutions of the model count as useful, once forward and twice backward.
Products that `remat` computes again do not count, nor do other operations. Attention counts as if
every token saw all others, as is usual. The peak is the published one for dense products.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import Mesh
from jaxtyping import PyTree

from training.base import Objective
from training.engine import Trainer

# {device_kind: TFLOP/s in (bfloat16, float32)}. None: products in bfloat16 are emulated. float32 is
# what JAX does with float32 by default: TF32 on NVIDIA GPUs from Ampere on, one pass of bfloat16 on
# TPUs. NVIDIA's data sheets print some figures with sparsity, of which these are half. A TPU v2 or
# v3 is one of the two cores of a chip.
PEAKS = {
    "NVIDIA A100": (312, 156),
    "NVIDIA A10G": (70, 35),
    "NVIDIA A10": (125, 62.5),
    "NVIDIA A40": (149.7, 74.8),
    "NVIDIA L4": (121, 60),
    "NVIDIA L40S": (362, 183),
    "NVIDIA L40": (181, 90.5),
    "NVIDIA H100 PCIe": (756, 378),
    "NVIDIA H100 NVL": (835, 417.5),
    "NVIDIA H100": (989, 494),
    "NVIDIA H200 NVL": (835, 417.5),
    "NVIDIA H200": (989, 494),
    "NVIDIA GH200": (989, 494),
    "NVIDIA B200": (2250, 1125),
    "NVIDIA GeForce RTX 3090": (71, 35.6),
    "NVIDIA GeForce RTX 4090": (165.2, 82.6),
    "Tesla T4": (None, 8.1),
    "Tesla V100-PCIE": (None, 14),
    "Tesla V100": (None, 15.7),
    "TPU v2": (22.5, 22.5),
    "TPU v3": (61.5, 61.5),
    "TPU v4": (275, 275),
    "TPU v5 lite": (197, 197),
    "TPU v5e": (197, 197),
    "TPU v5": (459, 459),
    "TPU v5p": (459, 459),
    "TPU v6 lite": (918, 918),
    "TPU v6e": (918, 918),
}
OTHERS = {"MIG", "Laptop", "D", "Ti", "SUPER", "lite"}  # words in the names of slower devices


def peak_of(devices: Sequence[Any], precision: str) -> float | None:
    """The FLOP/s of all devices together; None if that is unknown."""
    kinds = {device.device_kind for device in devices}
    if len(kinds) != 1:
        return None
    [kind] = kinds
    # "NVIDIA H100 80GB HBM3" is an "NVIDIA H100"; "NVIDIA L40" is not an "NVIDIA L4".
    names = [name for name in PEAKS if kind == name or kind.startswith((f"{name} ", f"{name}-"))]
    name = max(names, key=len, default=kind)
    if not names or OTHERS & {*kind.removeprefix(name).split()}:
        return None
    peak = PEAKS[name][precision == "float32"]
    return peak and peak * 1e12 * len(devices)


def utilisation(trainer: Trainer) -> Callable[[float], float] | None:
    """The function from examples per second to the MFU of a Trainer; None if it is unknown, as for
    a CPU or a user's own update."""
    recipe, feed, passes = trainer.recipe, trainer.feed, trainer.passes
    mesh = trainer.plan.mesh
    assert isinstance(mesh, Mesh)
    peak = peak_of(mesh.devices.ravel().tolist(), recipe.training.precision)
    if peak is None or passes is None or feed is None:
        return None

    @cache  # computed at the first log line, while the devices are busy
    def of_one_example() -> float:
        batch, (params, state) = feed.shapes, trainer.weight_specs
        forward = flops_of(recipe.objective, params, state, batch)
        return passes * forward / jax.tree.leaves(batch)[0].shape[0]

    return lambda examples_per_second: examples_per_second * of_one_example() / peak


def flops_of(objective: Objective, params: PyTree, state: PyTree, batch: PyTree) -> int:
    """The floating-point operations of the products of one forward pass, from shapes."""

    def forward(params: PyTree, state: PyTree, batch: PyTree) -> tuple:
        return objective(params, state, batch, jax.random.key(0), True)

    return products(jax.make_jaxpr(forward)(params, state, batch).jaxpr)


def products(jaxpr: Jaxpr) -> int:
    """The operations of all products in a jaxpr: two for each multiplication."""
    total = 0
    for eqn in jaxpr.eqns:
        avals = [each.aval for each in (*eqn.invars, eqn.outvars[0])]
        *inputs, output = map(np.shape, avals)  # pyright: ignore[reportArgumentType]  # of an array
        name, size = eqn.primitive.name, math.prod(output)
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            total += 2 * size * math.prod(inputs[0][axis] for axis in contracted)
        elif name == "conv_general_dilated":
            kernel = inputs[1]
            features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
            total += 2 * size * math.prod(kernel) // features
        else:
            inner = [
                products(each.jaxpr if isinstance(each, ClosedJaxpr) else each)
                for each in jax.tree.leaves(eqn.params)
                if isinstance(each, ClosedJaxpr | Jaxpr)
            ]
            if name == "cond":  # only one branch runs; lax.platform_dependent is a cond, too
                total += max(inner, default=0)
            else:
                total += sum(inner) * (eqn.params["length"] if name == "scan" else 1)
    return total
