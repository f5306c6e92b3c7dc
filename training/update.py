"""One step of training. An update of one's own is a function like `gradient_update`, named in the config: `init(params)` answers
(optimizer state, averaged weights or None), `step` ends with `accepted`, which keeps the books and refuses what is not finite.
"""

import jax
import jax.numpy as jnp

from training import tally
from training.base import Update
from utils import UserError, path_name

MADE = (
    "state",
    "opt",
    "params",
    "ema",
)  # what a step makes of the loss and the gradients, causes before their effects
SMALL = (
    2**12
)  # numbers: larger leaves are added up one by one, which took a perceptron's step from 366 to 353 us
NONE_BAD = {
    "bad_steps": 0,
    "first_bad": -1,
    "bad_leaf": 0,
}  # how many, the first one, and which leaf that one hit


def gradient_update(
    objective, optimizer, *, accumulate: int = 1, ema: float | None = None, unroll: bool = False
) -> Update:
    """The usual update: the gradient of the mean loss over the genuine examples of a batch, through one optimizer."""

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
        return accepted(ts, new, grads, losses, metrics, mask)

    return Update(init, step)


def step_key(ts):
    """The randomness of a step, a function of (seed, step) alone."""
    return jax.random.fold_in(jax.random.key(ts.seed), ts.step)


def genuine(batch, valid):
    """The mask of the examples that count: the first `valid` ones."""
    return jnp.arange(jax.tree.leaves(batch)[0].shape[0]) < valid


def apply_updates(ts, updates):
    """The parameters plus the updates, by the rate that callbacks may have lowered."""
    return jax.tree.map(lambda p, u: p + (ts.lr_scale * u).astype(p.dtype), ts.params, updates)


def accepted(ts, new, grads, losses, metrics, mask):
    """How every step ends: `new` where all of it is finite, else `ts` as it was, and the batch counted in either case; where
    sums["freeze"] is 1, the first bad step and all that follow count for nothing and leave the state of the last good one."""
    good, leaf = all_finite(ts, new, grads, jnp.where(mask, losses, 0))
    sums = note_bad(ts.sums, ts.step, good, leaf)
    stands = frozen(sums)
    taken = good & ~stands
    kept = {
        name: jax.tree.map(
            lambda n, o: jnp.where(taken, n, o), getattr(new, name), getattr(ts, name)
        )
        for name in MADE
    }
    sums = measured(
        sums, ts.step, losses, metrics, mask & taken, taken, tally.norms_of(grads, kept["params"])
    )
    return ts._replace(step=ts.step + ~stands, sums=sums, **kept)


def all_finite(ts, new, grads, losses):
    """Whether all that a step made is finite, and the number, for `bad_leaf_name`, of the first leaf that is not: causes come
    before their effects."""
    gradients, made = floats(grads), made_floats(new)
    # Gradients of another tree than the parameters' are numbered behind these, so that none is given a wrong name.
    own = [name for name, _ in gradients] == [name for name, _ in floats(ts.params)]
    first = 1 if own else 1 + len(floats(ts.params))
    numbers = [0, *range(first, first + len(gradients)), *range(-1, -1 - len(made), -1)]
    leaves = [losses, *(leaf for _, leaf in gradients + made)]

    def leaf_by_leaf(*leaves):
        finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves])
        return finite.all(), finite.argmin().astype(jnp.int32)

    # Looking at every number would be a fifth of the step of a small perceptron; adding them up is a quarter of that.
    good, place = jax.lax.cond(
        jnp.isfinite(total(leaves)),
        lambda *_: (jnp.bool(True), jnp.int32(0)),
        leaf_by_leaf,
        *leaves,
    )
    return good, jnp.array(numbers, jnp.int32)[place]


def total(leaves):
    """The sum of all numbers: not finite where one of them is not."""
    small, sums = {}, []
    for leaf in leaves:
        # Leaves that are cut in different ways must not be added: XLA's partitioner then gets the whole step wrong (jax 0.10.2).
        if leaf.size > SMALL or jax.device_count() > 1:
            sums.append(wide_sum(leaf))
        else:  # those of one form are added first, since each sum has its price
            form = leaf.shape, leaf.dtype
            small[form] = small[form] + leaf if form in small else leaf
    return sum([*sums, *map(wide_sum, small.values())])


def wide_sum(leaf):
    return jnp.sum(leaf, dtype=jnp.promote_types(leaf.dtype, jnp.float32))


def note_bad(sums, step, good, leaf):
    """The counters of bad steps after one more step; of a frozen state they stay."""
    first = ~good & (sums["first_bad"] < 0)
    return sums | {
        "bad_steps": sums["bad_steps"] + (~good & ~frozen(sums)),
        "first_bad": jnp.where(first, step, sums["first_bad"]),
        "bad_leaf": jnp.where(first, leaf, sums["bad_leaf"]),
    }


def frozen(sums):
    """Whether a bad step was the end of this state's changes."""
    return (sums["freeze"] > 0) & (sums["first_bad"] >= 0)


