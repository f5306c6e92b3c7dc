"""What a run measures. Each step, or each batch of an evaluation, makes one row on the device; the
host adds the rows in order, in float64. So the sums do not depend on where chunks end.

The mode of a metric says how the values of many examples become one. A value may be a
dict, and each of its leaves may be Weighted: the sum of the weights then takes the place of the
count.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypedDict, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Num, PyTree, Shaped

from training.base import Mode, Weighted, is_weighted
from utils import map_named, named_leaves

HostArray: TypeAlias = np.ndarray | np.number  # NumPy makes numbers of arrays without axes
Held = TypeVar("Held")  # an array, in memory or still in a checkpoint's file
GOOD = -1  # in "bad": the loss and all gradients are finite


@final
class EvaluationRow(TypedDict):
    """What one batch of an evaluation measured. Rows of several batches, or of several steps, have
    arrays with a first axis."""

    examples: Int[Any, "*steps"]  # how many were genuine
    values: dict[str, PyTree]  # {label: what the mode of the metric keeps of its values}


@final
class Row(TypedDict):
    """What one step of training measured."""

    examples: Int[Any, "*steps"]
    values: dict[str, PyTree]
    steps: Int[Any, "*steps"]  # 1, or 0 if the step was refused
    bad: Int[Any, "*steps"]  # the number of the first array that was not finite, or GOOD
    norms: dict[str, Float[Any, "*steps _"]]


class TrainingModes(TypedDict):
    """Which metrics the steps of training measure: {label: mode}."""

    epoch: dict[str, Mode]  # for the end of an epoch
    line: dict[str, Mode]  # for the log lines within it


class Spread(NamedTuple):
    """The mean of a batch and the sum of squared distances from it, which float32 holds more
    precisely than a sum of squares."""

    mean: Float[Any, "..."]
    m2: Float[Any, "..."]


class Moments(NamedTuple):
    """The sums of the values and of their squares, in float64."""

    total: HostArray
    squares: HostArray


# On the device.


def row_of_batch(
    modes: dict[str, Mode], values: dict[str, PyTree], mask: Bool[Array, "batch"]
) -> EvaluationRow:
    """The row of one batch. `modes` are those of what is measured, {label: mode}; examples whose
    mask is False are left out."""
    measured = {label: of_mode(mode, values[label], mask) for label, mode in modes.items()}
    return {"examples": mask.sum(dtype=jnp.int32), "values": measured}


def of_mode(mode: Mode, values: PyTree, mask: Bool[Array, "batch"]) -> PyTree:
    """What a row holds of a value."""

    def of_leaf(value: Array | Weighted) -> PyTree:
        if not is_weighted(value) or mode == "CONCAT":
            return BATCH[mode](unweighted(value), mask)
        weight = jnp.where(mask, value.weight, 0).astype(wide(value.weight))
        return Weighted(BATCH[mode](value.value, weight), weight.sum())

    return per_leaf(of_leaf, values)


def norms_of(names: Iterable[str], grads: PyTree, params: PyTree) -> dict[str, Array]:
    """{name: norm} of the gradients or the params; a name that ends with `_leaves` has one norm per
    leaf."""
    trees = {"gradient_norm": grads, "parameter_norm": params}

    def norm(name: str) -> Array:
        leaves = jax.tree.leaves(trees[name.removesuffix("_leaves")])
        squares = [jnp.sum(jnp.square(a.astype(jnp.float32))) for a in leaves]
        return jnp.sqrt(jnp.stack(squares) if name.endswith("_leaves") else sum(squares))

    return {name: norm(name) for name in names}


def wide(a: Array) -> np.dtype:
    """The type in which values are summed."""
    return jnp.promote_types(a.dtype, jnp.float32)


def count_type(a: Array) -> np.dtype:
    """The type in which counts are summed: integers stay integers, as float32 is exact only up to
    2^24."""
    return jnp.promote_types(
        a.dtype, jnp.float32 if jnp.issubdtype(a.dtype, jnp.inexact) else jnp.int32
    )


def under(
    mask: Shaped[Array, "batch"],
    values: Num[Array, "batch *axes"],
    other: int | float,
    wide: Callable[[Array], np.dtype] = wide,
) -> Num[Array, "batch *axes"]:
    """The values where the mask, or the weight of an example, is not 0; `other` elsewhere."""
    return jnp.where(against(mask, values) != 0, values, other).astype(wide(values))


def against(
    mask: Shaped[Array, "batch"], values: Shaped[Array, "batch *axes"]
) -> Shaped[Array, "batch ..."]:
    return mask.reshape(-1, *(1,) * (values.ndim - 1))


def total(
    values: Shaped[Array, "batch *axes"],
    mask: Shaped[Array, "batch"],
    wide: Callable[[Array], np.dtype] = wide,
) -> Num[Array, "*axes"]:
    """The sum of the values under a mask, or by their weights."""
    kept = under(mask, values, 0, wide)
    kept = kept if mask.dtype == bool else kept * against(mask, kept)
    return kept.sum(0, dtype=kept.dtype)


def mean(values: Shaped[Array, "batch *axes"], mask: Shaped[Array, "batch"]) -> Num[Array, "*axes"]:
    count = mask.sum()
    return total(values, mask) / jnp.where(count == 0, 1, count)


def spread(values: Shaped[Array, "batch *axes"], mask: Shaped[Array, "batch"]) -> Spread:
    center = mean(values, mask)
    return Spread(center, total((values - center) ** 2, mask))


# For one leaf of a value: what the row of a batch holds of it, under a mask or weights.
BATCH = {
    "MEAN": total,
    "SUM": partial(total, wide=count_type),
    "SINGLE": mean,
    "MAX": lambda values, mask: under(mask, values, -jnp.inf).max(0),
    "MIN": lambda values, mask: under(mask, values, jnp.inf).min(0),
    "STD": spread,
    "CONCAT": lambda values, _mask: values,
}


# On the host.


class Sums:
    """The sum of rows. `modes` says what is added up; `like` is a row of arrays or of shapes."""

    def __init__(self, modes: dict[str, Mode], like: Row | EvaluationRow) -> None:
        self.modes = modes
        norms = like.get("norms", {})
        self.examples = self.steps = self.refused = 0
        self.norms = {name: np.zeros(norm.shape) for name, norm in norms.items()}
        self.values = {
            label: per_leaf(partial(zero, mode), like["values"][label])
            for label, mode in modes.items()
        }

    def add(self, rows: Row | EvaluationRow) -> None:
        """Add rows, arrays whose first axis has an entry for each of them."""
        counts = rows["examples"]
        self.examples += int(counts.sum())
        if "steps" in rows:
            self.steps += int(rows["steps"].sum())
            self.refused += int((rows["bad"] != GOOD).sum())
            norms = rows["norms"]
            self.norms = {name: in_order(norm, norms[name]) for name, norm in self.norms.items()}
        for label, mode in self.modes.items():
            add = partial(added, mode, counts)
            self.values[label] = per_leaf(add, self.values[label], rows["values"][label])

    def results(self) -> tuple[dict[str, PyTree], dict[str, HostArray]]:
        """({label: result}, {norm: its mean over the steps})"""
        norms = {name: per(norm, np.asarray(self.steps)) for name, norm in self.norms.items()}
        return results(self.modes, self.values, np.asarray(self.examples)), norms

    def tree(self) -> dict[str, Any]:
        """All that is needed to continue, as arrays."""
        values = per_leaf(lambda a: np.concatenate(a) if isinstance(a, list) else a, self.values)
        counts = {"count": np.int64(self.examples), "refused": np.int64(self.refused)}
        return {
            "examples": counts | {"values": values},
            "steps": {"count": np.int64(self.steps), "norms": self.norms},
        }

    def take(self, arrays: Mapping[str, np.ndarray]) -> tuple[bool, bool]:
        """Continue from the `tree` of other sums, its arrays by name. What is not of the same kind,
        the values or the norms, begins at zero. Returns (whether the values continue, whether the
        norms do)."""
        own = self.tree()
        growing = tuple(f"values/{k}" for k, mode in self.modes.items() if mode == "CONCAT")
        examples = same_tree(below(arrays, "examples"), own["examples"], growing)
        steps = same_tree(below(arrays, "steps"), own["steps"])
        if examples:
            self.examples, self.refused = int(examples["count"]), int(examples["refused"])
            self.values = examples["values"]
            for label in [label for label, mode in self.modes.items() if mode == "CONCAT"]:
                self.values[label] = jax.tree.map(lambda a: [a], self.values[label])
        if steps:
            self.steps, self.norms = int(steps["count"]), steps["norms"]
        return bool(examples), bool(steps)


class TrainingSums:
    """What the steps of an epoch measured so far, for each replica: the Sums of the epoch, those of
    the log line in progress, and its rows. `modes` are those of {"epoch": ..., "line": ...}, and
    `like` is a row of shapes; rows are kept only if the values of single steps are reported."""

    def __init__(self, modes: TrainingModes, like: Row, replicas: int, per_step: bool) -> None:
        self.modes, self.like, self.replicas, self.per_step = modes, like, replicas, per_step
        self.epoch = [Sums(modes["epoch"], like) for _ in range(replicas)]
        self.new_line()

    def new_line(self) -> None:
        """Begin the next log line."""
        none = jax.tree.map(lambda a: np.zeros((0, *a.shape), a.dtype), self.for_line(self.like))
        self.line = [Sums(self.modes["line"], self.like) for _ in range(self.replicas)]
        self.rows = [none] * self.replicas

    def for_line(self, rows: Row) -> Row:
        """Rows without what no log line shows."""
        values = {label: rows["values"][label] for label in self.modes["line"]}
        return {**rows, "values": values}

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows of each replica."""
        for replica, own in enumerate(rows):
            self.epoch[replica].add(own)
            self.line[replica].add(own)
            if self.per_step:
                both = self.rows[replica], self.for_line(own)
                self.rows[replica] = jax.tree.map(lambda *a: np.concatenate(a), *both)

    def trees(self) -> list[dict[str, Any]]:
        """What a checkpoint within an epoch holds, of each replica."""
        trees = []
        for epoch, line, rows in zip(self.epoch, self.line, self.rows, strict=True):
            kept = {"rows": rows} if self.per_step else {}
            trees.append({"epoch": epoch.tree(), "line": line.tree()} | kept)
        return trees

    def take(self, trees: Sequence[Mapping[str, np.ndarray]]) -> tuple[bool, bool]:
        """Continue from the `trees` of other sums, the arrays of each by name. Returns (whether the
        values of the epoch continue, whether the log line does)."""
        epoch_continues = line_continues = True
        for replica, arrays in enumerate(trees):
            values, _ = self.epoch[replica].take(below(arrays, "epoch"))
            line = all(self.line[replica].take(below(arrays, "line")))
            if self.per_step:
                rows = same_tree(below(arrays, "rows"), self.rows[replica], ("",))
                self.rows[replica] = rows or self.rows[replica]
                line = line and bool(rows)
            epoch_continues, line_continues = epoch_continues and values, line_continues and line
        return epoch_continues, line_continues


