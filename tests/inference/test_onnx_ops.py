"""Each case of the ONNX table equals JAX in ONNX Runtime."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.lowering.trace import trace
from inference.lowering.walk import Missing
from inference.to_onnx import OPSETS, onnx_model, write_onnx
from model.convnext import convnext
from model.layers.activations import sigmoid
from tests.inference import coverage
from tests.inference.cases import (
    BATCH,
    GROUPS,
    ONNX_GAPS,
    REMARKS,
    TFLITE_GAPS,
    expected,
    first,
    only,
    together,
    without,
)
from tests.inference.models import example, images, with_weights
from tests.inference.onnx_runtime import assert_close, assert_equal_to_jax, exported, run

PAIR = jax.ShapeDtypeStruct((2,), jnp.float32)


def exported_group(name, opset=20):
    group = without(GROUPS[name], ONNX_GAPS)
    return exported(together(group), {}, group.inputs, opset=opset)


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
def test_each_case_equals_jax_at_any_batch(name):
    model = exported_group(name)
    for batch in (1, BATCH):
        outputs = run(model, first(GROUPS[name], batch))
        assert_close(outputs, expected(name, batch, ONNX_GAPS))


@pytest.mark.slow
@pytest.mark.parametrize("opset", sorted({*OPSETS} - {20}))
def test_activations_and_layers_equal_jax_at_every_opset(opset):
    for name in ("Activations", "Layers for sequences", "Layers for images"):
        model = exported_group(name, opset)
        assert [entry.version for entry in model.opset_import] == [opset]
        assert_close(run(model, GROUPS[name].inputs), expected(name, BATCH, ONNX_GAPS))


@pytest.mark.parametrize("case", ONNX_GAPS)
def test_an_unsupported_case_is_refused(case):
    group = only(case)
    with pytest.raises(Missing):
        onnx_model(trace(together(group), {}, example(group.inputs)))


def test_a_missing_primitive_is_named_with_the_line_that_calls_it(tmp_path):
    def function(w, x):
        return jax.jit(lambda a: jax.lax.digamma(a))(x)  # here

    with pytest.raises(Missing, match=r"digamma \(.*test_onnx_ops.py:\d+") as missing:
        write_onnx(trace(function, {}, PAIR), tmp_path / "a.onnx")
    line = int(str(missing.value).split(".py:")[1].split(":")[0])
    assert Path(__file__).read_text().splitlines()[line - 1].endswith("# here")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "function",
    [lambda x: jnp.sign(x + 1j).real, lambda x: x.astype(complex), lambda x: jnp.cumprod(x)],
)
def test_what_onnx_cannot_express_is_named_with_its_line(function):
    what = "sign of complex numbers|complex64 numbers as the output 'output'|"
    what += "a cumulative op over the batch"
    with pytest.raises(Missing, match=rf"({what}) \(.*test_onnx_ops.py:\d+"):
        onnx_model(trace(lambda _, x: function(x), {}, PAIR))


def test_floats_out_of_range_convert_to_integers_as_in_jax():
    kinds = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")

    def function(_, x):
        return {kind: x.astype(kind) for kind in kinds}

    special = [np.nan, np.inf, -np.inf, -1.7, 255.5, 256, 32767.5, 65535.9, -1e20]
    powers = [2**31 - 128, 2**31, 2**32, 2**63, 2**64]
    with jax.enable_x64(True), np.errstate(over="ignore"):
        for dtype in (np.float16, np.float32, np.float64):
            x = np.array([[*special, *powers]]).astype(dtype)
            assert_equal_to_jax(exported(function, {}, x), function, None, x)


def test_a_selection_of_positive_numbers_is_0_where_they_are_nan():
    def function(_, x):
        return jnp.where(x > 0, x, 0)

    x = np.array([[np.nan, -1, 2]], np.float32)
    assert_equal_to_jax(exported(function, {}, x), function, {}, x)


def test_division_of_int64():
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    x = np.array([[low, -1], [low, 3], [high, 3], [high, 0], [-7, 2], [high, -high]])

    def function(_, x):
        a, b = x[:, 0], x[:, 1]
        return {
            "div": jax.lax.div(a, b),
            "rem": jax.lax.rem(a, b),
            "by 3": jax.lax.rem(a, a * 0 + 3),
        }

    with jax.enable_x64(True):
        model = exported(function, {}, x)
        outputs = run(model, {"input": x})
        assert_close(outputs, {key: np.asarray(y) for key, y in function(None, x).items()})


def test_the_order_of_uint64_is_refused():
    def function(_, x):
        return x < 5

    with jax.enable_x64(True), pytest.raises(Missing, match="lt of uint64"):
        exported(function, {}, np.array([[2**63]], np.uint64))


@pytest.mark.slow
def test_a_model_in_float16_bfloat16_and_float64():
    """A model in bfloat16 is computed in float32."""
    x = images(8, 8, 1)
    function, weights = with_weights(convnext((8, 8, 1), 3, dims=(4, 6)))
    in_float32 = np.asarray(jax.jit(function)(weights, x))

    def output(dtype, stored):
        cast = jax.tree.map(lambda leaf: leaf.astype(dtype), weights)
        model = exported(function, cast, x.astype(dtype))
        return run(model, {"input": x.astype(stored)})["output"]

    for dtype, stored, tolerance in [
        (jnp.float16, np.float16, 1e-2),
        (jnp.bfloat16, np.float32, 3e-2),
    ]:
        found = output(dtype, stored)
        assert found.dtype == stored
        assert np.abs(found - in_float32).max() < tolerance * np.abs(in_float32).max()
    with jax.enable_x64(True):
        found = output(np.float64, np.float64)
        assert_close({"output": found}, {"output": in_float32.astype(np.float64)})


def test_the_coverage_page_is_up_to_date():
    page = coverage.FILE.read_text()
    assert page == coverage.page(), "stale: write it with python -m tests.inference.coverage"


def test_gaps_and_remarks_belong_to_cases():
    cases = [case for group in GROUPS.values() for case in group.cases]
    assert len(cases) == len(set(cases))
    assert {*ONNX_GAPS, *TFLITE_GAPS, *REMARKS} <= set(cases)


def test_logsumexp_equals_jax_after_a_masked_number():
    rows = [[-np.inf, -104.0], [-np.inf, -np.inf], [np.inf, 1.0], [200.0, 201.0]]
    assert_exact(lambda weights, x: jax.nn.logsumexp(x, axis=1), np.array(rows, np.float32))


def test_the_logarithm_of_a_small_sigmoid():
    def function(_, x):
        by_hand = 1 / (1 + jnp.exp(-x[:, ::-1]))
        return jnp.stack([jnp.log(jax.nn.sigmoid(x)), jnp.log(by_hand), jnp.log(sigmoid(x))])

    x = np.array([[-80, -40, -20, -3, 0, 3], [20, np.inf, np.nan, 40, 1, -1]], np.float32)
    assert_equal_to_jax(exported(function, {}, x), function, {}, x)


def assert_exact(function, x):
    """The file gives what JAX gives, at infinities and nan as well."""
    found = run(exported(function, {}, x), {"input": x})["output"]
    np.testing.assert_allclose(found, jax.jit(function)({}, x), rtol=1e-6)
