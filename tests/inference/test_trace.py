"""Tracing what is to be exported: the names of its outputs, its precision, and what is told of a model that cannot be traced."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.lowering.trace import trace
from inference.runtimes import open_model
from inference.to_onnx import write_onnx
from utils import UserError

ROW = jax.ShapeDtypeStruct((3,), jnp.float32)


def line_of(mark):
    """The place of a line of this file, as messages tell it."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(i for i, line in enumerate(lines, 1) if line.endswith('# ' + mark))}"


def test_an_output_that_is_named_like_an_input_has_another_name(tmp_path):
    def function(_, x):
        return {"image": 2 * x["image"], "output/image": x["image"] + 1, "other": x["image"]}

    x = np.ones((2, 3), np.float32)
    traced = trace(function, {}, {"image": ROW})
    write_onnx(traced, tmp_path / "a.onnx")
    found = open_model(tmp_path / "a.onnx")({"image": x})
    assert {name: array[0, 0] for name, array in found.items()} == {
        "output/image": 2,
        "output/output/image": 2,
        "other": 1,
    }
    assert list(trace(lambda _, x: {"input": x}, {}, ROW).outputs) == ["output/input"]


def by_rows(_, x):
    return jnp.stack([x[i] for i in range(x.shape[0])])  # by rows


def in_pairs(_, x):
    return x.reshape(-1, 2, 3)  # in pairs


@pytest.mark.parametrize("function", [by_rows, in_pairs])
def test_a_model_that_needs_the_size_of_its_batch_is_told_to_fix_it(function):
    with pytest.raises(UserError, match=r"asks for the size of its batch.*--batch N") as error:
        trace(function, {}, ROW)
    assert line_of(function.__name__.replace("_", " ")) in str(error.value)
    assert trace(function, {}, ROW, batch=2).inputs["input"].shape == (2, 3)


@pytest.mark.parametrize("batch", [None, 2])
def test_a_model_that_cannot_be_traced_is_told_with_its_line(batch):
    def function(_, x):
        return x if x[0, 0] > 0 else -x  # a choice

    with pytest.raises(
        UserError, match=r"cannot be traced: TracerBoolConversionError: Attempted boolean"
    ) as error:
        trace(function, {}, ROW, batch)
    assert line_of("a choice") in str(error.value) and "--batch" not in str(error.value)


def test_the_narrowest_floats_are_told_wherever_they_are():
    def within(narrow):
        return lambda _, x: jax.lax.cond(x.sum() > 0, lambda: jax.jit(narrow)(x), lambda: x)

    def precision(narrow):
        return trace(within(narrow), {}, ROW).precision

    assert precision(lambda x: 2 * x.astype(int).astype(float)) == "float32"
    assert precision(lambda x: (2 * x.astype(jnp.float16)).astype(float)) == "float16"
    assert (
        precision(lambda x: (2 * x.astype(jnp.float16)).astype(jnp.bfloat16).astype(float))
        == "bfloat16"
    )
    assert precision(lambda x: jax.lax.reduce_precision(x, 8, 7)) == "bfloat16"
