"""Ops that move numbers without changing them, and reads and writes at computed positions."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import tensorflow as tf
from jax import lax

from inference.lowering.tf_ops.elementwise import WIDER_TO_MOVE, Tensor, limited, widened
from inference.lowering.value import Size, is_one
from inference.lowering.walk import Lowering

if TYPE_CHECKING:
    from inference.lowering.tf_ops.target import TfTarget

Write: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def reshape(
    target: "TfTarget",
    x: Tensor,
    *,
    new_sizes: Sequence[Size],
    dimensions: Sequence[int] | None = None,
    **_: object,
) -> Tensor:
    """x in another shape, its axes read in the order of `dimensions`."""
    x = x if dimensions is None else tf.transpose(x, dimensions)
    return tf.reshape(x, target.new_sizes(new_sizes))


def squeeze(target: "TfTarget", x: Tensor, *, dimensions: Sequence[int]) -> Tensor:
    return tf.reshape(x, target.new_sizes(target.out[0].shape))


def transpose(target: "TfTarget", x: Tensor, *, permutation: Sequence[int]) -> Tensor:
    return tf.transpose(x, permutation)


def reverse(target: "TfTarget", x: Tensor, *, dimensions: Sequence[int]) -> Tensor:
    for axis in dimensions:  # TFLite reverses one axis at a time
        x = tf.reverse(x, [axis])
    return x


def concatenate(target: "TfTarget", *operands: Tensor, dimension: int) -> Tensor:
    parts = [x for x in operands if x.shape[dimension] != 0]  # TFLite does not slice to nothing
    return tf.concat(parts or operands[:1], dimension)


def stack(target: "TfTarget", *operands: Tensor, axis: int, **_: object) -> Tensor:
    return tf.stack(operands, axis)


def unstack(target: "TfTarget", x: Tensor, *, axis: int, **_: object) -> list[Tensor]:
    return tf.unstack(x, axis=axis)


def tile(target: "TfTarget", x: Tensor, *, reps: Sequence[Size]) -> Tensor:
    """Copies by a broadcast: the converter drops a Tile of a free axis before an addition."""
    shape, wide = [], []
    for size, count in zip(target.operand_shapes[0], reps, strict=True):
        copies = [] if is_one(count) else [count]
        shape += [*(1 for _ in copies), size]
        wide += [*copies, size]
    x = tf.broadcast_to(tf.reshape(x, target.new_sizes(shape)), target.sizes(wide))
    return tf.reshape(x, target.new_sizes(target.out[0].shape))


def split(target: "TfTarget", x: Tensor, *, sizes: Sequence[Size], axis: int) -> list[Tensor]:
    edges = map(target.size, itertools.accumulate(sizes, initial=0))
    return [cut(x, {axis: (start, end, 1)}) for start, end in itertools.pairwise(edges)]


def slice_(
    target: "TfTarget",
    x: Tensor,
    *,
    start_indices: Sequence[Size],
    limit_indices: Sequence[Size],
    strides: Sequence[int] | None,
) -> Tensor:
    """A slice; one that reaches the end of an axis does not need the axis's size."""
    limits = zip(limit_indices, target.operand_shapes[0], strict=True)
    ends = [None if end == size else target.size(end) for end, size in limits]
    steps = strides or (1,) * len(ends)
    parts = zip(start_indices, ends, steps, strict=True)
    x = tf.convert_to_tensor(x) if any(map(tf.is_tensor, ends)) else x  # no slice of an array
    return x[tuple(slice(target.size(start), end, step) for start, end, step in parts)]


def cut(x: Tensor, parts: dict[int, tuple[Any, ...]]) -> Tensor:
    """x[...] with a slice of these arguments, {axis: (start, stop)}."""
    return x[tuple(slice(*parts.get(axis, (None,))) for axis in range(len(x.shape)))]


