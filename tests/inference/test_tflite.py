"""The structure of exported TFLite files: few builtin ops, names, a free batch, quantization."""

from collections import Counter
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.lowering.tf_ops import LAYERS
from inference.lowering.trace import trace
from inference.lowering.trimming import trimmed
from inference.lowering.walk import Missing
from inference.quantize_tflite import float32_weights
from inference.runtimes import open_model
from inference.to_tflite import write_tflite
from model.airbench import airbench
from model.convnext import convnext
from model.gpt import gpt
from model.layers.conv import conv2d, conv2d_init
from model.layers.embedding import embedding
from model.layers.linear import linear
from model.layers.norm import layer_norm
from model.layers.op import op
from model.mixer import mixer
from model.mlp import mlp
from model.resnet import resnet
from model.rnn import rnn
from model.vit import vit
from tests.inference.models import example, images, with_weights
from utils import UserError

IMAGE = (28, 28, 1)


def exported(path, function, weights, x, batch=None, **precision):
    """The exported file as a callable; unless it is quantized, it has been compared with JAX."""
    write_tflite(trace(function, weights, example(x), batch), path, **precision)
    model = open_model(path)
    if not precision:
        expected = np.asarray(jax.jit(function)(weights, x))
        tolerance = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(model({"input": x})["output"], expected, rtol=0, atol=tolerance)
    return model


def ops(model):
    """{op: how often it occurs}; DELEGATE stands for a part of the graph that XNNPACK runs."""
    return Counter(op["op_name"] for op in model.interpreter._get_ops_details())


@pytest.mark.slow
def test_the_sample_model_is_small_and_runs_in_one_piece(tmp_path):
    model = exported(tmp_path / "a.tflite", *with_weights(convnext(IMAGE, 10)), images(*IMAGE))
    assert model.nodes() <= 55
    assert (tmp_path / "a.tflite").stat().st_size <= 55_000  # 13,810 weights take 55,240
    assert (
        ops(model)["DELEGATE"] == 1
    )  # XNNPACK runs all ops; each further part would cost a transfer
    assert model.inputs == {"input": ((None, *IMAGE), np.float32)}
    assert model.outputs == {"output": ((None, 10), np.float32)}


@pytest.mark.slow
def test_a_batch_may_be_fixed(tmp_path):
    model, x = mlp((4, 4, 1), 3, dims=(8,)), images(4, 4, 1, count=2)
    model = exported(tmp_path / "a.tflite", *with_weights(model), x, batch=2)
    assert (model.inputs["input"][0], model.outputs["output"][0]) == ((2, 4, 4, 1), (2, 3))


@pytest.mark.slow
def test_a_resnet_has_no_norms_and_one_op_for_a_convolution_and_its_relu(tmp_path):
    model = resnet((8, 8, 3), 10, widths=(4, 8), depth=1)
    model = exported(tmp_path / "a.tflite", *with_weights(model), images(8, 8, 3))
    assert ops(model) == {"CONV_2D": 6, "ADD": 2, "MEAN": 1, "FULLY_CONNECTED": 1, "DELEGATE": 1}


@pytest.mark.slow
def test_airbench_is_its_layers_and_the_norms_after_pools(tmp_path):
    model = airbench((9, 10, 3), 5, widths=(4, 6))
    model = exported(tmp_path / "a.tflite", *with_weights(model), images(9, 10, 3))
    layers = {"CONV_2D": 5, "GELU": 5, "MAX_POOL_2D": 2, "REDUCE_MAX": 1, "FULLY_CONNECTED": 1}
    assert ops(model) == layers | {"DEPTHWISE_CONV_2D": 2, "DELEGATE": 1}


