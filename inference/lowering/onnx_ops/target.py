"""The target of the walk that writes ONNX: `t.Gelu(x)` adds a node Gelu and is the name of its result.

What the functions of the tables receive and hand to `t` are Values (a constant's `data` is an array), names of tensors, or
arrays. The constants of a model become initializers under their tree paths.
"""

import functools
import hashlib
from contextlib import contextmanager

import numpy as np

from inference.lowering.onnx_ops import dims, layout
from inference.lowering.onnx_ops.graph import TYPES, Node, Scope, element_type, stored_type
from inference.lowering.value import Value, constant
from inference.lowering.walk import Missing


class OnnxTarget:
    def __init__(self, layers, table, opset, inputs):
        """`inputs` are {name: shape and type}; their free dimensions are what sizes are computed from."""
        self.layers, self.table, self.opset = layers, table, opset
        self.weights = {}  # {name: array}
        self.stems = {}  # {name of a weight: its tree path}; "" of what has none
        self.turned = {}  # {name: (tensor, permutation)} of tensors that are a transposition of another
        self.reshaped = {}  # {name: tensor} of those with the same numbers
        self.shapes = {}  # {name: shape}, where it is known
        self.scopes = [
            Scope(inputs={name: (aval.shape, aval.dtype) for name, aval in inputs.items()})
        ]
        self.symbols = dims.symbols(inputs)
        self.taken, self.known = set(inputs), {}

    def operand(self, value):
        self.checked(value.dtype)
        if not value.constant:
            self.shapes[value.data] = value.held
        return value

    def expanded(self, value):
        empty = [
            axis
            for axis, d in enumerate(value.shape)
            if dims.is_number(d) and d == 0 and value.held[axis] == 1
        ]
        none = np.zeros(len(empty), np.int64)
        data = (
            self.Slice(value, none, none, np.array(empty)) if empty else value
        )  # Expand cannot make nothing of one
        return self.Expand(data, self.shape(value.shape))

    def __getattr__(self, op):
        if not op[0].isupper():
            raise AttributeError(op)
        return functools.partial(self.add, op)

    def add(self, op, *inputs, outputs=1, **attributes):
        """The result of a new node, or the tuple of its results."""
        inputs = [self.tensor(x) for x in inputs]
        while inputs and not inputs[-1]:
            inputs.pop()  # what is left out at the end is not named
        attributes = {key: value for key, value in attributes.items() if value is not None}
        return layout.beneath(self, op, inputs, attributes) or self.emit(
            op, inputs, outputs, attributes
        )

    def emit(self, op, inputs, outputs=1, attributes=None):
        computes = (op, *inputs, outputs, repr(attributes))
        made = next((scope.made[computes] for scope in self.scopes if computes in scope.made), None)
        if made is None:
            made = self.scopes[-1].made[computes] = [self.name(op) for _ in range(outputs)]
            self.scopes[-1].nodes.append(Node(op, inputs, made, attributes or {}))
        return made[0] if outputs == 1 else tuple(made)

    def tensor(self, x):
        """The name of a tensor; what is known becomes an initializer."""
        if x is None:
            return ""
        if isinstance(x, str):
            return x
        if isinstance(x, Value):
            return self.weight(x.data, x.name) if x.constant else x.data
        if (
            type(x) is float
        ):  # an attribute of an op; of an int it depends on the node what it is for
            x = self.number(x)
        return self.weight(np.asarray(x), "")

    def weight(self, array, name):
        array = np.ascontiguousarray(array, stored_type(array.dtype)).reshape(array.shape)
        key = (
            name,
            array.dtype,
            array.shape,
            hashlib.blake2b(array.data if array.size else b"").digest(),
        )
        if key not in self.known:
            self.known[key] = stored = self.weight_name(name)
            self.weights[stored], self.stems[stored] = array, name
        return self.known[key]

    def weight_name(self, path):
        return self.name(path or "constant", alone=bool(path))

    def name(self, stem, alone=False):
        """A name that no tensor has yet; `alone`: without a number, if that is free."""
        name, number = stem if alone else f"{stem}_0", 0
        while name in self.taken:
            number += 1
            name = f"{stem}_{number}"
        self.taken.add(name)
        return name

    def checked(self, dtype):
        """A type that ONNX Runtime computes in."""
        if str(dtype) not in TYPES:
            self.refuse(str(dtype), "numbers")
        return dtype

    def refuse(self, name, what):
        """Of a primitive that the table has, a kind that it has not."""
        raise Missing(f"{name} {what}", self.walk.place)

    # What many functions of the tables need.

    def size(self, dimension):
        """A dimension as a tensor of one number."""
        return dims.size(self, dimension)

    def shape(self, shape):
        """A shape as a tensor, a known one as an array."""
        return dims.shape(self, shape)

    def reshape(self, x, shape):
        """x in another shape, of which one dimension may be free."""
        shape = tuple(shape)
        if isinstance(x, Value) and x.held == shape:
            return x
        if isinstance(x, Value) and x.constant and all(isinstance(d, int) for d in shape):
            return constant(x.data.reshape(shape), x.name)
        source = self.reshaped.get(
            self.tensor(x), self.tensor(x)
        )  # of two in a row the second is enough
        if self.shapes.get(source) == shape:
            return source
        has_none = any(dims.is_number(d) and d == 0 for d in shape)
        result = self.Reshape(
            source, dims.reshaping(self, shape), allowzero=1 if has_none else None
        )
        self.reshaped[result] = source
        return result

    def transpose(self, x, permutation):
        return layout.transpose(self, x, tuple(map(int, permutation)))

    def cast(self, x, dtype):
        """A Value in another type."""
        if stored_type(x.dtype) == stored_type(dtype):
            return x
        if x.constant:
            return Value(x.data.astype(dtype), x.shape, dtype, name=x.name, held=x.held)
        return Value(self.to(x, dtype), x.shape, dtype, held=x.held)

    def to(self, x, dtype):
        return self.Cast(x, to=element_type(dtype))

    def number(self, value):
        """A constant of the result's type."""
        return np.asarray(value, stored_type(self.out[0].dtype))

    @contextmanager
    def scope(self):
        """What is added within becomes a subgraph."""
        self.scopes.append(Scope())
        try:
            yield self.scopes[-1]
        finally:
            self.scopes.pop()

    @contextmanager
    def outermost(self):
        """What is added within can be seen from every subgraph."""
        inner, self.scopes = self.scopes, self.scopes[:1]
        try:
            yield
        finally:
            self.scopes = inner

    def result(self, value, name):
        """Make a Value an output of the scope at hand, under this name."""
        whole = self.tensor(self.walk.whole(value))  # which refuses types that the format has not
        self.scopes[-1].nodes.append(Node("Identity", [whole], [name], {}))
        self.scopes[-1].outputs[name] = (value.shape, value.dtype)