def pad(
    target: "TfTarget",
    x: Tensor,
    value: Tensor,
    *,
    padding_config: Sequence[tuple[Size, Size, int]],
) -> Tensor:
    """Padding around the numbers and between them; a negative padding cuts off numbers, also of the
    padding on the other side."""
    for axis, (_, _, between) in enumerate(padding_config):
        x = pad_between(x, value, axis, between) if between else x
    pads = [[low, high] for low, high, _ in padding_config]
    x = pad_around(target, x, value, [[0 if is_negative(n) else n for n in pair] for pair in pads])
    if not any(is_negative(size) for pair in pads for size in pair):
        return x
    kept = ((cut_off(low), -cut_off(high) or None) for low, high in pads)
    return cut(x, dict(enumerate(kept)))


def pad_around(
    target: "TfTarget", x: Tensor, value: Tensor, pads: Sequence[Sequence[Size]]
) -> Tensor:
    """Padding with these numbers of values before and after each axis."""
    if all(isinstance(size, int) for pair in pads for size in pair):
        return tf.pad(x, pads, constant_values=value) if any(map(any, pads)) else x
    shape = [
        n + sum(pair) if n is not None and all(isinstance(size, int) for size in pair) else None
        for n, pair in zip(x.shape, pads, strict=True)
    ]
    x = tf.pad(x, tf.stack([target.sizes(pair) for pair in pads]), constant_values=value)
    x.set_shape(shape)
    return x


def is_negative(size: Size) -> bool:
    """Whether a padding cuts numbers off; one that depends on a free size adds some."""
    return isinstance(size, int) and size < 0


def cut_off(size: Size) -> int:
    return -size if is_negative(size) else 0


def pad_between(x: Tensor, value: Tensor, axis: int, between: int) -> Tensor:
    """x with `between` values between neighbours along an axis."""
    size = size_of(x, axis)
    pads = [(0, between if i == axis + 1 else 0) for i in range(len(x.shape) + 1)]
    wide = tf.pad(tf.expand_dims(x, axis + 1), pads, constant_values=value)
    shape = [size_of(x, i) for i in range(len(x.shape))]
    shape[axis] = size * (between + 1)
    return cut(tf.reshape(wide, shape_of(shape)), {axis: (0, (size - 1) * (between + 1) + 1)})


def iota(target: "TfTarget", *, shape: Sequence[Size], dimension: int, **_: object) -> Tensor:
    dtype = target.out[0].dtype
    count = tf.range(target.size(shape[dimension]), dtype=tf.int32)
    line = tf.reshape(count, [-1 if i == dimension else 1 for i in range(len(shape))])
    return tf.cast(tf.broadcast_to(line, target.sizes(shape)), dtype)


def dim_as_value(target: "TfTarget", *, dim: Size) -> Tensor:
    return tf.cast(target.size(dim), target.out[0].dtype)


START = np.int32(0)  # the start of a whole axis


def as_index(ids: Tensor) -> Tensor:
    """Integers in a dtype that TFLite's gather takes."""
    return ids if ids.dtype.name in ("int32", "int64") else tf.cast(ids, tf.int32)


def dynamic_slice(
    target: "TfTarget", x: Tensor, *starts: Tensor, slice_sizes: Sequence[Size]
) -> Tensor:
    """A slice whose starts are moved so that it lies inside."""
    begins, sizes = inside_starts(target, starts, slice_sizes)
    is_whole = [start is START for start in begins]
    sizes = [np.int32(-1) if whole else n for whole, n in zip(is_whole, sizes, strict=True)]
    return tf.slice(x, tf.stack(begins), tf.stack(sizes))


def inside_starts(
    target: "TfTarget", starts: Sequence[Tensor], sizes: Sequence[Size]
) -> tuple[list[Tensor], list[Tensor]]:
    """The starts of a slice, moved so that it lies inside, and its sizes; 0 for a whole axis."""
    inside, whole_sizes = [], target.operand_shapes[0]
    for start, size, whole in zip(starts, sizes, whole_sizes, strict=True):
        room = target.size(whole - size) if whole != size else 0
        inside.append(limited(tf.cast(start, tf.int32), 0, room) if whole != size else START)
    return inside, [target.size(size) for size in sizes]


