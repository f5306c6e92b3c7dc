"""sample_images: which examples are the worst, what is drawn of them, and what is not."""

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
from training.watching.callbacks.sample_images import sample_images, verdict
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


def dots(png):
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


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def measured(logits, targets):
    """What the metric finds for each example, in their order."""
    return jax.tree.map(np.asarray, jax.vmap(verdict)(jnp.asarray(logits), jnp.asarray(targets)))


def shown(callback, found, hook="on_test_end", sets=SETS, **fields):
    """What a hook leaves to see: the View that it was called with."""
    arrays = {f"{name}_sample_images": found for name in ("val", "test")}
    seen = view(sets=sets, evaluated=("val", "test"), arrays=arrays, **fields)
    callback.on_training_start(seen)
    getattr(callback, hook)(seen)
    return seen


def told(folder, name="test"):
    return json.loads((folder / f"pictures/worst-{name}.json").read_text())


@pytest.mark.parametrize("soft", [False, True])
def test_the_worst_are_those_of_the_highest_loss(tmp_path, soft):
    logits = RNG.normal(size=(40, 4)).astype(np.float32)
    targets = (0.9 * np.eye(4)[LABELS] + 0.025).astype(np.float32) if soft else LABELS
    shown(sample_images(worst=5), measured(logits, targets), folder=tmp_path)
    losses = -((targets if soft else np.eye(4)[LABELS]) * log_softmax(logits)).sum(-1)
    order = np.argsort(-losses)[:5]
    found = told(tmp_path)
    assert {key: found[key] for key in ("set", "epoch", "step")} == {
        "set": "test",
        "epoch": 2,
        "step": 7,
    }
    assert [e["index"] for e in found["examples"]] == order.tolist()
    assert [e["label"] for e in found["examples"]] == LABELS[order].tolist()
    assert [e["predicted"] for e in found["examples"]] == logits[order].argmax(1).tolist()
    assert [e["loss"] for e in found["examples"]] == pytest.approx(losses[order].tolist(), rel=1e-5)
    for example in found["examples"]:
        np.testing.assert_array_equal(
            dots(base64.b64decode(example["png"])), IMAGES[example["index"]]
        )


def test_they_are_drawn_with_what_they_were_taken_for(tmp_path):
    found = {
        "loss": np.arange(40.0),
        "predicted": LABELS[::-1],
        "label": LABELS,
        "unsound": np.zeros(40, bool),
    }
    seen = shown(sample_images(count=4, worst=3), found, hook="on_validation_end", folder=tmp_path)
    drawn = grid(
        list(IMAGES[[0, 1, 2]]), captions=[f"{LABELS[i]}>{LABELS[39 - i]}" for i in (39, 38, 37)]
    )  # val is reversed
    first = grid(list(IMAGES[:4]), captions=list(map(str, LABELS[:4])))
    published = {name: dots(png) for _, name, png in seen.publish.images}
    assert published.keys() == {"first_batch", "worst-val"}
    np.testing.assert_array_equal(published["worst-val"], drawn)
    np.testing.assert_array_equal(published["first_batch"], first)
    for name, picture in published.items():
        np.testing.assert_array_equal(
            dots((tmp_path / f"pictures/{name}.png").read_bytes()), picture
        )
    assert not (tmp_path / "pictures/worst-test.json").exists()


def test_equal_losses_stand_in_the_order_of_the_set_and_what_is_not_finite_first(tmp_path):
    found = measured(np.zeros((40, 4)), np.where(np.arange(40) == 20, 9, LABELS))
    shown(sample_images(worst=4), found, folder=tmp_path)
    examples = told(tmp_path)["examples"]
    assert [e["index"] for e in examples] == [20, 0, 1, 2]
    assert (examples[0]["loss"], examples[0]["label"]) == (None, 9)


def test_of_examples_with_many_positions_the_loss_is_told(tmp_path):
    logits, masks = RNG.normal(size=(40, 6, 6, 3)), RNG.integers(0, 3, (40, 6, 6))
    found = measured(logits, masks)
    assert found.keys() == {"loss", "unsound"}
    shown(sample_images(worst=2), found, folder=tmp_path)
    losses = -np.take_along_axis(log_softmax(logits), masks[..., None], axis=-1).mean((1, 2, 3))
    examples = told(tmp_path)["examples"]
    assert [e["index"] for e in examples] == np.argsort(-losses)[:2].tolist()
    assert [e["label"] for e in examples] == [None, None]
    np.testing.assert_array_equal(
        dots(base64.b64decode(examples[0]["png"])), IMAGES[examples[0]["index"]]
    )


