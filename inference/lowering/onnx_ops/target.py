"""The target of the walk that builds an ONNX graph.

`t.Gelu(x)` adds a Gelu node and returns the name of its result. The functions of the tables receive
Values (`data` of a constant is an array) and pass Values, names of tensors, arrays or floats to
`t`; a float takes the dtype of the result. The constants of a model become initializers, named by
their tree paths.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from inference.lowering.value import (
    Aval,
    Size,
    Value,
    constant,
    evaluate,
    is_number,
    is_zero,
    symbols,
)
from inference.lowering.walk import Lowering, Target

if TYPE_CHECKING:
    import onnx

Tensor: TypeAlias = Value | str  # a str is the name of a tensor
Input: TypeAlias = Tensor | np.ndarray | np.generic | float | None
Result: TypeAlias = Tensor | Sequence[Tensor]
Params: TypeAlias = dict[str, Value]
TensorType: TypeAlias = tuple[Sequence[Size], DTypeLike]  # shape and dtype

# dtypes that ONNX Runtime can compute in
TYPES = {"bool", "float16", "bfloat16", "float32", "float64"}
TYPES |= {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}


@dataclass
class Node:
    op: str
    inputs: list[str]  # names of tensors, "" for an omitted one
    outputs: list[str]
    attributes: dict[str, Any]  # a Scope stands for a subgraph


@dataclass(repr=False)
class Scope:
    """The nodes of the graph or of a subgraph, which can read the tensors of enclosing scopes."""

    nodes: list[Node] = field(default_factory=list)
    inputs: dict[str, TensorType] = field(default_factory=dict)
    outputs: dict[str, TensorType] = field(default_factory=dict)
    # {key of a node: its results}, to reuse the results
    computed: dict[tuple[Any, ...], list[str]] = field(default_factory=dict)


def stored_type(dtype: DTypeLike) -> np.dtype:
    """The dtype in the file: float32 for bfloat16, which ONNX Runtime barely supports."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype.name == "bfloat16" else dtype


def element_type(dtype: DTypeLike) -> int:
    return tensor_type(stored_type(dtype))


def tensor_type(dtype: DTypeLike) -> int:
    """ONNX's number for a dtype."""
    from onnx import helper

    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def graph_proto(scope: Scope, name: str, weights: Mapping[str, np.ndarray]) -> "onnx.GraphProto":
    """A scope as a GraphProto; `weights` are its initializers."""
    from onnx import helper, numpy_helper

    return helper.make_graph(
        [node_proto(node) for node in scope.nodes],
        name,
        [value_proto(*item) for item in scope.inputs.items()],
        [value_proto(*item) for item in scope.outputs.items()],
        [numpy_helper.from_array(array, weight) for weight, array in weights.items()],
    )


def node_proto(node: Node) -> "onnx.NodeProto":
    from onnx import helper

    attributes: dict[str, Any] = {
        key: graph_proto(value, node.outputs[0], {}) if isinstance(value, Scope) else value
        for key, value in node.attributes.items()
    }
    return helper.make_node(node.op, node.inputs, node.outputs, name=node.outputs[0], **attributes)


def value_proto(name: str, shape_and_dtype: TensorType) -> "onnx.ValueInfoProto":
    from onnx import helper

    shape, dtype = shape_and_dtype
    dims = [d if isinstance(d, int) else str(d) for d in shape]
    return helper.make_tensor_value_info(name, element_type(dtype), dims)


OPERATIONS = {"neg": "Neg", "add": "Add", "sub": "Sub", "mul": "Mul", "pow": "Pow"}
OPERATIONS |= {"mod": "Mod", "max": "Max", "min": "Min"}


