"""The message for each mistake in a config."""

import functools
import json
import math
import sys
from typing import Literal

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from model.mlp import mlp
from training.commands.start import checked_recipe
from training.objective import inputs
from utils import UserError
from utils.forms import Misfit, form
from wiring.build import build
from wiring.config import override


def changed(config, *overrides):
    for text in overrides:
        config = override(config, text)
    return config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("modle=1", "c: modle: no such key; did you mean 'model'?"),
        (
            "model.name=convnxt",
            "c: model.name: no model 'convnxt'; did you mean 'convnext'? "
            "(airbench, convnext, equinox, gan, gpt, haiku, linen, lora, mixer, mlp, mobilenet, "
            "nnx, projected, resnet, rnn, tabular, unet, vit)",
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
            "c: optimizer.args.weight_decy: adamw has no such argument; "
            "did you mean 'weight_decay'?",
        ),
        ("optimizer.args.lr=fast", 'c: optimizer.args.lr: must be a number, found "fast"'),
        (
            f"optimizer.args.lr=1{400 * '0'}",
            "c: optimizer.args.lr: is too large for a number: 1000000000",
        ),
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
        ("seed=-1", "c: seed: must be an integer from 0 to 4294967295, got -1"),
        ("title=a/b", "c: title: must be usable as a folder name, found"),
        ("metrics=accuracy", 'c: metrics: must be a list or an object, found "accuracy"'),
        (
            'metrics=["accuracy", "accuracy"]',
            "c: metrics.1: the name 'accuracy' is taken, or has a '/', or is empty; give ",
        ),
        ('metrics={"top1": null}', "c: metrics.top1: must be a name or"),
        (
            'metrics={"loss": "accuracy"}',
            "c: metrics.loss: the name 'loss' is taken, or has a '/', or is empty; give ",
        ),
        ('metrics={"": "accuracy"}', "c: metrics.: the name '' is taken"),
        (
            'optimizer=[{"name": "clip_by_value", "args": {"limit": 1}}]',
            "c: optimizer: takes no step, as it only changes gradients; end a chain",
        ),
        (
            'optimizer={"name": "decayed_weights", "args": {"weight_decay": 0.1}}',
            "c: optimizer: takes no step",
        ),
        (
            'optimizer={"name": "groups", "args": {"rules": [["h.*", "adam"], [".*", '
            '{"name": "clip_by_value", "args": {"limit": 1}}]]}}',
            "c: optimizer.args.rules: '.*': takes no step",
        ),
        (
            'optimizer=["muon", {"name": "clip_by_value", "args": {"limit": 1}}]',
            "c: optimizer.1: clip_by_value changes gradients, but muon has turned them into "
            "updates already; put it before muon",
        ),
        (
            'optimizer=[{"name": "optax.sgd", "args": {"learning_rate": 0.1}}, '
            '{"name": "optax.add_decayed_weights", "args": {"weight_decay": 0.1}}]',
            "c: optimizer.1: optax.add_decayed_weights changes gradients, but optax.sgd has",
        ),
        (
            'optimizer=[{"name": "scaled", "args": {"optimizer": "lion", "rate": 0.5}}, "adamw"]',
            "c: optimizer.1: adamw would take the updates of scaled for gradients, and go uphill",
        ),
        ("training.ema=none", 'c: training.ema: must be a number or null, found "none"'),
        ("mesh.tensor=2.5", "c: mesh.tensor: must be -1 or an integer, found 2.5"),
        ("mesh.data=[1]", "c: mesh.data: must be -1 or an integer, found [1]"),
        ("model=os.getcwd", "c: model: getcwd returned str, not a valid model"),
        ('schedule={"name": "cosine", "args": {"steps": 5, "epochs": 1}}', "c: schedule.args."),
        (
            'preprocess=["to_unit", {"name": "normalize", '
            '"args": {"mean": [0, 0], "std": [1, 1]}}]',
            "c: preprocess: does not fit",
        ),
    ],
)
def test_the_message_names_the_place_of_a_mistake(valid, change, message):
    with pytest.raises(UserError) as raised:
        checked_recipe(build(changed(valid, change), "c"))
    assert str(raised.value).startswith(message)
    assert "\nc: " not in str(raised.value)  # only one problem is reported


