"""Building parts from a config: facts, defaults, schedules, nested parts and a user's own parts."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from data_loader.base import class_names
from tests.processes import call, run
from training.base import Optimizer
from training.kinds import KINDS, find
from training.schedules import cosine
from training.update import gradient_update
from utils import UserError, named_leaves
from wiring.build import build
from wiring.config import override, read

RULES = [["a", "lion"], ["b", "adam"]]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_facts_fill_arguments_that_the_config_leaves_out(valid):
    parts = build(valid, "c")
    assert parts.facts == {
        "num_classes": 10,
        "steps_per_epoch": 4,
        "total_steps": 8,
        "input_shape": (28, 28, 1),
    }
    out, _ = parts.model.apply(*parts.model.init(jax.random.key(0)), jnp.zeros((2, 28, 28, 1)))
    assert out.shape == (2, 10)
    parts = build(override(valid, "model.args.num_classes=7"), "c")
    out, _ = parts.model.apply(*parts.model.init(jax.random.key(0)), jnp.zeros((2, 28, 28, 1)))
    assert out.shape == (2, 7)


@pytest.mark.parametrize(("shape", "outputs"), [((), 1), ((1,), 1), ((3,), 3), ((2, 2), None)])
def test_a_regression_needs_no_number_of_classes(valid, tmp_path, shape, outputs):
    x, y = np.zeros((8, 4), np.float32), np.zeros((8, *shape))
    np.savez(tmp_path / "train.npz", x=x, y=y)
    valid |= {"data": {"name": "arrays", "args": {"train": str(tmp_path / "train.npz")}}}
    valid |= {"loss": "mse", "metrics": ["rmse"], "preprocess": []}
    if outputs is None:
        with pytest.raises(UserError, match="mlp needs 'num_classes', which is unknown"):
            build(valid, "c")
        return
    parts = build(valid, "c")
    assert parts.model.apply(*parts.model.init(jax.random.key(0)), x)[0].shape == (8, outputs)


NESTED = """
import numpy as np
from data_loader.base import Data

def table(names: tuple[str, ...]) -> Data:
    x = {name: np.zeros((i + 1,), np.float32) for i, name in enumerate(names)}
    return Data((x, np.int32(0)), {"train": 64}, lambda: None, num_classes=2)

def scalars() -> Data:
    return Data(([1, 2.0], np.int32(0)), {"train": 64}, lambda: None, num_classes=2)
