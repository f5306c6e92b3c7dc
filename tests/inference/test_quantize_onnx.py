"""Quantized ONNX files: which ops are quantized, and how far the outputs are from float32."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from inference.quantize_onnx import float32_weights, quantize_onnx
from inference.runtimes import open_model
from model.layers.pool import max_pool
from model.rnn import rnn
from model.vit import vit
from tests.inference.onnx_runtime import exported
from utils import UserError

random = np.random.default_rng(0)


def weight(name, *shape):
    fan_in = np.prod(shape[1:]) if len(shape) == 4 else shape[0]
    array = (random.normal(size=shape) / np.sqrt(fan_in)).astype(np.float32)
    return numpy_helper.from_array(array, name)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Two convolutions, a normalization and two products, for any batch size."""
    nodes = [
        helper.make_node("Conv", ["image", "stem"], ["a"], strides=[2, 2], kernel_shape=[2, 2]),
        helper.make_node("Conv", ["a", "deep"], ["b"], kernel_shape=[3, 3]),
        helper.make_node("ReduceMean", ["b", "axes"], ["c"], keepdims=0),
        helper.make_node("LayerNormalization", ["c", "scale"], ["d"]),
        helper.make_node("MatMul", ["d", "wide"], ["e"]),
        helper.make_node("Gelu", ["e"], ["f"]),
        helper.make_node("Gemm", ["f", "narrow"], ["g"]),
        helper.make_node("Softmax", ["g"], ["scores"]),
    ]
    weights = [
        weight("stem", 8, 1, 2, 2),
        weight("deep", 64, 8, 3, 3),
        weight("wide", 64, 256),
        weight("narrow", 256, 64),
        numpy_helper.from_array(np.ones(64, np.float32), "scale"),
        numpy_helper.from_array(np.array([2, 3]), "axes"),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 64])
    graph = helper.make_graph(nodes, "model", [image], [scores], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    path = tmp_path_factory.mktemp("onnx") / "float32.onnx"
    onnx.save(model, path)
    return path


def images(batch):
    return {"image": random.normal(size=(batch, 1, 8, 8)).astype(np.float32)}


SAMPLES = [images(1) for _ in range(50)]


def quantized_sizes(model):
    """The sizes of the weights that a model stores in 8 bits."""
    dtypes = (TensorProto.INT8, TensorProto.UINT8)
    tensors = [x for x in model.graph.initializer if x.data_type in dtypes and len(x.dims) > 1]
    return sorted(np.prod(x.dims) for x in tensors)


@pytest.mark.parametrize(
    ("precision", "error", "share"),
    [("float16", 0.003, 0.55), ("dynamic", 0.05, 0.35), ("int8", 0.1, 0.35)],
)
def test_a_quantized_file_is_small_and_close(precision, error, share, source, tmp_path, capfd):
    path = tmp_path / "small.onnx"
    quantize_onnx(source, path, precision, SAMPLES)
    assert capfd.readouterr() == ("", "")
    assert [file.name for file in tmp_path.iterdir()] == ["small.onnx"]
    assert path.stat().st_size < share * source.stat().st_size
    model, original = open_model(path), open_model(source)
    assert (model.inputs, model.outputs) == (original.inputs, original.outputs)
    for batch in (1, 3):
        inputs = images(batch)
        expected = original(inputs)["scores"]
        np.testing.assert_allclose(model(inputs)["scores"], expected, atol=error * expected.max())


def test_int8_leaves_the_stem_and_the_normalizations_in_float(source, tmp_path):
    path = tmp_path / "int8.onnx"
    quantize_onnx(source, path, "int8", SAMPLES)
    model = onnx.load(path)
    assert quantized_sizes(model) == [64 * 8 * 9, 64 * 256, 256 * 64]  # without the stem's weight
    made_by = {output: node.op_type for node in model.graph.node for output in node.output}
    inputs = {node.op_type: [made_by.get(name) for name in node.input] for node in model.graph.node}
    assert inputs["MatMul"] == ["DequantizeLinear"] * 2
    assert inputs["Gelu"] == ["MatMul"]
    assert inputs["Softmax"] == ["Gemm"]
    assert made_by["scores"] == "Softmax"


def test_an_unknown_precision_and_missing_samples_are_errors(source, tmp_path):
    message = "unknown precision 'int4'; choose from float16, dynamic and int8"
    with pytest.raises(UserError, match=message):
        quantize_onnx(source, tmp_path / "no.onnx", "int4", SAMPLES)
    with pytest.raises(UserError, match="int8 needs samples"):
        quantize_onnx(source, tmp_path / "no.onnx", "int8")


def written(function, weights, x, path):
    """The float32 file of a function (weights, x), and its outputs by name."""
    path.write_bytes(exported(function, {"params": weights, "state": {}}, x).SerializeToString())
    return path, open_model(path)({"input": x})


def recurrent(w, ids):
    """A recurrent network over the embeddings of ids, as a scan, whose output is tied to them."""
    w = w["params"]

    def step(state, x):
        update = jax.nn.sigmoid(x @ w["update"] + state @ w["recurrent"])
        state = update * state + (1 - update) * jnp.tanh(x @ w["new"])
        return state, state

    x = jnp.take(w["table"], ids, axis=0).swapaxes(0, 1)
    _, states = jax.lax.scan(step, jnp.zeros((ids.shape[0], 64)), x)
    return {"logits": states[-1] @ w["table"].T}


def recurrent_weights():
    shapes = {"table": (100, 64), "update": (64, 64), "recurrent": (64, 64), "new": (64, 64)}
    return {name: random.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


IDS = random.integers(0, 100, (3, 6)).astype(np.int32)


@pytest.mark.parametrize(
    ("precision", "error", "share"), [("float16", 0.005, 0.53), ("dynamic", 0.06, 0.33)]
)
def test_the_weights_of_a_loop_and_a_tied_table_become_small(precision, error, share, tmp_path):
    source, expected = written(recurrent, recurrent_weights(), IDS, tmp_path / "float32.onnx")
    assert source.stat().st_size < 1.1 * 4 * (100 * 64 + 3 * 64 * 64)  # the table once
    quantize_onnx(source, tmp_path / "small.onnx", precision)
    assert (tmp_path / "small.onnx").stat().st_size < share * source.stat().st_size
    logits = open_model(tmp_path / "small.onnx")({"input": IDS})["logits"]
    limit = error * np.abs(expected["logits"]).max()
    np.testing.assert_allclose(logits, expected["logits"], atol=limit)
    assert np.abs(logits - expected["logits"]).max() > 0


def trained_like(model, x, path):
    """The float32 file of a model with its first weights, and its outputs."""
    params, _ = jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(0)))
    return written(lambda w, x: {"y": model.apply(w["params"], {}, x)[0]}, params, x, path)


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize(
    ("precision", "error", "share"),
    [("float16", 0.003, 0.52), ("dynamic", 0.04, 0.3), ("int8", 0.04, 0.3)],
)
def test_the_weights_of_recurrent_layers_become_small(cell, precision, error, share, tmp_path):
    x = random.normal(size=(8, 20, 12)).astype(np.float32)
    model = rnn((20, 12), 4, cell=cell, dim=64, depth=2, bidirectional=True)
    source, expected = trained_like(model, x, tmp_path / "float32.onnx")
    samples = [{"input": x[i : i + 1]} for i in range(8)]
    quantize_onnx(source, tmp_path / "small.onnx", precision, samples)
    assert (tmp_path / "small.onnx").stat().st_size < share * source.stat().st_size
    assert float32_weights(tmp_path / "small.onnx") == {}
    found = open_model(tmp_path / "small.onnx")({"input": x})["y"]
    assert 0 < np.abs(found - expected["y"]).max() < error * np.abs(expected["y"]).max()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["dynamic", "int8"])
