"""Each case of the TFLite table against JAX, in LiteRT."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import core

from inference.lowering.dims import evaluate
from inference.lowering.trace import symbol, trace
from inference.lowering.walk import Missing
from inference.runtimes import open_model
from inference.to_tflite import write_tflite
from model.layers.activations import gelu
from model.layers.linear import linear
from tests.inference.cases import BATCH, GROUPS, TFLITE_GAPS, Group, jax_answers, together, without
from utils import named_leaves


@pytest.mark.parametrize("name", GROUPS)
def test_each_case_equals_jax_at_any_batch(name, tmp_path):
    group = without(GROUPS[name], TFLITE_GAPS)
    shapes = {
        key: jax.ShapeDtypeStruct(array.shape[1:], array.dtype)
        for key, array in group.inputs.items()
    }
    write_tflite(trace(together(group), {}, shapes), tmp_path / "cases.tflite")
    model = open_model(tmp_path / "cases.tflite")
    for batch in (1, BATCH):
        found = model(
            {key: array[:batch] for key, array in group.inputs.items() if key in model.inputs}
        )
        wanted = {
            path: array
            for path, array in jax_answers(name, batch).items()
            if path.split("/")[0] in group.cases
        }
        assert set(found) == set(wanted)
        for path, array in wanted.items():
            compare(path, found[path], array)


@pytest.mark.parametrize("case", TFLITE_GAPS)
def test_a_gap_is_told_as_one(case, tmp_path):
    group = next(group for group in GROUPS.values() if case in group.cases)
    shapes = {
        key: jax.ShapeDtypeStruct(array.shape[1:], array.dtype)
        for key, array in group.inputs.items()
    }
    with pytest.raises(Missing, match=r"\(.*cases\.py:"):
        write_tflite(
            trace(together(group._replace(cases={case: group.cases[case]})), {}, shapes),
            tmp_path / "gap.tflite",
        )


def moved_about(x):
    """Whole numbers small enough for sums of them to be exact in any order, through ops that TFLite has for float32 alone."""
    kernel = jnp.ones((3, 1, 2), x.dtype)
    y = jax.lax.conv_general_dilated(
        x[..., None], kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    y = (
        jnp.concatenate([jnp.pad(y, ((0, 0), (1, 0), (0, 0))), y[:, :1]], 1)
        .at[:, 2]
        .set(4)[:, jnp.array([2, 0, 3])]
    )
    y = jnp.where(
        jnp.argmax(y, 1, keepdims=True) > 0,
        jnp.sort(y, 1),
        y.max(1, keepdims=True) + jnp.cumsum(y, 1),
    )
    y, rows = jax.lax.scan(
        lambda carry, row: (carry + row, carry), y[:, 0], jnp.tile(jnp.moveaxis(y, 1, 0), (6, 1, 1))
    )
    y = jax.lax.cond(y.sum() > 0, lambda y: y + 1, lambda y: y, y)
    return jax.lax.while_loop(lambda y: y.max() < 50, lambda y: y + 9, y) + rows[-1]


TRAPS = {
    "products at places that differ": lambda x, i: (
        jnp.nan_to_num(x).at[:, ::2].multiply(2.0).at[:, 1].max(0.5)
    ),
    "inf is equal to inf": lambda x, i: (
        x == jnp.inf,
        x != jnp.inf,
        -x == -jnp.inf,
        jnp.nan_to_num(x),
    ),
    "a largest number among nan": lambda x, i: (
        x.max(-1),
        jnp.maximum(x, x[:, ::-1]),
        jnp.minimum(x, 0.5),
        jnp.argmax(x, -1),
    ),
    "whole numbers from 0 to 6": lambda x, i: jnp.clip(i, 0, 6),
    "half of the x of a gelu": lambda x, i: (gelu(x), 0.5 * x),
    "a constant on the left": lambda x, i: jnp.einsum(
        "ij,bjk->ibk", jnp.ones((2, 4)), jnp.nan_to_num(x)[:, :4, None]
    ),
    "bits of a narrow type": lambda x, i: (
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
    "half precision moved about": lambda x, i: moved_about(i.astype(jnp.float16)).astype(
        jnp.float32
    ),
    "a gradient": lambda x, i: jax.grad(lambda i: jnp.sum(i * jnp.sin(i) + jnp.tanh(i)))(
        i / 9
    ),  # add_any
    "nan in a total order": lambda x, i: [
        of.bind(x, x[:, ::-1]) for of in (jax.lax.eq_to_p, jax.lax.lt_to_p, jax.lax.le_to_p)
    ],
    "whether an odd number is": lambda x, i: jax.lax.reduce_xor(x > 1, (1,)),
    "a row of each example": lambda x, i: i[jnp.arange(i.shape[0]), jnp.clip(i[:, 0], 0, 4)],
}


def test_what_the_converter_or_its_ops_would_get_wrong(tmp_path):
    x = np.array(
        [[1, np.inf, -np.inf, 0, 2], [np.nan, 1, 2, 3, 9], [3, 2, np.nan, np.inf, 1]], np.float32
    )
    group = Group({"x": x, "i": np.arange(-5, 10, dtype=np.int32).reshape(3, 5)}, TRAPS)
    shapes = {
        key: jax.ShapeDtypeStruct(array.shape[1:], array.dtype)
        for key, array in group.inputs.items()
    }
    write_tflite(trace(together(group), {}, shapes), tmp_path / "traps.tflite")
    found = open_model(tmp_path / "traps.tflite")(group.inputs)
    for path, leaf in named_leaves(together(group)(None, group.inputs)).items():
        compare(path, found[path], np.asarray(leaf))


WITHOUT_OPS = {
    "convert_element_type of complex64": lambda x: jnp.abs(x + 1j * x),
    "convert_element_type of float8_e4m3fn": lambda x: x.astype(jnp.float8_e4m3fn).astype(
        jnp.float32
    ),
    "convert_element_type of int4": lambda x: x.astype(jnp.int4).astype(jnp.float32),
    "reduce_precision to 4 bits of exponent and 3 of fraction": lambda x: jax.lax.reduce_precision(
        x, 4, 3
    ),
}


@pytest.mark.parametrize("told", WITHOUT_OPS)
def test_types_that_no_op_takes_are_told_with_their_place(told, tmp_path):
    traced = trace(lambda w, x: WITHOUT_OPS[told](x), {}, jax.ShapeDtypeStruct((4,), jnp.float32))
    with pytest.raises(Missing, match=rf"^{told} \(.*test_tflite_ops\.py:"):
        write_tflite(traced, tmp_path / "a.tflite")


def test_a_bug_of_ours_is_none_of_tensorflow(monkeypatch, tmp_path):
    import tensorflow as tf

    from inference.lowering.tf_ops import PRIMITIVES

    traced = trace(lambda w, x: jnp.sin(x), {}, jax.ShapeDtypeStruct((4,), jnp.float32))
    monkeypatch.setitem(
        PRIMITIVES, "sin", lambda target, x, **_: tf.matmul(x, np.ones((3, 4), np.float32))
    )
    with pytest.raises(Missing, match=r"sin: Dimensions must be equal.*\(.*test_tflite_ops\.py:"):
        write_tflite(traced, tmp_path / "a.tflite")
    monkeypatch.setitem(PRIMITIVES, "sin", lambda target, x, **_: tf.sin(int("x")))
    with pytest.raises(ValueError, match="invalid literal"):
        write_tflite(traced, tmp_path / "a.tflite")
    monkeypatch.setitem(PRIMITIVES, "sin", lambda target, x: tf.sin(x))
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        write_tflite(traced, tmp_path / "a.tflite")


def test_sizes_are_what_jax_says():
    n = symbol()
    sizes = [
        n,
        3 * n - 4,
        -n,
        n**2 + 1,
        (n + 1) // 2,
        (n + 1) % 3 * n,
        core.max_dim(n, 5),
        core.min_dim(n + 1, 4),
    ]
    ours = {
        name: getattr(operator, name)
        for name in ("neg", "add", "sub", "mul", "pow", "floordiv", "mod")
    }
    ours |= {"number": int, "max": max, "min": min}
    for batch in (1, 4, 9):
        found = [evaluate(size, {"batch": batch}.get, ours) for size in sizes]
        wanted = [
            batch,
            3 * batch - 4,
            -batch,
            batch**2 + 1,
            (batch + 1) // 2,
            (batch + 1) % 3 * batch,
        ]
        assert found == [*wanted, max(batch, 5), min(batch + 1, 4)]


def compare(name, found, wanted):
    """Equal within 1e-5 of the largest finite number; of whole numbers to the last bit."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
    if wanted.dtype.kind == "f":
        scale = np.abs(wanted[np.isfinite(wanted)]).max(initial=1e-30)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * scale, err_msg=name)
    else:
        np.testing.assert_array_equal(found, wanted, err_msg=name)
