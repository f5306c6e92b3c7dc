"""Losses of one example: (output, target) -> scalar, in float32 at least, since a bfloat16 softmax loses the tail."""

import jax
import jax.numpy as jnp

from training.base import Loss


def cross_entropy(logits, label, *, label_smoothing: float = 0.0) -> Loss:
    """-log of the softmax's probability of the label: a class, or a distribution over the classes; a mean over leading axes."""
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing: must be at least 0 and below 1, got {label_smoothing}")
    logits = at_least_float32(logits)
    target = distribution(logits, jnp.asarray(label))
    target = (1 - label_smoothing) * target + label_smoothing / logits.shape[-1]
    terms = jnp.where(
        target == 0, 0, target * jax.nn.log_softmax(logits)
    )  # 0 * log(0) of a class masked by -inf is 0
    return -jnp.mean(jnp.sum(terms, axis=-1))


def binary_cross_entropy(logits, label) -> Loss:
    """-log of the sigmoid's probability of the label, 0 or 1 or between, as a mean over elements."""
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


def huber(output, target, *, delta: float = 1.0) -> Loss:
    """Half the squared difference up to delta, and a straight line of slope delta beyond; the mean over elements."""
    if not delta > 0:
        raise ValueError(f"delta: must be above 0, got {delta}")
    output, target = same_shape(output, target)
    difference = jnp.abs(output - target)
    inside = jnp.minimum(difference, delta)
    return jnp.mean(inside**2 / 2 + delta * (difference - inside))


def at_least_float32(x):
    """The array in its own float, or in float32 where that is wider."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def same_shape(output, target):
    """Both as arrays of the same float; a single output, (1,), may stand for a scalar target."""
    output, target = at_least_float32(output), jnp.asarray(target)
    if output.shape == (*target.shape, 1):
        output = output[..., 0]
    if output.shape != target.shape:
        raise ValueError(
            f"the output has the shape {output.shape} and the target {target.shape}; they must be the same"
        )
    return output, target.astype(output.dtype)


def distribution(logits, label):
    """The probability of every class: one-hot for classes, NaN for a class that there is not."""
    if label.shape == logits.shape:
        return label.astype(logits.dtype)
    if (
        logits.ndim == 0
        or label.shape != logits.shape[:-1]
        or not jnp.issubdtype(label.dtype, jnp.integer)
    ):
        raise ValueError(
            f"the output has the shape {logits.shape} and the target {label.dtype}{list(label.shape)}; "
            f"the target must be integers of the shape {logits.shape[:-1]}, or probabilities of the shape {logits.shape}"
        )
    # A one-hot product, as a gather's gradient is a scatter, which is slow on the CPU.
    one_hot = jax.nn.one_hot(label, logits.shape[-1], dtype=logits.dtype)
    return jnp.where(one_hot.any(axis=-1, keepdims=True), one_hot, jnp.nan)
