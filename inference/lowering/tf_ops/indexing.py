"""Reads and writes at computed positions.

The axes of an array that a gather or scatter indexes are flattened into one, so that all its
coordinates become a single position along that axis. The axes that are read whole stay after it.
"""

import functools

import numpy as np
import tensorflow as tf

from inference.lowering.tf_ops.elementwise import limited, widened

START = np.int32(0)  # the start of a whole axis


def dynamic_slice(target, x, *starts, slice_sizes):
    """A slice whose starts are moved so that it lies inside."""
    sizes = [size if isinstance(size, int) else -1 for size in slice_sizes]
    starts = [inside_start(x, axis, start, sizes[axis]) for axis, start in enumerate(starts)]
    return tf.slice(x, tf.stack(starts), sizes)


def inside_start(x, axis, start, size):
    """The start of a slice, moved inside; for a whole axis, whose size may be free, it is 0."""
    if size in (None, -1, x.shape[axis]):
        return START
    return limited(tf.cast(start, tf.int32), 0, size_of(x, axis) - size)


def dynamic_update_slice(target, x, update, *starts):
    """The update, padded to the size of x, where it lies; x everywhere else."""
    dtype = tf.int32 if x.dtype.name == "bool" else x.dtype
    update = tf.cast(update, dtype)
    starts = [inside_start(x, axis, start, update.shape[axis]) for axis, start in enumerate(starts)]
    pads = []
    for axis, start in enumerate(starts):
        room = START if start is START else size_of(x, axis) - update.shape[axis]
        pads.append(tf.stack([start, room - start]))
    pads = tf.stack(pads)
    mask = tf.pad(tf.ones_like(update, tf.float32), pads) > 0
    return tf.where(mask, tf.cast(tf.pad(update, pads), x.dtype), x)


class Positions:
    """Where slices of `shape` lie within x, one slice per index.

    `at` is a tensor of flat positions over the axes of the indices, then the axes read in part.
    """

    def __init__(self, target, x, indices, indexed, batched, shape, mode):
        axes = range(len(x.shape))
        is_whole = [not isinstance(shape[d], int) or shape[d] == x.shape[d] for d in axes]
        self.whole = [d for d in axes if d not in {*indexed, *batched} and is_whole[d]]
        self.read = [d for d in axes if d not in self.whole]
        shape = [target.size(size) if d in self.read else None for d, size in enumerate(shape)]
        self.part = [d for d in self.read if tf.is_tensor(shape[d]) or shape[d] != 1]
        self.part = [d for d in self.part if d not in batched]
        self.index_rank = len(indices.shape) - 1
        self.sizes = [size_of(x, d) for d in axes]
        self.inside = None  # whether each slice lies inside
        starts = {d: indices[..., i] for i, d in enumerate(indexed)}
        limits = {d: self.sizes[d] - shape[d] for d in starts}
        if mode.name == "FILL_OR_DROP":
            for d, start in starts.items():
                fits = tf.logical_and(start >= 0, start <= limits[d])
                self.inside = fits if self.inside is None else tf.logical_and(self.inside, fits)
        starts = {d: limited(tf.cast(s, tf.int32), 0, limits[d]) for d, s in starts.items()}
        for d, axis in batched.items():
            starts[d] = along(tf.range(tf.shape(indices)[axis]), axis, self.index_rank)
        self.at = self.flat(starts, shape)

    def flat(self, starts, shape):
        """The position of each number in the flattened axes."""
        total, rank = np.int32(0), self.index_rank + len(self.part)
        for d in self.read:
            position = self.widened(starts[d]) if d in starts else np.int32(0)
            if d in self.part:
                axis = self.index_rank + self.part.index(d)
                position = position + along(tf.range(shape[d]), axis, rank)
            total = total * self.sizes[d] + position
        return total

    def widened(self, by_index):
        """One number per index, with an axis of size 1 for each axis read in part."""
        for _ in self.part:
            by_index = tf.expand_dims(by_index, -1)
        return by_index

    def flattened(self, x):
        """x with the axes that are read flattened into the first."""
        x = transposed(x, [*self.read, *self.whole])
        return tf.reshape(x, shape_of([-1, *(self.sizes[d] for d in self.whole)]))


def size_of(x, axis):
    size = x.shape[axis]
    return np.int32(size) if size is not None else tf.shape(x)[axis]


def shape_of(sizes):
    """A shape for tf.reshape, with -1 for a single free size."""
    free = [size for size in sizes if tf.is_tensor(size)]
    if len(free) == 1 and not any(size == -1 for size in sizes if size is not free[0]):
        return [-1 if tf.is_tensor(size) else size for size in sizes]
    return tf.stack(sizes) if free else sizes


def along(line, axis, rank):
    """A vector as one axis of an array with this rank."""
    return tf.reshape(line, [-1 if i == axis else 1 for i in range(rank)])


def transposed(x, axes):
    return x if axes == sorted(axes) else tf.transpose(x, axes)


