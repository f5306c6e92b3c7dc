"""An op of one's own, added as the README writes it, to both tables."""

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

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_an_op_as_the_readme_adds_it(tmp_path, monkeypatch):
    import tensorflow as tf

    from inference.lowering import onnx_ops, tf_ops

    (block,) = [
        text
        for text in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
        if "def snake" in text
    ]
    layer, for_onnx, for_tf = block.split("\n\n")
    scope = {"op": op, "jnp": jnp, "tf": tf, "__name__": "model.layers.activations"}
    for text, module in ((for_onnx, onnx_ops), (for_tf, tf_ops)):
        exec(text, scope)
        monkeypatch.setitem(module.LAYERS, "snake", scope["snake"])
    exec(layer, scope)

    x, alpha = (
        np.linspace(-3, 3, 24, dtype=np.float32).reshape(3, 8),
        np.linspace(1, 2, 8, dtype=np.float32),
    )

    def function(weights, x):
        return {"weight": scope["snake"](x, weights["alpha"]), "number": scope["snake"](x, 0.5)}

    traced = trace(function, {"alpha": alpha}, jax.ShapeDtypeStruct((8,), np.float32))
    write_onnx(traced, tmp_path / "a.onnx")
    write_tflite(traced, tmp_path / "a.tflite")
    for file in ("a.onnx", "a.tflite"):
        found = open_model(tmp_path / file)({"input": x})
        np.testing.assert_allclose(found["weight"], x + np.sin(alpha * x) ** 2 / alpha, atol=1e-6)
        np.testing.assert_allclose(found["number"], x + np.sin(0.5 * x) ** 2 / 0.5, atol=1e-6)
    assert open_model(tmp_path / "a.onnx").nodes() == 10


def test_an_op_that_is_named_like_one_of_ours_is_not_taken_for_it(tmp_path, monkeypatch):
    from inference.lowering import onnx_ops

    @op
    def softmax(x, temperature=2.0):
        return jax.nn.softmax(x / temperature)

    @op
    def sort(x):  # this is the name of a primitive
        return -jnp.sort(-x, -1)

    x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(3, 8)
    function = lambda _, x: {"softmax": softmax(x), "sort": sort(x)}  # noqa: E731
    traced = trace(function, {}, jax.ShapeDtypeStruct((8,), np.float32))
    write_onnx(traced, tmp_path / "inlined.onnx")
    found, wanted = open_model(tmp_path / "inlined.onnx")({"input": x}), function(None, x)
    np.testing.assert_allclose(found["softmax"], wanted["softmax"], atol=1e-6)
    np.testing.assert_array_equal(found["sort"], wanted["sort"])

    monkeypatch.setitem(
        onnx_ops.LAYERS,
        f"{__name__}.softmax",
        lambda t, x, temperature: t.Softmax(t.Div(x, t.number(2))),
    )
    write_onnx(traced, tmp_path / "whole.onnx")
    assert (
        open_model(tmp_path / "whole.onnx").nodes() < open_model(tmp_path / "inlined.onnx").nodes()
    )
    np.testing.assert_allclose(
        open_model(tmp_path / "whole.onnx")({"input": x})["softmax"], wanted["softmax"], atol=1e-6
    )
