"""Properties of every model."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from model.airbench import airbench
from model.convnext import convnext
from model.mixer import mixer
from model.mlp import mlp
from model.mobilenet import mobilenet
from model.resnet import resnet
from model.rnn import rnn
from model.vit import vit
from tests.model.compare import normal, quick_jit
from utils import named_leaves

pytestmark = [pytest.mark.gpu, pytest.mark.contract]

SMALL = {"dims": (8, 16), "kernel": 3, "head_dim": 16}
TINY = {"residual": True, "bias": True, "layer_scale": 0.5, "head_dim": None}
MODELS = {
    "convnext": convnext((8, 8, 1), 10, **SMALL),
    "convnext_residual": convnext((9, 12, 3), 10, **SMALL, residual=True),
    "mlp": mlp((6, 5), 10, dims=(64, 32)),
    "mobilenet": mobilenet((9, 8, 3), 10, width=0.25),
    "convnext_tiny": convnext((9, 12, 3), 10, (8, 16), 3, **TINY),
    "mixer": mixer((8, 4, 2), 10, patch=2, dim=16, depth=2),
    "gru": rnn((6, 5), 10, cell="gru", dim=32, bidirectional=True, pool="mean"),
    "lstm": rnn((6, 5), 10, dim=32, depth=2),
    "resnet": resnet((6, 7, 2), 10, widths=(8, 16), depth=1),
    "resnet_50": resnet((9, 17, 2), 10, (8, 16), depths=(2, 1), bottleneck=True, large_images=True),
    "vit": vit((8, 4, 2), 10, patch=2, dim=16, depth=2, heads=2, expansion=2),
    "airbench": airbench((9, 10, 2), 10, widths=(8, 16)),
    "vit_token": vit((8, 4, 2), 10, patch=2, dim=16, depth=2, heads=2, expansion=2, pool="token"),
}
SHAPES = {
    "convnext": (8, 8, 1),
    "convnext_residual": (9, 12, 3),
    "mlp": (6, 5),
    "mobilenet": (9, 8, 3),
    "convnext_tiny": (9, 12, 3),
    "mixer": (8, 4, 2),
    "gru": (6, 5),
    "lstm": (6, 5),
    "resnet": (6, 7, 2),
    "resnet_50": (9, 17, 2),
    "vit": (8, 4, 2),
    "airbench": (9, 10, 2),
    "vit_token": (8, 4, 2),
}
ALL = pytest.mark.parametrize("name", MODELS)


def prepare(name, examples=32):
    params, state = quick_jit(MODELS[name].init)(jax.random.key(0))
    return MODELS[name], params, state, normal(1, examples, *SHAPES[name]), np.arange(examples) % 10


def run(model, *args, train=False, key=None):
    return quick_jit(model.apply, static_argnames="train")(*args, train=train, key=key)


# Biases that the next norm takes away again, whatever they are.
WITHOUT_EFFECT = {
    "mixer": r"blocks/\d+/tokens/project/bias",
    "mobilenet": r"blocks/\d+/project/norm/bias",
}


@pytest.mark.slow
@ALL
def test_overfits_random_examples(name):
    model, params, state, x, y = prepare(name)
    optimizer = optax.adam(1e-2)

    def loss_and_state(params, state):
        out, state = model.apply(params, state, x, train=True)
        return optax.softmax_cross_entropy_with_integer_labels(out, y).mean(), state

    @quick_jit
    def step(params, state, opt):
        (loss, state), grads = jax.value_and_grad(loss_and_state, has_aux=True)(params, state)
        updates, opt = optimizer.update(grads, opt)
        return optax.apply_updates(params, updates), state, opt, loss, grads

    opt = optimizer.init(params)
    for i in range(150):
        params, state, opt, loss, grads = step(params, state, opt)
        if i == 0:
            zero = [n for n, grad in named_leaves(grads).items() if not (abs(grad) > 1e-7).any()]
            assert [n for n in zero if not re.fullmatch(WITHOUT_EFFECT.get(name, ""), n)] == []
        if loss < 0.1:
            return
    pytest.fail(f"the loss is still {loss}")


@pytest.mark.slow
@ALL
def test_bfloat16_is_close_to_float32(name):
    model, params, state, x, _ = prepare(name)
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    out, _ = run(model, params, state, x)
    low_out, low_state = run(model, low, state, x.astype(jnp.bfloat16))
    assert low_out.dtype == jnp.bfloat16 and out.shape == (32, 10)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(low_state))
    np.testing.assert_allclose(low_out.astype(np.float32), out, atol=0.05 * np.abs(out).max())


@pytest.mark.slow
@ALL
def test_in_evaluation_examples_do_not_depend_on_each_other(name):
    model, params, state, x, _ = prepare(name, examples=4)
    together, new_state = run(model, params, state, x)
    alone, _ = run(model, params, state, x[2:3])
    np.testing.assert_allclose(alone, together[2:3], rtol=1e-4, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, new_state, state)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnext", "mlp", "vit"])
def test_without_dropout_training_and_evaluation_give_the_same_output(name):
    model, params, state, x, _ = prepare(name, examples=4)
    trained, _ = run(model, params, state, x, train=True)
    np.testing.assert_array_equal(trained, run(model, params, state, x)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, shape",
    [
        (mlp((6,), 3, dims=(16,), dropout=0.5), (6,)),
        (vit((4, 4, 1), 3, patch=2, dim=8, depth=1, heads=2, dropout=0.5), (4, 4, 1)),
        (vit((4, 4, 1), 3, patch=2, dim=8, depth=2, heads=2, drop_path=0.5), (4, 4, 1)),
        (mixer((4, 4, 1), 3, patch=2, dim=8, depth=1, dropout=0.5), (4, 4, 1)),
        (rnn((4, 3), 3, dim=8, dropout=0.5), (4, 3)),
    ],
    ids=["mlp", "vit_dropout", "vit_drop_path", "mixer", "rnn"],
)
def test_dropout_depends_on_the_key_in_training_only(model, shape):
    params, state = quick_jit(model.init)(jax.random.key(0))
    x = normal(1, 8, *shape)

    def out(seed, train):
        return np.asarray(run(model, params, state, x, train=train, key=jax.random.key(seed))[0])

    np.testing.assert_array_equal(out(0, True), out(0, True))
    assert (out(0, True) != out(1, True)).any()
    np.testing.assert_array_equal(out(0, False), run(model, params, state, x)[0])
    with pytest.raises(ValueError, match="key: dropout"):
        run(model, params, state, x, train=True)


@pytest.mark.parametrize(
    "factory, arguments, message",
    [
        (convnext, {"dims": ()}, r"dims: needs at least one width, got \(\)"),
        (
            convnext,
            {"input_shape": (28, 28)},
            r"input_shape: needs \(height, width, channels\), got \(28, 28\)",
        ),
        (
            convnext,
            {"input_shape": (3, 3, 1)},
            r"input_shape: \(3, 3, 1\) is too small for 3 widths .* at least 16",
        ),
        (rnn, {}, r"input_shape: needs \(steps, features\), got \(28, 28, 1\)"),
        (rnn, {"vocab_size": 9}, r"input_shape: needs \(steps,\) of tokens, got \(28, 28, 1\)"),
        (mlp, {"dims": ()}, "dims: needs at least one width"),
        (
            mlp,
            {"activation": "rellu"},
            "activation: no activation 'rellu'; choose from: relu, leaky_relu, .*, log_softmax$",
        ),
        (resnet, {"depths": (1, 1)}, "depths: needs one number for each of the 3 widths, got 2"),
        (vit, {"heads": 3}, r"heads: 3 must divide dim \(64\)"),
        (
            vit,
            {"patch": 5},
            r"patch: 5 must divide the height and width of input_shape \(28, 28, 1\)",
        ),
    ],
)
def test_refuses_a_bad_argument_by_its_name(factory, arguments, message):
    with pytest.raises(ValueError, match="^" + message):
        factory(**{"input_shape": (28, 28, 1), "num_classes": 10} | arguments)


@pytest.mark.slow
def test_mobilenet_divides_the_image_by_8_or_for_large_images_by_32():
    """And its width multiplies all channels, in multiples of 8."""
    sizes, widths = [], []
    for large in (False, True):
        model = mobilenet((32, 64, 3), 10, width=0.5, large_images=large)
        trees = jax.eval_shape(model.init, jax.random.key(0))
        jaxpr = jax.make_jaxpr(model.apply)(*trees, jnp.ones((2, 32, 64, 3)))
        inner = [eqn.outvars[0].aval.shape for eqn in jaxpr.eqns]
        sizes.append([shape for shape in inner if len(shape) == 4 and shape[3] == 288][-1])
        widths.append(trees[0]["head"]["weight"].shape)
    assert sizes == [(2, 4, 8, 288), (2, 1, 2, 288)] and widths == [(512, 10)] * 2


@pytest.mark.parametrize(
    "model, count",
    [
        (
            resnet(
                (224, 224, 3), 1000, (64, 128, 256, 512), depths=(2, 2, 2, 2), large_images=True
            ),
            11_689_512,
        ),
        (
            resnet(
                (224, 224, 3),
                1000,
                (64, 128, 256, 512),
                depths=(3, 4, 6, 3),
                large_images=True,
                bottleneck=True,
            ),
            25_557_032,
        ),
        (mobilenet((224, 224, 3), 1000, large_images=True), 2_542_856),
        (mobilenet((224, 224, 3), 1000, "large", large_images=True), 5_483_032),
        (mobilenet((32, 32, 3), 1000, "large"), 5_483_032),
        (vit((224, 224, 3), 1000, 16, 384, 12, 6, pool="token"), 22_050_664 - 12 * 384),
        (mixer((224, 224, 3), 1000, 16, 768, 12, 384, 3072), 59_880_472),
        (
            convnext(
                (224, 224, 3), 1000, (96, 192, 384, 768), depths=(3, 3, 9, 3), expansion=4, **TINY
            ),
            28_589_128,
        ),
    ],
)
def test_models_have_as_many_parameters_as_those_published(model, count):
    """Torchvision's and timm's resnet18, resnet50, vit_small_patch16_224 (without the biases of
    keys), mixer_b16_224, convnext_tiny, and torchvision's mobilenet_v3."""
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count
