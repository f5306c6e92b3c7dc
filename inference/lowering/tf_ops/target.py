"""The target of the walk that computes in TensorFlow, while a tf.function is traced."""

import operator
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Self, TypeGuard

import jax
import numpy as np
import tensorflow as tf

from inference.lowering.equations import ELEMENTWISE
from inference.lowering.tf_ops.elementwise import NARROW, Tensor
from inference.lowering.tf_ops.layers import FOLDS
from inference.lowering.tf_ops.pending import Pending, Result, resolved
from inference.lowering.value import Aval, Size, Value, evaluate, symbols
from inference.lowering.walk import Lowering, Missing, Target
from inference.quantize_tflite import KEPT
from utils import first_line

TYPES = {"float32", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "bool"}

ARITHMETIC = ("neg", "add", "sub", "mul", "pow", "floordiv", "mod")
SIZES = {name: getattr(operator, name) for name in ARITHMETIC}
SIZES |= {"number": np.int32, "max": tf.maximum, "min": tf.minimum}


class TfTarget(Target):
    """Computes with tensors; constants stay arrays until an op uses them.

    Values that are float16 or bfloat16 in JAX are float32 here, since most TFLite ops support
    nothing narrower; they are rounded where the model converts to the narrow dtype.
    `products`: compute means over few channels as products, which is faster, but unfit for int8.
    The ops that read the weights `kept`, which a quantization leaves in float32, have names that
    say so.
    """

    def __init__(
        self,
        layers: Mapping[str, Lowering],
        table: Mapping[str, Lowering],
        avals: Mapping[str, Aval],
        inputs: Mapping[str, Tensor],
        products: bool = True,
        kept: Iterable[str] = (),
    ) -> None:
        self.layers = {name: self.guarded(name, function) for name, function in layers.items()}
        self.table = {name: self.guarded(name, function) for name, function in table.items()}
        self.inputs = inputs  # {name: tensor}, from which the graph reads the free sizes
        self.symbols = symbols(avals)
        self.products, self.kept = products, frozenset(kept)
        self.within_kept = False  # whether an op that reads such a weight is being computed

    def operand(self, value: Value) -> Result:
        data = value.data
        if isinstance(data, Pending) and value.uses > 1 and not data.shared:
            value.data = data.tensor()
        is_narrow = value.constant and value.dtype.name in NARROW
        return value.data.astype(np.float32) if is_narrow else value.data

    def whole(self, value: Value) -> Tensor:
        """The full tensor of a Value: nothing is pending, every broadcast is carried out."""
        return resolved(self.walk.whole(value))

    def expanded(self, value: Value) -> Tensor:
        return tf.broadcast_to(resolved(self.operand(value)), self.sizes(value.shape))

    def with_results(self, avals: Sequence[Aval], operands: Sequence[Value] = ()) -> Self:
        return super().with_results(self.stored(avals), operands)

    def stored(self, avals: Sequence[Aval]) -> list[Aval]:
        """Shapes and dtypes as they are here: float32 for the narrow ones."""
        return [
            jax.ShapeDtypeStruct(aval.shape, np.float32) if aval.dtype.name in NARROW else aval
            for aval in avals
        ]

    def new_sizes(self, shape: Sequence[Size]) -> Tensor:
        """A shape for tf.reshape: -1 for a single free dimension, so that it is not computed."""
        if sum(not isinstance(d, int) for d in shape) > 1:
            return self.sizes(shape)
        return [d if isinstance(d, int) else -1 for d in shape]

    def sizes(self, shape: Sequence[Size]) -> Tensor:
        """A shape for ops that do not support -1."""
        if all(isinstance(d, int) for d in shape):
            return np.array(shape, np.int32)
        return tf.stack([self.size(d) for d in shape])

    def size(self, dimension: Size) -> Tensor:
        """A dimension as a number, or as a scalar tensor."""
        if isinstance(dimension, int):
            return np.int32(dimension)
        return evaluate(dimension, self.symbol, SIZES)

    def symbol(self, name: str) -> Tensor:
        """The value of a symbol, read from an input."""
        source, axis, factor = self.symbols[name]
        size = tf.shape(self.inputs[source])[axis]
        return size if factor == 1 else size // factor

    def guarded(self, name: str, function: Lowering) -> Lowering:
        """A table's function that raises Missing for what TensorFlow refuses, such as a rank."""

        def call(target: TfTarget, *operands: Any, **params: Any) -> Any:
            for aval in target.out:
                if aval.dtype.name not in TYPES:
                    target.refuse(name, f"of {aval.dtype}")
            if function not in FOLDS:
                operands, params = jax.tree.map(resolved, (operands, params), is_leaf=is_pending)
            # What is computed within an op, as in a loop, may be in a graph of its own.
            outer = self.within_kept
            self.within_kept = is_kept = outer or not self.kept.isdisjoint(target.operand_names)
            try:
                with tf.name_scope(KEPT) if is_kept else nullcontext():
                    results = function(target, *operands, **params)
                for pending in filter(is_pending, jax.tree.leaves(results) if is_kept else ()):
                    pending.kept = True
                # TensorFlow loses some sizes that are known, on which the next op may depend
                return results if name in ELEMENTWISE else known_shapes(results, target.out)
            except (TypeError, ValueError, tf.errors.OpError) as error:
                if not is_refusal(error):
                    raise
                raise Missing(f"{name}: {first_line(error)}", self.walk.place) from error
            finally:
                self.within_kept = outer

        return call


def is_pending(x: Any) -> TypeGuard[Pending]:
    return isinstance(x, Pending)


def known_shapes(results: Any, avals: Sequence[Aval]) -> Any:
    """The results, as tensors whose shapes are known where those in JAX are."""
    for tensor, aval in zip(jax.tree.leaves(results), avals, strict=True):
        if tf.is_tensor(tensor):
            tensor.set_shape([d if isinstance(d, int) else None for d in aval.shape])
    return results


def is_refusal(error: Exception) -> bool:
    """Whether TensorFlow raised the error; any other error is our own bug."""
    if isinstance(error, tf.errors.OpError):
        return True
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").startswith("tensorflow.")