def bad_leaf_name(ts, number):
    """What the first bad step hit, from sums["bad_leaf"], in words; `ts` may hold arrays or their shapes."""
    if number == 0:
        return "the loss"
    if number < 0:
        return made_floats(ts)[-1 - number][0]
    names = [name for name, _ in floats(ts.params)]
    return (
        f"the gradient of {names[number - 1]}"
        if number <= len(names)
        else f"a gradient (leaf {number - 1 - len(names)})"
    )


def made_floats(ts):
    """The floats of what a step makes, as [(name, leaf)], in the order of MADE."""
    return [pair for name in MADE for pair in floats({name: getattr(ts, name)})]


def floats(tree):
    """The leaves of a tree that can be a NaN or an infinity, as [(name, leaf)]; counters and random keys cannot."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [
        (path_name(path), leaf) for path, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]


def gradient(objective, params, state, batch, mask, key, accumulate=1, unroll=False):
    """Gradient, new state, and each example's loss and metrics; over `accumulate` microbatches, one after the other."""
    count = jnp.maximum(mask.sum(), 1)

    def mean_loss(params, state, batch, mask, key):
        losses, state, metrics = objective(params, state, batch, key, True)
        return jnp.where(mask, losses, 0).sum() / count, (state, losses, metrics)

    grad = jax.grad(mean_loss, has_aux=True)
    if accumulate == 1:
        grads, (state, losses, metrics) = grad(params, state, batch, mask, key)
        return grads, state, losses, metrics

    def microbatch(carry, piece):
        total, state = carry
        i, batch, mask = piece
        grads, (state, losses, metrics) = grad(
            params, state, batch, mask, jax.random.fold_in(key, i)
        )
        return (jax.tree.map(jnp.add, total, grads), state), (losses, metrics)

    size = len(mask)
    if size % accumulate:
        raise UserError(
            f"training.accumulate: a batch of {size} does not divide into {accumulate} microbatches"
        )
    # Every n-th row goes to one microbatch, so that each device of a sharded batch holds its share of every microbatch.
    split = jax.tree.map(
        lambda a: a.reshape(-1, accumulate, *a.shape[1:]).swapaxes(0, 1), (batch, mask)
    )
    carry = (jax.tree.map(jnp.zeros_like, params), state)
    carry, seen = jax.lax.scan(microbatch, carry, (jnp.arange(accumulate), *split), unroll=unroll)
    losses, metrics = jax.tree.map(lambda a: a.swapaxes(0, 1).reshape(-1, *a.shape[2:]), seen)
    return *carry, losses, metrics


def moving_average(ema, params, decay, step):
    """The moving average of the weights; its first steps forget faster, so that it does not stay at the initial weights."""
    decay = jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda e, p: e + (1 - decay).astype(e.dtype) * (p - e), ema, params)


def measured(sums, step, losses, metrics, mask, taken, norms):
    """The accumulators after one more step: of the epoch, of the lines within it, and of single steps where they are kept."""
    values = {**metrics, "loss": losses}
    epoch, window = (
        tally.of_step(sums[part], values, mask, taken, norms) for part in ("epoch", "window")
    )
    sums = sums | {
        "epoch": tally.merged(sums["epoch"], epoch),
        "window": tally.merged(sums["window"], window),
    }
    if "ring" in sums:
        place = step % jax.tree.leaves(sums["ring"])[0].shape[0]
        sums["ring"] = jax.tree.map(
            lambda steps, one: steps.at[place].set(one), sums["ring"], window
        )
    return sums


def zero_sums(objective, params, state, batch, *, freeze=False, watch=tally.Watch(), rows=0):  # noqa: B008
    """Accumulators of zeros for one epoch; arguments may be arrays or their shapes. `freeze`: the first bad step is the last."""
    shapes = shapes_of_values(objective, params, state, batch)
    extras = watch.extras(params)
    epoch, window = (watch.modes(shapes, "TRAIN", freq) for freq in ("EPOCH", "STEP"))
    sums = {
        "epoch": tally.empty_of_steps(epoch, shapes, extras, rows),
        "window": tally.empty_of_steps(window, shapes, extras),
    }
    if watch.ring:
        sums["ring"] = jax.tree.map(lambda a: jnp.full((watch.ring, *a.shape), a), sums["window"])
    return sums | {
        name: jnp.int32(value) for name, value in ({"freeze": freeze} | NONE_BAD).items()
    }


def shapes_of_values(objective, params, state, batch):
    """{label: shapes} of what an objective tells of each example of a batch, its loss among it."""
    seen = jax.eval_shape(
        lambda p, s, b: objective(p, s, b, jax.random.key(0), False), params, state, batch
    )
    return {**seen[2], "loss": seen[0]}


def cleared(sums):
    """The sums without their bad steps, so that a frozen state can go on; arrays of the host stay there."""
    return sums | {name: 0 * sums[name] + value for name, value in NONE_BAD.items()}


def read_of(sums):
    """What is read of the sums at every chunk."""
    return sums | {part: tally.without_rows(sums[part]) for part in ("epoch", "window")}
