"""A tracker that raises, hangs or falls behind never reaches the run."""

import threading
import time

import numpy as np
import pytest

from tests.training.watching.recorder import (
    ABOUT,
    Recorder,
    output_of,
    wait_until,
    warnings_of,
)
from training.watching import publish
from training.watching.publish import Publisher
from utils import UserError


class Failing(Recorder):
    """Raises in one method."""

    def __init__(self, method, error):
        super().__init__()

        def fail(*arguments):
            self.calls.append((method, *arguments))
            raise error

        setattr(self, method, fail)


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        ("start", UserError("there is no login\nmore"), "step 7: there is no login;"),
        ("scalars", ConnectionError("gone"), "step 8: ConnectionError: gone;"),
        ("scalars", SystemExit(3), "step 8: SystemExit: 3;"),
        ("image", KeyboardInterrupt(), "step 9: KeyboardInterrupt;"),
        ("finish", OSError(28, "disk full"), "step 19: OSError: [Errno 28] disk full;"),
    ],
)
def test_a_tracker_that_raises_is_reported_once_and_dropped(method, error, message, caplog):
    failing, other = Failing(method, error), Recorder()
    publisher = Publisher([failing, other], ABOUT)
    publisher.scalars(8, {"loss": 1.0})
    publisher.image(9, "x", np.zeros((2, 2), np.uint8))
    wait_until(lambda: len(other.calls) == 3)
    for step in range(10, 20):
        publisher.scalars(step, {"loss": 1.0})
    assert publisher.close({})
    assert warnings_of(caplog) == [
        f"tracker failing: dropped at {message} the values stay in metrics.jsonl"
    ]
    assert failing.calls[-1][0] == method  # it was not called after that
    assert len(other.calls) == 14


def test_a_tracker_that_hangs_is_dropped_and_not_waited_for(monkeypatch, caplog):
    elapsed = [0.0]
    monkeypatch.setattr(publish, "monotonic", lambda: time.monotonic() + elapsed[0])
    gate = threading.Event()
    hanging, other = Recorder(gate), Recorder()
    publisher = Publisher([hanging, other], None)
    publisher.scalars(1, {"loss": 1.0})
    wait_until(lambda: len(other.calls) == 2 and publisher.channels[1].since is None)
    elapsed[0] = 59.0
    publisher.scalars(2, {"loss": 1.0})
    wait_until(lambda: len(other.calls) == 3 and publisher.channels[1].since is None)
    assert not warnings_of(caplog)
    elapsed[0] = 61.0
    publisher.scalars(3, {"loss": 1.0})
    publisher.scalars(4, {"loss": 1.0})
    (warning,) = warnings_of(caplog)
    assert "tracker recorder: dropped at step 0: took more than 60 s for one item" in warning
    began = time.monotonic()
    assert publisher.close({}) is False
    assert time.monotonic() - began < 2
    assert len(warnings_of(caplog)) == 1
    assert [call[0] for call in other.calls] == ["start", *["scalars"] * 4, "finish"]
    gate.set()
    wait_until(lambda: not publisher.channels[0].thread.is_alive())
    assert [call[0] for call in hanging.calls] == ["start"]


def test_a_tracker_that_falls_behind_is_dropped(monkeypatch, caplog):
    monkeypatch.setattr(publish, "MOST_ITEMS", 5)
    gate = threading.Event()
    slow, other = Recorder(gate), Recorder()
    publisher = Publisher([slow, other], ABOUT)
    for step in range(8, 20):
        publisher.scalars(step, {"loss": 1.0})
        wait_until(lambda n=step - 6: len(other.calls) == n)
    assert (
        len(warnings_of(caplog)) == 1
        and "dropped at step 7: fell behind by 5 items" in warnings_of(caplog)[0]
    )
    gate.set()
    wait_until(lambda: not publisher.channels[0].thread.is_alive())
    assert publisher.close({}) and len(slow.calls) == 1 and len(other.calls) == 14


def test_values_that_wait_for_a_tracker_do_not_fill_the_memory(monkeypatch, caplog):
    monkeypatch.setattr(publish, "MOST_BYTES", 1000)
    gate = threading.Event()
    publisher = Publisher([Recorder(gate)], ABOUT)
    publisher.histogram(8, "large", np.zeros(1000))  # one is always accepted
    assert not warnings_of(caplog)
    publisher.histogram(9, "small", np.zeros(1))
    assert len(warnings_of(caplog)) == 1 and "fell behind by 7.8 KiB" in warnings_of(caplog)[0]
    gate.set()
    assert publisher.close({})


def test_a_process_ends_although_a_tracker_hangs():
    code = """
import threading
from training.watching.publish import Publisher

class Hanging:
    def start(self, about):
        threading.Event().wait()

class Fine:
    def finish(self, metrics):
        print("finished", flush=True)

for trackers in ([Fine()], [Fine(), Hanging()]):
    print(Publisher(trackers).close({}, 0.2), flush=True)
"""
    assert output_of(code).split() == ["finished", "True", "finished", "False"]
