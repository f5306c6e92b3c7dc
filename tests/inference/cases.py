"""What both tables are tested on: functions of a batch of examples, by the inputs that they share.

A group's cases are converted together. `ONNX_GAPS` and `TFLITE_GAPS` say what a target does not do, and why; `REMARKS` what
one should know of a case that works. docs/export_coverage.md is made of these (`python -m tests.inference.coverage`).
"""

import functools
from typing import NamedTuple

import jax
import numpy as np

from tests.inference.layer_cases import ACTIVATIONS, IMAGES, SEQUENCES
from tests.inference.made import BATCH, normal, random, whole
from tests.inference.primitive_cases import (
    ALONG,
    BINARY,
    CONTROL,
    CONVOLUTIONS,
    INDEXING,
    INTEGERS,
    PRODUCTS,
    UNARY,
)
from utils import named_leaves


class Group(NamedTuple):
    """Cases of the same inputs."""

    inputs: dict  # {name: a batch of BATCH examples}
    cases: (
        dict  # {name: function(an array for each input, in order) -> an array, or a tuple of them}
    )


GROUPS = {
    "Activations": Group({"x": 3 * normal(4, 6)}, ACTIVATIONS),
    "Layers of sequences": Group(
        {
            "x": normal(5, 8),
            "context": normal(4, 6),
            "mask": random.random((BATCH, 1, 5, 5)) > 0.3,
            "ids": whole(0, 8, 4),
        },
        SEQUENCES,
    ),
    "Layers of images": Group({"x": normal(6, 7, 4)}, IMAGES),
    "Numbers one by one": Group({"x": normal(6)}, UNARY),
    "Two numbers": Group({"x": normal(6), "y": normal(6)}, BINARY),
    "Integers": Group(
        {
            "i": whole(-9, 10, 6),
            "j": np.where(random.random((BATCH, 6)) > 0.5, 3, -4).astype(np.int32),
        },
        INTEGERS,
    ),
    "Along axes": Group({"x": normal(4, 6)}, ALONG),
    "Products": Group({"x": normal(4, 6), "y": normal(6, 4)}, PRODUCTS),
    "Indexing": Group({"x": normal(4, 6), "ids": whole(0, 4, 2)}, INDEXING),
    "Convolutions and windows": Group({"x": normal(6, 7, 4)}, CONVOLUTIONS),
    "Loops and branches": Group({"x": normal(4, 6)}, CONTROL),
}

NEITHER = dict.fromkeys(
    ["lgamma", "digamma", "nextafter", "bits of numbers", "fft", "cholesky", "random"],
    "it has no op for it",
)
ONNX_GAPS = {**NEITHER}  # {case: why not}
TFLITE_GAPS = {
    **NEITHER,
    "multiply at": "its scatter adds up what falls on one place; it can where the places are known to differ",
    "max and min at": "its scatter adds up what falls on one place; it can where the places are known to differ",
    "conv of batches in groups": "its convolutions have groups of channels alone",
}
REMARKS = {
    "argmax": "of equal numbers the first; nan is not looked for",
    "argmin": "of equal numbers the first; nan is not looked for",
    "attention": "ONNX: one Attention from opset 23 on where there is no mask, else its parts",
    "gelu": "ONNX: one Gelu from opset 20 on, five nodes before",
    "gelu_tanh": "ONNX: one Gelu from opset 20 on, eight nodes before",
    "half precision": "ONNX: bfloat16 is computed in float32",
    "integer division": "by 0 is undefined",
    "reductions": "ONNX: max and min leave out nan",
    "reduce_precision": "ONNX: to the bits of float16 or bfloat16",
    "rms_norm": "ONNX: one RMSNormalization from opset 23 on, its parts before",
    "sort": "nan has no place in the order",
}


def together(group):
    """One function of all the cases of a group, for `trace`: (no weights, {name: input}) -> {name of a case: result}."""

    def function(_, inputs):
        given = [inputs[name] for name in group.inputs]
        return {name: case(*given) for name, case in group.cases.items()}

    return function


def without(group, gaps):
    """The group without the cases that are gaps of a target."""
    return group._replace(
        cases={name: case for name, case in group.cases.items() if name not in gaps}
    )


@functools.cache
def jax_answers(name, batch):
    """{case, or case/number of the result: array} for the first examples of a group, all its cases.

    Compiled without optimization: half of the tests' time would go there.
    """
    group = GROUPS[name]
    given = {key: array[:batch] for key, array in group.inputs.items()}
    results = jax.jit(together(group), compiler_options={"xla_backend_optimization_level": 0})(
        None, given
    )
    return {path: np.asarray(leaf) for path, leaf in named_leaves(results).items()}
