"""Quantized ONNX files: which ops are quantized, and how far the outputs are from float32."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from inference.quantize_onnx import quantize_onnx
from inference.runtimes import open_model
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
