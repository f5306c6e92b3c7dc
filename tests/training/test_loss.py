"""Losses of one example and their gradients against Optax and NumPy, also at extremes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.model.compare import normal
from training.loss import averaged, binary_cross_entropy, cross_entropy, huber, mae, mse
from training.metrics import accuracy, f1, perplexity

pytestmark = pytest.mark.contract

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


@pytest.mark.slow
def test_the_loss_of_a_sequence_is_the_mean_over_its_positions():
    logits, labels = DRAW.normal(size=(5, 7)), DRAW.integers(0, 7, 5)
    expected = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), labels).mean()
    np.testing.assert_allclose(cross_entropy(logits, labels), expected, rtol=1e-6)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "classes"), [(np.uint8, 300), (np.int8, 300), (np.int16, 66000)])
def test_a_narrow_integer_is_the_label_of_one_class(dtype, classes):
    logits = normal(0, classes)
    value, gradient = jax.value_and_grad(cross_entropy)(logits, dtype(5))
    wide = logits.astype(np.float64)
    shares = np.exp(wide) / np.exp(wide).sum()
    np.testing.assert_allclose(value, -np.log(shares[5]), rtol=1e-6)
    np.testing.assert_allclose(gradient, shares - np.eye(1, classes, 5)[0], atol=1e-7)
    if dtype != np.uint8:
        assert jnp.isnan(cross_entropy(logits, dtype(-1)))


@pytest.mark.parametrize("label", [-1, 2, 1.5])
def test_a_label_that_is_no_probability_gives_nan(label):
    assert jnp.isnan(binary_cross_entropy(jnp.float32(1), jnp.float32(label)))
    assert binary_cross_entropy(jnp.float32(1), label, ignore_label=label) == (0, 0)


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
    for delta, shown in ((0, "0"), (np.inf, "Infinity")):  # an infinite one would give NaN
        with pytest.raises(ValueError, match=rf"^delta: .* got {shown}"):
            huber(LOGITS, OTHER, delta=delta)


LENGTHS = np.arange(5) < 3  # of five positions, the last two are padding
WEIGHTS = np.array([1.0, 0.5, 0.0, 2.0, 0.0], "float32")
ROWS = DRAW.normal(size=(5, 7)).astype("float32")
CLASSES = DRAW.integers(0, 7, 5).astype("int32")
NUMBERS = DRAW.normal(size=(5, 7)).astype("float32")
BINARY = "binary_cross_entropy_with_logits"  # of PyTorch


def optax_masked(elements, weights):
    """The masked mean of Optax's losses of elements."""
    return lambda x, y: jnp.average(elements(x, y), weights=weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ours, elements, outputs, clean, bad, weights",
    [
        (
            partial(cross_entropy, ignore_label=-100),
            optax.softmax_cross_entropy_with_integer_labels,
            ROWS, CLASSES, np.where(LENGTHS, CLASSES, -100), LENGTHS,
        ),
        (
            cross_entropy,
            optax.softmax_cross_entropy_with_integer_labels,
            ROWS, CLASSES, np.where(WEIGHTS > 0, CLASSES, 999), WEIGHTS,
        ),
        (
            partial(cross_entropy, label_smoothing=0.2, ignore_label=0),
            lambda x, y: optax.softmax_cross_entropy(
                x, optax.smooth_labels(jax.nn.one_hot(y, 7), 0.2)
            ),
            ROWS, CLASSES, CLASSES, CLASSES != 0,
        ),
        (
            partial(binary_cross_entropy, ignore_label=-1),
            optax.sigmoid_binary_cross_entropy,
            LOGITS, BITS, np.where(np.arange(7) % 3, BITS, -1), np.arange(7) % 3 > 0,
        ),
        (
            mse,
            lambda x, y: optax.squared_error(x, y).mean(-1),
            ROWS, NUMBERS, np.where(WEIGHTS[:, None] > 0, NUMBERS, np.nan), WEIGHTS,
        ),
        (huber, lambda x, y: optax.huber_loss(x, y), LOGITS, OTHER, OTHER, BITS),
    ],
)  # fmt: skip
def test_elements_count_by_their_weights(ours, elements, outputs, clean, bad, weights):
    """Against Optax's losses under a mask; what does not count may be anything, even NaN."""
    ignores = isinstance(ours, partial) and "ignore_label" in ours.keywords
    target = bad if ignores else {"target": bad, "weight": weights}
    expected = jax.value_and_grad(optax_masked(elements, weights))(outputs, clean)
    value, gradient = jax.value_and_grad(lambda x: ours(x, target).value)(outputs)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-5, atol=1e-7)
    per_row = 7 if ours is mse else 1  # one weight for each row of seven elements
    assert ours(outputs, target).weight == per_row * np.sum(weights)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("ours", "name", "target", "ignored"),
    [
        (partial(cross_entropy, ignore_label=-1), "cross_entropy", CLASSES, -1),
        (partial(binary_cross_entropy, ignore_label=-1), BINARY, NUMBERS > 0, -1.0),
        (partial(perplexity, ignore_label=-1), "cross_entropy", CLASSES, -1),
        (cross_entropy, "cross_entropy", CLASSES, None),
        (mse, "mse_loss", NUMBERS, None),
        (mae, "l1_loss", NUMBERS, None),
        (huber, "huber_loss", NUMBERS, None),
    ],
)
def test_the_output_of_what_does_not_count_may_be_anything(ours, name, target, ignored, bad):
    """Against PyTorch's losses of the first three rows, which count alone."""
    torch = pytest.importorskip("torch")
    outputs, kept = np.where(LENGTHS[:, None], ROWS, bad), torch.tensor(ROWS[:3])
    kept.requires_grad = True
    numbers = target.astype(np.float32 if target.ndim > 1 else np.int64)
    expected = getattr(torch.nn.functional, name)(kept, torch.tensor(numbers[:3]))
    expected.backward()
    if ignored is None:
        given = {"target": numbers, "weight": LENGTHS}
    else:
        given = np.where(LENGTHS.reshape(-1, *[1] * (target.ndim - 1)), numbers, ignored)
    value, gradient = jax.value_and_grad(lambda x: ours(x, given).value)(outputs)
    np.testing.assert_allclose(value, expected.detach(), rtol=1e-6)
    np.testing.assert_allclose(gradient[:3], kept.grad, rtol=1e-5, atol=1e-7)
    assert not gradient[3:].any()


