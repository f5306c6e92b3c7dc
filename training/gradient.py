"""The gradient of the mean loss over the examples of a batch, whole or in microbatches."""

import jax
import jax.numpy as jnp

from training.base import is_weighted, without_frozen
from training.objective import traced
from utils import UserError, map_named, named_leaves


def gradient(objective, params, state, batch, mask, key, accumulate=1, unroll=False):
    """(gradient, new state, losses, metrics), the last two per example, computed in `accumulate`
    microbatches, one after the other."""

    def mean_loss(params, state, batch, mask, key, counts=None):
        losses, state, metrics = objective(params, state, batch, key, True, mask)
        return mean_of(losses, mask, counts or counts_of(losses, mask)), (state, losses, metrics)

    grad = jax.grad(mean_loss, has_aux=True)
    if accumulate == 1:
        grads, (state, losses, metrics) = grad(params, state, batch, mask, key)
        return grads, state, losses, metrics

    def microbatch(carry, piece):
        # The barrier orders microbatches that are unrolled, so that only one needs its memory.
        (total, state), (i, batch, mask) = jax.lax.optimization_barrier((carry, piece))
        own = jax.random.fold_in(key, i)
        grads, (state, losses, metrics) = grad(params, state, batch, mask, own, counts)
        return (jax.tree.map(jnp.add, total, grads), state), (losses, metrics)

    size = len(mask)
    if size % accumulate:
        raise UserError(
            f"training.accumulate: a batch of {size} does not divide into {accumulate} microbatches"
        )

    # Every n-th row goes to one microbatch, so that each device of a sharded batch holds its share
    # of every microbatch.
    def split(a):
        return a.reshape(-1, accumulate, *a.shape[1:]).swapaxes(0, 1)

    check_whole_numbers(objective, params, state, batch)

    def counts_of_piece(piece):
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


def check_whole_numbers(objective, params, state, batch):
    """Refuse whole numbers in the state that change: they would count microbatches, not steps."""
    named = named_leaves(without_frozen(state))
    whole = {n: a for n, a in named.items() if jnp.issubdtype(a.dtype, jnp.integer)}

    def changed(whole, params, state, batch, key):
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


def terms_of(losses):
    """The terms of a loss whose means are added, each with one value per example."""
    return jax.tree.leaves(losses, is_leaf=is_weighted)


def counts_of(losses, mask):
    """For each term of a loss, the sum of the weights of its examples, or their number."""

    def count(term):
        constant = jax.lax.stop_gradient(term.weight) if is_weighted(term) else 1
        return jnp.where(mask, constant, 0).sum()

    return list(map(count, terms_of(losses)))


def mean_of(losses, mask, counts):
    """The sum of the terms' weighted means over the genuine examples."""

    def mean(term, count):
        weighted = is_weighted(term)
        values = term.value * jax.lax.stop_gradient(term.weight) if weighted else term
        return jnp.where(mask, values, 0).sum() / jnp.where(count == 0, 1, count)

    return sum(map(mean, terms_of(losses), counts))
