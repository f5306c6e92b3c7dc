"""Numbers of the host, put onto the devices of a mesh; of several processes each puts what its own devices hold."""

import jax
import numpy as np

from training.devices.sharding import sharded


def put(tree, places):
    """The arrays of a tree where `places`, one sharding or a tree of them, says; every process has all of their numbers."""
    if jax.process_count() == 1:
        return jax.device_put(tree, places)
    if isinstance(places, jax.sharding.Sharding):
        return jax.tree.map(lambda leaf: put_leaf(leaf, places), tree)
    return jax.tree.map(put_leaf, tree, places)


def put_leaf(leaf, place):
    """One array; what lies on the devices already is only moved there, what lies on the disk is read there."""
    if hasattr(leaf, "placed"):
        return leaf.placed(place)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, place)
    if hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = put_leaf(jax.random.key_data(leaf), place)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    # device_put would compare the numbers of all hosts: 0.6 s for 47 MB.
    array = np.asarray(leaf, dtype=jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype))
    return jax.make_array_from_callback(array.shape, place, lambda cut: array[cut])


def fetched(array):
    """An array's numbers on the host; where several hosts hold parts of it, all of them must ask."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental.multihost_utils import process_allgather

    return process_allgather(array, tiled=True)


def rows_of_process(mesh, size):
    """Which of the `size` rows of a batch this process's devices hold."""
    cuts = sharded(mesh).addressable_devices_indices_map((size,)).values()
    return np.unique(np.concatenate([np.arange(size)[cut] for (cut,) in cuts]))


def put_rows(tree, mesh, size, axis=0):
    """A batch of `size` rows, cut over the mesh; `tree` holds the rows of this process alone."""
    place = sharded(mesh, axis)
    if jax.process_count() == 1:
        return jax.device_put(tree, place)
    rows = rows_of_process(mesh, size)

    def of(leaf):
        def cut_out(cut):
            start, stop, _ = cut[axis].indices(size)
            first = np.searchsorted(rows, start)
            return leaf[(slice(None),) * axis + (slice(first, first + stop - start),)]

        leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)
        return jax.make_array_from_callback(
            (*leaf.shape[:axis], size, *leaf.shape[axis + 1 :]), place, cut_out
        )

    return jax.tree.map(of, tree)
