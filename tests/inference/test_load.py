"""`load`: a trained model in Python, from a config's run or from one of `fit`, and its mistakes."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from inference import to_torch
from inference.load import load
from model.mlp import mlp
from tests.processes import call
from training.checkpoint import storage
from training.fit import fit
from training.optimizers import adam
from training.preprocess import normalize, to_unit
from utils import UserError

IMAGES = np.random.default_rng(0).integers(0, 256, (150, 28, 28, 1), np.uint8)


def test_a_run_of_a_config_needs_only_its_checkpoint(small):
    loaded = load(small.checkpoint)
    x = IMAGES.reshape(150, 784) / np.float32(255)
    hidden, head = loaded.params["hidden"][0], loaded.params["head"]
    expected = np.maximum(x @ hidden["weight"] + hidden["bias"], 0) @ head["weight"] + head["bias"]
    assert loaded.config["model"]["args"]["dims"] == [16]  # mlp's activation is relu
    np.testing.assert_allclose(loaded.predict(IMAGES), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(loaded.predict(IMAGES[:7]), expected[:7], rtol=1e-4, atol=1e-4)
    assert loaded.program._cache_size() == 1
    assert load(small.checkpoint.parent).path == small.checkpoint  # the newest of its folder
    assert repr(loaded).count("\n") == 0 and len(repr(loaded)) < 200 and loaded.classes == []


@pytest.mark.slow
def test_every_command_takes_the_best_checkpoint_of_a_run_and_says_which_it_took(
    small, convert, run_predict, drawn, tmp_path, capsys
):
    """The largest loss, that of the first epoch, is the best here."""
    ranked = ["checkpoint.mode=max", "logging.report=false", "run_name=r"]
    assert call(tmp_path, "-c", small.config, *ranked)[0] == 0
    folder = tmp_path / "saved/Small/r"
    first = folder / "checkpoint-epoch_1.params"
    finished = json.loads((folder / "finished.json").read_text())
    assert finished["best"]["name"] == first.stem and finished["best"]["monitor"] == "test_loss"
    best = f"Checkpoint: {first} (the best: test_loss {finished['best']['value']:.4f})"
    assert load(folder, best=True).path == first

    named, chosen, newest = (
        run_predict(model, drawn[0], *flag)
        for model, flag in ((first, ()), (folder, ["--best"]), (folder, ()))
    )
    assert named[1] == chosen[1] != newest[1]
    assert f"Checkpoint: {first}\n" in named[2] and best in chosen[2]
    assert "checkpoint-epoch_2.params (the newest; --best takes checkpoint-epoch_1" in newest[2]
    code, out, err = call(tmp_path, "--evaluate", folder, "--best")
    assert json.loads(out)["checkpoint"] == first.stem and best in err
    assert call(tmp_path, "-c", small.config, "--best")[0] == 2
    code, printed = convert("--best", "--formats", "stablehlo", "--name", "b", weights=folder)
    assert code == 0 and best in printed
    assert to_torch.main([str(folder), str(tmp_path / "best.safetensors"), "--best"]) == 0
    assert best in capsys.readouterr().err
    code, _, err = run_predict(first, drawn[0], "--best")
    assert code == 2 and "is not a run, of which the best checkpoint can be taken" in err


def test_inputs_that_cannot_be_right_are_named(small):
    loaded = load(small.checkpoint)
    for x, message in {
        "one": (IMAGES[0], r"this is one input; add an axis in front, as x\[None\]"),
        "flat": (IMAGES.reshape(150, 784), r"takes inputs of uint8\[28, 28, 1\], these are"),
        "floats": (IMAGES / 255.0, r"fails on inputs of float64\[28, 28, 1\]: .*to_unit"),
        "none": (IMAGES[:0], "must have one row per input, found x: none"),
        "unequal": ({"a": IMAGES, "b": IMAGES[:3]}, "found a: 150, b: 3"),
        "nothing": ({}, "found nothing"),
        "a list": ([IMAGES[0], IMAGES[1]], r"x is a list; pass an array: np.asarray\(x\)"),
    }.values():
        with pytest.raises(UserError, match=message):
            loaded.predict(x)


@pytest.fixture
def of_fit(tmp_path):
    """The folder of a run of `fit` on dicts of bytes, and its model's factory."""
    inner = partial(mlp, (5,), 2, dims=(6,))

    def model(**settings):
        made = inner(**settings)
        return made._replace(apply=lambda p, s, x, **k: made.apply(p, s, x["a"], **k))

    x = {"a": np.random.default_rng(1).integers(0, 256, (40, 5), np.uint8)}
    y = np.arange(40) % 2
    each = [lambda x: {"a": to_unit(x["a"])}]
    settings = {"optimizer": adam(), "epochs": 1, "preprocess": each, "config": {"model": "mine"}}
    run = fit(model(), (x, y), folder=tmp_path / "run", **settings)
    return tmp_path / "run", model, each, x, run


