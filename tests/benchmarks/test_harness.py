"""Workers and turns, on which all comparisons depend, and the file of the results."""

import shutil

import pytest

from benchmarks import results
from benchmarks.harness import Run, Worker, WorkerError, in_process


def test_a_worker_calls_methods_and_what_it_prints_does_not_matter():
    worker = Worker("collections:Counter", "abba")
    assert worker.made == {"a": 2, "b": 2}
    assert worker.call("total") == 4
    worker.close()
    assert worker.process.returncode == 0
    assert in_process("builtins:print", "something") is None
    assert in_process("operator:add", [1], [2.5]) == [1, 2.5]


def test_an_error_in_a_worker_is_raised_with_its_message():
    with pytest.raises(WorkerError, match="ModuleNotFoundError: No module named 'absent'"):
        Worker("absent:function")
    worker = Worker("collections:Counter", "ab")
    with pytest.raises(WorkerError, match="pop expected"):
        worker.call("pop")


@pytest.mark.parametrize(
    ("value", "cells"),
    [
        (None, ["at most 2", "-", "not measured"]),
        (2.0, ["at most 2", "2", "yes"]),
        (3.0, ["at most 2", "3", "**no**"]),
        (float("nan"), ["at most 2", "nan", "**no**"]),
    ],
)
def test_a_target_is_reached_only_by_a_measurement_within_it(value, cells):
    assert results.target_cells(value, 2) == cells


@pytest.mark.slow
def test_a_run_is_timed_killed_and_read(tmp_path):
    small = ["data=digits", "data.args.train_size=64", "data.args.test_size=16", "callbacks=[]"]
    small += ["model=mlp", "model.args.dims=[4]", "loader.batch_size=32", "logging.every_steps=1"]
    run = Run(tmp_path, "config.json", *small, "training.epochs=2", cache=tmp_path / "cache")
    assert run.seconds_to("Epoch 1 [1/2") > 0 and not any(run.folder.rglob("finished.json"))
    shutil.rmtree(run.folder)
    assert run.finish() > 0
    assert [row["epoch"] for row in run.rows("seconds")] == [1, 2]
    assert run.checkpoint().name == "checkpoint-epoch_2.params"
    with pytest.raises(RuntimeError, match=r"(?s)exit code 2.*no model 'absent'"):
        Run(tmp_path, "config.json", "model=absent").finish()
