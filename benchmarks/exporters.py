"""Who makes the files that benchmarks/export.py compares: the sample with the same weights, each framework in its own idiom.

python -m benchmarks.exporters MAKER FILE
"""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

from model.convnext import convnext

SHAPE, DIMS, PARAMETERS = (28, 28, 1), (8, 16, 32), 13_810
OPSET = 20  # where Gelu is one node: every peer writes its fastest file


def sample():
    """(model, params): biases and scales are not left at 0 and 1, which an exporter could drop."""
    model = convnext(SHAPE, 10, DIMS)
    params, _ = model.init(jax.random.key(0))
    noise = np.random.default_rng(0)
    return model, jax.tree.map(
        lambda a: np.asarray(a + 0.1 * noise.standard_normal(a.shape), np.float32), params
    )


def in_order(params):
    """The weights in the order in which they are applied: what another framework is given, one by one."""
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


def answer(x):
    """The sample's output, by JAX."""
    model, params = sample()
    return np.asarray(jax.jit(lambda x: model.apply(params, {}, x)[0])(x))


def to_trace(batch=None):
    """The sample as inference/ takes it."""
    model, params = sample()

    def function(weights, x):
        return model.apply(weights["params"], weights["state"], x)[0]

    return (
        function,
        {"params": params, "state": {}},
        jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        batch,
    )


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


def jax2tf_onnx_fixed(file):
    jax2tf_onnx(file, 1)


def jax2tf_tflite(file, batch=None):
    from inference.fallback.convert import tflite_by_jax2tf

    tflite_by_jax2tf(*to_trace(batch), file)


def jax2tf_tflite_fixed(file):
    jax2tf_tflite(file, 1)


def jax2onnx(file):
    import onnx
    from jax2onnx import to_onnx

    jax.lax.platform_dependent = lambda *operands, default, **_: default(
        *operands
    )  # it has no form for a choice by platform
    model, params = sample()
    onnx.save(
        to_onnx(lambda x: model.apply(params, {}, x)[0], [("batch", *SHAPE)], opset=OPSET), file
    )


def torch_conv(file):
    torch_onnx(file, pointwise_is_linear=False)


def torch_linear(file):
    torch_onnx(file, pointwise_is_linear=True)


def torch_onnx(file, pointwise_is_linear):
    """NCHW; layer norm by permuting, as torchvision has it; 1x1 convolutions, or linear maps between two permutations."""
    import torch
    from torch import nn

    class LayerNorm2d(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    class Permute(nn.Module):
        def __init__(self, *axes):
            super().__init__()
            self.axes = axes

        def forward(self, x):
            return x.permute(self.axes)

    class Mean(nn.Module):
        def forward(self, x):
            return x.mean((-2, -1))

    def mixing(dim):
        if not pointwise_is_linear:
            wide, narrow = (
                nn.Conv2d(dim, 2 * dim, 1, bias=False),
                nn.Conv2d(2 * dim, dim, 1, bias=False),
            )
            return [LayerNorm2d(dim, eps=1e-6), wide, nn.GELU(), narrow]
        wide, narrow = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)
        return [
            Permute(0, 2, 3, 1),
            nn.LayerNorm(dim, eps=1e-6),
            wide,
            nn.GELU(),
            narrow,
            Permute(0, 3, 1, 2),
        ]

    layers = [nn.Conv2d(1, DIMS[0], 4, 4, bias=False), LayerNorm2d(DIMS[0], eps=1e-6)]
    for i, dim in enumerate(DIMS):
        if i > 0:
            layers += [
                LayerNorm2d(DIMS[i - 1], eps=1e-6),
                nn.Conv2d(DIMS[i - 1], dim, 2, 2, bias=False),
            ]
        layers += [nn.Conv2d(dim, dim, 7, padding=3, groups=dim, bias=False), *mixing(dim)]
    layers += [Mean(), nn.LayerNorm(DIMS[-1], eps=1e-6), nn.Linear(DIMS[-1], 64), nn.Linear(64, 10)]
    model = nn.Sequential(*layers).eval()
    for parameter, weight in zip(model.parameters(), in_order(sample()[1]), strict=True):
        moved = (
            weight.transpose(3, 2, 0, 1) if weight.ndim == 4 else weight.T
        )  # HWIO -> OIHW, in-out -> out-in
        parameter.data = torch.tensor(moved.reshape(parameter.shape))
    free = ({0: torch.export.Dim("batch")},)
    example = (torch.zeros(2, SHAPE[2], *SHAPE[:2]),)
    torch.onnx.export(
        model,
        example,
        file,
        dynamo=True,
        opset_version=OPSET,
        dynamic_shapes=free,
        external_data=False,
    )


def keras_tflite(file):
    """NHWC; Keras' own layers on TensorFlow, and its own export."""
    os.environ.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3")
    import keras
    from keras.layers import (
        Activation,
        Conv2D,
        Dense,
        DepthwiseConv2D,
        GlobalAveragePooling2D,
        LayerNormalization,
    )

    layers = [
        keras.Input(SHAPE),
        Conv2D(DIMS[0], 4, strides=4, use_bias=False),
        LayerNormalization(epsilon=1e-6),
    ]
    for i, dim in enumerate(DIMS):
        if i > 0:
            layers += [LayerNormalization(epsilon=1e-6), Conv2D(dim, 2, strides=2, use_bias=False)]
        layers += [
            DepthwiseConv2D(7, padding="same", use_bias=False),
            LayerNormalization(epsilon=1e-6),
        ]
        layers += [
            Conv2D(2 * dim, 1, use_bias=False),
            Activation("gelu"),
            Conv2D(dim, 1, use_bias=False),
        ]
    model = keras.Sequential(
        [*layers, GlobalAveragePooling2D(), LayerNormalization(epsilon=1e-6), Dense(64), Dense(10)]
    )
    own = zip(in_order(sample()[1]), model.get_weights(), strict=True)
    model.set_weights([weight.reshape(place.shape) for weight, place in own])
    model.export(file, format="litert", verbose=False)


if __name__ == "__main__":
    name, file = sys.argv[1:]
    globals()[name](file)
