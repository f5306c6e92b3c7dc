"""The compiled step of training as a run makes it, from shapes alone: for programs that price it, or take it apart."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from training.devices.mesh import AXES, make_mesh, replicated, sharded
from training.devices.sharding import Plan
from training.fit import compose
from training.loss import cross_entropy
from training.metrics import accuracy
from training.objective import supervised
from training.optimizers import adamw
from training.programs import Program, loops_are_slow, options_for, over_batch, placed
from training.trainer import SEED, first_state, first_trees, training
from training.update import gradient_update, zero_sums

SIMULATED = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}  # for a process of its own


class Step(NamedTuple):
    """A step of AdamW before it is placed anywhere."""

    make: Any  # seed -> the first TrainState
    carry: Any  # its shapes
    batch: Any  # shapes of (x, y)
    run: Any  # (const, carry, batch, valid) -> carry
    report: Any
    looped: bool  # whether a compiled loop may hold it


def step_of(model, shape, batch, precision="float32"):
    """The step of a model of images of this shape, in batches of so many."""
    objective = compose(
        supervised, model, cross_entropy, {"accuracy": accuracy}, precision=precision
    )
    pair = (
        jax.ShapeDtypeStruct((batch, *shape), jnp.float32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )
    trees = jax.eval_shape(partial(first_trees, model), SEED)
    looped = not loops_are_slow(objective, *trees, pair)
    update = gradient_update(objective, adamw(), unroll=not looped)

    def make(seed):
        params, state = first_trees(model, seed)
        sums = zero_sums(objective, params, state, pair, freeze=True)
        return jax.tree.map(jnp.copy, first_state(update, params, state, seed)._replace(sums=sums))

    return Step(make, jax.eval_shape(make, SEED), pair, *training(update), looped)


def program_of(step, options, sharding=None):
    """(its Program over a mesh of this machine's devices, the forms of its arguments, the Plan): batches come one by one."""
    plan = Plan(make_mesh(options), sharding)
    places, whole = plan.of_state(step.carry), replicated(plan.mesh)
    program = Program(
        over_batch(step.run, step.report),
        plan.mesh,
        "train",
        options=options_for(step.looped),
        places=places,
    )
    valid = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    return (
        program,
        ((), placed(step.carry, places), placed(step.batch, sharded(plan.mesh)), valid),
        plan,
    )


def mesh_name(shape):
    """data 2 x fsdp 4; axes of one device are left out."""
    return (
        " x ".join(f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True) if size > 1)
        or "one device"
    )
