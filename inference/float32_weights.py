"""The large weights that a quantized file still has in float32."""

import re

from inference.onnx_graphs import LARGE, large_floats, without_number
from inference.tflite_weights import KEPT

SMALLEST_SHARE = 0.01  # of the file; less is not worth a warning
MOST_NAMES = 5  # in a warning


def float32_weights(path):
    """{name: bytes} of the large float32 weights in a file, the largest first. A weight of a TFLite
    file has the name of the op that reads it, followed by its shape."""
    weights = in_tflite(path) if path.suffix.lower() == ".tflite" else in_onnx(path)
    return dict(sorted(weights.items(), key=lambda item: -item[1]))


def in_onnx(path):
    import onnx
    from numpy import prod

    tensors = large_floats(onnx.load(path, load_external_data=False))
    return {tensor.name: 4 * int(prod(tensor.dims)) for tensor in tensors}


def in_tflite(path):
    from tensorflow.lite.python import schema_py_generated as schema
    from tensorflow.lite.tools import flatbuffer_utils

    model, weights = flatbuffer_utils.read_model(str(path)), {}
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            data = model.buffers[tensor.buffer].data
            is_float32 = tensor.type == schema.TensorType.FLOAT32
            if is_float32 and data is not None and len(data) >= 4 * LARGE:
                name = f"{tensor.name.decode()} {[int(d) for d in tensor.shape]}"
                weights[name] = weights.get(name, 0) + len(data)
    return weights


def warning(shares, excluded):
    """The sentence about weights, {name: share of the file}, that are not `excluded` by a regex;
    None if they are a small part of it."""
    left = {
        name: share
        for name, share in shares.items()
        if KEPT not in name
        and not any(
            re.fullmatch(regex, each) for regex in excluded for each in (name, without_number(name))
        )
    }
    if sum(left.values()) < SMALLEST_SHARE:
        return None
    named = [f"{name} ({share:.1%} of the file)" for name, share in left.items()]
    more = [f"{len(named) - MOST_NAMES} more"] if len(named) > MOST_NAMES else []
    return f"stays in float32: {', '.join(named[:MOST_NAMES] + more)}"