def test_an_error_without_a_message_is_reported_with_its_line(valid, monkeypatch):
    def broken():
        raise ValueError

    monkeypatch.setattr(optax, "broken_for_test", broken, raising=False)
    message = r"c: optimizer.args: broken fails: .*test_messages.py, line \d+: ValueError"
    with pytest.raises(UserError, match=message):
        build(valid | {"optimizer": "optax.broken_for_test"}, "c")


def test_a_model_with_fewer_outputs_than_classes_is_refused(valid):
    few = valid | {"model": {"name": "mlp", "args": {"dims": [4], "num_classes": 9}}}
    with pytest.raises(UserError, match=r"^c: model: has 9 outputs for 10 classes: raise num_cla"):
        checked_recipe(build(few, "c"))
    own = few | {"loss": "tests.wiring.test_messages.spread"}
    with pytest.raises(UserError, match=r"^c: model: has 9 outputs"):
        checked_recipe(build(own, "c"))
    checked_recipe(build(own | {"metrics": []}, "c"))  # its outputs may be anything
    more = {"name": "mlp", "args": {"dims": [4], "num_classes": 11}}
    checked_recipe(build(valid | {"model": more}, "c"))


def test_a_decoder_with_fewer_tokens_than_its_data_is_refused(valid, tmp_path):
    np.save(tmp_path / "t.npy", np.arange(90, dtype=np.uint8) % 20)
    data = {"train": str(tmp_path / "t.npy"), "length": 8, "vocab_size": 20}
    model = {"dim": 8, "depth": 1, "heads": 1}
    text = {"data": {"name": "tokens", "args": data}, "preprocess": [], "metrics": []}
    text |= {"loader": {"batch_size": 4}, "model": {"name": "gpt", "args": model}}
    checked_recipe(build(valid | text, "c"))
    model["vocab_size"] = 10
    with pytest.raises(UserError, match=r"^c: model: has 10 outputs for 20 tokens: raise vocab_si"):
        checked_recipe(build(valid | text, "c"))


def spread(output, label):
    return jnp.var(output)


def test_a_loss_is_needed_only_where_the_objective_calls_it(valid, monkeypatch):
    del valid["loss"]
    with pytest.raises(UserError, match=r"^c: loss: is missing, and the objective needs one"):
        checked_recipe(build(valid, "c"))
    monkeypatch.setattr(optax, "squares", squares, raising=False)
    own = valid | {"objective": "optax.squares"}
    with pytest.raises(UserError, match=r"^c: metrics: accuracy is not measured, since .*\(it ret"):
        checked_recipe(build(own, "c"))
    with pytest.raises(UserError, match=r"confusion_matrix is not measured.*remove its callback"):
        checked_recipe(build(own | {"metrics": [], "callbacks": ["confusion_matrix"]}, "c"))
    largest = {"error": {"mode": "MAX", "phase": "TRAIN"}}
    parts = build(own | {"metrics": largest}, "c")
    assert parts.config["loss"] is None and parts.config["metrics"] == largest
    recipe, _ = checked_recipe(parts)
    assert recipe.metric_plan.rules["error"] == (None, "MAX", "ANY", "TRAIN")
    with pytest.raises(UserError, match=r'c: metrics.error.mode: found "LARGEST"; allowed: "MEAN"'):
        build(own | {"metrics": {"error": {"mode": "LARGEST"}}}, "c")