def dynamic_update_slice(target: "TfTarget", x: Tensor, update: Tensor, *starts: Tensor) -> Tensor:
    """The update, padded to the size of x, where it lies; x everywhere else."""
    dtype = tf.int32 if x.dtype.name == "bool" else x.dtype
    update = tf.cast(update, dtype)
    begins, sizes = inside_starts(target, starts, target.operand_shapes[1])
    pads = []
    for axis, (start, size) in enumerate(zip(begins, sizes, strict=True)):
        room = START if start is START else size_of(x, axis) - size
        pads.append(tf.stack([start, room - start]))
    pads = tf.stack(pads)
    mask = tf.pad(tf.ones_like(update, tf.float32), pads) > 0
    return tf.where(mask, tf.cast(tf.pad(update, pads), x.dtype), x)


class Positions:
    """Where slices of `shape` lie within x, one slice per index.

    `at` is a tensor of flat positions over the axes of the indices, then the axes read in part.
    """

    def __init__(
        self,
        target: "TfTarget",
        x: Tensor,
        indices: Tensor,
        indexed: Sequence[int],
        batched: dict[int, int],
        shape: Sequence[Size],
        mode: lax.GatherScatterMode,
    ) -> None:
        axes, indices = range(len(x.shape)), as_index(indices)
        is_whole = [shape[d] == target.operand_shapes[0][d] for d in axes]
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
        self.may_repeat = may_repeat(indices, batched, {*indexed} & {*self.part}, mode.name)
        starts = {d: limited(tf.cast(s, tf.int32), 0, limits[d]) for d, s in starts.items()}
        for d, axis in batched.items():
            starts[d] = along(tf.range(tf.shape(indices)[axis]), axis, self.index_rank)
        self.at = self.flat(starts, shape)

    def flat(self, starts: dict[int, Tensor], shape: Sequence[Tensor]) -> Tensor:
        """The position of each number in the flattened axes."""
        total, rank = np.int32(0), self.index_rank + len(self.part)
        for d in self.read:
            position = self.widened(starts[d]) if d in starts else np.int32(0)
            if d in self.part:
                axis = self.index_rank + self.part.index(d)
                position = position + along(tf.range(shape[d]), axis, rank)
            total = total * self.sizes[d] + position
        return total

    def widened(self, by_index: Tensor) -> Tensor:
        """One number per index, with an axis of size 1 for each axis read in part."""
        for _ in self.part:
            by_index = tf.expand_dims(by_index, -1)
        return by_index

    def flattened(self, x: Tensor) -> Tensor:
        """x with the axes that are read flattened into the first."""
        x = transposed(x, [*self.read, *self.whole])
        return tf.reshape(x, shape_of([-1, *(self.sizes[d] for d in self.whole)]))


def may_repeat(indices: Tensor, batched: dict[int, int], moved: set[int], mode: str) -> bool:
    """Whether two slices may overlap; `moved` are the axes along which slices can overlap in part.

    Slices at different positions of the batched axes do not.
    """
    *sizes, count = indices.shape
    if all(size == 1 for axis, size in enumerate(sizes) if axis not in batched.values()):
        return False
    if not isinstance(indices, np.ndarray) or batched or moved or mode == "CLIP":
        return True
    rows = indices.reshape(-1, count)
    return len(np.unique(rows, axis=0)) < len(rows)


def size_of(x: Tensor, axis: int) -> Tensor:
    size = x.shape[axis]
    return np.int32(size) if size is not None else tf.shape(x)[axis]


def shape_of(sizes: Sequence[Tensor]) -> Tensor:
    """A shape for tf.reshape, with -1 for a single free size."""
    free = [size for size in sizes if tf.is_tensor(size)]
    if len(free) == 1 and not any(size == -1 for size in sizes if size is not free[0]):
        return [-1 if tf.is_tensor(size) else size for size in sizes]
    return tf.stack(sizes) if free else sizes


def along(line: Tensor, axis: int, rank: int) -> Tensor:
    """A vector as one axis of an array with this rank."""
    return tf.reshape(line, [-1 if i == axis else 1 for i in range(rank)])


