"""The probe: silent about rounding, not about a model whose code means something else; its question never changes."""

import threading
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
from training.checkpoint.probe import Probe, ask, difference, probe_input, same_question
from training.checkpoint.storage import load, save

IMAGE = (16, 16, 3)
MODELS = {
    "convnext": partial(model.convnext.convnext, IMAGE, 10),
    "resnet": partial(model.resnet.resnet, IMAGE, 10, widths=(8, 16), depth=1),
    "vit": partial(model.vit.vit, IMAGE, 10, depth=2),
    "mlp": partial(model.mlp.mlp, IMAGE, 10, activation="gelu"),
}
SPEC = jax.ShapeDtypeStruct((4, *IMAGE), jnp.float32)


def weights(made):
    """Weights as if trained: vectors around 1, everything else around 0."""
    draw = np.random.default_rng(0)
    return jax.tree.map(
        lambda a: np.float32(
            draw.uniform(0.5, 1.5, a.shape) if a.ndim == 1 else 0.2 * draw.normal(size=a.shape)
        ),
        jax.eval_shape(made.init, jax.random.key(0)),
    )


@pytest.mark.parametrize("name", MODELS)
def test_full_optimization_and_a_file_in_between_make_no_difference(name, tmp_path):
    made = MODELS[name]()
    params, state = weights(made)
    stored = Probe(made, SPEC)(params, state)
    save(tmp_path / "a.params", stored, {})
    optimized = jax.jit(made.apply)(params, state, ask(SPEC))[0]
    assert difference(load(tmp_path / "a.params")[0], stored) is None
    assert difference(stored, stored | {"probe/output": np.asarray(optimized)}) is None
    gap = np.abs(stored["probe/output"] - optimized).max() / np.abs(optimized).max()
    assert gap < 1e-5  # a tenth of what is tolerated


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
            lambda params, x, stride=1: conv2d(
                params, x, stride=stride, padding=same_as_torch(params, x)
            ),
        ),
        ("vit", "gelu", activations.relu),
        ("vit", "layer_norm", partial(norm.layer_norm, eps=1e-3)),
    ],
)
def test_a_model_that_has_changed_its_meaning_is_noticed(name, part, instead, monkeypatch):
    params, state = weights(MODELS[name]())
    stored = Probe(MODELS[name](), SPEC)(params, state)
    monkeypatch.setattr(getattr(model, name), part, instead)
    assert difference(stored, Probe(MODELS[name](), SPEC)(params, state)).startswith("up to ")


def same_as_torch(params, x):
    """As much before as after, where "SAME" with a stride pads less before."""
    return [(params["weight"].shape[0] // 2,) * 2] * 2


def test_the_question_is_the_same_for_ever():
    spec = {
        "image": jax.ShapeDtypeStruct((40, 50), jnp.float32),
        "half": jax.ShapeDtypeStruct((3,), jnp.bfloat16),
    }
    asked = ask(spec)
    np.testing.assert_allclose(
        asked["image"][0, :3], [1.3932267, -0.0560575, -1.3450654], rtol=1e-6
    )
    assert abs(asked["image"].mean()) < 0.1
    assert abs(asked["image"].std() - 1) < 0.1
    assert asked["half"].dtype == jnp.bfloat16
    kinds = ask([jax.ShapeDtypeStruct((5000,), dtype) for dtype in (np.uint8, np.int32, np.bool_)])
    assert [set(np.unique(a)) for a in kinds] == [set(range(256)), {0, 1}, {False, True}]
    assert [a.dtype for a in kinds] == [np.uint8, np.int32, np.bool_]


def test_tokens_are_in_the_smallest_vocabulary():
    def apply(params, state, x, *, train=False, key=None):
        return embedding(params, x).sum(1), state

    made = Model(lambda key: (embedding_init(key, 2, 3), {}), apply)
    spec = probe_input(
        (jax.ShapeDtypeStruct((8, 5), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32))
    )
    params, _ = made.init(jax.random.key(0))
    answer = Probe(made, spec)(params, {})
    ones = answer["probe/input"].sum(1, keepdims=True)
    np.testing.assert_allclose(
        answer["probe/output"],
        (5 - ones) * params["weight"][0] + ones * params["weight"][1],
        rtol=1e-5,
    )


def test_the_input_is_a_preprocessed_one():
    batch = jax.ShapeDtypeStruct((512, 28, 28), jnp.uint8), jax.ShapeDtypeStruct((512,), jnp.int32)
    spec = probe_input(batch, [lambda x: x[..., None] / 255, lambda x: x[:14]])
    assert (spec.shape[1:], spec.dtype) == ((14, 28, 1), jnp.float32)
    assert probe_input({"image": batch[0]}) is None
    assert probe_input((*batch, batch[1])) is None


def test_outputs_may_be_a_tree_and_large_ones_are_thinned_from_end_to_end():
    def apply(params, state, x, *, train=False, key=None):
        return {
            "map": jnp.arange(4 * 64 * 64 * 16.0).reshape(4, 64, 64, 16) % 16,
            "mean": [x.mean()],
        }, state

    answer = Probe(Model(None, apply), jax.ShapeDtypeStruct((4, 2), jnp.float32))({}, {})
    assert list(answer) == ["probe/input", "probe/output/map", "probe/output/mean/0"]
    seen = answer["probe/output/map"]
    assert len(seen) == 1024
    assert set(seen) == set(range(16))  # no channel is passed over
    assert (seen[0], seen[-1]) == (0, 15)
    assert {a.dtype for a in answer.values()} == {np.dtype(np.float32)}


def test_a_model_that_needs_more_than_an_input_has_no_probe():
    def apply(params, state, x, *, train, key):
        return x + jax.random.normal(key, x.shape), state

    assert Probe(Model(None, apply), SPEC)({}, {}) == {}
    assert Probe(MODELS["mlp"](), None)({}, {}) == {}


def test_threads_share_one_compilation():
    traces = []

    def apply(params, state, x, *, train=False, key=None):
        traces.append(1)
        return x * params["weight"], state

    probe, answers = Probe(Model(None, apply), SPEC), []
    ask_it = lambda w: answers.append((w, probe({"weight": jnp.float32(w)}, {})))  # noqa: E731
    threads = [threading.Thread(target=ask_it, args=(w,)) for w in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(traces) == 1
    for w, answer in answers:
        np.testing.assert_array_equal(answer["probe/output"], w * answer["probe/input"])


def output(*numbers):
    return {"probe/output": np.array(numbers, np.float32)}


@pytest.mark.parametrize(
    ("stored", "found", "told"),
    [
        (output(1, -20), output(1.0019, -20.0019), None),
        (output(1, -20), output(1.1, -20), "up to 0.1, where its largest number was 20"),
        (output(0, 0), output(1e-8, 0), None),
        (output(np.nan, np.inf, 1), output(np.nan, np.inf, 1), None),
        (output(np.nan, 1), output(1, np.nan), "NaNs in other places"),
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
def test_differences_in_words(stored, found, told):
    assert difference(stored, found) == told


def test_answers_to_different_questions_are_told_apart():
    asked = {"probe/input": np.ones(3, np.float32)}
    assert same_question(asked | output(1), asked | output(2))
    assert not same_question(
        asked | output(1), {"probe/input": np.zeros(3, np.float32)} | output(1)
    )
    assert not same_question(asked | output(1), {})
