"""A small run, trained once, and the commands that ship it, in this process."""

import json
from types import SimpleNamespace

import pytest

from inference import convert_tflite
from tests.processes import run

CONFIG = {
    "title": "Small",
    "model": {"name": "mlp", "args": {"dims": [16]}},
    "data": {"name": "digits", "args": {"train_size": 640, "test_size": 100}},
    "loader": {"batch_size": 64},
    "preprocess": ["to_unit"],
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "optimizer": {"name": "adamw", "args": {"lr": 0.01}},
    "training": {"epochs": 2},
    "checkpoint": {"monitor": "test_loss"},
    "logging": {"report": False},
}


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """The config and the checkpoint of a trained run, and the folder of both."""
    place = tmp_path_factory.mktemp("small")
    (place / "config.json").write_text(json.dumps(CONFIG))
    assert run(place, "-c", "config.json")[0] == 0
    (checkpoint,) = place.glob("saved/Small/*/checkpoint-epoch_2.params")
    return SimpleNamespace(place=place, config=place / "config.json", checkpoint=checkpoint)


@pytest.fixture
def convert(small, tmp_path, capsys, monkeypatch):
    """convert(*arguments) -> (exit code, what was said); the files come into a folder of the test's."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments, config=small.config, weights=small.checkpoint):
        given = [
            "-w",
            weights,
            "--out",
            tmp_path / "out",
            *arguments,
            *(["-c", config] if config else []),
        ]
        code = convert_tflite.main(list(map(str, given)))
        said = capsys.readouterr()
        return code, said.out + said.err

    return command
