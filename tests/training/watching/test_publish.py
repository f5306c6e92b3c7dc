"""What trackers are told, in which order, and that nothing they do reaches the run."""

import io
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from training.watching import publish
from training.watching.publish import About, Publisher
from utils import UserError

ROOT = Path(__file__).resolve().parents[3]
ABOUT = About(Path("folder"), "title", {"seed": 1}, 7)


class Notes:
    """Keeps what it is told; with `gate`, no sooner than that is set."""

    def __init__(self, gate=None):
        self.told, self.gate = [], gate

    def __getattr__(self, method):
        if method not in ("start", "scalars", "image", "histogram", "back_to", "finish"):
            raise AttributeError(method)

        def note(*arguments):
            if self.gate is not None:
                self.gate.wait(10)
            self.told.append((method, *arguments))

        return note


class Failing(Notes):
    """Raises in one method."""

    def __init__(self, method, error):
        super().__init__()

        def fail(*arguments):
            self.told.append((method, *arguments))
            raise error

        setattr(self, method, fail)


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "main")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "main"]


def wait_until(condition):
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_tracker_is_told_everything_in_order_as_it_was_when_it_was_said():
    gate = threading.Event()
    notes, others = Notes(gate), Notes()
    publisher = Publisher([notes, others], ABOUT)
    values, weights, picture = (
        {"loss": np.float32(0.5)},
        np.arange(6.0).reshape(2, 3),
        np.zeros((2, 3), np.uint8),
    )
    publisher.scalars(8, values)
    publisher.image(8, "grid", picture)
    publisher.histogram(9, "w", weights)
    publisher.back_to(8)
    values["loss"], values["more"] = 9.0, 1.0
    weights[:], picture[:] = -1, 255
    publisher.scalars(9, {"loss": float("nan")})
    gate.set()
    assert publisher.close({"test_loss": 0.25})
    assert [entry[0] for entry in notes.told] == [
        "start",
        "scalars",
        "image",
        "histogram",
        "back_to",
        "scalars",
        "finish",
    ]
    started, first, image, histogram, back, second, finished = notes.told
    assert started == ("start", ABOUT)
    assert first == ("scalars", 8, {"loss": 0.5}) and type(first[2]["loss"]) is float
    assert (
        image[1:3] == (8, "grid")
        and np.asarray(Image.open(io.BytesIO(image[3]))).tolist() == [[0] * 3] * 2
    )
    assert histogram[1:3] == (9, "w") and histogram[3].tolist() == [0, 1, 2, 3, 4, 5]
    assert back == ("back_to", 8)
    assert np.isnan(second[2]["loss"])
    assert finished == ("finish", {"test_loss": 0.25})
    assert others.told[2] == image  # encoded once, for both
    first[2]["loss"] = 3.0
    assert others.told[1][2] == {
        "loss": 0.5
    }  # what one does to its values is not seen by the other


def test_a_tracker_without_a_method_is_not_called(warnings):
    class Numbers:
        def __init__(self):
            self.told = []

        def scalars(self, step, values):
            self.told.append(step)

    tracker = Numbers()
    publisher = Publisher([tracker], ABOUT)
    publisher.image(1, "x", np.zeros((2, 2), np.uint8))
    publisher.histogram(1, "x", np.zeros(3))
    publisher.back_to(0)
    publisher.scalars(2, {"loss": 1.0})
    assert publisher.close({}) and tracker.told == [2] and not warnings()


@pytest.mark.parametrize(
    ("method", "error", "said"),
    [
        ("start", UserError("there is no login\nmore"), "step 7: there is no login;"),
        ("scalars", ConnectionError("gone"), "step 8: ConnectionError: gone;"),
        ("scalars", SystemExit(3), "step 8: SystemExit: 3;"),
        ("image", KeyboardInterrupt(), "step 9: KeyboardInterrupt;"),
        ("finish", OSError(28, "disk full"), "step 19: OSError: [Errno 28] disk full;"),
    ],
)
def test_a_tracker_that_raises_is_reported_once_and_dropped(method, error, said, warnings):
    failing, notes = Failing(method, error), Notes()
    publisher = Publisher([failing, notes], ABOUT)
    publisher.scalars(8, {"loss": 1.0})
    publisher.image(9, "x", np.zeros((2, 2), np.uint8))
    wait_until(lambda: len(notes.told) == 3)
    for step in range(10, 20):
        publisher.scalars(step, {"loss": 1.0})
    assert publisher.close({})
    assert warnings() == [f"tracker failing: dropped at {said} the values stay in metrics.jsonl"]
    assert failing.told[-1][0] == method  # it was called no more
    assert len(notes.told) == 14


