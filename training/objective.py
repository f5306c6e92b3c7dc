"""Objectives: what a model is trained for. Any function of this form, named in the config, will do:

objective(params, state, batch, key, train) -> (loss of each example, state, {metric: value of each example})

A factory here receives the config's model, loss, metrics, preprocess and augment. `objective.finish`, where present, maps
the means of the metrics to what is reported. A loss may answer a dict of terms: their sum is minimized, and each is reported
as `loss_<term>`.
"""

import jax
import jax.numpy as jnp

from training.base import Objective
from utils import UserError


def supervised(model, loss, metrics, preprocess, augment) -> Objective:
    """The model's output against the target of a batch (x, target)."""

    def objective(params, state, batch, key, train):
        x, target = batch
        augment_key, model_key = jax.random.split(key)
        x = inputs(preprocess, augment if train else (), augment_key, x)
        output, state = model.apply(params, state, x, train=train, key=model_key)
        losses, terms = summed(jax.vmap(loss)(output, target))
        return losses, state, measure(metrics, output, target, terms)

    objective.finish = finish_means(metrics)
    return objective


def mixup(model, loss, metrics, preprocess, augment, alpha: float = 0.2) -> Objective:
    """Supervised, trained on mixtures of two examples and the same mixture of their losses; evaluated as it is."""
    if alpha <= 0:
        raise ValueError(f"alpha: must be above 0, got {alpha}")
    plain = supervised(model, loss, metrics, preprocess, augment)

    def objective(params, state, batch, key, train):
        if not train:
            return plain(params, state, batch, key, train)
        x, target = batch
        augment_key, model_key, mix_key = jax.random.split(key, 3)
        x = inputs(preprocess, augment, augment_key, x)
        share = jax.random.beta(mix_key, alpha, alpha)
        x = jax.tree.map(
            lambda a: share * a + (1 - share) * a[::-1], x
        )  # each with its mirror in the batch
        output, state = model.apply(params, state, x, train=True, key=model_key)
        mirrored = jax.tree.map(lambda a: a[::-1], target)
        both = jax.vmap(loss)(output, target), jax.vmap(loss)(output, mirrored)
        losses, terms = summed(jax.tree.map(lambda a, b: share * a + (1 - share) * b, *both))
        return losses, state, measure(metrics, output, target, terms)

    objective.finish = plain.finish
    return objective


def denoising(model, loss, metrics, preprocess, augment, noise: float = 0.5) -> Objective:
    """An autoencoder: the clean input is the target of the noisy one, labels are ignored."""
    if noise < 0:
        raise ValueError(f"noise: must be at least 0, got {noise}")

    def objective(params, state, batch, key, train):
        augment_key, noise_key, model_key = jax.random.split(key, 3)
        clean = inputs(preprocess, augment if train else (), augment_key, batch[0])
        noisy = clean + noise * jax.random.normal(noise_key, clean.shape, clean.dtype)
        output, state = model.apply(params, state, noisy, train=train, key=model_key)
        output = output.reshape(clean.shape)
        losses, terms = summed(jax.vmap(loss)(output, clean))
        return losses, state, measure(metrics, output, clean, terms)

    objective.finish = finish_means(metrics)
    return objective


def inputs(preprocess, augment, key, x):
    """A batch of raw inputs, preprocessed and augmented example by example."""
    for fn in preprocess:
        x = jax.vmap(fn)(x)
    batch_size = len(jax.tree.leaves(x)[0])
    for i, fn in enumerate(augment):
        x = jax.vmap(fn)(jax.random.split(jax.random.fold_in(key, i), batch_size), x)
    return x


def summed(losses):
    """(the loss of each example, {name: its terms}) where a loss may be a dict of terms."""
    terms = losses if isinstance(losses, dict) else {}
    return sum(terms.values()) if terms else losses, {
        f"loss_{name}": term for name, term in terms.items()
    }


def measure(metrics, output, target, terms):
    """Every metric of every example, beside the terms of the loss; metrics are {name: function of one example}."""
    if taken := terms.keys() & metrics.keys():
        raise UserError(
            f"metrics: {', '.join(sorted(taken))}: is the name of a term of the loss; give another label"
        )
    return terms | {name: jax.vmap(fn)(output, target) for name, fn in metrics.items()}


def finish_means(metrics):
    """The function from the means of the metrics to the reported values."""

    def finish_of(metric):
        function = getattr(metric, "func", metric)  # of a functools.partial
        return getattr(function, "finish", lambda mean: mean)

    return lambda means: {name: finish_of(metrics.get(name))(mean) for name, mean in means.items()}


def with_precision(model, precision):
    """The model computing in `precision`: parameters and inputs are cast once, the output comes back in float32."""
    if precision == "float32":
        return model
    dtype = jnp.dtype(precision)

    def cast(tree, dtype):
        return jax.tree.map(
            lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree
        )

    def apply(params, state, x, *, train=False, key=None):
        out, state = model.apply(cast(params, dtype), state, cast(x, dtype), train=train, key=key)
        return cast(out, jnp.float32), state

    return model._replace(apply=apply)
