"""Reports of runs whose files are missing, incomplete or damaged, and the state of a run."""

import fcntl
import json
import os
import random
import re

import pytest

from tests.training.report.saved_run import report, save, save_pictures
from training.checkpoint.resume import Lock
from training.report.page import write_report
from training.report.read import read_log
from utils import UserError

ODD_VALUES = [
    *(b"null", b"-1", b"1e999", b"9" * 400, b'"x"', b"[[]]", b"{}", b"true", b"[" * 3000),
    *(b'"\\ud800"', b"0", b"1e-320", b"[1, {}]"),
]


def test_an_incomplete_last_line_is_skipped_and_other_broken_lines_are_reported(tmp_path):
    whole = report(save(tmp_path / "whole", finished=False))
    cut = save(tmp_path / "cut", finished=False)
    with open(cut / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 5, "step": 43, "tra')  # a run in progress
    page = report(cut)
    assert page.charts() == whole.charts()
    assert not page.all("p", class_="problem")
    (cut / "metrics.jsonl").write_text("nonsense\n[]\n" + (cut / "metrics.jsonl").read_text())
    page = report(cut)
    assert page.charts() == whole.charts()
    problem = "3 lines of metrics.jsonl cannot be read and are left out"
    assert page.texts("p", class_="problem") == [problem]


def test_each_part_of_the_page_reports_its_missing_or_damaged_file(tmp_path):
    folder = save(tmp_path / "run")
    (folder / "pictures").mkdir()
    (folder / "metrics.jsonl").unlink()
    (folder / "config.json").write_text("{")
    (folder / "environment.json").write_text("[1]")
    (folder / "pictures" / "first_batch.png").write_text("GIF")
    (folder / "pictures" / "worst-test.json").write_text("{}")
    matrices = {"a": [[1, 2]], "b": [[-1]], "c": "x", "d": [[float("inf")]], "e": None, "f": []}
    for name, matrix in matrices.items():
        path = folder / "pictures" / f"confusion_matrix-{name}.json"
        path.write_text(json.dumps({"matrix": matrix}))
    page = report(folder)
    assert "Nothing has been measured yet." not in page.source  # which the first problem says
    problems = page.texts("p", class_="problem")
    matrix = "confusion_matrix-{}.json cannot be shown: its matrix "
    for problem in (
        "there is no metrics.jsonl: nothing has been measured yet",
        "config.json cannot be read: it is incomplete or not JSON",
        "environment.json cannot be read: it does not hold a JSON object",
        "first_batch.png cannot be shown: it is too large or not a PNG",
        "worst-test.json cannot be shown: it has no list of examples",
        matrix.format("a") + "is not a square of counts",
        matrix.format("b") + "is not a square of counts",
    ):
        assert problem in problems
    assert len(problems) == 11


@pytest.mark.slow
def test_no_damage_prevents_a_report(tmp_path):
    """Files are cut off, get random bytes in front, or values of other types."""
    folder, rng = save(tmp_path / "run"), random.Random(0)
    save_pictures(folder)
    names = ["metrics.jsonl", "config.json", "environment.json", "train.log"]
    names += [f"pictures/{path.name}" for path in folder.glob("pictures/*")]
    sound = {name: (folder / name).read_bytes() for name in names}
    for _ in range(60):
        for name in rng.sample(names, 2):
            data = bytearray(sound[name])
            if rng.random() < 0.7:  # another value instead of one
                values = list(re.finditer(rb"(?<=: )([^,{}\[\]\s]+)", data))
                value = rng.choice(values or [re.match(rb".*", data)])
                data[value.start() : value.end()] = rng.choice(ODD_VALUES)
            elif rng.random() < 0.5:
                data = data[: rng.randrange(len(data))]
            else:
                data = bytearray(rng.randbytes(40)) + data
            (folder / name).write_bytes(bytes(data))
        assert write_report([folder], tmp_path / "page.html").read_text().endswith("</html>\n")
        for name, data in sound.items():
            (folder / name).write_bytes(data)


@pytest.mark.parametrize("between", [0, 500, 20_000])
def test_warnings_at_both_ends_of_a_log_are_found(tmp_path, between):
    """A log that is shorter than what is read, longer, and with lines that are left out."""
    stamp = "2026-01-02 03:04:"
    early = [f"[main WARNING] : {stamp}{i:02},000 - early {i}" for i in range(5)]
    lines = [f"[main INFO]    : {stamp}30,000 - Step {i}" for i in range(between)]
    late = [f"[main WARNING] : {stamp}59,000 - late"]
    (tmp_path / "train.log").write_text("\n".join([*early, *lines, *late]) + "\n")
    found = read_log(tmp_path / "train.log")
    assert found.warnings == early + late
    assert (found.began, found.ended) == (f"{stamp}00", f"{stamp}59")


def test_a_folder_that_is_not_a_run(tmp_path):
    run = save(tmp_path / "saved" / "Sample" / "2026")
    missing = "nowhere: there is no such folder; name the folder of a run"
    with pytest.raises(UserError, match=missing):
        write_report([tmp_path / "nowhere"])
    no_run = r"saved: is not the folder of a run.*did you mean .*saved/Sample/2026\?"
    with pytest.raises(UserError, match=no_run):
        write_report([run, tmp_path / "saved"])
    with pytest.raises(UserError, match="a report needs at least one run"):
        write_report([])


def test_whether_a_run_is_finished_running_or_stopped(tmp_path):
    folder = save(tmp_path / "run", finished=False)
    assert report(folder).texts("h1") == ["Sample stopped"]
    handle = os.open(folder, os.O_RDONLY)  # as another process holds it
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert report(folder).texts("h1") == ["Sample running"]
    os.close(handle)
    lock = Lock(folder)  # as a run holds it
    assert report(folder).texts("h1") == ["Sample running"]
    lock.close()
    assert report(folder).texts("h1") == ["Sample stopped"]
    (folder / "finished.json").write_text("{}")
    assert report(folder).texts("h1") == ["Sample finished"]