def below(arrays: Mapping[str, Held], name: str) -> dict[str, Held]:
    """The arrays whose names begin with `name/`, without that."""
    prefix = f"{name}/"
    return {k.removeprefix(prefix): a for k, a in arrays.items() if k.startswith(prefix)}


def same_tree(
    arrays: Mapping[str, np.ndarray], tree: PyTree, growing: tuple[str, ...] = ()
) -> PyTree:
    """The tree with these arrays by name; None if they have other names, types or shapes. The first
    axis of those whose names begin with one of `growing` may have any length."""

    def form(name: str, array: np.ndarray) -> tuple:
        grows = name.startswith(growing)
        return array.dtype, array.ndim, array.shape[1:] if grows else array.shape

    wanted = named_leaves(tree)
    fits = arrays.keys() == wanted.keys() and all(
        form(name, array) == form(name, wanted[name]) for name, array in arrays.items()
    )
    return map_named(lambda name, _: np.asarray(arrays[name]), tree) if fits else None


def zero(mode: Mode, like: PyTree) -> PyTree:
    """The sum of no rows, for one leaf of a value."""
    if is_weighted(like):
        return Weighted(zero(mode, like.value), np.zeros(()))
    if mode == "STD":
        return Moments(np.zeros(like.mean.shape), np.zeros(like.mean.shape))
    if mode == "CONCAT":
        return [np.zeros((0, *like.shape[1:]), like.dtype)]
    start = {"MAX": -np.inf, "MIN": np.inf}.get(mode, 0)
    return np.full(like.shape, start, np.float64 if start else double(like.dtype))