class OnnxTarget(Target):
    def __init__(
        self,
        layers: Mapping[str, Lowering],
        table: Mapping[str, Lowering],
        opset: int,
        inputs: Mapping[str, Aval],
    ) -> None:
        """`inputs` are {name: shape and dtype}; sizes are computed from their free dimensions."""
        self.layers, self.table, self.opset = layers, table, opset
        self.weights = {}  # {name: array}
        self.stems = {}  # {name of a weight: its tree path, or "" where it has none}
        self.transposed = {}  # {name of a transposed tensor: (its source, the permutation)}
        self.reshaped = {}  # {name of a reshaped tensor: its source}
        self.shapes = {}  # {name: shape}, where it is known
        self.scopes = [Scope(inputs={name: (x.shape, x.dtype) for name, x in inputs.items()})]
        self.symbols = symbols(inputs)
        self.taken = set(inputs)  # names of tensors
        self.weight_names = {}  # {content of a weight: its name}

    def operand(self, value: Value) -> Value:
        self.checked(value.dtype)
        if not value.constant:
            self.shapes[value.data] = value.data_shape
        return value

    def expanded(self, value: Value) -> Tensor:
        sizes = zip(value.shape, value.data_shape, strict=True)
        empty = [axis for axis, (d, old) in enumerate(sizes) if is_zero(d) and old == 1]
        zeros = np.zeros(len(empty), np.int64)
        # Expand cannot turn a size of 1 into 0
        data = self.Slice(value, zeros, zeros, np.array(empty)) if empty else value
        return self.Expand(data, self.shape(value.shape))

    def __getattr__(self, op: str) -> Callable[..., str]:
        if not op[0].isupper():
            raise AttributeError(op)
        return functools.partial(self.add, op)

    def add(self, op: str, *inputs: Input, **attributes: Any) -> str:
        """The result of a new node."""
        return self.add_several(op, 1, *inputs, **attributes)[0]

    def add_several(self, op: str, outputs: int, *inputs: Input, **attributes: Any) -> list[str]:
        """The results of a new node."""
        names = [self.tensor(x) for x in inputs]
        while names and not names[-1]:
            names.pop()  # omitted inputs at the end are left out of the node
        attributes = {key: value for key, value in attributes.items() if value is not None}
        result = before_transpose(self, op, names, attributes)
        return [self.tensor(result)] if result else self.emit(op, names, attributes, outputs)

    def emit(
        self, op: str, inputs: list[str], attributes: dict[str, Any], outputs: int = 1
    ) -> list[str]:
        key = (op, *inputs, outputs, repr(attributes))
        for scope in self.scopes:
            if key in scope.computed:
                return scope.computed[key]
        names = self.scopes[-1].computed[key] = [self.name(op) for _ in range(outputs)]
        self.scopes[-1].nodes.append(Node(op, inputs, names, attributes))
        return names

    def tensor(self, x: Input) -> str:
        """The name of a tensor; a constant becomes an initializer."""
        if x is None:
            return ""
        if isinstance(x, str):
            return x
        if isinstance(x, Value):
            return self.weight(x.data, x.name) if x.constant else x.data
        if type(x) is float:  # it takes the result's dtype; the dtype of an int depends on the node
            x = np.asarray(x, stored_type(self.out[0].dtype))
        return self.weight(np.asarray(x), "")

    def weight(self, array: np.ndarray, name: str) -> str:
        array = np.ascontiguousarray(array, stored_type(array.dtype)).reshape(array.shape)
        digest = hashlib.blake2b(array.data if array.size else b"").digest()
        key = (name, array.dtype, array.shape, digest)
        if key not in self.weight_names:
            self.weight_names[key] = stored = self.weight_name(name)
            self.weights[stored], self.stems[stored] = array, name
        return self.weight_names[key]

    def weight_name(self, path: str) -> str:
        return self.name(path or "constant", numbered=not path)

    def name(self, stem: str, numbered: bool = True) -> str:
        """A name that no tensor has yet; `numbered=False`: without a number if that is free."""
        name, number = f"{stem}_0" if numbered else stem, 0
        while name in self.taken:
            number += 1
            name = f"{stem}_{number}"
        self.taken.add(name)
        return name

    def checked(self, dtype: DTypeLike) -> DTypeLike:
        """The dtype, if ONNX Runtime can compute in it."""
        if str(dtype) not in TYPES:
            self.refuse(str(dtype), "numbers")
        return dtype

    # What many functions of the tables need.

    def size(self, dimension: Size) -> Input:
        """A dimension as a tensor of one number."""
        if is_number(dimension):
            return np.array([dimension], np.int64)
        operations = {name: getattr(self, op) for name, op in OPERATIONS.items()}
        operations["number"] = lambda number: np.array([number], np.int64)
        # Div rounds towards 0
        operations["floordiv"] = lambda a, b: self.Div(self.Sub(a, self.Mod(a, b)), b)
        with self.outermost():  # so that subgraphs can read it as well
            return evaluate(dimension, self.symbol, operations)

    def scalar(self, dimension: Size) -> Input:
        """A dimension as a tensor without axes."""
        if is_number(dimension):
            return np.int64(dimension)
        return self.Squeeze(self.size(dimension), np.array([0]))

    def symbol(self, name: str) -> str:
        """What a symbol stands for: the size of an input along an axis, divided by its factor."""
        source, axis, factor = self.symbols[name]
        size = self.Shape(source, start=axis, end=axis + 1)
        return self.Div(size, np.array([factor], np.int64)) if factor > 1 else size

    def shape(self, shape: Sequence[Size]) -> Input:
        """A shape as a tensor, or as an array where it is known."""
        if all(map(is_number, shape)):
            return np.array(shape, np.int64)
        with self.outermost():
            return self.Concat(*map(self.size, shape), axis=0)

    def reshape(self, x: Tensor, shape: Sequence[Size]) -> Tensor:
        """x in another shape, of which one dimension may be free."""
        shape = tuple(shape)
        if isinstance(x, Value) and x.data_shape == shape:
            return x
        if isinstance(x, Value) and x.constant and all(isinstance(d, int) for d in shape):
            return constant(x.data.reshape(shape), x.name)
        name = self.tensor(x)
        source = self.reshaped.get(name, name)  # the second of two reshapes is enough
        if self.shapes.get(source) == shape:
            return source
        has_zero = any(map(is_zero, shape))
        sizes = shape  # of which a Reshape infers one
        if not has_zero and sum(not is_number(d) for d in shape) == 1:
            sizes = [d if is_number(d) else -1 for d in shape]
        result = self.Reshape(source, self.shape(sizes), allowzero=1 if has_zero else None)
        self.reshaped[result] = source
        return result

    def transpose(self, x: Tensor, permutation: Sequence[int] | np.ndarray) -> Tensor:
        """x with its axes in another order."""
        permutation = tuple(map(int, permutation))
        if permutation == tuple(range(len(permutation))):
            return x
        if isinstance(x, Value) and x.constant:
            data = x.data.transpose(permutation)
            return Value(data, data.shape, x.dtype, name=x.name)
        source, order = self.transposed.get(
            self.tensor(x), (self.tensor(x), range(len(permutation)))
        )
        order = tuple(order[axis] for axis in permutation)
        if order == tuple(range(len(order))):
            return source
        (result,) = self.emit("Transpose", [source], {"perm": order})
        self.transposed[result] = (source, order)
        if isinstance(x, Value):
            self.shapes[result] = tuple(x.data_shape[axis] for axis in permutation)
        return result

    def cast(self, x: Value, dtype: DTypeLike) -> Value:
        """A Value in another dtype."""
        if stored_type(x.dtype) == stored_type(dtype):
            return x
        if x.constant:
            data = x.data.astype(dtype)
            return Value(data, x.shape, dtype, name=x.name, data_shape=x.data_shape)
        return Value(self.to(x, dtype), x.shape, dtype, data_shape=x.data_shape)

    def to(self, x: Input, dtype: DTypeLike) -> str:
        return self.Cast(x, to=element_type(dtype))

    @contextmanager
    def scope(self) -> Iterator[Scope]:
        """Nodes added within become a subgraph."""
        self.scopes.append(Scope())
        try:
            yield self.scopes[-1]
        finally:
            self.scopes.pop()

    @contextmanager
    def outermost(self) -> Iterator[None]:
        """Nodes added within are visible from every subgraph."""
        inner, self.scopes = self.scopes, self.scopes[:1]
        try:
            yield
        finally:
            self.scopes = inner

    def result(self, value: Value, name: str) -> None:
        """Make a Value an output of the current scope, with this name."""
        tensor = self.tensor(self.walk.whole(value))  # which refuses dtypes that ONNX lacks
        self.scopes[-1].nodes.append(Node("Identity", [tensor], [name], {}))
        self.scopes[-1].outputs[name] = (value.shape, value.dtype)