@pytest.mark.parametrize("losses", [0.0, {}, jnp.float32(1), jnp.ones((16, 2))])
def test_a_loss_that_is_not_one_number_per_example_is_reported(valid, monkeypatch, losses):
    wrong = lambda *parts: lambda params, state, *rest: (losses, state, {})  # noqa: E731
    monkeypatch.setattr(optax, "wrong", wrong, raising=False)
    with pytest.raises(
        UserError, match=r"^c: loss: must be one number for each of the 16 examples"
    ):
        checked_recipe(build(valid | {"objective": "optax.wrong", "metrics": []}, "c"))


def squares(model, loss, metrics, preprocess, augment):
    """An objective with a loss and a metric of its own."""

    def objective(params, state, batch, key, train):
        x, _ = inputs(preprocess, (), key, batch[0], None)
        output, state = model.apply(params, state, x, train=train, key=key)
        return (output**2).mean(-1), state, {"error": abs(output).max(-1)}

    return objective


@pytest.mark.parametrize("key", ["model", "data", "optimizer"])
def test_a_missing_key_is_reported(valid, key):
    del valid[key]
    with pytest.raises(UserError, match=f"c: {key}: is missing"):
        build(valid, "c")


def test_all_mistakes_are_reported_at_once(valid):
    # The schedule's length is unknown only because of the other mistakes, so it is not reported.
    config = changed(
        valid,
        "foo=1",
        "model.name=convnxt",
        "loader.batch_size=0",
        "training.epochs=0",
        "optimizer.args.lr=-1",
        "loss=x",
        "schedule=cosine",
    )
    with pytest.raises(UserError) as raised:
        build(config, "c")
    lines = [line for line in str(raised.value).splitlines() if line.startswith("c: ")]
    assert {line.split(": ")[1] for line in lines} == {
        *("foo", "loader.batch_size", "training.epochs", "model.name", "loss", "optimizer.args.lr")
    }
    assert len(lines) == 6


def test_the_message_points_out_a_function_without_its_annotation(valid):
    message = r"training.optimizers has a function 'squares', but without `-> Optimizer`"
    with pytest.raises(UserError, match=message):
        build(valid | {"optimizer": "squares"}, "c")


class Library:
    """Classes as other libraries have them, and two that are parts."""

    class Net:  # as torch.nn.Module: its `apply` is something else
        def __init__(self, width, depth): ...
        def init(self): ...
        def apply(self, function): ...

    class Loss:
        def __call__(self, output, target): ...

    class Adam:
        def __init__(self, lr=0.1): ...
        def step(self): ...

    class Loader:
        def __init__(self, folder=None): ...

    class Logger:
        def log(self, values): ...

    class OwnNet:
        def __init__(self):
            built = mlp((28, 28, 1), 10, (4,))
            self.init, self.apply = built.init, built.apply

    class OwnCallback:
        def on_row(self, run, row): ...

    partial = functools.partial(max, 1)

    class Made:
        def __call__(self): ...

    made = Made()

    @staticmethod
    def free(key, row, **anything): ...

    @staticmethod
    def leaves(*row, why=None):
        sys.exit(why)


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setitem(sys.modules, "library", Library)


@pytest.mark.parametrize(
    ("kind", "node", "found", "needed"),
    [
        ("model", "library.Net", "is a class whose `apply` takes other arguments", "a model must"),
        (
            "model",
            "flax.linen.Conv",
            "is a class of linen; name it as {",
            '"linen", "args": {',
        ),
        ("model", "library.Adam", "is a class without init and apply", "a model must be"),
        ("loss", "library.Loss", "is a class", "a loss must be a function (output, target) ->"),
        ("metrics", ["library.Loss"], "is a class", "an entry of metrics must be a function"),
        ("optimizer", "library.Adam", "is a class without init and update", "an optimizer must"),
        ("data", "library.Loader", "a class without example and sizes and load", "data must be"),
        ("callbacks", ["library.Logger"], "is a class without", "an entry of callbacks must be"),
        ("update", "library.Adam", "is a class", "an update must be a function (objective"),
        ("schedule", "library.Logger", "is a class without __call__", "a schedule must be"),
    ],
)
def test_a_class_of_another_library_is_explained(library, valid, kind, node, found, needed):
    with pytest.raises(UserError) as error:
        build(valid | {kind: node}, "c")
    message = str(error.value)
    assert found in message
    assert needed in message
    assert "docs/" in message


