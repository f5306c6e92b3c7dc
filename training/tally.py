"""What a run measures, added up on the device: by its mode, the values of many examples become one.

A tally is {"examples": how many, "values": {label: {mode: what was added up}}}, and in training also "steps" and "extras", which
are numbers of each step: norms. It tells by itself how it goes on, so an update needs to know nothing of it.
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
NEEDS = ("learning_rate", *NORMS, "leaf_statistics", "per_step")  # what a callback may ask for


class Tracked(NamedTuple):
    """A metric, and how, when and where it is measured."""

    function: Any
    mode: Mode = "MEAN"
    freq: Freq = "ANY"
    phase: Phase = "ANY"


def tracked(function, mode="MEAN", freq="ANY", phase="ANY"):
    """A metric whose mode, freq (STEP: lines within an epoch, EPOCH: lines that close one) and phase are not the usual ones."""
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
            f"freq: STEP is within an epoch of training, so {phase} would never be measured; say EPOCH, or phase TRAIN"
        )
    if freq == "STEP" and mode == "CONCAT":
        wrong.append("freq: CONCAT gathers a whole epoch; say EPOCH")
    if wrong:
        raise ValueError("\n".join(wrong))
    return Tracked(function, mode, freq, phase)


class Watch(NamedTuple):
    """What a run measures besides its loss."""

    rules: Mapping = MappingProxyType(
        {}
    )  # {label: Tracked}; what an objective brings by itself is a MEAN of every line
    hidden: frozenset = frozenset()  # labels that callbacks measure for themselves
    needs: frozenset = frozenset()  # of NEEDS
    ring: int = 0  # how many steps are kept one by one; 0: none

    def modes(self, labels, phase, freq):
        """{label: mode} of what is measured in a phase, for lines of a freq."""
        rules = {label: self.rules.get(label, Tracked(None)) for label in labels}
        chosen = {
            k: r for k, r in rules.items() if r.freq in ("ANY", freq) and covers(r.phase, phase)
        }
        return {
            k: r.mode
            for k, r in chosen.items()
            if freq == "EPOCH" or (r.mode != "CONCAT" and k not in self.hidden)
        }

    def aside(self, label):
        """Whether a label is for callbacks alone, and never logged."""
        return label in self.hidden or (label in self.rules and self.rules[label].mode == "CONCAT")

    def extras(self, params):
        """{norm: its shape} of what is measured at every step; those of all leaves are one array, in the tree's order."""
        found = {name: () for name in NORMS if name in self.needs}
        leaves = (len(jax.tree.leaves(params)),)
        return found | (
            {f"{name}_leaves": leaves for name in NORMS} if "leaf_statistics" in self.needs else {}
        )


def covers(phase, other):
    """Whether what is measured in `phase` is measured in this one of TRAIN, VAL, TEST."""
    return phase in ("ANY", other) or (phase == "EVAL" and other != "TRAIN")


def phase_of(name):
    """The phase of a set: every one that is neither `train` nor `test` is for validation."""
    return {"train": "TRAIN", "test": "TEST"}.get(name, "VAL")


def empty(modes, shapes, rows=0):
    """A tally of nothing; `shapes` are those of a batch's values, `rows` is how many CONCAT must hold."""
    return {
        "examples": jnp.int32(0),
        "values": {
            label: {mode: START[mode](shapes[label], rows)} for label, mode in modes.items()
        },
    }


def empty_of_steps(modes, shapes, extras, rows=0):
    """A tally of no steps of training."""
    return empty(modes, shapes, rows) | {
        "steps": jnp.int32(0),
        "extras": {name: jnp.zeros(shape) for name, shape in extras.items()},
    }


def of_batch(like, values, mask):
    """The tally of one batch, measured as `like` is."""
    found = {
        label: {mode: BATCH[mode](values[label], mask) for mode in entry}
        for label, entry in like["values"].items()
    }
    return {"examples": mask.sum(dtype=jnp.int32), "values": found}


def of_step(like, values, mask, taken, norms):
    """The tally of one step of training; one that is not taken counts for nothing."""
    extras = {name: jnp.where(taken, norms(name), 0) for name in like["extras"]}
    return of_batch(like, values, mask) | {"steps": taken.astype(jnp.int32), "extras": extras}


def merged(a, b):
    """Two tallies as one, `b` after `a`."""
    n, m = a["examples"], b["examples"]
    values = {
        k: {mode: MERGE[mode](x, b["values"][k][mode], n, m) for mode, x in entry.items()}
        for k, entry in a["values"].items()
    }
    both = {"examples": n + m, "values": values}
    if "steps" in a:
        both |= {
            "steps": a["steps"] + b["steps"],
            "extras": jax.tree.map(jnp.add, a["extras"], b["extras"]),
        }
    return both


def norms_of(grads, params):
    """The function from the name of a norm to its value."""
    trees = {"gradient_norm": grads, "parameter_norm": params}

    def norm(name):
        squares = [
            jnp.sum(jnp.square(a.astype(jnp.float32)))
            for a in jax.tree.leaves(trees[name.removesuffix("_leaves")])
        ]
        return jnp.sqrt(jnp.stack(squares) if name.endswith("_leaves") else sum(squares))

    return norm


