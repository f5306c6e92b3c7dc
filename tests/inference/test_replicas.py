"""Replicas that differ in numbers of the model: each is loaded and exported with its own."""

import json

import jax
import numpy as np
import pytest

from data_loader.digits import digits
from inference.load import load, load_to_export
from tests.inference.conftest import CONFIG, read_report
from tests.inference.test_convert import outputs
from tests.processes import run
from utils import UserError

pytestmark = pytest.mark.contract

EPS = [1e-6, 3.0]
ARGS = {"dim": 8, "heads": 2, "patch": 7, "depth": 1}
SIZES = {"train_size": 96, "test_size": 40}


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """The checkpoints of two vits that differ in `eps`, and what they lost on the test set when it
    was evaluated in training."""
    folder = tmp_path_factory.mktemp("replicas")
    training = {"epochs": 1, "replicas": 2, "vary": {"model.args.eps": EPS}}
    config = CONFIG | {"model": {"name": "vit", "args": ARGS}, "training": training}
    config |= {"data": {"name": "digits", "args": SIZES}, "checkpoint": {}}
    (folder / "config.json").write_text(json.dumps(config))
    code, _, printed = run(folder, "-c", "config.json")
    assert code == 0, printed
    [path] = folder.glob("saved/Small/*/checkpoint-epoch_1.params")
    paths = [path, path.with_name(f"{path.name}:1")]
    rows = (paths[0].parent / "metrics.jsonl").read_text().splitlines()
    [row] = [json.loads(line) for line in rows if "test_loss/1" in line]
    return paths, [row[f"test_loss/{r}"] for r in range(2)]


def held_out():
    dataset = digits(**SIZES).load()["test"]
    x, y = zip(*(dataset[i] for i in range(SIZES["test_size"])), strict=True)
    return np.stack(x), np.array(y)


@pytest.mark.slow
def test_each_is_loaded_with_the_number_with_which_it_was_trained(replicas):
    (x, y), (paths, losses) = held_out(), replicas
    found = []
    for path, eps in zip(paths, EPS, strict=True):
        loaded = load(path)
        assert loaded.config["model"]["args"]["eps"] == eps
        assert loaded.config["training"]["vary"] is None
        logits = loaded.predict(x).astype(np.float64)
        found.append(np.mean(np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(y)), y]))
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    assert abs(losses[1] - losses[0]) > 1e-2 * losses[0]


@pytest.mark.slow
def test_each_is_exported_with_its_number(replicas, convert, tmp_path):
    path, x = replicas[0][1], np.float32(held_out()[0][:5] / 255)
    loaded = load_to_export(None, path)
    expected = jax.jit(loaded.function)(loaded.weights, x)
    code, printed = convert("--name", "small", "--formats", "onnx", config=None, weights=path)
    assert code == 0, printed
    assert read_report(tmp_path)["formats"]["onnx"]["route"] == "native"
    exported = tmp_path / "out" / "small"
    np.testing.assert_allclose(outputs(exported / "small.onnx", input=x), expected, atol=1e-5)
    np.testing.assert_allclose(expected, load(path).predict(held_out()[0][:5]), atol=1e-5)
    config = json.loads((exported / "config.json").read_text())
    assert config["model"]["args"]["eps"] == EPS[1]


@pytest.mark.slow
def test_the_probe_of_a_checkpoint_is_that_of_its_own_number(replicas, tmp_path):
    """A model with the number of the other replica is refused; --evaluate accepts both."""
    paths, losses = replicas
    config = load(paths[0]).config
    (tmp_path / "first.json").write_text(json.dumps(config))
    load(paths[0], config=tmp_path / "first.json")
    with pytest.raises(UserError, match="has changed its meaning"):
        load(paths[1], config=tmp_path / "first.json")
    code, printed, errors = run(tmp_path, "--evaluate", str(paths[0].parent))
    assert code == 0, errors
    metrics = json.loads(printed[printed.index("{") :])["metrics"]
    np.testing.assert_allclose([metrics[f"test_loss/{r}"] for r in range(2)], losses, rtol=1e-5)
