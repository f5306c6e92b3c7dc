"""A user's own op, added to both tables as docs/export.md describes."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from inference.lowering.trace import trace
from inference.runtimes import open_model
from inference.to_onnx import write_onnx
from inference.to_tflite import write_tflite
from model.layers.op import op

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "export.md").read_text()


def test_the_op_of_the_page_can_be_added(tmp_path, monkeypatch):
    import tensorflow as tf

    from inference.lowering import onnx_ops, tf_ops

    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    layer, for_onnx, for_tf = [text for text in blocks if "def snake" in text]
    scope = {"op": op, "jnp": jnp, "tf": tf, "__name__": "model.layers.activations"}
    for text, module in ((for_onnx, onnx_ops), (for_tf, tf_ops)):
        exec(text, scope)
        monkeypatch.setitem(module.LAYERS, "snake", scope["snake"])
    exec(layer, scope)

    x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(3, 8)
    alpha = np.linspace(1, 2, 8, dtype=np.float32)

    def function(weights, x):
        return {"weight": scope["snake"](x, weights["alpha"]), "number": scope["snake"](x, 0.5)}

    traced = trace(function, {"alpha": alpha}, jax.ShapeDtypeStruct((8,), np.float32))
    write_onnx(traced, tmp_path / "a.onnx")
    write_tflite(traced, tmp_path / "a.tflite")
    for file in ("a.onnx", "a.tflite"):
        outputs = open_model(tmp_path / file)({"input": x})
        np.testing.assert_allclose(outputs["weight"], x + np.sin(alpha * x) ** 2 / alpha, atol=1e-6)
        np.testing.assert_allclose(outputs["number"], x + np.sin(0.5 * x) ** 2 / 0.5, atol=1e-6)
    assert open_model(tmp_path / "a.onnx").nodes() == 10


def test_an_op_with_the_name_of_a_builtin_op_is_not_confused_with_it(tmp_path, monkeypatch):
    from inference.lowering import onnx_ops

    @op
    def softmax(x, temperature=2.0):  # in a form that is not recognized as a softmax
        y = jnp.exp(x / temperature)
        return y / (y.sum(-1, keepdims=True) + 1e-9)

    @op
    def sort(x):  # also the name of a primitive
        return -jnp.sort(-x, -1)

    x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(3, 8)
    function = lambda _, x: {"softmax": softmax(x), "sort": sort(x)}  # noqa: E731
    expected = function(None, x)
    traced = trace(function, {}, jax.ShapeDtypeStruct((8,), np.float32))
    write_onnx(traced, tmp_path / "inlined.onnx")
    inlined = open_model(tmp_path / "inlined.onnx")
    outputs = inlined({"input": x})
    np.testing.assert_allclose(outputs["softmax"], expected["softmax"], atol=1e-6)
    np.testing.assert_array_equal(outputs["sort"], expected["sort"])

    def onnx_softmax(t, x, temperature):
        return t.Softmax(t.Div(x, 2.0))

    monkeypatch.setitem(onnx_ops.LAYERS, f"{__name__}.softmax", onnx_softmax)
    write_onnx(traced, tmp_path / "whole.onnx")
    whole = open_model(tmp_path / "whole.onnx")
    assert whole.nodes() < inlined.nodes()
    np.testing.assert_allclose(whole({"input": x})["softmax"], expected["softmax"], atol=1e-6)
