"""The compiled training step as a run makes it, built from shapes alone, for programs that estimate
its cost or analyse it."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from training.devices.mesh import AXES, make_mesh
from training.devices.sharding import Plan
from training.engine import (
    SEED,
    Program,
    first_state,
    first_weights,
    loops_are_slow,
    platform_options,
    training_step,
)
from training.feed import over_batch
from training.fit import recipe_of
from training.optimizers import adamw

# The environment of a process with 8 simulated devices.
SIMULATED = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


class Step(NamedTuple):
    """A training step with AdamW, before its arrays are placed on devices."""

    make: Any  # seed -> the first TrainState
    carry: Any  # the shapes of that TrainState
    batch: Any  # the shapes of (x, y)
    run: Any  # (const, carry, batch, valid) -> (carry, row)
    looped: bool  # whether it may run inside a compiled loop


def step_of(model, shape, batch, precision="float32", tokens=False):
    """The step of a model for images of `shape`, or texts of tokens, in batches of size `batch`."""
    recipe = recipe_of(model, optimizer=adamw(), precision=precision)
    pair = (
        jax.ShapeDtypeStruct((batch, *shape), jnp.int32 if tokens else jnp.float32),
        jax.ShapeDtypeStruct((batch, *shape) if tokens else (batch,), jnp.int32),
    )
    trees = jax.eval_shape(partial(first_weights, model), SEED)
    looped = not loops_are_slow(recipe.traced(trees, pair, train=True))
    update = recipe.make_update(unroll=not looped)

    def make(seed):
        params, state = first_weights(model, seed)
        return first_state(update, params, state, seed)

    step = training_step(recipe, {"loss": "MEAN"}, unroll=not looped)
    return Step(make, jax.eval_shape(make, SEED), pair, step, looped)


def program_of(step, options, sharding=None):
    """(its Program over a mesh of this machine's devices, its argument shapes, the Plan); the
    program takes one batch per call."""
    plan = Plan(make_mesh(options), sharding)
    shardings = plan.of_state(step.carry)
    program = Program(
        over_batch(step.run),
        plan.whole,
        "train",
        options=platform_options(),
        shardings=shardings,
    )
    carry, batch = placed(step.carry, shardings), placed(step.batch, plan.batch())
    valid = jax.ShapeDtypeStruct((), jnp.int32, sharding=plan.whole)
    return program, ((), carry, batch, valid), plan


def placed(tree, shardings):
    """The specs of arrays from their shapes and from their shardings, which are one or a tree."""
    if hasattr(shardings, "spec"):
        shardings = jax.tree.map(lambda leaf: shardings, tree)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def mesh_name(shape):
    """data 2 x fsdp 4; axes of size 1 are left out."""
    axes = [f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True) if size > 1]
    return " x ".join(axes) or "one device"