def added(mode: Mode, counts: np.ndarray, total: PyTree, rows: PyTree) -> PyTree:
    """A sum and these rows, of `counts` examples each, for one leaf of a value."""
    if is_weighted(rows):
        value = added(mode, rows.weight, total.value, rows.value)
        return Weighted(value, in_order(total.weight, rows.weight))
    if mode == "STD":
        own = moments(rows, counts)
        return Moments(in_order(total.total, own.total), in_order(total.squares, own.squares))
    if mode == "CONCAT":
        total.extend(own[:count] for own, count in zip(rows, counts, strict=True))
        return total
    if mode == "SINGLE":
        last = rows[counts > 0][-1:]
        return last[0].astype(total.dtype) if len(last) else total
    if mode in ("MAX", "MIN"):
        larger = np.maximum if mode == "MAX" else np.minimum
        return larger(total, larger.reduce(rows, axis=0))
    return in_order(total, rows)


def in_order(total: HostArray, rows: HostArray) -> HostArray:
    """The total and each of the rows, added one after the other: the same however rows are cut into
    chunks."""
    rows = np.concatenate([np.asarray(total)[None], rows.astype(double(rows.dtype))])
    with np.errstate(invalid="ignore", over="ignore"):  # infinity minus infinity
        return np.cumsum(rows, axis=0)[-1]


