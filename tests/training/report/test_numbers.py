"""The text of numbers, and the thinning of curves."""

import math

import numpy as np

from training.report.curves import thinned
from training.report.markup import duration, plain


def test_numbers_are_short_and_readable():
    values = (0.96123, 24900.4, 3e-5, -0.0, 12.345, 5, math.nan)
    assert [plain(v) for v in values] == [
        *("0.9612", "24,900", "3e-05", "0", "12.35", "5", "\N{EM DASH}")
    ]
    seconds = (22.94, 200, 8040, 100_000)
    assert list(map(duration, seconds)) == ["22.9 s", "3 min 20 s", "2 h 14 min", "1 d 3 h"]


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
