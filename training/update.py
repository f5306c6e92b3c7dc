"""One training step. A user's own update is a function like `gradient_update`, named in the config:
`init(params)` returns (opt_state, averaged params or None), and `step` returns a StepResult.
`with_refusal` makes of it the step that counts, measures, and refuses what is not finite.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Num, PyTree, Shaped

from training.base import (
    FROZEN,
    Measured,
    Mode,
    Number,
    Objective,
    Optimizer,
    StepResult,
    TrainState,
    Update,
    Weighted,
    is_weighted,
    without_frozen,
)
from training.objective import traced
from training.rows import GOOD, Row, norms_of, row_of_batch
from utils import UserError, map_named, named_leaves, path_name

MADE = ("state", "opt", "params", "ema")  # what a step makes, in the order of computation
# Leaves of more numbers are summed one by one: a perceptron's step went from 366 to 353 us.
SMALL = 2**12


def gradient_update(
    objective: Objective,
    optimizer: Optimizer,
    *,
    accumulate: int = 1,
    ema: float | None = None,
    unroll: bool = False,
) -> Update:
    """The usual Update: one optimizer, and the gradient of the mean loss of genuine examples."""

    def init(params: PyTree) -> tuple[PyTree, PyTree | None]:
        return optimizer.init(params), None if ema is None else params

    def step(ts: TrainState, batch: PyTree, valid: ArrayLike) -> StepResult:
        key, mask = step_key(ts), genuine(batch, valid)
        grads, state, losses, metrics = gradient(
            objective, ts.params, ts.state, batch, mask, key, accumulate, unroll
        )
        updates, opt = optimizer.update(grads, ts.opt, ts.params)
        params = apply_updates(ts, updates)
        averaged = None if ema is None else moving_average(ts.ema, params, ema, ts.step)
        new = ts._replace(params=params, state=state, opt=opt, ema=averaged)
        return StepResult(new, grads, losses, metrics)

    return Update(init, step, passes=3)  # a backward pass costs two forward passes


def step_key(ts: TrainState) -> Array:
    """The random key of a step, a function of (seed, step) alone."""
    return jax.random.fold_in(jax.random.key(ts.seed), ts.step)


def genuine(batch: PyTree, valid: ArrayLike) -> Bool[Array, "batch"]:
    """The mask of the examples that count: the first `valid` ones."""
    return jnp.arange(jax.tree.leaves(batch)[0].shape[0]) < valid


def apply_updates(ts: TrainState, updates: PyTree) -> PyTree:
    """The params plus the updates times ts.lr_scale."""
    return jax.tree.map(lambda p, u: p + (ts.lr_scale * u).astype(p.dtype), ts.params, updates)


# The gradient.


def gradient(
    objective: Objective,
    params: PyTree,
    state: PyTree,
    batch: PyTree,
    mask: Bool[Array, "batch"],
    key: Array,
    accumulate: int = 1,
    unroll: bool = False,
) -> tuple[PyTree, PyTree, PyTree, dict[str, PyTree]]:
    """(gradient, new state, losses, metrics), the last two per example, computed in `accumulate`
    microbatches, one after the other."""

    def mean_loss(
        params: PyTree,
        state: PyTree,
        batch: PyTree,
        mask: Bool[Array, "batch"],
        key: Array,
        counts: list[Array] | None = None,
    ) -> tuple[Array, Measured]:
        losses, state, metrics = objective(params, state, batch, key, True, mask)
        return mean_of(losses, mask, counts or counts_of(losses, mask)), (state, losses, metrics)

    grad = jax.grad(mean_loss, has_aux=True)
    if accumulate == 1:
        grads, (state, losses, metrics) = grad(params, state, batch, mask, key)
        return grads, state, losses, metrics

    def microbatch(
        carry: tuple[PyTree, PyTree], piece: tuple[Array, PyTree, Array]
    ) -> tuple[tuple[PyTree, PyTree], tuple[PyTree, dict[str, PyTree]]]:
        # The barrier orders microbatches that are unrolled, so that only one needs its memory.
        (total, state), (i, batch, mask) = jax.lax.optimization_barrier((carry, piece))
        own = jax.random.fold_in(key, i)
        grads, (state, losses, metrics) = grad(params, state, batch, mask, own, counts)
        return (jax.tree.map(jnp.add, total, grads), state), (losses, metrics)

    check_microbatches(len(mask), accumulate)

    # Every n-th row goes to one microbatch, so that each device of a sharded batch holds its share
    # of every microbatch.
    def split(a: Shaped[Array, "batch *rest"]) -> Shaped[Array, "pieces piece *rest"]:
        return a.reshape(-1, accumulate, *a.shape[1:]).swapaxes(0, 1)

    check_whole_numbers(objective, params, state, batch)

    def counts_of_piece(piece: tuple[Array, PyTree, Array]) -> list[Array]:
        i, batch, mask = piece
        losses, _, _ = objective(params, state, batch, jax.random.fold_in(key, i), True, mask)
        return counts_of(losses, mask)

    pieces = (jnp.arange(accumulate), *jax.tree.map(split, (batch, mask)))
    terms = terms_of(traced(objective, params, state, batch, train=True).out_info[0])
    counts = [mask.sum()] * len(terms)
    if any(map(is_weighted, terms)):
        # The mean is over the whole batch, so its weights must be known before the first piece. XLA
        # leaves out what does not contribute to the weights, which is the model.
        counts = [each.sum() for each in jax.lax.map(counts_of_piece, pieces)]
    carry = (jax.tree.map(jnp.zeros_like, params), state)
    carry, seen = jax.lax.scan(microbatch, carry, pieces, unroll=unroll)
    losses, metrics = jax.tree.map(lambda a: a.swapaxes(0, 1).reshape(-1, *a.shape[2:]), seen)
    return *carry, losses, metrics


def check_microbatches(size: int, accumulate: int) -> None:
    """Refuse a batch that does not divide into microbatches."""
    if size % accumulate:
        raise UserError(
            f"training.accumulate: a batch of {size} does not divide into {accumulate} microbatches"
        )


def check_whole_numbers(objective: Objective, params: PyTree, state: PyTree, batch: PyTree) -> None:
    """Refuse whole numbers in the state that change: they would count microbatches, not steps."""
    named = named_leaves(without_frozen(state))
    whole = {n: a for n, a in named.items() if jnp.issubdtype(a.dtype, jnp.integer)}

    def changed(
        whole: dict[str, Array], params: PyTree, state: PyTree, batch: PyTree, key: Array
    ) -> dict[str, Array]:
        state = map_named(lambda name, leaf: whole.get(name, leaf), state)
        new = objective(params, state, batch, key, True)[1]
        return {name: named_leaves(new)[name] for name in whole}

    if not whole:
        return
    shapes = jax.eval_shape(lambda: jax.random.key(0))
    jaxpr = jax.make_jaxpr(changed)(whole, params, state, batch, shapes).jaxpr
    for name, before, after in zip(sorted(whole), jaxpr.invars, jaxpr.outvars, strict=False):
        if after is not before:
            raise UserError(
                f"training.accumulate: state/{name} holds whole numbers that change, so it would "
                "count microbatches instead of steps; an objective that declares a keyword `step` "
                "gets the steps trained before. Else set accumulate to 1, or store a float if it "
                "must change with every microbatch"
            )


def terms_of(losses: PyTree) -> list[Array | Weighted]:
    """The terms of a loss whose means are added, each with one value per example."""
    return jax.tree.leaves(losses, is_leaf=is_weighted)


def counts_of(losses: PyTree, mask: Bool[Array, "batch"]) -> list[Num[Array, ""]]:
    """For each term of a loss, the sum of the weights of its examples, or their number."""

    def count(term: Array | Weighted) -> Num[Array, ""]:
        constant = jax.lax.stop_gradient(term.weight) if isinstance(term, Weighted) else 1
        return jnp.where(mask, constant, 0).sum()

    return list(map(count, terms_of(losses)))


def mean_of(
    losses: PyTree, mask: Bool[Array, "batch"], counts: list[Num[Array, ""]]
) -> Float[Array, ""]:
    """The sum of the terms' weighted means over the genuine examples."""

    def mean(term: Array | Weighted, count: Num[Array, ""]) -> Float[Array, ""]:
        if isinstance(term, Weighted):
            values = term.value * jax.lax.stop_gradient(term.weight)
        else:
            values = term
        return jnp.where(mask, values, 0).sum() / jnp.where(count == 0, 1, count)

    return jnp.asarray(sum(map(mean, terms_of(losses), counts)))


