"""Call functions in a child process, whose crash is an error in this process.

TensorFlow's converter, the calibrator of int8 and the runtimes are C++ that some models crash. The
child waits for calls, so that packages are imported once, while this process does something else.
"""

import importlib
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from inference.packages import quiet
from utils import PACKAGE, RunError, UserError

ROOT = Path(__file__).resolve().parents[2 if PACKAGE else 1]  # the folder that imports start from
# -P: nothing is imported from the working folder.
OPTIONS = ("-P", "-X", "faulthandler")
PROGRAM = f"import sys; sys.path.insert(0, sys.argv[1]); from {__name__} import serve; serve()"
# The line in which C++ code prints why it ends the process.
FATAL = re.compile(rb"^(?:F\d.*?\] |.*(?=Check failed)|LLVM ERROR: |.*(?=Assertion ))(.+)", re.M)
MAX_OUTPUT = 100_000  # bytes of the child's output that are searched for the reason of its end


class Crash(RunError):
    """A call ended its process."""


class Kept(NamedTuple):
    """Stands for an object that a Child keeps, in the arguments of a call."""

    number: int


def locally(step: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in this process; `Child.call` calls it in another one."""
    with quiet():
        return function(*args)


class Child:
    """A process that calls functions; a context manager, whose exit ends the process.

    It calls the function `prepare` as soon as it starts, and is started again by the first call
    after its end.
    """

    def __init__(self, prepare: Callable[[], object] | None = None) -> None:
        self.prepare = [prepare.__module__, prepare.__name__] if prepare else []
        self.process: subprocess.Popen[bytes] | None = None
        self.output: IO[bytes] | None = None  # what the process prints
        self.number = 0  # of the latest object that was kept

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process, unless it runs."""
        if self.process is not None:
            return self.process
        self.output = tempfile.TemporaryFile()  # noqa: SIM115, `stop` closes it
        self.process = subprocess.Popen(
            [sys.executable, *OPTIONS, "-c", PROGRAM, str(ROOT), *self.prepare],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.output,
            start_new_session=True,  # Ctrl-C interrupts this process, which ends the child
        )
        return self.process

    def call(self, step: str, function: Callable[..., Any], *args: Any) -> Any:
        """function(*args), a function of a module; Crash if this ends the process. `step`
        describes it, as in "converting to TFLite"."""
        return self.send(step, function, args)

    def keep(self, step: str, function: Callable[..., Any], *args: Any) -> Kept:
        """The `Kept` of function(*args), an object of the process until a call without it."""
        self.number += 1
        self.send(step, function, args, self.number)
        return Kept(self.number)

    def send(
        self,
        step: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        number: int | None = None,
    ) -> Any:
        """The reply to a call; with a number, the process keeps the result under it instead."""
        # Bytes within bytes: a function that cannot be imported must not end the child.
        request = pickle.dumps(pickle.dumps((function, args, number)))
        process = self.start()
        assert process.stdin and process.stdout  # pipes
        try:
            process.stdin.write(request)
            process.stdin.flush()
            error, value = pickle.load(process.stdout)
        except (EOFError, OSError):
            raise Crash(self.reason(step)) from None
        except BaseException:  # KeyboardInterrupt
            self.stop()  # since the reply would be taken for that of the next call
            raise
        if error:
            raise {"UserError": UserError, "RunError": RunError}.get(error, RuntimeError)(value)
        return value

    def stop(self) -> None:
        """End the process, if it runs."""
        if self.process is not None:
            assert self.process.stdin and self.process.stdout and self.output
            self.process.kill()
            with suppress(OSError):  # closing sends what was not sent yet
                self.process.stdin.close()
            self.process.stdout.close()
            self.process.wait()
            self.output.close()
            self.process = self.output = None

    def reason(self, step: str) -> str:
        """Why the process ended during a step, by its exit code and what it printed last."""
        assert self.process and self.output
        code = self.process.wait()
        self.output.seek(max(0, self.output.seek(0, 2) - MAX_OUTPUT))
        fatal = FATAL.findall(self.output.read())
        self.stop()
        cause = str(signal.strsignal(-code)) if code < 0 else f"exit code {code}"
        if cause == "Killed":
            cause += "; this is how the system ends a process when memory runs out"
        printed = f" ({fatal[0].decode(errors='replace').strip()})" if fatal else ""
        return f"{step} ended its process: {cause}{printed}"


def serve() -> None:
    """Call what the parent sends, until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what packages print must not be taken for a reply
    if len(sys.argv) > 2:
        with suppress(ImportError):  # the call that needs it raises this again
            getattr(importlib.import_module(sys.argv[2]), sys.argv[3])()
    kept = {}  # {number: object}
    with suppress(EOFError, BrokenPipeError):
        while True:
            pickle.dump(outcome(pickle.load(requests), kept), replies)
            replies.flush()


def outcome(request: bytes, kept: dict[int, Any]) -> tuple[str, Any]:
    """("", the result) of a call, or (the error's type, its message); updates the dict `kept`."""
    try:
        function, args, number = pickle.loads(request)
        if not any(isinstance(a, Kept) for a in args):
            kept.clear()  # its memory, and its file, are free for this call
        result = function(*(kept[a.number] if isinstance(a, Kept) else a for a in args))
        if number is None:
            return "", result
        kept[number] = result
        return "", None
    except (UserError, RunError) as error:
        return type(error).__name__, str(error)
    except Exception as error:  # whatever a converter raises
        return "Exception", f"{type(error).__name__}: {error}"
