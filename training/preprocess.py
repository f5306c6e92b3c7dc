"""Preprocessing of one example, the same in training, evaluation and, if wanted, exports.

A function that needs statistics of the training set has an attribute `fit`: it takes batches of the
function's inputs, arrays (n, ...), and returns {argument: value} for the arguments that are None.
They are computed once, from the training set without the held-out examples, and are part of the
run's config from then on. `fit` must also work for a single example of zeros.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from data_loader.base import Arrays
from data_loader.loader import first_inputs
from data_loader.nest import check_integers
from training.base import Functions, Parts, Preprocessed, marked
from training.objective import preprocessed
from training.options import LoaderOptions
from utils import UserError
from utils.forms import Positive, checked, is_traced, require

# [index in preprocess, {argument: its value}]
Statistics: TypeAlias = list[Any]


def mean_and_std(batches: Iterable[np.ndarray]) -> dict[str, tuple[float, ...]]:
    """The mean and standard deviation along the last axis; constants get the deviation 1."""
    count, mean, squares = 0, np.zeros(()), np.zeros(())
    for x in batches:
        if not isinstance(x, np.ndarray) or x.ndim < 2:
            raise ValueError("needs one array per example, of which the last axis is scaled")
        rows = x.astype(np.float64).reshape(-1, x.shape[-1])
        own, total = rows.mean(0), count + len(rows)
        shift = own - mean
        squares = squares + ((rows - own) ** 2).sum(0) + shift**2 * (count * len(rows) / total)
        mean, count = mean + shift * (len(rows) / total), total
    std = np.sqrt(squares / count)
    for column in np.flatnonzero(~np.isfinite(std)):
        where = f"column {column} (from 0) of the training set holds NaN or infinity"
        raise ValueError(f"{where}; fill in what is missing, or remove those examples")
    std = np.where(std > 1e-7 * np.abs(mean), std, 1)  # else it is constant in float32
    return {"mean": tuple(map(rounded, mean)), "std": tuple(map(rounded, std))}


def column_statistics(
    batches: Iterable[np.ndarray], columns: dict[str, Sequence[str]]
) -> dict[str, tuple]:
    """{mean, std, gaps, unseen} of each column, from the values that are not NaN."""
    batches = [np.asarray(x, np.float64) for x in batches]
    if any(x.ndim != 2 for x in batches):
        raise ValueError("needs one row of numbers per example, as of the data csv or parquet")
    rows = np.concatenate(batches)
    if infinite := [c for c, x in zip(columns, rows.T, strict=True) if np.isinf(x).any()]:
        fix = "leave what is missing empty, or remove those rows"
        raise ValueError(f"column {infinite[0]!r} of the training set holds infinity; {fix}")
    count = np.maximum(1, (~np.isnan(rows)).sum(0))
    mean = np.nansum(rows, 0) / count
    std = np.sqrt(np.nansum((rows - mean) ** 2, 0) / count)
    std = np.where(std > 1e-7 * np.abs(mean), std, 1)  # else it is constant in float32
    gaps = tuple(np.isnan(rows).any(0).astype(int).tolist())
    unseen = tuple(
        tuple(np.setdiff1d(np.arange(1, 1 + len(categories)), column).tolist())
        for categories, column in zip(columns.values(), rows.T, strict=True)
    )
    means, deviations = (tuple(map(rounded, values)) for values in (mean, std))
    return {"mean": means, "std": deviations, "gaps": gaps, "unseen": unseen}


def rounded(number: float) -> float:
    """A number with nine digits, which are enough to distinguish any two float32 numbers."""
    return float(f"{number:.9g}")


def to_unit(x: Array) -> Preprocessed:
    """Bytes as floats in [0, 1]."""
    if x.dtype != jnp.uint8:
        fix = "leave it out for other dtypes"
        raise ValueError(f"to_unit: divides bytes (uint8) by 255, got {x.dtype}; {fix}")
    return x.astype(float) / 255


@marked(fit=mean_and_std)
@checked
def normalize(
    x: Array, *, mean: tuple[float, ...] | None = None, std: tuple[Positive, ...] | None = None
) -> Preprocessed:
    """Subtract the mean of each channel (the last axis) and divide by its standard deviation.

    If `mean` or `std` is left out, it is computed from the training set.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"normalize: works on floats, got {x.dtype}; put to_unit before it")
    return scaled("normalize", x, mean, std, "channels")


