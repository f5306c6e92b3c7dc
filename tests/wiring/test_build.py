"""A config made into parts: what is refused, in which words, and what fills itself in."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from training.optimizers import adamw
from training.schedules import cosine
from utils import UserError
from wiring.build import build
from wiring.config import override

ROOT = Path(__file__).resolve().parents[2]


def spoiled(config, *overrides):
    for text in overrides:
        config = override(config, text)
    return config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("modle=1", "c: modle: no such key; did you mean 'model'?"),
        (
            "model.name=convnxt",
            "c: model.name: no model 'convnxt'; did you mean 'convnext'? (convnext, mlp, resnet, vit)",
        ),
        ("data.name=mnits", "c: data.name: no data 'mnits'; did you mean 'mnist'?"),
        ("loss=cros_entropy", "c: loss: no loss 'cros_entropy'; did you mean 'cross_entropy'?"),
        ("metrics.0=acuracy", "c: metrics.0: no metrics 'acuracy'; did you mean 'accuracy'?"),
        (
            "preprocess.0=to_units",
            "c: preprocess.0: no preprocess 'to_units'; did you mean 'to_unit'?",
        ),
        (
            'augment=["random_flips"]',
            "c: augment.0: no augment 'random_flips'; did you mean 'random_flip'?",
        ),
        ("optimizer.name=adamv", "c: optimizer.name: no optimizer 'adamv'"),
        ("schedule=cosin", "c: schedule: no schedule 'cosin'; did you mean 'cosine'?"),
        (
            "objective=supervized",
            "c: objective: no objective 'supervized'; did you mean 'supervised'?",
        ),
        ("update=gradient", "c: update: no update 'gradient'"),
        (
            'callbacks=["early_stoping"]',
            "c: callbacks.0: no callbacks 'early_stoping'; did you mean 'early_stopping'?",
        ),
        (
            "optimizer.args.weight_decy=1",
            "c: optimizer.args.weight_decy: adamw has no such argument; did you mean 'weight_decay'?",
        ),
        ("optimizer.args.lr=fast", 'c: optimizer.args.lr: must be a number, found "fast"'),
        ("optimizer.args.lr=true", "c: optimizer.args.lr: must be a number, found true"),
        ("optimizer.args.lr=0", "c: optimizer.args.lr: must be a finite number above 0, got 0"),
        (
            "optimizer.args.lr=-0.1",
            "c: optimizer.args.lr: must be a finite number above 0, got -0.1",
        ),
        ('optimizer={"name": "clip_by_value"}', "c: optimizer.args: clip_by_value needs 'limit'"),
        ("optimizer=[]", "c: optimizer: must be a name"),
        ('optimizer={"nam": "adamw"}', "c: optimizer: must be a name"),
        (
            'optimizer={"name": "adamw", "lr": 1}',
            "c: optimizer: has 'lr' beside 'name' and 'args'; move it into 'args'",
        ),
        ('optimizer={"name": "adamw", "args": [1]}', "c: optimizer.args: must be an object"),
        (
            "optimizer=optax.lyon",
            "c: optimizer: optax has no function 'lyon'; did you mean 'lion'?",
        ),
        (
            "optimizer=no_such_package.lion",
            "c: optimizer: 'no_such_package.lion' cannot be imported: No module named",
        ),
        ("model.args.dims=[]", "c: model.args.dims: "),
        ("model.args.dims=8", "c: model.args.dims: must be a list, found 8"),
        ('model.args.dims=[8, "x"]', 'c: model.args.dims.1: must be an integer, found "x"'),
        ("loader.batch_size=0", "c: loader.batch_size: must be at least 1, got 0"),
        ("loader.batch_size=-5", "c: loader.batch_size: must be at least 1, got -5"),
        ("loader.batch_size=2.5", "c: loader.batch_size: must be an integer, found 2.5"),
        (
            "loader.batchsize=5",
            "c: loader.batchsize: loader has no such argument; did you mean 'batch_size'?",
        ),
        ("loader.val_size=64", "c: loader.val_size: "),
        ("loader=3", "c: loader: must be an object, found 3"),
        ("training.epochs=0", "c: training.epochs: must be at least 1, got 0"),
        ("training.epochs=-1", "c: training.epochs: must be at least 1, got -1"),
        (
            "training.precision=float61",
            'c: training.precision: found "float61"; allowed: "float32", "bfloat16"',
        ),
        (
            "training.accumulate=3",
            "c: training.accumulate: a batch of 16 does not divide into 3 microbatches",
        ),
        ("training.ema=1.5", "c: training.ema: must be above 0 and below 1, got 1.5"),
        ("checkpoint.keep=0", "c: checkpoint.keep: must be at least 1, got 0"),
        ("logging.every_steps=-1", "c: logging.every_steps: must be at least 0, got -1"),
        ("seed=-1", "c: seed: must be an integer from 0 to 4294967295, found -1"),
        ("title=a/b", "c: title: must be a name that a folder can have"),
        ("metrics=accuracy", 'c: metrics: must be a list, found "accuracy"'),
        (
            'metrics=["accuracy", "accuracy"]',
            "c: metrics.1: 'accuracy' stands in the list twice; give labels",
        ),
        ('metrics={"loss": "accuracy"}', "c: metrics.loss: the name 'loss' is taken, or has a '/'"),
        (
            'optimizer=[{"name": "clip_by_value", "args": {"limit": 1}}]',
            "c: optimizer: no link of this chain takes a step",
        ),
        ("training.ema=none", 'c: training.ema: must be a number or null, found "none"'),
        ("model=os.getcwd", "c: model: getcwd answers str, which is no model"),
        ('schedule={"name": "cosine", "args": {"steps": 5, "epochs": 1}}', "c: schedule.args."),
        (
            'preprocess=["to_unit", {"name": "normalize", "args": {"mean": [0, 0], "std": [1, 1]}}]',
            "c: preprocess: does not fit",
        ),
    ],
)
def test_each_mistake_is_told_with_its_place(sound, change, message):
    with pytest.raises(UserError) as told:
        build(spoiled(sound, change), "c")
    assert str(told.value).startswith(message)
    assert "\nc: " not in str(told.value)  # nothing else is wrong


@pytest.mark.parametrize("key", ["model", "data", "loss", "optimizer"])
def test_a_missing_key(sound, key):
    del sound[key]
    with pytest.raises(UserError, match=f"c: {key}: is missing"):
        build(sound, "c")


def test_all_mistakes_are_told_at_once(sound):
    config = spoiled(
        sound,
        "foo=1",
        "model.name=convnxt",
        "loader.batch_size=0",
        "training.epochs=0",
        "optimizer.args.lr=-1",
        "loss=x",
        "schedule=cosine",
    )  # how long the schedule is to last is unknown then, which is not the mistake
    with pytest.raises(UserError) as told:
        build(config, "c")
    places = [
        line.split(": ")[1] for line in str(told.value).splitlines() if line.startswith("c: ")
    ]
    assert sorted(places) == sorted(
        ["foo", "loader.batch_size", "training.epochs", "model.name", "loss", "optimizer.args.lr"]
    )


def test_lists_become_tuples_and_facts_fill_in_unless_the_config_wins(sound):
    parts = build(sound, "c")
    assert parts.facts == {
        "num_classes": 10,
        "steps_per_epoch": 4,
        "total_steps": 8,
        "input_shape": (28, 28, 1),
    }
    out, _ = parts.model.apply(*parts.model.init(jax.random.key(0)), jnp.zeros((2, 28, 28, 1)))
    assert out.shape == (2, 10)
    parts = build(spoiled(sound, "model.args.num_classes=7"), "c")
    out, _ = parts.model.apply(*parts.model.init(jax.random.key(0)), jnp.zeros((2, 28, 28, 1)))
    assert out.shape == (2, 7)


def test_the_resolved_config_holds_the_defaults_and_builds_the_same(sound):
    resolved = build(sound, "c").config
    assert resolved["optimizer"]["args"]["b1"] == 0.9
    assert resolved["training"]["precision"] == "float32"
    again = build(json.loads(json.dumps(resolved)), "c").config
    assert json.dumps(again) == json.dumps(resolved)


def steps(optimizer, count=8):
    """The updates of a quadratic's first steps."""
    params = {"weight": jnp.arange(6.0).reshape(2, 3) - 2, "bias": jnp.ones(3)}
    state, seen = optimizer.init(params), []
    for _ in range(count):
        updates, state = optimizer.update(jax.tree.map(lambda p: 2 * p, params), state, params)
        params = jax.tree.map(jnp.add, params, updates)
        seen.append(updates)
    return seen


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), a, b)


