"""Exports of a function to ONNX, and their comparison with JAX in ONNX Runtime."""

import jax
import numpy as np

from inference.lowering.trace import trace
from inference.to_onnx import check, onnx_model
from tests.inference.models import example
from utils import named_leaves


def exported(function, weights, x, batch=None, opset=20):
    """The checked ModelProto of a function (weights, x); x is a batch or a tree of batches."""
    model = onnx_model(trace(function, weights, example(x), batch), opset)
    check(model)
    return model


def run(model, inputs):
    """{output: array} of a ModelProto for {input: array}."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, inputs), strict=True))


def assert_equal_to_jax(model, function, weights, x):
    """The model's outputs equal those of the function, whose input is a single array."""
    outputs = named_leaves(jax.jit(function)(weights, x))
    expected = {name or "output": np.asarray(leaf) for name, leaf in outputs.items()}
    assert_close(run(model, {"input": x}), expected)


def assert_close(outputs, expected):
    assert set(outputs) == set(expected)
    for name, array in expected.items():
        found = outputs[name]
        assert (found.shape, found.dtype) == (array.shape, array.dtype), name
        if array.dtype.kind == "f":
            scale = np.abs(array[np.isfinite(array)]).max(initial=1)
            np.testing.assert_allclose(found, array, rtol=1e-5, atol=1e-6 * scale, err_msg=name)
        else:
            np.testing.assert_array_equal(found, array, err_msg=name)
