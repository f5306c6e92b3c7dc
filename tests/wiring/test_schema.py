"""The generated schema is up to date and accepts what `build` accepts."""

import json
from pathlib import Path

import jsonschema
import pytest

from wiring import schema
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


def test_the_schema_accepts_dotted_names_chains_and_nested_parts(validator, valid):
    chain = [{"name": "optax.lion", "args": {"learning_rate": 0.1}}, "frozen"]
    assert validator.is_valid(valid | {"optimizer": chain})
    rules = [["head/.*", {"name": "sgd", "args": {"lr": 0.1}}]]
    config = valid | {"optimizer": {"name": "groups", "args": {"rules": rules}}}
    assert validator.is_valid(config)
    rules[0][1]["args"]["lr"] = "x"
    assert not validator.is_valid(config)
