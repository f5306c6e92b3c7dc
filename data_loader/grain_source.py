"""Examples in files of records, more than fit into memory, read by worker processes with Grain.

The order of an epoch is the loader's own, and a batch is a pure function of its row. So the batches are the same for any number
of workers, and the position that a checkpoint must hold is the epoch and the batch, which it holds anyway.
"""

import importlib.util
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from itertools import islice
from multiprocessing import resource_tracker

import numpy as np

from data_loader.base import Data, Parsed, check_labels
from data_loader.nest import map_nest
from data_loader.record_files import NEEDS, RecordFiles
from data_loader.records import numpy_example
from utils import RunError, UserError, where_and_why

DIED = (
    "grain: a worker process ended ({}); if the system ended it for want of memory, take fewer `workers` or a smaller "
    "loader.batch_size; batches pass through /dev/shm, which may be too small; a script of your own that calls fit needs "
    'its `if __name__ == "__main__":`; with workers=0 no process is started'
)

# How long a worker of Grain's sleeps before it looks whether it is to end: 0.5 s, and they are waited for one after the other.
PATIENCE = {
    "grain._src.python.dataset.transformations.process_prefetch": "_PARENT_EXHAUSTED_WAIT_S",
    "grain._src.python.ipc.queue": "_QUEUE_WAIT_TIMEOUT_SECONDS",
}

# A row after all others, one for each worker. The last thing that a worker made hangs in cycles of Grain's until Python collects
# them, and were it shared memory it might then be closed twice, or never.
BEYOND = -1


def grain(
    train: str,
    test: str | None = None,
    val: str | None = None,
    parse: Parsed | None = None,
    workers: int = 2,
    num_classes: int | None = None,
    vocab_size: int | None = None,
) -> Data:
    """ArrayRecord or TFRecord files, a path or a pattern for each set; `parse` makes an example of a record (numpy_example)."""
    least = {
        "workers": (workers, 0),
        "num_classes": (num_classes, 1),
        "vocab_size": (vocab_size, 1),
    }
    wrong = [
        f"{k}: {v} is too small; at least {low}"
        for k, (v, low) in least.items()
        if v is not None and v < low
    ]
    if wrong:
        raise ValueError("\n".join(wrong))
    if workers and importlib.util.find_spec("grain") is None:
        raise UserError(f"grain: {NEEDS.format('grain')}")
    patterns = {
        name: path
        for name, path in {"train": train, "val": val, "test": test}.items()
        if path is not None
    }
    sets = {
        name: Records(path, parse or numpy_example, workers, num_classes)
        for name, path in patterns.items()
    }
    example = map_nest(
        lambda leaf: np.zeros(np.shape(leaf), np.asarray(leaf).dtype), sets["train"][0]
    )
    return Data(
        example,
        {name: len(dataset) for name, dataset in sets.items()},
        lambda: sets,
        num_classes,
        vocab_size,
    )


class Records:
    """The examples of record files; batches of them come from worker processes."""

    def __init__(self, pattern, parse, workers, num_classes=None):
        self.files, self.parse, self.workers, self.num_classes = (
            RecordFiles(pattern),
            parse,
            workers,
            num_classes,
        )
        self.source = f"{pattern} ({len(self.files.files)} files)"

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        record = self.files[index]
        try:
            example = self.parse(record)
            single = (
                self.num_classes is not None
                and isinstance(example, tuple)
                and np.ndim(example[1]) == 0
            )
            if single and not 0 <= example[1] < self.num_classes:
                check_labels("its target", [example[1]], self.num_classes)
            return example
        except UserError as error:
            raise UserError(f"{self.files.name(index)}: {error}") from error
        except Exception as error:  # a user's function may fail in any way
            raise UserError(
                f"{self.files.name(index)}: parse fails: {where_and_why(error)}"
            ) from error

    def batch(self, collate_fn, row):
        """One batch; whatever fails in it is told in a way that passes from one process to another."""
        examples = [self[int(i)] for i in row]
        try:
            return collate_fn(examples)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"loader.collate_fn fails: {where_and_why(error)}") from error

    def read_batches(self, order, collate_fn):
        """The batches of the rows of `order`, made ahead of time by the workers, each of which takes every n-th row."""
        make = partial(self.batch, collate_fn)
        return (
            in_workers(make, order, self.workers)
            if self.workers and len(order)
            else map(make, order)
        )


def in_workers(make, order, workers):
    """make(row) of each row, in order, made in processes that end with this generator or with this process."""
    import grain
    from absl import flags

    if (
        not flags.FLAGS.is_parsed()
    ):  # Grain reads flags that only a program of absl's would have parsed
        flags.FLAGS.mark_as_parsed()
    workers = min(workers, len(order))
    rows = grain.MapDataset.source(
        np.pad(order, ((0, workers), (0, 0)), constant_values=BEYOND)
    ).map(partial(made, make))
    one_by_one = rows.to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    )  # a row is a whole batch
    options = grain.multiprocessing.MultiprocessingOptions(
        num_workers=workers, per_worker_buffer_size=1
    )
    iterator = iter(one_by_one.mp_prefetch(options, partial(begin_worker, os.getpid())))
    try:
        with signals_blocked():
            first = copied(next(iterator))  # starts them all
        yield first
        yield from map(copied, islice(iterator, len(order) - 1))
    except (UserError, RunError):
        raise
    except Exception as error:  # Grain's own: it found a worker dead, or could not start one
        raise RunError(DIED.format(error)) from error
    finally:
        iterator.close()


def made(make, row):
    """The batch of a row, its arrays such as can be shared: what Grain sends through a pipe instead may block a worker's end."""
    if row[0] == BEYOND:
        return "end"
    return map_nest(
        lambda leaf: np.asarray(leaf, order="C") if isinstance(leaf, np.ndarray) else leaf,
        make(row),
    )


def copied(batch):
    """The batch in memory of our own; Grain's is shared with a worker, and goes with the array that it came in."""
    return map_nest(lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, batch)


@contextmanager
def signals_blocked():
    """What is started meanwhile never sees SIGINT and SIGTERM: they are for the run, which needs batches to end in order."""
    resource_tracker.ensure_running()  # it would unblock them, were it started later
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker(parent, _index, _count):
    """Runs first in every worker: it ends with the process that it works for, and leaves the accelerators to that one."""
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # Grain brings it, without touching a device
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    for module, name in PATIENCE.items():
        if hasattr(sys.modules.get(module), name):
            setattr(sys.modules[module], name, 0.02)


def end_with(parent):
    """End this process once another one has become its parent."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