@marked(fit=mean_and_std)
@checked
def standardize(
    x: Array, *, mean: tuple[float, ...] | None = None, std: tuple[Positive, ...] | None = None
) -> Preprocessed:
    """A row of numbers with mean 0 and standard deviation 1 in each column of the training set.

    A column that is constant there is only shifted to 0. Integers become floats.
    """
    if x.ndim != 1:
        fix = "use normalize for images"
        raise ValueError(f"standardize: works on a row of numbers, got {list(x.shape)}; {fix}")
    x = x if jnp.issubdtype(x.dtype, jnp.floating) else jnp.asarray(x).astype(float)
    return scaled("standardize", x, mean, std, "columns")


@marked(fit=column_statistics)
@checked
def tabular(
    x: Array,
    *,
    columns: dict,
    one_hot: bool = True,
    mean: tuple[float, ...] | None = None,
    std: tuple[Positive, ...] | None = None,
    gaps: tuple[int, ...] | None = None,
    unseen: tuple[tuple[int, ...], ...] | None = None,
) -> Preprocessed:
    """A row of a table as inputs of a model: its numbers with mean 0 and standard deviation 1, or 0
    if missing; for each number, 1 if it is missing and its column lacks values in training as well;
    its categories, one-hot, or as integers for the model `tabular`.

    Mean, deviation, gaps (whether a column lacks values) and unseen categories, which count as
    unknown, are computed from the training set.
    """
    if mean is None or std is None or gaps is None or unseen is None:
        raise ValueError("tabular: has no statistics yet; give `mean`, `std`, `gaps` and `unseen`")
    lengths = [len(values) for values in (mean, std, gaps, unseen)]
    if x.shape != (len(columns),) or {*lengths} != {len(columns)}:
        counts = "mean, std, gaps and unseen {}, {}, {} and {}".format(*lengths)
        raise ValueError(
            f"columns: there are {len(columns)}; a row has the shape {list(x.shape)}, {counts}"
        )
    check_mean(mean)
    kinds = list(enumerate(columns.values()))
    is_number = np.array([i for i, categories in kinds if not categories], int)
    shift, scale, lacking = (np.asarray(a, np.float32)[is_number] for a in (mean, std, gaps))
    numbers = x[is_number]
    missing = numbers != numbers  # NaN
    parts = [jnp.where(missing, 0, (numbers - shift) / scale), jnp.where(missing, lacking, 0)]
    for i, categories in kinds:
        places = np.arange(1, 1 + len(categories))
        is_each = (x[i] == np.where(np.isin(places, unseen[i]), -1, places)).astype(x.dtype)
        if categories and one_hot:
            parts.append(is_each)
        elif categories:
            parts.append(x[i : i + 1] * is_each.sum() if unseen[i] else x[i : i + 1])
    return jnp.concatenate(parts)


def scaled(
    name: str,
    x: Float[Array, "*axes channels"],
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    what: str,
) -> Float[Array, "*axes channels"]:
    """(x - mean) / std along the last axis."""
    if mean is None or std is None:
        fix = "give `mean` and `std`, or compute them: training.preprocess.fitted(preprocess, data)"
        raise ValueError(f"{name}: has no statistics yet; {fix}")
    for argument, values in (("mean", mean), ("std", std)):
        if len(values) != x.shape[-1]:
            needed = f"one number for each of the {x.shape[-1]} {what}"
            raise ValueError(f"{argument}: must hold {needed}, got {len(values)}")
    check_mean(mean)
    return (x - jnp.asarray(mean, x.dtype)) / jnp.asarray(std, x.dtype)


def check_mean(mean: Sequence[float]) -> None:
    """Refuse a mean that is not finite; `std` is checked by its annotation."""
    is_finite = lambda mean: all(is_traced(m) or math.isfinite(m) for m in mean)  # noqa: E731
    require({"mean": mean}, is_finite, "finite numbers")


def unfitted(fn: Callable[..., Preprocessed]) -> list[str]:
    """The names of the arguments of a preprocessing function that have yet to be computed."""
    function, given = getattr(fn, "func", fn), getattr(fn, "keywords", {})
    if not hasattr(function, "fit"):
        return []
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind == p.KEYWORD_ONLY and p.default is None]
    return [name for name in names if given.get(name) is None]


