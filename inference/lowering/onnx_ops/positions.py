"""What gather and scatter read or write: one window of an array per index."""

from dataclasses import dataclass

import numpy as np
from jax.lax import GatherScatterMode

from inference.lowering.onnx_ops.dims import is_number
from inference.lowering.value import Value, constant


@dataclass
class Windows:
    """One window of `sizes` per index, in an array of `shape`; gather's result has `rank` axes.

    For a scatter, its updates take the part of the result.
    """

    shape: tuple
    sizes: tuple
    indices: Value  # (..., number of indexed axes)
    indexed: tuple  # the axes of the array that an index refers to
    batched: dict  # {axis of the array: axis of the indices} that are paired
    window: dict  # {axis of the array: axis of the result}
    rank: int
    mode: GatherScatterMode

    @property
    def index_axes(self):
        """The axes of the result that come from the indices."""
        return [axis for axis in range(self.rank) if axis not in self.window.values()]

    def limit(self, axis):
        """The last position at which a window can start."""
        return self.shape[axis] - self.sizes[axis]


def window_starts(t, windows):
    """{axis: the start of each window, a Value or the name of an int64 tensor}."""
    indices, starts = windows.indices, {}
    for i, axis in enumerate(windows.indexed):
        if indices.constant:
            column = np.broadcast_to(indices.data, indices.shape)[..., i]
            starts[axis] = constant(column.astype(np.int64))
        else:
            starts[axis] = t.Gather(t.cast(indices, np.int64), np.asarray(i, np.int64), axis=-1)
    return starts


def clamped(t, start, limit):
    """A start, moved so that its window lies inside."""
    if isinstance(start, Value) and start.constant:
        if is_number(limit):
            return constant(np.clip(start.data, 0, limit))
        if not start.data.any():  # the first position is inside, whatever the limit
            return start
    if is_number(limit):
        return t.Clip(start, np.int64(0), np.int64(limit))
    return t.Max(t.Min(start, scalar(t, limit)), np.int64(0))


def scalar(t, size):
    """A size as a tensor without axes."""
    return np.int64(size) if is_number(size) else t.Squeeze(t.size(size), np.array([0]))


def inside(t, windows, starts):
    """Whether each window lies inside, one boolean per index; None where all are known to."""
    result = None
    for axis, start in starts.items():
        limit = windows.limit(axis)
        is_known = isinstance(start, Value) and is_number(limit)
        if is_known and np.all((start.data >= 0) & (start.data <= limit)):
            continue
        is_below = t.LessOrEqual(start, scalar(t, limit))
        fits = t.And(t.GreaterOrEqual(start, np.int64(0)), is_below)
        result = fits if result is None else t.And(result, fits)
    return result


def flat_positions(t, windows, starts):
    """The position of every number of every window in the flattened array, in result order."""
    window_axes = np.array(sorted(windows.window.values()), np.int64)
    total, stride = None, 1
    for axis in reversed(range(len(windows.shape))):
        parts = []
        if axis in starts:
            start = starts[axis]
            parts.append(t.Unsqueeze(start, window_axes) if len(window_axes) else start)
        if axis in windows.batched:
            index_axis = windows.index_axes[windows.batched[axis]]
            parts.append(range_along(t, windows.shape[axis], index_axis, windows.rank))
        if axis in windows.window:
            result_axis = windows.window[axis]
            parts.append(range_along(t, windows.sizes[axis], result_axis, windows.rank))
        for part in parts:
            part = t.Mul(part, np.int64(stride) if is_number(stride) else t.size(stride))
            total = part if total is None else t.Add(total, part)
        stride = stride * windows.shape[axis]
    return total


def range_along(t, size, axis, rank):
    """0, 1, 2, ... along one axis of an array with this rank."""
    shape = [size if a == axis else 1 for a in range(rank)]
    return t.table["iota"](t, dimension=axis, shape=shape, dtype=np.int64)
