"""What trackers are passed, and in which order."""

import io
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from model.mlp import mlp
from tests.training.watching.recorder import ABOUT, Recorder, output_of, warnings_of
from training.fit import fit
from training.optimizers import sgd
from training.watching.publish import Publisher
from utils import UserError


def test_trackers_get_every_value_in_order_as_it_was_when_published():
    gate = threading.Event()
    slow, other = Recorder(gate), Recorder()
    publisher = Publisher([slow, other], ABOUT)
    values, weights = {"loss": np.float32(0.5)}, np.arange(6.0).reshape(2, 3)
    picture = np.zeros((2, 3), np.uint8)
    publisher.scalars(8, values)
    publisher.image(8, "grid", picture)
    publisher.histogram(9, "w", weights)
    publisher.text(9, "samples", "Once")
    publisher.back_to(8)
    values["loss"], values["more"] = 9.0, 1.0
    weights[:], picture[:] = -1, 255
    publisher.scalars(9, {"loss": float("nan")})
    gate.set()
    assert publisher.close({"test_loss": 0.25})
    methods = ["start", "scalars", "image", "histogram", "text", "back_to"]
    assert [call[0] for call in slow.calls] == [*methods, "scalars", "finish"]
    started, first, image, histogram, text, back, second, finished = slow.calls
    assert started == ("start", ABOUT)
    assert first == ("scalars", 8, {"loss": 0.5}) and type(first[2]["loss"]) is float
    assert image[1:3] == (8, "grid")
    assert np.asarray(Image.open(io.BytesIO(image[3]))).tolist() == [[0] * 3] * 2
    assert histogram[1:3] == (9, "w") and histogram[3].tolist() == [0, 1, 2, 3, 4, 5]
    assert text == ("text", 9, "samples", "Once")
    assert back == ("back_to", 8)
    assert np.isnan(second[2]["loss"])
    assert finished == ("finish", {"test_loss": 0.25})
    assert other.calls[2] == image  # encoded once, for both
    first[2]["loss"] = 3.0
    assert other.calls[1][2] == {"loss": 0.5}  # each has a copy of its own


def test_every_form_of_picture_becomes_a_png_and_other_values_are_reported_once(caplog):
    class Figure:
        def savefig(self, file, format):
            Image.new("RGB", (4, 3), (1, 2, 3)).save(file, format)

    def pixels(png):
        return np.asarray(Image.open(io.BytesIO(png)))

    file = io.BytesIO()
    Image.new("L", (2, 1), 9).save(file, "png")
    tracker = Recorder()
    publisher = Publisher([tracker], ABOUT)
    colours = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    pictures = [colours, colours[..., :1], jnp.array([[0.0, 1.0]]), file.getvalue(), Figure()]
    for picture in pictures:
        publisher.image(1, "good", picture)
    for name, bad in {"line": np.zeros(3), "gif": b"GIF89a", "nothing": None}.items():
        publisher.image(2, name, bad)
        publisher.image(3, name, bad)
    publisher.scalars(4, {"loss": "high"})
    publisher.scalars(5, {"loss": 1.0})
    assert publisher.close({})
    shown = [pixels(call[3]) for call in tracker.calls if call[0] == "image"]
    assert len(shown) == 5
    np.testing.assert_array_equal(shown[0], colours)
    np.testing.assert_array_equal(shown[1], colours[..., 0])
    assert shown[2].tolist() == [[0, 255]]
    assert tracker.calls[4][3] == file.getvalue()
    assert shown[4].tolist() == [[[1, 2, 3]] * 4] * 3
    problem = "cannot be published: ValueError:"
    assert sorted(warnings_of(caplog)) == [
        f"image gif at step 2 {problem} these bytes are not a PNG file",
        f"image line at step 2 {problem} an array of shape (3,) is not a picture",
        f"image nothing at step 2 {problem} an array of shape () is not a picture",
        f"scalars at step 4 {problem} could not convert string to float: 'high'",
    ]
    assert tracker.calls[-2:] == [("scalars", 5, {"loss": 1.0}), ("finish", {})]


def test_histograms_of_bfloat16_are_read_as_numbers():
    tracker = Recorder()
    publisher = Publisher([tracker], ABOUT)
    publisher.histogram(1, "w", jnp.array([[1.5], [-2.0]], jnp.bfloat16))
    assert publisher.close({})
    values = tracker.calls[1][3]
    assert values.dtype == np.float32 and values.tolist() == [1.5, -2.0]
    with pytest.raises(ValueError):
        values[0] = 1  # all trackers share it


def test_an_object_without_any_method_of_a_tracker_is_refused():
    for wrong in (object(), "csv", Recorder):
        with pytest.raises(UserError, match="is not a tracker: an object with any of start, scal"):
            Publisher([wrong])


@pytest.mark.slow
def test_the_means_of_an_epoch_are_never_drawn_into_the_curve_of_the_lines(tmp_path):
    """Not even where a budget ends the run within an epoch."""
    recorder, data = Recorder(), (np.ones((40, 2), "f"), np.zeros(40, int))
    log, options = {"every_steps": 2, "trackers": [recorder]}, {"epochs": 2, "batch_size": 4}
    options |= {"max_steps": 13, "folder": tmp_path / "run", "log": log}
    fit(mlp((2,), 2, (2,)), data, optimizer=sgd(0.1), **options)
    drawn = [call[1:] for call in recorder.calls if call[0] == "scalars"]
    steps = {name: [step for step, values in drawn if name in values] for name in drawn[-1][1]}
    assert "train_loss" not in steps and steps["train_loss_epoch"] == [10, 13]


def test_without_trackers_nothing_is_copied_and_no_thread_runs():
    before = threading.active_count()
    publisher = Publisher()
    for method in ("image", "histogram"):
        getattr(publisher, method)(1, "x", object())
    publisher.scalars(1, None)
    publisher.back_to(0)
    assert publisher.close(None) and threading.active_count() == before


def test_trackers_import_their_packages_only_when_they_start():
    code = """
import sys
from training.watching import publish
from training.watching.trackers import console, csv_file, jsonl, tensorboard, wandb_run
console.console(), jsonl.jsonl(), csv_file.csv(), tensorboard.tensorboard(), wandb_run.wandb()
packages = {"wandb", "tensorboardX", "tensorboard", "PIL", "matplotlib", "google"}
print({name.split(".")[0] for name in sys.modules} & packages)
"""
    assert output_of(code) == "set()"
