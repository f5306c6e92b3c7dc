"""One step of training: gradients, the optimizer, skipping of non-finite steps and averaged weights, selected whole."""

import jax
import jax.numpy as jnp

from training.base import TrainState, Update
from utils import UserError


def gradient_update(objective, optimizer, *, accumulate: int = 1, ema: float | None = None, unroll: bool = False) -> Update:
    """The usual update: the gradient of the mean loss over the genuine examples of a batch, through one optimizer."""

    def step(ts, batch, valid):
        key = jax.random.fold_in(jax.random.key(ts.seed), ts.step)
        mask = jnp.arange(len(jax.tree.leaves(batch)[0])) < valid
        grads, state, losses, metrics = gradient(objective, ts.params, ts.state, batch, mask, key, accumulate, unroll)
        updates, opt = optimizer.update(grads, ts.opt, ts.params)
        params = jax.tree.map(lambda p, u: p + (ts.lr_scale * u).astype(p.dtype), ts.params, updates)
        averaged = None if ema is None else moving_average(ts.ema, params, ema, ts.step)
        # A bad step changes nothing but the counters: what was finite stays finite, so it can be saved or gone on from.
        new, old = (params, state, opt, averaged), (ts.params, ts.state, ts.opt, ts.ema)
        finite = all_finite((grads, jnp.where(mask, losses, 0), new))
        params, state, opt, averaged = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
        sums = add_sums(ts.sums, losses, metrics, mask & finite)
        sums |= {
            "bad_steps": ts.sums["bad_steps"] + ~finite,
            "first_bad": jnp.where(finite | (ts.sums["first_bad"] >= 0), ts.sums["first_bad"], ts.step),
        }
        return TrainState(ts.step + 1, ts.seed, params, state, opt, averaged, sums, ts.lr_scale)

    return Update(lambda params: (optimizer.init(params), None if ema is None else params), step)


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
