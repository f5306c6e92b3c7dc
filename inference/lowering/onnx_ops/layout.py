"""Places the transpositions between NHWC and NCHW in a graph.

Images are NHWC here and NCHW in ONNX, so each convolution needs one transposition before it and one
after. A transposition is delayed: nodes that can run before it do, so that it ends up where it is
needed, or meets its inverse and both vanish.
"""

import numpy as np

from inference.lowering.value import Value

ELEMENTWISE = """
    Add Sub Mul Div Pow Max Min Where Equal Less LessOrEqual Greater GreaterOrEqual
    Relu LeakyRelu Elu Gelu Sigmoid HardSigmoid HardSwish Tanh Softplus Mish Clip Cast
    Exp Log Sqrt Reciprocal Abs Neg Sign Erf Floor Ceil Round Not And Or
"""
ELEMENTWISE = set(ELEMENTWISE.split())
REDUCTIONS = {"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"}


def transpose(t, x, permutation):
    """x with its axes in another order."""
    if permutation == tuple(range(len(permutation))):
        return x
    if isinstance(x, Value) and x.constant:
        data = x.data.transpose(permutation)
        return Value(data, data.shape, x.dtype, name=x.name)
    source, order = t.transposed.get(t.tensor(x), (t.tensor(x), range(len(permutation))))
    order = tuple(order[axis] for axis in permutation)
    if order == tuple(range(len(order))):
        return source
    result = t.emit("Transpose", [source], 1, {"perm": order})
    t.transposed[result] = (source, order)
    if isinstance(x, Value):
        t.shapes[result] = tuple(x.data_shape[axis] for axis in permutation)
    return result


def before_transpose(t, op, inputs, attributes):
    """The node's result, computed before its inputs are transposed; None where it must be after."""
    orders = {t.transposed[name][1] for name in inputs if name in t.transposed}
    if len(orders) != 1:
        return None
    order = orders.pop()
    if op in REDUCTIONS:
        return reduction(t, op, inputs, attributes, order)
    if op == "Concat" and all(name in t.transposed for name in inputs):
        sources = [t.transposed[name][0] for name in inputs]
        axis = order[attributes["axis"]]
        return transpose(t, t.emit(op, sources, 1, {"axis": axis}), order)
    if op not in ELEMENTWISE:
        return None
    if not all(name in t.transposed or is_small_constant(t, name, len(order)) for name in inputs):
        return None
    sources = [
        t.transposed[name][0] if name in t.transposed else transposed_back(t, name, order)
        for name in inputs
    ]
    return transpose(t, t.emit(op, sources, 1, attributes), order)


def is_small_constant(t, name, rank):
    return name == "" or (name in t.weights and t.weights[name].ndim <= rank)


def transposed_back(t, name, order):
    """A constant with its axes as they are before the transposition."""
    array = t.weights.get(name)
    if array is None or array.ndim == 0:
        return name
    wide = array.reshape((1,) * (len(order) - array.ndim) + array.shape)
    return t.weight(wide.transpose(np.argsort(order)), t.stems[name])


def reduction(t, op, inputs, attributes, order):
    """A reduction of the source of a transposition, over the same axes."""
    name, *axes = inputs
    if not axes or axes[0] not in t.weights:  # over all axes, or over computed ones
        return None
    [axes] = axes
    source_axes = sorted(order[axis] for axis in t.weights[axes])
    argument = t.weight(np.array(source_axes, np.int64), "")
    result = t.emit(op, [t.transposed[name][0], argument], 1, attributes)
    if attributes.get("keepdims", 1):
        return transpose(t, result, order)
    left = [axis for axis in order if axis not in source_axes]
    return transpose(t, result, tuple(sorted(left).index(axis) for axis in left))