def test_a_schedule_multiplies_our_updates(sound):
    config = spoiled(sound, "schedule=cosine")
    by_hand = [
        jax.tree.map(lambda u, k=k: u * cosine(steps=8)(k), update)
        for k, update in enumerate(steps(adamw(lr=0.01), 1) * 3)
    ]
    assert_close(steps(build(config, "c").optimizer, 1)[0], by_hand[0])
    reference = optax.adamw(
        lambda k: 0.01 * cosine(steps=8)(k), weight_decay=0.01, mask={"weight": True, "bias": False}
    )
    assert_close(steps(build(config, "c").optimizer), steps(reference))


def test_optax_works_by_its_dotted_name_with_the_schedule_inside_its_learning_rate(sound):
    args = {"learning_rate": 0.01, "momentum": 0.9}
    config = sound | {"optimizer": {"name": "optax.rmsprop", "args": args}, "schedule": "cosine"}
    reference = optax.rmsprop(lambda k: 0.01 * cosine(steps=8)(k), momentum=0.9)
    assert_close(steps(build(config, "c").optimizer), steps(reference))


def annotated(learning_rate: float = 0.5):
    return optax.sgd(float(learning_rate))


def short(lr=0.5):
    return optax.sgd(float(lr))


@pytest.mark.parametrize("factory", [annotated, short])
def test_a_rate_that_is_a_number_stays_one_and_is_scheduled_all_the_same(
    sound, monkeypatch, factory
):
    monkeypatch.setattr(optax, "plain_for_test", factory, raising=False)
    config = sound | {"optimizer": "optax.plain_for_test", "schedule": "cosine"}
    assert_close(
        steps(build(config, "c").optimizer), steps(optax.sgd(lambda k: 0.5 * cosine(steps=8)(k)))
    )