"""


def test_a_preprocess_that_does_not_fit_nested_inputs_is_named(valid, tmp_path, monkeypatch):
    (tmp_path / "nested_data.py").write_text(NESTED)
    monkeypatch.syspath_prepend(tmp_path)
    valid["data"] = {"name": "nested_data.table", "args": {"names": ["age", "size"]}}
    examples = (
        r"preprocess: does not fit the data's examples, age float32\[1\], size float32\[2\]: "
    )
    for name in ("to_unit", "operator.neg"):
        with pytest.raises(UserError, match=examples + ".* it gets the whole dict, or list"):
            build(valid | {"preprocess": [name]}, "c")
    valid["data"] = "nested_data.scalars"
    with pytest.raises(UserError, match=r"examples, 0 int64\[\], 1 float64\[\]: "):
        build(valid, "c")


def test_the_resolved_config_holds_the_defaults_and_builds_the_same(valid):
    resolved = build(valid, "c").config
    assert resolved["optimizer"]["args"]["b1"] == 0.9
    assert resolved["training"]["precision"] == "float32"
    again = build(json.loads(json.dumps(resolved)), "c").config
    assert json.dumps(again) == json.dumps(resolved)


def test_each_class_has_one_name(valid, tmp_path):
    np.savez(tmp_path / "fruit.npz", x=np.zeros((64, 3)), y=np.arange(64) % 3)
    args = {"train": str(tmp_path / "fruit.npz"), "classes": ["fig", "pear", "plum"]}
    config = valid | {"data": {"name": "arrays", "args": args}, "preprocess": []}
    parts = build(config, "c")
    assert parts.facts["num_classes"] == 3 and class_names(parts.data) == args["classes"]
    with pytest.raises(UserError, match="data: `classes` has 3 names, but num_classes is 4"):
        build(override(config, "data.args.num_classes=4"), "c")


def steps(optimizer, count=8):
    """The updates of the first steps on a quadratic function."""
    params = {"weight": jnp.arange(6.0).reshape(2, 3) - 2, "bias": jnp.ones(3)}
    state, all_updates = optimizer.init(params), []
    for _ in range(count):
        updates, state = optimizer.update(jax.tree.map(lambda p: 2 * p, params), state, params)
        params = jax.tree.map(jnp.add, params, updates)
        all_updates.append(updates)
    return all_updates


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), a, b)


def test_the_schedule_multiplies_the_learning_rate_of_an_optax_optimizer(valid):
    args = {"learning_rate": 0.01, "momentum": 0.9}
    config = valid | {"optimizer": {"name": "optax.rmsprop", "args": args}, "schedule": "cosine"}
    reference = optax.rmsprop(lambda k: 0.01 * cosine(steps=8)(k), momentum=0.9)
    assert_close(steps(build(config, "c").optimizer), steps(reference))


def annotated_as_float(learning_rate: float = 0.5):
    return optax.sgd(float(learning_rate))


def named_lr(lr=0.5):
    return optax.sgd(float(lr))


@pytest.mark.parametrize("factory", [annotated_as_float, named_lr])
def test_the_schedule_multiplies_the_updates_if_the_rate_must_be_a_number(
    valid, monkeypatch, factory
):
    monkeypatch.setattr(optax, "plain_for_test", factory, raising=False)
    config = valid | {"optimizer": "optax.plain_for_test", "schedule": "cosine"}
    reference = optax.sgd(lambda k: 0.5 * cosine(steps=8)(k))
    assert_close(steps(build(config, "c").optimizer), steps(reference))


def test_a_list_of_optimizers_is_a_chain_and_can_contain_optax(valid):
    config = valid | {
        "optimizer": [
            {"name": "clip_by_global_norm", "args": {"max_norm": 0.5}},
            {"name": "optax.add_decayed_weights", "args": {"weight_decay": 0.1}},
            {"name": "sgd", "args": {"lr": 0.1}},
        ]
    }
    reference = optax.chain(
        optax.clip_by_global_norm(0.5), optax.add_decayed_weights(0.1), optax.sgd(0.1)
    )
    assert_close(steps(build(config, "c").optimizer), steps(reference))


def with_critic(objective, optimizer, *, critic: Optimizer, other: Optimizer | None = None):
    """An update with optimizers of its own."""
    return gradient_update(objective, optimizer)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({}, ["learning_rate"]),
        (
            {"update": {"name": "optax.with_critic", "args": {"critic": "sgd", "other": "lion"}}},
            ["learning_rate_critic", "learning_rate_other", "learning_rate"],
        ),
        (
            {
                "update": {
                    "name": "optax.with_critic",
                    "args": {"critic": {"name": "groups", "args": {"rules": RULES}}},
                }
            },
            ["learning_rate_critic_lion", "learning_rate_critic_adam", "learning_rate"],
        ),
        (
            {"update": {"name": "alternating", "args": {"discriminator": "lion"}}},
            ["learning_rate_discriminator", "learning_rate_generator"],
        ),
        (
            {"optimizer": {"name": "groups", "args": {"rules": [*RULES, ["c", "lion"]]}}},
            ["learning_rate_lion_0", "learning_rate_adam", "learning_rate_lion_1"],
        ),
    ],
)
def test_learning_rates_are_named_after_their_optimizers(valid, monkeypatch, change, names):
    monkeypatch.setattr(optax, "with_critic", with_critic, raising=False)
    text = json.dumps(change).replace('"sgd"', '{"name": "sgd", "args": {"lr": 0.2}}')
    rates = build(valid | json.loads(text), "c").rates
    assert list(rates) == names
    if "learning_rate_other" in names:
        assert [rate(0) for rate in rates.values()] == [0.2, 0.0001, 0.01]


def test_a_logged_learning_rate_is_what_multiplies_the_update(valid):
    """Of each group, whatever multiplies it: schedules, factors, and a chain of Optax."""

    def sgd_at(lr):
        return {"name": "sgd", "args": {"lr": lr}}

    def by(name, optimizer, **args):
        return {"name": name, "args": {"optimizer": optimizer, **args}}

    later = {"name": "piecewise", "args": {"values": [0, 1], "boundary_steps": [2]}}
    falls = {"name": "linear", "args": {"steps": 4}}
    halved = by("scaled", by("scheduled", sgd_at(0.3), schedule=falls), rate=0.5)
    scale = {"name": "optax.scale", "args": {"step_size": 0.25}}
    nested = {"name": "groups", "args": {"rules": [[".*", sgd_at(0.5)]]}}
    rules = [
        ["a", by("scheduled", sgd_at(0.1), schedule=later)],
        ["b", by("lookahead", halved)],
        ["c", [nested, scale]],
        ["d", sgd_at(0.7)],
    ]
    optimizer = {"name": "groups", "args": {"rules": rules}}
    schedule = {"name": "piecewise", "args": {"values": [1, 0.5], "boundary_steps": [3]}}
    parts = build(valid | {"optimizer": optimizer, "schedule": schedule}, "c")
    params = {name: jnp.ones(()) for name in "abcd"}
    state = parts.optimizer.init(params)
    for step in range(4):
        updates, state = parts.optimizer.update(params, state, params)
        rates = [jnp.asarray(rate(step)) for rate in parts.rates.values()]
        assert_close(rates, [-update for update in updates.values()])


def test_labels_name_the_same_metric_with_different_arguments(valid):
    labelled = {
        "top1": {"name": "top_k_accuracy", "args": {"k": 1}},
        "top3": {"name": "top_k_accuracy", "args": {"k": 3}},
    }
    assert list(build(valid | {"metrics": labelled}, "c").metrics) == ["top1", "top3"]


def test_the_resolved_config_holds_the_defaults_of_nested_parts(valid):
    rules = [[".*", {"name": "adamw"}]]
    config = valid | {"optimizer": {"name": "groups", "args": {"rules": rules}}}
    rules = build(config, "c").config["optimizer"]["args"]["rules"]
    assert rules[0][1]["args"]["b1"] == 0.9


def test_parts_in_arguments_are_built_and_their_mistakes_have_a_place(valid):
    rules = [["bias", "frozen"], [".*", {"name": "sgd", "args": {"lr": 0.1}}]]
    config = valid | {"optimizer": {"name": "groups", "args": {"rules": rules}}}
    first = steps(build(config, "c").optimizer, 1)[0]
    weight = -0.2 * (jnp.arange(6.0).reshape(2, 3) - 2)
    assert_close(first, {"weight": weight, "bias": jnp.zeros(3)})
    rules[1][1]["args"]["lr"] = "x"
    with pytest.raises(UserError, match=r"c: optimizer.args.rules.1.1.args.lr: must be a number"):
        build(config, "c")


@pytest.mark.slow
def test_a_users_part_is_found_by_name_and_a_broken_file_hides_only_its_own_parts(
    tmp_path, config_file, valid
):
    """In a copy of the project, as a user would have it."""
    project = copied_project(tmp_path)
    (project / "model" / "mine.py").write_text(MINE)
    (project / "model" / "broken.py").write_text("def oops(:\n")
    path = config_file(override(valid, "model=mine"))
    good = train(project, "-c", path, "--check")
    assert good.returncode == 0, good.stderr
    assert "7,850" in good.stdout
    bad = train(project, "-c", path, "--check", "model=broken")
    assert bad.returncode == 2
    assert "model.broken cannot be imported: model/broken.py, line 1: invalid syntax" in bad.stderr
    assert "Traceback" not in bad.stderr


MINE = '''
from model.base import Model
from model.layers.linear import linear, linear_init

def mine(input_shape: tuple[int, ...], num_classes: int) -> Model:
    """One linear layer."""
    def init(key):
        return linear_init(key, 784, num_classes), {}
    def apply(params, state, x, *, train=False, key=None):
        return linear(params, x.reshape(len(x), -1)), state
    return Model(init, apply)
'''


def copied_project(tmp_path):
    """A copy of the project's files in another folder."""
    project = tmp_path / "project"
    ignore = shutil.ignore_patterns(".git", ".venv", "saved", "data", "__pycache__", "tests")
    shutil.copytree(ROOT, project, ignore=ignore)
    return project