def test_a_value_of_weight_0_may_be_nan_in_a_loss_of_ones_own():
    values = jnp.where(LENGTHS, ROWS[:, 0], jnp.nan)
    assert averaged(values, jnp.float32(LENGTHS)).value == pytest.approx(ROWS[:3, 0].mean())


@pytest.mark.parametrize("ours", [cross_entropy, accuracy, f1])
def test_a_negative_weight_gives_nan_and_no_impossible_metric(ours):
    values = ours(ROWS, {"target": CLASSES, "weight": np.float32([1, 1, 1, 1, -0.5])})
    finish = getattr(ours, "finish", lambda value: value.value)
    assert np.isnan(finish(values))


def test_an_example_in_which_nothing_counts_has_weight_0_and_no_gradient():
    loss = partial(cross_entropy, ignore_label=-1)
    nothing = np.full(5, -1)
    assert loss(ROWS, nothing) == (0, 0)
    assert not jax.grad(lambda x: loss(x, nothing).value)(ROWS).any()


@pytest.mark.parametrize(
    ("loss", "target", "message"),
    [
        (
            cross_entropy,
            {"label": CLASSES, "weight": LENGTHS},
            "'target' and 'weight', got",
        ),
        (cross_entropy, {"target": CLASSES, "weight": np.ones(4)}, r"weights .* \(4,\)"),
        (
            lambda _, y: cross_entropy(np.ones((5, 1)), y),
            CLASSES,
            r"\(5, 1\); its last axis must",
        ),
        (
            lambda _, y: accuracy(np.ones(1), y),
            0,
            r"\(1,\); its last axis must be two classes or more",
        ),
        (lambda _, y: cross_entropy(np.float32(1), y), 0, r"\(\); its last axis must be two"),
        (mse, {"target": NUMBERS, "weight": np.ones(7)}, "one weight for each element"),
        (partial(cross_entropy, ignore_label=0), SOFT, "^ignore_label: .*probabilities"),
    ],
)
def test_outputs_and_weights_that_do_not_fit_are_refused(loss, target, message):
    with pytest.raises(ValueError, match=message):
        loss(LOGITS if target is SOFT else ROWS, target)


def test_the_gradient_has_no_scatter():
    batched = jax.vmap(jax.grad(cross_entropy))
    assert "scatter" not in str(jax.make_jaxpr(batched)(jnp.zeros((4, 7)), jnp.zeros(4, jnp.int32)))
