"""Training a part of a model: factors, groups of layers, and a student of another model."""

import json
import shutil
from functools import partial

import jax
import numpy as np
import pytest

from inference import to_torch
from inference.load import load, load_to_export
from inference.runtimes import open_model
from model.layers.blocks import unrolled
from model.lora import lora
from model.mlp import mlp
from model.vit import vit
from tests.processes import SMALL, run
from tests.runs import assert_same
from training.checkpoint import storage
from training.checkpoint.distillation import distillation
from training.checkpoint.pretrained import pretrained_from
from training.fit import fit
from training.loss import cross_entropy
from training.objective import supervised
from training.optimizers import adamw, sgd
from training.schedules import piecewise
from training.transforms import groups, layer_decay, scheduled
from utils import UserError, named_leaves

rng = np.random.default_rng(0)
X = rng.normal(size=(96, 4)).astype(np.float32)
Y = X[:, :3].argmax(1)
BASE = mlp((4,), 3, dims=(32,))
MODEL = lora(BASE, ("hidden/.*/weight",), rank=2, whole=("head/bias",))
SETTINGS = {"optimizer": adamw(lr=0.01), "batch_size": 32}
WEIGHTS = "checkpoint-epoch_1.params"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The checkpoint of a trained model."""
    folder = tmp_path_factory.mktemp("base")
    fit(BASE, (X, Y), **SETTINGS, epochs=1, folder=folder)
    return folder / WEIGHTS


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    """(the folder, the Run) of three epochs in which only factors were trained, for other
    labels."""
    folder = tmp_path_factory.mktemp("tuned")
    return folder, fit(MODEL, (X, 2 - Y), **SETTINGS, epochs=3, folder=folder, pretrained=str(base))


@pytest.mark.slow
def test_only_the_factors_are_trained_and_saved(base, tuned):
    folder, done = tuned
    before, _ = storage.load(base)
    frozen = {f"params/{name}": leaf for name, leaf in done.state["frozen"].items()}
    assert frozen.keys() == {"params/hidden/0/weight", "params/hidden/0/bias", "params/head/weight"}
    assert_same(frozen, {name: before[name] for name in frozen})
    assert done.history[-1]["train_loss"] < done.history[0]["train_loss"]
    arrays, record = storage.load(folder / "checkpoint-epoch_3.params")
    trained = {"hidden/0/weight/a", "hidden/0/weight/b", "head/bias"}
    names = {name for name in arrays if name.startswith(("params/", "opt/m", "opt/v", "state"))}
    assert names == {f"{part}/{leaf}" for part in ("params", "opt/m", "opt/v") for leaf in trained}
    assert len(record["frozen"]) == 64


def test_the_optimizers_state_is_as_small_as_the_factors():
    def size(model):
        params, _ = jax.eval_shape(model.init, jax.random.key(0))
        state = jax.eval_shape(adamw(lr=0.01).init, params)
        return sum(leaf.size for name, leaf in named_leaves(state).items() if name != "step")

    assert size(BASE) == 2 * (4 * 32 + 32 + 32 * 3 + 3)
    assert size(MODEL) == 2 * (4 * 2 + 2 * 32 + 3)


@pytest.mark.slow
def test_dora_begins_as_the_weights_that_are_loaded(base):
    model = lora(BASE, ("hidden/.*/weight",), rank=2, dora=True)
    params, state = pretrained_from(str(base), model)(*model.init(jax.random.key(5)))
    merged, trained = model.merge(params, state)[0], load(base, BASE).params
    close = partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(close, merged, trained)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(base, tuned, tmp_path):
    run_of = {**SETTINGS, "folder": tmp_path, "pretrained": str(base)}
    fit(MODEL, (X, 2 - Y), **run_of, epochs=1)
    done = fit(MODEL, (X, 2 - Y), **run_of, epochs=3, resume=True)
    assert_same((done.params, done.state), (tuned[1].params, tuned[1].state))


@pytest.mark.slow
def test_a_run_is_neither_resumed_nor_loaded_with_another_base(base, tmp_path):
    path = shutil.copy(base, tmp_path / "base.params")
    settings = {**SETTINGS, "folder": tmp_path / "run", "pretrained": path}
    fit(MODEL, (X, Y), **settings, epochs=1)
    fit(BASE, (X, Y), **SETTINGS, epochs=1, seed=5, folder=tmp_path / "other")
    shutil.copy(tmp_path / "other" / WEIGHTS, path)
    message = "its model was trained on frozen weights that .*base.params no longer holds"
    with pytest.raises(UserError, match=message):
        fit(MODEL, (X, Y), **settings, epochs=2, resume=True)
    with pytest.raises(UserError, match=message):
        load(tmp_path / "run", MODEL)


def test_the_error_about_a_lost_base_says_how_to_name_its_new_path(tmp_path):
    lost = str(tmp_path / "base.params")
    message = r"base.params: there is no such checkpoint. The frozen weights are in this file alone"
    with pytest.raises(
        UserError,
        match=message + ".* name its new path, training.pretrained=PATH"
        r" .*predict.py, take a copy of the config with the new path, -c CONFIG",
    ):
        pretrained_from(lost, MODEL)
    with pytest.raises(UserError, match=r"base.params: there is no such checkpoint$"):
        pretrained_from(lost, BASE)  # whose checkpoints hold all weights


@pytest.mark.slow
def test_a_loaded_model_is_the_plain_one_with_merged_weights(tuned):
    folder, done = tuned
    loaded = load(folder, MODEL)
    assert loaded.model is BASE
    assert_same(
        jax.tree.map(np.shape, loaded.params),
        jax.tree.map(np.shape, BASE.init(jax.random.key(0))[0]),
    )
    expected, _ = MODEL.apply(done.params, done.state, X)
    np.testing.assert_allclose(loaded.predict(X), expected, atol=1e-6)


@pytest.mark.slow
def test_what_cannot_be_a_base_is_refused(base, tuned):
    with pytest.raises(UserError, match=r"training\.pretrained: is missing; it names the weights"):
        fit(MODEL, (X, Y), **SETTINGS)
    option = {"path": str(base), "fresh": ["hidden/.*"]}
    message = "fresh: hidden/0/bias is frozen by the model, so it cannot keep its initial values"
    with pytest.raises(UserError, match=message):
        fit(MODEL, (X, Y), **SETTINGS, pretrained=option)
    factors = str(tuned[0] / "checkpoint-epoch_3.params")
    with pytest.raises(UserError, match="holds only what its run has trained; write all weights"):
        fit(BASE, (X, Y), **SETTINGS, pretrained=factors)


CONFIG = SMALL | {
    "title": "Base",
    "training": {"epochs": 1},
    "logging": {"report": False},
}


@pytest.fixture
def tuned_from_config(tmp_path):
    """The folder with two runs of configs, `base` and `tuned`, of train.py."""
    args = {"base": CONFIG["model"], "leaves": ["hidden/.*/weight"], "rank": 4}
    path = f"saved/Base/base/{WEIGHTS}"
    tuned = CONFIG | {"model": {"name": "lora", "args": args}, "title": "Tuned"}
    tuned |= {"training": {"epochs": 2, "pretrained": path, "replicas": 2}}
    for name, config in {"base": CONFIG, "tuned": tuned}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config), encoding="utf-8")
        code, out, _ = run(tmp_path, "-c", f"{name}.json", f"run_name={name}")
        assert code == 0, out
    return tmp_path


@pytest.mark.slow
def test_a_config_names_a_base_and_the_result_is_evaluated_and_exported(
    tuned_from_config, monkeypatch
):
    monkeypatch.chdir(tuned_from_config)
    folder = tuned_from_config / "saved/Tuned/tuned"
    code, out, err = run(tuned_from_config, "--evaluate", folder)
    assert code == 0, err
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert json.loads(out)["metrics"]["test_loss"] == pytest.approx(last["test_loss"], rel=1e-6)
    checkpoint = folder / "checkpoint-epoch_2.params:1"
    exported, loaded = load_to_export(None, checkpoint, trusted=False), load(checkpoint)
    assert named_leaves(loaded.params).keys() == {
        "hidden/0/weight", "hidden/0/bias", "head/weight", "head/bias",
    }  # fmt: skip
    x = rng.random((3, 28, 28, 1)).astype(np.float32)
    logits = exported.function(exported.weights, x)
    np.testing.assert_allclose(logits, loaded.model.apply(loaded.params, {}, x)[0], atol=1e-6)
    exporting = {"program": "inference/convert_tflite.py"}
    code, out, err = run(tuned_from_config, "-w", checkpoint, "--name", "merged", **exporting)
    assert code == 0, out + err
    for ending in ("onnx", "tflite"):
        [path] = tuned_from_config.glob(f"**/merged.{ending}")
        found = open_model(path)({"input": x})["output"]
        np.testing.assert_allclose(found, logits, rtol=0, atol=1e-5 * np.abs(logits).max())
    assert to_torch.main([str(checkpoint), "merged.safetensors"]) == 0
    code, out, _ = run(
        tuned_from_config, "-c", "base.json", "training.pretrained=merged.safetensors"
    )
    assert code == 0, out


# --- layers that learn less, or later


def layer_of_beit(name, blocks):
    """The number of a parameter's layer, as BEiT's get_num_layer_for_vit computes it."""
    if name in ("positions/weight", "token", "patches/weight", "patches/bias"):
        return 0
    return int(name.split("/")[1]) + 1 if name.startswith("blocks/") else blocks + 1


@pytest.mark.parametrize("scan", [False, True])
def test_updates_get_smaller_by_layer_as_in_beit(scan):
    model = vit((8, 8, 1), 3, dim=8, depth=3, heads=2, patch=4, scan=scan)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    ones = jax.tree.map(lambda a: np.ones(a.shape, np.float32), params)
    optimizer = layer_decay(sgd(lr=1.0), 0.75)
    updates, _ = optimizer.update(ones, optimizer.init(ones), ones)
    assert jax.tree.map(np.shape, updates) == jax.tree.map(np.shape, ones)
    leaves = named_leaves(unrolled(updates))
    # its values are decay ** (blocks + 1 - layer)
    rates = {name: 0.75 ** (4 - layer_of_beit(name, 3)) for name in leaves}
    assert rates["patches/weight"] == 0.75**4 and rates["blocks/2/norm1/scale"] == 0.75
    for name, update in leaves.items():
        np.testing.assert_allclose(update, -rates[name], rtol=1e-6, err_msg=name)


@pytest.mark.slow
def test_layers_need_blocks_and_a_rule_for_the_last_one_that_matches():
    params, _ = BASE.init(jax.random.key(0))
    with pytest.raises(UserError, match="layer_decay: no param is in a block"):
        layer_decay(sgd(lr=1.0), 0.75).init(params)
    with pytest.raises(UserError, match=r"'haed/\.\*' matches no name"):
        layer_decay(sgd(lr=1.0), 0.75, last="haed/.*").init({"blocks": [params], "head": params})


@pytest.mark.slow
def test_a_group_begins_to_learn_at_an_epoch():
    begin = piecewise((0.0, 1.0), boundary_epochs=(2,), steps_per_epoch=3)
    later = scheduled(adamw(lr=0.01), begin)
    optimizer = groups((("hidden/.*", later), (".*", adamw(lr=0.01))))
    seen = []

    class Weights:
        def on_row(self, run, row):
            seen.append(jax.tree.map(np.array, run.params))

    settings = {"optimizer": optimizer, "batch_size": 32, "callbacks": [Weights()]}
    fit(BASE, (X, Y), **settings, epochs=3, eval_initial=False)
    assert_same(seen[0]["hidden"], seen[1]["hidden"])
    for before, after, part in ((0, 1, "head"), (1, 2, "head"), (1, 2, "hidden")):
        pairs = zip(*(jax.tree.leaves(seen[i][part]) for i in (before, after)), strict=True)
        assert all((a != b).any() for a, b in pairs)


# --- distillation

STUDENT = mlp((4,), 3, dims=(6,))


@pytest.mark.slow
def test_distillation_computes_the_formula_of_pytorch(base):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    form = {"teacher": BASE, "weights": str(base), "temperature": 3.0, "weight": 0.7}
    objective = distillation(STUDENT, cross_entropy, {}, (), (), **form)
    params, state = STUDENT.init(jax.random.key(3))
    key = jax.random.key(0)
    losses, _, _ = objective(params, state, (X, Y), key, True)
    taught = load(base, BASE).predict(X)
    logits = torch.tensor(np.array(STUDENT.apply(params, state, X)[0]))
    hard = functional.cross_entropy(logits, torch.tensor(Y), reduction="none")
    soft = functional.kl_div(
        functional.log_softmax(logits / 3, -1),
        functional.softmax(torch.tensor(taught) / 3, -1),
        reduction="none",
    ).sum(-1)
    np.testing.assert_allclose(losses, 0.3 * hard + 0.7 * 9 * soft, rtol=1e-4, atol=1e-5)
    plain = supervised(STUDENT, cross_entropy, {}, (), ())
    evaluated, expected = (o(params, state, (X, Y), key, False)[0] for o in (objective, plain))
    np.testing.assert_array_equal(evaluated, expected)


@pytest.mark.slow
def test_a_student_learns_from_its_teacher_alone(base):
    """The labels are wrong on purpose, and count nothing."""
    objective = partial(distillation, teacher=BASE, weights=str(base), weight=1.0)
    done = fit(STUDENT, (X, 2 - Y), **SETTINGS, epochs=60, objective=objective)
    taught = load(base, BASE).predict(X).argmax(1)
    assert (STUDENT.apply(done.params, done.state, X)[0].argmax(1) == taught).mean() > 0.9


@pytest.mark.slow
def test_a_run_is_not_resumed_with_another_teacher(base, tmp_path):
    teacher = tmp_path / "teacher.params"
    teacher.write_bytes(base.read_bytes())
    objective = partial(distillation, teacher=BASE, weights=str(teacher))
    settings = SETTINGS | {"objective": objective, "folder": tmp_path / "run"}
    fit(STUDENT, (X, Y), **settings, epochs=1)
    assert fit(STUDENT, (X, Y), **settings, epochs=2, resume=True).finished
    fit(BASE, (X, Y), **SETTINGS, epochs=1, seed=9, folder=tmp_path / "other")
    teacher.write_bytes((tmp_path / "other" / WEIGHTS).read_bytes())
    with pytest.raises(UserError, match=r"fingerprint of the objective\.teacher"):
        fit(STUDENT, (X, Y), **settings, epochs=3, resume=True)


@pytest.mark.slow
def test_a_teacher_of_other_classes_is_refused(base):
    objective = partial(distillation, teacher=BASE, weights=str(base))
    with pytest.raises(UserError, match=r"teacher: returns logits of the shape \(3,\), the model"):
        fit(mlp((4,), 4, dims=(6,)), (X, Y), **SETTINGS, objective=objective)
    params, state = STUDENT.init(jax.random.key(0))
    with pytest.raises(UserError, match=r"^objective\.args\.weights: none: there is no such"):
        distillation(STUDENT, cross_entropy, {}, (), (), teacher=BASE, weights="none")
    with pytest.raises(UserError, match=r"needs pairs, .* a batch is an array"):
        objective(STUDENT, cross_entropy, {}, (), ())(params, state, X, jax.random.key(0), True)
