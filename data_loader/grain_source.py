"""Examples in record files, more than fit into memory, read by worker processes with Grain.

The loader decides the order of an epoch, and a batch depends only on its row of that order. So the
batches are the same for any number of workers, and a checkpoint needs no position of this reader:
the epoch and the batch, which it holds anyway, are enough.
"""

import importlib.util
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import islice
from typing import Annotated

import numpy as np

from data_loader.base import Arrays, Data, Parsed, check_labels
from data_loader.loader import collated
from data_loader.nest import map_nest, named_nest
from data_loader.record_files import NEEDS, RecordFiles
from data_loader.records import numpy_example
from ranges import Count, CountOrZero, at_most, checked
from utils import RunError, UserError, where_and_why

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

# A row after all others, one per worker, for which a worker makes no arrays. Grain holds the last
# result of a worker in reference cycles until Python collects them. Were it in shared memory, that
# memory might then be closed twice, or never.
END = -1

MEMORY_MB = 1024  # of decoded examples that are kept in memory


@checked
def grain(
    train: str,
    test: str | None = None,
    val: str | None = None,
    parse: Parsed | None = None,
    workers: Annotated[CountOrZero, at_most(1024)] = 2,
    num_classes: Count | None = None,
    vocab_size: Count | None = None,
    classes: tuple[str, ...] | None = None,
) -> Data:
    """ArrayRecord or TFRecord files, a path or a pattern per set; `parse` decodes a record.

    Without `parse`, numpy_example does.
    """
    num_classes = len(classes) if classes and num_classes is None else num_classes
    sets = {
        name: Records(RecordFiles(pattern), parse or numpy_example, workers, num_classes)
        for name, pattern in {"train": train, "val": val, "test": test}.items()
        if pattern is not None
    }
    return data_of(sets, num_classes=num_classes, vocab_size=vocab_size, classes=classes)


def data_of(sets, memory_mb=0, **named):
    """The Data of Records; if their examples take at most `memory_mb`, they are read into it."""
    example = map_nest(
        lambda leaf: np.zeros(np.shape(leaf), np.asarray(leaf).dtype), sets["train"][0]
    )
    sizes = {name: len(dataset) for name, dataset in sets.items()}
    fits = sum(sizes.values()) * sum(a.nbytes for _, a in named_nest(example)) <= memory_mb * 2**20

    def load():
        return {name: in_memory(records) if fits else records for name, records in sets.items()}

    return Data(example, sizes, load, **named, resident=fits)


def in_memory(records):
    """The examples (x, y) of Records as Arrays; the Records themselves if they differ in shape."""
    first, count = records[0], len(records)
    x, y = (np.empty((count, *np.shape(leaf)), np.asarray(leaf).dtype) for leaf in first)
    with ThreadPoolExecutor() as pool:  # Pillow decodes in parallel
        for start in range(0, count, 1024):
            rows = range(start, min(count, start + 1024))
            for i, one in zip(rows, pool.map(records.__getitem__, rows), strict=True):
                if [np.shape(leaf) for leaf in one] != [np.shape(leaf) for leaf in first]:
                    return records
                x[i], y[i] = one
    return Arrays(x, y, records.source)


class Records:
    """The examples of record files, or of anything else that has a length, items, the name of each
    item for messages, and a `source`; worker processes read batches of them."""

    def __init__(self, files, parse, workers, num_classes=None):
        if workers and importlib.util.find_spec("grain") is None:
            raise UserError(f"workers: {NEEDS.format('grain')}; or set it to 0")
        self.files, self.source = files, files.source
        self.parse = parse
        self.workers = workers
        self.num_classes = num_classes

    def __len__(self):
        return len(self.files)

    @cached_property
    def types(self):
        """{leaf: its type} in the first record. All records must have the same kinds of numbers: a
        batch of bytes with one example of floats would be a batch of floats."""
        return types_of(self.parsed(0))

    def __getitem__(self, index):
        example = self.parsed(index)
        for name, dtype in types_of(example).items():
            first = self.types.get(name, dtype)
            if dtype.kind != first.kind:
                where = f"{self.files.name(index)}: {name or 'its example'} is {dtype}"
                raise UserError(f"{where}, but {first} in {self.files.name(0)}; write one type")
        return example

    def parsed(self, index):
        """The example of a record, before it is compared with the others."""
        record = self.files[index]
        try:
            example = self.parse(record)
            if self.num_classes is not None and isinstance(example, tuple):
                label = example[1]
                if np.ndim(label) == 0 and not 0 <= label < self.num_classes:
                    check_labels("its target", [label], self.num_classes)
            return example
        except UserError as error:
            raise UserError(f"{self.files.name(index)}: {error}") from error
        except Exception as error:  # a user's function may raise anything
            raise UserError(
                f"{self.files.name(index)}: parse fails: {where_and_why(error)}"
            ) from error

    def batch(self, collate_fn, row):
        """One batch; every error becomes a UserError, which can be pickled between processes."""
        return collated([self[int(i)] for i in row], collate_fn)

    def read_batches(self, order, collate_fn):
        """One batch for each row of `order`; each of n workers makes every n-th one in advance."""
        make = partial(self.batch, collate_fn)
        if self.workers and len(order):
            return in_workers(make, order, self.workers)
        return map(make, order)


def types_of(example):
    return {name: np.asarray(leaf).dtype for name, leaf in named_nest(example)}


def in_workers(make, order, workers):
    """make(row) of each row, in order; the workers end with this generator or this process."""
    import grain
    from absl import flags

    if not flags.FLAGS.is_parsed():  # Grain reads flags that only absl's own programs parse
        flags.FLAGS.mark_as_parsed()
    workers = min(workers, len(order))
    rows = np.pad(order, ((0, workers), (0, 0)), constant_values=END)
    made = grain.MapDataset.source(rows).map(partial(make_contiguous, make))
    # No threads and no buffer within a worker, since one row is a whole batch.
    one_by_one = made.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    options = grain.multiprocessing.MultiprocessingOptions(
        num_workers=workers, per_worker_buffer_size=1
    )
    iterator = iter(one_by_one.mp_prefetch(options, partial(begin_worker, os.getpid())))
    try:
        with signals_blocked(), safe_path():
            first = copied(next(iterator))  # starts all workers
        yield first
        yield from map(copied, islice(iterator, len(order) - 1))
    except (UserError, RunError):
        raise
    except Exception as error:  # Grain's own: a worker died or could not be started
        raise RunError(DIED.format(error)) from error
    finally:
        iterator.close()


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
    """Processes started inside never receive SIGINT and SIGTERM.

    The run handles these signals, and needs batches until it has stopped.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows: see begin_worker
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # if it were started later, it would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def safe_path():
    """Processes started inside import nothing from the working folder before they have this
    process's sys.path. It may be a stranger's, and would come first, since multiprocessing starts
    `python -c`."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        os.environ |= {} if before is None else {"PYTHONSAFEPATH": before}


def begin_worker(parent, _index, _count):
    """Runs first in every worker: it will end with its parent process, and uses no accelerator."""
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    if not hasattr(signal, "pthread_sigmask"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # Grain imports it, without touching a device
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    for module, name in POLL_INTERVALS.items():
        if hasattr(sys.modules.get(module), name):
            setattr(sys.modules[module], name, 0.02)


def end_with(parent):
    """End this process once its parent is no longer `parent`."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
