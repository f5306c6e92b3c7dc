"""What TFLite files look like: lean, of builtin ops, with the names and the batch that were asked for; and their precisions."""

from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.lowering.tf_ops import LAYERS
from inference.lowering.trace import trace
from inference.lowering.trimming import trimmed
from inference.lowering.walk import Missing
from inference.runtimes import open_model
from inference.to_tflite import write_tflite
from model.convnext import convnext
from model.layers.conv import conv2d, conv2d_init
from model.layers.linear import linear
from model.layers.norm import layer_norm
from model.layers.op import op
from model.mlp import mlp
from model.resnet import resnet
from model.vit import vit
from utils import UserError

IMAGE = (28, 28, 1)


def images(*shape, count=3):
    return np.random.default_rng(1).normal(size=(count, *shape)).astype(np.float32)


def trained(model):
    """A model as if trained: no weight is 0 or 1, no two are equal; its function and its weights."""
    random = np.random.default_rng(0)
    params, state = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(
        lambda leaf: (0.3 * random.normal(size=leaf.shape)).astype(np.float32), params
    )
    state = jax.tree.map(lambda leaf: random.uniform(0.5, 2, leaf.shape).astype(np.float32), state)
    return lambda w, x: model.apply(w["params"], w["state"], x)[0], {
        "params": params,
        "state": state,
    }


def example(x):
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def written(path, function, weights, x, batch=None, **precision):
    """The file as a callable, which has been compared with JAX unless it is less precise."""
    write_tflite(trace(function, weights, example(x), batch), path, **precision)
    model = open_model(path)
    if not precision:
        wanted = np.asarray(jax.jit(function)(weights, x))
        np.testing.assert_allclose(
            model({"input": x})["output"], wanted, rtol=0, atol=1e-5 * np.abs(wanted).max()
        )
    return model


def ops(model):
    """How many there are of each; DELEGATE is what runs the others as one."""
    return Counter(op["op_name"] for op in model.interpreter._get_ops_details())


def test_the_sample_is_lean_and_runs_in_one_piece(tmp_path):
    model = written(tmp_path / "a.tflite", *trained(convnext(IMAGE, 10)), images(*IMAGE))
    assert model.nodes() <= 55
    assert (tmp_path / "a.tflite").stat().st_size <= 55_000  # 13,810 weights are 55,240
    assert ops(model)["DELEGATE"] == 1  # XNNPACK takes all: each piece more costs a hand-over
    assert model.inputs == {"input": ((None, *IMAGE), np.float32)}
    assert model.outputs == {"output": ((None, 10), np.float32)}


def test_a_batch_may_be_fixed(tmp_path):
    model = written(
        tmp_path / "a.tflite",
        *trained(mlp((4, 4, 1), 3, dims=(8,))),
        images(4, 4, 1, count=2),
        batch=2,
    )
    assert (model.inputs["input"][0], model.outputs["output"][0]) == ((2, 4, 4, 1), (2, 3))


def test_resnet_has_no_norms_left_and_one_op_for_a_convolution_and_its_relu(tmp_path):
    model = written(
        tmp_path / "a.tflite",
        *trained(resnet((8, 8, 3), 10, widths=(4, 8), depth=1)),
        images(8, 8, 3),
    )
    assert ops(model) == {"CONV_2D": 6, "ADD": 2, "MEAN": 1, "FULLY_CONNECTED": 1, "DELEGATE": 1}


def test_vit_and_a_residual_convnext_equal_jax(tmp_path):
    vision = vit((8, 8, 1), 10, dim=8, depth=1, heads=2, expansion=2)
    model = written(tmp_path / "vit.tflite", *trained(vision), images(8, 8, 1))
    assert (ops(model)["SOFTMAX"], ops(model)["GELU"], ops(model)["DELEGATE"]) == (1, 1, 1)
    written(
        tmp_path / "next.tflite",
        *trained(convnext((16, 16, 3), 5, dims=(4, 6), residual=True)),
        images(16, 16, 3),
    )


def test_a_map_that_others_read_is_computed_once_and_not_folded(tmp_path):
    def function(w, x):
        y = linear(w["linear"], x)
        return y + layer_norm(w["norm"], y)

    random = np.random.default_rng(0)
    weights = {
        "linear": {"weight": random.normal(size=(4, 32)).astype(np.float32)},
        "norm": {name: random.normal(size=32).astype(np.float32) for name in ("scale", "bias")},
    }
    model = written(tmp_path / "a.tflite", function, weights, images(4))
    assert ops(model)["FULLY_CONNECTED"] == 1 and ops(model)["MEAN"] == 2


