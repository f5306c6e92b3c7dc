"""What a run measures, accumulated on the device: the mode of a metric says how the values of many
examples become one.

A tally is {"examples": count, "values": {label: {mode: accumulator}}}; in training it also holds
"steps" and "extras", the sums of the norms of each step. "lost" has the rounding errors of long
sums. A tally contains all that is needed to continue it, so an update does not depend on what is
measured. A value may be a dict, and each of its leaves may be Weighted: its accumulator then holds
the sum of the weights, which takes the place of the count.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from training.base import Weighted, is_weighted


def empty(modes, shapes, rows=0, exact=True):
    """A tally of no examples, for values of these shapes; CONCAT has room for `rows`. An `exact`
    one has the rounding errors of its MEAN sums, without which a float32 mean over 200,000 batches
    is wrong in its fourth digit."""

    def start(label, mode):
        count = rows if mode == "CONCAT" else 1
        zeros = jax.tree.map(lambda a: jnp.zeros((count, *a.shape[1:]), a.dtype), shapes[label])
        return {mode: of_mode(mode, zeros, jnp.zeros(count, bool))}

    values = {label: start(label, mode) for label, mode in modes.items()}
    sums = {label: entry["MEAN"] for label, entry in values.items() if "MEAN" in entry}
    lost = {"lost": jax.tree.map(jnp.zeros_like, sums)} if exact else {}
    return {"examples": jnp.int32(0), "values": values} | lost


def empty_of_steps(modes, shapes, extras, rows=0, exact=True):
    """A tally of no training steps."""
    norms = {name: jnp.zeros(shape) for name, shape in extras.items()}
    return empty(modes, shapes, rows, exact) | {"steps": jnp.int32(0), "extras": norms}


def of_batch(like, values, mask):
    """The tally of one batch, with the labels and modes of the tally `like`."""
    measured = {
        label: {mode: of_mode(mode, values[label], mask) for mode in entry}
        for label, entry in like["values"].items()
    }
    return {"examples": mask.sum(dtype=jnp.int32), "values": measured}


def of_mode(mode, values, mask):
    """The accumulator of one batch; rows whose mask is False are left out."""

    def of_leaf(value):
        if not is_weighted(value) or mode == "CONCAT":
            return BATCH[mode](plain(value), mask)
        weight = jnp.where(mask, value.weight, 0).astype(wide(value.weight))
        return Weighted(BATCH[mode](value.value, weight), weight.sum())

    return per_leaf(of_leaf, values)


def of_step(like, values, mask, taken, norms):
    """The tally of one training step; a step that is not taken adds nothing."""
    extras = {name: jnp.where(taken, norms(name), 0) for name in like["extras"]}
    return of_batch(like, values, mask) | {"steps": taken.astype(jnp.int32), "extras": extras}


def merged(a, b):
    """Two tallies as one, `b` after `a`."""
    n, m = a["examples"], b["examples"]

    def of_leaf(mode, x, y):
        if not is_weighted(x):
            return MERGE[mode](x, y, n, m)
        return Weighted(MERGE[mode](x.value, y.value, x.weight, y.weight), x.weight + y.weight)

    values = {
        label: {
            mode: per_leaf(partial(of_leaf, mode), x, b["values"][label][mode])
            for mode, x in entry.items()
        }
        for label, entry in a["values"].items()
    }
    both = {"examples": n + m, "values": values}
    if "lost" in a:
        both["lost"] = {}
        for label, lost in a["lost"].items():
            sums = (tally["values"][label]["MEAN"] for tally in (a, b))
            values[label]["MEAN"], both["lost"][label] = exact_sums(*sums, lost)
    if "steps" in a:
        extras = jax.tree.map(jnp.add, a["extras"], b["extras"])
        both |= {"steps": a["steps"] + b["steps"], "extras": extras}
    return both


def exact_sums(a, b, lost):
    """(a + b + lost rounded, what the rounding lost) of each leaf: Kahan's sum, with the error of
    an addition by Knuth, which is exact whichever of the two numbers is larger."""

    def of_leaf(a, b, lost):
        b = b + lost
        total = a + b
        of_b = total - a
        error = (a - (total - of_b)) + (b - of_b)
        return total, jnp.where(jnp.isfinite(error), error, 0)  # an infinite sum is not NaN

    pairs = jax.tree.map(of_leaf, a, b, lost)
    return jax.tree.transpose(jax.tree.structure(a), jax.tree.structure((0, 0)), pairs)


def norms_of(grads, params):
    """A function that computes the norm of a name."""
    trees = {"gradient_norm": grads, "parameter_norm": params}

    def norm(name):
        leaves = jax.tree.leaves(trees[name.removesuffix("_leaves")])
        squares = [jnp.sum(jnp.square(a.astype(jnp.float32))) for a in leaves]
        return jnp.sqrt(jnp.stack(squares) if name.endswith("_leaves") else sum(squares))

    return norm


def without_rows(tally):
    """The tally without the rows of CONCAT, which are not read at every line."""
    values = {
        label: {mode: x for mode, x in entry.items() if mode != "CONCAT"}
        for label, entry in tally["values"].items()
    }
    return tally | {"values": {label: entry for label, entry in values.items() if entry}}


def results(tally):
    """({label: result}, {norm: its mean over the steps}) of a tally on the host, or of several
    tallies along a first axis."""
    count, steps = (np.asarray(tally.get(name, 0)) for name in ("examples", "steps"))

    def of_leaf(mode, x):
        if not is_weighted(x):
            return RESULT[mode](x, count)
        return RESULT[mode](x.value, np.asarray(x.weight))

    values = {
        label: per_leaf(partial(of_leaf, mode), x)
        for label, entry in tally["values"].items()
        for mode, x in entry.items()
    }
    return values, {name: per(total, steps) for name, total in tally.get("extras", {}).items()}


def per(total, count):
    """total / count, NaN where the count is zero."""
    dtype = np.result_type(total, np.float32)
    divisor = np.where(along(total, count) == 0, np.nan, along(total, count)).astype(dtype)
    return np.divide(total, divisor, dtype=dtype)


def along(values, count):
    """`count`, one number per first index of `values`, in a shape that broadcasts with `values`."""
    return count.reshape(count.shape + (1,) * (np.ndim(values) - count.ndim))


def wide(a):
    """The type in which values are summed."""
    return jnp.promote_types(a.dtype, jnp.float32)


def count_type(a):
    """The type in which counts are summed: integers stay integers, as float32 is exact only up to
    2^24."""
    return jnp.promote_types(
        a.dtype, jnp.float32 if jnp.issubdtype(a.dtype, jnp.inexact) else jnp.int32
    )


def under(mask, values, other, wide=wide):
    """The values where the mask, or the weight of an example, is not 0; `other` elsewhere."""
    return jnp.where(against(mask, values) != 0, values, other).astype(wide(values))


def against(mask, values):
    return mask.reshape(-1, *(1,) * (values.ndim - 1))


def total(values, mask, wide=wide):
    """The sum of the values under a mask, or by their weights."""
    kept = under(mask, values, 0, wide)
    kept = kept if mask.dtype == bool else kept * against(mask, kept)
    return kept.sum(0, dtype=kept.dtype)


def mean(values, mask):
    count = mask.sum()
    return total(values, mask) / jnp.where(count == 0, 1, count)


class Spread(NamedTuple):
    """The mean and the sum of squared distances from it: more precise than a sum of squares (Chan
    et al., 1979)."""

    mean: jax.Array
    m2: jax.Array


def spread(values, mask):
    center = mean(values, mask)
    return Spread(center, total((values - center) ** 2, mask))


def merged_spreads(a, b, n, m):
    share = m / jnp.where(n + m == 0, 1, n + m)
    center = a.mean + (b.mean - a.mean) * share.astype(a.mean.dtype)
    apart = (b.mean - a.mean) ** 2 * (n * share).astype(a.m2.dtype)
    return Spread(center, a.m2 + b.m2 + apart)


def appended(rows, new, n, _m):
    """`rows` with `new` from row n on; genuine rows come first, so the others are overwritten."""
    return jax.lax.dynamic_update_slice_in_dim(rows, new.astype(rows.dtype), n, 0)


def per_leaf(function, tree, *others):
    """The tree of function(leaf, ...), where a Weighted and a Spread are one leaf."""
    is_leaf = lambda x: isinstance(x, Weighted | Spread)  # noqa: E731
    return jax.tree.map(function, tree, *others, is_leaf=is_leaf)


def plain(value):
    """The values of the examples, or their shapes, without the weights."""
    return value.value if is_weighted(value) else value


# Each function is for one leaf of a value.
# The accumulator of one batch, from its values and its mask, or the weights of its examples:
BATCH = {
    "MEAN": total,
    "SUM": partial(total, wide=count_type),
    "SINGLE": mean,
    "MAX": lambda values, mask: under(mask, values, -jnp.inf).max(0),
    "MIN": lambda values, mask: under(mask, values, jnp.inf).min(0),
    "STD": spread,
    "CONCAT": lambda values, _mask: values,
}
# Two accumulators, of n and m examples, as one:
MERGE = {
    "MEAN": lambda a, b, n, m: a + b,
    "SUM": lambda a, b, n, m: a + b,
    "SINGLE": lambda a, b, n, m: jnp.where(m > 0, b, a),
    "MAX": lambda a, b, n, m: jnp.maximum(a, b),
    "MIN": lambda a, b, n, m: jnp.minimum(a, b),
    "STD": merged_spreads,
    "CONCAT": appended,
}
# The result of an accumulator on the host, NaN where the count is zero:
RESULT = dict.fromkeys(
    ("SUM", "SINGLE", "MAX", "MIN"),
    lambda a, count: np.where(along(a, count) == 0, np.nan, a),
) | {
    "MEAN": per,
    "STD": lambda x, count: np.sqrt(per(x.m2, count)),
    "CONCAT": lambda a, count: a[:count],
}
