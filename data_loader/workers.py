"""Worker processes that apply a function to many items, ahead of time and in order.

Their results pass through files in memory: through the pipe of a process pool, a batch of 38 MB
took 111 ms of this process's time instead of 41 ms.
"""

import os
import pickle
import shutil
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any
from weakref import finalize

from utils import RunError

MEMORY = "/dev/shm"  # where Linux has files that are kept in memory
HAS_MASKS = hasattr(signal, "pthread_sigmask")  # not on Windows: see begin_worker
AHEAD = 2  # items per worker that are given out: one is computed, the result of another waits
DIED = (
    "a worker process ended ({}); if the system killed it because memory ran out, use fewer "
    "`workers` or a smaller loader.batch_size, or fewer --processes; your own script that calls "
    'fit needs its `if __name__ == "__main__":`; with workers=0 no process is started'
)


class Workers:
    """Up to `count` processes that call `function`. They are started when they are needed, which
    takes seconds, and end when this object is deleted."""

    def __init__(self, function: Callable[[Any], Any], count: int) -> None:
        self.ahead = AHEAD * count
        in_memory = MEMORY if os.access(MEMORY, os.W_OK) else None
        folder = tempfile.mkdtemp(prefix="rawtree-", dir=in_memory)
        self.pool = ProcessPoolExecutor(
            count, Context(), initializer=begin_worker, initargs=(function, folder)
        )
        finalize(self, close, self.pool, folder)  # also at the end of this process

    def mapped(self, items: Iterable[Any]) -> Iterator[Any]:
        """function(item) of each item, in order."""
        futures: deque[Future[str]] = deque()
        try:
            for item in items:
                futures.append(self.pool.submit(work, item))
                if len(futures) > self.ahead:
                    yield result_of(futures.popleft())
            while futures:
                yield result_of(futures.popleft())
        except BrokenProcessPool as error:
            raise RunError(DIED.format(error)) from error
        finally:  # the caller may stop early
            for future in [future for future in futures if not future.cancel()]:
                if not future.exception():
                    os.unlink(future.result())


def close(pool: ProcessPoolExecutor, folder: str) -> None:
    try:
        pool.shutdown(cancel_futures=True)
    finally:  # also if Ctrl-C interrupts it
        shutil.rmtree(folder, ignore_errors=True)


class Process(SpawnProcess):
    """A worker. It imports nothing from the working folder before it has this process's sys.path:
    that folder may be another user's, and would come first, since multiprocessing starts
    `python -c`. It uses no accelerator. It never receives SIGINT, SIGTERM and SIGHUP: the run
    handles them, and needs batches until it has stopped."""

    def start(self) -> None:
        with STARTING, environment(PYTHONSAFEPATH="1", JAX_PLATFORMS="cpu"):
            if not HAS_MASKS:
                return super().start()
            ended_by = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ended_by)
            try:
                super().start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def terminate(self) -> None:
        self.kill()  # SIGTERM is blocked


class Context(SpawnContext):
    Process = Process


STARTING = threading.Lock()  # of the environment, which belongs to all threads


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Variables that processes which are started inside inherit."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)


function_of_worker: Any = None  # set in a worker
folder_of_worker: str | None = None


def begin_worker(function: Callable[[Any], Any], folder: str) -> None:
    """Runs first in a worker: it will end with the process that has started it."""
    global function_of_worker, folder_of_worker
    function_of_worker, folder_of_worker = function, folder
    if not HAS_MASKS:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent

    def end_with_parent() -> None:
        parent.join()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def work(item: Any) -> str:
    """In a worker: write the result for an item into a file, and return its path."""
    result = function_of_worker(item)
    descriptor, path = tempfile.mkstemp(dir=folder_of_worker)
    try:
        with open(descriptor, "wb") as file:
            pickle.dump(result, file, protocol=5)
    except OSError as error:
        raise RunError(
            f"{folder_of_worker}: a worker process cannot write its result: {error.strerror}; use "
            "fewer `workers`, or give a container more shared memory: docker run --shm-size=2g"
        ) from error
    return path


def result_of(future: Future[str]) -> Any:
    """The result in the file of a worker, which is deleted."""
    path = future.result()
    with open(path, "rb") as file:
        result = pickle.load(file)
    os.unlink(path)
    return result
