"""The way by jax2tf: it computes what JAX does, in both formats and for any batch, and what it cannot do it names."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from inference import packages
from inference.fallback.convert import onnx_by_jax2tf, tflite_by_jax2tf
from inference.runtimes import open_model
from model.layers.linear import linear
from tests.processes import ROOT
from utils import UserError

WRITERS = {"tflite": tflite_by_jax2tf, "onnx": onnx_by_jax2tf}
random = np.random.default_rng(0)


def normal(*shape):
    return random.normal(size=shape).astype(np.float32)


def example(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def by_platform(x):
    """Cosines everywhere but here."""
    return lax.platform_dependent(x, cpu=lambda x: x * jnp.nan, default=jnp.cos)


WEIGHTS = {
    "params": {"dense": {"weight": normal(4, 6), "bias": normal(6)}, "table": normal(5, 6)},
    "state": {},
}


def several(weights, inputs, cosine=jnp.cos):
    """A function of many primitives over trees, with a layer under a mark."""
    params = weights["params"]
    x = jax.nn.gelu(linear(params["dense"], inputs["tokens"]), approximate=False)  # (B, 3, 6)
    x = x + params["table"][inputs["ids"]]
    x = jax.nn.softmax(jnp.einsum("bqc,bkc->bqk", x, x)) @ x
    x = jnp.where(x > 0, cosine(x), x / (x > 0))  # infinite where it is not chosen
    return {"logits": [x[:, 0], x[:, ::-1, 1:3].max(1)], "same": inputs["ids"]}


@pytest.mark.parametrize("suffix", WRITERS)
def test_trees_of_any_batch_without_a_word(suffix, tmp_path, capfd):
    inputs = {"ids": jax.ShapeDtypeStruct((3,), jnp.int32), "tokens": example(3, 4)}
    path = tmp_path / f"model.{suffix}"
    WRITERS[suffix](lambda *args: several(*args, by_platform), WEIGHTS, inputs, None, path)
    assert capfd.readouterr() == ("", "")  # whatever TensorFlow and tf2onnx would like to tell
    model = open_model(path)
    assert model.inputs == {"ids": ((None, 3), np.int32), "tokens": ((None, 3, 4), np.float32)}
    for batch in (1, 3):
        given = {
            "ids": random.integers(0, 5, (batch, 3)).astype(np.int32),
            "tokens": normal(batch, 3, 4),
        }
        found, want = model(given), several(WEIGHTS, given)
        assert set(found) == {"logits/0", "logits/1", "same"}
        for i in range(2):
            np.testing.assert_allclose(
                found[f"logits/{i}"], want["logits"][i], rtol=1e-4, atol=1e-5
            )
        np.testing.assert_array_equal(found["same"], given["ids"])


class Net(nnx.Module):
    """A model of Flax."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
        self.dense = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.dense(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_flax_model(suffix, tmp_path):
    graph, weights = nnx.split(net := Net())
    path, x = tmp_path / f"model.{suffix}", normal(5, 8, 8, 1)
    function = lambda weights, x: nnx.merge(graph, weights)(x)  # noqa: E731
    WRITERS[suffix](function, weights, example(8, 8, 1), None, path)
    np.testing.assert_allclose(
        open_model(path)({"input": x})["output"], net(x), rtol=1e-5, atol=1e-6
    )


def test_the_opset_is_the_one_asked_for(tmp_path):
    import onnx

    for opset in (18, 22):
        onnx_by_jax2tf(
            lambda weights, x: jnp.tanh(x),
            {},
            example(3),
            None,
            tmp_path / "model.onnx",
            opset=opset,
        )
        model = onnx.load(tmp_path / "model.onnx")
        assert {entry.domain: entry.version for entry in model.opset_import}[""] == opset


def test_what_cannot_be_done_is_named_with_its_place(tmp_path):
    def sorts(weights, x):
        return jnp.sort(jnp.exp(x)) + 1

    def gathers(weights, x):
        return jnp.take_along_axis(x, jnp.clip(x, 0, 3).astype(int), axis=1)

    with pytest.raises(
        UserError, match=r"cannot do sort of float32 \(.*test_fallback.py:\d+:\d+ \(.*sorts\)\)$"
    ):
        tflite_by_jax2tf(sorts, {}, example(4), None, tmp_path / "model.tflite")
    with pytest.raises(
        UserError,
        match=r"cannot do gather of float32 \(.*gathers\)\); with a batch of a fixed size it can: --batch N$",
    ):
        tflite_by_jax2tf(gathers, {}, example(4), None, tmp_path / "model.tflite")
    assert not list(tmp_path.iterdir())
    tflite_by_jax2tf(gathers, {}, example(4), 2, tmp_path / "model.tflite")
    x = normal(2, 4)
    np.testing.assert_array_equal(
        open_model(tmp_path / "model.tflite")({"input": x})["output"], gathers({}, x)
    )


def test_what_fails_is_named_quietly_and_not_what_leads_to_it(tmp_path, capfd):
    def spectrum(weights, x):
        return jnp.abs(
            jnp.fft.fft(x)
        )  # after a conversion to complex numbers, which no file returns either

    for suffix, write in WRITERS.items():
        with pytest.raises(UserError, match=r"cannot do fft of complex64 \(.*spectrum\)\)"):
            write(spectrum, {}, example(4), 2, tmp_path / f"model.{suffix}")

    def random(weights, x):
        return x * jax.random.normal(jax.random.wrap_key_data(x[:2].astype(jnp.uint32)), (4,))

    with pytest.raises(UserError, match="the way by jax2tf cannot do"):
        tflite_by_jax2tf(
            lambda weights, x: jax.vmap(lambda row: random(weights, row))(x),
            {},
            example(4),
            None,
            tmp_path / "a.tflite",
        )
    assert capfd.readouterr() == ("", "")


def test_a_product_of_the_channels_of_a_single_pixel(tmp_path):
    """TFLite's converter makes one op of a product and the reshapings around it, and refuses that."""

    def function(weights, x):
        return 2 * linear(weights, x.mean((1, 2), keepdims=True))

    weights, x = {"weight": normal(4, 6)}, normal(1, 3, 2, 4)
    tflite_by_jax2tf(function, weights, example(3, 2, 4), 1, tmp_path / "model.tflite")
    found = open_model(tmp_path / "model.tflite")({"input": x})["output"]
    np.testing.assert_allclose(found, function(weights, x), rtol=1e-5, atol=1e-5)


def test_what_a_package_writes_is_told_where_its_exception_is(capfd):
    with pytest.raises(ValueError, match="wrong") as error, packages.quiet():
        os.write(2, b"a hint from C++\n")
        raise ValueError("wrong")
    assert error.value.__notes__ == ["a hint from C++"]
    assert capfd.readouterr() == ("", "")


def test_the_end_of_a_process_in_c_is_not_silent():
    program = "from inference.packages import quiet\nimport os\nwith quiet():\n    os.abort()"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT
    )
    assert (
        ended.returncode != 0
        and "Fatal Python error: Aborted" in ended.stderr
        and "line 4 in" in ended.stderr
    )


def test_a_package_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(
        packages, "find_spec", lambda name: None if name.startswith("tf2") else name
    )
    with pytest.raises(
        UserError,
        match=r"tf2onnx is needed here and not installed: pip install -r inference/requirements\.txt",
    ):
        onnx_by_jax2tf(lambda weights, x: x, {}, example(3), None, tmp_path / "model.onnx")
