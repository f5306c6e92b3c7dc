"""Each case of the TFLite table equals JAX in LiteRT."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import core

from inference.lowering.trace import symbol, trace
from inference.lowering.value import evaluate
from inference.lowering.walk import Missing
from inference.runtimes import open_model
from inference.to_onnx import write_onnx
from inference.to_tflite import write_tflite
from model.layers.activations import gelu
from model.layers.linear import linear
from tests.inference.cases import (
    BATCH,
    GROUPS,
    TFLITE_GAPS,
    Group,
    expected,
    first,
    only,
    together,
    without,
)
from tests.inference.models import example, images
from utils import UserError, named_leaves

ROW = jax.ShapeDtypeStruct((4,), jnp.float32)


def write(group, path):
    """Export all cases of a group."""
    write_tflite(trace(together(group), {}, example(group.inputs)), path)


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
def test_each_case_equals_jax_at_any_batch(name, tmp_path):
    group = without(GROUPS[name], TFLITE_GAPS)
    write(group, tmp_path / "cases.tflite")
    model = open_model(tmp_path / "cases.tflite")
    for batch in (1, BATCH):
        inputs = first(group, batch)
        outputs = model({key: array for key, array in inputs.items() if key in model.inputs})
        arrays = expected(name, batch, TFLITE_GAPS)
        assert set(outputs) == set(arrays)
        for path, array in arrays.items():
            assert_close(path, outputs[path], array)


@pytest.mark.parametrize("op", [lambda i: i << 33, jax.lax.population_count])
def test_bits_of_int64_are_refused(op, tmp_path):
    with jax.enable_x64(True), pytest.raises(Missing, match="of int64"):
        write_tflite(
            trace(lambda _, i: op(i), {}, example(np.ones((1, 2), np.int64))), tmp_path / "a.tflite"
        )


@pytest.mark.parametrize("case", TFLITE_GAPS)
def test_an_unsupported_case_is_refused_with_its_line(case, tmp_path):
    with pytest.raises(Missing, match=r"\(.*cases\.py:"):
        write(only(case), tmp_path / "gap.tflite")


def many_ops(x):
    """Ops that TFLite only has in float32, on integers so small that every sum is exact."""
    kernel = jnp.ones((3, 1, 2), x.dtype)
    y = jax.lax.conv_general_dilated(
        x[..., None], kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    y = jnp.concatenate([jnp.pad(y, ((0, 0), (1, 0), (0, 0))), y[:, :1]], 1)
    y = y.at[:, 2].set(4)[:, jnp.array([2, 0, 3])]
    totals = y.max(1, keepdims=True) + jnp.cumsum(y, 1)
    y = jnp.where(jnp.argmax(y, 1, keepdims=True) > 0, jnp.sort(y, 1), totals)
    steps = jnp.tile(jnp.moveaxis(y, 1, 0), (6, 1, 1))
    y, rows = jax.lax.scan(lambda carry, row: (carry + row, carry), y[:, 0], steps)
    y = jax.lax.cond(y.sum() > 0, lambda y: y + 1, lambda y: y, y)
    return jax.lax.while_loop(lambda y: y.max() < 50, lambda y: y + 9, y) + rows[-1]


TRAPS = {
    "products at distinct positions": lambda x, i: (
        jnp.nan_to_num(x).at[:, ::2].multiply(2.0).at[:, 1].max(0.5)
    ),
    "inf equals inf": lambda x, i: (
        x == jnp.inf,
        x != jnp.inf,
        -x == -jnp.inf,
        jnp.nan_to_num(x),
    ),
    "maximum with nan": lambda x, i: (
        x.max(-1),
        jnp.maximum(x, x[:, ::-1]),
        jnp.minimum(x, 0.5),
        jnp.argmax(x, -1),
    ),
    "nan as a limit": lambda x, i: (
        jnp.maximum(x, jnp.nan),
        jnp.minimum(jnp.nan, x),
        jnp.clip(x, jnp.nan, 1.0),
    ),
    "exponentials of nan": lambda x, i: (
        *(function(x) for function in (jnp.exp, jnp.expm1, jnp.sinh, jnp.cosh)),
        jax.nn.elu(x, 0.3),
        jax.nn.logsumexp(x, axis=1),
        jax.lax.cumlogsumexp(x, axis=1),
    ),
    "inverse roots of 0": lambda x, i: (
        jax.lax.rsqrt(x),
        1 / jnp.sqrt(x),
        x / jnp.sqrt(x[:, :1] - 1),
        jnp.abs(x) ** -0.5,
        jnp.sqrt(x) ** -1,
        (1 / jnp.sqrt(x)).T,
    ),
    "the order of inf": lambda x, i: [
        compare(*pair)
        for compare in (operator.lt, operator.le, operator.gt, operator.ge)
        for pair in ((x, jnp.inf), (x, -jnp.inf), (jnp.full_like(x, jnp.inf), x))
    ],
    "the lowest integer": lambda x, i: [
        jax.lax.rem(jnp.where(i > 0, np.int32(-(2**31)), i), y) for y in (i, np.int32(7))
    ],
    "shifts by any count": lambda x, i: [
        shift(dtype(-100) + i.astype(dtype), count)
        for shift in (jax.lax.shift_right_arithmetic, jax.lax.shift_right_logical)
        for dtype in (jnp.int32, jnp.int8)
        for count in (i.astype(dtype) * 9, dtype(3), dtype(-1), dtype(40))
    ],
    "angles of -0": lambda x, i: jnp.arctan2(x, x[:, 1:2]),
    "integers clipped to 0 to 6": lambda x, i: jnp.clip(i, 0, 6),
    "half of the input of a gelu": lambda x, i: (gelu(x), 0.5 * x),
    "a constant on the left": lambda x, i: jnp.einsum(
        "ij,bjk->ibk", jnp.ones((2, 4)), jnp.nan_to_num(x)[:, :4, None]
    ),
    "bits of narrow integers": lambda x, i: (
        i.astype(jnp.uint8) >> 1,
        i.astype(jnp.int8) * jnp.int8(50),
    ),
    "a long scan": lambda x, i: jax.lax.scan(
        lambda c, row: (c + row, c * row), i[:, 0], jnp.tile(i.T, (4, 1))
    ),
    "half of two batches": lambda x, i: (
        jnp.concatenate([i, i + 1])[: i.shape[0]],
        jnp.concatenate([i, i + 1])[i.shape[0] :],
    ),
    "unsigned division": lambda x, i: (
        i.astype(jnp.uint32) // jnp.uint32(3),
        i.astype(jnp.uint32) % i[:, :1].astype(jnp.uint32),
    ),
    "products of half precision": lambda x, i: (
        i.astype(jnp.bfloat16) @ jnp.ones((5, 2), jnp.float16)
    ).astype(jnp.float32),
    "a layer of half precision": lambda x, i: linear(
        {"weight": jnp.ones((5, 2), jnp.bfloat16)}, i.astype(jnp.bfloat16)
    ).astype(int),
    "rounding to half precision": lambda x, i: ((i * 1.001).astype(jnp.bfloat16) * 2).astype(
        jnp.float32
    ),
    "many ops in half precision": lambda x, i: many_ops(i.astype(jnp.float16)).astype(jnp.float32),
    # the gradient contains add_any
    "a gradient": lambda x, i: jax.grad(lambda i: jnp.sum(i * jnp.sin(i) + jnp.tanh(i)))(i / 9),
    "nan in a total order": lambda x, i: [
        primitive.bind(x, x[:, ::-1])
        for primitive in (jax.lax.eq_to_p, jax.lax.lt_to_p, jax.lax.le_to_p)
    ],
    "parity of booleans": lambda x, i: jax.lax.reduce_xor(x > 1, (1,)),
    "one element per example": lambda x, i: i[jnp.arange(i.shape[0]), jnp.clip(i[:, 0], 0, 4)],
}


@pytest.mark.slow
def test_ops_that_the_converter_or_tflite_would_get_wrong(tmp_path):
    x = np.array(
        [[1, np.inf, -np.inf, 0, 2], [np.nan, 1, 2, 3, 9], [3, -0.0, np.nan, np.inf, 1]], np.float32
    )
    group = Group({"x": x, "i": np.arange(-5, 10, dtype=np.int32).reshape(3, 5)}, TRAPS)
    write(group, tmp_path / "traps.tflite")
    outputs = open_model(tmp_path / "traps.tflite")(group.inputs)
    for path, leaf in named_leaves(together(group)(None, group.inputs)).items():
        assert_close(path, outputs[path], np.asarray(leaf))


@pytest.mark.slow
def test_an_inverse_root_is_guarded_only_where_it_may_be_of_0(tmp_path):
    """A number that is added to it, as in every normalization, makes the guard unneeded."""

    def ops(number):
        function = lambda _, x: x * jax.lax.rsqrt(jnp.abs(x) + number)  # noqa: E731
        write_tflite(trace(function, {}, ROW), tmp_path / "root.tflite")
        interpreter = open_model(tmp_path / "root.tflite").interpreter
        return {op["op_name"] for op in interpreter._get_ops_details()} - {"DELEGATE"}

    assert ops(1e-5) == {"ABS", "ADD", "RSQRT", "MUL"}
    assert "SELECT_V2" in ops(0)


NEGATIVE = {  # {padding: the part of the image that it leaves}
    ((-2, 1), (0, -1)): lambda x: jnp.pad(x[:, 2:, :-1], ((0, 0), (0, 1), (0, 0), (0, 0))),
    ((3, -1), (-2, 4)): lambda x: jnp.pad(x[:, :-1, 2:], ((0, 0), (3, 0), (0, 4), (0, 0))),
    ((-1, -1), (-3, -1)): lambda x: x[:, 1:-1, 3:-1],
}


@pytest.mark.parametrize("suffix", ["onnx", "tflite"])
def test_negative_padding_of_a_convolution_cuts_the_image(suffix, tmp_path):
    """Compared with the convolution of the part, since XLA on the CPU reads other memory."""
    x, kernel = images(7, 8, 2), images(3, 2, 2, count=5)[:, :2]

    def convolved(x, padding="VALID", stride=(2, 1)):
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, stride, padding, dimension_numbers=layout)

    cases = {str(i): lambda x, pads=pads: convolved(x, pads) for i, pads in enumerate(NEGATIVE)}
    group = Group({"x": x}, cases)
    path = tmp_path / f"a.{suffix}"
    writer = write_tflite if suffix == "tflite" else write_onnx
    writer(trace(together(group), {}, example(group.inputs)), path)
    outputs = open_model(path)({"x": x})
    for i, part in enumerate(NEGATIVE.values()):
        assert_close(str(i), outputs[str(i)], np.asarray(convolved(part(x))))


def in_float8(x):
    return x.astype(jnp.float8_e4m3fn).astype(jnp.float32)


UNSUPPORTED = {  # {message: function}
    "sign of complex numbers": lambda x: jnp.sign(x + 1j * x).real,
    "convert_element_type of float8_e4m3fn": in_float8,
    "convert_element_type of int4": lambda x: x.astype(jnp.int4).astype(jnp.float32),
    "reduce_precision to 4 bits of exponent and 3 of fraction": lambda x: jax.lax.reduce_precision(
        x, 4, 3
    ),
}


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_an_unsupported_dtype_is_refused_with_its_line(message, tmp_path):
    traced = trace(lambda w, x: UNSUPPORTED[message](x), {}, ROW)
    with pytest.raises(Missing, match=rf"^{message} \(.*test_tflite_ops\.py:"):
        write_tflite(traced, tmp_path / "a.tflite")


def test_a_bug_in_the_table_is_not_reported_as_missing(monkeypatch, tmp_path):
    import tensorflow as tf

    from inference.lowering.tf_ops import PRIMITIVES

    traced = trace(lambda w, x: jnp.sin(x), {}, ROW)
    wrong = np.ones((3, 4), np.float32)
    monkeypatch.setitem(PRIMITIVES, "sin", lambda target, x, **_: tf.matmul(x, wrong))
    with pytest.raises(Missing, match=r"sin: Dimensions must be equal.*\(.*test_tflite_ops\.py:"):
        write_tflite(traced, tmp_path / "a.tflite")
    monkeypatch.setitem(PRIMITIVES, "sin", lambda target, x, **_: tf.sin(int("x")))
    with pytest.raises(UserError, match=r"cannot convert .*ValueError: invalid literal"):
        write_tflite(traced, tmp_path / "a.tflite")
    monkeypatch.setitem(PRIMITIVES, "sin", lambda target, x: tf.sin(x))
    with pytest.raises(UserError, match=r"cannot convert .*TypeError: .*unexpected keyword"):
        write_tflite(traced, tmp_path / "a.tflite")


def test_evaluated_sizes_equal_those_of_jax():
    n = symbol()
    sizes = [n, 3 * n - 4, -n, n**2 + 1, (n + 1) // 2, (n + 1) % 3 * n]
    sizes += [core.max_dim(n, 5), core.min_dim(n + 1, 4)]
    names = ("neg", "add", "sub", "mul", "pow", "floordiv", "mod")
    operations = {name: getattr(operator, name) for name in names}
    operations |= {"number": int, "max": max, "min": min}
    for b in (1, 4, 9):
        values = [b, 3 * b - 4, -b, b**2 + 1, (b + 1) // 2, (b + 1) % 3 * b, max(b, 5)]
        values += [min(b + 1, 4)]
        assert [evaluate(size, {"batch": b}.get, operations) for size in sizes] == values


def assert_close(name, found, expected):
    """Floats within 1e-5 of the largest finite number, anything else exactly equal."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
    if expected.dtype.kind == "f":
        scale = np.abs(expected[np.isfinite(expected)]).max(initial=1e-30)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * scale, err_msg=name)
    else:
        np.testing.assert_array_equal(found, expected, err_msg=name)
