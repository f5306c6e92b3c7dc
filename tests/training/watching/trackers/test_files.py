"""What the trackers console, jsonl and csv write, read back by other code."""

import csv
import json
import logging

import pytest

from tests.runs import json_lines
from training.watching.publish import About
from training.watching.trackers.common import flattened
from training.watching.trackers.console import console
from training.watching.trackers.csv_file import csv as csv_tracker
from training.watching.trackers.jsonl import jsonl


def started(tracker, folder, step=0, title="Title"):
    folder.mkdir(exist_ok=True)
    tracker.start(About(folder, title, {}, step))
    return tracker


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_the_console_logs_every_value(caplog):
    caplog.set_level(logging.INFO, "main")
    values = {"train_loss": 0.123456789, "learning_rate": 3e-4, "waiting": float("nan")}
    console().scalars(22, values)
    assert [record.getMessage() for record in caplog.records] == [
        "Step 22: train_loss 0.123457, learning_rate 0.0003, waiting nan"
    ]


def test_texts_are_logged_and_kept_with_their_step(tmp_path, caplog):
    caplog.set_level(logging.INFO, "main")
    console().text(22, "samples", "Once\nupon")
    assert [record.getMessage() for record in caplog.records] == ["Step 22: samples\nOnce\nupon"]
    tracked = started(jsonl(), tmp_path)
    tracked.text(3, "samples", "Once\nupon")
    tracked.text(4, "samples", "a time")
    tracked.back_to(3)
    (line,) = (tmp_path / "tracked.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert (row["step"], row["samples"]) == (3, "Once\nupon")


def test_csv_adds_a_column_for_each_new_name(tmp_path):
    table = started(csv_tracker(), tmp_path)
    table.scalars(1, {"train_loss": 0.1, "a, b": 1 / 3})
    table.scalars(2, {"train_loss": float("nan")})
    table.scalars(3, {"test_loss": 1e-30, "train_loss": 2.0})
    header = (tmp_path / "metrics.csv").read_text().splitlines()[0]
    assert header == 'step,train_loss,"a, b",test_loss'
    read = rows(tmp_path / "metrics.csv")
    assert [row["step"] for row in read] == ["1", "2", "3"]
    assert [row["train_loss"] for row in read] == ["0.1", "nan", "2.0"]
    assert float(read[0]["a, b"]) == 1 / 3 and read[1]["a, b"] == ""
    assert [row["test_loss"] for row in read] == ["", "", "1e-30"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.csv"]


def test_csv_keeps_the_rows_up_to_the_step_at_which_a_run_resumes(tmp_path):
    table = started(csv_tracker("tables/all.csv"), tmp_path)
    for step in (0, 1, 2, 3):
        table.scalars(step, {"loss": step / 10, "late" if step == 3 else "early": 1.0})
    path = tmp_path / "tables" / "all.csv"
    with open(path, "a") as file:
        file.write("2,0.9")  # killed while writing
    table = started(csv_tracker("tables/all.csv"), tmp_path, step=2)
    assert [row["loss"] for row in rows(path)] == ["0.0", "0.1", "0.2"]
    table.scalars(3, {"loss": 0.33})
    table.scalars(4, {"loss": 0.44, "new": 5.0})
    table.back_to(3)
    table.scalars(4, {"loss": 0.45})
    assert [row["step"] for row in rows(path)] == ["0", "1", "2", "3", "4"]
    assert [row["loss"] for row in rows(path)] == ["0.0", "0.1", "0.2", "0.33", "0.45"]
    assert list(rows(path)[0]) == ["step", "loss", "early", "late", "new"]
    started(csv_tracker("tables/all.csv"), tmp_path)  # from the start
    assert path.read_text() == "step\n"


def test_jsonl_keeps_the_lines_up_to_the_step_at_which_a_run_resumes(tmp_path):
    tracked = started(jsonl(), tmp_path / "run_a")
    for step in (0, 1, 2, 3):
        tracked.scalars(step, {"loss": step / 10, "epoch": 1.0, "run": 5.0})
    path = tmp_path / "run_a" / "tracked.jsonl"
    head = {"run": "run_a", "title": "Title"}
    with open(path, "a") as file:
        incomplete = json.dumps(head | {"step": 1, "loss": 7})  # killed while writing
        deep = "[" * 20_000 + "]" * 20_000
        file.write(f'damaged\n{deep}\n{{"step": "1"}}\n{incomplete}')
    tracked = started(jsonl(), tmp_path / "run_a", step=2)
    tracked.scalars(3, {"loss": float("inf")})
    tracked.scalars(4, {"loss": 0.4})
    tracked.back_to(3)
    tracked.scalars(4, {"loss": 0.5})
    assert json_lines(path) == [
        head | {"step": 0, "loss": 0.0, "epoch": 1.0},
        head | {"step": 1, "loss": 0.1, "epoch": 1.0},
        head | {"step": 2, "loss": 0.2, "epoch": 1.0},
        head | {"step": 3, "loss": None},
        head | {"step": 4, "loss": 0.5},
    ]
    started(jsonl(), tmp_path / "run_a")
    assert json_lines(path) == []


def test_runs_that_share_a_file_keep_each_others_lines(tmp_path):
    path = tmp_path / "shared" / "all.jsonl"
    first = started(jsonl(str(path)), tmp_path / "run_a")
    first.scalars(1, {"loss": 1.0})
    second = started(jsonl(str(path)), tmp_path / "run_b")
    for step in (2, 3, 4):
        first.scalars(step, {"loss": 1.0})
        second.scalars(step, {"loss": 2.0})
    with open(path, "a") as file:
        file.write('{"run": "run_a", "tit')  # killed while writing
    first = started(jsonl(str(path)), tmp_path / "run_a", step=2)
    first.scalars(3, {"loss": 1.5})
    second.scalars(5, {"loss": 2.0})
    valid = {}
    for line in path.read_text().splitlines():
        try:
            line = json.loads(line)
        except ValueError:
            continue
        losses = valid.setdefault(line["run"], {})
        if line.get("back_to"):
            kept = {step: loss for step, loss in losses.items() if step <= line["step"]}
            valid[line["run"]] = kept
        else:
            losses[line["step"]] = line["loss"]
    assert valid == {"run_a": {1: 1.0, 2: 1.0, 3: 1.5}, "run_b": dict.fromkeys((2, 3, 4, 5), 2.0)}
    assert path.read_text().count("back_to") == 1


@pytest.mark.parametrize(
    ("tracker", "file"),
    [
        (csv_tracker, "/elsewhere/all.csv"),
        (csv_tracker, "../all.csv"),
        (csv_tracker, ""),
        (jsonl, "a/../b"),
    ],
)
def test_a_file_outside_the_run_folder_is_refused(tracker, file):
    with pytest.raises(ValueError, match=r"^file: must .*folder, got"):
        tracker(file)


def test_a_file_that_the_run_itself_writes_is_refused():
    for file in ("metrics.jsonl", "checkpoint-epoch_1.params"):
        with pytest.raises(ValueError, match=f"^file: the run itself writes '{file}'"):
            jsonl(file)


def test_a_config_is_flattened_to_its_paths():
    config = {
        "seed": 42,
        "model": {"name": "convnext", "args": {"dims": [8, 16], "act": None}},
        "optimizer": [{"name": "clip"}, {"name": "adamw", "args": {"groups": [[".*", 0.1]]}}],
        "callbacks": [],
    }
    assert flattened(config) == {
        "seed": 42,
        "model/name": "convnext",
        "model/args/dims": "[8, 16]",
        "model/args/act": None,
        "optimizer/0/name": "clip",
        "optimizer/1/name": "adamw",
        "optimizer/1/args/groups/0": '[".*", 0.1]',
        "callbacks": "[]",
    }
