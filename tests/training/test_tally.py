"""The tallies on the device: every mode against NumPy over the genuine examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from training import tally
from training.base import Weighted, tracked
from training.metrics import MetricPlan, phase_of
from training.run import Reader

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


def tallied(mode, batches, values, rows=64):
    """The result of one jitted pass over the batches, as in an evaluation."""
    tree = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), values[0])
    seen = tally.empty({"x": mode}, {"x": tree}, rows)
    step = jax.jit(
        lambda seen, x, n: tally.merged(seen, tally.of_batch(seen, {"x": x}, jnp.arange(5) < n))
    )
    for (_, valid), batch in zip(batches, values, strict=True):
        seen = step(seen, batch, valid)
    return tally.results(jax.device_get(seen))[0]["x"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_every_mode_covers_exactly_the_genuine_examples(mode, shape):
    values = [RNG.normal(7, 2, (rows, *shape)).astype(np.float32) for rows, _ in BATCHES]
    genuine = [v[:valid] for v, (_, valid) in zip(values, BATCHES, strict=True)]
    result = tallied(mode, BATCHES, values)
    np.testing.assert_allclose(result, EXPECTED[mode](genuine), rtol=1e-5)
    if mode != "CONCAT":
        assert np.shape(result) == shape


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_are_not_genuine_may_be_nan(mode):
    values = [
        np.where(np.arange(5) < valid, np.arange(5) + 1.0, np.nan).astype(np.float32)
        for _, valid in BATCHES
    ]
    assert np.isfinite(tallied(mode, BATCHES, values)).all()


@pytest.mark.parametrize("mode", ["MEAN", "STD", "CONCAT"])
def test_a_metric_may_be_a_dict(mode):
    values = [{"a": v, "b": {"c": 2 * v}} for v in RNG.normal(size=(5, 5)).astype(np.float32)]
    result = tallied(mode, [(5, 5)] * 5, values)
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
    np.testing.assert_allclose(tallied(mode, batches, given), EXPECTED[mode](rows), rtol=1e-5)


def test_weights_that_sum_to_less_than_one_and_terms_with_their_own():
    value, other = RNG.normal(size=(2, 5)).astype(np.float32)
    weight = np.float32([0.1, 0, 0.05, 0.2, 0])
    given = {"a": Weighted(value, weight), "b": other}
    result = tallied("MEAN", [(5, 5)], [given])
    np.testing.assert_allclose(result["a"], np.average(value, weights=weight), rtol=1e-6)
    np.testing.assert_allclose(result["b"], other.mean(), rtol=1e-6)
    assert np.isnan(tallied("MEAN", [(5, 5)], [Weighted(value, 0 * weight)]))


@pytest.mark.parametrize("loop", ["calls", "compiled"])
def test_a_mean_over_very_many_batches_keeps_its_digits(loop):
    """As of a long epoch of tokens: the weights add up to far more than 2**24, from where float32
    does not count single ones. 2.3 and 0.1 are no sums of powers of 2."""
    batches, rows = (200_000, 8) if loop == "compiled" else (3000, 8 * 67)
    values = {
        "tokens": Weighted(jnp.full(rows, 2.3), jnp.full(rows, 1023.0)),
        "plain": {"a": jnp.full(rows, 0.1)},
        "infinite": jnp.full(rows, jnp.inf),
    }
    shapes = jax.eval_shape(lambda: values)
    seen = tally.empty(dict.fromkeys(values, "MEAN"), shapes)

    def step(_, seen):
        return tally.merged(seen, tally.of_batch(seen, values, jnp.ones(rows, bool)))

    if loop == "compiled":
        seen = jax.jit(lambda seen: jax.lax.fori_loop(0, batches, step, seen))(seen)
    else:
        step = jax.jit(step)
        for i in range(batches):
            seen = step(i, seen)
    means = tally.results(jax.device_get(seen))[0]
    np.testing.assert_allclose(means["tokens"], 2.3, rtol=2e-7)
    np.testing.assert_allclose(means["plain"]["a"], 0.1, rtol=2e-7)
    assert means["infinite"] == np.inf


def test_the_deviation_of_large_values_keeps_its_digits():
    # In float32, the sum of squares of these values has no digit left for the deviation.
    values = [(1e4 + RNG.normal(size=5)).astype(np.float32) for _ in range(40)]
    expected = np.concatenate(values).astype(np.float64).std()
    assert abs(tallied("STD", [(5, 5)] * 40, values) - expected) < 1e-3 * expected


@pytest.mark.parametrize("mode", [m for m in MODES if m != "CONCAT"])
def test_without_examples_the_result_is_nan(mode):
    assert np.isnan(tallied(mode, [(5, 0)], [np.ones(5, np.float32)]))


def test_integers_are_not_rounded_to_float32():
    values = [np.full(5, 2**24, np.int32)]
    assert tallied("MAX", [(5, 5)], values) == 2**24
    # A float32 would lose the 5.
    assert tallied("SUM", [(5, 5)] * 2, [values[0] + 1, values[0]]) == 10 * 2**24 + 5
    assert tallied("CONCAT", [(5, 4)], values).dtype == np.int32


def test_concat_may_fill_its_buffer_to_the_last_row():
    values = [np.arange(5, dtype=np.int32) + 5 * i for i in range(4)]
    result = tallied("CONCAT", [(5, 5)] * 4, values, rows=25)  # (steps + 1) * rows
    np.testing.assert_array_equal(result, np.arange(20))


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
    tallies = [
        {"examples": np.int32(4), "values": {"loss": {"MEAN": np.float32(4 * x)}}}
        for x in (1.0, 3.0)
    ]
    expected = {"val_loss": 2.0, "val_loss/0": 1.0, "val_loss/1": 3.0}
    assert Reader().values("val", tallies) == expected


def test_norms_of_half_precision_are_computed_in_float32():
    leaf = jnp.asarray(RNG.normal(size=999), jnp.bfloat16)
    expected = np.linalg.norm(np.asarray(leaf, np.float64))
    norm = tally.norms_of({"w": leaf}, {"w": leaf})("gradient_norm")
    np.testing.assert_allclose(norm, expected, rtol=1e-5)
