"""What hands a run's values, pictures and histograms to its trackers, without ever holding the run up.

A tracker (kind "trackers", training/watching/trackers/) is any object with some of these methods, called in order from a thread of its
own, where they may take their time:

start(about)                    before all others; about.step > 0 tells that a run is gone on with
scalars(step, values)           {name: number}, which may be nan
image(step, name, png)          the bytes of a PNG file
histogram(step, name, values)   an array of one axis, to be read only
back_to(step)                   the run goes on from an earlier step: what came after it is void
finish(metrics)                 the run has ended, with these last values

A tracker that raises, hangs or falls behind is reported once and left out from then on; the run and the others go on.
"""

import io
import logging
import threading
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import NamedTuple

import numpy as np

from utils import RunError, UserError, first_line, format_bytes

logger = logging.getLogger("main")

ITEM_SECONDS = 60.0  # what takes longer hangs
SILENT_SECONDS = 2.0  # that one may take to end without a word
MOST_ITEMS = 1000  # that may wait for one tracker
MOST_BYTES = 2**29
STOP = "stop"
METHODS = ("start", "scalars", "image", "histogram", "back_to", "finish")


class About(NamedTuple):
    """What a tracker learns of the run."""

    folder: Path
    title: str
    config: dict
    step: int  # after which the run goes on


class Publisher:
    """All trackers of a run. Its methods never raise, and take no longer than to copy what they are given."""

    def __init__(self, trackers=(), about=None):
        for tracker in trackers:
            if isinstance(tracker, str | type) or not any(
                hasattr(tracker, method) for method in METHODS
            ):
                raise UserError(
                    f"trackers: {tracker!r} is no tracker, which is an object with any of {', '.join(METHODS)}"
                )
        self.channels = [Channel(tracker, about) for tracker in trackers]
        self.closed, self.told = False, set()

    def scalars(self, step, values):
        """Numbers by name."""
        channels = self.channels_for("scalars")
        if channels and (numbers := self.attempt("scalars", step, as_numbers, values)):
            for channel in channels:
                channel.put("scalars", step, dict(numbers))

    def image(self, step, name, picture):
        """A picture: an array of (H, W) or (H, W, channels), the bytes of a PNG file, or a figure that can be saved as one."""
        channels = self.channels_for("image")
        if channels and (taken := self.attempt(f"image {name}", step, Picture, picture)):
            taken.encode = lambda: self.attempt(f"image {name}", step, encoded, taken.array)
            for channel in channels:
                channel.put("image", step, name, taken, size=taken.size)

    def histogram(self, step, name, values):
        """The distribution of an array's values."""
        channels = self.channels_for("histogram")
        if (
            channels
            and (taken := self.attempt(f"histogram {name}", step, flat_copy, values)) is not None
        ):
            for channel in channels:
                channel.put("histogram", step, name, taken, size=taken.nbytes)

    def back_to(self, step):
        """The run goes on from an earlier step."""
        for channel in self.channels_for("back_to"):
            channel.put("back_to", step)

    def close(self, metrics, seconds=30.0):
        """Let all finish, and wait at most so long; whether all ended. Where one is stuck, the caller should leave by os._exit,
        since what it has loaded may keep the interpreter from ending."""
        until = monotonic() + seconds
        if not self.closed:
            self.closed, last = True, self.attempt("finish", "the end", as_numbers, metrics) or {}
            for channel in self.channels:
                channel.finish(dict(last))
        for channel in self.channels:
            left = max(0.0, until - monotonic())
            if channel.open and left > SILENT_SECONDS:
                channel.thread.join(SILENT_SECONDS)
                if channel.thread.is_alive():
                    logger.info(
                        "Waiting for the tracker %s, at most %.0f s",
                        channel.name,
                        left - SILENT_SECONDS,
                    )
            left = max(0.0, until - monotonic())
            channel.thread.join(
                left if channel.open else min(left, 0.2)
            )  # one that was dropped may be stuck for good
        for channel in self.channels:
            if channel.thread.is_alive():
                channel.drop(f"did not end within {seconds:g} s")
        return not any(channel.thread.is_alive() for channel in self.channels)

    def channels_for(self, method):
        """Those that still listen and have such a method."""
        return (
            []
            if self.closed
            else [c for c in self.channels if c.listens() and hasattr(c.tracker, method)]
        )

    def attempt(self, what, step, convert, given):
        """What was given in the form that trackers get, or None, told once, where it has no such form."""
        try:
            return convert(given)
        except Exception as error:  # a slip in a callback is no reason to end a run or a tracker
            if what not in self.told:
                self.told.add(what)
                logger.warning("%s at step %s cannot be published: %s", what, step, said(error))
            return None