def test_a_shift_in_front_of_padding_is_not_folded_past_it(tmp_path):
    """The rim is 0 after the norm's bias, not before."""
    random = np.random.default_rng(0)
    weights = {
        "conv": jax.tree.map(np.asarray, conv2d_init(jax.random.key(0), 4, 6, 3)),
        "norm": {name: random.normal(size=4).astype(np.float32) for name in ("scale", "bias")},
    }
    written(
        tmp_path / "a.tflite",
        lambda w, x: conv2d(w["conv"], layer_norm(w["norm"], x)),
        weights,
        images(5, 5, 4),
    )


@pytest.mark.parametrize(
    "geometry", [((1, 1), (3, 3), (1, 1)), ((2, 1), (3, 2), (1, 1)), ((2, 3), (4, 1), (2, 1))]
)
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (5, 4)])
def test_taps_that_read_padding_alone_make_no_difference(size, geometry):
    stride, pads, dilation = geometry
    pads = tuple((p, p + 1) for p in pads)
    x, weight = images(*size, 2), images(5, 2, 3, count=5)

    def convolved(weight, pads):
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, weight, stride, pads, None, dilation, dimension_numbers=layout
        )

    smaller, left = trimmed(weight, size, stride, pads, dilation)
    assert smaller.size <= weight.size and min(map(min, left)) >= 0
    np.testing.assert_allclose(convolved(smaller, left), convolved(weight, pads), atol=1e-5)


def test_a_kernel_larger_than_its_image_is_cut_to_what_reads_it():
    weight, pads = trimmed(np.ones((7, 7, 1, 1)), (3, 1), (1, 1), ((3, 3), (3, 3)), (1, 1))
    assert weight.shape[:2] == (5, 1) and pads == ((2, 2), (0, 0))


@pytest.mark.parametrize("precision", ["float16", "dynamic", "int8"])
def test_less_precise_files_are_smaller_close_and_take_the_same_inputs(precision, tmp_path):
    function, weights = trained(convnext((8, 8, 1), 10, dims=(16, 32)))
    x = images(8, 8, 1, count=64)
    samples = [{"input": x[i : i + 1]} for i in range(64)]
    written(tmp_path / "float.tflite", function, weights, x)
    model = written(
        tmp_path / "a.tflite", function, weights, x, quantize=precision, samples=samples
    )
    assert (tmp_path / "a.tflite").stat().st_size < 0.75 * (
        tmp_path / "float.tflite"
    ).stat().st_size
    assert (model.inputs["input"][1], model.outputs["output"][1]) == (np.float32, np.float32)
    wanted = np.asarray(function(weights, x))
    error = np.abs(model({"input": x})["output"] - wanted).mean() / np.abs(wanted).mean()
    assert 0 < error < {"float16": 0.01, "dynamic": 0.1, "int8": 0.2}[precision]


def test_int8_is_of_products_with_weights_behind_the_first_convolution(tmp_path):
    function, weights = trained(convnext((8, 8, 1), 10, dims=(4,)))
    weights = {"model": weights, "experts": images(5, 6, count=2)}
    x = images(8, 8, 1, count=8)

    def with_experts(w, x):
        y = jnp.einsum("bei,eij->bej", function(w["model"], x).reshape(-1, 2, 5), w["experts"])
        return jnp.einsum("bej,bfj->bef", y, y)

    model = written(
        tmp_path / "a.tflite", with_experts, weights, x, quantize="int8", samples=[{"input": x[:1]}]
    )
    types = {detail["index"]: detail["dtype"] for detail in model.interpreter.get_tensor_details()}
    found = {}
    for node in model.interpreter._get_ops_details():
        found.setdefault(node["op_name"], []).append(types[node["outputs"][0]])
    assert found["CONV_2D"] == [np.float32, np.int8]
    assert found["BATCH_MATMUL"] == [np.int8, np.float32]
    assert {*found["DEPTHWISE_CONV_2D"], *found["FULLY_CONNECTED"]} == {np.int8}
    assert {*found["RSQRT"], *found["MEAN"], *found["GELU"], *found["RESHAPE"]} == {np.float32}