def test_positions_become_small_and_what_stays_in_float32_is_known(precision, tmp_path):
    """Positions are added. The first convolution is left in float32."""
    x = random.normal(size=(8, 28, 28, 1)).astype(np.float32)
    model = vit((28, 28, 1), 10, patch=4, dim=64, depth=1, heads=2)
    source, expected = trained_like(model, x, tmp_path / "float32.onnx")
    assert "positions/weight" in float32_weights(source)
    samples = [{"input": x[i : i + 1]} for i in range(8)]
    quantize_onnx(source, tmp_path / "small.onnx", precision, samples)
    assert float32_weights(tmp_path / "small.onnx") == {"patches/weight": 4 * 64 * 4 * 4}
    assert 49 * 64 in quantized_sizes(onnx.load(tmp_path / "small.onnx"))
    found = open_model(tmp_path / "small.onnx")({"input": x})["y"]
    assert 0 < np.abs(found - expected["y"]).max() < 0.06 * np.abs(expected["y"]).max()


def test_excluded_weights_stay_in_float32(source, tmp_path):
    for precision in ("float16", "dynamic", "int8"):
        path = tmp_path / f"{precision}.onnx"
        quantize_onnx(source, path, precision, SAMPLES, exclude=["wi.*", "deep"])
        floats = {
            x.name for x in onnx.load(path).graph.initializer if x.data_type == TensorProto.FLOAT
        }
        assert {"wide", "deep"} <= floats and "narrow" not in floats
        expected = open_model(source)(SAMPLES[0])["scores"]
        found = open_model(path)(SAMPLES[0])["scores"]
        np.testing.assert_allclose(found, expected, atol=0.1 * expected.max())


