"""`python train.py` as a user runs it: outputs, exit codes, and one clear message for each mistake, never a traceback."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.processes import ROOT, run, start
from training.run import TIMES

SMALL = {
    "title": "Small",
    "model": {"name": "mlp", "args": {"dims": [16]}},
    "data": {"name": "digits", "args": {"train_size": 640, "test_size": 100}},
    "loader": {"batch_size": 64},
    "preprocess": ["to_unit"],
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "optimizer": {"name": "adamw", "args": {"lr": 0.01}},
    "training": {"epochs": 2},
    "checkpoint": {"monitor": "test_loss"},
    "logging": {"every_steps": 5},
}


@pytest.fixture
def small(tmp_path):
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    return tmp_path


def test_a_run_leaves_its_folder_behind(small):
    code, out, _ = run(small, "-c", "small.json")
    assert code == 0
    (folder,) = (small / "saved" / "Small").iterdir()
    assert {p.name for p in folder.iterdir()} == {
        "config.json",
        "environment.json",
        "finished.json",
        "metrics.jsonl",
        "model",
        "report.html",
        "train.log",
        "checkpoint-epoch_1.params",
        "checkpoint-epoch_2.params",
    }
    assert (folder / "model" / "mlp.py").read_text() == (ROOT / "model" / "mlp.py").read_text()
    log = (folder / "train.log").read_text()
    for line in (
        "[main INFO]    : ",
        "Start Training! [Small]",
        "The model has 12730 parameters",
        "---- STARTING EPOCH 1 ----",
        "Epoch 1 [5/10 (50%)] -- Loss: ",
        "Epoch 2 [train] accuracy @ ",
        "Epoch 2 [test] avg Loss: ",
        "---- Epoch 2 took ",
    ):
        assert line in out, line
        assert line in log, line
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [5, 10, 10, 15, 20, 20]
    assert {"train_loss", "test_accuracy", "seconds", "examples_per_second"} <= rows[-1].keys()
    assert [row.get("end_of_epoch", False) for row in rows] == [False, False, True] * 2
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["data"]["train"]["source"] == "digits"
    assert environment["packages"]["jax"]


def test_the_resolved_config_repeats_the_run(small):
    run(small, "-c", "small.json")
    (first,) = (small / "saved" / "Small").iterdir()
    run(small, "-c", first / "config.json", "title=Again")
    (second,) = (small / "saved" / "Again").iterdir()

    def rows(folder):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]

    assert rows(first) == rows(second)


def test_pretrained_weights_are_loaded_strictly(small):
    run(small, "-c", "small.json")
    (folder,) = (small / "saved" / "Small").iterdir()
    weights = folder / "checkpoint-epoch_2.params"
    code, out, _ = run(
        small,
        "-c",
        "small.json",
        f"training.pretrained={weights}",
        "optimizer.args.lr=1e-9",
        "training.epochs=1",
    )
    assert code == 0
    before = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["test_accuracy"]
    assert f"Epoch 1 [test] accuracy @ {before:.4f}" in out
    code, _, err = run(
        small, "-c", "small.json", f"training.pretrained={weights}", "model.args.dims=[17]"
    )
    assert code == 2
    assert "does not fit the model" in err
    assert "hidden/0/weight: the file has (784, 16), the model has (784, 17)" in err
    code, _, err = run(small, "-c", "small.json", "training.pretrained=nowhere.params")
    assert code == 2
    assert "nowhere.params: there is no such checkpoint" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_with_75(small, number):
    process = start(
        small,
        "-c",
        "small.json",
        "training.epochs=100000",
        "checkpoint.every_epochs=100000",
        "checkpoint.monitor=null",
    )
    for line in process.stdout:
        if "STARTING EPOCH 3" in line:
            break
    process.send_signal(number)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "Traceback" not in err
    assert time.monotonic() - began < 20
    (folder,) = (small / "saved" / "Small").iterdir()
    assert list(folder.glob("checkpoint-*.params"))


def test_check_prints_and_trains_nothing(small):
    code, out, _ = run(small, "-c", "small.json", "--check", "optimizer.args.lr=0.5")
    assert code == 0
    assert '"lr": 0.5' in out
    assert "hidden/0/weight" in out
    assert "12,730" in out
    assert not (small / "saved").exists()


def test_list_names_every_part(small):
    code, out, _ = run(small, "--list")
    assert code == 0
    for name in (
        "convnext(",
        "mnist(",
        "cross_entropy(",
        "accuracy(",
        "adamw(",
        "warmup_cosine(",
        "random_flip(",
        "supervised(",
    ):
        assert name in out, name
    code, out, _ = run(small, "--list", "schedule")
    assert "cosine(" in out
    assert "adamw(" not in out
    assert run(small, "--list", "nonsense")[0] == 2


def npz(folder, name, x, y):
    np.savez(folder / name, x=x, y=y)
    return json.dumps({"name": "arrays", "args": {"train": name}})


X, Y = np.zeros((8, 4), np.float32), np.arange(8) % 3


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-c", "nowhere.json"], 2, "nowhere.json: there is no such file"),
        (["-c", "broken.json"], 2, "broken.json: line 1, column 2: not JSON"),
        (["-c", "small.json", "foo=1"], 2, "small.json: foo: no such key"),
        (["-c", "small.json", "model.name=mlpp"], 2, "no model 'mlpp'; did you mean 'mlp'?"),
        (["-c", "small.json", "loader.batch_size=0"], 2, "loader.batch_size: must be at least 1"),
        (["-c", "small.json", "loss=mse"], 2, "the output has the shape (10,) and the target ()"),
        (
            ["-c", "small.json", "checkpoint.monitor=test_los"],
            2,
            "checkpoint.monitor: 'test_los' is not measured; did you mean 'test_loss'",
        ),
        (
            [
                "-c",
                "small.json",
                'callbacks=[{"name": "early_stopping", "args": {"monitor": "x"}}]',
            ],
            2,
            "callbacks.0.args.monitor: 'x'",
        ),
        (
            ["-c", "small.json", "model.name=vit", "model.args={}", "preprocess=[]"],
            2,
            "do not fit the data",
        ),
        (["-c", "small.json", "checkpoint.dir=small.json"], 1, "cannot be made: Not a directory"),
        (
            ["-c", "small.json", "checkpoint.dir=/proc/nothing"],
            1,
            "/proc/nothing/Small: cannot be made",
        ),
        (["-c", "small.json", "--nonsense"], 2, "unrecognized arguments: --nonsense"),
        (["title=A", "-c", "small.json", "loss=mse"], 2, "the output has the shape (10,)"),
        (
            ["-c", "small.json", 'objective={"name": "mixup", "args": {"alpha": -1}}'],
            2,
            "objective.args.alpha: must be above 0",
        ),
        (
            ["-c", "small.json", 'optimizer={"name": "adamw", "args": {"exclude": "bogus"}}'],
            2,
            "the rule 'bogus' matches no name",
        ),
        (["-c", "small.json", "model.args.dims=[100000000000]"], 1, "Out of memory"),
    ],
)
def test_mistakes(small, arguments, code, message):
    (small / "broken.json").write_text("{,}")
    found, out, err = run(small, *arguments)
    assert message in out + err
    assert found == code


def test_a_bare_assertion_in_a_model_is_told_with_its_place(small):
    (small / "bare.py").write_text(
        "from model.base import Model\n"
        "def bare(input_shape, num_classes) -> Model:\n"
        "    def apply(params, state, x, *, train=False, key=None):\n"
        "        assert x.ndim == 7\n"
        "    return Model(lambda key: ({}, {}), apply)\n"
    )
    code, _, err = run(small, "-c", "small.json", "model=bare.bare", "--check")
    assert code == 2
    assert "bare.py, line 4, in apply: AssertionError" in err


def test_bad_data_is_told_too(small):
    checks = [
        (npz(small, "empty.npz", X[:0], Y[:0]), "empty.npz"),
        (npz(small, "odd.npz", X, Y[:5]), "odd.npz"),
        (json.dumps({"name": "arrays", "args": {"train": "cut.npz"}}), "cut.npz"),
        (
            json.dumps({"name": "arrays", "args": {"train": "labels.npz", "num_classes": 2}}),
            "outside the 2 classes",
        ),
    ]
    npz(small, "labels.npz", X, Y)
    (small / "cut.npz").write_bytes((small / "labels.npz").read_bytes()[:300])
    for data, message in checks:
        code, out, err = run(
            small,
            "-c",
            "small.json",
            f"data={data}",
            "preprocess=[]",
            "checkpoint.monitor=train_loss",
        )
        assert message in out + err
        assert code == 2, message


def test_no_space_is_the_machines_fault_and_told_in_one_message(small):
    """A full disk, as a file-size limit: the checkpoint does not fit, and what was written before stays whole."""
    limited = (
        "import resource, sys, train; resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)); "
    )
    limited += "sys.exit(train.main(sys.argv[1:]))"
    command = [sys.executable, "-c", limited, "-c", "small.json"]
    environment = os.environ | {"XDG_CACHE_HOME": str(small / "cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        cwd=small,
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "checkpoint-epoch_1.params: cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    (folder,) = (small / "saved" / "Small").iterdir()
    assert not list(folder.glob("*.params")) and not list(folder.glob(".*"))


def test_offline_the_stand_in_is_announced_and_recorded_or_refused(small):
    """There is no network in a test: the mirrors' names are made unknown, whatever the machine."""
    offline = (
        "import socket, sys, train\ndef no(*a, **k): raise socket.gaierror(-2, 'no network')\n"
    )
    offline += "socket.getaddrinfo = no\nsys.exit(train.main(sys.argv[1:]))"
    environment = os.environ | {"XDG_CACHE_HOME": str(small / "cache"), "PYTHONPATH": str(ROOT)}

    def attempt(mode):
        data = json.dumps({"name": "mnist", "args": {"dir": "nothing", "offline": mode}})
        command = [
            sys.executable,
            "-c",
            offline,
            "-c",
            "small.json",
            f"data={data}",
            "training.epochs=1",
        ]
        return subprocess.run(
            command,
            cwd=small,
            capture_output=True,
            text=True,
            env=environment,
            timeout=120,
            check=False,
        )

    went_on = attempt("digits")
    assert went_on.returncode == 0, went_on.stderr
    assert "NOT MNIST" in went_on.stdout
    (folder,) = (small / "saved" / "Small").iterdir()
    assert (
        "stand-in for mnist"
        in json.loads((folder / "environment.json").read_text())["data"]["train"]["source"]
    )
    assert "stand-in for mnist" in (folder / "train.log").read_text()
    began = time.monotonic()
    stopped = attempt("error")
    assert stopped.returncode == 1
    assert time.monotonic() - began < 15
    assert "Put the files" in stopped.stderr
    assert (
        len(list((small / "saved" / "Small").iterdir())) == 1
    )  # a run that never began leaves no folder
    assert "Traceback" not in stopped.stderr


def test_a_failed_run_does_not_wait_for_what_is_still_compiled():
    lines = (
        "import threading, train",
        "from training import programs",
        "programs.BEGUN.add(programs.COMPILING.submit(threading.Event().wait))",
        "print('said')",
        "train.leave(2)",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (2, "said\n")