# Images are NHWC here and NCHW in ONNX, so each convolution needs one transposition before it and
# one after. A transposition is delayed: nodes that can run before it do, so that it ends up where
# it is needed, or meets its inverse and both vanish.
ELEMENTWISE = """
    Add Sub Mul Div Pow Max Min Where Equal Less LessOrEqual Greater GreaterOrEqual
    Relu LeakyRelu Elu Gelu Sigmoid HardSigmoid HardSwish Tanh Softplus Mish Clip Cast
    Exp Log Sqrt Reciprocal Abs Neg Sign Erf Floor Ceil Round Not And Or
"""
ELEMENTWISE = set(ELEMENTWISE.split())
REDUCTIONS = {"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"}


def before_transpose(
    t: OnnxTarget, op: str, inputs: list[str], attributes: dict[str, Any]
) -> Tensor | None:
    """The node's result, computed before its inputs are transposed; None where it must be after."""
    orders = {t.transposed[name][1] for name in inputs if name in t.transposed}
    if len(orders) != 1:
        return None
    order = orders.pop()
    if op in REDUCTIONS:
        return reduction_before_transpose(t, op, inputs, attributes, order)
    if op == "Concat" and all(name in t.transposed for name in inputs):
        sources = [t.transposed[name][0] for name in inputs]
        axis = order[attributes["axis"]]
        return t.transpose(t.emit(op, sources, {"axis": axis})[0], order)
    if op not in ELEMENTWISE:
        return None
    if not all(name in t.transposed or is_small_constant(t, name, len(order)) for name in inputs):
        return None
    sources = [
        t.transposed[name][0] if name in t.transposed else transposed_back(t, name, order)
        for name in inputs
    ]
    return t.transpose(t.emit(op, sources, attributes)[0], order)


