"""Rows and their sums: every mode against NumPy over the genuine examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from training.base import Weighted, tracked
from training.metrics import MetricPlan, phase_of
from training.rows import Sums, norms_of, row_of_batch
from training.run import Reader
from utils import named_leaves

RNG = np.random.default_rng(0)
BATCHES = [(5, 5), (5, 3), (5, 0), (5, 1), (5, 4)]  # rows, and how many of them are genuine
MODES = ("MEAN", "SUM", "SINGLE", "MAX", "MIN", "STD", "CONCAT")
EXPECTED = {
    "MEAN": lambda rows: np.concatenate(rows).mean(0),
    "SUM": lambda rows: np.concatenate(rows).sum(0),
    "SINGLE": lambda rows: [r for r in rows if len(r)][-1].mean(0),
    "MAX": lambda rows: np.concatenate(rows).max(0),
    "MIN": lambda rows: np.concatenate(rows).min(0),
    "STD": lambda rows: np.concatenate(rows).std(0),
    "CONCAT": lambda rows: np.concatenate(rows),
}


def rows_of(mode, batches, values):
    """The row of each batch, as a compiled program makes it."""
    row = jax.jit(lambda x, n: row_of_batch({"x": mode}, {"x": x}, jnp.arange(5) < n))
    return [jax.device_get(row(x, n)) for (_, n), x in zip(batches, values, strict=True)]


def summed(mode, rows, cuts=()):
    """The Sums of rows that are added in several chunks."""
    sums = Sums({"x": mode}, rows[0])
    for begin, end in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        sums.add(jax.tree.map(lambda *a: np.stack(a), *rows[begin:end]))
    return sums


def result_of(mode, batches, values):
    """The result of one pass over the batches, as in an evaluation."""
    return summed(mode, rows_of(mode, batches, values)).results()[0]["x"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_every_mode_covers_exactly_the_genuine_examples(mode, shape):
    values = [RNG.normal(7, 2, (rows, *shape)).astype(np.float32) for rows, _ in BATCHES]
    genuine = [v[:valid] for v, (_, valid) in zip(values, BATCHES, strict=True)]
    result = result_of(mode, BATCHES, values)
    np.testing.assert_allclose(result, EXPECTED[mode](genuine), rtol=1e-5)
    if mode != "CONCAT":
        assert np.shape(result) == shape


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_are_not_genuine_may_be_nan(mode):
    values = [
        np.where(np.arange(5) < valid, np.arange(5) + 1.0, np.nan).astype(np.float32)
        for _, valid in BATCHES
    ]
    assert np.isfinite(result_of(mode, BATCHES, values)).all()


@pytest.mark.parametrize("mode", ["MEAN", "STD", "CONCAT"])
def test_a_metric_may_be_a_dict(mode):
    values = [{"a": v, "b": {"c": 2 * v}} for v in RNG.normal(size=(5, 5)).astype(np.float32)]
    result = result_of(mode, [(5, 5)] * 5, values)
    for name, leaf in (("a", result["a"]), ("c", result["b"]["c"])):
        rows = [v["a"] if name == "a" else v["b"]["c"] for v in values]
        np.testing.assert_allclose(leaf, EXPECTED[mode](rows), rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_weighted_values(mode):
    """Each example as often as its weight says; weight 0 counts for nothing, whatever its value."""
    counts = [np.array([2, 0, 1, 3, 1]), np.array([0, 4, 0, 1, 9]), np.array([0, 0, 7, 0, 0])]
    batches = [(5, 5), (5, 4), (5, 2)]  # the 9 and the 7 are not genuine
    values = [RNG.normal(7, 2, 5).astype(np.float32) for _ in batches]
    rows = [np.repeat(v[:n], c[:n]) for v, c, (_, n) in zip(values, counts, batches, strict=True)]
    given = [Weighted(v, c.astype(np.float32)) for v, c in zip(values, counts, strict=True)]
    if mode == "CONCAT":
        rows = [v[:n] for v, (_, n) in zip(values, batches, strict=True)]
    np.testing.assert_allclose(result_of(mode, batches, given), EXPECTED[mode](rows), rtol=1e-5)


def test_weights_that_sum_to_less_than_one_and_terms_with_their_own():
    value, other = RNG.normal(size=(2, 5)).astype(np.float32)
    weight = np.float32([0.1, 0, 0.05, 0.2, 0])
    given = {"a": Weighted(value, weight), "b": other}
    result = result_of("MEAN", [(5, 5)], [given])
    np.testing.assert_allclose(result["a"], np.average(value, weights=weight), rtol=1e-6)
    np.testing.assert_allclose(result["b"], other.mean(), rtol=1e-6)
    assert np.isnan(result_of("MEAN", [(5, 5)], [Weighted(value, 0 * weight)]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weighted", [False, True])
def test_no_bit_depends_on_where_chunks_end(mode, weighted):
    batches = [(5, int(n)) for n in RNG.integers(0, 6, 30)]
    values = RNG.normal(size=(30, 5, 3) if not weighted else (30, 5)).astype(np.float32)
    if weighted:
        values = [Weighted(v, RNG.random(5).astype(np.float32)) for v in values]
    rows = rows_of(mode, batches, list(values))
    expected = summed(mode, rows).tree()
    for _ in range(5):
        cuts = sorted({*RNG.integers(1, 30, 6).tolist()})
        jax.tree.map(np.testing.assert_array_equal, summed(mode, rows, cuts).tree(), expected)


@pytest.mark.parametrize("mode", MODES)
def test_sums_continue_from_a_checkpoint(mode):
    rows = rows_of(mode, BATCHES, RNG.normal(size=(5, 5)).astype(np.float32))
    later = Sums({"x": mode}, rows[0])
    assert later.take(named_leaves(summed(mode, rows[:3]).tree())) == (True, True)
    later.add(jax.tree.map(lambda *a: np.stack(a), *rows[3:]))
    jax.tree.map(np.testing.assert_array_equal, later.tree(), summed(mode, rows).tree())


def test_a_mean_over_very_many_batches_keeps_its_digits():
    """As of a long epoch of tokens: the weights add up to far more than 2**24, from where float32
    does not count single ones. 2.3 and 0.1 are no sums of powers of 2."""
    values = {
        "tokens": Weighted(jnp.full(8, 2.3), jnp.full(8, 1023.0)),
        "plain": {"a": jnp.full(8, 0.1)},
        "infinite": jnp.full(8, jnp.inf),
    }
    modes = dict.fromkeys(values, "MEAN")
    row = jax.device_get(row_of_batch(modes, values, jnp.ones(8, bool)))
    sums = Sums(modes, row)
    for _ in range(200):
        sums.add(jax.tree.map(lambda a: np.stack([a] * 1000), row))
    means = sums.results()[0]
    np.testing.assert_allclose(means["tokens"], 2.3, rtol=1e-7)
    np.testing.assert_allclose(means["plain"]["a"], 0.1, rtol=1e-7)
    assert means["infinite"] == np.inf


@pytest.mark.parametrize("mode", [m for m in MODES if m != "CONCAT"])
def test_without_examples_the_result_is_nan(mode):
    assert np.isnan(result_of(mode, [(5, 0)], [np.ones(5, np.float32)]))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            {"mode": "mean"},
            'mode: found "mean"; allowed: "MEAN", "SUM", "SINGLE", "MAX", "MIN", "STD", "CONCAT"',
        ),
        ({"freq": "HOUR"}, 'freq: found "HOUR"; allowed: "STEP", "EPOCH", "ANY"'),
        ({"phase": "DEV"}, 'phase: found "DEV"; allowed: "TRAIN", "VAL", "TEST", "EVAL", "ANY"'),
        ({"freq": "STEP", "phase": "EVAL"}, "EVAL would never be measured"),
        ({"freq": "STEP", "mode": "CONCAT"}, "CONCAT gathers a whole epoch"),
    ],
)
def test_an_invalid_rule_is_an_error(rule, message):
    with pytest.raises(ValueError, match=message):
        tracked(abs, **rule)


@pytest.mark.parametrize(
    ("phase", "sets"),
    [
        ("ANY", "train val odd-ones test"),
        ("EVAL", "val odd-ones test"),
        ("VAL", "val odd-ones"),
        ("TEST", "test"),
        ("TRAIN", "train"),
    ],
)
def test_a_phase_selects_the_sets_that_are_measured(phase, sets):
    metric_plan = MetricPlan({"x": tracked(abs, phase=phase)})
    measured = [
        name
        for name in ("train", "val", "odd-ones", "test")
        if metric_plan.modes(["x"], phase_of(name), "EPOCH")
    ]
    assert " ".join(measured) == sets


def test_values_of_replicas_are_averaged_and_also_reported_separately():
    row = {"examples": np.int32([4]), "values": {"loss": np.float32([1])}}
    sums = [Sums({"loss": "MEAN"}, jax.tree.map(lambda a: a[0], row)) for _ in range(2)]
    for each, total in zip(sums, (4, 12), strict=True):
        each.add(row | {"values": {"loss": np.float32([total])}})
    expected = {"val_loss": 2.0, "val_loss/0": 1.0, "val_loss/1": 3.0}
    assert Reader().values("val", sums) == expected


def test_norms_of_half_precision_are_computed_in_float32():
    leaf = jnp.asarray(RNG.normal(size=999), jnp.bfloat16)
    expected = np.linalg.norm(np.asarray(leaf, np.float64))
    norm = norms_of(["gradient_norm"], {"w": leaf}, {"w": leaf})["gradient_norm"]
    np.testing.assert_allclose(norm, expected, rtol=1e-5)
