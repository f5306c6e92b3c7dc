"""Losses of one example: (output, target) -> scalar.

They compute in float32 at least, since a bfloat16 softmax loses the tail.
"""

import jax
import jax.numpy as jnp

from training.base import Loss
from utils import Fraction, Positive, checked


@checked
def cross_entropy(logits, label, *, label_smoothing: Fraction = 0.0) -> Loss:
    """-log of the softmax probability of the label, averaged over leading axes.
    The label is a class, or a distribution over the classes."""
    logits = at_least_float32(logits)
    target = distribution(logits, jnp.asarray(label))
    target = (1 - label_smoothing) * target + label_smoothing / logits.shape[-1]
    # A class masked by a logit of -inf contributes 0 * log(0), which must be 0.
    terms = jnp.where(target == 0, 0, target * jax.nn.log_softmax(logits))
    return -jnp.mean(jnp.sum(terms, axis=-1))


def binary_cross_entropy(logits, label) -> Loss:
    """-log of the sigmoid probability of the label, in [0, 1], averaged over the elements."""
    x, z = same_shape(logits, label)
    return jnp.mean(z * jax.nn.softplus(-x) + (1 - z) * jax.nn.softplus(x))


def mse(output, target) -> Loss:
    """The mean squared difference."""
    output, target = same_shape(output, target)
    return jnp.mean(jnp.square(output - target))


def mae(output, target) -> Loss:
    """The mean absolute difference."""
    output, target = same_shape(output, target)
    return jnp.mean(jnp.abs(output - target))


@checked
def huber(output, target, *, delta: Positive = 1.0) -> Loss:
    """Half the squared difference up to `delta`, a line of slope `delta` beyond; averaged."""
    output, target = same_shape(output, target)
    difference = jnp.abs(output - target)
    inside = jnp.minimum(difference, delta)
    return jnp.mean(inside**2 / 2 + delta * (difference - inside))


def at_least_float32(x):
    """The array in its own dtype or in float32, whichever is wider."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def same_shape(output, target):
    """Both as arrays of one float dtype; an output (..., 1) fits a target (...)."""
    output, target = at_least_float32(output), jnp.asarray(target)
    if output.shape == (*target.shape, 1):
        output = output[..., 0]
    if output.shape != target.shape:
        shapes = f"the output has the shape {output.shape} and the target {target.shape}"
        raise ValueError(f"{shapes}; they must be the same")
    return output, target.astype(output.dtype)


def distribution(logits, label):
    """The probability of every class: one-hot for a class, NaN for a class that does not exist."""
    if label.shape == logits.shape:
        return label.astype(logits.dtype)
    is_class = logits.ndim and label.shape == logits.shape[:-1]
    if not is_class or not jnp.issubdtype(label.dtype, jnp.integer):
        shape, target = logits.shape, f"{label.dtype}{list(label.shape)}"
        allowed = f"integers of the shape {shape[:-1]}, or probabilities of the shape {shape}"
        problem = f"the output has the shape {shape} and the target is {target}"
        raise ValueError(f"{problem}; the target must be {allowed}")
    # A product with a one-hot: a gather's gradient is a scatter, which is slow on the CPU.
    one_hot = jax.nn.one_hot(label, logits.shape[-1], dtype=logits.dtype)
    return jnp.where(one_hot.any(axis=-1, keepdims=True), one_hot, jnp.nan)