class Channel:
    """One tracker: its thread, and what it has still to be told."""

    def __init__(self, tracker, about):
        self.tracker, self.name = tracker, type(tracker).__name__.lower()
        self.queue, self.lock = SimpleQueue(), threading.Lock()
        self.open, self.since, self.step = True, None, about.step if about else 0
        self.bytes_in = self.bytes_out = 0  # each is written by one thread alone
        if hasattr(tracker, "start"):
            self.queue.put(("start", (about,), 0))
        self.thread = threading.Thread(target=self.work, name=f"tracker {self.name}", daemon=True)
        self.thread.start()

    def work(self):
        """The tracker's thread: one item after the other, until it is told to stop."""
        while True:
            method, arguments, size = self.queue.get()
            if method == STOP:
                return
            self.since = monotonic()
            try:
                self.tell(method, *arguments)
            except BaseException as error:  # a SystemExit of some library's is no more than that
                logger.debug("tracker %s", self.name, exc_info=True)
                self.drop(said(error))
            self.since = None
            self.bytes_out += size

    def tell(self, method, *arguments):
        """Call a method of the tracker; a picture becomes a PNG file on the way, unless it cannot."""
        if method not in ("start", "finish"):
            self.step = arguments[0]
        if method == "image":
            step, name, picture = arguments
            if (png := picture.png()) is None:
                return
            arguments = step, name, png
        getattr(self.tracker, method)(*arguments)

    def put(self, method, *arguments, size=0):
        """Leave an item for the thread; too many of them, and the tracker is dropped."""
        if self.queue.qsize() >= MOST_ITEMS:
            return self.drop(f"fell behind by {MOST_ITEMS} items")
        if self.bytes_in - self.bytes_out > MOST_BYTES:
            return self.drop(f"fell behind by {format_bytes(self.bytes_in - self.bytes_out)}")
        self.bytes_in += size
        self.queue.put((method, arguments, size))

    def finish(self, metrics):
        """Leave the last item."""
        if self.open and hasattr(self.tracker, "finish"):
            self.queue.put(("finish", (metrics,), 0))
        self.queue.put((STOP, (), 0))

    def listens(self):
        """Whether the tracker is still told anything; one that hangs is found out here."""
        since = self.since  # the thread may end the item at any moment
        if self.open and since is not None and monotonic() - since > ITEM_SECONDS:
            self.drop(f"took more than {ITEM_SECONDS:g} s for one item")
        return self.open

    def drop(self, why):
        """Say once why the tracker gets nothing any more, and let go of what waits for it."""
        with self.lock:
            was_open, self.open = self.open, False
        if not was_open:
            return
        logger.warning(
            "tracker %s: dropped at step %d: %s; the values stay in metrics.jsonl",
            self.name,
            self.step,
            why,
        )
        try:
            while True:
                self.queue.get_nowait()
        except Empty:
            self.queue.put((STOP, (), 0))


class Picture:
    """A picture as it was when it was given; it is encoded once, by the first thread that needs it."""

    def __init__(self, given):
        self.lock, self.bytes, self.array, self.encode = threading.Lock(), None, None, None
        if hasattr(
            given, "savefig"
        ):  # drawn at once: its owner goes on drawing into it, or closes it
            file = io.BytesIO()
            given.savefig(file, format="png")
            given = file.getvalue()
        if isinstance(given, bytes):
            if not given.startswith(b"\x89PNG"):
                raise ValueError("these bytes are no PNG file")
            self.bytes = given
        else:
            self.array = np.array(given)
        self.size = len(self.bytes) if self.bytes else self.array.nbytes

    def png(self):
        """The bytes of a PNG file, or None where it could not be made."""
        with self.lock:
            if self.array is not None:
                self.bytes, self.array = self.encode(), None
            return self.bytes


def encoded(array):
    """An array as the bytes of a PNG file."""
    from training.watching.pictures import as_picture, png

    picture = as_picture(array)
    if picture is None:
        raise ValueError(f"an array of shape {array.shape} is no picture")
    return png(picture)


def as_numbers(values):
    """{name: float}, the values copied."""
    return {name: float(value) for name, value in values.items()}


def flat_copy(values):
    """A copy with one axis, which nobody may write to; what NumPy itself has no name for, as bfloat16, becomes float32."""
    array = np.array(values).ravel()
    if array.dtype.kind not in "biuf":
        array = array.astype(np.float32)
    array.flags.writeable = False
    return array


def said(error):
    """An error in one line; the user's own mistakes need no name of a class."""
    message = first_line(error)
    if message and isinstance(error, UserError | RunError):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
