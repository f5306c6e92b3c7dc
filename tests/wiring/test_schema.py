"""The generated schema is up to date and accepts what `build` accepts."""

import inspect
import json
import re
from pathlib import Path
from typing import Annotated, get_type_hints

import jax.numpy as jnp
import jsonschema
import pytest

import model.mlp
from model.base import Model
from training.kinds import KINDS, find
from training.optimizers import adamw
from training.options import CheckpointOptions
from training.preprocess import normalize
from utils import UserError
from utils.forms import Misfit, OutOfRange, Range, form
from wiring import schema
from wiring.build import build
from wiring.config import override

ROOT = Path(__file__).resolve().parents[2]


def test_the_committed_schema_is_current():
    assert (ROOT / "config.schema.json").read_text() == schema.text(), "run `make schema`"


@pytest.fixture(scope="module")
def validator():
    generated = json.loads(schema.text())
    jsonschema.Draft7Validator.check_schema(generated)
    return jsonschema.Draft7Validator(generated)


@pytest.mark.parametrize(
    "path",
    ["config.json", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "configs").glob("*.json"))],
)
def test_shipped_configs_are_valid(validator, path):
    validator.validate(json.loads((ROOT / path).read_text()))


@pytest.mark.parametrize(
    ("change", "good"),
    [
        ({}, True),
        ({"augment": None, "model": {"args": {"dims": [8]}}, "checkpoint": {"keep": None}}, True),
        ({"model": "mlp", "extends": ["a.json", "b.json"]}, True),
        ({"modle": "mlp"}, False),
        ({"model": 3}, False),
        ({"extends": 3}, False),
    ],
)
def test_the_schema_knows_a_config_that_extends_another(validator, change, good):
    assert validator.is_valid({"extends": "base.json", **change}) is good


@pytest.mark.parametrize(
    "change",
    [
        "modle=1",
        "model.name=convnxt",
        "model.args.dimms=[8]",
        "model.args.dims=8",
        "optimizer.args.lr=fast",
        "training.precision=float61",
        "loader.batchsize=5",
        'metrics=["acuracy"]',
    ],
)
def test_the_schema_refuses_mistakes(validator, valid, change):
    assert validator.is_valid(valid)
    assert not validator.is_valid(override(valid, change))


RANDOM_CROP = '{"name": "random_crop", "args": {"padding": 0}}'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("loader.batch_size=-1", "loader.batch_size: must be at least 1, got -1"),
        ("training.ema=1", "training.ema: must be above 0 and below 1, got 1"),
        ("mesh.fsdp=0", "mesh.fsdp: must be an integer of at least 1, or -1, got 0"),
        ("optimizer.args.b2=1", "optimizer.args.b2: must be at least 0 and below 1, got 1"),
        ("model.args.dims=[8, 0]", "model.args.dims.1: must be at least 1, got 0"),
        ("data.args.seed=-3", "data.args.seed: must be at least 0, got -3"),
        (f"augment=[{RANDOM_CROP}]", "augment.0.args.padding: must be at least 1, got 0"),
        (
            "loss.args.label_smoothing=1.5",
            "loss.args.label_smoothing: must be at least 0 and below 1, got 1.5",
        ),
        (
            "callbacks.0.name=reduce_on_plateau;callbacks.0.args.factor=1",
            "callbacks.0.args.factor: must be above 0 and below 1, got 1",
        ),
    ],
)
def test_a_range_holds_in_the_schema_and_in_the_check(validator, valid, change, message):
    valid["callbacks"] = [{"name": "early_stopping"}]
    assert validator.is_valid(valid)
    for text in change.split(";"):
        valid = override(valid, text)
    assert not validator.is_valid(valid)
    with pytest.raises(UserError, match=re.escape(message)):
        build(valid, "c")


@pytest.mark.parametrize(
    ("kind", "incomplete", "complete"),
    [
        ("optimizer", "sgd", {"name": "sgd", "args": {"lr": 1}}),
        ("optimizer", {"name": "sgd"}, {"name": "sgd", "args": {"lr": 0.1}}),
        ("optimizer", ["clip_by_value", "adam"], ["adam"]),
        ("schedule", "exponential", {"name": "exponential", "args": {"rate": 1}}),
        ("data", {"name": "arrays", "args": {}}, {"name": "arrays", "args": {"train": "a.npz"}}),
        ("data", "folder", {"name": "folder", "args": {"dir": "a", "image_size": [8, 8]}}),
    ],
)
def test_the_schema_knows_required_arguments(validator, valid, kind, incomplete, complete):
    assert not validator.is_valid(valid | {kind: incomplete})
    assert validator.is_valid(valid | {kind: complete})


def test_the_range_of_a_users_own_part_is_checked_from_its_annotation(valid, monkeypatch):
    def mine(width: Annotated[int, Range("at least 3", minimum=3)] | None = 5) -> Model:
        raise AssertionError("must not be called")

    monkeypatch.setattr(model.mlp, "mine", mine, raising=False)
    config = valid | {"model": {"name": "model.mlp.mine", "args": {"width": 2}}}
    with pytest.raises(UserError, match=r"model.args.width: must be at least 3, got 2"):
        build(config, "c")
    argument = schema.argument(inspect.signature(mine).parameters["width"])
    assert argument == {"type": ["integer", "null"], "minimum": 3, "default": 5}


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"metrics", "schedule"}))
def test_calls_of_every_part_from_python_are_checked_by_the_ranges_of_its_annotations(kind):
    """Metrics take arrays, and test_schedules.py has cases for arguments that depend on others."""
    for part in find(kind)[0].values():
        for name, hint in get_type_hints(part, include_extras=True).items():
            for value in (-7, float("nan")):
                try:
                    form(hint).read(value, name)
                except OutOfRange:
                    with pytest.raises(ValueError, match=f"^{name}: "):
                        part(**{name: value})
                except Misfit:
                    pass


def test_calls_from_python_are_checked_by_the_same_ranges():
    with pytest.raises(ValueError, match=r"lr: must be .* above 0, got 0\nb1: must be .*, got 1"):
        adamw(0, b1=1)
    with pytest.raises(ValueError, match=r"^std.1: must be a finite number above 0, got 0$"):
        normalize(jnp.ones(2), mean=(0, 0), std=(1, 0))
    with pytest.raises(ValueError, match=r"keep: must be at least 1, got 0\nsave_top_k: "):
        CheckpointOptions(keep=0, save_top_k=-1)


def test_the_schema_accepts_dotted_names_chains_and_nested_parts(validator, valid):
    chain = [{"name": "optax.lion", "args": {"learning_rate": 0.1}}, "frozen"]
    assert validator.is_valid(valid | {"optimizer": chain})
    rules = [["head/.*", {"name": "sgd", "args": {"lr": 0.1}}]]
    config = valid | {"optimizer": {"name": "groups", "args": {"rules": rules}}}
    assert validator.is_valid(config)
    rules[0][1]["args"]["lr"] = "x"
    assert not validator.is_valid(config)
