"""Evaluating, watching, reporting and debugging runs from the command line."""

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import ROOT, call, run, start
from tests.runs import json_lines

pytestmark = pytest.mark.contract

SMALL = {
    "title": "Small",
    "model": {"name": "mlp", "args": {"dims": [16]}},
    "data": {"name": "digits", "args": {"train_size": 320, "test_size": 100}},
    "loader": {"batch_size": 64},
    "preprocess": ["to_unit"],
    "loss": "cross_entropy",
    "metrics": [{"name": "accuracy", "phase": "EVAL"}],
    "optimizer": {"name": "adamw", "args": {"lr": 0.01}},
    "training": {"epochs": 2},
    "logging": {"every_steps": 2, "trackers": ["csv"], "gradient_norm": True},
    "callbacks": [{"name": "confusion_matrix", "args": {"every": {"epochs": 2}}}],
}

OWN_CODE = """
from training.base import Callback


class Failing:
    def on_steps(self, run):
        if run.step >= 4:
            return {"stop": {}["nothing"]}


def failing() -> Callback:
    return Failing()


def stepping(path: str) -> Callback:
    raise RuntimeError("never built")
"""


@pytest.fixture
def small(tmp_path):
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    (tmp_path / "own.py").write_text(OWN_CODE)
    return tmp_path


