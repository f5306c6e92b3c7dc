"""Signals that stop a run after saving it: SIGTERM, SIGINT from Ctrl-C, and SIGHUP."""

import logging
import os
import shutil
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from utils import STOPPED, WINDOWS

logger = logging.getLogger("main")


def handled() -> list[signal.Signals]:
    """The signals that end a run. SIGHUP says that the terminal was closed; it is left alone if it
    was ignored when the program started, as by nohup."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    if not WINDOWS and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


class Signals:
    """Stops a run at a signal, after the chunk in progress. A second signal goes to the previous
    handler, which may raise KeyboardInterrupt, and so does one before the first chunk, when there
    is nothing to save and compiling may take minutes. With several processes, JAX notes a signal to
    any of them, and all of them stop after the same step."""

    def __init__(self) -> None:
        # Imported here, since it imports JAX, which the command line does not need yet.
        from training.processes import Stopping, several

        self.name: str | None = None  # of the signal that was received
        self.before: dict[int, Any] = {}  # the former handlers
        self.has_trained = False
        self.sync_point = Stopping() if several() else None

    def handle(self) -> None:
        """Begin to handle signals."""
        if self.sync_point or threading.current_thread() is not threading.main_thread():
            return  # only the main thread may handle signals

        def note(number: int, frame: FrameType | None) -> None:
            earlier = self.before[number]
            if self.name or (callable(earlier) and not self.has_trained):
                handle = earlier if callable(earlier) else signal.default_int_handler
                handle(number, frame)
                return
            self.name = signal.Signals(number).name
            logger.info(
                "%s: stopping after the steps in progress; a second one stops at once", self.name
            )

        self.before = {number: signal.signal(number, note) for number in handled()}

    def received(self) -> str | None:
        """The name of the signal that was received, or None."""
        if self.sync_point and not self.name and self.sync_point.due():
            self.name = "SIGTERM"
            logger.info("SIGTERM, or Ctrl-C, to one of the processes: all of them stop here")
        return self.name

    def restore(self) -> None:
        """Give signals their former handlers back."""
        for number, handler in self.before.items():
            # None: the handler was not set by Python
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self.before = {}


def leave_to_jax() -> None:
    """From now on a signal to this process is forwarded to all processes: JAX handles SIGTERM and
    notifies them; SIGINT and SIGHUP become a SIGTERM, and a second one ends the process at once."""
    count = 0

    def forward(_number: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            os._exit(STOPPED)
        os.kill(os.getpid(), signal.SIGTERM)

    for number in handled()[1:]:
        signal.signal(number, forward)


def end_at_signals(
    folder: Path | None = None, temporary: str | Path | None = None, new: bool = True
) -> None:
    """Let signals end the process at once, until the loop handles them, and again at a second
    signal. An exception would be lost in a callback of JAX's, or interrupt a compilation. A killed
    run can be resumed anyway. `temporary` is a folder to delete then, and so is the `folder` of a
    `new` run that has not begun, or has logged and saved nothing; the same command starts it
    again."""

    def end(_number: int, _frame: FrameType | None) -> None:
        saved = folder is not None and any(folder.glob("checkpoint-*"))
        # Such as a report that is being written after the run (utils.files.atomic_file).
        for unfinished in folder.glob(f".*.{os.getpid()}.tmp") if folder is not None else ():
            unfinished.unlink(missing_ok=True)
        written = saved or (folder is not None and (folder / "metrics.jsonl").exists())
        if folder and new and not (written and (folder / "config.json").exists()):
            shutil.rmtree(folder, ignore_errors=True)  # no step was taken
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        consequence = (
            "the run can be resumed from its last checkpoint" if saved else "nothing was saved"
        )
        os.write(2, f"Interrupted; {consequence}\n".encode())
        os._exit(STOPPED)

    for number in handled():
        signal.signal(number, end)