def transposed(x: Tensor, axes: Sequence[int]) -> Tensor:
    return x if axes == sorted(axes) else tf.transpose(x, axes)


def gather(
    target: "TfTarget",
    x: Tensor,
    indices: Tensor,
    *,
    dimension_numbers: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[Size],
    mode: lax.GatherScatterMode,
    fill_value: float | None = None,
    **_: object,
) -> Tensor:
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
        value = filler(target.out[0].dtype.name, fill_value)
        result = tf.where(inside, result, value.astype(x.dtype.name))
    dropped = {*names.collapsed_slice_dims, *names.operand_batching_dims, *labels}
    ones = [d for d in range(len(x.shape)) if d not in dropped]  # axes of which one number is read
    if ones:
        sizes = [size_of(result, i) for i in range(len(labels))]
        result = tf.reshape(result, shape_of([*sizes, *(1 for _ in ones)]))
        labels += ones
    slices, batch = iter(sorted(d for d in labels if d >= 0)), iter(index_labels)
    order = [next(slices) if i in names.offset_dims else next(batch) for i in range(rank)]
    return transposed(result, [labels.index(label) for label in order])


def inside_shape(labels: list[int], positions: Positions) -> list[Tensor]:
    """The shape with which one number per index broadcasts to axes with these labels."""
    inside, rank = positions.inside, positions.index_rank
    return [size_of(inside, label + rank) if label < 0 else 1 for label in labels]


def filler(dtype: str, fill_value: float | None) -> np.ndarray:
    """The result of a read outside of the array."""
    if fill_value is None and dtype != "bool":
        kind = np.dtype(dtype).kind
        if kind == "f":
            fill_value = np.nan
        else:
            fill_value = np.iinfo(dtype).min if kind == "i" else np.iinfo(dtype).max
    return np.asarray(True if fill_value is None else fill_value, dtype)


def scatter(combine: Lowering, repeated: Callable[..., Tensor] | None = None) -> Lowering:
    """Writes by `combine(old, update, is_hit)`; TFLite adds up updates to the same position.

    Where that is wrong, `repeated(at, write, x)` writes to positions of which some may be equal: it
    calls write(x, which), which writes the updates that a vector selects.
    """

    def write(
        target: "TfTarget",
        x: Tensor,
        indices: Tensor,
        updates: Tensor,
        *,
        dimension_numbers: lax.ScatterDimensionNumbers,
        mode: lax.GatherScatterMode,
        unique_indices: bool,
        **_: object,
    ) -> Tensor:
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
        allowed = tf.reshape(allowed, (-1,))

        def write_some(flat: Tensor, which: Tensor) -> Tensor:
            chosen = tf.where(tf.reshape(which, by_row) > 0, updates, tf.zeros_like(updates))
            written = tf.scatter_nd(at, chosen, tf.stack([total, *rest]))
            is_hit = tf.scatter_nd(at, which, tf.stack([total])) > 0
            return combine(flat, written, tf.reshape(is_hit, by_row))

        flat = positions.flattened(x)
        if repeated and not unique_indices and positions.may_repeat:
            # updates outside get positions of their own, so that they hide no update inside
            at_or_outside = tf.where(allowed > 0, at[:, 0], -1)
            result = repeated(at_or_outside, allowed, write_some, flat)
        else:
            result = write_some(flat, allowed)
        result = tf.reshape(result, shape_of([sizes[d] for d in (*read, *whole)]))
        return transposed(result, list(np.argsort([*read, *whole])))

    return write


def last_of_equal(at: Tensor, allowed: Tensor, write: Write, x: Tensor) -> Tensor:
    """Write only the last of several updates to one position."""
    order, is_first = grouped(at[::-1])
    is_last = tf.scatter_nd(order, is_first, tf.shape(at))[::-1]
    return write(x, allowed * is_last)