def test_a_list_of_optimizers_is_a_chain_also_with_optax_in_it(sound):
    config = sound | {
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


def test_the_schedule_reaches_every_group_once(sound):
    """Optimizers with a rate of their own, of Optax's, without any, and nested chains."""
    rules = [
        ["a", {"name": "sgd", "args": {"lr": 1.0}}],
        ["b", {"name": "optax.sgd", "args": {"learning_rate": 1.0}}],
        ["c", {"name": "optax.scale", "args": {"step_size": -1.0}}],
        [
            "d",
            [
                {"name": "clip_by_value", "args": {"limit": 100}},
                {"name": "scaled", "args": {"optimizer": "sgd", "rate": 1.0}},
            ],
        ],
    ]
    rules[3][1][1]["args"]["optimizer"] = {"name": "sgd", "args": {"lr": 1.0}}
    config = sound | {
        "optimizer": {"name": "groups", "args": {"rules": rules}},
        "schedule": {"name": "constant", "args": {"value": 0.25}},
    }
    optimizer = build(config, "c").optimizer
    params = {name: jnp.ones(2) for name in "abcd"}
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert_close(updates, {name: jnp.full(2, -0.25) for name in "abcd"})


def test_a_metric_keeps_its_finish_with_arguments_and_takes_a_label(sound):
    labelled = {
        "top1": {"name": "top_k_accuracy", "args": {"k": 1}},
        "top3": {"name": "top_k_accuracy", "args": {"k": 3}},
    }
    assert list(build(sound | {"metrics": labelled}, "c").metrics) == ["top1", "top3"]


def test_nested_defaults_are_resolved_too(sound):
    config = sound | {
        "optimizer": {"name": "groups", "args": {"rules": [[".*", {"name": "adamw"}]]}}
    }
    rules = build(config, "c").config["optimizer"]["args"]["rules"]
    assert rules[0][1]["args"]["b1"] == 0.9


def test_a_function_without_its_annotation_is_pointed_out(sound):
    with pytest.raises(
        UserError, match=r"training.optimizers has a function 'squares', but without `-> Optimizer`"
    ):
        build(sound | {"optimizer": "squares"}, "c")


def test_parts_inside_arguments_are_built_and_their_mistakes_placed(sound):
    rules = [["bias", "frozen"], [".*", {"name": "sgd", "args": {"lr": 0.1}}]]
    config = sound | {"optimizer": {"name": "groups", "args": {"rules": rules}}}
    first = steps(build(config, "c").optimizer, 1)[0]
    assert_close(
        first, {"weight": -0.2 * (jnp.arange(6.0).reshape(2, 3) - 2), "bias": jnp.zeros(3)}
    )
    rules[1][1]["args"]["lr"] = "x"
    with pytest.raises(UserError, match=r"c: optimizer.args.rules.1.1.args.lr: must be a number"):
        build(config, "c")


def test_a_users_own_part_is_found_by_its_name_and_a_broken_file_hides_only_its_own(
    tmp_path, config_file, sound
):
    """In a copy of the project, as a user would have it."""
    copy = copied_project(tmp_path)
    (copy / "model" / "mine.py").write_text(MINE)
    (copy / "model" / "broken.py").write_text("def oops(:\n")
    path = config_file(spoiled(sound, "model=mine"))
    good = train(copy, "-c", path, "--check")
    assert good.returncode == 0, good.stderr
    assert "7,850" in good.stdout
    bad = train(copy, "-c", path, "--check", "model=broken")
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
    """The project's own files in another folder."""
    import shutil

    copy = tmp_path / "project"
    ignore = shutil.ignore_patterns(".git", ".venv", "saved", "data", "__pycache__", "tests")
    shutil.copytree(ROOT, copy, ignore=ignore)
    return copy


def train(folder, *arguments):
    return subprocess.run(
        [sys.executable, "train.py", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=120,
    )


def test_every_shipped_config_builds(monkeypatch):
    monkeypatch.chdir(ROOT)
    from wiring.config import read

    for path in [ROOT / "config.json", *sorted((ROOT / "configs").glob("*.json"))]:
        assert build(read(path), path.name).model is not None


def test_every_kind_has_its_parts():
    parts = importlib.import_module("wiring.parts")
    for kind in parts.KINDS:
        found, broken = parts.find(kind)
        assert found, kind
        assert not broken
