"""sample_images: which examples are the worst, and which are drawn."""

import base64
import json
import logging
import struct
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_loader.base import Arrays
from tests.training.watching.callbacks.fake import view
from training.watching.callbacks.sample_images import prediction, sample_images
from training.watching.pictures import grid
from utils import UserError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (40, 6, 6)).astype(np.uint8)
LABELS = RNG.integers(0, 4, 40)
SETS = {
    "train": Arrays(IMAGES, LABELS),
    "val": Arrays(IMAGES[::-1], LABELS),
    "test": Arrays(IMAGES, LABELS),
}


def decoded(png):
    """A grey PNG without filters, decoded by hand."""
    width, height = struct.unpack(">II", png[16:24])
    body, at = b"", 8
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        body += png[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += 12 + length
    lines = np.frombuffer(zlib.decompress(body), np.uint8).reshape(height, 1 + width)
    assert not lines[:, 0].any()
    return lines[:, 1:]


def check_picture(example, expected):
    """Check that the picture of a JSON example holds these pixels."""
    np.testing.assert_array_equal(decoded(base64.b64decode(example["png"])), expected)


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def measured(logits, targets):
    """The metric of each example, in order."""
    columns = jax.vmap(prediction)(jnp.asarray(logits), jnp.asarray(targets))
    return jax.tree.map(np.asarray, columns)


def random_predictions():
    return measured(RNG.normal(size=(40, 4)), LABELS)


def view_after(callback, columns, name="test", sets=SETS, **fields):
    """The View after the evaluation of a set."""
    seen = view(sets=sets, arrays={f"{name}_sample_images": columns}, **fields)
    callback.on_start(seen)
    callback.on_evaluated(seen, "train", {})
    callback.on_evaluated(seen, name, {})
    return seen


def content(folder, name="test"):
    return json.loads((folder / f"pictures/worst-{name}.json").read_text())


@pytest.mark.parametrize("soft", [False, True])
def test_the_worst_have_the_highest_loss(tmp_path, soft):
    logits = RNG.normal(size=(40, 4)).astype(np.float32)
    targets = (0.9 * np.eye(4)[LABELS] + 0.025).astype(np.float32) if soft else LABELS
    view_after(sample_images(worst=5), measured(logits, targets), folder=tmp_path)
    losses = -((targets if soft else np.eye(4)[LABELS]) * log_softmax(logits)).sum(-1)
    order = np.argsort(-losses)[:5]
    file = content(tmp_path)
    assert (file["set"], file["epoch"], file["step"]) == ("test", 2, 7)
    examples = file["examples"]
    assert [e["index"] for e in examples] == order.tolist()
    assert [e["label"] for e in examples] == LABELS[order].tolist()
    assert [e["predicted"] for e in examples] == logits[order].argmax(1).tolist()
    assert [e["loss"] for e in examples] == pytest.approx(losses[order].tolist(), rel=1e-5)
    for example in examples:
        check_picture(example, IMAGES[example["index"]])


def test_pictures_have_label_and_prediction_below(tmp_path):
    predictions = {"predicted": LABELS[::-1], "label": LABELS}
    columns = {"loss": np.arange(40.0), "invalid": np.zeros(40, bool), **predictions}
    callback = sample_images(count=4, worst=3)
    seen = view_after(callback, columns, name="val", folder=tmp_path)
    captions = [f"{LABELS[i]}>{LABELS[39 - i]}" for i in (39, 38, 37)]
    worst = grid(list(IMAGES[[0, 1, 2]]), captions=captions)  # val is reversed
    first = grid(list(IMAGES[:4]), captions=list(map(str, LABELS[:4])))
    published = {name: decoded(png) for _, name, png in seen.publish.images}
    assert published.keys() == {"first_batch", "worst-val"}
    np.testing.assert_array_equal(published["worst-val"], worst)
    np.testing.assert_array_equal(published["first_batch"], first)
    for name, picture in published.items():
        file = (tmp_path / f"pictures/{name}.png").read_bytes()
        np.testing.assert_array_equal(decoded(file), picture)
    assert not (tmp_path / "pictures/worst-test.json").exists()


def test_a_loss_that_is_not_finite_comes_first_and_equal_losses_in_order(tmp_path):
    columns = measured(np.zeros((40, 4)), np.where(np.arange(40) == 20, 9, LABELS))
    view_after(sample_images(worst=4), columns, folder=tmp_path)
    examples = content(tmp_path)["examples"]
    assert [e["index"] for e in examples] == [20, 0, 1, 2]
    assert (examples[0]["loss"], examples[0]["label"]) == (None, 9)


def test_inputs_that_are_not_images_leave_a_list_of_the_worst(tmp_path, caplog):
    caplog.set_level(logging.INFO, "main")
    vectors = dict.fromkeys(("train", "test"), Arrays(RNG.normal(size=(40, 36)), LABELS))
    callback = sample_images(worst=2)
    seen = view_after(callback, random_predictions(), sets=vectors, folder=tmp_path)
    callback.on_evaluated(seen, "test", {})
    assert [r.getMessage() for r in caplog.records] == [
        f"sample_images: the {name} set holds no images (float64[36]), so none are shown"
        for name in ("train", "test")
    ]
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["worst-test.json"]
    assert all("png" not in example for example in content(tmp_path)["examples"])
    assert seen.publish.images == []


def test_a_set_of_batches_has_no_examples_to_show(tmp_path, caplog):
    caplog.set_level(logging.INFO, "main")
    batches = dict.fromkeys(("train", "test"), iter([(IMAGES, LABELS)]))
    view_after(sample_images(worst=2), random_predictions(), sets=batches, folder=tmp_path)
    assert "the test set comes in batches" in caplog.text
    assert len(content(tmp_path)["examples"]) == 2
    caplog.clear()
    view_after(sample_images(count=0, worst=0), None, sets=batches)
    assert not caplog.records
    assert next(batches["train"]) is not None  # no batch was taken from the run


def test_either_half_can_be_left_out(tmp_path):
    seen = view_after(sample_images(worst=0), None, folder=tmp_path)
    assert [name for _, name, _ in seen.publish.images] == ["first_batch"]
    assert sample_images(worst=0).metrics == {}
    seen = view_after(sample_images(count=0), random_predictions(), folder=tmp_path)
    assert [name for _, name, _ in seen.publish.images] == ["worst-test"]


def test_examples_without_classes_are_refused():
    message = "sample_images: needs class labels, but"
    with pytest.raises(UserError, match=f"{message} the output"):
        jax.eval_shape(prediction, np.zeros(1), np.zeros(()))
    with pytest.raises(UserError, match=f"{message} 40 targets of the test set"):
        columns = measured(RNG.normal(size=(40, 4)), RNG.normal(size=(40, 4)))
        view_after(sample_images(), columns)