def with_fit(
    fn: Callable[..., Preprocessed], batches: Iterable[np.ndarray]
) -> Callable[..., Preprocessed]:
    """A preprocessing function with the arguments that its `fit` computes from these batches."""
    function: Any = getattr(fn, "func", fn)
    names = unfitted(fn)
    accepted, given = inspect.signature(function.fit).parameters, getattr(fn, "keywords", {})
    try:
        values = function.fit(batches, **{k: v for k, v in given.items() if k in accepted})
    except ValueError as error:
        raise UserError(f"{function.__name__}: {error}") from error
    return bound(fn, {name: values[name] for name in names})


def bound(fn: Callable[..., Preprocessed], values: dict[str, Any]) -> Callable[..., Preprocessed]:
    """A preprocessing function with other arguments. It is never a partial of a partial, since
    `unfitted` sees only the outer arguments of a partial."""
    return partial(getattr(fn, "func", fn), **getattr(fn, "keywords", {}) | values)


def fitted(
    preprocess: Functions,
    dataset: Any,
    options: LoaderOptions | None = None,
    limit: int | None = None,
) -> list[Callable[..., Preprocessed]]:
    """The preprocessing functions with all of their statistics, computed from a training set, given
    as `fit` takes it, or from its first `limit` batches."""
    dataset = Arrays(*dataset) if isinstance(dataset, tuple) else dataset
    done = []
    for fn in preprocess:
        if unfitted(fn):
            compute = jax.jit(lambda x, before=tuple(done): preprocessed(before, x))

            def prepare(x: PyTree, compute: Callable[[PyTree], PyTree] = compute) -> PyTree:
                check_integers(x, bits=8 * jnp.result_type(int).itemsize)
                return jax.device_get(compute(x))

            raw = first_inputs(dataset, options or LoaderOptions(), limit)
            fn = with_fit(fn, map(prepare, raw))
        done.append(fn)
    return done


def fitted_to_zeros(preprocess: Functions, x: PyTree) -> list[Callable[..., Preprocessed]]:
    """The functions with statistics of one example of zeros, which are enough to trace shapes."""
    done = []
    for fn in preprocess:
        if unfitted(fn):
            zeros = jax.tree.map(lambda a: np.zeros((1, *a.shape), a.dtype), x)
            fn = with_fit(fn, [zeros])
        x = jax.eval_shape(fn, x)
        done.append(fn)
    return done


def with_statistics(parts: Parts, statistics: Sequence[Statistics]) -> Parts:
    """The parts of a config with statistics of the training set, [[index in preprocess, {argument:
    value}], ...], in the functions and in the config."""
    assert parts.config is not None
    preprocess, config = list(parts.preprocess), dict(parts.config)
    nodes = config["preprocess"] = list(config["preprocess"])
    for i, values in statistics:
        values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        preprocess[i] = bound(preprocess[i], values)
        nodes[i] = nodes[i] | {"args": nodes[i]["args"] | values}
    return replace(parts, preprocess=tuple(preprocess), config=config, unfitted={})


def with_recorded(parts: Parts, config: dict[str, Any], source: str | Path) -> Parts:
    """The parts with the statistics that a run has recorded in its config."""
    if not parts.unfitted:
        return parts
    assert parts.config is not None
    statistics = recorded_statistics(parts, config)
    if len(statistics) < len(parts.unfitted):
        names = [parts.config["preprocess"][i]["name"] for i in parts.unfitted]
        raise UserError(
            f"preprocess: {source} has no statistics of the training set for {', '.join(names)}; "
            "use the config that the run has recorded, or write them into yours"
        )
    return with_statistics(parts, statistics)


def recorded_statistics(parts: Parts, config: dict[str, Any]) -> list[Statistics]:
    """The statistics that the config of a run holds for the same parts, for `with_statistics`."""
    assert parts.config is not None
    recorded, found = config.get("preprocess"), []
    recorded = recorded if isinstance(recorded, list) else []
    for i, names in parts.unfitted.items():
        node = recorded[i] if i < len(recorded) and isinstance(recorded[i], dict) else {}
        args = node.get("args")
        same = node.get("name") == parts.config["preprocess"][i]["name"]
        if not isinstance(args, dict) or not same:
            continue
        values = {name: args.get(name) for name in names}
        if all(map(is_statistic, values.values())):
            found.append([i, values])
    return found


def is_statistic(value: object) -> bool:
    """Whether this is a finite number, a list of them, or a list of such lists."""
    if isinstance(value, list):
        return bool(value) and all(item == [] or is_statistic(item) for item in value)
    return isinstance(value, int | float) and type(value) is not bool and abs(value) < 2**127
