"""The pages of docs/ are true: commands and configs are accepted, examples run, links exist.

In a page, `<!-- runs -->` above a Python block says that it is run here; the blocks of a page run
in order, in one namespace and one empty folder.
"""

import json
import re
import shlex
import shutil
import subprocess
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
import yaml

import sweep
import train
from inference import convert_tflite, predict
from model.generate import Sampling, generate
from model.gpt import gpt
from training.devices.options import check_sharding
from training.kinds import KINDS
from utils import named_leaves
from wiring.build import parts_and_problems
from wiring.config import merged, override, read
from wiring.keys import keys, sections

ROOT = Path(__file__).resolve().parents[1]
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
WITH_README = PAGES | {"README.md": (ROOT / "README.md").read_text()}
NAMES_NEW_PARTS = (
    "add_your_own.md"  # the page whose configs name parts that a reader has yet to write
)


class Block(NamedTuple):
    page: str
    language: str
    text: str
    runs: bool


def blocks(page):
    """The fenced blocks of a page."""
    pattern = r"(<!-- runs -->\n)?^```(\w*)\n(.*?)^```"
    found = re.findall(pattern, WITH_README[page], re.DOTALL | re.MULTILINE)
    return [Block(page, language, text, bool(mark)) for mark, language, text in found]


ALL_BLOCKS = [block for page in WITH_README for block in blocks(page)]


def commands(program):
    """[(page, words)] of every command line of a program, in blocks and in sentences."""
    found = []
    for page, text in WITH_README.items():
        for line in re.findall(rf"python {program}( [^`\n]*)?", text.replace("\\\n", " ")):
            # An odd quote ends a quoted command for another machine.
            line = line.rstrip().removesuffix("'") if line.count("'") % 2 else line
            found.append((page, shlex.split(line, comments=True)))
    return found


def parametrize(cases):
    return pytest.mark.parametrize(("page", "words"), cases, ids=lambda value: str(value)[:80])


# Commands.


def check_overrides(page, file, overrides):
    """The overrides of a command name keys, parts and arguments that exist."""
    config = read(ROOT / (file if file and (ROOT / file).exists() else "config.json"))
    for text in overrides:
        config = override(config, text)
        assert text.split("=")[0].split(".")[0] in keys(), text
    check_config(page, config)


def check_config(page, config):
    """All of a config can be built, except for mistakes whose message the page shows.

    Files of data need not exist.
    """
    if page == NAMES_NEW_PARTS:
        return
    _, problems = parts_and_problems(config, page)
    missing_files = r"data(\.args)?: .*: no such (file|folder)"
    problems = [text for text in problems if not re.match(missing_files, text)]
    unexpected = [text for text in problems if text not in WITH_README[page]]
    assert not unexpected, unexpected


@parametrize(commands(r"train\.py"))
def test_train_accepts_every_command_line(page, words):
    arguments = train.parse(words)
    check_overrides(page, arguments.config or "config.json", arguments.overrides)
    assert arguments.list in (None, "all", "KIND", *KINDS)


@parametrize(commands(r"inference/convert_tflite\.py"))
def test_the_export_accepts_every_command_line(page, words):
    if words:
        arguments = convert_tflite.parse(words)
        folder = ROOT / "inference" / (arguments.name or "MNIST_Sample")  # not one of our own
        assert not folder.exists() or (folder / "verification.json").exists()
        check_overrides(page, arguments.config or "config.json", arguments.overrides)


@parametrize(commands(r"sweep\.py"))
def test_sweep_accepts_every_command_line(page, words):
    arguments = sweep.parse(words[: words.index(">")] if ">" in words else words)
    check_overrides(page, arguments.config, arguments.overrides)


@parametrize(commands(r"inference/predict\.py"))
def test_predict_accepts_every_command_line(page, words):
    predict.parse(words)


def test_modules_that_are_run_exist():
    for page, text in WITH_README.items():
        for module in re.findall(r"python -m ([\w.]+)", text):
            assert find_spec(module), f"{page}: {module}"


# Configs.


@pytest.mark.parametrize(
    "block",
    [block for block in ALL_BLOCKS if block.language == "json"],
    ids=lambda block: block.page,
)
def test_every_json_block_is_a_config_or_a_part_of_one(block):
    text = block.text.strip()
    given = json.loads(text if text.startswith("{") else f"{{{text}}}")
    extends = given.pop("extends", None)
    assert given.keys() <= keys().keys(), "mark JSON that is no config as text"
    for section in sections().keys() & given.keys():
        options = {field.name for field in fields(sections()[section])}
        assert given[section].keys() <= options
    base = read(ROOT / "config.json")
    check_config(block.page, merged(base, given) if extends else base | given)


def test_the_sharding_rules_in_the_table_are_valid():
    rules = re.findall(r"^\| `(.+?)` \|", PAGES["several_devices.md"], re.MULTILINE)
    assert len(rules) == 4
    for rule in rules:
        check_sharding(json.loads(rule))


