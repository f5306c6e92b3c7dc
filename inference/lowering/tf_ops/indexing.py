"""Reading from computed places, and writing to them.

A gather's, or scatter's, coordinates become one number: the place in the array with the axes that are looked up flattened
into one. The axes that are read whole follow as they are.
"""

import functools

import numpy as np
import tensorflow as tf

from inference.lowering.tf_ops.elementwise import limited, widened

ALL = np.int32(0)  # where a whole axis starts


def dynamic_slice(target, x, *starts, slice_sizes):
    """Starts are moved so that the slice lies inside."""
    sizes = [size if isinstance(size, int) else -1 for size in slice_sizes]
    starts = [inside_start(x, axis, start, sizes[axis]) for axis, start in enumerate(starts)]
    return tf.slice(x, tf.stack(starts), sizes)


def inside_start(x, axis, start, size):
    """A start of a slice, moved inside; 0 of a whole axis, whose size may be free."""
    if size in (None, -1, x.shape[axis]):
        return ALL
    return limited(tf.cast(start, tf.int32), 0, size_of(x, axis) - size)


def dynamic_update_slice(target, x, update, *starts):
    """The update with nothing around it, where it lies; x elsewhere."""
    held = tf.int32 if x.dtype.name == "bool" else x.dtype
    update = tf.cast(update, held)
    starts = [inside_start(x, axis, start, update.shape[axis]) for axis, start in enumerate(starts)]
    room = [
        ALL if start is ALL else size_of(x, axis) - update.shape[axis]
        for axis, start in enumerate(starts)
    ]
    rims = tf.stack(
        [tf.stack([start, left - start]) for start, left in zip(starts, room, strict=True)]
    )
    mask = tf.pad(tf.ones_like(update, tf.float32), rims) > 0
    return tf.where(mask, tf.cast(tf.pad(update, rims), x.dtype), x)


class Places:
    """Where slices of `shape` lie within x: `at`, a tensor over the axes of the indices, then the axes that are read in part."""

    def __init__(self, target, x, indices, starts, batched, shape, mode):
        axes = range(len(x.shape))
        moved = {*starts, *batched}
        self.whole = [
            d
            for d in axes
            if d not in moved and (not isinstance(shape[d], int) or shape[d] == x.shape[d])
        ]
        self.read = [d for d in axes if d not in self.whole]
        shape = [target.size(size) if d in self.read else None for d, size in enumerate(shape)]
        self.part = [
            d for d in self.read if d not in batched and (tf.is_tensor(shape[d]) or shape[d] != 1)
        ]
        self.lead = len(indices.shape) - 1
        self.sizes = [size_of(x, d) for d in axes]
        self.inside = None
        begun = {d: indices[..., i] for i, d in enumerate(starts)}
        if mode.name == "FILL_OR_DROP":
            for d, start in begun.items():
                fits = tf.logical_and(start >= 0, start <= self.last(d, shape))
                self.inside = fits if self.inside is None else tf.logical_and(self.inside, fits)
        begun = {
            d: limited(tf.cast(start, tf.int32), 0, self.last(d, shape))
            for d, start in begun.items()
        }
        begun |= {
            d: along(tf.range(tf.shape(indices)[axis]), axis, self.lead)
            for d, axis in batched.items()
        }
        self.at = np.int32(0)
        for d in self.read:
            place = self.widened(begun[d]) if d in begun else np.int32(0)
            if d in self.part:
                steps = tf.range(shape[d])
                place = place + along(
                    steps, self.lead + self.part.index(d), self.lead + len(self.part)
                )
            self.at = self.at * self.sizes[d] + place

    def last(self, d, shape):
        return self.sizes[d] - shape[d]

    def widened(self, lead):
        """Over the axes of the indices, and 1 for each axis in part."""
        for _ in self.part:
            lead = lead[..., None]
        return lead

    def flattened(self, x):
        """x with what is read in its first axis."""
        x = transposed(x, [*self.read, *self.whole])
        return tf.reshape(x, shape_of([-1, *(self.sizes[d] for d in self.whole)]))


def size_of(x, axis):
    known = x.shape[axis]
    return np.int32(known) if known is not None else tf.shape(x)[axis]


def shape_of(sizes):
    """A shape for tf.reshape, where one free size may be left to it."""
    free = [size for size in sizes if tf.is_tensor(size)]
    if len(free) == 1 and not any(size == -1 for size in sizes if size is not free[0]):
        return [-1 if tf.is_tensor(size) else size for size in sizes]
    return tf.stack(sizes) if free else sizes


def along(line, axis, rank):
    """A line of numbers as one axis of so many."""
    return tf.reshape(line, [-1 if i == axis else 1 for i in range(rank)])


def transposed(x, axes):
    return x if axes == sorted(axes) else tf.transpose(x, axes)


