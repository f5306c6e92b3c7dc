"""A function applied to many items by several processes, with a bar that shows the progress."""

import os
import signal
import sys
import threading

from data_loader.grain_workers import end_with
from utils import RunError


def mapped(function, items, processes, what):
    """function(item) of each item, in order, computed by several processes."""
    count = min(processes, len(items))
    if count <= 1:
        yield from map(function, progress(items, what, len(items)))
        return
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
    from multiprocessing import get_context

    # Threads of `tokenizers` do not survive a fork.
    context, parent = get_context("spawn"), (os.getpid(),)
    pool = ProcessPoolExecutor(count, context, initializer=begin_worker, initargs=parent)
    try:
        yield from progress(pool.map(function, items), what, len(items))
    except BrokenProcessPool as error:
        raise RunError(
            f"a worker process ended ({error}); if memory ran out, use fewer --processes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def begin_worker(parent):
    """Runs first in every worker: it ends with its parent process, which handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()


def progress(items, what, total):
    """The items, with a bar if the output is a terminal."""
    from tqdm import tqdm

    return tqdm(items, desc=what, total=total, unit="part", disable=not sys.stderr.isatty())
