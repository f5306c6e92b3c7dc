"""Runs that are killed, stopped and gone on with, as processes: they end at the very same bits as one that was left alone.

`make torture` does the same far more often (KILLS=300). There every process compiles its programs anew; here they share those of
the whole suite (tests/conftest.py).
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
    "checkpoint": {
        "every_epochs": 2,
        "every_steps": 7,
        "keep": 3,
        "monitor": "test_loss",
        "save_top_k": 2,
    },
    "logging": {"every_steps": 3},
    "callbacks": [{"name": "early_stopping", "args": {"patience": 10000}}],
}
STREAMED = ["loader.device_budget_mb=0", "training.replicas=2"]
WATCHED = [
    "logging.log_all=true",
    "logging.parameter_norm=true",
    'callbacks=["gradient_spike_monitor"]',
]
STREAMING = "streamed with replicas, every step logged"
FORMS = {"resident": [], STREAMING: [*STREAMED, *WATCHED]}


@pytest.fixture(
    scope="module", params=["resident", pytest.param(STREAMING, marks=pytest.mark.torture)]
)
def form(request, tmp_path_factory):
    """(a folder with a config, further arguments, the folder of a run that nobody disturbed)"""
    place = tmp_path_factory.mktemp("form")
    (place / "config.json").write_text(json.dumps(CONFIG))
    assert train(place, *FORMS[request.param], "title=Reference").returncode == 0
    return place, FORMS[request.param], next((place / "saved" / "Reference").iterdir())


@pytest.fixture
def place(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def start(place, *arguments, program="train.py"):
    command = [sys.executable, str(ROOT / program), *map(str, arguments)]
    environment = os.environ | {"XDG_CACHE_HOME": str(place / "cache")}
    environment["JAX_ENABLE_COMPILATION_CACHE"] = str(KILLS <= 6).lower()
    return subprocess.Popen(
        command,
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def train(place, *arguments, program="train.py"):
    """A process that was run to its end; `stdout` is all that it said."""
    process = start(place, *arguments, program=program)
    out, _ = process.communicate(timeout=300)
    assert "Traceback" not in out, out
    return subprocess.CompletedProcess(process.args, process.returncode, out)


def rows(folder):
    """metrics.jsonl but for times and rates."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def assert_same_run(folder, reference, more_saved):
    """The same weights, optimizer state and everything else in the last checkpoints, and the same lines; the same files, too,
    unless signals had more of them written, which then are among the last ones."""
    names = sorted(p.name for p in reference.glob(f"checkpoint-epoch_{EPOCHS}*"))
    assert names == sorted(p.name for p in folder.glob(f"checkpoint-epoch_{EPOCHS}*"))
    for name in names:
        (arrays, record), (wanted, wanted_record) = load(folder / name), load(reference / name)
        assert arrays.keys() == wanted.keys()
        for leaf, array in wanted.items():
            np.testing.assert_array_equal(arrays[leaf], array, err_msg=leaf, strict=True)
        for key in ("step", "best", "callbacks", "metrics"):
            assert record[key] == wanted_record[key]
    assert rows(folder) == rows(reference)
    log = (folder / "train.log").read_text()
    assert [log.count(f"---- Epoch {n} took") for n in range(1, EPOCHS + 1)] == [1] * EPOCHS
    assert not list(folder.glob(".*")), "something was left over"
    kept, wanted = ({p.name for p in place.glob("*.params")} for place in (folder, reference))
    assert kept == wanted or (more_saved and len(kept) == len(wanted))


def assert_all_ended_the_same(place, title, *arguments, reference, more_saved=False):
    """What was interrupted goes on to its end; so often interrupted, more than one run may have come to it."""
    assert train(place, *arguments).returncode == 0
    folders = [path.parent for path in (place / "saved" / title).glob("*/finished.json")]
    assert folders
    for folder in folders:
        assert_same_run(folder, reference, more_saved)


def wait_for_training(process):
    """Until the first program is compiled and the first line of losses is there."""
    for line in process.stdout:
        if "Loss: " in line:
            return


def test_killed_at_random_moments_a_run_ends_at_the_same_bits(form):
    place, more, reference = form
    title, luck = f"Killed {KILLS}", random.Random(KILLS)
    arguments = [*more, f"title={title}", "--resume", "auto"]
    for kill in range(KILLS // len(FORMS)):
        process = start(place, *arguments)
        if kill % 5:  # most of the life of so short a process is its start
            wait_for_training(process)
            time.sleep(luck.uniform(0, 0.3))
        else:
            time.sleep(luck.uniform(0, 2))
        process.kill()
        process.communicate()
        for folder in (place / "saved" / title).glob("*"):
            found, wrong = newest(folder)
            assert all(isinstance(error, Incomplete) for error in wrong), wrong
            assert found or wrong or not list(folder.glob("*.params"))
    assert_all_ended_the_same(place, title, *arguments, reference=reference)


def test_killed_while_writing_a_run_ends_at_the_same_bits(form):
    """At the n-th thing done to the disk, each process some further; a write is cut in half first."""
    place, more, reference = form
    title, luck = f"Torn {KILLS}", random.Random(KILLS + 1)
    arguments = [*more, f"title={title}", "--resume", "auto"]
    for _ in range(max(3, KILLS // 4)):
        done = train(place, luck.randrange(5, 200), *arguments, program="tests/kill_at.py")
        assert done.returncode in (-signal.SIGKILL, 0), done.stdout
    assert_all_ended_the_same(place, title, *arguments, reference=reference)


def test_stopped_by_signals_a_run_exits_with_75_in_time_and_ends_at_the_same_bits(form):
    place, more, reference = form
    title, luck = f"Stopped {KILLS}", random.Random(KILLS + 2)
    arguments = [*more, f"title={title}", "--resume", "auto"]
    stopped = 0
    for stop in range(max(2, KILLS // 5)):
        process = start(place, *arguments)
        wait_for_training(process)
        time.sleep(luck.uniform(0, 0.3))
        began = time.monotonic()
        process.send_signal(signal.SIGTERM if stop % 2 else signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert "Traceback" not in out
        assert (
            time.monotonic() - began < 5
        )  # 2 s and a chunk, which is 0.3 s, on a machine with other work
        if "Stopped by" in out:
            assert process.returncode == 75, out
            folder = max((place / "saved" / title).iterdir())
            assert f"after step {newest(folder)[0].record['step']}" in out
            stopped += 1
    assert stopped
    assert_all_ended_the_same(place, title, *arguments, reference=reference, more_saved=True)