def test_a_class_of_ones_own_may_be_a_part(library, valid):
    config = valid | {"model": "library.OwnNet", "callbacks": ["library.OwnCallback"]}
    parts = build(config, "c")
    assert isinstance(parts.model, Library.OwnNet)
    assert isinstance(parts.callbacks[0], Library.OwnCallback)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"augment": [{"name": "library.free", "args": {"x": [1, math.nan]}}]},
            "augment.0.args.x.1:",
        ),
        (
            {"optimizer": {"name": "adamw", "args": {"lr": math.inf}}},
            "optimizer.args.lr: must be a",
        ),
        ({"metrics": {"a\0b": "accuracy"}}, "metrics: must not contain the character"),
        ({"callbacks": [{"name": "\udc80"}]}, "callbacks.0.name: must not contain the character"),
        ({"run_name": "é" * 101}, "run_name: must be usable as a folder name, which takes at most"),
        ({"title": "a\x1b[2Jb"}, "title: must be usable as a folder name, found"),
        ({"title": "a\nb"}, "title: must be usable as a folder name, found"),
        ({"sharding": json.loads("[" * 80 + "]" * 80)}, "is nested more than 64 levels deep"),
        ({"schedule": {}}, "schedule: must be a name or"),
        ({"schedule": 0}, "schedule: must be a name or"),
        ({"schedule": False}, "schedule: must be a name or"),
        ({"loader": {"eval_batch_size": 2**31}}, "eval_batch_size: must be at most 2147483647"),
        ({"training": {"replicas": 5000}}, "training.replicas: must be at most 4096"),
        ({"model": {"name": "vit", "args": {"depth": 10**30}}}, "depth: must be at most 1000"),
        ({"model": {"name": "convnext", "args": {"depths": [1e30]}}}, "must be an integer"),
        ({"data": {"name": "grain", "args": {"train": "x", "workers": 9999}}}, "at most 1024"),
    ],
)
def test_what_no_part_can_work_with_is_a_problem_with_its_place(library, valid, change, message):
    with pytest.raises(UserError) as error:
        build(valid | change, "c")
    assert str(error.value).startswith("c: ")
    assert message in str(error.value)


def test_the_folder_of_the_user_is_meant_by_a_tilde(valid, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    np.savez(tmp_path / "a.npz", x=np.zeros((8, 4), np.float32), y=np.arange(8))
    data = {"name": "arrays", "args": {"train": "~/a.npz"}}
    parts = build(valid | {"data": data, "preprocess": [], "checkpoint": {"dir": "~/runs"}}, "c")
    assert parts.data.sizes == {"train": 8}
    assert parts.checkpoint.dir == str(tmp_path / "runs")
    assert parts.config["data"]["args"]["train"] == "~/a.npz"  # in the run's config, for any user


@pytest.mark.parametrize("place", ["objective", "update"])
@pytest.mark.parametrize("name", ["builtins.max", "sys.exit", "math.sqrt"])
def test_a_function_that_cannot_make_a_part_is_named(valid, place, name):
    message = f"^c: {place}: (it cannot be made: .*TypeError|.* must take)"
    with pytest.raises(UserError, match=message):
        checked_recipe(build(valid | {place: name}, "c"))


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (bool | Literal["auto"], 'true or false or "auto"'),
        (Literal["a", "b"] | None, '"a" or "b" or null'),
        (dict[str, int] | Literal["auto"], 'an object or "auto"'),
    ],
)
def test_a_choice_of_types_is_described_in_words_of_json(annotation, expected):
    with pytest.raises(Misfit, match=f"x: must be {expected}, found 7"):
        form(annotation).read(7, "x")