def train(folder, *arguments):
    return subprocess.run(
        [sys.executable, "train.py", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=120,
    )


def token_files(folder, count=300 * 2**19):
    """Files as llm.c writes them, empty but for their header, where the recipe for GPT-2 looks."""
    data = read(ROOT / "configs" / "gpt2_124m.json")["data"]["args"]
    for pattern in (data["train"], data["val"]):
        path = folder / pattern.replace("*", "000001")
        path.parent.mkdir(parents=True, exist_ok=True)
        header = np.zeros(256, np.int32)
        header[:3] = 20240520, 1, count
        header.tofile(path)
        os.truncate(path, 4 * 256 + 2 * count)  # a hole, which takes no room


def test_every_shipped_config_builds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    token_files(tmp_path)
    for path in [ROOT / "config.json", *sorted((ROOT / "configs").glob("*.json"))]:
        assert build(read(path), path.name).model is not None


DRAWN = 'data={"name": "digits", "args": {"train_size": 600, "test_size": 200}}'
RECIPES = {
    "diffusion_digits": [DRAWN, "schedule.args.warmup_steps=2"],
    "digits_simclr": [DRAWN],
    "gan_digits": [DRAWN],
    "mnist_mixer": [DRAWN],
    "pen_digits_lstm": [DRAWN.replace("digits", "pen_digits")],
}


# A diffusion and a pair of views are trained by shorter tests of theirs, too.
LONG = {"diffusion_digits", "digits_simclr"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.torture] if n in LONG else []) for n in RECIPES],
)
def test_a_recipe_trains_evaluates_and_calls_its_callbacks(tmp_path, name):
    config = ROOT / "configs" / f"{name}.json"
    code, _, err = run(tmp_path, "-c", config, "--fast-dev-run", *RECIPES[name])
    assert code == 0, err
    assert not (tmp_path / "saved").exists()


@pytest.mark.slow
def test_the_recipe_for_gpt2_is_what_it_says(tmp_path):
    """124 million parameters; half a million tokens per step; matrices are updated by Muon."""
    token_files(tmp_path)
    config = ROOT / "configs" / "gpt2_124m.json"
    code, out, err = call(tmp_path, "-c", config, "--check")
    assert code == 0, err
    assert re.search(r"blocks/0-11/perceptron/expand/weight +\[12, 768, 3072\] ", out)
    assert re.search(r"^all +124,4\d\d,\d\d\d ", out, re.M)
    given = read(config)
    assert given["loader"]["batch_size"] * given["data"]["args"]["length"] == 2**19
    with chdir(tmp_path):
        parts = build(given, config.name)
    params, _ = jax.eval_shape(parts.model.init, jax.random.key(0))
    state = named_leaves(jax.eval_shape(parts.optimizer.init, params))
    by_muon = {name.split("/m/")[1] for name in state if "/muon/m/" in name}
    matrices = [name for name in named_leaves(params) if name.endswith("/weight")]
    assert by_muon == {name for name in matrices if name.startswith("blocks/")}


def test_every_kind_has_parts():
    for kind in KINDS:
        functions, broken = find(kind)
        assert functions, kind
        assert not broken
