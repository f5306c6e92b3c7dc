"""A tracker that records its calls, for the tests of the publisher."""

import subprocess
import sys
import time
from pathlib import Path

from training.watching import publish
from training.watching.publish import About

ROOT = Path(__file__).resolve().parents[3]
ABOUT = About(Path("folder"), "title", {"seed": 1}, 7)


class Recorder:
    """A tracker that records its calls; with `gate`, it blocks until that is set."""

    def __init__(self, gate=None):
        self.calls, self.gate = [], gate

    def __getattr__(self, method):
        if method not in publish.METHODS:
            raise AttributeError(method)

        def record(*arguments):
            if self.gate is not None:
                self.gate.wait(10)
            self.calls.append((method, *arguments))

        return record


def warnings_of(caplog):
    """The warnings of the run so far."""
    return [r.getMessage() for r in caplog.records if r.name == "main" and r.levelname == "WARNING"]


def wait_until(condition):
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def output_of(code):
    """What a program in a process of its own prints."""
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()
