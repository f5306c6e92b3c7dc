"""Signals that end a run in order."""

import logging
import os
import shutil
import signal
import threading
from contextlib import contextmanager

from utils import FAILED, STOPPED

logger = logging.getLogger("main")

TEMPORARY = []  # folders that go with the process, however it ends
LEFT_TO_JAX = []  # not empty where one of several processes trains, and SIGTERM is JAX's own, which tells the others


def leave_to_jax():
    """From now on a signal to this process is one to all of them; SIGINT becomes a SIGTERM, a second one ends it at once."""
    LEFT_TO_JAX.append(True)

    def forward(_number, _frame):
        LEFT_TO_JAX.append(True)
        if len(LEFT_TO_JAX) > 2:
            os._exit(FAILED)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGINT, forward)


@contextmanager
def stop_signals(run):
    """SIGTERM and SIGINT end the run after the chunk in flight; a second one does what it did before, as a KeyboardInterrupt."""
    if (
        threading.current_thread() is not threading.main_thread()
    ):  # only the main thread may handle signals
        yield
        return
    if LEFT_TO_JAX:  # which the loop asks
        yield
        return

    def note(number, _frame):
        if run.signal:
            earlier = before[number] if callable(before[number]) else signal.default_int_handler
            return earlier(number, _frame)
        run.stopped, run.signal = True, signal.Signals(number).name
        logger.info("%s: stopping after the steps in flight; once more stops at once", run.signal)
        return None

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(
                number, signal.SIG_DFL if handler is None else handler
            )  # None: not set by Python


def end_at_signals(folder=None):
    """Until the loop takes over, and when a signal comes twice, the process ends at once; an exception would get lost in a
    callback of JAX's, or tear down what it is still compiling. What was killed can be gone on with anyway."""

    def end(_number, _frame):
        saved = folder is not None and any(folder.glob("checkpoint-*"))
        if folder is not None and not (folder / "config.json").exists():
            shutil.rmtree(folder, ignore_errors=True)  # nothing has run
        for temporary in TEMPORARY:
            shutil.rmtree(temporary, ignore_errors=True)
        more = (
            "; the run can be gone on with from its last checkpoint"
            if saved
            else "; nothing was saved"
        )
        os.write(2, f"Interrupted{more}\n".encode())
        os._exit(STOPPED if saved else FAILED)

    if LEFT_TO_JAX:
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
