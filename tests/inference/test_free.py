"""Free sizes besides the batch: in both op tables, and how they are chosen and refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from inference.lowering.trace import named, trace
from inference.lowering.walk import Missing
from inference.runtimes import open_model
from inference.sizes import free_axes, free_shapes, parse_free
from inference.to_onnx import onnx_model, write_onnx
from inference.to_tflite import write_tflite
from model.gpt import gpt
from tests.inference.cases import GROUPS, ONNX_GAPS, TFLITE_GAPS
from tests.inference.free_cases import FREE, jax_results, together
from tests.inference.onnx_runtime import run
from utils import UserError

WRITE = {"onnx": write_onnx, "tflite": write_tflite}


def spec(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def traced(function, shape, texts):
    inputs = spec(*shape)
    return trace(function, {}, free_shapes(inputs, free_axes(inputs, parse_free(texts))))


def assert_equal(outputs, expected):
    for name, array in named(jax.tree.map(np.asarray, expected), "output").items():
        scale = np.abs(array[np.isfinite(array)]).max(initial=1)
        tolerance = {"rtol": 1e-5, "atol": 1e-5 * scale}
        assert outputs[name].shape == array.shape, name
        np.testing.assert_allclose(outputs[name], array, **tolerance, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("format", WRITE)
@pytest.mark.parametrize("group", FREE)
def test_layers_equal_jax_at_several_sizes(group, format, tmp_path):
    cases, shape, texts, choices = FREE[group]
    function, path = together(cases), tmp_path / f"free.{format}"
    WRITE[format](traced(function, shape, texts), path)
    model = open_model(path)
    for sizes in choices:
        x, expected = jax_results(group, sizes)
        assert_equal(model({"input": x}), expected)


def test_attention_at_any_length_has_no_more_than_the_nodes_for_its_shapes():
    cases, shape, texts, _ = FREE["sequences"]
    counts = [
        len(onnx_model(traced(lambda _, x: cases["attention"](x), shape, free)).graph.node)
        for free in ([], texts)
    ]
    assert counts[1] <= counts[0] + 8


LLAMA = {"positions": "rotary", "norm": "rms", "feed_forward": "swiglu", "kv_heads": 2}
# {name: (arguments of gpt, the largest number of nodes in ONNX)}
DECODERS = {
    "gpt-2": ({"feed_forward": "gelu_tanh"}, 83),
    "llama": (LLAMA | {"bias": False, "tied": False, "qk_norm": True}, 185),
    "scan": ({"scan": True}, 60),
    "segments": ({}, 118),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_equals_jax_for_texts_of_any_length(name, tmp_path):
    arguments, most = DECODERS[name]
    model, random = gpt((12,), 11, dim=16, depth=2, **arguments), np.random.default_rng(0)
    params = jax.tree.map(lambda p: 5 * p, model.init(jax.random.key(0))[0])
    tokens = jax.ShapeDtypeStruct((12,), np.int32)
    inputs = {"segments": tokens, "tokens": tokens} if name == "segments" else {"input": tokens}

    def function(params, inputs):
        x = inputs if name == "segments" else inputs["input"]
        return model.apply(params, {}, x)[0]

    free = free_axes(inputs, parse_free(["1:length:1-12"]))
    traced_decoder = trace(function, params, free_shapes(inputs, free))
    assert len(onnx_model(traced_decoder).graph.node) <= most
    for format, write in WRITE.items():
        write(traced_decoder, path := tmp_path / f"decoder.{format}")
        decoder = open_model(path)
        for shape in ((1, 12), (3, 7)):
            given = {"segments": np.sort(random.integers(1, 4, shape, np.int32), 1)}
            given |= {key: random.integers(0, 11, shape, np.int32) for key in ("tokens", "input")}
            given = {key: given[key] for key in inputs}
            assert_equal(decoder(given), function(params, given))


@pytest.mark.slow
def test_a_multiple_of_a_number_can_be_divided_by_it(tmp_path):
    """Patches, which only images of such a size have."""

    def patches(_, x):
        rows = x.shape[1] // 4
        return x.reshape(x.shape[0], rows, 4, x.shape[2], 1).sum(2) * rows

    for format, write in WRITE.items():
        path = tmp_path / f"patches.{format}"
        write(traced(patches, (8, 6, 1), ["1:4*rows"]), path)
        for size in (4, 20):
            x = np.random.default_rng(0).normal(size=(2, size, 6, 1)).astype(np.float32)
            assert_equal(open_model(path)({"input": x}), patches(None, x))


@pytest.mark.slow
def test_a_free_axis_can_be_split(tmp_path):
    def halves(_, x):
        return jnp.concatenate(jnp.split(x, 2, 1)[::-1], 1)

    def parts(_, x):
        first, second, rest = jnp.split(x, [2, 5], 1)
        return {"first": first, "second": second, "rest": rest}

    for format, write in WRITE.items():
        for function, free in ((halves, "1:2*rows"), (parts, "1:rows:6-")):
            path = tmp_path / f"split.{format}"
            write(traced(function, (6, 2), [free]), path)
            for size in (6, 10):
                x = np.random.default_rng(0).normal(size=(2, size, 2)).astype(np.float32)
                assert_equal(open_model(path)({"input": x}), function(None, x))


def test_a_range_decides_what_the_model_may_do():
    def cut(_, x):
        return x[:, :4] * 2 if x.shape[1] >= 4 else x

    with pytest.raises(
        UserError, match=r"any size of length: .*test_free.py:\d+\).*1:length:8-512"
    ):
        traced(cut, (6, 2), ["1:length"])
    model = onnx_model(traced(cut, (6, 2), ["1:length:4-"]))
    x = np.random.default_rng(0).normal(size=(2, 9, 2)).astype(np.float32)
    assert_equal(run(model, {"input": x}), cut(None, x))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["length"], "'length' is not an axis and a name; write it as 1:length"),
        (["1:length:9-2"], "1:length:9-2: allows no size"),
        (["1:batch"], "'batch' is the name of axis 0"),
        (["0:rows"], "axis 0 is the batch, which is free by itself"),
        (["3:depth"], "no input has an axis 3; without the batch, their shapes are {'x': [6, 4]"),
        (["z:1:length"], "there is no input 'z', only x, y"),
        (["x:1:n:2-8", "y:1:n:2-9"], "are one size with two ranges"),
        (["1:4*n"], "the size of the data is 6; choose another range, or factor"),
        (["1:n:7-9"], "the size of the data is 6; choose another range, or factor"),
    ],
)
def test_a_mistake_is_refused_with_its_fix(texts, message):
    with pytest.raises(UserError) as error:
        free_axes({"x": spec(6, 4), "y": spec(6)}, parse_free(texts))
    assert str(error.value).startswith("--free: ") and message in str(error.value)


def test_sizes_rounded_up_equal_jax_for_a_free_batch():
    """In ONNX, a division of integers rounds towards 0, in Python downwards."""

    def function(_, x):
        return jnp.ones((-(-x.shape[0] // 2),)) * x.sum()

    model = onnx_model(trace(function, {}, spec(2)))
    for size in (1, 2, 5):
        x = np.ones((size, 2), np.float32)
        assert_equal(run(model, {"input": x}), function(None, x))


def widened(x, sizes):
    """x with its axes repeated to other sizes, {axis: size}."""
    for axis, size in sizes.items():
        x = np.take(x, np.arange(size) % x.shape[axis], axis=axis)
    return x


@pytest.mark.torture
@pytest.mark.parametrize("format", WRITE)
@pytest.mark.parametrize("group", GROUPS)
def test_every_case_equals_jax_with_free_axes_or_is_refused(group, format, tmp_path):
    """A case may refuse symbols by itself, in JAX; what can be traced is right, or has a line."""
    cases, gaps = GROUPS[group], {"onnx": ONNX_GAPS, "tflite": TFLITE_GAPS}[format]
    compared = 0
    for name in cases.cases.keys() - gaps.keys():
        free = {key: (1, 2) if array.ndim == 4 else (1,) for key, array in cases.inputs.items()}
        scope = export.SymbolicScope(["n >= 4", "m >= 4"])
        sizes = export.symbolic_shape("n, m", scope=scope)
        shapes = {}
        for key, array in cases.inputs.items():
            shape = list(array.shape[1:])
            for axis, size in zip(free[key], sizes, strict=False):
                shape[axis - 1] = size
            shapes[key] = jax.ShapeDtypeStruct(tuple(shape), array.dtype)

        def function(_, inputs, case=cases.cases[name]):
            return case(*(inputs[key] for key in cases.inputs))

        path = tmp_path / f"case.{format}"
        try:
            traced_case = trace(function, {}, shapes)
            WRITE[format](traced_case, path)
        except (UserError, Missing) as error:
            assert str(error)
            continue
        for choice in ((5, 7), (8, 4)):
            inputs = {
                key: jnp.asarray(widened(array, dict(zip(free[key], choice, strict=False))))
                for key, array in cases.inputs.items()
            }
            try:
                expected = function(None, inputs)
            except TypeError:  # a reshape to numbers that only one size gives
                break
            model = open_model(path)
            given = {key: np.asarray(inputs[key]) for key in model.inputs}
            assert_equal(model(given), expected)
        compared += 1
    assert compared
