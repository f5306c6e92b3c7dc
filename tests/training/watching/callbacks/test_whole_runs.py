"""The callbacks in whole runs of `fit`: against NumPy, and bit by bit in a run that resumed."""

import base64
import json
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from data_loader.loader import epoch_order
from model.base import Model
from tests.runs import json_lines
from training.checkpoint.safetensor_file import read_record
from training.fit import fit
from training.optimizers import sgd
from training.watching.callbacks.confusion_matrix import confusion_matrix
from training.watching.callbacks.early_stopping import early_stopping
from training.watching.callbacks.gradient_spike_monitor import gradient_spike_monitor
from training.watching.callbacks.learning_rate_monitor import learning_rate_monitor
from training.watching.callbacks.profiler import profiler
from training.watching.callbacks.reduce_on_plateau import reduce_on_plateau
from training.watching.callbacks.sample_images import sample_images
from training.watching.pictures import as_picture, grid, png

RNG = np.random.default_rng(0)
X = RNG.normal(size=(128, 4, 4)).astype(np.float32)
Y = (X[:, 0, 0] + X[:, 1, 1] > 0).astype(np.int32) + (X[:, 2, 2] > 1)
X[64:96] *= 8  # the third of the four batches of an epoch
MODEL = Model(  # linear, since a second layer would only take longer to compile
    lambda key: ({"weight": 0.1 * jax.random.normal(key, (16, 3))}, {}),
    lambda params, state, x, **_: (x.reshape(len(x), 16) @ params["weight"], state),
)
SETS = {"test": (X[:77], Y[:77]), "far": (X[60:110], Y[60:110])}  # their last batches are short
EVERYTHING = {
    "val": {"far": SETS["far"]},
    "log": {"every_steps": 2, "log_all": True},
    "rates": {"learning_rate": 0.02},
    "checkpoint": {"every_steps": 3},
}


def run(folder=None, test=SETS["test"], **settings):
    defaults = {
        "epochs": 4,
        "batch_size": 32,
        "shuffle": False,
        "optimizer": sgd(lr=0.02),
        "log": {"every_steps": 2},
    }
    return fit(MODEL, (X, Y), test, **defaults | {"folder": folder} | settings)


class Killed(BaseException):
    """Nothing catches it, so nothing is saved after it."""


class Witness:
    """Keeps the params after every step from step 9 on, and may kill the run at one."""

    def __init__(self, kill=None):
        self.kill, self.params, self.every = kill, {}, {"steps": 1}

    def on_steps(self, view):
        if view.step < 9:
            return
        leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(view.params)]
        self.params[view.step] = np.concatenate(leaves)
        if view.step == self.kill:
            checkpoint = view.folder / "checkpoint-step_9.params"
            deadline = time.monotonic() + 60
            while not checkpoint.exists():  # it is written in the background
                assert time.monotonic() < deadline
                time.sleep(0.01)
            raise Killed