def one_after_another(at: Tensor, allowed: Tensor, write: Write, x: Tensor) -> Tensor:
    """Write the first update to each position, then the second one to each, and so on."""
    order, is_first = grouped(at)
    index = tf.range(tf.shape(at)[0])
    group = tf.cumsum(tf.cast(is_first, tf.int32)) - 1
    begins = tf.where(is_first > 0, index, tf.zeros_like(index))
    begin_of_group = tf.scatter_nd(group[:, None], begins, tf.shape(at))
    place = tf.scatter_nd(order, index - tf.gather(begin_of_group, group), tf.shape(at))

    def step(i: Tensor, x: Tensor) -> list[Tensor]:
        return [i + 1, write(x, allowed * tf.cast(tf.equal(place, i), tf.float32))]

    most = tf.reduce_max(place)
    shapes = [tf.TensorShape([]), x.shape]
    start = [tf.constant(0), x]
    return tf.while_loop(lambda i, _: i <= most, step, start, shape_invariants=shapes)[1]


def grouped(at: Tensor) -> tuple[Tensor, Tensor]:
    """(the order in which equal positions follow each other, 1 where a new position begins)"""
    order = tf.math.top_k(-1 - at, tf.shape(at)[0]).indices  # equal ones stay in their order
    rows = tf.gather(at, order)
    before = tf.concat([[-2], rows[:-1]], 0)
    return order[:, None], tf.cast(tf.not_equal(rows, before), tf.float32)


def chosen(combine: Callable[[Tensor, Tensor], Tensor]) -> Lowering:
    """A scatter that combines old numbers and updates by a function of the two."""
    return scatter(
        lambda old, new, is_hit: tf.where(is_hit, combine(old, new), old), one_after_another
    )


def written_positions(
    target: "TfTarget",
    x: Tensor,
    indices: Tensor,
    updates: Tensor,
    names: lax.ScatterDimensionNumbers,
    mode: lax.GatherScatterMode,
) -> tuple[Positions, list[int]]:
    """The positions of the updates, and the order of the updates' axes.

    In that order the axes of the indices come first, then those in part, then the whole ones.
    """
    rank = len(x.shape)
    batched = zip(names.operand_batching_dims, names.scatter_indices_batching_dims, strict=True)
    batched = dict(batched)
    window = [d for d in range(rank) if d not in (*names.inserted_window_dims, *batched)]
    axis_of = dict(zip(window, names.update_window_dims, strict=True))
    sizes = target.operand_shapes[2]
    shape = [sizes[axis_of[d]] if d in axis_of else 1 for d in range(rank)]
    indexed = names.scatter_dims_to_operand_dims
    positions = Positions(target, x, indices, indexed, batched, shape, mode)
    by_index = [axis for axis in range(len(updates.shape)) if axis not in names.update_window_dims]
    slices = [*positions.part, *positions.whole]
    ones = [axis_of[d] for d in window if d not in slices]
    return positions, [*by_index, *ones, *(axis_of[d] for d in slices)]


PRIMITIVES = {
    "reshape": reshape,
    "squeeze": squeeze,
    "transpose": widened(transpose, WIDER_TO_MOVE),
    "rev": widened(reverse),
    "concatenate": concatenate,
    "tile": widened(tile),
    "stack": stack,
    "unstack": widened(unstack, WIDER_TO_MOVE),
    "split": widened(split, WIDER_TO_MOVE),
    "slice": widened(slice_, WIDER_TO_MOVE),
    "pad": widened(pad),  # there is no padding of uint8
    "iota": iota,
    "dim_as_value": dim_as_value,
    "dynamic_slice": widened(dynamic_slice),
    "dynamic_update_slice": widened(dynamic_update_slice),
    "gather": widened(gather),
    "scatter": widened(scatter(lambda old, new, is_hit: tf.where(is_hit, new, old), last_of_equal)),
    "scatter-add": widened(scatter(lambda old, new, is_hit: old + new)),
    "scatter-sub": widened(scatter(lambda old, new, is_hit: old - new)),
    "scatter-mul": widened(chosen(tf.multiply)),
    "scatter-max": widened(chosen(tf.maximum)),
    "scatter-min": widened(chosen(tf.minimum)),
}