def folder_of(directory):
    (folder,) = (directory / "saved" / "Small").iterdir()
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run: its working directory, its folder and its output."""
    directory = tmp_path_factory.mktemp("trained")
    (directory / "small.json").write_text(json.dumps(SMALL))
    code, out, err = run(directory, "-c", "small.json")
    assert code == 0, out + err
    return directory, folder_of(directory), out


@pytest.mark.slow
def test_a_run_logs_its_size_before_the_first_step_and_writes_everything_in_its_config(trained):
    _, folder, out = trained
    before = out[: out.index("Epoch 1 [2/5")]
    assert "5 steps per epoch, 10 in all, of 64 examples each, on 1 x cpu" in before
    for fact in ("Train data: 320 examples", "The model has", "memory about"):
        assert fact in before
    ends = [row for row in json_lines(folder / "metrics.jsonl") if row.get("end_of_epoch")]
    assert ends[0]["compile_seconds"] > 0 == ends[1]["compile_seconds"]
    names = {"learning_rate", "gradient_norm", "test_accuracy", "steps_per_second", "waiting"}
    assert names <= ends[0].keys()
    assert "train_accuracy" not in ends[0]  # its phase is EVAL
    with open(folder / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    losses = [float(row["test_loss"]) for row in table if row["test_loss"]]
    assert losses == pytest.approx([row["test_loss"] for row in ends])
    confusion = json.loads((folder / "pictures" / "confusion_matrix-test.json").read_text())
    assert confusion["epoch"] == 2 and sum(map(sum, confusion["matrix"])) == 100
    assert 'type="application/json"' in (folder / "report.html").read_text()  # curves


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_to_the_same_numbers(trained):
    directory, folder, _ = trained
    ends = [row for row in json_lines(folder / "metrics.jsonl") if row.get("end_of_epoch")]
    code, out, err = run(directory, "--evaluate", folder / "checkpoint-epoch_1.params")
    assert code == 0, err
    evaluation = json.loads(out)
    metrics = {name: ends[0][name] for name in ("test_loss", "test_accuracy")}
    assert evaluation["metrics"] == metrics
    assert evaluation["checkpoint"] == "checkpoint-epoch_1"
    assert (evaluation["epoch"], evaluation["step"]) == (1, 5)
    assert json.loads((folder / "evaluation-checkpoint-epoch_1.json").read_text()) == evaluation
    environment = json.loads((folder / "environment.json").read_text())
    assert evaluation["data"] == {"test": environment["data"]["test"]["fingerprint"]}
    assert evaluation["overrides"] == {}
    code, _, err = call(directory, "--evaluate", folder / "checkpoint-epoch_7.params")
    assert code == 2 and "checkpoint-epoch_7.params: there is no such checkpoint" in err
    assert "checkpoint-epoch_2.params" in err


@pytest.mark.slow
def test_an_evaluation_with_overrides_has_a_file_of_its_own_that_names_them(trained):
    directory, folder, _ = trained
    checkpoint, files = folder / "checkpoint-epoch_2.params", {}
    for override in ("data.args.test_size=60", "data.args.test_size=40", "checkpoint.dir=other"):
        code, out, err = run(directory, "--evaluate", checkpoint, override)
        assert code == 0, err
        files[override] = err.split("Written to ")[1].splitlines()[0]
        assert json.loads(Path(files[override]).read_text()) == json.loads(out)
    few, fewer, same = (json.loads(Path(file).read_text()) for file in files.values())
    assert few["overrides"] == {"data.args.test_size": 60} and same["overrides"] == {}
    assert len({row["data"]["test"] for row in (few, fewer, same)}) == 3 == len(set(files.values()))
    assert files["checkpoint.dir=other"].endswith("/evaluation-checkpoint-epoch_2.json")


@pytest.mark.slow
def test_a_watcher_evaluates_checkpoints_as_they_appear_until_the_run_has_ended(small):
    settings = [
        "training.eval_every=0",
        "training.epochs=30",
        "logging.trackers=[]",
        "callbacks=[]",
        "checkpoint.keep=null",
    ]
    training = start(small, "-c", "small.json", *settings)
    while not list(small.glob("saved/Small/*/checkpoint-epoch_1.params")):
        assert training.poll() is None
        time.sleep(0.05)
    code, out, err = run(small, "--watch", folder_of(small))
    assert code == 0, err
    assert training.wait(60) == 0
    evaluations = json_lines(folder_of(small) / "evaluations.jsonl")
    assert [row["epoch"] for row in evaluations] == list(range(1, 31))
    assert evaluations[-1]["metrics"]["test_loss"] < evaluations[0]["metrics"]["test_loss"]
    assert [json.loads(line) for line in out.splitlines()] == evaluations
    assert run(small, "--watch", folder_of(small))[:2] == (0, "")  # nothing is left to evaluate


@pytest.mark.slow
def test_a_report_is_written_again_and_a_missing_folder_is_refused(trained):
    directory, folder, _ = trained
    (folder / "report.html").unlink()
    code, out, err = call(directory, "--report", folder)
    assert (code, out.strip()) == (0, str(folder / "report.html")), err
    code, _, err = call(directory, "--report", directory / "nothing")
    assert code == 2 and "nothing" in err


@pytest.mark.slow
def test_a_fast_run_makes_two_steps_and_writes_nothing(small):
    code, out, err = run(small, "-c", "small.json", "--fast-dev-run")
    assert code == 0, err
    assert "2 steps per epoch, 2 in all" in out and "Epoch 1 [test] avg Loss" in out
    assert not (small / "saved").exists()
    code, _, err = call(small, "-c", "small.json", "--fast-dev-run", "--check")
    assert code == 2 and "do not go together" in err


@pytest.mark.torture
def test_debug_compiles_nothing_so_that_a_print_sees_values(small):
    """The first step is enough: test_programs.py has whole runs."""
    (small / "own.py").write_text(
        "import os\n"
        "from training.base import Update\nfrom training.update import gradient_update\n"
        "def shown(objective, optimizer) -> Update:\n"
        "    plain = gradient_update(objective, optimizer)\n"
        "    def step(ts, batch, valid):\n"
        "        print('step', int(ts.step), float(batch[0].mean()), flush=True)\n"
        "        os._exit(9)\n"
        "    return plain._replace(step=step)\n"
    )
    settings = ("update=own.shown", "logging.gradient_norm=false")
    code, out, err = run(small, "-c", "small.json", *settings, "--debug")
    assert code == 9, err
    step, mean = out.rpartition("\nstep ")[2].split()
    assert step == "0" and 0 < float(mean) < 255


@pytest.mark.slow
def test_a_callback_that_raises_is_named_and_the_state_is_saved(small):
    code, _, err = run(small, "-c", "small.json", 'callbacks=["own.failing"]')
    assert code == 1
    assert "callbacks: Failing.on_steps failed in epoch 1 after step 4: " in err
    assert "own.py, line 8: KeyError" in err
    assert (folder_of(small) / "checkpoint-step_4.params").exists()
    assert "Traceback" in (folder_of(small) / "train.log").read_text()


@pytest.mark.torture
def test_the_debugger_opens_where_the_error_was_raised(small):
    process = start(small, "-c", "small.json", 'callbacks=["own.failing"]', "--post-mortem")
    process.stdin = None
    out, err = process.communicate(timeout=120)
    assert "(Pdb)" in out and "own.py(8)on_steps()" in out and 'return {"stop": {}' in out
    assert process.returncode == 1, err


@pytest.mark.slow
def test_a_signal_does_not_wait_for_a_tracker(small):
    (small / "own.py").write_text(
        "import time\nfrom training.base import Tracker\n"
        "class Stuck:\n    def scalars(self, step, values):\n        time.sleep(1000)\n"
        "def stuck() -> Tracker:\n    return Stuck()\n"
    )
    settings = ['logging.trackers=["own.stuck"]', "training.epochs=100000", "callbacks=[]"]
    process = start(small, "-c", "small.json", *settings)
    while not list(small.glob("saved/Small/*/checkpoint-*.params")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert time.monotonic() - began < 6
    assert "tracker stuck: dropped" in out + err


@pytest.mark.slow
def test_trackers_that_are_not_named_are_not_imported():
    code = (
        "import sys, train; train.main(['--check']); "
        "print('\\n'.join(sys.modules), file=sys.stderr)"
    )
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120, "check": True}
    out = subprocess.run([sys.executable, "-c", code], **options)
    slow = {"training.watching.trackers.wandb_run", "wandb", "tensorboardX", "training.report.page"}
    assert not slow & set(out.stderr.splitlines())