@pytest.mark.slow
def test_a_vit_and_a_residual_convnext_equal_jax(tmp_path):
    vision = vit((8, 8, 1), 10, dim=8, depth=1, heads=2, expansion=2)
    model = exported(tmp_path / "vit.tflite", *with_weights(vision), images(8, 8, 1))
    assert (ops(model)["SOFTMAX"], ops(model)["GELU"], ops(model)["DELEGATE"]) == (1, 1, 1)
    residual = convnext((16, 16, 3), 5, dims=(4, 6), residual=True)
    exported(tmp_path / "convnext.tflite", *with_weights(residual), images(16, 16, 3))


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_recurrent_layers_equal_jax_at_any_lengths(cell, tmp_path):
    model = rnn((20, 3), 4, cell=cell, dim=5, depth=2, bidirectional=True)
    function, weights = with_weights(model)
    x = {"sequence": images(20, 3), "length": np.array([20, 1, 7], np.int32)}
    write_tflite(trace(function, weights, example(x)), tmp_path / "a.tflite")
    expected = np.asarray(jax.jit(function)(weights, x))
    found = open_model(tmp_path / "a.tflite")(x)["output"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_linear_map_with_several_readers_is_computed_once_and_not_folded(tmp_path):
    def function(w, x):
        y = linear(w["linear"], x)
        return y + layer_norm(w["norm"], y)

    random = np.random.default_rng(0)
    weights = {
        "linear": {"weight": random.normal(size=(4, 32)).astype(np.float32)},
        "norm": {name: random.normal(size=32).astype(np.float32) for name in ("scale", "bias")},
    }
    model = exported(tmp_path / "a.tflite", function, weights, images(4))
    assert ops(model)["FULLY_CONNECTED"] == 1 and ops(model)["MEAN"] == 2


@pytest.mark.slow
def test_a_shift_before_padding_is_not_folded_past_it(tmp_path):
    """The padding is 0 after the bias of the norm, not before it."""
    random = np.random.default_rng(0)
    weights = {
        "conv": jax.tree.map(np.asarray, conv2d_init(jax.random.key(0), 4, 6, 3)),
        "norm": {name: random.normal(size=4).astype(np.float32) for name in ("scale", "bias")},
    }

    def function(w, x):
        return conv2d(w["conv"], layer_norm(w["norm"], x))

    exported(tmp_path / "a.tflite", function, weights, images(5, 5, 4))


@pytest.mark.parametrize(
    "geometry", [((1, 1), (3, 3), (1, 1)), ((2, 1), (3, 2), (1, 1)), ((2, 3), (4, 1), (2, 1))]
)
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (5, 4)])
def test_a_kernel_without_taps_that_only_read_padding_gives_the_same_results(size, geometry):
    stride, pads, dilation = geometry
    pads = tuple((p, p + 1) for p in pads)
    x, weight = images(*size, 2), images(5, 2, 3, count=5)

    def convolved(weight, pads):
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, weight, stride, pads, None, dilation, dimension_numbers=layout
        )

    smaller, new_pads = trimmed(weight, size, stride, pads, dilation)
    assert smaller.size <= weight.size and min(map(min, new_pads)) >= 0
    np.testing.assert_allclose(convolved(smaller, new_pads), convolved(weight, pads), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float16", "dynamic", "int8"])
def test_quantized_files_are_smaller_close_to_jax_and_have_the_same_inputs(precision, tmp_path):
    function, weights = with_weights(convnext((8, 8, 1), 10, dims=(16, 32)))
    x = images(8, 8, 1, count=64)
    samples = [{"input": x[i : i + 1]} for i in range(64)]
    exported(tmp_path / "float.tflite", function, weights, x)
    model = exported(
        tmp_path / "a.tflite", function, weights, x, quantize=precision, samples=samples
    )
    size, full_size = ((tmp_path / f"{name}.tflite").stat().st_size for name in ("a", "float"))
    assert size < 0.75 * full_size
    assert (model.inputs["input"][1], model.outputs["output"][1]) == (np.float32, np.float32)
    expected = np.asarray(function(weights, x))
    error = np.abs(model({"input": x})["output"] - expected).mean() / np.abs(expected).mean()
    assert 0 < error < {"float16": 0.01, "dynamic": 0.1, "int8": 0.2}[precision]


@pytest.mark.slow
def test_int8_applies_to_products_with_weights_after_the_first_convolution(tmp_path):
    function, weights = with_weights(convnext((8, 8, 1), 10, dims=(4,)))
    weights = {"model": weights, "experts": images(5, 6, count=2)}
    x = images(8, 8, 1, count=8)

    def with_experts(w, x):
        y = jnp.einsum("bei,eij->bej", function(w["model"], x).reshape(-1, 2, 5), w["experts"])
        return jnp.einsum("bej,bfj->bef", y, y)

    model = exported(
        tmp_path / "a.tflite", with_experts, weights, x, quantize="int8", samples=[{"input": x[:1]}]
    )
    types = {detail["index"]: detail["dtype"] for detail in model.interpreter.get_tensor_details()}
    by_op = {}
    for node in model.interpreter._get_ops_details():
        by_op.setdefault(node["op_name"], []).append(types[node["outputs"][0]])
    assert by_op["CONV_2D"] == [np.float32, np.int8]
    assert by_op["BATCH_MATMUL"] == [np.int8, np.float32]
    assert {*by_op["DEPTHWISE_CONV_2D"], *by_op["FULLY_CONNECTED"]} == {np.int8}
    assert {*by_op["RSQRT"], *by_op["MEAN"], *by_op["GELU"], *by_op["RESHAPE"]} == {np.float32}


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "steps"), [("dynamic", 20), ("int8", 8)])
def test_the_table_of_an_embedding_and_the_weights_of_a_loop_are_quantized(
    precision, steps, tmp_path
):
    shapes = {"table": (400, 32), "step": (32, 32), "head": (32, 9)}
    random = np.random.default_rng(0)
    weights = {name: random.normal(0, 0.2, s).astype(np.float32) for name, s in shapes.items()}
    ids = random.integers(0, 400, (3, steps)).astype(np.int32)

    def function(w, ids):
        def step(state, x):
            return jnp.tanh(state @ w["step"] + x), None

        x = embedding({"weight": w["table"]}, ids).swapaxes(0, 1)
        return jax.lax.scan(step, x[0], x)[0] @ w["head"]

    options = {"quantize": precision, "samples": [{"input": ids[i : i + 1]} for i in range(3)]}
    exported(tmp_path / "float.tflite", function, weights, ids)
    model = exported(tmp_path / "a.tflite", function, weights, ids, **options)
    saved = (tmp_path / "float.tflite").stat().st_size - (tmp_path / "a.tflite").stat().st_size
    assert saved > 0.9 * 3 * (400 * 32 + 32 * 32)  # three of four bytes of each number
    expected = np.asarray(function(weights, ids))
    error = np.abs(model({"input": ids})["output"] - expected).max() / np.abs(expected).max()
    assert 0 < error < 0.1


