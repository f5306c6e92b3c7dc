"""One training step. A user's own update is a function like `gradient_update`, named in the config:
`init(params)` returns (opt_state, averaged params or None), and `step` returns a StepResult.
`accepting` makes of it the step that counts, measures, and refuses what is not finite.
"""

from functools import wraps

import jax
import jax.numpy as jnp

from training import tally
from training.base import FROZEN, StepResult, Update, is_weighted
from training.gradient import gradient, terms_of
from training.metrics import MetricPlan
from training.objective import augmented_by_epoch, is_marked, shapes_of_values
from utils import UserError, path_name

MADE = ("state", "opt", "params", "ema")  # what a step makes, in the order of computation
NO_METRICS = MetricPlan()
# Leaves of more numbers are summed one by one: a perceptron's step went from 366 to 353 us.
SMALL = 2**12
SMALL_STATE = 2**22  # bytes that each call may copy, in less than a millisecond
# In the sums of a step that `loop_back` takes: the number of its bad leaf, or NO_LEAF.
NOW, NO_LEAF = "bad_now", 2**30
# The number of bad steps, the first one, and the number of the leaf that was bad first in it.
NONE_BAD = {"bad_steps": 0, "first_bad": -1, "bad_leaf": 0}


def gradient_update(
    objective, optimizer, *, accumulate: int = 1, ema: float | None = None, unroll: bool = False
) -> Update:
    """The gradient of the mean loss over the genuine examples of a batch, through one optimizer."""

    def init(params):
        return optimizer.init(params), None if ema is None else params

    def step(ts, batch, valid):
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


def step_key(ts):
    """The random key of a step, a function of (seed, step) alone."""
    return jax.random.fold_in(jax.random.key(ts.seed), ts.step)


def genuine(batch, valid):
    """The mask of the examples that count: the first `valid` ones."""
    return jnp.arange(jax.tree.leaves(batch)[0].shape[0]) < valid


def apply_updates(ts, updates):
    """The params plus the updates, which are multiplied by the factor that callbacks may lower."""
    return jax.tree.map(lambda p, u: p + (ts.lr_scale * u).astype(p.dtype), ts.params, updates)


def accepting(step):
    """The function (ts, batch, valid) -> TrainState that takes the step of an Update, and accepts
    or refuses its result."""

    def whole(ts, batch, valid):
        return accepted(ts, step(ts, batch, valid), genuine(batch, valid))

    return whole


def loss_of_examples(losses):
    """The sum of the terms of a loss, one number per example."""
    return sum(term.value if is_weighted(term) else term for term in terms_of(losses))


def accepted(ts, result, mask):
    """The new state if all of a StepResult is finite, else the params and states of `ts`; the step
    counts either way. If sums["freeze"] is 1, the first bad step and all steps after it do not
    count, and the state of the last good step stays. Within `loop_back` it is always the new
    state."""
    new, grads, losses, metrics = result
    good, leaf = all_finite(ts, new, grads, jnp.where(mask, loss_of_examples(losses), 0))
    if NOW in ts.sums:
        sums = ts.sums | {NOW: jnp.where(good, NO_LEAF, leaf)}
        norms = tally.norms_of(grads, new.params)
        sums = add_to_sums(sums, ts.step, losses, metrics, mask, jnp.bool(True), norms)
        return ts._replace(step=ts.step + 1, sums=sums, **made_of(new))
    sums = note_bad(ts.sums, ts.step, good, leaf)
    stays = frozen(sums)
    taken = good & ~stays
    kept = where(taken, made_of(new), made_of(ts))
    norms = tally.norms_of(grads, kept["params"])
    sums = add_to_sums(sums, ts.step, losses, metrics, mask & taken, taken, norms)
    return ts._replace(step=ts.step + ~stays, sums=sums, **kept)


def made_of(ts):
    """{field: what a step makes} of a state."""
    return {name: getattr(ts, name) for name in MADE}


