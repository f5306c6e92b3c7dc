"""Sorting with TopK, which keeps equal numbers in their order."""

import numpy as np

from inference.lowering.onnx_ops.elementwise import WIDER
from inference.lowering.value import Value


def top_k(t, x, *, k, axis=-1, **_):
    values, indices = t.TopK(sortable(t, x), t.shape([k]), axis=axis, outputs=2)
    return [to_dtype_of(t, values, x), t.to(indices, t.out[1].dtype)]


def sort(t, *operands, dimension, num_keys, **_):
    """Sorts by the last key first. Each sort is stable, so that the first key matters most."""
    size = t.shape([operands[0].shape[dimension]])
    attributes = {"axis": dimension, "largest": 0, "outputs": 2}
    if len(operands) == 1:
        values, _ = t.TopK(sortable(t, operands[0]), size, **attributes)
        return [to_dtype_of(t, values, operands[0])]
    for key in reversed(range(num_keys)):
        _, indices = t.TopK(sortable(t, operands[key]), size, **attributes)
        operands = [
            Value(t.GatherElements(x, indices, axis=dimension), x.shape, x.dtype) for x in operands
        ]
    return operands


def sortable(t, x):
    """x in a dtype that TopK takes."""
    return t.cast(x, sortable_type(x.dtype))


def to_dtype_of(t, tensor, x):
    return tensor if sortable_type(x.dtype) == x.dtype else t.to(tensor, x.dtype)


def sortable_type(dtype):
    return np.dtype(np.int32) if dtype.kind == "b" else WIDER.get(dtype.name, dtype)


PRIMITIVES = {"sort": sort, "top_k": top_k}