# A step is accepted or refused.


def with_refusal(
    step: Callable[[TrainState, PyTree, ArrayLike], StepResult],
    modes: dict[str, Mode],
    norms: Sequence[str] = (),
    halts: bool = True,
) -> Callable[[TrainState, PyTree, ArrayLike], tuple[TrainState, Row]]:
    """The function (ts, batch, valid) -> (TrainState, row) that takes the step of an Update, and
    accepts or refuses its result. `modes` and `norms` say what the row holds besides. The step is
    refused, so that params and states stay as they are, if the loss or a gradient is not finite. If
    that `halts`, all later steps are refused, too, and none of them counts."""

    def refusing_step(ts: TrainState, batch: PyTree, valid: ArrayLike) -> tuple[TrainState, Row]:
        new, grads, losses, metrics = step(ts, batch, valid)
        mask = genuine(batch, valid)
        bad = first_bad(ts.params, grads, jnp.where(mask, loss_of_examples(losses), 0))
        halted = ts.halted | (halts & (bad != GOOD))
        taken = ~ts.halted & (bad == GOOD)
        kept = where(taken, made_fields(new), made_fields(ts))
        measured = norms_of(norms, grads, kept["params"])
        row: Row = {
            **row_of_batch(modes, {**metrics, "loss": losses}, mask & taken),
            "steps": taken.astype(jnp.int32),
            "bad": bad,
            "norms": {name: jnp.where(taken, norm, 0) for name, norm in measured.items()},
        }
        return ts._replace(step=ts.step + ~halted, halted=halted, **kept), row

    return refusing_step


