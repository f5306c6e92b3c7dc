"""A user's own op, added to both tables as docs/export.md describes."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.lowering.trace import trace
from inference.runtimes import open_model
from inference.to_onnx import write_onnx
from inference.to_tflite import write_tflite
from model.layers.op import op

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "export.md").read_text()


@pytest.mark.slow
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