EXCLUDED = {  # {model: (its inputs, a regex, the sizes of the weights that it matches)}
    "gpt": (
        gpt((32,), vocab_size=100, dim=64, depth=1, heads=2),
        np.arange(96, dtype=np.int32).reshape(3, 32),
        "tokens/.*|.*expand/weight",
        [64 * 100, 64 * 256],  # the table is read by rows, and is that of the output
    ),
    "mixer": (
        mixer((28, 28, 1), 10, dim=64, depth=1),
        images(28, 28, 1, count=8),
        "patches/weight|blocks/0/(tokens|features)/expand/weight",
        [64 * 16, 49 * 32, 64 * 256],
    ),
    "rnn": (
        rnn((20, 12), 4, dim=32, bidirectional=True),
        images(20, 12, count=8),
        "layers/0/0/hidden/weight",
        [32 * 128],
    ),
    "mlp": (  # the last op, which has the name of the output
        mlp((64,), 32, dims=(64,)),
        images(64, count=8),
        "head/.*",
        [64 * 32],
    ),
}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=mark)
        for name, ours in zip(EXCLUDED, ("dynamic", "float16", "int8", "int8"), strict=True)
        for precision in ("float16", "dynamic", "int8")
        for mark in [pytest.mark.slow if precision == ours else pytest.mark.torture]
    ],
)
def test_excluded_weights_stay_in_float32(name, precision, tmp_path):
    """Also where the norm before a layer is folded into its weight."""
    model, x, regex, sizes = EXCLUDED[name]
    params, _ = jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(0)))
    weights = {"params": params, "state": {}}

    def function(w, x):
        return model.apply(w["params"], w["state"], x)[0]

    samples = [{"input": x[i : i + 1]} for i in range(len(x))]
    options = {"quantize": precision, "samples": samples}
    file = exported(tmp_path / "all.tflite", function, weights, x, **options)
    some = exported(tmp_path / "some.tflite", function, weights, x, **options, exclude=[regex])
    found, before = (
        Counter(size // 4 for size in float32_weights(tmp_path / f"{path}.tflite").values())
        for path in ("some", "all")
    )
    assert found == before | Counter(sizes)
    bytes_of = {path: (tmp_path / f"{path}.tflite").stat().st_size for path in ("some", "all")}
    assert 1 < (bytes_of["some"] - bytes_of["all"]) / sum((found - before).elements()) < 4
    expected = np.asarray(jax.jit(function)(weights, x))
    outputs = [model({"input": x})["output"] for model in (some, file)]
    assert 0 < np.abs(outputs[0] - expected).max() < 0.2 * np.abs(expected).max()
    assert not np.array_equal(*outputs)


def test_an_exclude_that_matches_no_weight_is_an_error(tmp_path):
    function, weights = with_weights(mlp((4,), 3, dims=(8,)))
    with pytest.raises(
        UserError, match=r"--exclude: 'haed' matches no weight; there are head/bias"
    ):
        exported(
            tmp_path / "a.tflite",
            function,
            weights,
            images(4),
            quantize="dynamic",
            exclude=["haed"],
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_batch_norm_of_flax_is_folded_into_its_convolution(tmp_path):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.relu(nn.BatchNorm(use_running_average=True)(nn.Conv(4, (3, 3))(x)))

    x = images(6, 6, 2)
    weights = jax.tree.map(np.asarray, Block().init(jax.random.key(0), x))
    model = exported(tmp_path / "a.tflite", lambda w, x: Block().apply(w, x), weights, x)
    assert ops(model) == {"CONV_2D": 1, "DELEGATE": 1}


@pytest.mark.slow
def test_a_tied_table_is_stored_once(tmp_path):
    def function(w, ids):
        return embedding({"weight": w["table"]}, ids).mean(1) @ w["table"].T

    weights = {"table": images(64)[0][None] * images(200)[0][:, None]}
    ids = np.array([[1, 199], [0, 5]], np.int32)
    exported(tmp_path / "a.tflite", function, weights, ids)
    assert (tmp_path / "a.tflite").stat().st_size < 1.2 * 4 * 200 * 64


def test_int8_without_samples_is_refused(tmp_path):
    function, weights = with_weights(mlp((4,), 3, dims=(8,)))
    with pytest.raises(UserError, match="int8 needs samples"):
        exported(tmp_path / "a.tflite", function, weights, images(4), quantize="int8")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_inputs_and_outputs_are_named_by_their_paths(tmp_path):
    def function(w, inputs):
        y = inputs["left"]["x"] + inputs["right"]
        return {"sum": (y, 2 * y), "input_again": inputs["right"], "constant": jnp.arange(3)}

    x = images(2)
    shapes = {"left": {"x": example(x)}, "right": example(x)}
    write_tflite(trace(function, {}, shapes), tmp_path / "a.tflite")
    model = open_model(tmp_path / "a.tflite")
    assert set(model.inputs) == {"left/x", "right"}
    outputs = model({"left/x": x, "right": 2 * x})
    assert set(outputs) == {"sum/0", "sum/1", "input_again", "constant"}
    np.testing.assert_allclose(outputs["sum/1"], 6 * x, rtol=1e-6)
    np.testing.assert_array_equal(outputs["input_again"], 2 * x)
    np.testing.assert_array_equal(outputs["constant"], [0, 1, 2])


def test_a_missing_primitive_is_named_with_the_line_that_calls_it(tmp_path):
    def function(w, x):
        return jax.jit(lambda a: jax.lax.digamma(a))(x)  # here

    traced = trace(function, {}, jax.ShapeDtypeStruct((2,), jnp.float32))
    with pytest.raises(Missing, match=r"digamma \(.*test_tflite.py:\d+") as missing:
        write_tflite(traced, tmp_path / "a.tflite")
    line = int(str(missing.value).split(".py:")[1].split(":")[0])
    assert Path(__file__).read_text().splitlines()[line - 1].endswith("# here")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_op_can_be_added_to_the_table(monkeypatch, tmp_path):
    import tensorflow as tf

    @op
    def snake(params, x):
        return x + jnp.sin(params["alpha"] * x) ** 2 / params["alpha"]

    def snake_in_tensorflow(target, params, x):
        return x + tf.square(tf.sin(x * params["alpha"])) / params["alpha"]

    monkeypatch.setitem(LAYERS, f"{__name__}.snake", snake_in_tensorflow)
    weights = {"alpha": images(4)[0]}
    model = exported(tmp_path / "a.tflite", lambda w, x: snake(w, x), weights, images(4))
    assert {"SIN", "SQUARE"} <= set(ops(model))
