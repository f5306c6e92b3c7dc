"""Activations, each as one node where the opset has it."""

import math

import jax
import numpy as np

from inference.lowering.onnx_ops.graph import stored_type
from inference.lowering.value import Value


def in_result_type(function):
    """The function for operands cast to the dtype of the result: JAX promotes integers."""

    def promoting(t, *operands, **params):
        def promoted(x):
            return t.cast(x, t.out[0].dtype) if isinstance(x, Value) else x

        return function(t, *jax.tree.map(promoted, operands), **params)

    return promoting


def node(op, **attributes):
    """The function of an activation that is one node."""
    return in_result_type(lambda t, x, **_: t.add(op, x, **attributes))


def gelu(t, x):
    if t.opset >= 20 and x.dtype != np.float64:
        return t.Gelu(x)
    normal = t.Add(erf(t, t.Mul(x, math.sqrt(0.5))), 1.0)
    return t.Mul(t.Mul(x, 0.5), normal)


def gelu_tanh(t, x):
    if t.opset >= 20 and x.dtype != np.float64:
        return t.Gelu(x, approximate="tanh")
    cubic = t.Add(x, t.Mul(t.Mul(t.Mul(x, x), x), 0.044715))
    curve = t.Tanh(t.Mul(cubic, math.sqrt(2 / math.pi)))
    return t.Mul(t.Mul(x, 0.5), t.Add(curve, 1.0))


def erf(t, x):
    """ONNX Runtime has Erf only in float32."""
    if t.out[0].dtype != np.float64:
        return t.Erf(x)
    return t.to(t.Erf(t.to(x, np.float32)), np.float64)


def leaky_relu(t, x, slope):
    if isinstance(slope, Value):  # a learned slope
        return t.Where(t.GreaterOrEqual(x, 0.0), x, t.Mul(x, slope))
    return t.LeakyRelu(x, alpha=float(slope))


def silu(t, x):
    return t.Mul(x, t.Sigmoid(x))


def logsumexp(t, x, axes):
    """The maximum is subtracted first: ONNX Runtime subtracts 0 instead if one number is -inf."""
    axes, limits = np.array(axes), np.finfo(stored_type(x.dtype))
    highest = t.ReduceMax(x, axes, keepdims=1)
    bound = t.Clip(highest, float(limits.min), float(limits.max))
    result = t.Add(t.ReduceLogSumExp(t.Sub(x, bound), axes, keepdims=1), bound)
    return t.Squeeze(result, axes)


LAYERS = {
    "relu": node("Relu"),
    "leaky_relu": in_result_type(leaky_relu),
    "elu": in_result_type(lambda t, x, alpha: t.Elu(x, alpha=float(alpha))),
    "gelu": in_result_type(gelu),
    "gelu_tanh": in_result_type(gelu_tanh),
    "sigmoid": node("Sigmoid"),
    "silu": in_result_type(silu),
    "hard_sigmoid": node("HardSigmoid", alpha=1 / 6, beta=0.5),
    "hard_swish": node("HardSwish"),
    "tanh": node("Tanh"),
    "softplus": node("Softplus"),
    "mish": node("Mish"),
    "softmax": node("Softmax", axis=-1),
    "log_softmax": node("LogSoftmax", axis=-1),
    "softmax_along": lambda t, x, axis: t.Softmax(x, axis=axis),
    "log_softmax_along": lambda t, x, axis: t.LogSoftmax(x, axis=axis),
    "relu6": lambda t, x: t.Clip(x, 0.0, 6.0),
    "hard_tanh": lambda t, x: t.Clip(x, -1.0, 1.0),
    "logsumexp": logsumexp,
    "selu": node("Selu"),
    "soft_sign": node("Softsign"),
}
