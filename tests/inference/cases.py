"""The test cases of both op tables: functions of a batch of examples, grouped by their inputs.

The cases of a group are exported together. `ONNX_GAPS` and `TFLITE_GAPS` are the cases that a
target does not support, with the reason; `REMARKS` are notes on cases that it does support.
`python -m tests.inference.coverage` writes docs/export_coverage.md from all of these.
"""

import functools
from typing import NamedTuple

import jax
import numpy as np

from tests.inference.elementwise_cases import BINARY, INTEGERS, UNARY
from tests.inference.layer_cases import ACTIVATIONS, IMAGES, SEQUENCES
from tests.inference.made import BATCH, normal, random, whole
from tests.inference.primitive_cases import ALONG, CONTROL, CONVOLUTIONS, INDEXING, PRODUCTS
from utils import named_leaves


class Group(NamedTuple):
    """Cases with the same inputs."""

    inputs: dict  # {name: a batch of BATCH examples}
    cases: dict  # {name: function(one array per input, in order) -> an array or a tuple of arrays}


GROUPS = {
    "Activations": Group({"x": 3 * normal(4, 6)}, ACTIVATIONS),
    "Layers for sequences": Group(
        {
            "x": normal(5, 8),
            "context": normal(4, 6),
            "mask": random.random((BATCH, 1, 5, 5)) > 0.3,
            "ids": whole(0, 8, 4),
        },
        SEQUENCES,
    ),
    "Layers for images": Group({"x": normal(6, 7, 4)}, IMAGES),
    "Elementwise ops of one operand": Group({"x": normal(6)}, UNARY),
    "Elementwise ops of two operands": Group({"x": normal(6), "y": normal(6)}, BINARY),
    "Integers": Group(
        {
            "i": whole(-9, 10, 6),
            "j": np.where(random.random((BATCH, 6)) > 0.5, 3, -4).astype(np.int32),
        },
        INTEGERS,
    ),
    "Ops along axes": Group({"x": normal(4, 6)}, ALONG),
    "Products": Group({"x": normal(4, 6), "y": normal(6, 4)}, PRODUCTS),
    "Indexing": Group({"x": normal(4, 6), "ids": whole(0, 4, 2)}, INDEXING),
    "Convolutions and windows": Group({"x": normal(6, 7, 4)}, CONVOLUTIONS),
    "Loops and branches": Group({"x": normal(4, 6)}, CONTROL),
}

RANDOM = "random numbers from a computed key"
NEITHER = ["lgamma", "digamma", "nextafter", "cholesky", RANDOM]
NO_OP = dict.fromkeys(NEITHER, "there is no such op")  # {case: reason}
BITS = "BitCast is an op of opset 26, newer than those that are written"
ONNX_GAPS = {**NO_OP, "bitcast": BITS, "bitcast to unsigned": BITS}
TFLITE_GAPS = {
    **NO_OP,
    "conv with batch groups": "convolutions only support groups of channels",
}
REMARKS = {
    "argmax": "the first of equal numbers; ONNX: nan is not handled",
    "argmin": "the first of equal numbers; ONNX: nan is not handled",
    "attention": "ONNX: one Attention node from opset 23 if there is no mask, else several nodes",
    "cumlogsumexp": "TFLite: on some CPUs, LiteRT makes infinite constants finite",
    "complex numbers": "computed as pairs of real numbers; not as inputs, outputs, states of loops",
    "fft": "ONNX: DFT nodes; TFLite: RFFT2D for powers of 2, else a product, up to 512 numbers",
    "gelu": "ONNX: one Gelu node from opset 20, five nodes before",
    "gelu_tanh": "ONNX: one Gelu node from opset 20, eight nodes before",
    "half precision": "ONNX: bfloat16 is computed in float32",
    "at[].set, equal positions": "the last update to a position counts",
    "reductions": "ONNX: max and min ignore nan",
    "integer reductions": "ONNX: those of int64 are exact up to 2**53",
    "integer reductions that wrap": "ONNX: a product over a free axis is exact up to 2**53",
    "reduce_precision": "only to the bits of float16 or bfloat16",
    "lstm": "ONNX: one LSTM node; TFLite: a loop",
    "gru": "ONNX: one GRU node; TFLite: a loop",
    "rms_norm": "ONNX: one RMSNormalization node from opset 23, several nodes before",
    "sort": "the position of nan is undefined",
}


def together(group):
    """All cases of a group as one function for `trace`: (weights, inputs) -> {case: result}."""

    def function(_, inputs):
        args = [inputs[name] for name in group.inputs]
        return {name: case(*args) for name, case in group.cases.items()}

    return function


def without(group, gaps):
    """The group without the cases that a target does not support."""
    cases = {name: case for name, case in group.cases.items() if name not in gaps}
    return group._replace(cases=cases)


def only(name):
    """A group of a single case."""
    group = next(group for group in GROUPS.values() if name in group.cases)
    return group._replace(cases={name: group.cases[name]})


def first(group, batch):
    """The first examples of the inputs of a group."""
    return {name: array[:batch] for name, array in group.inputs.items()}


@functools.cache
def jax_results(name, batch):
    """{case, or case/index of the result: array} of all cases of a group, for its first examples.

    It is compiled without optimization, which would take half of the tests' time.
    """
    group, options = GROUPS[name], {"xla_backend_optimization_level": 0}
    results = jax.jit(together(group), compiler_options=options)(None, first(group, batch))
    return {path: np.asarray(leaf) for path, leaf in named_leaves(results).items()}


def expected(name, batch, gaps):
    """`jax_results` without the cases that a target does not support."""
    results = jax_results(name, batch).items()
    return {path: array for path, array in results if path.split("/")[0] not in gaps}
