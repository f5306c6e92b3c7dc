"""`python train.py` as a user runs it: output, exit codes, and one clear message for each mistake,
never a traceback."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import train
from inference import convert_tflite
from tests.processes import ROOT, TWO_EPOCHS, call, run
from tests.runs import json_lines, rows_of


@pytest.fixture
def small(tmp_path):
    (tmp_path / "small.json").write_text(json.dumps(TWO_EPOCHS))
    return tmp_path


def test_a_run_writes_its_folder(small):
    code, out, _ = run(small, "-c", "small.json")
    assert code == 0
    (folder,) = (small / "saved" / "Small").iterdir()
    names = {"config.json", "environment.json", "finished.json", "metrics.jsonl", "model"}
    names |= {"report.html", "train.log", "checkpoint-epoch_1.params", "checkpoint-epoch_2.params"}
    assert {p.name for p in folder.iterdir()} == names
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
    rows = json_lines(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [5, 10, 10, 15, 20, 20]
    assert {"train_loss", "test_accuracy", "seconds", "examples_per_second"} <= rows[-1].keys()
    assert [row.get("end_of_epoch", False) for row in rows] == [False, False, True] * 2
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["data"]["train"]["source"] == "digits"
    assert environment["packages"]["jax"]


@pytest.mark.slow
def test_the_resolved_config_repeats_the_run(small):
    run(small, "-c", "small.json")
    (first,) = (small / "saved" / "Small").iterdir()
    run(small, "-c", first / "config.json", "title=Again")
    (second,) = (small / "saved" / "Again").iterdir()

    assert rows_of(first) == rows_of(second)


@pytest.mark.slow
def test_a_run_needs_no_longer_what_its_config_extends(small):
    child = {"extends": "small.json", "training": {"epochs": 1}, "metrics": None}
    (small / "child.json").write_text(json.dumps(child))
    _, out, _ = run(small, "-c", "child.json", "--check", "seed=3")
    shown = dict(line.rsplit("  ", 1) for line in out.splitlines() if " = " in line)
    sources = {value.split(" = ")[0]: source for value, source in shown.items()}
    assert sources["model.args.dims"] == "small.json"
    assert sources["training.epochs"] == "child.json"
    assert sources["seed"] == "command line"
    run(small, "-c", "child.json")
    (small / "small.json").unlink()
    (folder,) = (small / "saved" / "Small").iterdir()
    code, out, _ = run(small, "--resume", folder, "training.epochs=2")
    assert code == 0
    assert "Epoch 2 [test] avg Loss" in out
    code, out, _ = run(small, "--evaluate", folder / "checkpoint-epoch_2.params")
    assert code == 0
    assert "test_loss" in out


@pytest.mark.slow
def test_pretrained_weights_are_loaded_strictly(small):
    run(small, "-c", "small.json")
    (folder,) = (small / "saved" / "Small").iterdir()
    weights = folder / "checkpoint-epoch_2.params"
    pretrained = ["-c", "small.json", f"training.pretrained={weights}"]
    code, out, _ = run(small, *pretrained, "optimizer.args.lr=1e-9", "training.epochs=1")
    assert code == 0
    before = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["test_accuracy"]
    assert f"Epoch 1 [test] accuracy @ {before:.4f}" in out
    code, _, err = call(small, *pretrained, "model.args.dims=[17]")
    assert code == 2
    assert "does not fit the model" in err
    assert "hidden/0/weight: the file has (784, 16), the model has (784, 17)" in err
    code, _, err = call(small, "-c", "small.json", "training.pretrained=nowhere.params")
    assert code == 2
    assert "training.pretrained: nowhere.params: there is no such checkpoint" in err


def test_check_prints_and_trains_nothing(small):
    code, out, _ = call(small, "-c", "small.json", "--check", "optimizer.args.lr=0.5")
    assert code == 0
    assert '"lr": 0.5' in out
    assert "hidden/0/weight" in out
    assert "12,730" in out
    assert not (small / "saved").exists()


def test_list_names_every_part(small):
    code, out, _ = call(small, "--list")
    assert code == 0
    names = ["convnext", "mnist", "cross_entropy", "accuracy", "adamw"]
    for name in [*names, "warmup_cosine", "random_flip", "supervised"]:
        assert f"{name}(" in out, name
    code, out, _ = call(small, "--list", "schedule")
    assert "cosine(" in out
    assert "adamw(" not in out
    assert call(small, "--list", "nonsense")[0] == 2


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
        (["-c", "small.json", "--nonsense"], 2, "unrecognized arguments: --nonsense\n"),
        (["-c", "small.json", "--training.epochs=3"], 2, "no option, write training.epochs=3\n"),
        (["-c", "small.json", "--training.epochs", "3"], 2, "no option, write training.epochs=3\n"),
        (["-o", "training.epochs=3"], 2, "needs no option, write training.epochs=3 alone\n"),
        (["title=A", "-c", "small.json", "loss=mse"], 2, "the output has the shape (10,)"),
        (
            ["-c", "small.json", 'objective={"name": "mixup", "args": {"alpha": -1}}'],
            2,
            "objective.args.alpha: must be a finite number above 0",
        ),
        (
            ["-c", "small.json", 'optimizer={"name": "adamw", "args": {"exclude": "bogus"}}'],
            2,
            "the rule 'bogus' matches no name",
        ),
        (["-c", "small.json", "mesh.data=2", "mesh.tensor=2"], 2, "is 4 devices, and there is 1"),
        (["-c", "small.json", 'callbacks=["refuses.refuses"]'], 2, "refused before the first step"),
        (["-c", "small.json", "model.args.dims=[2147483647]"], 1, "Out of memory"),
        (["-c", "small.json", "model.args.dims=[100000000000]"], 2, "dims.0: must be at most"),
    ],
)
def test_mistakes(small, arguments, code, message):
    (small / "broken.json").write_text("{,}")
    (small / "refuses.py").write_text(
        "from utils import UserError\n"
        "class Refuses:\n"
        "    def on_start(self, view):\n"
        "        raise UserError('refused before the first step')\n"
        "def refuses(): return Refuses()\n"
    )
    # What fills the memory must not be this process.
    started = run if code == 1 else call
    exit_code, out, err = started(small, *arguments)
    assert message in out + err
    assert exit_code == code
    assert not [*small.glob("saved/*/*")]


@pytest.mark.parametrize(
    ("place", "command"),
    [
        ("checkpoint.dir", ["train.py", "checkpoint.dir=gs://bucket/runs"]),
        ("data.args.train", ["train.py", "data=webdataset", "data.args.train=s3://bucket/*.tar"]),
        ("training.pretrained", ["train.py", "training.pretrained=https://host/a.params"]),
        ("--resume", ["train.py", "--resume", "gs://bucket/run"]),
        ("--out", ["inference/convert_tflite.py", "-w", "a.params", "--out", "hdfs://host/out"]),
        ("--out", ["-m", "data_loader.tokenize", "small.json", "--out", "abfs://a@b/c"]),
        (
            "folder",
            ["-c", "import training.fit as t; t.fit(0, 0, optimizer=0, folder='gs://b/run')"],
        ),
        ("dir", ["-c", "from data_loader.cifar10 import cifar10; cifar10('gs://bucket/data')"]),
    ],
)
def test_a_url_is_not_taken_for_a_local_path(small, place, command):
    if command[0] == "train.py":
        exit_code, _, err = call(small, "-c", "small.json", *command[1:])
    else:
        command[0] = str(ROOT / command[0]) if command[0].endswith(".py") else command[0]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, *command], cwd=small, env=environment, capture_output=True, text=True
        )
        exit_code, err = done.returncode, done.stderr
    assert f"{place}: must be a local path (mount a bucket, as with rclone, or copy it), got" in err
    assert exit_code == (1 if command[0] == "-c" else 2)
    assert [path.name for path in small.iterdir()] == ["small.json"]


def test_an_option_of_many_values_that_is_given_twice_has_them_all():
    def parsed(command, option, *values):
        words = [word for value in values for word in (option, value)]
        return getattr(command.parse([*given[command], *words]), option[2:].replace("-", "_"))

    given = {train: [], convert_tflite: ["-w", "a.params", "--quantize", "int8"]}
    assert parsed(train, "--report", "a", "b") == ["a", "b"]
    for option in ("--free", "--input-names", "--output-names", "--exclude"):
        assert parsed(convert_tflite, option, "a", "b") == ["a", "b"]
    assert parsed(convert_tflite, "--batches", "1", "7") == [1, 7]
    for formats in (["onnx"], ["onnx", "tflite"]):
        assert parsed(convert_tflite, "--formats", *formats) == formats
    assert parsed(convert_tflite, "--formats") == ["tflite", "onnx"]


def test_a_bare_assertion_in_a_model_is_reported_with_its_file_and_line(small):
    (small / "bare.py").write_text(
        "from model.base import Model\n"
        "def bare(input_shape, num_classes) -> Model:\n"
        "    def apply(params, state, x, *, train=False, key=None):\n"
        "        assert x.ndim == 7\n"
        "    return Model(lambda key: ({}, {}), apply)\n"
    )
    code, _, err = call(small, "-c", "small.json", "model=bare.bare", "--check")
    assert code == 2
    assert "bare.py, line 4, in apply: AssertionError" in err


def test_bad_data_is_reported(small):
    two_classes = {"name": "arrays", "args": {"train": "labels.npz", "num_classes": 2}}
    checks = [
        (npz(small, "empty.npz", X[:0], Y[:0]), "empty.npz"),
        (npz(small, "odd.npz", X, Y[:5]), "odd.npz"),
        (json.dumps({"name": "arrays", "args": {"train": "cut.npz"}}), "cut.npz"),
        (json.dumps(two_classes), "outside the 2 classes"),
    ]
    npz(small, "labels.npz", X, Y)
    (small / "cut.npz").write_bytes((small / "labels.npz").read_bytes()[:300])
    others = ["preprocess=[]", "checkpoint.monitor=train_loss"]
    for data, message in checks:
        code, out, err = call(small, "-c", "small.json", f"data={data}", *others)
        assert message in out + err
        assert code == 2, message