def test_a_tracker_that_hangs_is_found_out_and_never_waited_for(monkeypatch, warnings):
    later = [0.0]
    monkeypatch.setattr(publish, "monotonic", lambda: time.monotonic() + later[0])
    gate = threading.Event()
    hanging, notes = Notes(gate), Notes()
    publisher = Publisher([hanging, notes], None)
    publisher.scalars(1, {"loss": 1.0})
    wait_until(lambda: len(notes.told) == 2 and publisher.channels[1].since is None)
    later[0] = 59.0
    publisher.scalars(2, {"loss": 1.0})
    wait_until(lambda: len(notes.told) == 3 and publisher.channels[1].since is None)
    assert not warnings()
    later[0] = 61.0
    publisher.scalars(3, {"loss": 1.0})
    publisher.scalars(4, {"loss": 1.0})
    assert (
        len(warnings()) == 1
        and "tracker notes: dropped at step 0: took more than 60 s for one item" in warnings()[0]
    )
    began = time.monotonic()
    assert publisher.close({}) is False
    assert time.monotonic() - began < 2
    assert len(warnings()) == 1
    assert [entry[0] for entry in notes.told] == ["start", *["scalars"] * 4, "finish"]
    gate.set()
    wait_until(lambda: not publisher.channels[0].thread.is_alive())
    assert [entry[0] for entry in hanging.told] == ["start"]


def test_a_tracker_that_falls_behind_is_dropped(monkeypatch, warnings):
    monkeypatch.setattr(publish, "MOST_ITEMS", 5)
    gate = threading.Event()
    slow, notes = Notes(gate), Notes()
    publisher = Publisher([slow, notes], ABOUT)
    for step in range(8, 20):
        publisher.scalars(step, {"loss": 1.0})
        wait_until(lambda n=step - 6: len(notes.told) == n)
    assert len(warnings()) == 1 and "dropped at step 7: fell behind by 5 items" in warnings()[0]
    gate.set()
    wait_until(lambda: not publisher.channels[0].thread.is_alive())
    assert publisher.close({}) and len(slow.told) == 1 and len(notes.told) == 14


def test_what_waits_for_a_tracker_does_not_fill_the_memory(monkeypatch, warnings):
    monkeypatch.setattr(publish, "MOST_BYTES", 1000)
    gate = threading.Event()
    publisher = Publisher([Notes(gate)], ABOUT)
    publisher.histogram(8, "large", np.zeros(1000))  # one is always taken
    assert not warnings()
    publisher.histogram(9, "small", np.zeros(1))
    assert len(warnings()) == 1 and "fell behind by 7.8 KiB" in warnings()[0]
    gate.set()
    assert publisher.close({})

    monkeypatch.setattr(publish, "MOST_BYTES", 20000)  # what was taken counts no more
    notes = Notes()
    publisher = Publisher([notes], ABOUT)
    for step in range(8, 18):
        publisher.histogram(step, "large", np.zeros(1000))
        wait_until(lambda n=step - 6: len(notes.told) == n)
    assert publisher.close({}) and len(warnings()) == 1


def test_closing_waits_as_long_as_it_is_told_for_all_together(warnings):
    gate = threading.Event()
    publisher = Publisher([Notes(gate) for _ in range(5)], ABOUT)
    began = time.monotonic()
    assert publisher.close({}, seconds=0.2) is False
    assert 0.2 <= time.monotonic() - began < 0.9
    assert len(warnings()) == 5 and all(
        "did not end within 0.2 s" in warning for warning in warnings()
    )
    gate.set()
    assert publisher.close({}) is True
    publisher = Publisher([Notes()], ABOUT)
    assert publisher.close({})
    publisher.scalars(8, {"loss": 1.0})  # too late
    assert publisher.channels[0].queue.empty() and len(warnings()) == 5