def moments(rows: Spread, counts: np.ndarray) -> Moments:
    """The Moments of each row, from its Spread."""
    mean = rows.mean.astype(np.float64)
    count = along(mean, counts)
    return Moments(count * mean, rows.m2 + count * mean**2)


def double(dtype: np.dtype) -> type[np.number]:
    """The type in which the host adds."""
    return np.int64 if np.issubdtype(dtype, np.integer) else np.float64


def results(
    modes: dict[str, Mode], values: dict[str, PyTree], counts: np.ndarray
) -> dict[str, PyTree]:
    """{label: result} of sums, or of several along a first axis, of so many examples each."""

    def of_leaf(mode: Mode, value: PyTree) -> HostArray:
        if is_weighted(value):
            return result(mode, value.value, np.asarray(value.weight))
        return result(mode, value, counts)

    return {label: per_leaf(partial(of_leaf, mode), values[label]) for label, mode in modes.items()}


def results_of_rows(
    modes: dict[str, Mode], rows: Row
) -> tuple[dict[str, PyTree], dict[str, HostArray]]:
    """({label: results}, {norm: values}) of each row alone."""

    def of_leaf(mode: Mode, value: PyTree) -> PyTree:
        if mode != "STD":
            return value
        if is_weighted(value):
            return Weighted(moments(value.value, value.weight), value.weight)
        return moments(value, rows["examples"])

    values = {
        label: per_leaf(partial(of_leaf, mode), rows["values"][label])
        for label, mode in modes.items()
    }
    norms = {name: per(norm, rows["steps"]) for name, norm in rows.get("norms", {}).items()}
    return results(modes, values, rows["examples"]), norms


def result(mode: Mode, value: PyTree, count: HostArray) -> HostArray:
    """The result of a sum over `count` examples, NaN where that is zero."""
    if mode == "CONCAT":
        return np.concatenate(value)
    if mode == "MEAN":
        return per(value, count)
    if mode == "STD":
        variance = per(value.squares, count) - per(value.total, count) ** 2
        return np.sqrt(np.maximum(variance, 0))
    return np.where(along(value, count) == 0, np.nan, value)


def per(total: HostArray, count: HostArray) -> HostArray:
    """total / count, NaN where the count is zero."""
    divisor = np.where(along(total, count) == 0, np.nan, along(total, count))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.divide(total, divisor)


def along(values: ArrayLike, count: HostArray) -> HostArray:
    """`count`, one number per first index of `values`, in a shape that broadcasts with `values`."""
    return count.reshape(count.shape + (1,) * (np.ndim(values) - count.ndim))


def per_leaf(function: Callable, tree: PyTree, *others: PyTree) -> PyTree:
    """The tree of function(leaf, ...), where a Weighted, a Spread, Moments and the list of CONCAT
    are one leaf."""
    is_leaf = lambda x: isinstance(x, Weighted | Spread | Moments | list)  # noqa: E731
    return jax.tree.map(function, tree, *others, is_leaf=is_leaf)


def unweighted(value: PyTree) -> PyTree:
    """The values of the examples, or their shapes, without the weights."""
    return value.value if is_weighted(value) else value
