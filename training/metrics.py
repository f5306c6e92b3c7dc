"""Metrics of one example: (output, target) -> scalar or dict.

If a metric has an attribute `finish`, that function maps the means to the reported value.
"""

import jax
import jax.numpy as jnp

from training import loss
from training.base import Metric
from utils import Count


def accuracy(logits, label) -> Metric:
    """1 if the largest logit is that of the label."""
    return jnp.mean(jnp.argmax(logits, axis=-1) == classes(logits, label), dtype=jnp.float32)


def top_k_accuracy(logits, label, *, k: Count = 5) -> Metric:
    """1 if the logit of the label is among the `k` largest."""
    if not 1 <= k <= logits.shape[-1]:
        largest = f"the {logits.shape[-1]} classes"
        raise ValueError(f"k: must be at least 1 and at most {largest}, got {k}")
    best = jax.lax.top_k(logits, k)[1]
    return jnp.mean(jnp.any(best == classes(logits, label)[..., None], axis=-1), dtype=jnp.float32)


def rmse(output, target) -> Metric:
    """The root of the mean squared difference."""
    return loss.mse(output, target)


rmse.finish = jnp.sqrt


def mae(output, target) -> Metric:
    """The mean absolute difference."""
    return loss.mae(output, target)


def perplexity(logits, label) -> Metric:
    """exp of the mean cross entropy: as many equally likely classes are as hard to guess."""
    return loss.cross_entropy(logits, label)


perplexity.finish = jnp.exp


def f1(logits, label) -> Metric:
    """The harmonic mean of precision and recall, averaged over the classes that occur."""
    count = logits.shape[-1]
    predicted = jax.nn.one_hot(jnp.argmax(logits, axis=-1), count).reshape(-1, count)
    actual = jax.nn.one_hot(classes(logits, label), count).reshape(-1, count)
    tp = jnp.sum(predicted * actual, axis=0)
    return {"tp": tp, "fp": jnp.sum(predicted, axis=0) - tp, "fn": jnp.sum(actual, axis=0) - tp}


def f1_finish(means):
    """2 tp / (2 tp + fp + fn), averaged over the classes that occur."""
    weight = 2 * means["tp"] + means["fp"] + means["fn"]
    occurs = weight > 0
    scores = 2 * means["tp"] / jnp.where(occurs, weight, 1)
    return jnp.sum(scores, axis=-1) / jnp.maximum(jnp.sum(occurs, axis=-1), 1)


f1.finish = f1_finish


def classes(logits, label):
    """The label as a class: itself, or the most likely class of a distribution."""
    label = jnp.asarray(label)
    if label.shape == logits.shape:
        return jnp.argmax(label, axis=-1)
    if label.shape != logits.shape[:-1]:
        shapes = f"the output has the shape {logits.shape} and the target {label.shape}"
        raise ValueError(f"{shapes}; expected {logits.shape[:-1]}")
    return label