def test_an_exclude_that_matches_nothing_is_an_error(source, tmp_path):
    message = r"--exclude: 'dep' matches no weight of the ONNX file; there are .*deep"
    with pytest.raises(UserError, match=message):
        quantize_onnx(source, tmp_path / "no.onnx", "float16", exclude=["dep"])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_network_of_bottlenecks_keeps_its_free_batch(tmp_path):
    shapes = {"stem": (7, 7, 3, 16), "in": (1, 1, 16, 8), "mid": (3, 3, 8, 8), "out": (1, 1, 8, 16)}
    weights = {name: random.normal(0, 0.2, s).astype(np.float32) for name, s in shapes.items()}
    weights |= {"head": random.normal(0, 0.2, (16, 70)).astype(np.float32)}

    def network(w, x):
        def conv(name, x, stride=1):
            layout = ("NHWC", "HWIO", "NHWC")
            return jax.lax.conv_general_dilated(
                x, w["params"][name], (stride, stride), "SAME", dimension_numbers=layout
            )

        x = max_pool(jax.nn.relu(conv("stem", x, 2)), 3, stride=2, padding="SAME")
        for _ in range(2):
            y = jax.nn.relu(conv("mid", jax.nn.relu(conv("in", x))))
            x = jax.nn.relu(x + conv("out", y))
        return {"y": x.mean((1, 2)) @ w["params"]["head"]}

    x = random.normal(size=(3, 32, 32, 3)).astype(np.float32)
    source, expected = written(network, weights, x, tmp_path / "float32.onnx")
    for precision in ("float16", "dynamic", "int8"):
        samples = [{"input": x[i : i + 1]} for i in range(len(x))]
        quantize_onnx(source, tmp_path / "small.onnx", precision, samples)
        model = open_model(tmp_path / "small.onnx")
        assert (model.inputs["input"][0][0], model.outputs["y"][0]) == (None, (None, 70))
        limit = 0.15 * np.abs(expected["y"]).max()
        np.testing.assert_allclose(model({"input": x})["y"], expected["y"], atol=limit)
