"""What a run prints when it fails: one message for a mistake, a traceback only for a bug."""

import logging
import os
import sys
import traceback
from bdb import BdbQuit
from contextlib import suppress

from data_loader.base import ExampleFailed
from training.observers import CallbackFailed
from training.watching.console import file_handlers
from utils import (
    BAD_INPUT,
    FAILED,
    LONGEST_ERROR,
    PACKAGE,
    RunError,
    UserError,
    cut,
    echo,
    first_line,
    is_out_of_memory,
    printable,
    where_and_why,
)

logger = logging.getLogger("main")


def post_mortem(error: BaseException) -> None:
    """Open the debugger in the frame where the error was raised."""
    import pdb

    while error.__cause__:
        error = error.__cause__
    traceback.print_exception(error)
    pdb.post_mortem(error.__traceback__)


def failed(error: BaseException) -> int:
    """Report an error and return the exit code; only a bug is shown with its traceback."""
    if isinstance(error, ExampleFailed):
        to_log("".join(traceback.format_exception(error)))
        return fail(error, FAILED)
    if isinstance(error, UserError):
        return fail(error, BAD_INPUT)
    if isinstance(error, RunError | OSError):
        return fail(error, FAILED)
    if isinstance(error, SystemExit):
        return fail(where_and_why(error), FAILED)
    processes = sys.modules.get(f"{PACKAGE}training.processes")
    if processes and (message := processes.lost(error)):
        return fail(message, FAILED)
    if is_out_of_memory(error):
        fix = "use a smaller loader.batch_size, split batches with training.accumulate, "
        fix += "or stream with loader.device_budget_mb=0"
        return fail(f"Out of memory: {first_line(error)}\n{fix}", FAILED)
    shown = "".join(traceback.format_exception(error))
    logged = to_log(shown)
    if isinstance(error, CallbackFailed):
        hint = "The traceback is in train.log" if logged else f"Without a log:\n{shown}"
        hint += "; --post-mortem opens the debugger there"
        return fail(f"{error}\n{hint}", FAILED)
    if isinstance(error, BdbQuit):
        return fail("Left the debugger", FAILED)
    if processes and processes.several():  # they would wait for each other at the interpreter's end
        traceback.print_exception(error)
        return FAILED
    raise error


def fail(error: BaseException | str, code: int) -> int:
    """Print one error message, also to the run's log, and return the exit code."""
    message = cut(str(error), LONGEST_ERROR)
    with suppress(OSError):  # standard error may be a file on a full disk
        echo(message, file=sys.stderr)
    to_log(message)
    return code


def to_log(message: str) -> bool:
    """Write an error to the run's log alone. Return whether there is a log."""
    message = printable(message)
    record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, message, (), None)
    handlers = [each for each in file_handlers() if os.path.exists(each.baseFilename)]
    for handler in handlers:
        handler.handle(record)
    return bool(handlers)
