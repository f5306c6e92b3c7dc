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
from PIL import Image

from data_loader.digits import draw
from data_loader.records import write_records
from tests.runs import rows_of
from training.checkpoint.storage import load, newest

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
STREAMED = ["loader.device_budget_mb=0", "training.replicas=2", "training.accumulate=2"]
STREAMED += ['augment=["random_erase"]']
WATCHED = ["logging.log_all=true", "logging.parameter_norm=true"]
WATCHED += ['callbacks=["gradient_spike_monitor"]']
# Several features at once: what they remember must fit together at every moment.
AUGMENTED = ['augment=["random_crop"]', "model.args.dropout=0.1"]
OFTEN = ["checkpoint.every_epochs=3", "checkpoint.every_steps=5", "checkpoint.keep=2"]
OFTEN += ["checkpoint.monitor=val_accuracy", "checkpoint.save_top_k=3"]
SPIKES = {"name": "gradient_spike_monitor", "args": {"threshold": 1.5, "warmup": 5}}
PLATEAU = {"name": "reduce_on_plateau", "args": {"factor": 0.7, "patience": 2, "cooldown": 1}}
COUNTS = {"name": "confusion_matrix", "args": {"every": {"epochs": 8}}}
CALLBACKS = [SPIKES, PLATEAU, COUNTS, *CONFIG["callbacks"], "learning_rate_monitor"]
AT_ONCE = [*AUGMENTED, *OFTEN, f"callbacks={json.dumps(CALLBACKS)}", "loader.val_size=0.2"]
AT_ONCE += ["training.test_at=end", "training.on_nonfinite=rollback", "training.eval_initial=true"]
AT_ONCE += ['logging.trackers=["csv", "jsonl"]', "logging.log_all=true", "schedule=warmup_cosine"]
AT_ONCE += ["schedule.args.warmup_steps=20", 'training.eval_every={"steps": 2, "epochs": 1}']
FOLDER = ['data={"name": "folder", "args": {"dir": "images", "image_size": [28, 28]}}']
FOLDER += ["data.args.color=gray", "loader.prefetch=1"]
RECORDS = ['data={"name": "grain", "args": {"train": "records/train-*", "workers": 0}}']
RECORDS += ["data.args.test=records/test-*", "data.args.num_classes=10", "training.replicas=2"]
RECORDS += ["loader.prefetch=3", "loader.eval_batch_size=50"]
TOKENS = ['data={"name": "tokens", "args": {"train": "tokens/train-*.bin", "length": 16}}']
TOKENS += ["data.args.val=tokens/val.bin", "data.args.vocab_size=20", "training.accumulate=2"]
TOKENS += ['model={"name": "gpt", "args": {"dim": 8, "depth": 2, "heads": 2, "dropout": 0.1}}']
TOKENS += ["model.args.scan=true", "preprocess=[]", "callbacks=[]", "checkpoint.monitor=val_loss"]
IN_FOLDER, IN_RECORDS = "an image folder, many features", "record files with replicas"
IN_TOKENS = "windows of memory-mapped tokens"
FORMS = {
    "resident": [],
    "streamed with replicas, every step logged": [*STREAMED, *WATCHED],
    IN_FOLDER: [*FOLDER, *AT_ONCE],
    IN_RECORDS: [*RECORDS, *AT_ONCE],
    IN_TOKENS: [*TOKENS, *WATCHED[:2]],
}


def forms(*usual):
    """The forms of a run that CI tests: these; `make torture` tests all."""
    mark = {form: pytest.mark.slow if form in usual else pytest.mark.torture for form in FORMS}
    params = [pytest.param(form, marks=mark[form]) for form in FORMS]
    return pytest.mark.parametrize("form", params, indirect=True)


@pytest.fixture(scope="module")
def form(request, tmp_path_factory):
    """(a folder with a config, further arguments, the run folder of an uninterrupted run)"""
    workdir = tmp_path_factory.mktemp("form")
    (workdir / "config.json").write_text(json.dumps(CONFIG))
    x, y = draw(0, 200)
    sets = {"train": range(160), "test": range(160, 200)}
    for name, rows in sets.items():
        if request.param == IN_RECORDS:
            write_records(workdir / "records" / name, [(x[i], y[i]) for i in rows], shards=2)
        for i in rows if request.param == IN_FOLDER else ():
            path = workdir / "images" / name / str(y[i]) / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(x[i, :, :, 0]).save(path)
    (workdir / "tokens").mkdir()
    for name, count in {"train-0": 3000, "train-1": 5000, "val": 500}.items():
        tokens = np.random.default_rng(count).integers(0, 20, count, np.uint16)
        tokens.tofile(workdir / "tokens" / f"{name}.bin")
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
        for key in ("step", "best", "memories", "lr_scales", "metrics"):
            assert record[key] == expected_record[key]
    assert rows_of(folder) == rows_of(reference)
    for name in ("gradient_spikes.jsonl", "pictures/confusion_matrix-val.json"):
        texts = [(run / name).read_bytes() for run in (folder, reference) if (run / name).exists()]
        assert len(texts) in (0, 2) and len(set(texts)) < 2, name
    log = (folder / "train.log").read_text()
    assert [log.count(f"---- Epoch {n} took") for n in range(1, EPOCHS + 1)] == [1] * EPOCHS
    # The report is written once the run is marked as finished, so what a kill leaves of it stays.
    left = [path.name for path in folder.glob(".*") if not path.name.startswith(".report.html")]
    assert not left, "a temporary file was left"
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
        if "-- Loss: " in line or "[train] avg Loss: " in line:  # not the initial evaluation
            return


@forms(IN_FOLDER)
def test_a_run_killed_at_random_moments_ends_with_the_same_bits(form):
    workdir, more, reference = form
    title, rng = f"Killed {KILLS}", random.Random(KILLS)
    arguments = [*more, f"title={title}", "--resume", "auto"]
    for kill in range(max(2, KILLS // len(FORMS))):
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
            assert not errors
            assert checkpoint or not {*folder.glob("*.params")}
    assert_all_ended_the_same(workdir, title, *arguments, reference=reference)


@forms(IN_RECORDS)
def test_a_run_killed_while_writing_ends_with_the_same_bits(form):
    """Each process is killed at a random change of the disk; if that is a write, half of it is
    written first."""
    workdir, more, reference = form
    title, rng = f"Torn {KILLS}", random.Random(KILLS + 1)
    arguments = [*more, f"title={title}", "--resume", "auto"]
    torn, kills = workdir / "torn.txt", max(3, KILLS // 4)
    for kill in range(kills + 20):
        if kill >= kills and torn.exists():
            break
        done = train(workdir, rng.randrange(5, 200), *arguments, program="tests/kill_at.py")
        assert done.returncode in (-signal.SIGKILL, 0), done.stdout
    names = {Path(line).name for line in torn.read_text().splitlines()}
    assert KILLS < 100 or len(names) > 2, f"only {names} were torn"
    assert_all_ended_the_same(workdir, title, *arguments, reference=reference)


@pytest.mark.slow
@forms("resident")
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
