"""Tracing for export: names of outputs, precision, and errors for models that cannot be traced."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.lowering.onnx_ops import PRIMITIVES
from inference.lowering.trace import equal_sizes, trace
from inference.runtimes import open_model
from inference.sizes import free_axes, free_shapes, parse_free
from inference.to_onnx import write_onnx
from utils import UserError

ROW = jax.ShapeDtypeStruct((3,), jnp.float32)


def line_of(mark):
    """File and line of the marked line of this file, in the form that messages use."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(i for i, line in enumerate(lines, 1) if line.endswith('# ' + mark))}"


def test_an_output_with_the_name_of_an_input_is_prefixed(tmp_path):
    def function(_, x):
        return {"image": 2 * x["image"], "output/image": x["image"] + 1, "other": x["image"]}

    x = np.ones((2, 3), np.float32)
    traced = trace(function, {}, {"image": ROW})
    write_onnx(traced, tmp_path / "a.onnx")
    outputs = open_model(tmp_path / "a.onnx")({"image": x})
    first = {name: array[0, 0] for name, array in outputs.items()}
    assert first == {"output/image": 2, "output/output/image": 2, "other": 1}
    assert list(trace(lambda _, x: {"input": x}, {}, ROW).outputs) == ["output/input"]


def by_rows(_, x):
    return jnp.stack([x[i] for i in range(x.shape[0])])  # by rows


def in_pairs(_, x):
    return x.reshape(-1, 2, 3)  # in pairs


@pytest.mark.parametrize("function", [by_rows, in_pairs])
def test_a_model_that_uses_the_size_of_its_batch_is_an_error_that_suggests_batch(function):
    with pytest.raises(UserError, match=r"uses the size of its batch.*--batch N") as error:
        trace(function, {}, ROW)
    assert line_of(function.__name__.replace("_", " ")) in str(error.value)
    assert trace(function, {}, ROW, batch=2).inputs["input"].shape == (2, 3)


def test_len_of_a_free_batch_is_an_error_with_the_fix():
    def function(_, x):
        return x / len(x)  # a length

    message = r"len\(\) cannot return a size that is free; write x.shape\[0\] instead"
    with pytest.raises(UserError, match=message) as error:
        trace(function, {}, ROW)
    assert line_of("a length") in str(error.value)
    by_shape = trace(lambda _, x: x / x.shape[0], {}, ROW)
    assert by_shape.outputs["output"].dtype == np.float32


def test_sizes_that_a_model_compares_its_batch_with_are_found():
    def function(_, x):
        if x.shape[0] == 9:  # nine
            x = 2 * x
        if x.shape != (7, 3):  # seven
            x = x + 1
        if x.shape[0] % 4 == 0 or x.shape[0] in (11, 12):  # several
            x = x - 1
        return jax.nn.softmax(x @ jnp.ones((3, 3)))  # JAX's own comparisons are not the model's

    places = {9: "nine", 7: "seven", 4: "several", 11: "several", 12: "several"}
    traced = trace(function, {}, ROW)
    assert equal_sizes(traced.compared) == {n: line_of(mark) for n, mark in places.items()}
    assert trace(function, {}, ROW, batch=7).compared == ()


@pytest.mark.parametrize("batch", [None, 2])
def test_a_model_that_cannot_be_traced_is_an_error_with_its_line(batch):
    def function(_, x):
        return x if x[0, 0] > 0 else -x  # a branch

    message = "cannot be traced: TracerBoolConversionError: Attempted boolean"
    with pytest.raises(UserError, match=message) as error:
        trace(function, {}, ROW, batch)
    assert line_of("a branch") in str(error.value) and "--batch" not in str(error.value)


def test_precision_is_the_narrowest_float_anywhere_in_the_model():
    def precision(narrow):
        def function(_, x):
            return jax.lax.cond(x.sum() > 0, lambda: jax.jit(narrow)(x), lambda: x)

        return trace(function, {}, ROW).precision

    def in_both(x):
        return (2 * x.astype(jnp.float16)).astype(jnp.bfloat16).astype(float)

    assert precision(lambda x: 2 * x.astype(int).astype(float)) == "float32"
    assert precision(lambda x: (2 * x.astype(jnp.float16)).astype(float)) == "float16"
    assert precision(in_both) == "bfloat16"
    assert precision(lambda x: jax.lax.reduce_precision(x, 8, 7)) == "bfloat16"


@pytest.mark.parametrize(
    ("axis", "fix"), [(0, "set the batch with --batch N"), (1, "leave out the free size length")]
)
def test_what_a_table_cannot_convert_is_named_with_the_line_of_the_user(
    axis, fix, monkeypatch, tmp_path
):
    def function(_, x):
        return jnp.sin(x["x"])  # a wave

    inputs = {"x": jax.ShapeDtypeStruct((6,), jnp.float32)}
    free = free_axes(inputs, parse_free(["1:length"]))
    traced = trace(function, {}, free_shapes(inputs, free))
    monkeypatch.setitem(PRIMITIVES, "sin", lambda t, x, **_: np.ones(int(x.shape[axis])))
    with pytest.raises(UserError, match=f"cannot convert .*; {fix}$") as error:
        write_onnx(traced, tmp_path / "a.onnx")
    assert line_of("a wave") in str(error.value) and "InconclusiveDimension" in str(error.value)
