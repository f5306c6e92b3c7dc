"""Random inputs, weights and models for the tests."""

import jax
import numpy as np

BATCH = 3
random = np.random.default_rng(0)


def normal(*shape):
    return random.normal(size=(BATCH, *shape)).astype(np.float32)


def whole(low, high, *shape):
    return random.integers(low, high, (BATCH, *shape)).astype(np.int32)


def weights(*shape):
    return (random.normal(size=shape) / 2).astype(np.float32)


def learned(init, *args, **kwargs):
    """A layer's params, all random, so that none has its initial value 0 or 1."""
    shapes = jax.eval_shape(lambda key: init(key, *args, **kwargs), jax.random.key(0))
    return jax.tree.map(lambda leaf: weights(*leaf.shape), shapes)


def scale_and_bias(dim):
    return {"scale": 1 + weights(dim), "bias": weights(dim)}


def linear_model(path, shape, classes, kind):
    """Write an ONNX file that multiplies its flattened input by a weight; returns the weight."""
    from onnx import TensorProto, helper, numpy_helper, save

    size = int(np.prod(shape))
    weight = np.random.default_rng(0).normal(0, 0.1, (size, classes)).astype(np.float32)
    nodes = [
        helper.make_node("Cast", ["input"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["floats"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weight"], ["output"]),
    ]
    inputs = [helper.make_tensor_value_info("input", kind, ["batch", *shape])]
    outputs = [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", classes])]
    initializers = [numpy_helper.from_array(weight, "weight")]
    graph = helper.make_graph(nodes, "linear", inputs, outputs, initializers)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return weight
