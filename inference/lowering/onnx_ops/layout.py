"""Where transpositions go. Images are NHWC here and NCHW in ONNX, so that each convolution asks for one before it and one after.

A transposition waits: what can be computed beneath it is, so that it ends where it is needed, or meets its inverse.
"""

import numpy as np

from inference.lowering.value import Value

ELEMENTWISE = {
    *(
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Pow",
        "Max",
        "Min",
        "Where",
        "Equal",
        "Less",
        "LessOrEqual",
        "Greater",
        "GreaterOrEqual",
    ),
    *(
        "Relu",
        "LeakyRelu",
        "Elu",
        "Gelu",
        "Sigmoid",
        "HardSigmoid",
        "HardSwish",
        "Tanh",
        "Softplus",
        "Mish",
        "Clip",
        "Cast",
    ),
    *(
        "Exp",
        "Log",
        "Sqrt",
        "Reciprocal",
        "Abs",
        "Neg",
        "Sign",
        "Erf",
        "Floor",
        "Ceil",
        "Round",
        "Not",
        "And",
        "Or",
    ),
}
REDUCTIONS = {"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"}


def transpose(t, x, permutation):
    """x with its axes in another order."""
    if permutation == tuple(range(len(permutation))):
        return x
    if isinstance(x, Value) and x.constant:
        data = x.data.transpose(permutation)
        return Value(data, data.shape, x.dtype, name=x.name)
    source, order = t.turned.get(t.tensor(x), (t.tensor(x), range(len(permutation))))
    order = tuple(order[axis] for axis in permutation)
    if order == tuple(range(len(order))):
        return source
    turned = t.emit("Transpose", [source], 1, {"perm": order})
    t.turned[turned] = (source, order)
    if isinstance(x, Value):
        t.shapes[turned] = tuple(x.held[axis] for axis in permutation)
    return turned


def beneath(t, op, inputs, attributes):
    """The node's result, computed before a transposition of its inputs; None where it must come after."""
    orders = {t.turned[name][1] for name in inputs if name in t.turned}
    if len(orders) != 1:
        return None
    order = orders.pop()
    if op in REDUCTIONS:
        return reduced(t, op, inputs, attributes, order)
    if op == "Concat" and all(name in t.turned for name in inputs):
        sources = [t.turned[name][0] for name in inputs]
        axis = order[attributes["axis"]]
        return transpose(t, t.emit(op, sources, 1, {"axis": axis}), order)
    if op not in ELEMENTWISE or not all(
        name in t.turned or fits(t, name, len(order)) for name in inputs
    ):
        return None
    sources = [
        t.turned[name][0] if name in t.turned else turned_back(t, name, order) for name in inputs
    ]
    return transpose(t, t.emit(op, sources, 1, attributes), order)


def fits(t, name, rank):
    return name == "" or (name in t.weights and t.weights[name].ndim <= rank)


def turned_back(t, name, order):
    """A constant, as it is before the transposition."""
    array = t.weights.get(name)
    if array is None or array.ndim == 0:
        return name
    wide = array.reshape((1,) * (len(order) - array.ndim) + array.shape)
    return t.weight(wide.transpose(np.argsort(order)), t.stems[name])


def reduced(t, op, inputs, attributes, order):
    """A reduction over the axes that these were before."""
    name, axes = inputs
    if axes not in t.weights:
        return None
    before = sorted(order[axis] for axis in t.weights[axes])
    result = t.emit(
        op, [t.turned[name][0], t.weight(np.array(before, np.int64), "")], 1, attributes
    )
    if attributes.get("keepdims", 1):
        return transpose(t, result, order)
    left = [axis for axis in order if axis not in before]
    return transpose(t, result, tuple(sorted(left).index(axis) for axis in left))
