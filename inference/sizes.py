"""Free sizes of an exported file's inputs: which there are, and the sizes at which it is tried.

`--free 1:length` leaves axis 1 of every input free under the name `length`; axis 0 is the batch.
`tokens:1:length` is that of one input, `1:length:1-512` gives the range of the size, and
`1:8*height` says that it is a multiple of 8.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from jax import export
from jaxtyping import PyTree

from utils import UserError, named_leaves

FORM = re.compile(
    r"(?:(?P<input>.+):)?(?P<axis>\d+):(?:(?P<factor>\d+)\*)?(?P<name>[A-Za-z_]\w*)"
    r"(?::(?P<low>\d+)-(?P<high>\d+)?)?"
)


class Free(NamedTuple):
    """A free size: a multiple of `factor` from `low` to `high`."""

    text: str
    input: str | None  # None for every input that has this axis
    axis: int
    name: str
    factor: int
    low: int | None
    high: int | None

    def others(self, size: int) -> tuple[int, int, int]:
        """The sizes besides `size` at which a file is tried: the smallest, the largest, or a larger
        one if there is none, and one between them."""
        low = -(-(self.low or 1) // self.factor) * self.factor
        high = (self.high or size + 3 * self.factor) // self.factor * self.factor
        middle = (size // 2 // self.factor + 1) * self.factor
        return low, high, min(max(low, middle), high)

    def constraints(self) -> list[str]:
        size = f"{self.factor}*{self.name}" if self.factor > 1 else self.name
        bounds = {">=": self.low, "<=": self.high}
        return [f"{size} {sign} {bound}" for sign, bound in bounds.items() if bound]


FreeAxes = dict[tuple[str, int], Free]  # {(name of an input, index in its shape): Free}
Tried = tuple[dict[str, int], PyTree]  # the free sizes by name, and a tree of shapes with them


def parse_free(texts: Iterable[str]) -> tuple[Free, ...]:
    """The free sizes of --free; raises if one of them is invalid, or two contradict each other."""
    free = []
    for text in texts:
        match = FORM.fullmatch(text)
        if not match:
            raise UserError(
                f"--free: {text!r} is not an axis and a name; write it as 1:length, or with a "
                "range and an input, as tokens:1:length:1-512"
            )
        numbers: dict[str, Any] = {
            key: match[key] and int(match[key]) for key in ("axis", "factor", "low", "high")
        }
        numbers["factor"] = numbers["factor"] or 1
        one = Free(text, input=match["input"], name=match["name"], **numbers)
        if one.factor < 1 or (one.high and one.high < max(one.low or 1, one.factor)):
            raise UserError(f"--free: {text}: allows no size")
        free.append(one)
    by_name = {one.name: one for one in free}
    for one in free:
        if one.name == "batch" and one.axis != 0:
            raise UserError(f"--free: {one.text}: 'batch' is the name of axis 0; choose another")
        if one[4:] != by_name[one.name][4:]:
            raise UserError(
                f"--free: {one.text} and {by_name[one.name].text} are one size with two ranges; "
                "choose another name, or the same range"
            )
    return tuple(free)


def free_axes(inputs: PyTree, free: Iterable[Free], first: int = 1) -> FreeAxes:
    """{(name of an input, index of a size in its shape): Free}, of a tree of shapes.

    `first` is the axis of the first size: 1 for the shapes of one example.
    """
    leaves, axes = named_leaves(inputs), {}
    for one in free:
        named = [name for name in leaves if one.input in (None, name or "input")]
        if not named:
            known = ", ".join(name or "input" for name in leaves)
            raise UserError(f"--free: {one.text}: there is no input {one.input!r}, only {known}")
        if one.axis < first:
            raise UserError(f"--free: {one.text}: axis 0 is the batch, which is free by itself")
        found = [name for name in named if one.axis - first < len(leaves[name].shape)]
        if not found:
            shapes = {name or "input": list(leaves[name].shape) for name in named}
            raise UserError(
                f"--free: {one.text}: no input has an axis {one.axis}; without the batch, "
                f"their shapes are {shapes}"
            )
        for name in found:
            size = leaves[name].shape[one.axis - first]
            fix = "choose another range, or factor"
            if size % one.factor or size < (one.low or 1) or size > (one.high or size):
                raise UserError(f"--free: {one.text}: the size of the data is {size}; {fix}")
            axes[name, one.axis - first] = one
    return axes


def free_shapes(inputs: PyTree, axes: FreeAxes) -> PyTree:
    """A tree of shapes whose free sizes are symbols."""
    if not axes:
        return inputs
    constraints = {text: None for one in axes.values() for text in one.constraints()}
    scope = export.SymbolicScope(list(constraints))

    def size(one: Free) -> Any:
        return export.symbolic_shape(f"{one.factor}*{one.name}", scope=scope)[0]

    return resized(inputs, {axis: size(one) for axis, one in axes.items()})


def tried_shapes(inputs: PyTree, axes: FreeAxes) -> list[Tried]:
    """[({name: size}, a tree of shapes)]: other choices of all free sizes."""
    names, leaves = list(dict.fromkeys(one.name for one in axes.values())), named_leaves(inputs)
    present = {one.name: leaves[name].shape[axis] for (name, axis), one in axes.items()}
    tried = [present]
    for i in range(3):
        # Where one size becomes smaller, the next becomes larger, so that no image stays square.
        sizes = {
            one.name: one.others(present[one.name])[(i + names.index(one.name)) % 3]
            for one in axes.values()
        }
        tried += [sizes] if sizes not in tried else []
    return [
        (sizes, resized(inputs, {axis: sizes[one.name] for axis, one in axes.items()}))
        for sizes in tried[1:]
    ]


def resized(inputs: PyTree, sizes: dict[tuple[str, int], Any]) -> PyTree:
    """A tree of shapes with other sizes, {(name of an input, index in its shape): size}."""
    names = iter(named_leaves(inputs))

    def leaf_of(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        name = next(names)
        shape = tuple(sizes.get((name, axis), size) for axis, size in enumerate(leaf.shape))
        return leaf if shape == leaf.shape else jax.ShapeDtypeStruct(shape, leaf.dtype)

    return jax.tree.map(leaf_of, inputs)