def loss_of_examples(losses: PyTree) -> Float[Array, "batch"]:
    """The sum of the terms of a loss, one number per example."""
    values = [term.value if isinstance(term, Weighted) else term for term in terms_of(losses)]
    return jnp.asarray(sum(values))


def made_fields(ts: TrainState) -> dict[str, PyTree]:
    """{field: what a step makes} of a state."""
    return {name: getattr(ts, name) for name in MADE}


def where(condition: Bool[Array, ""], a: PyTree, b: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)


def first_bad(params: PyTree, grads: PyTree, losses: Float[Array, "batch"]) -> Int[Array, ""]:
    """The number of the first array that is not finite, of the loss and the gradients, or GOOD;
    `bad_leaf_name` turns the number into a name. This does not need the new state, so that XLA
    fuses the choice between the old and the new state with the update."""
    gradients = floats(grads)
    # The loss is 0, gradients count from 1. Gradients whose tree is not that of the params get
    # larger numbers, so that none gets a wrong name.
    own = [name for name, _ in gradients] == [name for name, _ in floats(params)]
    before = 0 if own else len(floats(params))
    leaves = [losses, *(leaf for _, leaf in gradients)]

    def first(*leaves: Array) -> Int[Array, ""]:
        index = jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).argmin()
        return jnp.where(index > 0, index + before, 0).astype(jnp.int32)

    good = zero_if_finite(leaves) == 0
    return jax.lax.cond(good, lambda *_: jnp.int32(GOOD), first, *leaves)


def zero_if_finite(leaves: list[Array]) -> Float[Array, ""]:
    """0 if all numbers are finite, else NaN: 0 times a number is 0 or NaN. Looking at every number
    would be a fifth of a small perceptron's step; summing is a quarter of that."""
    small, sums = {}, []
    for leaf in leaves:
        # Leaves with different shardings must not be added: XLA's partitioner then computes the
        # whole step wrongly (jax 0.10.2).
        if leaf.size > SMALL or jax.device_count() > 1:
            sums.append(jnp.sum(0 * leaf))
        else:  # leaves of one shape and type are added first, since each sum has its cost
            form = leaf.shape, leaf.dtype
            small[form] = small[form] + 0 * leaf if form in small else 0 * leaf
    parts = [*sums, *map(jnp.sum, small.values())]
    return jnp.asarray(sum(jnp.float32(part) for part in parts))


def bad_leaf_name(params: PyTree, number: int) -> str:
    """A name for the number that `first_bad` returned; `params` may hold arrays or shapes."""
    if number == 0:
        return "the loss"
    names = [name for name, _ in floats(params)]
    if number <= len(names):
        return f"the gradient of {names[number - 1]}"
    return f"a gradient (leaf {number - 1 - len(names)})"


def first_not_finite(ts: TrainState) -> Int[Array, ""]:
    """The number of the first leaf of a TrainState that is not finite, in the order of
    `made_floats`; -1 if there is none."""
    leaves = [leaf for _, leaf in made_floats(ts)]
    finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves] + [jnp.bool(False)])
    first = finite.argmin()
    return jnp.where(first == len(leaves), -1, first)


def made_floats(ts: TrainState) -> list[tuple[str, Array]]:
    """The floats of what a step makes, as [(name, leaf)], in the order of MADE."""
    made = [pair for name in MADE for pair in floats({name: getattr(ts, name)})]
    return [(name, leaf) for name, leaf in made if not name.startswith(FROZEN)]


def floats(tree: PyTree) -> list[tuple[str, Array]]:
    """The leaves that can be NaN or infinite, as [(name, leaf)]; counters and random keys
    cannot."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [
        (path_name(path), leaf) for path, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]


def moving_average(ema: PyTree, params: PyTree, decay: Number, step: Int[Array, ""]) -> PyTree:
    """The moving average of the params; its first steps forget faster, so that it does not stay
    near the initial params."""
    share = 1 - jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda e, p: e + share.astype(e.dtype) * (p - e), ema, params)