def is_small_constant(t: OnnxTarget, name: str, rank: int) -> bool:
    return name == "" or (name in t.weights and t.weights[name].ndim <= rank)


def transposed_back(t: OnnxTarget, name: str, order: tuple[int, ...]) -> str:
    """A constant with its axes as they are before the transposition."""
    array = t.weights.get(name)
    if array is None or array.ndim == 0:
        return name
    wide = array.reshape((1,) * (len(order) - array.ndim) + array.shape)
    return t.weight(wide.transpose(np.argsort(order)), t.stems[name])


def reduction_before_transpose(
    t: OnnxTarget, op: str, inputs: list[str], attributes: dict[str, Any], order: tuple[int, ...]
) -> Tensor | None:
    """A reduction of the source of a transposition, over the same axes."""
    name, *axes = inputs
    if not axes or axes[0] not in t.weights:  # over all axes, or over computed ones
        return None
    [axes] = axes
    source_axes = sorted(order[axis] for axis in t.weights[axes])
    argument = t.weight(np.array(source_axes, np.int64), "")
    [result] = t.emit(op, [t.transposed[name][0], argument], attributes)
    if attributes.get("keepdims", 1):
        return t.transpose(result, order)
    left = [axis for axis in order if axis not in source_axes]
    return t.transpose(result, tuple(sorted(left).index(axis) for axis in left))