def gather(target, x, indices, *, dimension_numbers, slice_sizes, mode, fill_value=None, **_):
    """Slices of x at many positions, with their axes where the result has them."""
    names, rank = dimension_numbers, len(target.out[0].shape)
    batched = dict(zip(names.operand_batching_dims, names.start_indices_batching_dims, strict=True))
    positions = Positions(target, x, indices, names.start_index_map, batched, slice_sizes, mode)
    # labels of the result's axes: negative for those of the indices, else the axis of x
    index_labels = list(range(-positions.index_rank, 0))
    if len(positions.read) == 1:
        (axis,) = positions.read
        result = tf.gather(x, positions.at, axis=axis)
        before = [d for d in positions.whole if d < axis]
    else:
        result, before = tf.gather(positions.flattened(x), positions.at), []
    after = positions.whole[len(before) :]
    labels = [*before, *index_labels, *positions.part, *after]
    if positions.inside is not None:
        inside = tf.reshape(positions.inside, shape_of(inside_shape(labels, positions)))
        result = tf.where(inside, result, filler(x.dtype.name, fill_value))
    dropped = {*names.collapsed_slice_dims, *names.operand_batching_dims, *labels}
    ones = [d for d in range(len(x.shape)) if d not in dropped]  # axes of which one number is read
    if ones:
        sizes = [size_of(result, i) for i in range(len(labels))]
        result = tf.reshape(result, shape_of([*sizes, *(1 for _ in ones)]))
        labels += ones
    slices, batch = iter(sorted(d for d in labels if d >= 0)), iter(index_labels)
    order = [next(slices) if i in names.offset_dims else next(batch) for i in range(rank)]
    return transposed(result, [labels.index(label) for label in order])


def inside_shape(labels, positions):
    """The shape with which one number per index broadcasts to axes with these labels."""
    inside, rank = positions.inside, positions.index_rank
    return [size_of(inside, label + rank) if label < 0 else 1 for label in labels]


def filler(dtype, fill_value):
    """The result of a read outside of the array."""
    if fill_value is None and dtype != "bool":
        kind = np.dtype(dtype).kind
        if kind == "f":
            fill_value = np.nan
        else:
            fill_value = np.iinfo(dtype).min if kind == "i" else np.iinfo(dtype).max
    return np.asarray(True if fill_value is None else fill_value, dtype)


def scatter(combine):
    """Writes by `combine(old, update, is_hit)`; TFLite adds up updates to the same position."""

    def write(target, x, indices, updates, *, dimension_numbers, mode, **_):
        positions, axes = written_positions(target, x, indices, updates, dimension_numbers, mode)
        sizes, read, whole = positions.sizes, positions.read, positions.whole
        rest = [sizes[d] for d in whole]
        total = functools.reduce(lambda a, b: a * b, [sizes[d] for d in read], np.int32(1))
        at = tf.reshape(positions.at, (-1, 1))
        allowed = tf.ones_like(positions.at, tf.float32)  # 0 for an update outside: it is dropped
        if positions.inside is not None:
            allowed *= tf.cast(positions.widened(positions.inside), tf.float32)
        by_row = [-1, *(1 for _ in rest)]
        updates = tf.reshape(tf.transpose(updates, axes), shape_of([-1, *rest]))
        updates = tf.where(tf.reshape(allowed, by_row) > 0, updates, tf.zeros_like(updates))
        written = tf.scatter_nd(at, updates, tf.stack([total, *rest]))
        is_hit = tf.scatter_nd(at, tf.reshape(allowed, (-1,)), tf.stack([total])) > 0
        result = combine(positions.flattened(x), written, tf.reshape(is_hit, by_row))
        result = tf.reshape(result, shape_of([sizes[d] for d in (*read, *whole)]))
        return transposed(result, list(np.argsort([*read, *whole])))

    return write


def scatter_once(name, combine):
    """As `scatter`, for distinct positions: TFLite would add up the updates to equal ones."""
    write = scatter(lambda old, new, is_hit: tf.where(is_hit, combine(old, new), old))

    def write_once(target, *operands, unique_indices, **params):
        if not unique_indices:
            target.refuse(name, "to positions of which some may be equal")
        return write(target, *operands, **params)

    return write_once


def written_positions(target, x, indices, updates, names, mode):
    """The positions of the updates, and the order of the updates' axes.

    In that order the axes of the indices come first, then those in part, then the whole ones.
    """
    rank = len(x.shape)
    batched = zip(names.operand_batching_dims, names.scatter_indices_batching_dims, strict=True)
    batched = dict(batched)
    window = [d for d in range(rank) if d not in (*names.inserted_window_dims, *batched)]
    axis_of = dict(zip(window, names.update_window_dims, strict=True))
    shape = [updates.shape[axis_of[d]] if d in axis_of else 1 for d in range(rank)]
    indexed = names.scatter_dims_to_operand_dims
    positions = Positions(target, x, indices, indexed, batched, shape, mode)
    by_index = [axis for axis in range(len(updates.shape)) if axis not in names.update_window_dims]
    slices = [*positions.part, *positions.whole]
    ones = [axis_of[d] for d in window if d not in slices]
    return positions, [*by_index, *ones, *(axis_of[d] for d in slices)]


PRIMITIVES = {
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "gather": gather,
    "scatter": widened(scatter(lambda old, new, is_hit: tf.where(is_hit, new, old))),
    "scatter-add": widened(scatter(lambda old, new, is_hit: old + new)),
    "scatter-sub": widened(scatter(lambda old, new, is_hit: old - new)),
    "scatter-mul": widened(scatter_once("scatter-mul", tf.multiply)),
    "scatter-max": widened(scatter_once("scatter-max", tf.maximum)),
    "scatter-min": widened(scatter_once("scatter-min", tf.minimum)),
}
