"""Makes the files that benchmarks/export.py compares: the sample, exported by each framework.

All have the same weights, and each model is written in its framework's own idiom.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

from model.convnext import convnext

SHAPE, DIMS, PARAMETERS = (28, 28, 1), (8, 16, 32), 13_810
OPSET = 20  # the first opset in which Gelu is one node, so that every peer writes its fastest file


def sample():
    """(model, params); noise keeps biases and scales from being 0 and 1, which an exporter could
    drop."""
    model = convnext(SHAPE, 10, DIMS)
    params, _ = model.init(jax.random.key(0))
    noise = np.random.default_rng(0)
    return model, jax.tree.map(
        lambda a: np.asarray(a + 0.1 * noise.standard_normal(a.shape), np.float32), params
    )


def in_order(params):
    """The list of weights in the order in which they are applied, to load another framework's
    model."""
    blocks, downs, head = params["blocks"], [None, *params["downsample"]], params["head"]
    layers = [params["stem"]["conv"], params["stem"]["norm"]]
    for block, down in zip(blocks, downs, strict=True):
        layers += [down["norm"], down["conv"]] if down else []
        layers += [block[name] for name in ("dwconv", "norm", "expand", "project")]
    layers += [head[name] for name in ("norm", "hidden", "classes")]
    weights = [
        layer[name] for layer in layers for name in ("scale", "weight", "bias") if name in layer
    ]
    assert sum(weight.size for weight in weights) == PARAMETERS
    return weights


def example_and_output():
    """(inputs, the sample's outputs, computed by JAX)"""
    model, params = sample()
    x = np.random.default_rng(1).random((3, *SHAPE), np.float32)
    return x, np.asarray(jax.jit(lambda x: model.apply(params, {}, x)[0])(x))


def to_trace(batch=None):
    """The sample as the arguments of inference/'s tracing functions."""
    model, params = sample()

    def function(weights, x):
        return model.apply(weights["params"], weights["state"], x)[0]

    example = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    return function, {"params": params, "state": {}}, example, batch


def native_onnx(file):
    from inference.lowering.trace import trace
    from inference.to_onnx import write_onnx

    write_onnx(trace(*to_trace()), file)


def native_tflite(file):
    from inference.lowering.trace import trace
    from inference.to_tflite import write_tflite

    write_tflite(trace(*to_trace()), file)


def jax2tf_onnx(file, batch=None):
    from inference.fallback.convert import onnx_by_jax2tf

    onnx_by_jax2tf(*to_trace(batch), file)


def jax2tf_tflite(file, batch=None):
    from inference.fallback.convert import tflite_by_jax2tf

    tflite_by_jax2tf(*to_trace(batch), file)


def jax2onnx(file):
    import onnx
    from jax2onnx import to_onnx

    # jax2onnx cannot convert a choice by platform.
    jax.lax.platform_dependent = lambda *operands, default, **_: default(*operands)
    model, params = sample()
    shapes = [("batch", *SHAPE)]
    onnx.save(to_onnx(lambda x: model.apply(params, {}, x)[0], shapes, opset=OPSET), file)


def torch_onnx(file, pointwise):
    import torch

    from benchmarks.peers.torch import convnext

    model = convnext(SHAPE, DIMS, pointwise=pointwise).eval()
    for parameter, weight in zip(model.parameters(), in_order(sample()[1]), strict=True):
        # HWIO -> OIHW, or (in, out) -> (out, in).
        transposed = weight.transpose(3, 2, 0, 1) if weight.ndim == 4 else weight.T
        parameter.data = torch.tensor(transposed.reshape(parameter.shape))
    example = (torch.zeros(2, SHAPE[2], *SHAPE[:2]),)
    options = {"opset_version": OPSET, "dynamic_shapes": ({0: torch.export.Dim("batch")},)}
    torch.onnx.export(model, example, file, dynamo=True, external_data=False, **options)


def keras_tflite(file):
    """Keras' own export, on the TensorFlow backend."""
    os.environ.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3")
    import keras

    from benchmarks.peers.keras import convnext

    inputs = keras.Input(SHAPE)
    model = keras.Model(inputs, convnext(inputs, DIMS))
    pairs = zip(in_order(sample()[1]), model.get_weights(), strict=True)
    model.set_weights([weight.reshape(own.shape) for weight, own in pairs])
    model.export(file, format="litert", verbose=False)
