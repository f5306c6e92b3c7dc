"""Several processes that train one run, by JAX's own runtime: what all of them agree on, and how they stop.

Each runs the same program on the same numbers, so what it decides by its clock, its disk or its signals is decided by process 0
and told to the others; `agreed` is the one way to do so. With one process all of it is free.
"""

import hashlib
import json
import tempfile
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np

from utils import RunError, UserError, first_line

LETTER = 4096  # bytes of what is told at once: few lengths, so that few programs are compiled


def several():
    """Whether there are others."""
    return jax.process_count() > 1


def is_first():
    """Whether this process is the one that logs and writes."""
    return jax.process_index() == 0


def agreed(numbers):
    """A list of numbers as process 0 has them; all must call this at the same place."""
    if not several():
        return numbers
    from jax.experimental.multihost_utils import broadcast_one_to_all

    return broadcast_one_to_all(np.asarray(numbers)).tolist()


def from_first(make):
    """What `make` answers in process 0, as JSON has it, in every process; and so with its mistake."""
    if not several():
        return make()
    from jax.experimental.multihost_utils import broadcast_one_to_all

    written, failure = np.zeros(0, np.uint8), None
    if is_first():
        try:
            text = json.dumps({"answer": make()})
        except (UserError, RunError) as error:
            failure, text = error, json.dumps({type(error).__name__: first_line(error)})
        written = np.frombuffer(text.encode(), np.uint8)
    [length] = agreed([len(written)])
    letter = np.zeros(-(-length // LETTER) * LETTER, np.uint8)
    letter[: len(written)] = written
    told = json.loads(bytes(broadcast_one_to_all(letter)).rstrip(b"\0"))
    if "answer" not in told:
        raise failure or OfOthers(0)
    return told["answer"]


def check_alike(mine):
    """Refuse to train together with a process 0 that goes by something else; `mine` is {name: what JSON holds}."""
    if not several():
        return
    mine = {name: json.dumps(value, sort_keys=True, default=str) for name, value in mine.items()}
    digests = {
        name: hashlib.sha256(value.encode()).hexdigest()[:16] for name, value in mine.items()
    }
    first = from_first(lambda: digests)
    wrong = [name for name in {**first, **digests} if first.get(name) != digests.get(name)]
    with together():
        if wrong:
            found = mine.get(wrong[0], "nothing")[:200]
            raise UserError(
                f"{wrong[0]}: is {found} in process {jax.process_index()}, and something else in process 0; processes that train "
                "together need the same config, data and code (to train each by itself, say distributed.coordinator=none)"
            )


class OfOthers(RunError):
    """Another process failed, and has told why."""

    def __init__(self, number):
        super().__init__(f"process {number} failed, and has told why; so this one ends as well")


@contextmanager
def temporary_folder(prefix, base=None):
    """A folder that is gone afterwards, the same for all; `base` is where all of them can see it."""
    if not is_first():
        yield from_first(None)
        return
    if base:
        Path(base).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=base) as folder:
        yield from_first(lambda: folder)


@contextmanager
def together():
    """What each process does by itself, but none goes on from alone: where one fails, all do."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    if several():
        from jax.experimental.multihost_utils import process_allgather

        failed = np.flatnonzero(process_allgather(np.int32(failure is not None)))
        if failure is None and failed.size:
            raise OfOthers(failed[0])
    if failure is not None:
        raise failure


class Stopping:
    """Whether all processes are to stop now, once any has had a signal: JAX finds the next poll that all of them come to."""

    def __init__(self):
        self.polls = 0

    def due(self):
        """Whether this is the poll to stop at; all must call it equally often."""
        from jax.experimental.multihost_utils import reached_preemption_sync_point

        self.polls += 1  # it waits for this very number, so it must grow by one
        return reached_preemption_sync_point(self.polls)


def lost(error):
    """What to say of an error that tells of a lost process, else None."""
    kinds = (
        "Gloo",
        "UNAVAILABLE",
        "DEADLINE_EXCEEDED",
        "heartbeat",
        "coordination",
        "NCCL",
        "Barrier",
        "preempted",
    )
    if (
        not several()
        or isinstance(error, UserError)
        or not any(kind in str(error) for kind in kinds)
    ):
        return None
    return (
        f"Process {jax.process_index()} of {jax.process_count()} has lost another one, or the way to it: {first_line(error)}\n"
        "It cannot go on alone; start all of them anew with --resume auto, which goes on from the last checkpoint"
    )
