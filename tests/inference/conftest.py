"""A small run that is trained once, and the commands that export it and use it, in this process."""

import json
import os
import signal
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from data_loader.digits import digits
from inference import convert_tflite, predict
from model.convnext import convnext
from tests.inference.made import linear_model
from tests.processes import TWO_EPOCHS, run
from tests.training.browser import browser
from utils import named_leaves

CONFIG = TWO_EPOCHS | {"logging": {"report": False}}
MODELS = """
import jax, jax.numpy as jnp
from model.base import Model

def linear(apply):
    def init(key):
        return {"w": jnp.ones((784, 10))}, {}
    return Model(init, lambda p, s, x, **_: (apply(p, x.reshape(x.shape[0], -1)), s))

def batch_mean(input_shape: tuple[int, ...]) -> Model:
    return linear(lambda p, x: x @ p["w"] - (x @ p["w"]).mean(0))

def scalar(input_shape: tuple[int, ...]) -> Model:
    return linear(lambda p, x: (x @ p["w"]).sum())

def all_nan(input_shape: tuple[int, ...]) -> Model:
    return linear(lambda p, x: jnp.log(-1 - (x @ p["w"]) ** 2))

def two_outputs(input_shape: tuple[int, ...]) -> Model:
    return linear(lambda p, x: {"a": x @ p["w"], "input": x})

def pairs(input_shape: tuple[int, ...]) -> Model:
    return linear(lambda p, x: (x @ p["w"]).reshape(2, -1, 10).mean(0))

def root(input_shape: tuple[int, ...]) -> Model:
    return linear(lambda p, x: jnp.sqrt(x) @ p["w"])

def other_for_seven(input_shape: tuple[int, ...]) -> Model:
    return linear(lambda p, x: (x @ p["w"]) * (2 if x.shape[0] == 7 else 1))

def squeezed_for_two(input_shape: tuple[int, ...]) -> Model:
    return linear(lambda p, x: x @ p["w"] if x.shape != (2, 784) else (x[None] @ p["w"])[0])

def broken(input_shape: tuple[int, ...]) -> Model:
    return linear(lambda p, x: undefined(x))
"""
DIGITS = 70  # more than one batch


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """The config and the checkpoint of a trained run."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert run(folder, "-c", "config.json")[0] == 0
    (checkpoint,) = folder.glob("saved/Small/*/checkpoint-epoch_2.params")
    return SimpleNamespace(config=folder / "config.json", checkpoint=checkpoint)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def convolution(small, tmp_path):
    """{config, weights} of a model for images of any size, without the shape of its data."""
    config = json.loads(small.config.read_text(encoding="utf-8"))
    args = {"dims": [4, 8], "depths": [1, 1]}
    config["model"] = {"name": "convnext", "args": args}
    (tmp_path / "any_size.json").write_text(json.dumps(config), encoding="utf-8")
    params, _ = convnext((28, 28, 1), 10, **args).init(jax.random.key(0))
    save_file(named_leaves(jax.tree.map(np.asarray, params)), tmp_path / "any_size.safetensors")
    return {"config": tmp_path / "any_size.json", "weights": tmp_path / "any_size.safetensors"}


@pytest.fixture
def convert(small, tmp_path, capsys, monkeypatch):
    """convert(*arguments) -> (exit code, printed text); it writes to the folder `out`."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)  # the command sets its own, for its whole process

    def command(*arguments, config=small.config, weights=small.checkpoint):
        options = ["-w", weights, "--out", tmp_path / "out"]
        options += [*arguments, *(["-c", config] if config else [])]
        code = convert_tflite.main(list(map(str, options)))
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    yield command
    signal.signal(signal.SIGTERM, handler)


def own_weights():
    """Random ones: with equal ones, batch_mean subtracts two large, almost equal numbers."""
    return {"w": np.random.default_rng(0).normal(size=(784, 10)).astype(np.float32)}


@pytest.fixture
def own(small, tmp_path):
    """own(name) -> {config, weights} of a user's model that is defined beside the config."""
    (tmp_path / "own_models.py").write_text(MODELS)
    save_file(own_weights(), tmp_path / "own.safetensors")

    def configured(name):
        config = json.loads(small.config.read_text()) | {"model": f"own_models.{name}"}
        (tmp_path / "own.json").write_text(json.dumps(config))
        return {"config": tmp_path / "own.json", "weights": tmp_path / "own.safetensors"}

    return configured


@pytest.fixture
def ctrl_c():
    """A function that sends this process Ctrl-C, which a background job of a shell ignores."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, previous)


@pytest.fixture
def run_predict(tmp_path, capsys, monkeypatch):
    """run_predict(model, *inputs) -> (exit code, standard output, standard error)"""
    monkeypatch.chdir(tmp_path)

    def command(model, *arguments):
        code = predict.main([str(model), *map(str, arguments)])
        return code, *capsys.readouterr()

    return command


@pytest.fixture
def drawn(tmp_path):
    """(an npz of raw digits, their labels)"""
    dataset = digits(train_size=10, test_size=DIGITS).load()["test"]
    x, y = zip(*(dataset[i] for i in range(DIGITS)), strict=True)
    np.savez(tmp_path / "drawn.npz", x=np.stack(x))
    return tmp_path / "drawn.npz", np.array(y)


@pytest.fixture
def linear(tmp_path):
    """The weight of linear.onnx, which no export wrote; some.npy holds two inputs for it.

    INTEGERS.ONNX is the same model for integers.
    """
    from onnx import TensorProto

    np.save(tmp_path / "some.npy", np.arange(8).reshape(2, 4) / 8)
    linear_model(tmp_path / "INTEGERS.ONNX", (4,), 3, TensorProto.INT32)
    return linear_model(tmp_path / "linear.onnx", (4,), 3, TensorProto.FLOAT)


def output_folder(tmp_path):
    """The names in the output folder, including hidden files."""
    folder = tmp_path / "out"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def read_report(tmp_path, name="small"):
    return json.loads((tmp_path / "out" / name / "verification.json").read_text())
