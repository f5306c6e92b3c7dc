"""Runs of train.py whose data comes from worker processes: bit-identical, no process left over."""

import json
import os
import signal
import subprocess
import sys
import uuid

import numpy as np
import pytest

from data_loader.digits import draw
from tests.data_loader.conftest import wait_until
from tests.processes import ROOT, marked
from tests.runs import rows_of
from training.checkpoint.storage import load

pytestmark = pytest.mark.usefixtures("no_shared_memory_left")
X, Y = draw(0, 600)
CONFIG = {
    "title": "Records",
    "seed": 7,
    "model": {"name": "mlp", "args": {"dims": [16]}},
    "loader": {"batch_size": 64, "val_size": 50},
    "preprocess": ["to_unit"],
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "optimizer": {"name": "adamw", "args": {"lr": 0.01}},
    "training": {"epochs": 2, "eval_every": 2},
    "checkpoint": {"every_steps": 3},
    "logging": {"every_steps": 1, "report": False},
}
PARSE_FUNCTIONS = """
import time
from data_loader.records import numpy_example
def slow(record):
    time.sleep(0.002)
    return numpy_example(record)
def fails_at_one_three(record):
    x, y = numpy_example(record)
    if y == 3 and x.sum() == {sum}: raise ValueError("a bad three")
    return x, y
"""


def records(folder, pattern="train-*.array_record", **arguments):
    return {
        "name": "grain",
        "args": {"train": str(folder / pattern), "num_classes": 10} | arguments,
    }


class Training:
    """train.py in its own session; all of its processes have a mark in their environment."""

    def __init__(self, cwd, data, *arguments):
        (cwd / "config.json").write_text(json.dumps(CONFIG | {"data": data}))
        self.mark = uuid.uuid4().hex
        environment = os.environ | {"XDG_CACHE_HOME": str(cwd / "cache"), "MARK": self.mark}
        command = [sys.executable, str(ROOT / "train.py"), "-c", "config.json", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(
            command, cwd=cwd, env=environment, start_new_session=True, **pipes
        )

    def wait_for(self, text):
        for line in self.process.stdout:
            if text in line:
                return
        raise AssertionError(self.process.stderr.read())

    def wait(self):
        """(exit code, output) once the process has ended; all processes it started must end too."""
        try:
            out, err = self.process.communicate(timeout=300)
        finally:
            self.process.kill()
        assert wait_until(lambda: not self.alive())
        assert "Traceback" not in out + err, out + err
        return self.process.returncode, out + err

    def alive(self):
        """The ids of the processes with the mark."""
        return marked(self.mark)


def run_dir(cwd):
    (folder,) = (cwd / "saved" / "Records").iterdir()
    return folder


def logged_rows(cwd):
    return rows_of(run_dir(cwd))


def assert_same_run(cwd, reference):
    assert logged_rows(cwd) == logged_rows(reference)
    actual, _ = load(run_dir(cwd) / "checkpoint-epoch_2.params")
    expected, _ = load(run_dir(reference) / "checkpoint-epoch_2.params")
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=name, strict=True)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of the same run on arrays in memory."""
    cwd = tmp_path_factory.mktemp("reference")
    np.savez(cwd / "train.npz", x=X[:500], y=Y[:500])
    data = {"name": "arrays", "args": {"train": "train.npz"}}
    code, output = Training(cwd, data, "loader.device_budget_mb=0").wait()
    assert code == 0, output
    assert len(logged_rows(cwd)) > 15
    return cwd


@pytest.mark.torture
def test_a_run_on_record_files_is_bit_identical_to_one_on_arrays(
    record_folder, reference, tmp_path
):
    code, output = Training(tmp_path, records(record_folder)).wait()
    assert code == 0, output
    assert_same_run(tmp_path, reference)


@pytest.mark.torture
def test_a_run_killed_within_an_epoch_resumes_bit_identically_and_leaves_no_worker(
    record_folder, reference, tmp_path
):
    (tmp_path / "parsers.py").write_text(PARSE_FUNCTIONS)
    data = records(record_folder, parse="parsers.slow")
    training = Training(tmp_path, data)
    training.wait_for("checkpoint-step_3.params")
    assert len(training.alive()) >= 3
    training.process.kill()
    training.wait()
    code, output = Training(tmp_path, data, "--resume", "auto").wait()
    # On a busy machine the kill may come so late that the first epoch has ended.
    assert code == 0 and "Resuming from checkpoint-" in output, output
    assert_same_run(tmp_path, reference)


@pytest.mark.slow
def test_signals_sent_to_the_workers_too_still_let_the_run_stop_with_a_checkpoint(
    record_folder, tmp_path
):
    (tmp_path / "parsers.py").write_text(PARSE_FUNCTIONS)
    training = Training(
        tmp_path, records(record_folder, parse="parsers.slow"), "training.epochs=100"
    )
    training.wait_for("Epoch 1 [3/8")
    others = [int(pid) for pid in training.alive() if int(pid) != training.process.pid]
    for pid in others:
        os.kill(pid, signal.SIGTERM)  # as a scheduler does, to all processes of a job
    os.killpg(training.process.pid, signal.SIGINT)  # as a terminal does
    code, output = training.wait()
    assert code == 75 and len(others) >= 3 and "KeyboardInterrupt" not in output, output
    assert list(run_dir(tmp_path).glob("checkpoint-step_*"))


@pytest.mark.torture
def test_a_record_that_fails_in_a_worker_ends_the_run_with_one_message(record_folder, tmp_path):
    three = np.flatnonzero(Y[:500] == 3)[-1]
    (tmp_path / "parsers.py").write_text(PARSE_FUNCTIONS.format(sum=X[three].sum()))
    code, output = Training(
        tmp_path, records(record_folder, parse="parsers.fails_at_one_three")
    ).wait()
    assert code == 2
    assert output.splitlines()[-1].endswith("ValueError: a bad three")
    assert f"train-00002-of-00003.array_record: record {three - 334}" in output
