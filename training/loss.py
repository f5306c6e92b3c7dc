"""Losses of one example: (output, target) -> scalar.

They compute in float32 at least, since a bfloat16 softmax loses the tail. A loss over several
elements, such as the tokens of a sequence, is their mean. If not all of them count alike, the
target is {"target": ..., "weight": a number for each element}, or some of its labels are the
`ignore_label`; the loss is then Weighted by the sum of the weights of the example.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Num, PyTree

from training.base import Loss, Weighted
from utils.forms import Fraction, Positive, checked


@checked
def cross_entropy(
    logits: ArrayLike,
    label: PyTree,
    *,
    label_smoothing: Fraction = 0.0,
    ignore_label: int | None = None,
) -> Loss:
    """-log of the softmax probability of the label, averaged over leading axes.
    The label is a class, or a distribution over the classes. Where it is `ignore_label`, such as
    the padding of a sequence, it does not count."""
    logits = at_least_float32(logits)
    label, weight = label_and_weight(logits, label, ignore_label)
    target, logits = distribution(logits, label), counted(logits, weight)
    target = (1 - label_smoothing) * target + label_smoothing / logits.shape[-1]
    # A class masked by a logit of -inf contributes 0 * log(0), which must be 0.
    terms = jnp.where(target == 0, 0, target * jax.nn.log_softmax(logits))
    return averaged(-jnp.sum(terms, axis=-1), weight)


def binary_cross_entropy(
    logits: ArrayLike, label: PyTree, *, ignore_label: int | None = None
) -> Loss:
    """-log of the sigmoid probability of the label, averaged over the elements. A label is in
    [0, 1]; any other one gives NaN.
    Elements whose label is `ignore_label`, such as -1 for an unknown one, do not count."""
    label, weight = target_and_weight(label, ignore_label)
    x, z = same_shape(logits, label)
    x = counted(x, weight)
    z = jnp.where((z < 0) | (z > 1), jnp.nan, z)  # else labels 1 and 2 train to minus infinity
    return averaged(z * jax.nn.softplus(-x) + (1 - z) * jax.nn.softplus(x), weight)


def mse(output: ArrayLike, target: PyTree) -> Loss:
    """The mean squared difference."""
    target, weight = target_and_weight(target)
    output, target = same_shape(output, target)
    return averaged(jnp.square(counted(output, weight) - target), weight)


def mae(output: ArrayLike, target: PyTree) -> Loss:
    """The mean absolute difference."""
    target, weight = target_and_weight(target)
    output, target = same_shape(output, target)
    return averaged(jnp.abs(counted(output, weight) - target), weight)


@checked
def huber(output: ArrayLike, target: PyTree, *, delta: Positive = 1.0) -> Loss:
    """Half the squared difference up to `delta`, a line of slope `delta` beyond; averaged."""
    target, weight = target_and_weight(target)
    output, target = same_shape(output, target)
    difference = jnp.abs(counted(output, weight) - target)
    inside = jnp.minimum(difference, delta)
    return averaged(inside**2 / 2 + delta * (difference - inside), weight)


def target_and_weight(
    target: PyTree, ignore_label: int | None = None
) -> tuple[Array, Array | None]:
    """(the target, the weight of its elements, or None if all count alike). An element that does
    not count gets the target 0, so that it cannot make a NaN. A weight below 0 becomes NaN, since
    it could make an accuracy larger than 1."""
    weight = None
    if isinstance(target, dict):
        if target.keys() != {"target", "weight"}:
            keys = ", ".join(map(repr, target))
            raise ValueError(f"a target that is a dict must have 'target' and 'weight', got {keys}")
        target, weight = target["target"], at_least_float32(target["weight"])
        weight = jnp.where(weight < 0, jnp.nan, weight)
    target = jnp.asarray(target)
    if ignore_label is not None:
        nothing = jnp.zeros(target.shape, bool)
        ignored = target == ignore_label if can_hold(target.dtype, ignore_label) else nothing
        kept = jnp.ones(target.shape) if weight is None else along(weight, target)
        weight = jnp.where(ignored, 0, kept)
    if weight is None:
        return target, None
    return jnp.where(along(weight, target) == 0, 0, target), weight


def can_hold(dtype: DTypeLike, label: int) -> bool:
    """Whether an array of this dtype can hold a label. A comparison would turn -1 into the last of
    the unsigned numbers."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return True
    return jnp.iinfo(dtype).min <= label <= jnp.iinfo(dtype).max