def test_inputs_that_are_no_images_leave_a_list_of_the_worst(tmp_path, caplog):
    caplog.set_level(logging.INFO, "main")
    vectors = dict.fromkeys(("train", "test"), Arrays(RNG.normal(size=(40, 36)), LABELS))
    found, callback = measured(RNG.normal(size=(40, 4)), LABELS), sample_images(worst=2)
    seen = shown(callback, found, sets=vectors, folder=tmp_path)
    callback.on_test_end(seen)
    assert [r.getMessage() for r in caplog.records] == [
        f"sample_images: the {name} set holds no images (float64[36]), so none are shown"
        for name in ("train", "test")
    ]
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["worst-test.json"]
    assert all("png" not in example for example in told(tmp_path)["examples"])
    assert seen.publish.images == []


def test_batches_have_no_examples_to_show(tmp_path, caplog):
    caplog.set_level(logging.INFO, "main")
    batches = dict.fromkeys(("train", "test"), iter([(IMAGES, LABELS)]))
    shown(
        sample_images(worst=2),
        measured(RNG.normal(size=(40, 4)), LABELS),
        sets=batches,
        folder=tmp_path,
    )
    assert "the test set comes in batches" in caplog.text
    assert len(told(tmp_path)["examples"]) == 2
    caplog.clear()
    shown(sample_images(count=0, worst=0), None, sets=batches)
    assert not caplog.records
    assert next(batches["train"]) is not None  # nothing was taken from the run


def test_the_image_is_found_in_a_nest_and_large_ones_are_thinned_out(tmp_path):
    large = RNG.integers(0, 256, (40, 300, 200)).astype(np.uint8)
    nested = Arrays({"age": np.arange(40), "photo": large}, LABELS)
    shown(
        sample_images(worst=1),
        measured(RNG.normal(size=(40, 4)), LABELS),
        sets={"train": nested, "test": nested},
        folder=tmp_path,
    )
    (example,) = told(tmp_path)["examples"]
    np.testing.assert_array_equal(
        dots(base64.b64decode(example["png"])), large[example["index"], ::3, ::3]
    )


def test_either_half_can_be_left_out(tmp_path):
    seen = shown(sample_images(worst=0), None, folder=tmp_path)
    assert [name for _, name, _ in seen.publish.images] == ["first_batch"]
    assert sample_images(worst=0).metrics == {}
    seen = shown(
        sample_images(count=0), measured(RNG.normal(size=(40, 4)), LABELS), folder=tmp_path
    )
    assert [name for _, name, _ in seen.publish.images] == ["worst-test"]


def test_a_set_with_fewer_examples_is_shown_whole(tmp_path):
    seen = shown(
        sample_images(count=50, worst=50),
        measured(RNG.normal(size=(40, 4)), LABELS),
        folder=tmp_path,
    )
    assert sorted(e["index"] for e in told(tmp_path)["examples"]) == list(range(40))
    first = grid(list(IMAGES), captions=list(map(str, LABELS)))
    np.testing.assert_array_equal(dots(seen.publish.images[0][2]), first)


def test_without_a_folder_the_trackers_still_get_them():
    seen = shown(sample_images(), measured(RNG.normal(size=(40, 4)), LABELS))
    assert [name for _, name, _ in seen.publish.images] == ["first_batch", "worst-test"]


def test_what_has_no_classes_is_refused():
    with pytest.raises(UserError, match="sample_images: needs class labels, but the output"):
        jax.eval_shape(verdict, np.zeros(1), np.zeros(()))
    with pytest.raises(
        UserError, match="sample_images: needs class labels, but 40 targets of the test set"
    ):
        shown(sample_images(), measured(RNG.normal(size=(40, 4)), RNG.normal(size=(40, 4))))


@pytest.mark.parametrize("options", [{"count": -1}, {"worst": -1}, {"every_n_epochs": 0}])
def test_ranges_are_told_with_their_argument(options):
    with pytest.raises(ValueError, match=f"^{next(iter(options))}: must"):
        sample_images(**options)