# Python.


def mnist_files(folder):
    """What the page on exports has at hand: the files of a model, and raw images."""
    from inference.lowering.trace import trace
    from inference.to_onnx import write_onnx
    from inference.to_stablehlo import write_stablehlo
    from inference.to_tflite import write_tflite

    def function(weights, x):
        return x.reshape(x.shape[0], -1) @ weights

    weights = np.random.default_rng(0).normal(size=(784, 10)).astype(np.float32)
    traced = trace(function, weights, jax.ShapeDtypeStruct((28, 28, 1), np.float32))
    write_onnx(traced, folder / "mnist.onnx")
    write_tflite(traced, folder / "mnist.tflite")
    inputs = jax.ShapeDtypeStruct((28, 28, 1), np.float32)
    write_stablehlo(function, weights, inputs, None, folder / "mnist.stablehlo")
    return {"pixels": np.random.default_rng(1).integers(0, 256, (3, 28, 28, 1), np.uint8)}


def greedy_text(folder):
    """Write the decode step of a decoder; returns its text of 50 tokens, in JAX, which is longer
    than its context."""
    from inference.export import step_function
    from inference.lowering.trace import trace
    from inference.to_onnx import write_onnx

    model = gpt((12,), 11, dim=16, depth=1, norm="layer", bias=False)
    params = jax.tree.map(lambda leaf: 5 * leaf, model.init(jax.random.key(0))[0])
    cache = jax.eval_shape(lambda: model.cache(1)["cache"])
    inputs = {"token": jax.ShapeDtypeStruct((), np.int32)} | {
        name: leaf.update(shape=leaf.shape[1:]) for name, leaf in named_leaves(cache).items()
    }
    names = list(named_leaves(cache))
    step = partial(step_function, model, jax.tree.structure(cache), names)
    weights = {"params": jax.tree.map(np.asarray, params), "state": {}}
    write_onnx(trace(step, weights, inputs), folder / "gpt_decode.onnx")
    prompt = [7, 4, 9]
    return [*prompt, *generate(model, params, [prompt], 47, Sampling(temperature=0))[0]]


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({block.page for block in ALL_BLOCKS if block.runs}))
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": page}
    if page == "export.md":
        scope |= mnist_files(tmp_path)
    if page == "language_models.md":
        text = greedy_text(tmp_path)
    for block in blocks(page):
        if block.runs:
            assert block.language == "python"
            exec(compile(block.text, page, "exec"), scope)
    if page == "export.md":
        np.testing.assert_allclose(scope["logits"], scope["same"], rtol=1e-4, atol=1e-4)
    if page == "language_models.md":
        assert scope["text"] == text


def test_every_python_block_is_valid_python():
    for block in ALL_BLOCKS:
        if block.language == "python":
            compile(block.text, block.page, "exec")


def test_no_mark_is_without_a_block():
    for page, text in WITH_README.items():
        assert text.count("<!-- runs -->") == sum(block.runs for block in blocks(page)), page


# Scripts.


def test_the_scripts_are_valid():
    (script,), (manifest,) = (
        [block.text for block in blocks("several_devices.md") if block.language == language]
        for language in ("bash", "yaml")
    )
    checked = subprocess.run(
        [shutil.which("bash"), "-n"], input=script, capture_output=True, text=True, timeout=10
    )
    assert not checked.stderr
    job = yaml.safe_load(manifest)["spec"]["replicatedJobs"][0]
    pod = job["template"]["spec"]["template"]["spec"]["containers"][0]
    variables = {variable["name"]: variable.get("value") for variable in pod["env"]}
    name = f"{yaml.safe_load(manifest)['metadata']['name']}-{job['name']}-0-0"
    assert variables["JAX_COORDINATOR_ADDRESS"].startswith(f"{name}.")
    spec = job["template"]["spec"]
    processes = variables["JAX_NUM_PROCESSES"]
    assert processes == str(spec["completions"]) == str(spec["parallelism"])
    assert train.parse(pod["command"][2:]).resume == "auto"


# Links.


def anchors(path):
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", WITH_README)
def test_the_targets_of_links_and_the_pictures_exist(page):
    folder = ROOT if page == "README.md" else ROOT / "docs"
    text = re.sub(r"^```.*?^```", "", WITH_README[page], flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = folder / file if file else folder / page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def test_files_that_are_named_exist():
    """Paths in code marks, as `training/watching/hooks.py`."""
    for page, text in WITH_README.items():
        for name in re.findall(
            r"`((?:training|inference|model|data_loader|tests|configs)/[\w/.]+)`", text
        ):
            if page != NAMES_NEW_PARTS and not name.startswith("inference/mnist"):
                assert (ROOT / name).exists(), f"{page}: {name}"
