"""The README is correct: its examples run, its tables are complete, its links and files exist."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from wiring.config import SECTIONS
from wiring.parts import KINDS, find, section_options

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_custom_parts_work_as_the_readme_shows(tmp_path):
    copy = tmp_path / "project"
    unneeded = (".git", ".venv", "saved", "data", "__pycache__", "tests", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*unneeded))
    files = [block for block in BLOCKS if block.startswith("# ")]
    assert len(files) == 3
    for block in files:
        path = copy / block.split("\n")[0].removeprefix("# ")
        path.write_text((path.read_text() + "\n\n" if path.exists() else "") + block)
    parts = ["model.name=two_layers", 'model.args={"width": 32}', "optimizer.name=sign_descent"]
    parts += ["data=stripes", "training.epochs=3", "loader.batch_size=30"]
    command = [sys.executable, "train.py", *parts]
    run = subprocess.run(
        command, cwd=copy, capture_output=True, text=True, env=os.environ, timeout=120, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Epoch 3 [test] accuracy @ " in run.stdout


def test_the_notebook_example():
    (block,) = [block for block in BLOCKS if "fit(" in block]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4)).astype(np.float32)
    y = x[:, :3].argmax(1)
    scope = {"x": x[:200], "y": y[:200], "x_test": x[200:], "y_test": y[200:]}
    exec(block, scope)
    assert scope["run"].history[-1]["test_accuracy"] > 0.9
    assert (np.asarray(scope["logits"]).argmax(1) == y[200:]).mean() > 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_of_names_is_complete(kind):
    (row,) = [
        line
        for line in README.splitlines()
        if re.match(rf"\| `(loader\.|logging\.|data\.args\.)?{kind}` \|", line)
    ]
    named = set(re.findall(r"`(\w+)`", row.split("|")[2]))
    assert named == set(find(kind)[0])


@pytest.mark.parametrize("section", SECTIONS)
def test_the_table_of_sections_is_complete(section):
    (row,) = [line for line in README.splitlines() if line.startswith(f"| `{section}` |")]
    options = {field.name for field in fields(section_options(SECTIONS[section]))}
    assert set(re.findall(r"`(\w+)`", row.split("|")[2])) == options


def test_links_and_pictures_exist():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target
