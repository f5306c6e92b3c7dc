"""benchmarks.gpu on the CPU: every part runs at a tiny size; none takes the results of others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import LIMITS, arguments, page, rows_in, run
from benchmarks.gpu_parts import row_of

ROOT = Path(__file__).resolve().parents[2]
KEYS = {  # some of the keys of the last row of each part
    "device": {"device", "versions"},
    "airbench": {"seconds", "examples_per_second", "waiting"},
    "gpt2": {"tokens_per_second", "steps"},
    "resume": {"flags", "resumed"},
    "start": {"start", "seconds"},
    "waiting": {"data", "waiting"},
    "tests": {"passed", "failed"},
    "speed": {"peer", "precision", "rate", "tflops"},
}


QUICK = ("device", "airbench", "resume", "waiting")


def marked(part):
    mark = pytest.mark.slow if part in QUICK else pytest.mark.torture
    return pytest.param(part, marks=mark)


@pytest.mark.parametrize("part", [marked(part) for part in LIMITS])
def test_every_part_runs_at_a_tiny_size(part, tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--only", part]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*command, "--out", tmp_path], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    result = json.loads((tmp_path / "gpu.json").read_text())[part]
    assert (done.returncode, result["problem"]) == (0, None), done.stderr
    rows = result["rows"]
    assert KEYS[part.split()[0]] <= rows[-1].keys()
    assert (tmp_path / "gpu.md").read_text().strip() in done.stdout
    if part == "resume":  # on a CPU with or without the flags of a GPU
        assert {row["resumed"] for row in rows} == {row["again"] for row in rows} == {"equal bits"}
    if part == "tests":
        assert rows[-1]["passed"] > 0 and rows[-1]["failed"] == 0
    if part.startswith("speed"):
        assert ["ours", "bfloat16"] in [[row["peer"], row["precision"]] for row in rows]
        assert not [row["problem"] for row in rows if "problem" in row]


def test_the_results_of_all_parts_are_not_replaced_by_those_of_one(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu", "--only", "device"])
    with pytest.raises(SystemExit):
        arguments()
    assert "add --out FOLDER" in capsys.readouterr().err


def test_a_part_that_fails_or_takes_too_long_is_reported(monkeypatch):
    monkeypatch.chdir(ROOT)
    failed = run("nonsense", 60, True)
    assert failed["rows"] == [] and "KeyError: 'nonsense'" in failed["problem"]
    slow = run("airbench", 0.2, True)
    assert slow["problem"] == "it was ended after 0 s" and slow["seconds"] < 20
    text = page(
        {
            "airbench": slow,
            "start": {"rows": [{"start": "cold", "seconds": 3.14159}]} | {"problem": None},
        }
    )
    assert "| cold | 3.14 |" in text and "- airbench: it was ended after 0 s" in text


def test_what_a_part_printed_before_it_was_killed_counts(tmp_path):
    with open(tmp_path / "out", "w+") as file:
        file.write('{"a": 1}\nXLA says something\n{"a": 2}\n{"a": ')
        assert rows_in(file) == [{"a": 1}, {"a": 2}]


def test_the_last_row_of_each_form_counts():
    row = {"model": "gpt", "precision": "float32", "peer": "ours", "rate": 1.0, "turns": 1}
    other = row | {"peer": "flax", "problem": "it ended with exit code 1"}
    rows = [row, other, row | {"rate": 2.0, "turns": 2}]
    text = page({"speed gpt": {"rows": rows, "problem": "it was ended after 110 s"}})
    assert text.count("| ours |") == 1 and "| ours | 2 | 2 |" in text
    assert "exit code 1" in text and "- speed gpt: it was ended after 110 s" in text


def test_a_form_that_fails_keeps_the_rates_of_its_earlier_turns():
    cost = {"flops": 1e6, "unit": "images", "peak": None}
    ended = row_of("gpt", ("float32", "flax", ""), "it ended with exit code -9", [3.0, 5.0], cost)
    assert ended["rate"] == 4.0 and ended["problem"] == "it ended with exit code -9"
    never = row_of("gpt", ("float32", "flax", ""), "ModuleNotFoundError: flax", [], cost)
    assert never.keys() == {"model", "precision", "peer", "problem"}
