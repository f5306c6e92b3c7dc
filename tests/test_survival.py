"""Runs that are killed or stopped and then resumed end with exactly the same bits as an
uninterrupted run.

`make torture` does the same far more often (KILLS=300). There every process recompiles its
programs; here all share the cache of the whole test run (tests/conftest.py).
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from training.checkpoint.storage import Incomplete, load, newest
from training.run import TIMES

ROOT = Path(__file__).resolve().parents[1]
KILLS = int(os.environ.get("KILLS", "6"))
EPOCHS = 40
CHECKPOINT = {"every_epochs": 2, "every_steps": 7, "keep": 3, "monitor": "test_loss"}
CHECKPOINT["save_top_k"] = 2
CONFIG = {
    "title": "Survivor",
    "seed": 7,
    "model": {"name": "mlp", "args": {"dims": [16]}},
    "data": {"name": "digits", "args": {"train_size": 500, "test_size": 100}},
    "loader": {"batch_size": 64},
    "preprocess": ["to_unit"],
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "optimizer": [
        {"name": "clip_by_global_norm", "args": {"max_norm": 1.0}},
        {"name": "adamw", "args": {"lr": 0.01}},
    ],
    "schedule": "cosine",
    "training": {"epochs": EPOCHS, "ema": 0.9},
    "checkpoint": CHECKPOINT,
    "logging": {"every_steps": 3},
    "callbacks": [{"name": "early_stopping", "args": {"patience": 10000}}],
}
STREAMED = ["loader.device_budget_mb=0", "training.replicas=2"]
WATCHED = ["logging.log_all=true", "logging.parameter_norm=true"]
WATCHED += ['callbacks=["gradient_spike_monitor"]']
STREAMING = "streamed with replicas, every step logged"
FORMS = {"resident": [], STREAMING: [*STREAMED, *WATCHED]}


@pytest.fixture(
    scope="module", params=["resident", pytest.param(STREAMING, marks=pytest.mark.torture)]
)
def form(request, tmp_path_factory):
    """(a folder with a config, further arguments, the run folder of an uninterrupted run)"""
    workdir = tmp_path_factory.mktemp("form")
    (workdir / "config.json").write_text(json.dumps(CONFIG))
    assert train(workdir, *FORMS[request.param], "title=Reference").returncode == 0
    return workdir, FORMS[request.param], next((workdir / "saved" / "Reference").iterdir())


def start(workdir, *arguments, program="train.py"):
    command = [sys.executable, str(ROOT / program), *map(str, arguments)]
    environment = os.environ | {"XDG_CACHE_HOME": str(workdir / "cache")}
    environment["JAX_ENABLE_COMPILATION_CACHE"] = str(KILLS <= 6).lower()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=workdir, **pipes, text=True, env=environment)


def train(workdir, *arguments, program="train.py"):
    """A process that was run to its end; its `stdout` includes stderr."""
    process = start(workdir, *arguments, program=program)
    out, _ = process.communicate(timeout=300)
    assert "Traceback" not in out, out
    return subprocess.CompletedProcess(process.args, process.returncode, out)


def rows(folder):
    """The rows of metrics.jsonl without times and rates."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def assert_same_run(folder, reference, more_saved):
    """The last checkpoints have the same weights, optimizer state and records, and the logged rows
    are the same; so are the file names, unless signals caused additional checkpoints (more_saved),
    which are then among the kept ones."""
    names = sorted(p.name for p in reference.glob(f"checkpoint-epoch_{EPOCHS}*"))
    assert names == sorted(p.name for p in folder.glob(f"checkpoint-epoch_{EPOCHS}*"))
    for name in names:
        (arrays, record), (expected, expected_record) = load(folder / name), load(reference / name)
        assert arrays.keys() == expected.keys()
        for leaf, array in expected.items():
            np.testing.assert_array_equal(arrays[leaf], array, err_msg=leaf, strict=True)
        for key in ("step", "best", "callbacks", "metrics"):
            assert record[key] == expected_record[key]
    assert rows(folder) == rows(reference)
    log = (folder / "train.log").read_text()
    assert [log.count(f"---- Epoch {n} took") for n in range(1, EPOCHS + 1)] == [1] * EPOCHS
    assert not list(folder.glob(".*")), "a temporary file was left"
    kept, expected = ({p.name for p in run.glob("*.params")} for run in (folder, reference))
    assert kept == expected or (more_saved and len(kept) == len(expected))


def assert_all_ended_the_same(workdir, title, *arguments, reference, more_saved=False):
    """The interrupted run is resumed to its end; after so many interruptions, several runs may have
    ended."""
    assert train(workdir, *arguments).returncode == 0
    folders = [path.parent for path in (workdir / "saved" / title).glob("*/finished.json")]
    assert folders
    for folder in folders:
        assert_same_run(folder, reference, more_saved)


def wait_for_training(process):
    """Wait until the first program is compiled and the first loss is logged."""
    for line in process.stdout:
        if "Loss: " in line:
            return


def test_a_run_killed_at_random_moments_ends_with_the_same_bits(form):
    workdir, more, reference = form
    title, rng = f"Killed {KILLS}", random.Random(KILLS)
    arguments = [*more, f"title={title}", "--resume", "auto"]
    for kill in range(KILLS // len(FORMS)):
        process = start(workdir, *arguments)
        if kill % 5:  # not only at startup, which is most of the life of so short a process
            wait_for_training(process)
            time.sleep(rng.uniform(0, 0.3))
        else:
            time.sleep(rng.uniform(0, 2))
        process.kill()
        process.communicate()
        for folder in (workdir / "saved" / title).glob("*"):
            checkpoint, errors = newest(folder)
            assert all(isinstance(error, Incomplete) for error in errors), errors
            assert checkpoint or errors or not list(folder.glob("*.params"))
    assert_all_ended_the_same(workdir, title, *arguments, reference=reference)


def test_a_run_killed_while_writing_ends_with_the_same_bits(form):
    """Each process is killed at a random change of the disk; if that is a write, half of it is
    written first."""
    workdir, more, reference = form
    title, rng = f"Torn {KILLS}", random.Random(KILLS + 1)
    arguments = [*more, f"title={title}", "--resume", "auto"]
    for _ in range(max(3, KILLS // 4)):
        done = train(workdir, rng.randrange(5, 200), *arguments, program="tests/kill_at.py")
        assert done.returncode in (-signal.SIGKILL, 0), done.stdout
    assert_all_ended_the_same(workdir, title, *arguments, reference=reference)


def test_a_run_stopped_by_a_signal_exits_with_75_in_time_and_ends_with_the_same_bits(form):
    workdir, more, reference = form
    title, rng = f"Stopped {KILLS}", random.Random(KILLS + 2)
    arguments = [*more, f"title={title}", "--resume", "auto"]
    stopped = 0
    for stop in range(max(2, KILLS // 5)):
        process = start(workdir, *arguments)
        wait_for_training(process)
        time.sleep(rng.uniform(0, 0.3))
        sent = time.monotonic()
        process.send_signal(signal.SIGTERM if stop % 2 else signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert "Traceback" not in out
        # 2 s and a chunk, which takes 0.3 s, with a margin for a busy machine.
        assert time.monotonic() - sent < 5
        if "Stopped by" in out:
            assert process.returncode == 75, out
            folder = max((workdir / "saved" / title).iterdir())
            assert f"after step {newest(folder)[0].record['step']}" in out
            stopped += 1
    assert stopped
    assert_all_ended_the_same(workdir, title, *arguments, reference=reference, more_saved=True)
