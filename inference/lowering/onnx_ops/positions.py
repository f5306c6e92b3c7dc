"""Where gather and scatter reach: the windows of an array that a list of indices names."""

from dataclasses import dataclass

import numpy as np
from jax.lax import GatherScatterMode

from inference.lowering.onnx_ops.dims import is_number
from inference.lowering.value import Value, constant


@dataclass
class Windows:
    """A window of `sizes` of an array of `shape` for each index; the result, or the updates, have `rank` axes."""

    shape: tuple
    sizes: tuple
    indices: Value  # (..., axes that are indexed)
    indexed: tuple  # the axes of the array that an index names
    batched: dict  # {axis of the array: axis of the indices} that go together
    window: dict  # {axis of the array: axis of the result}
    rank: int
    mode: GatherScatterMode

    @property
    def listed(self):
        """The axes of the result that are those of the indices."""
        return [axis for axis in range(self.rank) if axis not in self.window.values()]

    def limit(self, axis):
        """The last place where a window can start."""
        return self.shape[axis] - self.sizes[axis]


def starts(t, windows):
    """{axis: where each window starts, a Value or the name of a tensor of int64}."""
    indices, found = windows.indices, {}
    for place, axis in enumerate(windows.indexed):
        if indices.constant:
            found[axis] = constant(
                np.broadcast_to(indices.data, indices.shape)[..., place].astype(np.int64)
            )
        else:
            found[axis] = t.Gather(t.cast(indices, np.int64), np.asarray(place, np.int64), axis=-1)
    return found


def clamped(t, start, limit):
    """A start that is moved so far that its window lies inside."""
    if isinstance(start, Value) and start.constant and is_number(limit):
        return constant(np.clip(start.data, 0, limit))
    return t.Max(
        t.Min(start, t.size(limit) if not is_number(limit) else np.int64(limit)), np.int64(0)
    )


def inside(t, windows, found):
    """Which windows lie inside, as the indices lie; None where it is known that all do."""
    result = None
    for axis, start in found.items():
        limit = windows.limit(axis)
        if (
            isinstance(start, Value)
            and is_number(limit)
            and np.all((start.data >= 0) & (start.data <= limit))
        ):
            continue
        highest = np.int64(limit) if is_number(limit) else t.size(limit)
        here = t.And(t.GreaterOrEqual(start, np.int64(0)), t.LessOrEqual(start, highest))
        result = here if result is None else t.And(result, here)
    return result


def flat_positions(t, windows, found):
    """The place of every number of every window in the flattened array, as the result lies."""
    others = np.array(sorted(windows.window.values()), np.int64)
    total, step = None, 1
    for axis in reversed(range(len(windows.shape))):
        parts = []
        if axis in found:
            parts.append(t.Unsqueeze(found[axis], others) if len(others) else found[axis])
        if axis in windows.batched:
            parts.append(
                along(t, windows.shape[axis], windows.listed[windows.batched[axis]], windows.rank)
            )
        if axis in windows.window:
            parts.append(along(t, windows.sizes[axis], windows.window[axis], windows.rank))
        for part in parts:
            part = t.Mul(part, np.int64(step) if is_number(step) else t.size(step))
            total = part if total is None else t.Add(total, part)
        step = step * windows.shape[axis]
    return total


def along(t, size, axis, rank):
    """0, 1, 2, ... along an axis."""
    return t.table["iota"](
        t, dimension=axis, shape=[size if a == axis else 1 for a in range(rank)], dtype=np.int64
    )
