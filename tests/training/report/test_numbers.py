"""The text of numbers, the ticks of axes, and the thinning of curves."""

import math

import numpy as np
import pytest

from training.report.numbers import duration, log_ticks, plain, short, thinned, tick_labels, ticks


def test_numbers_are_short_and_readable():
    values = (0.96123, 24900.4, 3e-5, -0.0, 12.345, 5, math.nan)
    assert [plain(v) for v in values] == [
        *("0.9612", "24,900", "3e-05", "0", "12.35", "5", "\N{EM DASH}")
    ]
    seconds = (22.94, 200, 8040, 100_000)
    assert list(map(duration, seconds)) == ["22.9 s", "3 min 20 s", "2 h 14 min", "1 d 3 h"]
    assert [short(n) for n in (1080, 12_500, 1_000_000, 3e9)] == ["1,080", "12.5k", "1M", "3G"]


def test_ticks_are_round_numbers():
    assert ticks(0.03, 0.97) == [0.2, 0.4, 0.6000000000000001, 0.8]
    assert log_ticks(0.02, 3) == pytest.approx([0.03, 0.1, 0.3, 1.0, 3.0])


def test_thinning_keeps_extremes_ends_and_gaps():
    rng = np.random.default_rng(0)
    for size in (5, 100, 5000):
        values = rng.standard_normal(size)
        values[rng.integers(size, size=size // 50)] = np.nan
        steps, kept = thinned(np.arange(size), values, 90)
        assert len(steps) <= max(90, 5)
        assert (np.diff(steps) > 0).all()
        extremes = {int(np.nanargmax(values)), int(np.nanargmin(values))}
        assert {0, size - 1} | extremes <= set(steps.tolist())
        np.testing.assert_array_equal(kept, values[steps])
        assert np.isnan(kept).any() == np.isnan(values).any()


@pytest.mark.parametrize(
    ("low", "high"),
    [(24850, 24950), (1.2e7, 1.21e7), (1.20e-4, 1.23e-4), (0, 1e-5), (0, 3e8), (3, 9e4), (-2, 2)],
)
def test_neighbouring_ticks_have_different_labels_which_are_their_values(low, high):
    values = ticks(low, high)
    labels = tick_labels(values)
    assert len(set(labels)) == len(values) > 1
    read = [float(label.replace(",", "").replace("k", "e3")) for label in labels]
    np.testing.assert_allclose(read, values, rtol=1e-9, atol=1e-12)
