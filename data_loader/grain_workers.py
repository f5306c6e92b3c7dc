"""Worker processes that make batches with Grain, pass after pass: they are started once.

Starting them takes seconds, 16 of them on a busy machine, so they live as long as their dataset. A
worker reads the row of indices of each batch from a small file that this process writes.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import util

import numpy as np

from data_loader.nest import map_nest
from utils import RunError, UserError

DIED = (
    "grain: a worker process ended ({}); if the system killed it because memory ran out, use fewer "
    "`workers` or a smaller loader.batch_size; batches pass through shared memory, on Linux "
    "/dev/shm, which may be too small; your own script that calls fit needs its "
    '`if __name__ == "__main__":`; '
    "with workers=0 no process is started"
)

# How long a Grain worker sleeps before it checks whether it should end. The default is 0.5 s, and
# the workers are joined one after the other.
POLL_INTERVALS = {
    "grain._src.python.dataset.transformations.process_prefetch": "_PARENT_EXHAUSTED_WAIT_S",
    "grain._src.python.ipc.queue": "_QUEUE_WAIT_TIMEOUT_SECONDS",
}

# The row after all others, for which a worker makes no arrays. Grain holds the last result of a
# worker in reference cycles until Python collects them. Were it in shared memory, that memory might
# then be closed twice, or never.
END = -1
AHEAD = 3  # rows per worker that are given out at a time: one is being made, two are made


class Workers:
    """`count` processes that call make(row) for rows of `width` indices; each of them makes every
    count-th batch."""

    def __init__(self, make, width, count):
        import grain
        from absl import flags

        if not flags.FLAGS.is_parsed():  # Grain reads flags that only absl's own programs parse
            flags.FLAGS.mark_as_parsed()
        self.given, self.taken = 0, 0  # rows, batches
        self.rows = Rows(width, AHEAD * count)
        made = grain.MapDataset.source(self.rows).map(partial(make_contiguous, make))
        # No threads and no buffer within a worker, since one row is a whole batch.
        one_by_one = made.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        options = grain.multiprocessing.MultiprocessingOptions(
            num_workers=count, per_worker_buffer_size=1
        )
        begin = partial(begin_worker, os.getpid(), self.rows.path)
        self.iterators = [iter(one_by_one.mp_prefetch(options, begin))]  # none once it is closed
        # Called when this object is deleted, and at the end of the process: before Grain ends its
        # workers, and Python the threads that free its shared memory (of priority 15).
        ended = self.rows, self.iterators, count
        self.close = util.Finalize(self, end_workers, ended, exitpriority=100)

    def ready(self):
        """Drop the batches of a pass that was left early; False if one of them is an error."""
        try:
            while self.taken < self.given:
                self.next()
        except (UserError, RunError):
            self.close()
        return self.taken == self.given

    def batches(self, order):
        """make(row) of each row, in order; after an error the workers are of no use."""
        for row in order[: self.rows.slots]:
            self.give(row)
        for i in range(len(order)):
            batch = self.next()
            if i + self.rows.slots < len(order):
                self.give(order[i + self.rows.slots])
            yield batch

    def give(self, row):
        self.rows.write(self.given, row)
        self.given += 1

    def next(self):
        """The next batch of the rows that were given to the workers."""
        try:
            if self.taken:
                batch = next(self.iterators[0])
            else:
                with signals_blocked(), safe_path():
                    batch = next(self.iterators[0])  # starts all workers
        except (UserError, RunError):
            raise
        except Exception as error:  # Grain's own: a worker died or could not be started
            raise RunError(DIED.format(error)) from error
        self.taken += 1
        return copied(batch)


def end_workers(rows, iterators, count):
    """End the processes, once the last result of each is END, and delete the file. Grain's iterator
    is deleted before the interpreter ends, when it would print errors."""
    rows.end()
    iterator, ends = iterators.pop(), 0
    with suppress(Exception):  # such as the error of a worker that died
        while ends < count:
            ends = ends + 1 if isinstance(next(iterator), str) else 0
    iterator.close()
    rows.delete()


class Rows:
    """A source of Grain without an end: rows of indices from a file with slots for the latest rows.
    Reading a row waits until it is written."""

    def __init__(self, width, slots):
        self.width, self.slots = width, slots
        descriptor, self.path = tempfile.mkstemp(prefix="rawtree-rows-")
        os.write(descriptor, bytes(self.start(slots - 1) + 8 * (1 + width)))
        os.close(descriptor)

    def __len__(self):
        return 2**40

    def start(self, number):
        """Where a row begins in the file: after a number that is 1 at the end, and other rows. A
        row begins with its number, counted from 1."""
        return 8 + 8 * (1 + self.width) * (number % self.slots)

    def write(self, number, row):
        with open(self.path, "r+b", buffering=0) as file:
            file.seek(self.start(number) + 8)
            file.write(np.asarray(row, np.int64).tobytes())
            file.seek(self.start(number))  # only now, so that no half of a row is read
            file.write(np.int64(number + 1).tobytes())

    def __getitem__(self, number):
        with open(self.path, "rb", buffering=0) as file:
            while True:
                file.seek(0)
                if np.frombuffer(file.read(8), np.int64)[0]:
                    return np.array([END])
                file.seek(self.start(number))
                found, *row = np.frombuffer(file.read(8 * (1 + self.width)), np.int64)
                if found == number + 1:
                    return np.array(row)
                time.sleep(0.005)

    def end(self):
        """From now on all rows are END."""
        with suppress(OSError), open(self.path, "r+b", buffering=0) as file:
            file.write(np.int64(1).tobytes())

    def delete(self):
        with suppress(OSError):
            os.unlink(self.path)


def make_contiguous(make, row):
    """The batch of a row, with contiguous arrays, which Grain passes through shared memory.

    It sends anything else through a pipe, which may block the end of a worker.
    """
    if row[0] == END:
        return "end"
    return map_nest(
        lambda leaf: np.asarray(leaf, order="C") if isinstance(leaf, np.ndarray) else leaf,
        make(row),
    )


def copied(batch):
    """A copy of the batch; Grain shares its memory with a worker and frees it with its arrays."""
    return map_nest(lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, batch)


@contextmanager
def signals_blocked():
    """Processes started inside never receive SIGINT, SIGTERM and SIGHUP.

    The run handles these signals, and needs batches until it has stopped.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows: see begin_worker
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # if it were started later, it would unblock the signals
    blocked = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def safe_path():
    """Processes started inside import nothing from the working folder before they have this
    process's sys.path. That folder may be another user's, and would come first, since
    multiprocessing starts `python -c`."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        os.environ |= {} if before is None else {"PYTHONSAFEPATH": before}


def begin_worker(parent, file, _index, _count):
    """Runs first in every worker: it will end with its parent process, and uses no accelerator."""
    threading.Thread(target=end_with, args=(parent, file), daemon=True).start()
    if not hasattr(signal, "pthread_sigmask"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # Grain imports it, without touching a device
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    for module, name in POLL_INTERVALS.items():
        if hasattr(sys.modules.get(module), name):
            setattr(sys.modules[module], name, 0.02)


def end_with(parent, file=None):
    """End this process, and delete a file, once its parent is no longer `parent`."""
    while os.getppid() == parent:
        time.sleep(0.5)
    with suppress(OSError):
        os.unlink(file or "")
    os._exit(1)
