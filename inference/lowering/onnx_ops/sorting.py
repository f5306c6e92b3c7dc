"""Sorting, by TopK, which keeps equal numbers in their order."""

import numpy as np

from inference.lowering.onnx_ops.elementwise import WIDER
from inference.lowering.value import Value


def top_k(t, x, *, k, axis=-1, **_):
    values, places = t.TopK(sortable(t, x), t.shape([k]), axis=axis, outputs=2)
    return [back(t, values, x), t.to(places, t.out[1].dtype)]


def sort(t, *operands, dimension, num_keys, **_):
    """By the last key first: sorting keeps equal numbers in order, so that the first key decides."""
    size = t.shape([operands[0].shape[dimension]])
    about = {"axis": dimension, "largest": 0, "outputs": 2}
    if len(operands) == 1:
        return [back(t, t.TopK(sortable(t, operands[0]), size, **about)[0], operands[0])]
    for key in reversed(range(num_keys)):
        _, places = t.TopK(sortable(t, operands[key]), size, **about)
        sorted_ = [t.GatherElements(x, places, axis=dimension) for x in operands]
        operands = [
            Value(name, x.shape, x.dtype) for name, x in zip(sorted_, operands, strict=True)
        ]
    return operands


def sortable(t, x):
    """x in a type that TopK takes."""
    return t.cast(x, sortable_type(x.dtype))


def back(t, tensor, x):
    return tensor if sortable_type(x.dtype) == x.dtype else t.to(tensor, x.dtype)


def sortable_type(dtype):
    return np.dtype(np.int32) if dtype.kind == "b" else WIDER.get(dtype.name, dtype)


PRIMITIVES = {"sort": sort, "top_k": top_k}
