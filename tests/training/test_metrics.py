"""Metrics of one example, averaged over examples, against NumPy by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.mlp import mlp
from training.fit import fit
from training.loss import binary_cross_entropy
from training.metrics import (
    accuracy,
    binary_accuracy,
    f1,
    mae,
    perplexity,
    rmse,
    top_k_accuracy,
)
from training.optimizers import sgd
from utils import UserError

pytestmark = pytest.mark.contract

DRAW = np.random.default_rng(0)
LOGITS = DRAW.normal(size=(40, 6)).astype("float32")
LABELS = DRAW.integers(0, 6, 40)


def report(metric, outputs, targets, **args):
    """The mean over the examples, mapped by `finish` if the metric has it."""
    values = jax.vmap(lambda x, y: metric(x, y, **args))(outputs, targets)
    means = jax.tree.map(lambda v: v.mean(axis=0), values)
    return getattr(metric, "finish", lambda mean: mean)(means)


def macro_f1(predicted, labels):
    """By the definition: from precision and recall of each class that occurs, 0 if undefined."""
    scores = []
    for c in sorted({*predicted, *labels}):
        hits = np.sum((predicted == c) & (labels == c))
        precision = hits / max(np.sum(predicted == c), 1)
        recall = hits / max(np.sum(labels == c), 1)
        scores.append(2 * precision * recall / (precision + recall) if hits else 0.0)
    return np.mean(scores)


@pytest.mark.parametrize("logits", [[np.nan] * 3, [np.nan, 1, 2], [3, np.nan, 2]])
def test_nan_logits_are_never_right(logits):
    for sign in (1, -1):  # 0 / 0 is a NaN whose sign is negative
        given = np.copysign(np.float32(logits), sign)
        assert [accuracy(given, np.int32(label)) for label in range(3)] == [0, 0, 0]
        assert [top_k_accuracy(given, np.int32(label), k=2) for label in range(3)] == [0, 0, 0]
        for label in range(3):
            counts = f1(given, np.int32(label))
            assert not counts["tp"].any() and not counts["fp"].any()
            np.testing.assert_array_equal(counts["fn"], np.eye(3)[label])


@pytest.mark.slow
def test_accuracy():
    best = LOGITS.argmax(-1)
    assert report(accuracy, LOGITS, LABELS) == pytest.approx(np.mean(best == LABELS))
    soft = np.eye(6, dtype="float32")[LABELS] * 0.7 + 0.05
    assert report(accuracy, LOGITS, soft) == pytest.approx(np.mean(best == LABELS))
    assert report(accuracy, LOGITS.reshape(4, 10, 6), LABELS.reshape(4, 10)) == pytest.approx(
        np.mean(best == LABELS)
    )


@pytest.mark.parametrize("k", [1, 2, 5, 6])
def test_top_k_accuracy(k):
    best = np.argsort(-LOGITS, axis=-1)[:, :k]
    expected = np.mean([label in row for label, row in zip(LABELS, best, strict=True)])
    assert report(top_k_accuracy, LOGITS, LABELS, k=k) == pytest.approx(expected)


def test_top_k_accuracy_needs_k_classes():
    with pytest.raises(ValueError, match=r"^k: .* the 3 classes, got 5"):
        top_k_accuracy(jnp.zeros(3), jnp.int32(0))


@pytest.mark.slow
def test_binary_accuracy():
    """Of one logit or of several per example; neither NaN nor a label beside 0 and 1 is right."""
    labels = DRAW.integers(0, 2, (40, 6))
    hits = (1 / (1 + np.exp(-LOGITS)) > 0.5) == labels
    assert report(binary_accuracy, LOGITS, labels) == pytest.approx(hits.mean())
    assert report(binary_accuracy, LOGITS[:, :1], labels[:, 0]) == pytest.approx(hits[:, 0].mean())
    given = zip([np.nan, 1, -1, np.nan, 0, 0], [1, 2, -1, 0, 0, 1], strict=True)
    each = [binary_accuracy(np.float32(logit), np.float32(label)) for logit, label in given]
    assert each == [0, 0, 0, 0, 1, 0]
    known = np.where(DRAW.random((40, 6)) < 0.3, -1, labels)
    counted = jax.vmap(lambda x, y: binary_accuracy(x, y, ignore_label=-1))(LOGITS, known)
    mean = np.average(counted.value, weights=counted.weight)
    assert mean == pytest.approx(hits[known >= 0].mean())


@pytest.mark.slow
@pytest.mark.parametrize("metric", [accuracy, f1, partial(top_k_accuracy, k=1)])
def test_a_metric_of_classes_is_refused_for_independent_labels(metric):
    x, labels = LOGITS, DRAW.integers(0, 2, (40, 2)).astype("float32")
    settings = {"loss": binary_cross_entropy, "optimizer": sgd(lr=0.1), "epochs": 1}
    with pytest.raises(UserError, match=r"^metrics: mine is for one class .* use binary_accuracy"):
        fit(mlp((6,), 2, dims=(4,)), (x, labels), **settings, metrics={"mine": metric})
    run = fit(mlp((6,), 2, dims=(4,)), (x, labels), **settings, metrics=[binary_accuracy])
    assert 0 < run.history[-1]["train_binary_accuracy"] < 1


def test_rmse_and_mae():
    outputs, targets = DRAW.normal(size=(2, 20, 3)).astype("float32")
    assert report(rmse, outputs, targets) == pytest.approx(
        np.sqrt(np.mean((outputs - targets) ** 2)), rel=1e-6
    )
    assert report(mae, outputs, targets) == pytest.approx(
        np.mean(np.abs(outputs - targets)), rel=1e-6
    )


@pytest.mark.slow
def test_perplexity():
    chosen = np.exp(LOGITS)[np.arange(40), LABELS] / np.exp(LOGITS).sum(-1)
    assert report(perplexity, LOGITS, LABELS) == pytest.approx(
        np.exp(-np.log(chosen).mean()), rel=1e-5
    )
    assert report(perplexity, np.zeros((4, 9), "float32"), LABELS[:4]) == pytest.approx(9, rel=1e-6)


@pytest.mark.parametrize("predicted, labels", [(6, 6), (6, 2), (2, 6), (1, 1)])
def test_f1(predicted, labels):
    """With classes that are never predicted, that are no label, and that are neither."""
    outputs = np.where(np.arange(6) < predicted, LOGITS, -100).astype("float32")
    labels = LABELS % labels
    expected = macro_f1(outputs.argmax(-1), labels)
    assert report(f1, outputs, labels) == pytest.approx(expected, rel=1e-5)
    counts = {name: np.asarray(v).sum(0) for name, v in jax.vmap(f1)(outputs, labels).items()}
    assert f1.finish(counts) == pytest.approx(expected, rel=1e-5)  # sums give the same as means


@pytest.mark.slow
def test_f1_counts_labels_by_their_weights():
    weights = np.arange(40) % 3
    ours = f1(LOGITS, {"target": LABELS, "weight": weights.astype("float32")})
    repeated = f1(np.repeat(LOGITS, weights, axis=0), np.repeat(LABELS, weights))
    jax.tree.map(np.testing.assert_allclose, ours, repeated)


@pytest.mark.slow
def test_f1_without_a_hit_or_an_example_is_zero():
    assert report(f1, np.eye(3, dtype="float32"), np.array([1, 2, 0])) == 0
    assert f1.finish({name: np.zeros(3) for name in ("tp", "fp", "fn")}) == 0


def test_f1_finishes_each_replica_by_itself():
    counts = jax.vmap(f1)(LOGITS, LABELS)
    halves = jax.tree.map(lambda v: v.reshape(2, 20, 6).mean(1), counts)
    expected = [macro_f1(LOGITS[i].argmax(-1), LABELS[i]) for i in (slice(20), slice(20, 40))]
    np.testing.assert_allclose(f1.finish(halves), expected, rtol=1e-5)


@pytest.mark.parametrize("metric", [accuracy, f1, perplexity])
def test_metrics_of_bfloat16_outputs_are_float32(metric):
    for value in jax.tree.leaves(metric(jnp.asarray(LOGITS[0], jnp.bfloat16), LABELS[0])):
        assert value.dtype == jnp.float32


@pytest.mark.parametrize("metric", [accuracy, f1, rmse])
def test_shapes_that_do_not_fit_are_refused(metric):
    with pytest.raises(ValueError, match=r"\(6,\).*\(4,\)"):
        metric(LOGITS[0], np.zeros(4, "int32"))
