"""One step of training. An update of one's own is a function like `gradient_update`, named in the config: `init(params)` answers
(optimizer state, averaged weights or None), `step` ends with `accepted`, which keeps the books and refuses what is not finite.
"""

import jax
import jax.numpy as jnp

from training.base import Update
from utils import UserError


def gradient_update(objective, optimizer, *, accumulate: int = 1, ema: float | None = None, unroll: bool = False) -> Update:
    """The usual update: the gradient of the mean loss over the genuine examples of a batch, through one optimizer."""

    def init(params):
        return optimizer.init(params), None if ema is None else params

    def step(ts, batch, valid):
        key, mask = step_key(ts), genuine(batch, valid)
        grads, state, losses, metrics = gradient(objective, ts.params, ts.state, batch, mask, key, accumulate, unroll)
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
    """How every step ends: `new` where all of it is finite, else `ts` as it was, and the batch counted in either case."""
    fields = ("params", "state", "opt", "ema")  # what was finite stays finite, so it can be saved or gone on from
    finite = all_finite((grads, jnp.where(mask, losses, 0), [getattr(new, name) for name in fields]))
    kept = {name: jax.tree.map(lambda n, o: jnp.where(finite, n, o), getattr(new, name), getattr(ts, name)) for name in fields}
    sums = add_sums(ts.sums, losses, metrics, mask & finite)
    first = ts.sums["first_bad"]
    sums["bad_steps"] = ts.sums["bad_steps"] + ~finite
    sums["first_bad"] = jnp.where(finite | (first >= 0), first, ts.step)
    return ts._replace(step=ts.step + 1, sums=sums, **kept)


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
        grads, (state, losses, metrics) = grad(params, state, batch, mask, jax.random.fold_in(key, i))
        return (jax.tree.map(jnp.add, total, grads), state), (losses, metrics)

    size = len(mask)
    if size % accumulate:
        raise UserError(f"training.accumulate: a batch of {size} does not divide into {accumulate} microbatches")
    # Every n-th row goes to one microbatch, so that each device of a sharded batch holds its share of every microbatch.
    split = jax.tree.map(lambda a: a.reshape(-1, accumulate, *a.shape[1:]).swapaxes(0, 1), (batch, mask))
    carry = (jax.tree.map(jnp.zeros_like, params), state)
    carry, seen = jax.lax.scan(microbatch, carry, (jnp.arange(accumulate), *split), unroll=unroll)
    losses, metrics = jax.tree.map(lambda a: a.swapaxes(0, 1).reshape(-1, *a.shape[2:]), seen)
    return *carry, losses, metrics


def moving_average(ema, params, decay, step):
    """The moving average of the weights; its first steps forget faster, so that it does not stay at the initial weights."""
    decay = jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda e, p: e + (1 - decay).astype(e.dtype) * (p - e), ema, params)


def all_finite(tree):
    """Whether no float in a tree is a NaN or an infinity."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in floats]).all()


def zero_sums(objective, params, state, batch):
    """Accumulators of zeros for one epoch; arguments may be arrays or their shapes."""
    seen = jax.eval_shape(lambda p, s, b: objective(p, s, b, jax.random.key(0), False), params, state, batch)
    losses, _, metrics = seen
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape[1:], jnp.promote_types(a.dtype, jnp.float32)), (losses, metrics))
    counters = {"examples": jnp.int32(0), "bad_steps": jnp.int32(0), "first_bad": jnp.int32(-1)}
    return {"loss": zeros[0], "metrics": zeros[1], **counters}


def add_sums(sums, losses, metrics, mask):
    """The accumulators with one more batch, the examples under the mask."""

    def add(total, values):
        genuine = mask.reshape(-1, *(1,) * (values.ndim - 1))
        return total + jnp.where(genuine, values, 0).astype(total.dtype).sum(0)

    added = jax.tree.map(add, (sums["loss"], sums["metrics"]), (losses, metrics))
    return sums | {"loss": added[0], "metrics": added[1], "examples": sums["examples"] + mask.sum(dtype=jnp.int32)}
