"""The charts of a report: their data, and what their SVG shows."""

import math
import re

import numpy as np
import pytest

from tests.training.report.saved_run import LOSSES, TESTS, report, rows, save

pytestmark = pytest.mark.contract


def test_charts_hold_every_value(tmp_path):
    charts = report(save(tmp_path / "run")).charts()
    assert list(charts) == [
        "loss",
        "accuracy",
        "learning rate",
        "examples per second",
        "share of time waiting",
    ]
    loss = {(line["label"], len(line["x"])): line for line in charts["loss"]["lines"]}
    assert loss["test", 5]["x"] == [0, 10, 20, 30, 40]
    assert loss["test", 5]["y"] == [2.5, *TESTS]
    np.testing.assert_allclose(loss["train", 4]["y"], LOSSES, rtol=1e-6)
    within = loss["train", 8]
    assert within["x"] == [3, 6, 13, 16, 23, 26, 33, 36]
    np.testing.assert_allclose(within["y"][:2], [LOSSES[0] * 4 / 3, LOSSES[0] * 7 / 6], rtol=1e-6)
    assert len(loss) == 3  # the lines of replicas are drawn, but have no tooltip
    rates = [0.001, 0.001, 0.002, 0.002, 0.003, 0.003, 0.004, 0.004]
    assert charts["learning rate"]["lines"][0]["y"] == rates


def test_waiting_is_drawn_only_if_there_was_any(tmp_path):
    for share, drawn in ((0.0, False), (0.3, True)):
        page = report(save(tmp_path / f"{drawn}", [row | {"waiting": share} for row in rows()]))
        assert ("share of time waiting" in page.charts()) == drawn
        assert f"waiting for data{100 * share:.0f}%" in page.texts("dl", class_="strip")[0]


@pytest.mark.parametrize("kind", ["linear", "log"])
def test_curves_are_drawn_to_the_scale_beside_them(tmp_path, kind):
    """Values that are read back from the picture with its axes are those of the run."""
    source = report(save(tmp_path / "run")).source
    source = source[source.index(f'<div class="plot {kind}">') :]
    labels = re.findall(r'<span style="bottom:([\d.]+)%">([^<]+)</span>', source)[:2]
    (low, first), (high, second) = [(float(share), float(name)) for share, name in labels]
    below = re.search(
        r'<span style="left:([\d.]+)%"><span>(\d+)</span><small>(\d+)</small>', source
    )
    share, epoch, step = map(float, below.groups())
    assert (share, epoch, step) == (25, 1, 10)  # of four epochs
    line = re.search(r'<g style="--c:var\(--c0\)"[^>]*><path class="line" d="([^"]+)">', source)[1]
    points = [tuple(map(int, point)) for point in re.findall(r"[ML](-?\d+) (-?\d+)", line)]
    scale, unscale = (math.log, math.exp) if kind == "log" else (float, float)
    per_percent = (scale(second) - scale(first)) / (high - low)
    values = [unscale((100 - y / 10 - low) * per_percent + scale(first)) for _, y in points]
    np.testing.assert_allclose(values, [2.5, *TESTS], rtol=0.02)
    steps = [x / 20 / share * step for x, _ in points]
    np.testing.assert_allclose(steps, [0, 10, 20, 30, 40], atol=0.1)


def test_null_is_a_gap(tmp_path):
    values = [0.5, 0.25, None, 0.125, 0.0625]
    lines = [
        {"epoch": e, "step": e, "train_loss": None, "test_loss": value, "end_of_epoch": True}
        for e, value in enumerate(values, 1)
    ]
    page = report(save(tmp_path / "run", lines))
    line = next(line for line in page.charts()["loss"]["lines"] if line["label"] == "test")
    assert line["y"] == values
    linear = page.source.split('<div class="plot log">')[0]
    drawn = re.findall(r'class="line" d="([^"]+)"', linear)[-1]
    assert re.fullmatch(r"M\d+ \d+L\d+ \d+M\d+ \d+L\d+ \d+", drawn)


def test_long_runs_are_thinned_but_keep_their_spikes(tmp_path):
    def lines():
        for step in range(1, 20_001):
            loss = 99.5 if step == 7777 else 1 / step
            yield {"epoch": 1, "step": step, "each_step": True, "train_loss": loss}
        yield {"epoch": 1, "step": 20_000, "train_loss": 0.5, "end_of_epoch": True}

    page = report(save(tmp_path / "run", lines()))
    assert len(page.source) < 200_000
    fine = max(page.charts()["loss"]["lines"], key=lambda line: len(line["x"]))
    assert len(fine["x"]) <= 800
    assert fine["y"][fine["x"].index(7777)] == 99.5
    assert fine["x"][0] == 1 and fine["x"][-1] == 20_000