def test_int8_of_a_vit_is_close_where_most_patches_are_empty(tmp_path):
    model = vit((8, 8, 1), 10, patch=4, dim=16, depth=1, heads=2)
    params, state = jax.jit(model.init)(jax.random.key(0))
    params["patches"]["bias"] = (
        0.02 * images(16)[0]
    )  # of an empty patch there is no more, and a layer norm makes it large
    x = np.zeros((32, 8, 8, 1), np.float32)
    x[:, :4, :4] = 2 * images(4, 4, 1, count=32)
    weights = {"params": params, "state": state}
    samples = [{"input": x[i : i + 1]} for i in range(len(x))]

    def function(w, x):
        return model.apply(w["params"], w["state"], x)[0]

    found = written(tmp_path / "a.tflite", function, weights, x, quantize="int8", samples=samples)(
        {"input": x}
    )["output"]
    wanted = np.asarray(jax.jit(function)(weights, x))
    assert np.abs(found - wanted).max() < 0.2 * np.abs(wanted).max()


def test_int8_without_samples_is_refused(tmp_path):
    function, weights = trained(mlp((4,), 3, dims=(8,)))
    with pytest.raises(UserError, match="int8 needs samples"):
        written(tmp_path / "a.tflite", function, weights, images(4), quantize="int8")
    assert not list(tmp_path.iterdir())


def test_inputs_and_outputs_have_their_paths_as_names(tmp_path):
    def function(w, inputs):
        y = inputs["left"]["x"] + inputs["right"]
        return {"sum": (y, 2 * y), "given": inputs["right"], "known": jnp.arange(3)}

    x = images(2)
    shapes = {"left": {"x": example(x)}, "right": example(x)}
    write_tflite(trace(function, {}, shapes), tmp_path / "a.tflite")
    model = open_model(tmp_path / "a.tflite")
    assert set(model.inputs) == {"left/x", "right"}
    found = model({"left/x": x, "right": 2 * x})
    assert set(found) == {"sum/0", "sum/1", "given", "known"}
    np.testing.assert_allclose(found["sum/1"], 6 * x, rtol=1e-6)
    np.testing.assert_array_equal(found["given"], 2 * x)
    np.testing.assert_array_equal(found["known"], [0, 1, 2])


def test_a_primitive_that_the_table_lacks_is_named_with_the_line_that_asks_for_it(tmp_path):
    def function(w, x):
        return jax.jit(lambda a: jax.lax.digamma(a))(x)  # here

    with pytest.raises(Missing, match=r"digamma \(.*test_tflite.py:\d+") as missing:
        write_tflite(
            trace(function, {}, jax.ShapeDtypeStruct((2,), jnp.float32)), tmp_path / "a.tflite"
        )
    line = int(str(missing.value).split(".py:")[1].split(":")[0])
    assert Path(__file__).read_text().splitlines()[line - 1].endswith("# here")
    assert not list(tmp_path.iterdir())


def test_a_type_that_tflite_has_no_ops_for_is_refused_by_name(tmp_path):
    half = jax.ShapeDtypeStruct((2,), jnp.bfloat16)
    with pytest.raises(UserError, match="input: TFLite's ops do not take bfloat16"):
        write_tflite(trace(lambda w, x: x + 1, {}, half), tmp_path / "a.tflite")


def test_nothing_of_tensorflow_reaches_the_terminal(tmp_path, capfd):
    written(tmp_path / "a.tflite", *trained(mlp((4,), 3, dims=(8,))), images(4))
    assert capfd.readouterr() == ("", "")


def test_an_op_of_ones_own_is_one_function(monkeypatch, tmp_path):
    import tensorflow as tf

    @op
    def snake(params, x):
        return x + jnp.sin(params["alpha"] * x) ** 2 / params["alpha"]

    def snake_in_tensorflow(target, params, x):
        return x + tf.square(tf.sin(x * params["alpha"])) / params["alpha"]

    monkeypatch.setitem(LAYERS, f"{__name__}.snake", snake_in_tensorflow)
    weights = {"alpha": images(4)[0]}
    model = written(tmp_path / "a.tflite", lambda w, x: snake(w, x), weights, images(4))
    assert {"SIN", "SQUARE"} <= set(ops(model))
