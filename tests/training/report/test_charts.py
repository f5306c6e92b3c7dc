"""The data of a report's charts."""

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
        "blocks/0/weight",
    ]
    train, test, within, *replicas = charts["loss"]["lines"]
    names = [line["names"] for line in charts["loss"]["lines"]]
    assert names == [["train"], ["test"], ["train"], ["test"], ["test"]]
    assert test["x"] == [0, 10, 20, 30, 40] and test["best"] == 30
    assert test["y"] == [2.5, *TESTS]
    np.testing.assert_allclose(train["y"], LOSSES, rtol=1e-6)
    assert [line["y"] for line in replicas] == [TESTS, [value + 1 for value in TESTS]]
    assert within["x"] == [3, 6, 13, 16, 23, 26, 33, 36]
    np.testing.assert_allclose(within["y"][:2], [LOSSES[0] * 4 / 3, LOSSES[0] * 7 / 6], rtol=1e-6)
    assert {line["style"] for line in (within, *replicas)} == {"fine"}
    rates = [0.001, 0.001, 0.002, 0.002, 0.003, 0.003, 0.004, 0.004]
    assert charts["learning rate"]["lines"][0]["y"] == rates


def test_waiting_is_drawn_only_if_there_was_any(tmp_path):
    for share, drawn in ((0.0, False), (0.3, True)):
        page = report(save(tmp_path / f"{drawn}", [row | {"waiting": share} for row in rows()]))
        assert ("share of time waiting" in page.charts()) == drawn
        assert f"waiting for data{100 * share:.0f}%" in page.texts("dl", class_="strip")[0]


def test_null_is_a_gap(tmp_path):
    values = [0.5, 0.25, None, 0.125, 0.0625]
    lines = [
        {"epoch": e, "step": e, "train_loss": None, "test_loss": value, "end_of_epoch": True}
        for e, value in enumerate(values, 1)
    ]
    [line] = report(save(tmp_path / "run", lines)).charts()["loss"]["lines"][1:]
    assert line["names"] == ["test"] and line["y"] == values


def test_long_runs_are_thinned_but_keep_their_spikes(tmp_path):
    def lines():
        for step in range(1, 20_001):
            loss = 99.5 if step == 7777 else 1 / step
            yield {"epoch": 1, "step": step, "each_step": True, "train_loss": loss}
        yield {"epoch": 1, "step": 20_000, "train_loss": 0.5, "end_of_epoch": True}

    page = report(save(tmp_path / "run", lines()))
    assert len(page.source) < 200_000
    fine = max(page.charts()["loss"]["lines"], key=lambda line: len(line["x"]))
    assert len(fine["x"]) <= 1500
    assert fine["y"][fine["x"].index(7777)] == 99.5
    assert fine["x"][0] == 1 and fine["x"][-1] == 20_000
