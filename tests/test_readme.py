"""README.md and the pages of docs/ in PAGES: every example runs, every message is the one that the
program prints, and what is counted or generated is current. That all commands are accepted, and all
links have targets, is in test_docs.py."""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from training.kinds import KINDS, is_part, marker
from utils import UserError
from wiring import parts, parts_page
from wiring.build import build
from wiring.config import read

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    path: (ROOT / path).read_text()
    for path in (
        "README.md",
        "docs/configure.md",
        "docs/training.md",
        "docs/python.md",
        "docs/add_your_own.md",
        "docs/parts.md",
    )
}
README, OWN = PAGES["README.md"], PAGES["docs/add_your_own.md"]
CONFIGURE, TRAINING = PAGES["docs/configure.md"], PAGES["docs/training.md"]


def blocks(page, language):
    """The blocks of code of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def module_blocks(page):
    """[(path, code)] of the blocks that begin with the path of a file."""
    found = [re.match(r"# (\S+\.py)\n(.*)", code, re.DOTALL) for code in blocks(page, "python")]
    return [match.groups() for match in found if match]


def block_with(page, text):
    """The only block of Python on a page that contains a text."""
    (block,) = [code for code in blocks(page, "python") if text in code]
    return block


@pytest.fixture(scope="module")
def flowers():
    """Three classes that four numbers tell apart, as (x, y), (x_test, y_test)."""
    x = np.random.default_rng(0).normal(size=(400, 4)).astype(np.float32)
    y = x[:, :3].argmax(1)
    return (x[:300], y[:300]), (x[300:], y[300:])


def test_the_readme_is_short():
    assert len(README.encode()) <= 9 * 1024


def test_the_makefile_has_every_target():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for text in PAGES.values():
        assert set(re.findall(r"(?<=`)make (\w+)", text)) <= set(targets)


# The parts.


def test_the_committed_list_of_parts_is_current():
    assert PAGES["docs/parts.md"] == parts_page.text(), "run `make schema`"
    # In a process of its own, since the check of shapes wraps each function here.
    program = "from wiring import parts_page; print(parts_page.layers_text(), end='')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (ROOT / "docs" / "layers.md").read_text() == done.stdout, "run `make schema`"


# The README.


def test_the_reading_order_has_the_right_number_of_lines():
    rows = re.findall(r"^\| \[`?([\w./]+)`?\]\(([\w./]+)\) \| ([\d,]+) \|", README, re.MULTILINE)
    assert len(rows) == 19
    for name, path, count in rows:
        assert name == path
        files = sorted((ROOT / path).rglob("*.py")) if path.endswith("/") else [ROOT / path]
        true = sum(file.read_text().count("\n") for file in files)
        stated = int(count.replace(",", ""))
        assert abs(stated - true) <= 0.15 * true, f"{path} has {true} lines, README says {stated}"


@pytest.mark.slow
def test_the_model_of_the_readme():
    ((path, code),) = module_blocks(README)
    scope = {"__name__": path.removesuffix(".py").replace("/", ".")}
    exec(code, scope)
    assert is_part(scope["two_layers"], "two_layers", "model.two_layers", "model")
    assert parts.arguments(scope["two_layers"]).keys() - parts.FACTS == {"width"}
    model = scope["two_layers"]((8, 5, 3), 10, width=16)

    @jax.jit
    def gradient(key):
        params, state = model.init(key)
        x = jax.random.normal(key, (4, 8, 5, 3))
        return jax.grad(lambda params: (model.apply(params, state, x, train=True)[0] ** 2).sum())(
            params
        )

    gradients = gradient(jax.random.key(0))
    assert gradients["out"]["bias"].shape == (10,)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_the_example_of_fit(flowers):
    train_set, (x_test, y_test) = flowers
    scope = dict(zip(("x", "y", "x_test", "y_test"), (*train_set, x_test, y_test), strict=True))
    exec(block_with(README, "fit("), scope)
    assert scope["run"].history[-1]["test_accuracy"] > 0.9
    assert (np.asarray(scope["logits"]).argmax(1) == y_test).mean() > 0.9


# docs/configure.md, docs/training.md and docs/python.md


def test_the_messages_for_mistakes():
    (words,) = re.findall(r"train\.py (model\.name=convnxt .*)", CONFIGURE)
    with pytest.raises(UserError) as error:
        build(read(ROOT / "config.json", words.split()), "config.json")
    assert f"{error.value}\n" == block_of_text(CONFIGURE, "no model 'convnxt'")
    (shown,) = blocks(README, "text")
    assert set(shown.splitlines()) <= set(str(error.value).splitlines())


def test_the_table_of_weights(capsys):
    (words,) = re.findall(r"train\.py --check (model=mlp [^`]*)", CONFIGURE)
    config = read(ROOT / "config.json", [*shlex.split(words), "data=digits"])
    train.check(build(config, "config.json"), config, ())
    assert capsys.readouterr().out.endswith(block_of_text(CONFIGURE, "path "))


@pytest.mark.slow
def test_the_message_for_a_value_that_is_not_finite(flowers):
    from model.mlp import mlp
    from training.fit import fit
    from training.optimizers import adamw
    from utils import RunError

    def bad(logits, label):
        return jnp.sqrt(logits[0])

    with pytest.raises(RunError) as error:
        fit(mlp((4,), 3), flowers[0], loss=bad, optimizer=adamw(), detect_nans=True)
    texts = block_of_text(TRAINING, "sqrt"), str(error.value)
    shown, true = (re.sub(r"\s+", " ", text) for text in texts)
    numbers = r"-?\d[\d.]*"
    form = re.sub(numbers, "N", shown.split("bad (")[1].split("53 of")[0])
    assert form in re.sub(numbers, "N", true)
    assert shown.split(" own_loss.py")[0] in true


@pytest.mark.slow
def test_fit_with_all_kinds_of_arguments(flowers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (x, y), (x_val, y_val) = flowers
    scope = {"x": x, "y": y, "x_val": x_val, "y_val": y_val}
    exec(block_with(PAGES["docs/python.md"], "run = fit("), scope)
    assert scope["run"].history[-1]["val_accuracy"] > 0.9
    assert {"metrics.csv", "metrics.jsonl"} <= {path.name for path in Path("runs/a").iterdir()}


def block_of_text(page, part):
    """The only block of text on a page that contains this."""
    (text,) = [text for text in blocks(page, "text") if part in text]
    return text


# docs/add_your_own.md


@pytest.mark.slow
def test_your_own_parts_work_in_one_run(tmp_path):
    copy = tmp_path / "project"
    unneeded = (".git", ".venv", "saved", "data", "__pycache__", "tests", "docs", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*unneeded))
    for path, code in module_blocks(OWN):
        file = copy / path
        file.write_text((file.read_text() + "\n\n" if file.exists() else "") + code)
    (config,) = blocks(OWN, "json")
    (copy / "my_parts.json").write_text(config)
    done = subprocess.run(
        [sys.executable, "train.py", "-c", "my_parts.json"],
        cwd=copy,
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Stopped by StopAt after step" in done.stdout
    (folder,) = (copy / "saved" / "My_Parts").iterdir()
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["test_accuracy"] >= 0.95
    assert {"test_margin", "train_loss_views"} <= row.keys()
    assert json.loads((folder / "latest.json").read_text())["step"] == row["step"]


def test_every_kind_has_an_example_of_your_own():
    (config,) = blocks(OWN, "json")
    code = "\n".join(code for _, code in module_blocks(OWN))
    defined = re.findall(r"^def (\w+)\([^)]*\) -> (\w+):", code, re.MULTILINE)
    kinds = set(KINDS) - {"collate_fn", "parse"}  # in docs/batches.md and docs/data.md
    kinds -= {"tokenizer"}
    assert "() -> Tokenizer:" in (ROOT / "docs" / "language_models.md").read_text()
    assert {marker(kind).__name__ for kind in kinds} == {annotation for _, annotation in defined}
    assert all(f'"{name}"' in config for name, _ in defined)


@pytest.mark.torture
def test_the_callback_pauses_a_run_that_then_continues(flowers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = block_with(OWN, "TimeBudget(3600)")
    assert code.count("time.monotonic()") == 2
    pauses = itertools.count()  # in place of the clock, so that the machine's speed does not matter
    scope = dict(zip(("x", "y"), flowers[0], strict=True)) | {"now": lambda: next(pauses)}
    steps = []
    for _ in range(2):
        exec(code.replace("time.monotonic()", "now()").replace("3600", "20"), scope)
        assert scope["run"].signal == "the time budget"
        assert scope["run"].cut_short
        steps.append(scope["run"].step)
    assert 0 < steps[0] < steps[1]
