"""Linear maps whose computation is delayed, so that neighbouring layers can be folded into them.

The result of a layer may be Pending instead of a tensor. The next layer folds it into its own
weights or computes its tensor. Weights are multiplied in float64 and rounded once.
"""

from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from inference.lowering.tf_ops.elementwise import Tensor
from inference.lowering.tf_ops.products import convolution, out_size
from inference.quantize_tflite import KEPT

Geometry: TypeAlias = dict[str, Any]  # stride, pads and dilation of a convolution

UNIT = {"stride": (1, 1), "pads": ((0, 0), (0, 0)), "dilation": (1, 1)}


def is_image(x: "Result") -> bool:
    """Whether x has two axes of known sizes between the first and the last."""
    return len(x.shape) == 4 and None not in tuple(x.shape)[1:3]


class Pending:
    """A result with a `shape`, whose tensor is computed on first use.

    `shared`: it may be folded into several layers that read it, and not only into a single one.
    `kept`: a quantization leaves its weights in float32.
    """

    cached, shared, kept = None, False, False

    @property
    def shape(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def emit(self) -> Tensor:
        """Computes the tensor."""
        raise NotImplementedError

    def tensor(self) -> Tensor:
        if self.cached is None:  # an empty name leaves the scope of the op that reads it
            with tf.name_scope(KEPT if self.kept else ""):
                self.cached = self.emit()
        return self.cached


class Linear(Pending):
    """A matrix product or a convolution with constant weights.

    The weight is (in, out) or (kh, kw, in / groups, out).
    """

    def __init__(
        self,
        x: Tensor,
        weight: np.ndarray,
        bias: np.ndarray | None = None,
        geometry: Geometry | None = None,
        kept: bool = False,
    ) -> None:
        self.x, self.geometry, self.kept = x, geometry, kept
        self.weight = np.asarray(weight, np.float64)
        self.bias = np.zeros(weight.shape[-1]) if bias is None else np.asarray(bias, np.float64)

    @property
    def dense(self) -> bool:
        """Whether each output reads all channels: then a matrix product after it can be folded."""
        return self.weight.shape[-2] == self.x.shape[-1]

    @property
    def shape(self) -> tuple[Any, ...]:
        if not self.geometry:
            return (*self.x.shape[:-1], self.weight.shape[-1])
        size = out_size(self.x.shape[1:3], self.weight.shape[:2], **self.geometry)
        return (self.x.shape[0], *size, self.weight.shape[-1])

    def mixed(self, matrix: np.ndarray) -> "Linear":
        """This map followed by a product with a matrix."""
        bias = self.bias @ matrix
        return Linear(self.x, self.weight @ matrix, bias, self.geometry, self.kept)

    def affine(self, scale: np.ndarray | float, shift: np.ndarray | float) -> "Linear":
        """This map followed by a scale and a shift per channel."""
        bias = self.bias * scale + shift
        return Linear(self.x, self.weight * scale, bias, self.geometry, self.kept)

    def emit(self) -> Tensor:
        weight, bias = self.weight.astype(np.float32), self.bias.astype(np.float32)
        if self.geometry:
            y = convolution(self.x, weight, **self.geometry)
        else:
            y = tf.matmul(self.x, weight)
        return tf.nn.bias_add(y, bias) if bias.any() else y  # pyright: ignore[reportArgumentType]  # an array is fine


class Scaled(Pending):
    """A scale and a shift per channel: the end of a normalization.

    `products`: compute it as a depthwise convolution where that is possible.
    """

    shared = True

    def __init__(self, x: Tensor, scale: np.ndarray, shift: np.ndarray, products: bool) -> None:
        self.x, self.products = x, products
        self.scale = np.asarray(scale, np.float32)
        self.shift = np.asarray(shift, np.float32)

    @property
    def shape(self) -> tuple[Any, ...]:
        return self.x.shape

    def emit(self) -> Tensor:
        if self.products and is_image(self.x) and self.shift.any():
            # XNNPACK runs this as one multiply-add
            y = convolution(self.x, self.scale.reshape(1, 1, 1, -1), **UNIT)
            return tf.nn.bias_add(y, self.shift)  # pyright: ignore[reportArgumentType]  # as above
        scaled = self.x if np.all(self.scale == 1) else self.x * self.scale
        return scaled + self.shift if np.any(self.shift) else scaled


Result: TypeAlias = Tensor | Pending


def resolved(x: Any) -> Tensor:
    """The tensor of a pending result; anything else is returned unchanged."""
    return x.tensor() if isinstance(x, Pending) else x


def is_constant(*arrays: Any) -> bool:
    return all(isinstance(array, np.ndarray) for array in arrays)


def linear_of(
    x: Result, weight: np.ndarray, bias: np.ndarray | None = None, geometry: Geometry | None = None
) -> Linear:
    """A product or convolution with constant weights; a pending x is folded in where possible."""
    is_padded = geometry and np.any(geometry["pads"])
    # a shift cannot be folded past padding, which is 0 after the shift and not before
    if isinstance(x, Scaled) and not (is_padded and x.shift.any()):
        scale, shift = (by_input(part, weight, x.shape[-1]) for part in (x.scale, x.shift))
        shift = (weight * shift).sum(tuple(range(weight.ndim - 1)))
        bias = shift if bias is None else shift + bias
        return Linear(x.x, weight * scale, bias, geometry, x.kept)
    if isinstance(x, Linear) and weight.shape[:-2] in [(), (1, 1)] and (geometry or UNIT) == UNIT:
        shift = 0 if bias is None else bias
        if weight.shape[-2:] == (1, x.shape[-1]):  # one number per channel
            return x.affine(weight.ravel(), shift)
        if x.dense and is_smaller(x, weight):
            return x.mixed(weight.reshape(weight.shape[-2:])).affine(1, shift)
    return Linear(resolved(x), weight, bias, geometry)


def by_input(numbers: np.ndarray, weight: np.ndarray, channels: int) -> np.ndarray:
    """One number per input channel, as (in / groups, out) for a weight with grouped outputs."""
    groups = channels // weight.shape[-2]
    by_group = numbers.astype(np.float64).reshape(groups, -1)
    return np.repeat(by_group, weight.shape[-1] // groups, axis=0).T


def is_smaller(first: Linear, weight: np.ndarray) -> bool:
    """Whether folding a product with this weight into the first map gives no more numbers."""
    if weight.shape[-2] != first.weight.shape[-1]:
        return False
    folded_size = first.weight.size // first.weight.shape[-1] * weight.shape[-1]
    return folded_size <= first.weight.size + weight.size
