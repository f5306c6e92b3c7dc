"""The probe: it ignores rounding, detects a model whose code has changed, and keeps its input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import model.convnext
import model.mlp
import model.resnet
import model.vit
from model.base import Model
from model.layers import activations, norm
from model.layers.conv import conv2d
from model.layers.embedding import embedding, embedding_init
from training.checkpoint.probe import (
    Probe,
    difference,
    probe_input,
    seeded_inputs,
)
from training.checkpoint.storage import load, save

IMAGE = (16, 16, 3)
MODELS = {
    "convnext": partial(model.convnext.convnext, IMAGE, 10),
    "resnet": partial(model.resnet.resnet, IMAGE, 10, widths=(8, 16), depth=1),
    "vit": partial(model.vit.vit, IMAGE, 10, depth=2),
    "mlp": partial(model.mlp.mlp, IMAGE, 10, activation="gelu"),
}
SPEC = jax.ShapeDtypeStruct((4, *IMAGE), jnp.float32)


def weights(built):
    """Weights similar to trained ones: vectors around 1, everything else around 0."""
    draw = np.random.default_rng(0)
    return jax.tree.map(
        lambda a: np.float32(
            draw.uniform(0.5, 1.5, a.shape) if a.ndim == 1 else 0.2 * draw.normal(size=a.shape)
        ),
        jax.eval_shape(built.init, jax.random.key(0)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_full_optimization_and_saving_to_a_file_make_no_difference(name, tmp_path):
    built = MODELS[name]()
    params, state = weights(built)
    stored = Probe(built, SPEC)(params, state)
    save(tmp_path / "a.params", stored, {})
    optimized = jax.jit(built.apply)(params, state, seeded_inputs(SPEC))[0]
    assert difference(load(tmp_path / "a.params")[0], stored) is None
    assert difference(stored, stored | {"probe/output": np.asarray(optimized)}) is None
    gap = np.abs(stored["probe/output"] - optimized).max() / np.abs(optimized).max()
    assert gap < 1e-5  # a tenth of the tolerance


@pytest.mark.parametrize(
    ("name", "part", "instead"),
    [
        ("convnext", "gelu", activations.relu),
        ("convnext", "gelu", activations.gelu_tanh),
        ("convnext", "layer_norm", partial(norm.layer_norm, eps=1e-3)),
        ("convnext", "conv2d", lambda params, x, **kw: conv2d(params, jnp.roll(x, 1, 1), **kw)),
        ("resnet", "relu", activations.gelu),
        ("resnet", "batch_norm", partial(norm.batch_norm, eps=1e-3)),
        (
            "resnet",
            "conv2d",
            lambda params, x, stride=1, padding="SAME": conv2d(
                params, x, stride=stride, padding=same_as_torch(params, x)
            ),
        ),
        ("vit", "gelu", activations.relu),
        ("vit", "layer_norm", lambda params, x, eps: norm.layer_norm(params, x, eps=1e-3)),
    ],
)
def test_a_model_that_has_changed_its_meaning_is_detected(name, part, instead, monkeypatch):
    params, state = weights(MODELS[name]())
    stored = Probe(MODELS[name](), SPEC)(params, state)
    monkeypatch.setattr(getattr(model, name), part, instead)
    assert difference(stored, Probe(MODELS[name](), SPEC)(params, state)).startswith("up to ")


def same_as_torch(params, x):
    """The same padding before and after; "SAME" with a stride pads less before."""
    return [(params["weight"].shape[0] // 2,) * 2] * 2


def test_the_input_never_changes():
    spec = {
        "image": jax.ShapeDtypeStruct((40, 50), jnp.float32),
        "half": jax.ShapeDtypeStruct((3,), jnp.bfloat16),
    }
    drawn = seeded_inputs(spec)
    np.testing.assert_allclose(
        drawn["image"][0, :3], [1.3932267, -0.0560575, -1.3450654], rtol=1e-6
    )
    assert abs(drawn["image"].mean()) < 0.1
    assert abs(drawn["image"].std() - 1) < 0.1
    assert drawn["half"].dtype == jnp.bfloat16
    dtypes = [np.uint8, np.int32, np.bool_]
    arrays = seeded_inputs([jax.ShapeDtypeStruct((5000,), dtype) for dtype in dtypes])
    assert [set(np.unique(a)) for a in arrays] == [set(range(256)), {0, 1}, {False, True}]
    assert [a.dtype for a in arrays] == dtypes


def test_tokens_are_in_a_vocabulary_of_two():
    def apply(params, state, x, *, train=False, key=None):
        return embedding(params, x).sum(1), state

    built = Model(lambda key: (embedding_init(key, 2, 3), {}), apply)
    spec = probe_input(
        (jax.ShapeDtypeStruct((8, 5), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32))
    )
    params, _ = built.init(jax.random.key(0))
    probe = Probe(built, spec)(params, {})
    ones = probe["probe/input"].sum(1, keepdims=True)
    np.testing.assert_allclose(
        probe["probe/output"],
        (5 - ones) * params["weight"][0] + ones * params["weight"][1],
        rtol=1e-5,
    )


def test_the_input_has_the_shape_of_a_preprocessed_one():
    batch = jax.ShapeDtypeStruct((512, 28, 28), jnp.uint8), jax.ShapeDtypeStruct((512,), jnp.int32)
    spec = probe_input(batch, [lambda x: x[..., None] / 255, lambda x: x[:14]])
    assert (spec.shape[1:], spec.dtype) == ((14, 28, 1), jnp.float32)
    assert probe_input({"image": batch[0]}) is None
    assert probe_input((*batch, batch[1])) is None


def test_an_output_may_be_a_tree_whose_large_leaves_are_thinned_evenly():
    def apply(params, state, x, *, train=False, key=None):
        return {
            "map": jnp.arange(4 * 64 * 64 * 16.0).reshape(4, 64, 64, 16) % 16,
            "mean": [x.mean()],
        }, state

    probe = Probe(Model(None, apply), jax.ShapeDtypeStruct((4, 2), jnp.float32))({}, {})
    assert list(probe) == ["probe/input", "probe/output/map", "probe/output/mean/0"]
    kept = probe["probe/output/map"]
    assert len(kept) == 1024
    assert set(kept) == set(range(16))  # every channel is included
    assert (kept[0], kept[-1]) == (0, 15)
    assert {a.dtype for a in probe.values()} == {np.dtype(np.float32)}


def test_a_model_that_needs_more_than_an_input_has_no_probe():
    def apply(params, state, x, *, train, key):
        return x + jax.random.normal(key, x.shape), state

    assert Probe(Model(None, apply), SPEC)({}, {}) == {}
    assert Probe(MODELS["mlp"](), None)({}, {}) == {}


def output(*numbers):
    return {"probe/output": np.array(numbers, np.float32)}


@pytest.mark.parametrize(
    ("stored", "current", "expected"),
    [
        (output(1, -20), output(1.0019, -20.0019), None),
        (output(1, -20), output(1.1, -20), "up to 0.1, where its largest number was 20"),
        (output(0, 0), output(1e-8, 0), None),
        (output(np.nan, np.inf, 1), output(np.nan, np.inf, 1), None),
        (output(np.nan, 1), output(1, np.nan), "NaNs at different positions"),
        (output(1, 2), output(1, np.inf), "up to inf, where its largest number was 2"),
        (output(1, 2), output(1, 2, 3), "its shape, now (3,) instead of (2,)"),
        (
            output(1),
            {"probe/output/a": np.ones(1)},
            "its parts, now probe/output/a instead of probe/output",
        ),
        (output(1), {}, "its parts, now none instead of probe/output"),
    ],
)
def test_differences_in_words(stored, current, expected):
    assert difference(stored, current) == expected
