"""What a run measures, accumulated on the device: by its mode, the values of many examples become
one.

A tally is {"examples": count, "values": {label: {mode: accumulator}}}; in training it also holds
"steps" and "extras", the norms of each step. A tally contains all that is needed to continue it, so
an update needs to know nothing about what is measured.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

Mode = Literal["MEAN", "SUM", "SINGLE", "MAX", "MIN", "STD", "CONCAT"]
Freq = Literal["STEP", "EPOCH", "ANY"]
Phase = Literal["TRAIN", "VAL", "TEST", "EVAL", "ANY"]

NORMS = ("gradient_norm", "parameter_norm")
NEEDS = ("learning_rate", *NORMS, "leaf_statistics", "per_step")  # what a callback may need


class Tracked(NamedTuple):
    """A metric, and how, when and where it is measured."""

    function: Any
    mode: Mode = "MEAN"
    freq: Freq = "ANY"
    phase: Phase = "ANY"


def tracked(function, mode="MEAN", freq="ANY", phase="ANY"):
    """A metric with another mode, freq (STEP: log lines within an epoch, EPOCH: at its end) or
    phase."""
    wrong = []
    for name, value, allowed in (
        ("mode", mode, Mode),
        ("freq", freq, Freq),
        ("phase", phase, Phase),
    ):
        if value not in get_args(allowed):
            wrong.append(f"{name}: must be one of {', '.join(get_args(allowed))}, got {value!r}")
    if freq == "STEP" and phase in ("VAL", "TEST", "EVAL"):
        wrong.append(
            f"freq: STEP is within an epoch of training, so {phase} would never be measured; "
            "use EPOCH, or phase TRAIN"
        )
    if freq == "STEP" and mode == "CONCAT":
        wrong.append("freq: CONCAT gathers a whole epoch; use EPOCH")
    if wrong:
        raise ValueError("\n".join(wrong))
    return Tracked(function, mode, freq, phase)


class Watch(NamedTuple):
    """What a run measures besides its loss."""

    rules: Mapping = MappingProxyType({})  # {label: Tracked}; anything else is a MEAN in every line
    hidden: frozenset = frozenset()  # labels that callbacks measure for themselves
    needs: frozenset = frozenset()  # of NEEDS
    ring: int = 0  # how many steps are kept one by one; 0: none

    def modes(self, labels, phase, freq):
        """{label: mode} of what is measured in a phase, for lines of a freq."""
        rules = {label: self.rules.get(label, Tracked(None)) for label in labels}
        return {
            label: rule.mode
            for label, rule in rules.items()
            if rule.freq in ("ANY", freq)
            and covers(rule.phase, phase)
            and (freq == "EPOCH" or not self.aside(label))
        }

    def aside(self, label):
        """Whether a label is for callbacks alone, and never logged."""
        mode = self.rules[label].mode if label in self.rules else None
        return label in self.hidden or mode == "CONCAT"

    def extras(self, params):
        """{norm: its shape} of what is measured at every step; `_leaves` has one norm per leaf."""
        shapes = {name: () for name in NORMS if name in self.needs}
        if "leaf_statistics" in self.needs:
            count = len(jax.tree.leaves(params))
            shapes |= {f"{name}_leaves": (count,) for name in NORMS}
        return shapes


def covers(phase, other):
    """Whether what is measured in `phase` is measured in `other`, one of TRAIN, VAL, TEST."""
    return phase in ("ANY", other) or (phase == "EVAL" and other != "TRAIN")


def phase_of(set_name):
    """The phase of a set: any set that is neither `train` nor `test` is for validation."""
    return {"train": "TRAIN", "test": "TEST"}.get(set_name, "VAL")


def empty(modes, shapes, rows=0):
    """A tally of no examples, for values of these shapes; CONCAT has room for `rows`."""
    values = {label: {mode: START[mode](shapes[label], rows)} for label, mode in modes.items()}
    return {"examples": jnp.int32(0), "values": values}


def empty_of_steps(modes, shapes, extras, rows=0):
    """A tally of no training steps."""
    norms = {name: jnp.zeros(shape) for name, shape in extras.items()}
    return empty(modes, shapes, rows) | {"steps": jnp.int32(0), "extras": norms}


def of_batch(like, values, mask):
    """The tally of one batch, with the labels and modes of the tally `like`."""
    measured = {
        label: {mode: BATCH[mode](values[label], mask) for mode in entry}
        for label, entry in like["values"].items()
    }
    return {"examples": mask.sum(dtype=jnp.int32), "values": measured}


def of_step(like, values, mask, taken, norms):
    """The tally of one training step; a step that is not taken counts for nothing."""
    extras = {name: jnp.where(taken, norms(name), 0) for name in like["extras"]}
    return of_batch(like, values, mask) | {"steps": taken.astype(jnp.int32), "extras": extras}


def merged(a, b):
    """Two tallies as one, `b` after `a`."""
    n, m = a["examples"], b["examples"]

    def merged_values(label, entry):
        return {mode: MERGE[mode](x, b["values"][label][mode], n, m) for mode, x in entry.items()}

    values = {label: merged_values(label, entry) for label, entry in a["values"].items()}
    both = {"examples": n + m, "values": values}
    if "steps" in a:
        extras = jax.tree.map(jnp.add, a["extras"], b["extras"])
        both |= {"steps": a["steps"] + b["steps"], "extras": extras}
    return both


def norms_of(grads, params):
    """The function from the name of a norm to its value."""
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
    values = {
        label: RESULT[mode](x, count)
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
    """`count`, one number per first index of `values`, in a shape that broadcasts against them."""
    return count.reshape(count.shape + (1,) * (np.ndim(values) - count.ndim))


def wide(a):
    """The type that values are summed in."""
    return jnp.promote_types(a.dtype, jnp.float32)


def exact(a):
    """The type that counts are summed in: integers stay integers, a float32 is exact up to 2^24."""
    return jnp.promote_types(
        a.dtype, jnp.float32 if jnp.issubdtype(a.dtype, jnp.inexact) else jnp.int32
    )


def under(mask, values, other, wide=wide):
    """The values where the mask is set, `other` elsewhere."""
    return jnp.where(mask.reshape(-1, *(1,) * (values.ndim - 1)), values, other).astype(
        wide(values)
    )


def filled(value):
    """The start of a mode whose accumulator begins at one value."""
    return lambda shapes, _rows: jax.tree.map(
        lambda a: jnp.full(a.shape[1:], value, wide(a)), shapes
    )


def total(values, mask):
    return jax.tree.map(lambda v: under(mask, v, 0).sum(0), values)


def mean(values, mask):
    return jax.tree.map(lambda sum_: sum_ / jnp.maximum(mask.sum(), 1), total(values, mask))


def spread(values, mask):
    """The mean and the sum of squared distances from it: more precise than a sum of squares (Chan
    et al., 1979)."""
    means = mean(values, mask)
    m2 = jax.tree.map(lambda v, c: (under(mask, v - c, 0) ** 2).sum(0), values, means)
    return {"mean": means, "m2": m2}


def merged_spreads(a, b, n, m):
    share = m / jnp.maximum(n + m, 1)
    both = jax.tree.map(lambda x, y: x + (y - x) * share.astype(x.dtype), a["mean"], b["mean"])
    gap = lambda x, y: (y - x) ** 2 * (n * share).astype(x.dtype)  # noqa: E731
    apart = jax.tree.map(gap, a["mean"], b["mean"])
    return {"mean": both, "m2": jax.tree.map(lambda x, y, d: x + y + d, a["m2"], b["m2"], apart)}


def appended(a, b, n, _m):
    """Genuine rows are at the front of a batch, so the next batch overwrites the others."""

    def append(rows, new):
        return jax.lax.dynamic_update_slice_in_dim(rows, new.astype(rows.dtype), n, 0)

    return jax.tree.map(append, a, b)


def each(function):
    """Apply a function of a leaf and the count to every leaf; NaN where the count is zero."""
    return lambda x, count: jax.tree.map(lambda a: function(a, count), x)


zeros = filled(0)
START = {
    "MEAN": zeros,
    "SUM": lambda shapes, _rows: jax.tree.map(lambda a: jnp.zeros(a.shape[1:], exact(a)), shapes),
    "SINGLE": zeros,
    "MAX": filled(-jnp.inf),
    "MIN": filled(jnp.inf),
    "STD": lambda shapes, rows: {"mean": zeros(shapes, rows), "m2": zeros(shapes, rows)},
    "CONCAT": lambda shapes, n: jax.tree.map(
        lambda a: jnp.zeros((n, *a.shape[1:]), a.dtype), shapes
    ),
}


def reduced(other, reduction, wide=wide):
    """The value of a batch: one reduction of the values, with `other` where the mask is not set."""
    return lambda values, mask: jax.tree.map(
        lambda v: reduction(under(mask, v, other, wide)), values
    )


BATCH = {
    "MEAN": total,
    "SUM": reduced(0, lambda v: v.sum(0, dtype=v.dtype), exact),
    "SINGLE": mean,
    "MAX": reduced(-jnp.inf, lambda v: v.max(0)),
    "MIN": reduced(jnp.inf, lambda v: v.min(0)),
    "STD": spread,
    "CONCAT": lambda values, _mask: values,
}
MERGE = {
    "MEAN": lambda a, b, n, m: jax.tree.map(jnp.add, a, b),
    "SUM": lambda a, b, n, m: jax.tree.map(jnp.add, a, b),
    "SINGLE": lambda a, b, n, m: jax.tree.map(lambda x, y: jnp.where(m > 0, y, x), a, b),
    "MAX": lambda a, b, n, m: jax.tree.map(jnp.maximum, a, b),
    "MIN": lambda a, b, n, m: jax.tree.map(jnp.minimum, a, b),
    "STD": merged_spreads,
    "CONCAT": appended,
}
RESULT = dict.fromkeys(
    ("SUM", "SINGLE", "MAX", "MIN"),
    each(lambda a, count: np.where(along(a, count) == 0, np.nan, a)),
) | {
    "MEAN": each(per),
    "STD": lambda x, count: each(lambda a, n: np.sqrt(per(a, n)))(x["m2"], count),
    "CONCAT": each(lambda a, count: a[:count]),
}
