"""The jax2tf route: what it exports in both formats, and how it reports what it cannot convert."""

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
from utils import UserError

WRITERS = {"tflite": tflite_by_jax2tf, "onnx": onnx_by_jax2tf}
random = np.random.default_rng(0)


def normal(*shape):
    return random.normal(size=shape).astype(np.float32)


def example(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def by_platform(x):
    """A cosine on every platform except the CPU of this test."""
    return lax.platform_dependent(x, cpu=lambda x: x * jnp.nan, default=jnp.cos)


WEIGHTS = {
    "params": {"dense": {"weight": normal(4, 6), "bias": normal(6)}, "table": normal(5, 6)},
    "state": {},
}


def several(weights, inputs, cosine=jnp.cos):
    """A function of many primitives over trees, with a layer under @op."""
    params = weights["params"]
    x = jax.nn.gelu(linear(params["dense"], inputs["tokens"]), approximate=False)  # (B, 3, 6)
    x = x + params["table"][inputs["ids"]]
    x = jax.nn.softmax(jnp.einsum("bqc,bkc->bqk", x, x)) @ x
    x = jnp.where(x > 0, cosine(x), x / (x > 0))  # infinite where not selected
    return {"logits": [x[:, 0], x[:, ::-1, 1:3].max(1)], "same": inputs["ids"]}


@pytest.mark.slow
@pytest.mark.parametrize("suffix", WRITERS)
def test_trees_with_a_free_batch_size_are_exported_silently(suffix, tmp_path, capfd):
    inputs = {"ids": jax.ShapeDtypeStruct((3,), jnp.int32), "tokens": example(3, 4)}
    path = tmp_path / f"model.{suffix}"
    WRITERS[suffix](lambda *args: several(*args, by_platform), WEIGHTS, inputs, None, path)
    assert capfd.readouterr() == ("", "")  # nothing from TensorFlow or tf2onnx
    model = open_model(path)
    assert model.inputs == {"ids": ((None, 3), np.int32), "tokens": ((None, 3, 4), np.float32)}
    for batch in (1, 3):
        ids = random.integers(0, 5, (batch, 3)).astype(np.int32)
        arrays = {"ids": ids, "tokens": normal(batch, 3, 4)}
        outputs, expected = model(arrays), several(WEIGHTS, arrays)["logits"]
        assert set(outputs) == {"logits/0", "logits/1", "same"}
        for i in range(2):
            np.testing.assert_allclose(outputs[f"logits/{i}"], expected[i], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(outputs["same"], ids)


class Net(nnx.Module):
    """A Flax model."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
        self.dense = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.dense(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("suffix", WRITERS)
def test_a_flax_model_is_exported(suffix, tmp_path):
    graph, weights = nnx.split(net := Net())
    path, x = tmp_path / f"model.{suffix}", normal(5, 8, 8, 1)
    function = lambda weights, x: nnx.merge(graph, weights)(x)  # noqa: E731
    WRITERS[suffix](function, weights, example(8, 8, 1), None, path)
    output = open_model(path)({"input": x})["output"]
    np.testing.assert_allclose(output, net(x), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_opset_of_the_file_is_the_requested_one(tmp_path):
    import onnx

    path = tmp_path / "model.onnx"
    for opset in (18, 22):
        onnx_by_jax2tf(lambda weights, x: jnp.tanh(x), {}, example(3), None, path, opset=opset)
        imports = onnx.load(path).opset_import
        assert {entry.domain: entry.version for entry in imports}[""] == opset


@pytest.mark.slow
def test_an_op_that_cannot_be_converted_is_named_with_its_location(tmp_path):
    def sorts(weights, x):
        return jnp.sort(jnp.exp(x)) + 1

    def gathers(weights, x):
        return jnp.take_along_axis(x, jnp.clip(x, 0, 3).astype(int), axis=1)

    path = tmp_path / "model.tflite"
    message = r"cannot convert sort of float32 \(.*test_fallback.py:\d+:\d+ \(.*sorts\)\)$"
    with pytest.raises(UserError, match=message):
        tflite_by_jax2tf(sorts, {}, example(4), None, path)
    fix = "with a fixed batch size it can: pass --batch N"
    message = rf"cannot convert gather of float32 \(.*gathers\)\); {fix}$"
    with pytest.raises(UserError, match=message):
        tflite_by_jax2tf(gathers, {}, example(4), None, path)
    assert not list(tmp_path.iterdir())
    tflite_by_jax2tf(gathers, {}, example(4), 2, path)
    x = normal(2, 4)
    np.testing.assert_array_equal(open_model(path)({"input": x})["output"], gathers({}, x))


@pytest.mark.slow
@pytest.mark.parametrize("suffix", WRITERS)
def test_a_fourier_transform_becomes_a_product(suffix, tmp_path):
    def spectrum(weights, x):
        return jnp.abs(jnp.fft.fft(x))

    path, x = tmp_path / f"model.{suffix}", normal(3, 10)
    WRITERS[suffix](spectrum, {}, example(10), None, path)
    output = open_model(path)({"input": x})["output"]
    np.testing.assert_allclose(output, spectrum({}, x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_random_numbers_of_each_example_cannot_be_converted(tmp_path, capfd):
    def noisy(row):
        return row * jax.random.normal(jax.random.wrap_key_data(row[:2].astype(jnp.uint32)), (4,))

    path = tmp_path / "model.tflite"
    with pytest.raises(UserError, match="the jax2tf route cannot convert"):
        tflite_by_jax2tf(lambda weights, x: jax.vmap(noisy)(x), {}, example(4), None, path)
    assert capfd.readouterr() == ("", "")


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    find_spec = lambda name: None if name.startswith("tf2") else name  # noqa: E731
    monkeypatch.setattr(packages, "find_spec", find_spec)
    install = r"pip install -r inference/requirements\.txt"
    with pytest.raises(UserError, match=f"tf2onnx is needed and not installed: {install}"):
        onnx_by_jax2tf(lambda weights, x: x, {}, example(3), None, tmp_path / "model.onnx")