@pytest.mark.slow
def test_a_run_of_fit_needs_its_model(of_fit, convert, run_predict):
    folder, model, preprocess, x, run = of_fit
    loaded = load(folder, model(), preprocess=preprocess)
    units = {"a": x["a"] / np.float32(255)}
    expected = model().apply(run.params, run.state, units)[0]
    np.testing.assert_allclose(loaded.predict(x, batch_size=16), expected, rtol=1e-5, atol=1e-6)
    [checkpoint] = folder.glob("checkpoint-*")
    message = "was written by fit, from Python, so it holds weights but not their model"
    with pytest.raises(UserError, match=f"{message}; .* the model: load"):
        load(folder)
    code, printed = convert(weights=checkpoint, config=None)
    assert code == 2 and message in printed
    code, _, printed = run_predict(checkpoint, "x.npy")
    assert code == 2 and message in printed
    with pytest.raises(UserError, match=r"hidden/0/weight: the file has \(5, 6\), the model has"):
        load(folder, mlp((5,), 2, dims=(7,)))
    with pytest.raises(UserError, match="must be what its function returns, as mlp"):
        load(folder, mlp)
    with pytest.raises(UserError, match="preprocess goes with a model; the config of a run has"):
        load(folder, preprocess=[np.sqrt])


@pytest.mark.slow
def test_a_run_of_fit_is_used_with_the_preprocess_of_its_training(tmp_path):
    x, y, model = np.ones((8, 3), np.float32), np.arange(8) % 2, mlp((3,), 2)
    centred = partial(normalize, mean=np.float32([0.1, 0.2, 0.3]), std=3 * (2.0,))
    settings = {"optimizer": adam(), "folder": tmp_path}
    fit(model, (x, y), epochs=1, preprocess=[centred, lambda x: x], **settings)
    same = [partial(normalize, std=[2, 2, 2], mean=(0.1, 0.2, 0.3)), lambda x: x]
    assert load(tmp_path, model, preprocess=same).predict(x).shape == (8, 2)
    other = partial(normalize, mean=np.float32([0.1, 0.2, 0.4]), std=3 * (2.0,))
    for wrong, given in (([], ""), ([other, lambda x: x], r"normalize\(mean=\[0.1, 0.2, 0.4\]")):
        trained = r"preprocess=\[normalize\(mean=\[0.1, 0.2, 0.3\], std=\[2, 2, 2\]\), <lambda>\]"
        with pytest.raises(UserError, match=rf"was trained with {trained}, got \[{given}"):
            load(tmp_path, model, preprocess=wrong)
        with pytest.raises(UserError, match="functions in preprocess"):
            fit(model, (x, y), epochs=2, preprocess=wrong, resume=True, **settings)
    assert fit(model, (x, y), epochs=2, preprocess=same, resume=True, **settings).completed == 2
    [*_, newest] = sorted(tmp_path.glob("*.params"))
    arrays, record = storage.load(newest)
    storage.save(newest, arrays, {k: v for k, v in record.items() if k != "preprocess"})
    assert load(tmp_path, model).predict(x).shape == (8, 2)  # of a version that did not record it


@pytest.mark.slow
def test_a_model_of_the_same_shapes_that_computes_something_else_is_refused(tmp_path):
    x, y = np.ones((8, 3), np.float32), np.arange(8) % 2
    fit(mlp((3,), 2), (x, y), optimizer=adam(), epochs=1, folder=tmp_path)
    loaded = load(tmp_path, mlp((3,), 2))
    assert loaded.predict(x).shape == (8, 2)
    own = SimpleNamespace(init=mlp((3,), 2).init, apply=mlp((3,), 2).apply)
    np.testing.assert_array_equal(load(tmp_path, own).predict(x), loaded.predict(x))
    with pytest.raises(UserError, match=r"this is one input; add an axis in front, as x\[None\]"):
        loaded.predict(x[0])
    with pytest.raises(UserError, match=r"takes inputs of .*\[3\], these are float32\[2\]"):
        loaded.predict(x[:, :2])
    with pytest.raises(UserError, match="has changed its meaning"):
        load(tmp_path, mlp((3,), 2, activation="tanh"))


def test_a_folder_without_checkpoints_names_the_run_that_is_meant(small, tmp_path):
    name = small.checkpoint.parent.name
    with pytest.raises(UserError, match=f"holds no checkpoint; did you mean .*{name}"):
        load(small.checkpoint.parents[1])
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "a.onnx").write_bytes(b"")
    with pytest.raises(UserError, match=r"for exported files, run .*predict\.py .*a\.onnx"):
        load(tmp_path / "exported")
    with pytest.raises(UserError, match="holds no checkpoint; name a checkpoint"):
        load(tmp_path)