def with_epochs(update, augment, steps):
    """The Update whose step begins with `augmented_by_epoch`; an epoch has `steps` steps."""
    functions = [fn for fn in augment if is_marked(fn, "by_epoch")]
    if not functions:
        return update
    if steps is None:
        name = getattr(functions[0], "func", functions[0]).__name__
        raise UserError(
            f"augment: {name} needs to know how many batches an epoch has; give the data a __len__"
        )

    @wraps(update.step)
    def step(ts, batch, valid):
        return update.step(ts, augmented_by_epoch(functions, ts.step // steps, batch), valid)

    return update._replace(step=step)


def loop_for(ts, stacked):
    """The loop over the steps of one call for a state of these shapes."""
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(ts))
    alone = jax.default_backend() == "cpu" and jax.device_count() == 1
    # Where the values of single steps are kept, a step that is refused has values, too.
    fits = alone and not stacked and size <= SMALL_STATE and "ring" not in ts.sums
    return loop_back if fits else jax.lax.fori_loop


def loop_back(start, end, take, ts):
    """The same as jax.lax.fori_loop(start, end, take, ts), where `take` is an `accepting` step.

    It saves the choice between the old and the new state in every step, a tenth of a small
    perceptron's step: a bad step ends the loop instead. Then the steps before it are taken
    again, from a copy of the first state, and the bad step is refused.
    """

    def until_bad(first, last, ts):
        """(the step after the last one that was taken, its state, its bad leaf or NO_LEAF)"""

        def no_bad_step(carry):
            i, ts = carry
            return (i < last) & (ts.sums[NOW] == NO_LEAF)

        marked = ts._replace(sums=ts.sums | {NOW: jnp.int32(NO_LEAF)})
        i, ts = jax.lax.while_loop(no_bad_step, lambda c: (c[0] + 1, take(*c)), (first, marked))
        return i, ts._replace(sums={k: v for k, v in ts.sums.items() if k != NOW}), ts.sums[NOW]

    def attempt(carry):
        """Take the steps from `first` to `last`. If `leaf` is known, the step `last` is bad."""
        first, last, leaf, ts = carry
        i, new, found = until_bad(first, last, ts)
        known = leaf != NO_LEAF
        new = where(known, refused(new, leaf), new)
        rest = jnp.where(frozen(new.sums), end, last + known), end, jnp.int32(NO_LEAF), new
        return where(found != NO_LEAF, (first, i - 1, found, ts), rest)

    begin = jnp.where(frozen(ts.sums), end, start), end, jnp.int32(NO_LEAF), ts
    return jax.lax.while_loop(lambda carry: carry[0] < end, attempt, begin)[-1]


def refused(ts, leaf):
    """The state after a bad step, from the state before it."""
    sums = note_bad(ts.sums, ts.step, jnp.bool(False), leaf)
    return ts._replace(step=ts.step + ~frozen(sums), sums=sums)


def where(condition, a, b):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)


def all_finite(ts, new, grads, losses):
    """(whether everything that a step made is finite, the number of the first leaf that is not, in
    the order of computation); `bad_leaf_name` turns the number into a name."""
    gradients, made = floats(grads), made_floats(new)
    # The loss is 0, gradients count up from 1, what the step made counts down from -1. Gradients
    # whose tree is not that of the params get larger numbers, so that none gets a wrong name.
    own = [name for name, _ in gradients] == [name for name, _ in floats(ts.params)]
    first = 1 if own else 1 + len(floats(ts.params))
    numbers = [0, *range(first, first + len(gradients)), *range(-1, -1 - len(made), -1)]
    leaves = [losses, *(leaf for _, leaf in gradients + made)]

    def leaf_by_leaf(*leaves):
        finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves])
        return finite.all(), finite.argmin().astype(jnp.int32)

    def all_good(*_):
        return jnp.bool(True), jnp.int32(0)

    # Looking at every number would be a fifth of a small perceptron's step; summing is a quarter of
    # that.
    sum_is_finite = jnp.isfinite(total(leaves))
    good, index = jax.lax.cond(sum_is_finite, all_good, leaf_by_leaf, *leaves)
    return good, jnp.array(numbers, jnp.int32)[index]


def total(leaves):
    """The sum of all numbers: not finite if one of them is not."""
    small, sums = {}, []
    for leaf in leaves:
        # Leaves with different shardings must not be added: XLA's partitioner then computes the
        # whole step wrongly (jax 0.10.2).
        if leaf.size > SMALL or jax.device_count() > 1:
            sums.append(wide_sum(leaf))
        else:  # leaves of one shape and type are added first, since each sum has its cost
            form = leaf.shape, leaf.dtype
            small[form] = small[form] + leaf if form in small else leaf
    return sum([*sums, *map(wide_sum, small.values())])


