"""benchmarks.gpu on the CPU: every part runs at a tiny size; none takes the results of others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import LIMITS, page, run

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


def marked(part):
    mark = pytest.mark.slow if part == "device" else pytest.mark.torture
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