def gather(target, x, indices, *, dimension_numbers, slice_sizes, mode, fill_value=None, **_):
    """Slices of x at many places, their axes where the result has them."""
    names, rank = dimension_numbers, len(target.out[0].shape)
    batched = dict(zip(names.operand_batching_dims, names.start_indices_batching_dims, strict=True))
    places = Places(target, x, indices, names.start_index_map, batched, slice_sizes, mode)
    lead = list(
        range(-places.lead, 0)
    )  # labels of axes: those of the indices below 0, those of x by their numbers
    if len(places.read) == 1:
        (axis,) = places.read
        found = tf.gather(x, places.at, axis=axis)
        before, after = [d for d in places.whole if d < axis], [d for d in places.whole if d > axis]
    else:
        found, before, after = tf.gather(places.flattened(x), places.at), [], places.whole
    labels = [*before, *lead, *places.part, *after]
    if places.inside is not None:
        inside = tf.reshape(places.inside, shape_of(at_labels(labels, places)))
        found = tf.where(inside, found, filler(x.dtype.name, fill_value))
    hidden = {*names.collapsed_slice_dims, *names.operand_batching_dims}
    ones = [
        d for d in range(len(x.shape)) if d not in hidden and d not in labels
    ]  # read in part, a single number wide
    found = (
        tf.reshape(
            found, shape_of([*(size_of(found, i) for i in range(len(labels))), *(1 for _ in ones)])
        )
        if ones
        else found
    )
    labels += ones
    slices, batch = iter(sorted(d for d in labels if d >= 0)), iter(lead)
    wanted = [next(slices) if i in names.offset_dims else next(batch) for i in range(rank)]
    return transposed(found, [labels.index(label) for label in wanted])


def at_labels(labels, places):
    """The shape of what is one number for each of the indices."""
    return [size_of(places.inside, label + places.lead) if label < 0 else 1 for label in labels]


def filler(dtype, given):
    """What stands for a number that is not there."""
    if given is None and dtype != "bool":
        kind = np.dtype(dtype).kind
        given = (
            np.nan if kind == "f" else np.iinfo(dtype).min if kind == "i" else np.iinfo(dtype).max
        )
    return np.asarray(True if given is None else given, dtype)


def scatter(combine):
    """Writes updates; `combine` says what becomes of what was there. TFLite adds up those that fall on one place."""

    def write(target, x, indices, updates, *, dimension_numbers, mode, **_):
        places, axes = written_places(target, x, indices, updates, dimension_numbers, mode)
        rest = [places.sizes[d] for d in places.whole]
        total = functools.reduce(
            lambda a, b: a * b, [places.sizes[d] for d in places.read], np.int32(1)
        )
        at = tf.reshape(places.at, (-1, 1))
        allowed = tf.ones_like(places.at, tf.float32)  # 0 for what falls outside, which is dropped
        if places.inside is not None:
            allowed *= tf.cast(places.widened(places.inside), tf.float32)
        updates = tf.reshape(tf.transpose(updates, axes), shape_of([-1, *rest]))
        updates = tf.where(
            tf.reshape(allowed, [-1, *(1 for _ in rest)]) > 0, updates, tf.zeros_like(updates)
        )
        written = tf.scatter_nd(at, updates, tf.stack([total, *rest]))
        hit = tf.scatter_nd(at, tf.reshape(allowed, (-1,)), tf.stack([total])) > 0
        new = combine(places.flattened(x), written, tf.reshape(hit, [-1, *(1 for _ in rest)]))
        new = tf.reshape(new, shape_of([places.sizes[d] for d in (*places.read, *places.whole)]))
        return transposed(new, list(np.argsort([*places.read, *places.whole])))

    return write


def scatter_once(name, combine):
    """As `scatter`, for places of which no two are the same: where some are, TFLite has added up the updates already."""
    write = scatter(lambda old, new, hit: tf.where(hit, combine(old, new), old))

    def write_once(target, *operands, unique_indices, **params):
        if not unique_indices:
            target.refuse(name, "to places of which some may be the same")
        return write(target, *operands, **params)

    return write_once


def written_places(target, x, indices, updates, names, mode):
    """Where updates go; and their axes in the order of the places: those of the indices, those in part, the whole ones."""
    batched = dict(
        zip(names.operand_batching_dims, names.scatter_indices_batching_dims, strict=True)
    )
    window = [d for d in range(len(x.shape)) if d not in (*names.inserted_window_dims, *batched)]
    axis_of = dict(zip(window, names.update_window_dims, strict=True))
    shape = [updates.shape[axis_of[d]] if d in axis_of else 1 for d in range(len(x.shape))]
    places = Places(target, x, indices, names.scatter_dims_to_operand_dims, batched, shape, mode)
    lead = [axis for axis in range(len(updates.shape)) if axis not in names.update_window_dims]
    ones = [axis_of[d] for d in window if d not in (*places.part, *places.whole)]
    return places, [*lead, *ones, *(axis_of[d] for d in (*places.part, *places.whole))]


PRIMITIVES = {
    **{
        "dynamic_slice": dynamic_slice,
        "dynamic_update_slice": dynamic_update_slice,
        "gather": gather,
    },
    "scatter": widened(scatter(lambda old, new, hit: tf.where(hit, new, old))),
    "scatter-add": widened(scatter(lambda old, new, hit: old + new)),
    "scatter-sub": widened(scatter(lambda old, new, hit: old - new)),
    "scatter-mul": widened(scatter_once("scatter-mul", tf.multiply)),
    "scatter-max": widened(scatter_once("scatter-max", tf.maximum)),
    "scatter-min": widened(scatter_once("scatter-min", tf.minimum)),
}
