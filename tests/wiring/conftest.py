"""A small, sound config to spoil in one place at a time."""

import copy
import json

import pytest

SOUND = {
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
def sound():
    return copy.deepcopy(SOUND)


@pytest.fixture
def config_file(tmp_path, sound):
    """A function that writes a config and answers its path."""

    def write(config=sound, name="config.json"):
        path = tmp_path / name
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return path

    return write
