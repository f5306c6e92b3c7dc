"""Losses of one example and their gradients against Optax and NumPy, also at extremes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from training.loss import binary_cross_entropy, cross_entropy, huber, mae, mse

DRAW = np.random.default_rng(0)
LOGITS, OTHER = DRAW.normal(size=(2, 7)).astype("float32") * 3
BITS = DRAW.integers(0, 2, 7).astype("float32")
SOFT = np.exp(OTHER) / np.exp(OTHER).sum()


def optax_smoothed(logits, label):
    return optax.softmax_cross_entropy(logits, optax.smooth_labels(jax.nn.one_hot(label, 7), 0.1))


@pytest.mark.parametrize(
    "ours, theirs, target",
    [
        (cross_entropy, optax.softmax_cross_entropy_with_integer_labels, np.int32(3)),
        (cross_entropy, optax.softmax_cross_entropy_with_integer_labels, np.uint8(6)),
        (cross_entropy, optax.softmax_cross_entropy, SOFT),
        (lambda x, y: cross_entropy(x, y, label_smoothing=0.1), optax_smoothed, np.int32(0)),
        (binary_cross_entropy, lambda x, y: optax.sigmoid_binary_cross_entropy(x, y).mean(), BITS),
        (binary_cross_entropy, lambda x, y: optax.sigmoid_binary_cross_entropy(x, y).mean(), SOFT),
        (mse, lambda x, y: optax.squared_error(x, y).mean(), OTHER),
        (mae, lambda x, y: jnp.abs(x - y).mean(), OTHER),
        (huber, lambda x, y: optax.huber_loss(x, y).mean(), OTHER),
        (
            lambda x, y: huber(x, y, delta=0.3),
            lambda x, y: optax.huber_loss(x, y, delta=0.3).mean(),
            OTHER,
        ),
    ],
)
def test_value_and_gradient_equal_optax(ours, theirs, target):
    value, gradient = jax.value_and_grad(ours)(LOGITS, target)
    expected, expected_gradient = jax.value_and_grad(theirs)(LOGITS, target)
    assert value.shape == () and value.dtype == jnp.float32
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-7)

    low = jnp.asarray(LOGITS, jnp.bfloat16)
    assert ours(low, target).dtype == jnp.float32
    np.testing.assert_allclose(
        ours(low, target), theirs(low.astype(jnp.float32), target), rtol=1e-6
    )
    with jax.enable_x64(True):
        assert ours(LOGITS.astype("float64"), target).dtype == jnp.float64


def test_the_loss_of_a_sequence_is_the_mean_over_its_positions():
    logits, labels = DRAW.normal(size=(5, 7)), DRAW.integers(0, 7, 5)
    expected = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), labels).mean()
    np.testing.assert_allclose(cross_entropy(logits, labels), expected, rtol=1e-6)


@pytest.mark.parametrize("label", [0, 1])
def test_extreme_logits_stay_finite(label):
    logits = jnp.array([1e4, -1e4])
    np.testing.assert_array_equal(cross_entropy(logits, jnp.int32(label)), 2e4 * label)
    np.testing.assert_array_equal(
        jax.grad(cross_entropy)(logits, jnp.int32(label)), [label, -label]
    )
    right, wrong = (
        binary_cross_entropy(jnp.float32(sign * 1e4), jnp.float32(label))
        for sign in (2 * label - 1, 1 - 2 * label)
    )
    assert (right, wrong) == (0, 1e4)
    assert jax.grad(binary_cross_entropy)(jnp.float32(1e4), jnp.float32(label)) == 1 - label


def test_binary_cross_entropy_keeps_the_tail_of_a_confident_output():
    expected = np.log1p(np.exp(-12.0))
    np.testing.assert_allclose(
        binary_cross_entropy(jnp.float32(12.0), jnp.float32(1.0)), expected, rtol=1e-5
    )


def test_a_class_masked_by_minus_infinity_adds_nothing_to_the_loss():
    logits = jnp.array([1.0, -jnp.inf, 2.0])
    value, gradient = jax.value_and_grad(cross_entropy)(logits, jnp.int32(0))
    np.testing.assert_allclose(value, np.log1p(np.exp(1.0)), rtol=1e-6)
    np.testing.assert_allclose(
        gradient, [-1 / (1 + np.exp(-1.0)), 0, 1 / (1 + np.exp(-1.0))], rtol=1e-6
    )


@pytest.mark.parametrize("label", [-1, 7, 255])
def test_a_label_outside_the_classes_gives_nan(label):
    assert jnp.isnan(cross_entropy(LOGITS, jnp.int32(label)))


@pytest.mark.parametrize("loss", [mse, mae, huber, binary_cross_entropy])
def test_shapes_must_agree(loss):
    with pytest.raises(ValueError, match=r"\(7,\).*\(\)"):
        loss(LOGITS, np.float32(1))


@pytest.mark.parametrize("label", [np.float32(3), np.zeros(6, "int32"), np.zeros((2, 7), "int8")])
def test_labels_must_be_classes_or_probabilities(label):
    with pytest.raises(ValueError, match=r"shape \(7,\).*" + label.dtype.name):
        cross_entropy(LOGITS, label)


def test_arguments_must_be_in_range():
    with pytest.raises(ValueError, match=r"^label_smoothing: .* got 1.0"):
        cross_entropy(LOGITS, np.int32(1), label_smoothing=1.0)
    for delta in (0, np.inf):  # an infinite one would give NaN
        with pytest.raises(ValueError, match=rf"^delta: .* got {delta}"):
            huber(LOGITS, OTHER, delta=delta)


def test_the_gradient_has_no_scatter():
    batched = jax.vmap(jax.grad(cross_entropy))
    assert "scatter" not in str(jax.make_jaxpr(batched)(jnp.zeros((4, 7)), jnp.zeros(4, jnp.int32)))
