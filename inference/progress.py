"""The progress lines of a long export, and a Ctrl-C that no package can catch."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from utils import INTERRUPTED

PAUSE = 10  # seconds between two lines


@contextmanager
def interrupts() -> Iterator[Callable[[], None]]:
    """A context in which Ctrl-C always ends in KeyboardInterrupt, at the latest at its end.

    Its value is a function that raises it if a package has caught it: some catch every exception,
    and C++ code turns it into an error of its own.
    """
    came = threading.Event()

    def note(*_: object) -> None:
        came.set()
        raise KeyboardInterrupt

    def check() -> None:
        if came.is_set():
            raise KeyboardInterrupt

    try:
        with handled_by(note):
            yield check
    finally:
        check()


@contextmanager
def ended_by_interrupt(message: str) -> Iterator[None]:
    """A context for long imports, in which Ctrl-C ends the process at once. A KeyboardInterrupt may
    be raised in a callback of C code there, which shows a traceback or loses it."""

    def end(*_: object) -> None:
        print(message, file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)

    with handled_by(end):
        yield


@contextmanager
def handled_by(handler: Callable[..., object]) -> Iterator[None]:
    """A context in which Ctrl-C calls the handler, unless it is ignored."""
    is_main = threading.current_thread() is threading.main_thread()
    previous = signal.getsignal(signal.SIGINT) if is_main else signal.SIG_IGN
    if previous in (signal.SIG_IGN, None):  # an ignored signal stays ignored
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


class Progress:
    """Prints what is being done every `pause` seconds; a context manager.

    The lines go to where standard error pointed at first, since `quiet` redirects it.
    """

    def __init__(self, pause: float = PAUSE) -> None:
        self.pause, self.step, self.ended = pause, "loading", threading.Event()
        self.thread = threading.Thread(target=self.report, daemon=True)

    def __enter__(self) -> "Progress":
        self.start = time.monotonic()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def __call__(self, step: str) -> None:
        """Set the step that is printed from now on."""
        self.step = step

    def report(self) -> None:
        try:
            stream = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8")
        except (OSError, ValueError, AttributeError):  # it is closed, or not a file
            return
        with stream:
            while not self.ended.wait(self.pause):
                print(
                    f"{time.monotonic() - self.start:.0f} s: {self.step}", file=stream, flush=True
                )