def everything(kill=None):
    """All callbacks; a higher loss counts as better, so the rate falls in every epoch."""
    return [
        confusion_matrix(),
        sample_images(worst=5),
        gradient_spike_monitor(threshold=2.0, warmup=4),
        reduce_on_plateau("test_loss", "max", factor=0.5, patience=1, min_scale=0.25),
        learning_rate_monitor(),
        early_stopping("far_loss", "max", patience=3),
        profiler(first_step=5, n_steps=2),
        Witness(kill),
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with all callbacks: its folder, its result and the callbacks."""
    folder, callbacks = tmp_path_factory.mktemp("whole"), everything()
    result = run(folder, callbacks=callbacks, **EVERYTHING)
    return SimpleNamespace(folder=folder, result=result, callbacks=callbacks)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_counts_and_worst_examples_are_those_of_the_params(whole, name):
    x, y = SETS[name]
    logits = np.asarray(MODEL.apply(whole.result.params, {}, x)[0], np.float64)
    counts = np.zeros((3, 3), int)
    np.add.at(counts, (y, logits.argmax(1)), 1)
    confusion = json.loads((whole.folder / f"pictures/confusion_matrix-{name}.json").read_text())
    position = {"set": name, "epoch": 4, "step": 16}
    assert confusion == position | {"normalized": False, "matrix": counts.tolist()}
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
    order = np.argsort(-losses)[:5]
    worst = json.loads((whole.folder / f"pictures/worst-{name}.json").read_text())["examples"]
    assert [e["index"] for e in worst] == order.tolist()
    assert [e["loss"] for e in worst] == pytest.approx(losses[order].tolist(), rel=1e-4)
    assert [e["label"] for e in worst] == y[order].tolist()
    assert [e["predicted"] for e in worst] == logits[order].argmax(1).tolist()
    assert all(base64.b64decode(e["png"]).startswith(b"\x89PNG") for e in worst)


class Named(list):
    """A dataset of one's own, whose classes have names."""

    classes = ("low", "middle", "high")


def brighter(key, x):
    return x * 0 + jax.random.uniform(key, (1, 1), minval=2, maxval=3)


@pytest.mark.slow
def test_names_of_classes_reach_every_picture_and_first_images_are_those_of_training(tmp_path):
    examples, seen = Named(zip(X, Y, strict=True)), []

    class Watcher:
        def on_start(self, view):
            seen.extend([view.classes, view.first_examples(6)])

    callbacks = [confusion_matrix(), sample_images(count=6, worst=3), Watcher()]
    fit(
        MODEL,
        examples,
        SETS["test"],
        epochs=1,
        batch_size=32,
        seed=5,
        optimizer=sgd(lr=0.02),
        augment=[brighter],
        callbacks=callbacks,
        folder=tmp_path,
    )
    assert seen[0] == ["low", "middle", "high"]
    for name in ("confusion_matrix-test", "worst-test"):
        content = json.loads((tmp_path / f"pictures/{name}.json").read_text())
        assert content["classes"] == ["low", "middle", "high"]
    order = epoch_order(len(X), 32, seed=5, epoch=1, shuffle=True)[0].ravel()[:6]
    assert [int(label) for _, label in seen[1]] == Y[order].tolist()
    values = [float(x[0, 0]) for x, _ in seen[1]]
    assert len(set(values)) == 6 and all(2 <= value <= 3 for value in values)
    drawn = (tmp_path / "pictures/first_batch.png").read_bytes()
    pictures = [as_picture(x) for x, _ in seen[1]]
    assert drawn == png(grid(pictures, captions=[Named.classes[y] for _, y in seen[1]]))
    (checkpoint,) = tmp_path.glob("*.params")
    assert read_record(checkpoint)["classes"] == ["low", "middle", "high"]


def gradient_norms(whole):
    steps = [row for row in json_lines(whole.folder / "metrics.jsonl") if "each_step" in row]
    return {row["step"]: row["gradient_norm"] for row in steps}


@pytest.mark.slow
def test_a_lower_rate_makes_smaller_steps_and_is_in_every_row(whole):
    params, norms = whole.callbacks[-1].params, gradient_norms(whole)
    lengths = {step: np.linalg.norm(params[step] - params[step - 1]) for step in range(10, 17)}
    rates = [length / norms[step] for step, length in lengths.items()]
    assert rates == pytest.approx([0.01] * 3 + [0.005] * 4, rel=1e-3)
    ends = [row for row in json_lines(whole.folder / "metrics.jsonl") if "end_of_epoch" in row]
    assert [row["learning_rate"] for row in ends] == pytest.approx([0.02, 0.02, 0.01, 0.005])


@pytest.mark.slow
def test_a_run_that_was_killed_leaves_the_same_files_and_memories(whole, tmp_path):
    with pytest.raises(Killed):
        run(tmp_path, callbacks=everything(kill=12), **EVERYTHING)
    # The last checkpoint, at step 9, does not include this spike.
    assert json_lines(tmp_path / "gradient_spikes.jsonl")[-1]["step"] == 11
    callbacks = everything()
    run(tmp_path, callbacks=callbacks, resume=True, **EVERYTHING)
    assert min(callbacks[-1].params) == 10
    files = [path.relative_to(whole.folder) for path in (whole.folder / "pictures").iterdir()]
    assert len(files) == 1 + 4 * len(SETS)
    for name in [*files, "gradient_spikes.jsonl"]:
        assert (tmp_path / name).read_bytes() == (whole.folder / name).read_bytes(), name
    for one, other in zip(whole.callbacks, callbacks, strict=True):
        assert getattr(one, "memory", None) == getattr(other, "memory", None)
