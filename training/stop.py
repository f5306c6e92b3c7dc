"""Signals that end a run in order."""

import logging
import signal
import threading
from contextlib import contextmanager

logger = logging.getLogger("main")


@contextmanager
def stop_signals(run):
    """SIGTERM and SIGINT end the run after the chunk in flight; a second one does what it did before, as a KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
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
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
