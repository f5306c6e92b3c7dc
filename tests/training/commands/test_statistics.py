"""Statistics of the training set: computed once, kept in the run's config and its checkpoints, the
same when the run is resumed, evaluated, predicted with."""

import json

import numpy as np
import pytest

from inference.load import load_to_export, prepare
from tests.processes import run
from training.checkpoint.safetensor_file import read_record
from utils import UserError

CONFIG = {
    "title": "Table",
    "model": {"name": "mlp", "args": {"dims": [4]}},
    "data": {"name": "arrays", "args": {"train": "train.npz", "test": "test.npz"}},
    "loader": {"batch_size": 16, "val_size": 40},
    "preprocess": ["standardize"],
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "optimizer": {"name": "adamw", "args": {"lr": 0.01}},
    "training": {"epochs": 1},
    "logging": {"report": False},
}


def save_table(path, seed, count, shift=0):
    random = np.random.default_rng(seed)
    x = np.stack([random.normal(500, 80, count), random.normal(-3, 0.1, count)], 1) + shift
    np.savez(path, x=x, y=(x[:, 0] > 500).astype(np.int32))
    return x


@pytest.mark.slow
def test_statistics_are_computed_once_and_follow_the_run_everywhere(tmp_path, monkeypatch):
    x = save_table(tmp_path / "train.npz", 0, 200)
    save_table(tmp_path / "test.npz", 1, 50, shift=1000)  # the test set must not count
    (tmp_path / "c.json").write_text(json.dumps(CONFIG))
    code, out, err = run(tmp_path, "-c", "c.json")
    assert code == 0, err
    assert out.count("Computing statistics of the training set") == 1
    (folder,) = tmp_path.glob("saved/Table/*")
    (node,) = json.loads((folder / "config.json").read_text())["preprocess"]
    mean, std = (np.array(node["args"][name]) for name in ("mean", "std"))
    assert not np.allclose(mean, x.mean(0), rtol=1e-6)  # 40 examples are held out
    np.testing.assert_allclose(mean, x.mean(0), rtol=0.05)
    np.testing.assert_allclose(std, x.std(0), rtol=0.2)
    checkpoint = next(folder.glob("*.params"))
    assert read_record(checkpoint)["config"]["preprocess"] == [node]

    # Resumed with the original config, which has no statistics.
    code, out, err = run(tmp_path, "-c", "c.json", "--resume", folder, "training.epochs=2")
    assert code == 0, err
    assert "Computing statistics" not in out and "preprocess" not in out
    assert json.loads((folder / "config.json").read_text())["preprocess"] == [node]
    code, out, err = run(tmp_path, "-c", "c.json", "--evaluate", folder)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert code == 0, err
    assert json.loads(out)["metrics"]["test_loss"] == pytest.approx(last["test_loss"])

    # Loaded for predictions and exports, with the stored and with the original config.
    monkeypatch.chdir(tmp_path)
    for config in (None, "c.json"):
        loaded = load_to_export(config, checkpoint)
        ready = prepare(loaded.preprocess, loaded.form, x.astype(np.float32))
        np.testing.assert_allclose(ready, (x - mean) / std, atol=1e-4)
        assert list(loaded.config["preprocess"][0]["args"]["std"]) == std.tolist()
    (tmp_path / "c.json").write_text(json.dumps(CONFIG | {"preprocess": ["normalize"]}))
    with pytest.raises(UserError, match=r"preprocess: .*params has no statistics .* normalize"):
        load_to_export("c.json", checkpoint)
