"""A small valid config, in which each test makes one mistake."""

import copy
import json

import pytest

VALID = {
    "title": "Test",
    "model": {"name": "mlp", "args": {"dims": [8]}},
    "data": {"name": "digits", "args": {"train_size": 64, "test_size": 32}},
    "loader": {"batch_size": 16},
    "preprocess": ["to_unit"],
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "optimizer": {"name": "adamw", "args": {"lr": 0.01}},
    "training": {"epochs": 2},
}


@pytest.fixture
def valid():
    return copy.deepcopy(VALID)


@pytest.fixture
def config_file(tmp_path, valid):
    """A function that writes a config and returns its path."""

    def write(config=valid, name="config.json"):
        path = tmp_path / name
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return path

    return write
