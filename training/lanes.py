"""The replicas of a run as calls of compiled programs; a lane is one call: one replica, or all of them stacked."""

from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np

from training.devices.placing import put, put_rows, rows_of_process
from training.devices.sharding import check_divides, replicated, sharded
from training.programs import Program, Start, options_for


class Lanes:
    """The replicas of a run as calls of one program: each by itself, or stacked on a leading axis and vmapped."""

    def __init__(self, seeds, mesh, stacked=False):
        self.seeds, self.mesh, self.stacked = seeds, mesh, stacked

    def stack(self, trees, places=None):
        """From one tree for each replica to one for each lane, which lies where `places` says."""
        if not self.stacked:
            return list(trees)
        return [
            jax.jit(
                lambda *trees: jax.tree.map(lambda *a: jnp.stack(a), *trees), out_shardings=places
            )(*trees)
        ]

    def start(self, make):
        """The compiled function that makes a lane of what `make` makes for one replica."""
        rows = (len(self.seeds),) if self.stacked else ()

        def zeros():
            return jax.tree.map(lambda a: jnp.broadcast_to(a, (*rows, *jnp.shape(a))), make())

        return Start(zeros, replicated(self.mesh))

    def __len__(self):
        return 1 if self.stacked else len(self.seeds)

    def unstack(self, trees):
        """From one tree for each lane back to one for each replica."""
        if not self.stacked:
            return list(trees)
        return [jax.tree.map(itemgetter(r), trees[0]) for r in range(len(self.seeds))]

    def rows(self, size):
        """Which rows of a batch this process reads."""
        check_divides(size, self.mesh)
        return rows_of_process(self.mesh, size)

    def put_batch(self, pieces, size):
        """This process's rows of a batch of `size` for each replica, onto the devices; one entry for each lane."""
        check_divides(size, self.mesh)
        return [
            put_rows(piece, self.mesh, size, axis=int(self.stacked))
            for piece in self.joined(pieces)
        ]

    def put_orders(self, orders):
        """The order of an epoch for each replica, cut as its batches are."""
        return [put(order, sharded(self.mesh, 1 + self.stacked)) for order in self.joined(orders)]

    def joined(self, pieces):
        """One piece for each lane."""
        return [jax.tree.map(lambda *a: np.stack(a), *pieces)] if self.stacked else pieces

    def shapes_of_one(self, lane):
        """The shapes of one replica's share of a lane."""
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape[1:] if self.stacked else a.shape, a.dtype), lane
        )

    def program(self, name, function, axes, looped, places=None):
        """The program over all replicas at once where they are stacked; `axes` tells which arguments are, `places` where the
        carry lies: on every device, unless it is said."""
        function = jax.vmap(function, in_axes=axes) if self.stacked else function
        places = replicated(self.mesh) if places is None else places
        return Program(function, self.mesh, name, options=options_for(looped), places=places)
