"""confusion_matrix: what is counted, drawn, shown and refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.training.watching.callbacks.fake import view
from training.watching.callbacks.confusion_matrix import confusion_matrix, pairs
from training.watching.pictures import confusion_matrix_picture, png
from utils import UserError

RNG = np.random.default_rng(0)


def measured(outputs, targets):
    """The sum of the metric over some examples."""
    counts = jax.vmap(pairs)(jnp.asarray(outputs), jnp.asarray(targets))
    return {name: np.asarray(value).sum(0) for name, value in counts.items()}


def by_hand(labels, predictions, count):
    """The matrix, counted one pair after the other."""
    matrix = np.zeros((count, count), int)
    for label, prediction in zip(np.ravel(labels), np.ravel(predictions), strict=True):
        matrix[label, prediction] += 1
    return matrix


@pytest.mark.parametrize("positions", [(), (7,), (3, 4)])
@pytest.mark.parametrize("soft", [False, True])
def test_counts_are_those_by_hand(positions, soft):
    outputs = RNG.normal(size=(50, *positions, 5))
    labels = RNG.integers(0, 5, (50, *positions))
    targets = 0.8 * np.eye(5)[labels] + 0.04 if soft else labels
    sums = measured(outputs, targets)
    np.testing.assert_array_equal(sums["counts"], by_hand(labels, outputs.argmax(-1), 5))
    assert sums["invalid"] == 0


def test_labels_outside_the_classes_are_left_out():
    sums = measured(np.eye(3), np.array([0, -1, 2]))
    np.testing.assert_array_equal(sums["counts"], np.diag([1, 0, 1]))


def view_after(callback, names=("test",), **fields):
    """The View after the evaluation of these sets."""
    counts = np.array([[8.0, 2.0], [1.0, 4.0]])
    arrays = {f"{name}_confusion_matrix": {"counts": counts, "invalid": 0} for name in names}
    seen = view(arrays=arrays, **fields)
    for name in ("train", *names):
        callback.on_evaluated(seen, name, {})
    return seen


def test_the_files_and_the_picture_for_the_trackers(tmp_path):
    seen = view_after(confusion_matrix(normalized=True), folder=tmp_path)
    content = json.loads((tmp_path / "pictures/confusion_matrix-test.json").read_text())
    assert content == {
        "set": "test",
        "epoch": 2,
        "step": 7,
        "normalized": True,
        "matrix": [[8, 2], [1, 4]],
    }
    drawn = (tmp_path / "pictures/confusion_matrix-test.png").read_bytes()
    assert seen.publish.images == [(7, "confusion_matrix-test", drawn)]
    assert drawn == png(confusion_matrix_picture([[8, 2], [1, 4]], normalized=True))
    assert drawn != view_after(confusion_matrix()).publish.images[0][2]
    names = {f"confusion_matrix-test.{suffix}" for suffix in ("json", "png")}
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == names


def test_all_held_out_sets_are_drawn_or_those_in_the_config():
    def drawn(**options):
        seen = view_after(confusion_matrix(**options), ("val", "far", "test"))
        return [name.removeprefix("confusion_matrix-") for _, name, _ in seen.publish.images]

    assert drawn() == ["val", "far", "test"]
    assert drawn(sets=("far",)) == ["far"]


def test_a_set_that_does_not_exist_is_refused_at_the_start():
    sets = {"train": None, "val": None}
    confusion_matrix(sets=("val",)).on_start(view(sets=sets))
    for wrong in ("test", "train"):
        message = f"confusion_matrix: sets: no held-out set '{wrong}'; there are: val"
        with pytest.raises(UserError, match=message):
            confusion_matrix(sets=("val", wrong)).on_start(view(sets=sets))


@pytest.mark.parametrize(
    ("output", "target"),
    [
        (np.zeros(()), np.zeros(())),
        (np.zeros(1), np.zeros(())),  # one number, as for mse
        (np.zeros(1), np.zeros(1, int)),
        (np.zeros((8, 8, 1)), np.zeros((8, 8, 1))),  # an autoencoder
        (np.zeros(3), np.zeros(2)),
        (np.zeros(3), np.zeros(())),  # a class, but as a float
        ({"a": np.zeros(3)}, np.zeros((), int)),
    ],
)
def test_examples_without_classes_are_refused_while_tracing(output, target):
    with pytest.raises(UserError, match="confusion_matrix: needs class labels, but"):
        jax.eval_shape(pairs, output, target)


def test_targets_that_are_not_distributions_are_refused_after_the_evaluation():
    targets = [[0.2, 0.3, 0.5], [1, 1, 0], [1.5, -0.5, 0], [np.nan, 0, 1]]
    arrays = {"test_confusion_matrix": measured(np.ones((4, 3)), targets)}
    message = "3 targets of the test set are neither classes nor distributions"
    with pytest.raises(UserError, match=message):
        confusion_matrix().on_evaluated(view(arrays=arrays), "test", {})