def test_pictures_of_every_form_become_png_files_and_others_are_told_of_once(warnings):
    class Figure:
        def savefig(self, file, format):
            Image.new("RGB", (4, 3), (1, 2, 3)).save(file, format)

    def pixels(png):
        return np.asarray(Image.open(io.BytesIO(png)))

    file = io.BytesIO()
    Image.new("L", (2, 1), 9).save(file, "png")
    notes = Notes()
    publisher = Publisher([notes], ABOUT)
    colours = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    given = [colours, colours[..., :1], jnp.array([[0.0, 1.0]]), file.getvalue(), Figure()]
    for picture in given:
        publisher.image(1, "good", picture)
    for name, bad in {"line": np.zeros(3), "gif": b"GIF89a", "nothing": None}.items():
        publisher.image(2, name, bad)
        publisher.image(3, name, bad)
    publisher.scalars(4, {"loss": "high"})
    publisher.scalars(5, {"loss": 1.0})
    assert publisher.close({})
    shown = [pixels(entry[3]) for entry in notes.told if entry[0] == "image"]
    assert len(shown) == 5
    np.testing.assert_array_equal(shown[0], colours)
    np.testing.assert_array_equal(shown[1], colours[..., 0])
    assert shown[2].tolist() == [[0, 255]]
    assert notes.told[4][3] == file.getvalue()
    assert shown[4].tolist() == [[[1, 2, 3]] * 4] * 3
    assert sorted(warnings()) == [
        "image gif at step 2 cannot be published: ValueError: these bytes are no PNG file",
        "image line at step 2 cannot be published: ValueError: an array of shape (3,) is no picture",
        "image nothing at step 2 cannot be published: ValueError: an array of shape () is no picture",
        "scalars at step 4 cannot be published: ValueError: could not convert string to float: 'high'",
    ]
    assert notes.told[-2:] == [("scalars", 5, {"loss": 1.0}), ("finish", {})]


def test_histograms_of_bfloat16_are_read_as_numbers():
    notes = Notes()
    publisher = Publisher([notes], ABOUT)
    publisher.histogram(1, "w", jnp.array([[1.5], [-2.0]], jnp.bfloat16))
    assert publisher.close({})
    values = notes.told[1][3]
    assert values.dtype == np.float32 and values.tolist() == [1.5, -2.0]
    with pytest.raises(ValueError):
        values[0] = 1  # shared by all trackers


def test_without_trackers_nothing_is_copied_and_no_thread_runs():
    before = threading.active_count()
    publisher = Publisher()
    for method in ("image", "histogram"):
        getattr(publisher, method)(1, "x", object())
    publisher.scalars(1, None)
    publisher.back_to(0)
    assert publisher.close(None) and threading.active_count() == before


def test_a_process_ends_though_a_tracker_is_stuck():
    code = """
import threading
from training.watching.publish import Publisher

class Stuck:
    def start(self, about):
        threading.Event().wait()

class Fine:
    def finish(self, metrics):
        print("finished", flush=True)

for trackers in ([Fine()], [Fine(), Stuck()]):
    print(Publisher(trackers).close({}, 0.2), flush=True)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0 and run.stdout.split() == [
        "finished",
        "True",
        "finished",
        "False",
    ], run.stderr


def test_nothing_is_loaded_that_is_not_named():
    code = """
import sys
from training.watching import publish
from training.watching.trackers import console, csv_file, jsonl, tensorboard, wandb_run
made = [console.console(), jsonl.jsonl(), csv_file.csv(), tensorboard.tensorboard(), wandb_run.wandb()]
print({name.split(".")[0] for name in sys.modules} & {"wandb", "tensorboardX", "tensorboard", "PIL", "matplotlib", "google"})
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.stdout.strip() == "set()", run.stderr