def wide_sum(leaf):
    return jnp.sum(leaf, dtype=jnp.promote_types(leaf.dtype, jnp.float32))


def note_bad(sums, step, good, leaf):
    """The counters of bad steps after another step; unchanged if the state is frozen."""
    first = ~good & (sums["first_bad"] < 0)
    return sums | {
        "bad_steps": sums["bad_steps"] + (~good & ~frozen(sums)),
        "first_bad": jnp.where(first, step, sums["first_bad"]),
        "bad_leaf": jnp.where(first, leaf, sums["bad_leaf"]),
    }


def frozen(sums):
    """Whether a bad step has frozen this state."""
    return (sums["freeze"] > 0) & (sums["first_bad"] >= 0)


def first_bad_step(sums):
    """(step, number of the leaf) of the first bad step that froze a replica, from the sums of each
    replica on the host; None if there is none."""
    bad = [
        (int(s["first_bad"]), int(s["bad_leaf"])) for s in sums if s["freeze"] and s["bad_steps"]
    ]
    return min(bad, default=None)


def bad_leaf_name(ts, number):
    """A name for sums["bad_leaf"], which was bad first; `ts` may hold arrays or their shapes."""
    if number == 0:
        return "the loss"
    if number < 0:
        return made_floats(ts)[-1 - number][0]
    names = [name for name, _ in floats(ts.params)]
    if number <= len(names):
        return f"the gradient of {names[number - 1]}"
    return f"a gradient (leaf {number - 1 - len(names)})"


def made_floats(ts):
    """The floats of what a step makes, as [(name, leaf)], in the order of MADE."""
    made = [pair for name in MADE for pair in floats({name: getattr(ts, name)})]
    return [(name, leaf) for name, leaf in made if not name.startswith(FROZEN)]


def floats(tree):
    """The leaves that can be NaN or infinite, as [(name, leaf)]; counters and random keys
    cannot."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [
        (path_name(path), leaf) for path, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]


def moving_average(ema, params, decay, step):
    """The moving average of the params; its first steps forget faster, so that it does not stay
    near the initial params."""
    decay = jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda e, p: e + (1 - decay).astype(e.dtype) * (p - e), ema, params)


def add_to_sums(sums, step, losses, metrics, mask, taken, norms):
    """The sums with another step: of the epoch, of the log line and, where they are kept, of single
    steps."""
    values = {**metrics, "loss": losses}
    parts = ("epoch", "window")
    one = {part: tally.of_step(sums[part], values, mask, taken, norms) for part in parts}
    sums = sums | {part: tally.merged(sums[part], one[part]) for part in parts}
    if "ring" in sums:
        row = step % jax.tree.leaves(sums["ring"])[0].shape[0]
        sums["ring"] = jax.tree.map(
            lambda ring, new: ring.at[row].set(new), sums["ring"], one["window"]
        )
    return sums


def zero_sums(objective, params, state, batch, *, freeze=False, metric_plan=NO_METRICS, rows=0):
    """Accumulators at zero for one epoch; arguments may be arrays or their shapes. With `freeze`,
    the first bad step freezes the state."""
    shapes, extras = shapes_of_values(objective, params, state, batch), metric_plan.extras(params)
    epoch, window = (metric_plan.modes(shapes, "TRAIN", freq) for freq in ("EPOCH", "STEP"))
    sums = {
        "epoch": tally.empty_of_steps(epoch, shapes, extras, rows),
        "window": tally.empty_of_steps(window, shapes, extras, exact=False),  # a few steps
    }
    if metric_plan.ring:
        full = lambda a: jnp.full((metric_plan.ring, *a.shape), a)  # noqa: E731
        sums["ring"] = jax.tree.map(full, sums["window"])
    counters = {"freeze": freeze} | NONE_BAD
    return sums | {name: jnp.int32(value) for name, value in counters.items()}


def cleared(sums):
    """The sums, on the host or a device, with no bad steps, so that a frozen state can continue."""
    return sums | {name: 0 * sums[name] + value for name, value in NONE_BAD.items()}


def read_of(sums):
    """The part of the sums that the host reads after every chunk."""
    return sums | {part: tally.without_rows(sums[part]) for part in ("epoch", "window")}
