"""gradient_spike_monitor: what a spike is, and that a resumed run leaves the same file."""

import json
import logging

import numpy as np
import pytest

from tests.runs import json_lines
from tests.training.watching.callbacks.fake import steps, view
from training.watching.callbacks.gradient_spike_monitor import gradient_spike_monitor

pytestmark = pytest.mark.contract


def started(**options):
    callback = gradient_spike_monitor(**options)
    callback.on_start(view())
    return callback


def lines(folder):
    path = folder / "gradient_spikes.jsonl"
    return json_lines(path) if path.exists() else []


def watch(callback, folder, norms, first=1, period=10, losses=None):
    """Show a callback the steps of a run, `period` of them at each log line."""
    for i in range(0, len(norms), period):
        part = slice(i, i + period)
        columns = steps(first + i, norms[part], None if losses is None else losses[part])
        callback.on_steps(view(folder=folder, per_step=columns))


def ordinary(count, seed=0):
    return np.random.default_rng(seed).uniform(0.8, 1.2, count)


def test_planted_spikes_are_found_and_nothing_else(tmp_path):
    norms, losses = ordinary(300), np.arange(300) / 100
    norms[[57, 58, 200]] = 7.0, 9.0, 3.7
    watch(started(), tmp_path, norms, losses=losses)
    spikes = lines(tmp_path)
    assert [spike["step"] for spike in spikes] == [58, 59, 201]  # the first step is step 1
    assert [spike["norm"] for spike in spikes] == [7.0, 9.0, 3.7]
    assert [spike["loss"] for spike in spikes] == [0.57, 0.58, 2.0]
    before = norms[:57].mean()  # the plain mean, while there are few steps
    assert spikes[0]["ema"] == pytest.approx(before)
    assert spikes[0]["ratio"] == pytest.approx(7.0 / before)
    # In the average, a spike has the length of the threshold.
    assert spikes[1]["ema"] == pytest.approx((57 * before + 3 * before) / 58)
    assert spikes[0].keys() == {"step", "epoch", "norm", "ema", "ratio", "loss"}


def test_the_average_is_an_exponential_one(tmp_path):
    norms = np.append(ordinary(400), 100.0)
    watch(started(ema_decay=0.9), tmp_path, norms)
    average = norms[:10].mean()
    for norm in norms[10:400]:
        average = 0.9 * average + 0.1 * norm
    assert lines(tmp_path)[-1]["ema"] == pytest.approx(average)


def test_a_norm_that_is_not_finite_is_a_spike_that_does_not_enter_the_average(tmp_path):
    norms = ordinary(100)
    norms[[3, 50, 51]] = np.nan, np.inf, 8.0
    watch(started(), tmp_path, norms, losses=np.where(np.isfinite(norms), 1.0, np.nan))
    spikes = lines(tmp_path)
    assert [spike["step"] for spike in spikes] == [4, 51, 52]  # even during the warmup
    assert (spikes[0]["norm"], spikes[0]["loss"]) == (None, None)
    assert spikes[2]["ema"] == pytest.approx(np.delete(norms, [3, 50])[:49].mean())


def test_the_warmup_reports_nothing(tmp_path):
    norms = np.ones(60)
    norms[[5, 9, 10]] = 50.0
    watch(started(warmup=10), tmp_path, norms)
    assert [spike["step"] for spike in lines(tmp_path)] == [11]


@pytest.mark.parametrize(("worst", "text"), [(8.0, "8"), (np.nan, "nan")])
def test_one_warning_per_log_line_names_the_worst_spike(tmp_path, caplog, worst, text):
    caplog.set_level(logging.WARNING, "main")
    norms = np.ones(40)
    norms[[31, 33, 35]] = 5.0, worst, 6.0
    watch(started(), tmp_path, norms, period=20)
    (record,) = caplog.records
    message = f"Epoch 2: gradient spikes: 3, the worst at step 34, with a norm of {text} where"
    assert message in record.getMessage()


@pytest.mark.parametrize("torn", ["", '{"step": 2'])
@pytest.mark.parametrize("kept", [30, 61, 100])
def test_a_resumed_run_leaves_the_same_file(tmp_path, kept, torn):
    norms = ordinary(150)
    norms[[25, 60, 61, 110, 120]] = 8.0
    (tmp_path / "whole").mkdir(), (tmp_path / "resumed").mkdir()
    whole, first, second = started(), started(), started()
    watch(whole, tmp_path / "whole", norms)
    watch(first, tmp_path / "resumed", norms[:kept])
    memory = json.dumps(first.memory)  # in the checkpoint; the run is killed later
    watch(first, tmp_path / "resumed", norms[kept:120], first=kept + 1)
    with open(tmp_path / "resumed/gradient_spikes.jsonl", "a") as file:
        file.write(torn)
    second.memory = json.loads(memory)
    watch(second, tmp_path / "resumed", norms[kept:], first=kept + 1)
    files = [tmp_path / name / "gradient_spikes.jsonl" for name in ("resumed", "whole")]
    assert files[0].read_text() == files[1].read_text()
    assert second.memory == whole.memory


def test_a_run_that_goes_back_replaces_the_lines_of_its_steps(tmp_path):
    norms = ordinary(100)
    norms[[40, 80]] = 8.0
    callback = started()
    watch(callback, tmp_path, norms[:50])
    memory = json.dumps(callback.memory)
    watch(callback, tmp_path, norms[50:], first=51)
    callback.memory = json.loads(memory)  # as a rollback does
    watch(callback, tmp_path, ordinary(50, seed=1), first=51)
    assert [spike["step"] for spike in lines(tmp_path)] == [41]


def test_without_a_folder_it_only_warns(caplog):
    watch(started(warmup=0), None, [1.0, 1.0, 5.0])
    assert len(caplog.records) == 1
