"""Several processes that train one run: how they agree on values, and how they stop.

All of them run the same program on the same numbers. Anything that depends on a clock, a disk or a
signal is therefore decided by process 0 and sent to the others, by `agreed` or `from_first`. With
one process both cost nothing.
"""

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from utils import RunError, UserError, first_line

BLOCK = 4096  # messages are padded to multiples of this, so that few programs are compiled
# Seconds that a network file system may take to show a new folder to other hosts.
VISIBLE_WITHIN = 30
SIGNS_OF_LOSS = ("Gloo", "UNAVAILABLE", "DEADLINE_EXCEEDED", "heartbeat", "coordination", "NCCL")
SIGNS_OF_LOSS += ("Barrier", "preempted")


def several() -> bool:
    """Whether more than one process trains this run."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this process is the one that logs and writes."""
    return jax.process_index() == 0


def agreed(numbers: list[int]) -> list[int]:
    """The list of numbers of process 0; all processes must call this at the same point."""
    if not several():
        return numbers
    from jax.experimental.multihost_utils import broadcast_one_to_all

    own = np.asarray(numbers)
    sent = broadcast_one_to_all(own.view(np.uint8))  # JAX would cut numbers to 32 bits
    return np.asarray(sent).view(own.dtype).tolist()


def from_first(make: Callable[[], Any]) -> Any:
    """What make() returns in process 0, sent to all processes as JSON; its UserError or RunError
    becomes an error in all of them."""
    if not several():
        return make()
    from jax.experimental.multihost_utils import broadcast_one_to_all

    message, failure = np.zeros(0, np.uint8), None
    if is_first():
        try:
            text = json.dumps({"value": make()})
        except (UserError, RunError) as error:
            failure, text = error, json.dumps({type(error).__name__: first_line(error)})
        message = np.frombuffer(text.encode(), np.uint8)
    [length] = agreed([len(message)])
    padded = np.zeros(-(-length // BLOCK) * BLOCK, np.uint8)
    padded[: len(message)] = message
    received = json.loads(bytes(broadcast_one_to_all(padded)).rstrip(b"\0"))
    if "value" not in received:
        raise failure or OtherProcessFailed(0)
    return received["value"]


def check_alike(values: Mapping[str, Any]) -> None:
    """Refuse to train if process 0 has other `values`, {name: value that JSON can hold}."""
    if not several():
        return
    texts = {name: json.dumps(v, sort_keys=True, default=str) for name, v in values.items()}
    digests = {name: hashlib.sha256(t.encode()).hexdigest()[:16] for name, t in texts.items()}
    first = from_first(lambda: digests)
    different = [name for name in {**first, **digests} if first.get(name) != digests.get(name)]
    with together():
        if different:
            name = different[0]
            raise UserError(
                f"{name}: is {texts.get(name, 'not set')[:200]} in process {jax.process_index()}, "
                "but different in process 0; processes that train together need the same config, "
                "data and code (to train each one alone, set distributed.coordinator=none)"
            )


class OtherProcessFailed(RunError):
    """Another process failed, and has printed the reason."""

    def __init__(self, number: int) -> None:
        super().__init__(f"process {number} failed and has printed the reason; this one ends too")


@contextmanager
def temporary_folder(prefix: str, base: str | Path | None = None) -> Iterator[str]:
    """A temporary folder in `base`, the same for all processes, which must all see `base`."""
    if not is_first():
        yield from_first(lambda: None)
        return
    if base:
        Path(base).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=base) as folder:
        yield from_first(lambda: folder)


@contextmanager
def together() -> Iterator[None]:
    """Wait until all processes have run the body; if it fails in one of them, raise in all."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    if several():
        from jax.experimental.multihost_utils import process_allgather

        failed = np.flatnonzero(process_allgather(np.int32(failure is not None)))
        if failure is None and failed.size:
            raise OtherProcessFailed(failed[0])
    if failure is not None:
        raise failure


def check_visible(folder: Path) -> None:
    """Refuse a run's folder that process 0 has made and another process does not see, even after
    waiting for a network file system that may be slow to show it."""
    with together():
        until = time.monotonic() + VISIBLE_WITHIN
        while not folder.is_dir() and time.monotonic() < until:
            time.sleep(0.2)
        if not folder.is_dir():
            raise UserError(
                f"checkpoint.dir: {folder}: process {jax.process_index()} does not see this "
                "folder of process 0; name one that all hosts share"
            )


class Stopping:
    """Whether all processes must stop, after a signal to any of them. JAX chooses the next poll
    that all of them reach."""

    def __init__(self) -> None:
        self.polls = 0

    def due(self) -> bool:
        """Whether to stop at this poll; all processes must call this equally often."""
        from jax.experimental.multihost_utils import reached_preemption_sync_point

        self.polls += 1  # JAX waits for exactly this number, so it must grow by one
        return reached_preemption_sync_point(self.polls)


def lost(error: BaseException) -> str | None:
    """The message for an error that means that another process is lost; None for other errors."""
    is_sign = any(sign in str(error) for sign in SIGNS_OF_LOSS)
    if not is_sign or not several() or isinstance(error, UserError):
        return None
    return (
        f"Process {jax.process_index()} of {jax.process_count()} has lost another process, or the "
        f"connection to it: {first_line(error)}\nIt cannot continue alone; start all processes "
        "again with --resume auto, which continues from the last checkpoint"
    )
