"""Replicas: several runs with other seeds or numbers, trained side by side by compiled programs."""

from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np

from training.base import TrainState
from training.contracts import guarded_model
from training.programs import Program, platform_options

USER_BATCHES = "the batches of the data"  # what the error of another size names


class Replicas:
    """The replicas of a run: one call of a program for each, or one for all, stacked on a leading
    axis and vmapped. A lane is the replicas of one call. On accelerators they are stacked; on the
    CPU one call per replica is faster (a ResNet step: 181 ms against 814 ms)."""

    def __init__(self, seeds, plan, pool=None, stacked=None):
        stacked = jax.default_backend() != "cpu" if stacked is None else stacked
        self.seeds, self.plan, self.pool = seeds, plan, pool
        self.stacked = stacked and len(seeds) > 1
        self.lanes_plan = plan._replace(stacked=self.stacked)

    @property
    def lanes(self):
        """The number of lanes."""
        return 1 if self.stacked else len(self.seeds)

    @property
    def shape(self):
        """The shape of one number per replica of a lane."""
        return (len(self.seeds),) if self.stacked else ()

    def stack(self, trees, shardings=None):
        """Turn one tree per replica into one per lane."""
        if not self.stacked:
            return list(trees)
        stack = lambda *trees: jax.tree.map(lambda *a: jnp.stack(a), *trees)  # noqa: E731
        return [jax.jit(stack, out_shardings=shardings)(*trees)]

    def unstack(self, trees):
        """Turn one tree per lane back into one per replica."""
        if not self.stacked:
            return list(trees)
        return [jax.tree.map(itemgetter(r), trees[0]) for r in range(len(self.seeds))]

    def joined(self, pieces):
        """Turn one piece per replica into one per lane, on the host."""
        return [jax.tree.map(lambda *a: np.stack(a), *pieces)] if self.stacked else pieces

    def rows(self, size):
        """Which rows of a batch this process reads."""
        self.plan.check_batch(size, USER_BATCHES)
        return self.plan.rows(size)

    def put_batch(self, pieces, size):
        """This process's rows of a batch of `size` for each replica, put onto the devices."""
        self.plan.check_batch(size, USER_BATCHES)
        return [self.lanes_plan.put_batch(piece, size) for piece in self.joined(pieces)]

    def put_orders(self, orders):
        """The order of an epoch for each replica, sharded like its batches."""
        sharding = self.plan.batch(1 + self.stacked)
        return [self.plan.put(order, sharding) for order in self.joined(orders)]

    def order_spec(self, batches, size):
        """The spec of the order of an epoch in a lane."""
        sharding = self.plan.batch(1 + self.stacked)
        return jax.ShapeDtypeStruct((*self.shape, batches, size), jnp.int32, sharding=sharding)

    def shapes_of_one(self, lane):
        """The specs of one replica's part of a lane."""
        shape = lambda a: a.shape[1:] if self.stacked else a.shape  # noqa: E731
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(shape(a), a.dtype), lane)

    def program(self, name, function, axes, shardings=None):
        """The Program of a lane; `axes` says which arguments have an axis of replicas."""
        if self.stacked:  # model/layers/forms.py looks for the name of the axis
            function = jax.vmap(function, in_axes=axes, axis_name="replicas")
        options = {"options": platform_options(), "shardings": shardings, "pool": self.pool}
        return Program(function, self.plan.whole, name, **options)


def as_inputs(numbers):
    """The numbers of a replica with the types that a compiled program takes."""
    kinds = {int: np.int32, float: np.float32}
    return {path: kinds[type(number)](number) for path, number in numbers.items()}


def first_weights(model, seed):
    """(params, state) of a replica, drawn from its seed."""
    key = jax.random.fold_in(jax.random.key(seed), 2**32 - 1)  # no step has this key
    return guarded_model(model).init(key)


def first_state(update, params, state, seed):
    """The TrainState before the first step."""
    opt, ema = update.init(params)
    ts = TrainState(jnp.int32(0), seed, params, state, opt, ema, jnp.bool(False), jnp.float32(1))
    return jax.tree.map(jnp.copy, ts)  # no two leaves of a donated tree may be the same buffer
