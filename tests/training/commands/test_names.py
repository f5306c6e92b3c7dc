"""Chosen names of runs, and the best checkpoints of an evaluator."""

import json
import os
import signal
from types import SimpleNamespace

import pytest

from tests.runs import json_lines
from tests.training.checkpoint.test_keeper import a_run, end_epoch
from tests.wiring.conftest import VALID
from training.checkpoint import run_folder as folder
from training.checkpoint.keeper import Keeper
from training.checkpoint.resume import unfinished
from training.commands import evaluate
from training.devices.signals import end_at_signals, handled
from training.options import CheckpointOptions
from utils import UserError
from utils.files import locked
from wiring.build import build


def begin(path, finished=False):
    """Make a folder look like that of a run that has begun."""
    for name in ["config.json", "environment.json"] + ["finished.json"] * finished:
        (path / name).write_text("{}")
    return path


def test_a_chosen_name_is_the_folder_and_must_be_new(tmp_path):
    first = begin(folder.new_folder(tmp_path, "T", "first"))
    assert first == tmp_path / "T" / "first"
    with pytest.raises(UserError, match=rf"run_name: {first} exists already; .* --resume {first}"):
        folder.new_folder(tmp_path, "T", "first")
    (tmp_path / "T" / "mine").mkdir()
    (tmp_path / "T" / "mine" / "notes.txt").write_text("not of a run")
    with pytest.raises(UserError, match="mine exists already"):
        folder.new_folder(tmp_path, "T", "mine")


def test_the_folder_of_a_process_that_was_killed_before_its_run_began_is_taken_over(tmp_path):
    killed = folder.new_folder(tmp_path, "T", "name")
    (killed / "model").mkdir()
    (killed / "environment.json").write_text("{}")
    (killed / ".config.json.77.tmp").write_text("{")
    assert unfinished(tmp_path, "T", "name")[0] is None
    assert folder.new_folder(tmp_path, "T", "name") == killed


def test_auto_resumes_the_run_of_the_chosen_name_alone(tmp_path):
    begin(folder.new_folder(tmp_path, "T", "other"))
    assert unfinished(tmp_path, "T", "mine[1]")[0] is None
    mine = begin(folder.new_folder(tmp_path, "T", "mine[1]"), finished=True)
    begin(folder.new_folder(tmp_path, "T", "later"))
    keeper = Keeper(mine, CheckpointOptions())
    end_epoch(keeper, a_run(1))
    keeper.wait()
    run, _ = unfinished(tmp_path, "T", "mine[1]")
    run.lock.close()
    assert run.folder == mine  # also if it is finished, which is then said


@pytest.mark.parametrize("left", [None, "metrics.jsonl", "checkpoint-epoch_1.params"])
def test_a_signal_deletes_the_folder_of_a_run_only_if_none_has_begun(tmp_path, monkeypatch, left):
    """Also if its config.json is written already: the same command may name it again."""
    ended, run = [], folder.new_folder(tmp_path, "T", "name")
    for name in ("train.log", "config.json"):
        (run / name).write_text("content")
    if left:
        (run / left).write_text("content")
    monkeypatch.setattr(os, "_exit", ended.append)
    before = {number: signal.getsignal(number) for number in handled()}
    try:
        end_at_signals(run)
        signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended and run.exists() == bool(left)


@pytest.mark.parametrize("name", ["a/b", "", "..", ".hidden", "checkpoint-1", 7])
def test_a_name_that_no_folder_can_have_is_refused(name):
    with pytest.raises(UserError, match=r"^c: run_name: must "):
        build(VALID | {"run_name": name}, "c")


class Evaluation:
    """Stands in for the evaluation of a checkpoint, while the training process goes on."""

    sets = ("test",)

    def __init__(self, losses, meanwhile):
        self.losses, self.meanwhile = losses, meanwhile

    def row(self, run, name):
        epoch = int(name.split("_")[1])
        self.meanwhile(run, epoch)
        loss = self.losses[epoch - 1]
        return {"checkpoint": name, "epoch": epoch, "metrics": {"test_loss": loss}}

    def close(self):
        pass


def test_an_evaluator_keeps_its_own_best(tmp_path, monkeypatch, capsys):
    """The training process, which measures nothing, keeps one checkpoint, and writes the next one
    while the evaluator reads."""
    (tmp_path / "config.json").write_text("{}")
    keeper, losses = Keeper(tmp_path, CheckpointOptions(keep=1)), [3, 1, 2, None, 1.5]

    def train_on(run, epoch):
        if epoch < len(losses):
            end_epoch(keeper, a_run(epoch + 1))
            keeper.wait()
            assert (run / f"checkpoint-epoch_{epoch}.params").exists()  # it is being read
        else:
            (run / "finished.json").write_text("{}")

    end_epoch(keeper, a_run(1))
    keeper.wait()
    monkeypatch.setattr(evaluate, "CheckpointEvaluation", lambda _: Evaluation(losses, train_on))
    options = CheckpointOptions(monitor="test_loss", keep=1)
    evaluate.watch(SimpleNamespace(checkpoint=options, unfitted={}), tmp_path)
    rows = json_lines(tmp_path / "evaluations.jsonl")
    assert [row["best"] for row in rows] == [True, True, False, False, False]
    assert json.loads((tmp_path / "evaluator.json").read_text()) == {
        "best": [["checkpoint-epoch_2", 1]],
        "reading": None,
    }
    assert (tmp_path / "checkpoint-epoch_2.params").exists()
    assert "checkpoint-epoch_2.params (1.0000)" in capsys.readouterr().err
    evaluate.watch(
        SimpleNamespace(checkpoint=options, unfitted={}), tmp_path
    )  # again: the series is read back
    assert "checkpoint-epoch_2.params (1.0000)" in capsys.readouterr().err


def test_the_name_of_a_run_that_is_being_trained_is_not_offered_to_resume(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"mine exists already; .* continue that run with --resume"):
        folder.new_folder(tmp_path.parent, tmp_path.name, "mine")
    lock = locked(tmp_path / "mine")
    with pytest.raises(UserError, match=r"exists already; another process is training this run"):
        folder.new_folder(tmp_path.parent, tmp_path.name, "mine")
    os.close(lock)