def label_and_weight(
    logits: ArrayLike, label: PyTree, ignore_label: int | None
) -> tuple[Array, Array | None]:
    """`target_and_weight` for labels of classes; only these, not probabilities, can be ignored."""
    shape = jnp.shape(logits)
    if not shape or shape[-1] < 2:
        raise ValueError(
            f"the output has the shape {shape}; its last axis must be two classes or more (for one "
            "logit, use the loss binary_cross_entropy and the metric binary_accuracy)"
        )
    label, weight = target_and_weight(label, ignore_label)
    if ignore_label is not None and label.shape == shape:
        why = "the target holds probabilities, and only classes can be ignored"
        raise ValueError(f"ignore_label: {why}; give the elements weights")
    return label, weight


def counted(output: Num[Array, "..."], weight: Array | None) -> Num[Array, "..."]:
    """The output, but 0 where an element has the weight 0. Its output may be NaN or infinite, which
    would make the loss or, if only the loss were masked, the gradient NaN."""
    return output if weight is None else jnp.where(along(weight, output) == 0, 0, output)


def averaged(values: Float[Array, "*axes"], weight: Array | None) -> Array | Weighted:
    """The mean of the elements; Weighted if they have weights. A value of weight 0 may be NaN."""
    if weight is None:
        return jnp.mean(values)
    weight = jnp.broadcast_to(along(weight, values), values.shape).astype(values.dtype)
    total = jnp.sum(weight)
    products = jnp.where(weight == 0, 0, weight * values)
    return Weighted(jnp.sum(products) / jnp.where(total == 0, 1, total), total)


def along(weight: Num[Array, "..."], values: Num[Array, "*axes"]) -> Num[Array, "..."]:
    """The weights in a shape that broadcasts with the values, which have more trailing axes."""
    if weight.shape != values.shape[: weight.ndim]:
        shapes = f"the weights have the shape {weight.shape} and the target {values.shape}"
        raise ValueError(f"{shapes}; give one weight for each element, or for each row of them")
    return weight.reshape(weight.shape + (1,) * (values.ndim - weight.ndim))


def at_least_float32(x: ArrayLike) -> Num[Array, "..."]:
    """The array in its own dtype or in float32, whichever is wider."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def same_shape(
    output: ArrayLike, target: ArrayLike
) -> tuple[Float[Array, "*axes"], Float[Array, "*axes"]]:
    """Both as arrays of one float dtype; an output (..., 1) fits a target (...)."""
    output, target = at_least_float32(output), jnp.asarray(target)
    if output.shape == (*target.shape, 1):
        output = output[..., 0]
    if output.shape != target.shape:
        shapes = f"the output has the shape {output.shape} and the target {target.shape}"
        fix = "they must be the same"
        if not target.ndim and output.ndim and not jnp.issubdtype(target.dtype, jnp.floating):
            fix += "; integer targets are class labels: store those of a regression as floats"
        raise ValueError(f"{shapes}; {fix}")
    return output, target.astype(output.dtype)


def distribution(
    logits: Float[Array, "*axes classes"], label: Array
) -> Float[Array, "*axes classes"]:
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
    hot = one_hot(label, logits.shape[-1], logits.dtype)
    return jnp.where(hot.any(axis=-1, keepdims=True), hot, jnp.nan)


def one_hot(
    label: Num[Array, "*axes"], count: int, dtype: DTypeLike = float
) -> Float[Array, "*axes classes"]:
    """1 for the class of the label, 0 for all others; all 0 if there is no such class."""
    # jax.nn.one_hot numbers the classes in the type of the label: in uint8, class 261 is 5, too.
    narrow = jnp.issubdtype(label.dtype, jnp.integer) and label.dtype.itemsize < 4
    return jax.nn.one_hot(label.astype(jnp.int32) if narrow else label, count, dtype=dtype)