def without_rows(tally):
    """The tally without what CONCAT gathers, which is not read at every line."""
    values = {
        k: {mode: x for mode, x in entry.items() if mode != "CONCAT"}
        for k, entry in tally["values"].items()
    }
    return tally | {"values": {k: entry for k, entry in values.items() if entry}}


def results(tally):
    """({label: what it came to}, {norm: its mean over the steps}) of a tally on the host, or of several along a first axis."""
    count, steps = (np.asarray(tally.get(name, 0)) for name in ("examples", "steps"))
    found = {
        k: RESULT[mode](x, count)
        for k, entry in tally["values"].items()
        for mode, x in entry.items()
    }
    return found, {name: per(total, steps) for name, total in tally.get("extras", {}).items()}


def per(total, count):
    """A total by a count; of nothing there is no mean."""
    dtype = np.result_type(total, np.float32)
    return np.divide(
        total, np.where(none(total, count), np.nan, along(total, count)).astype(dtype), dtype=dtype
    )


def none(values, count):
    """Where there was nothing."""
    return along(values, count) == 0


def along(values, count):
    """A count for each first index of some values."""
    return count.reshape(count.shape + (1,) * (np.ndim(values) - count.ndim))


def wide(a):
    """The type that values are added up in."""
    return jnp.promote_types(a.dtype, jnp.float32)


def exact(a):
    """The type that values are counted in: whole numbers stay whole, since a float32 loses count at 2^24."""
    return jnp.promote_types(
        a.dtype, jnp.float32 if jnp.issubdtype(a.dtype, jnp.inexact) else jnp.int32
    )


def under(mask, values, other, wide=wide):
    """The values under a mask, another one elsewhere."""
    return jnp.where(mask.reshape(-1, *(1,) * (values.ndim - 1)), values, other).astype(
        wide(values)
    )


def filled(value):
    """The start of a mode that begins at one value."""
    return lambda shapes, _rows: jax.tree.map(
        lambda a: jnp.full(a.shape[1:], value, wide(a)), shapes
    )


def total(values, mask):
    return jax.tree.map(lambda v: under(mask, v, 0).sum(0), values)


def mean(values, mask):
    return jax.tree.map(lambda sum_: sum_ / jnp.maximum(mask.sum(), 1), total(values, mask))


def spread(values, mask):
    """Mean and sum of the squared distances from it, which lose less than a sum of squares does (Chan et al., 1979)."""
    means = mean(values, mask)
    return {
        "mean": means,
        "m2": jax.tree.map(lambda v, c: (under(mask, v - c, 0) ** 2).sum(0), values, means),
    }


def merged_spreads(a, b, n, m):
    share = m / jnp.maximum(n + m, 1)
    both = jax.tree.map(lambda x, y: x + (y - x) * share.astype(x.dtype), a["mean"], b["mean"])
    apart = jax.tree.map(
        lambda x, y: (y - x) ** 2 * (n * share).astype(x.dtype), a["mean"], b["mean"]
    )
    return {"mean": both, "m2": jax.tree.map(lambda x, y, d: x + y + d, a["m2"], b["m2"], apart)}


def appended(a, b, n, _m):
    """Genuine rows stand first in a batch, so the next batch writes over the others."""
    return jax.tree.map(
        lambda rows, new: jax.lax.dynamic_update_slice_in_dim(rows, new.astype(rows.dtype), n, 0),
        a,
        b,
    )


START = {
    "MEAN": filled(0),
    "SUM": lambda shapes, _rows: jax.tree.map(lambda a: jnp.zeros(a.shape[1:], exact(a)), shapes),
    "SINGLE": filled(0),
    "MAX": filled(-jnp.inf),
    "MIN": filled(jnp.inf),
    "STD": lambda shapes, rows: {"mean": filled(0)(shapes, rows), "m2": filled(0)(shapes, rows)},
    "CONCAT": lambda shapes, rows: jax.tree.map(
        lambda a: jnp.zeros((rows, *a.shape[1:]), a.dtype), shapes
    ),
}
BATCH = {
    "MEAN": total,
    "SUM": lambda values, mask: jax.tree.map(
        lambda v: under(mask, v, 0, exact).sum(0, dtype=exact(v)), values
    ),
    "SINGLE": mean,
    "MAX": lambda values, mask: jax.tree.map(lambda v: under(mask, v, -jnp.inf).max(0), values),
    "MIN": lambda values, mask: jax.tree.map(lambda v: under(mask, v, jnp.inf).min(0), values),
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
RESULT = {
    "MEAN": lambda x, count: jax.tree.map(lambda a: per(a, count), x),
    "STD": lambda x, count: jax.tree.map(lambda a: np.sqrt(per(a, count)), x["m2"]),
    "CONCAT": lambda x, count: jax.tree.map(lambda a: a[:count], x),
} | dict.fromkeys(
    ("SUM", "SINGLE", "MAX", "MIN"),
    lambda x, count: jax.tree.map(lambda a: np.where(none(a, count), np.nan, a), x),
)
