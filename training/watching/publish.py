"""Pass a run's values, pictures, histograms and texts to its trackers, without ever delaying it.

A tracker (kind "trackers", training/watching/trackers/) is any object with some of these methods.
They are called in order in a thread of the tracker's own, so they may be slow.

start(about)                    before all others; if the run resumes, about.step is above 0
scalars(step, values)           {name: number}; a number may be NaN
image(step, name, png)          the bytes of a PNG file
histogram(step, name, values)   an array with one axis, read-only
text(step, name, text)          such as what a language model wrote
back_to(step)                   the run continues from an earlier step; values after it are invalid
finish(metrics)                 the run has ended, with these last values

A tracker that raises, hangs or falls behind is reported once and dropped; the run and the other
trackers continue.
"""

import hashlib
import io
import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import numpy as np
from jaxtyping import Shaped

from utils import RunError, UserError, first_line, format_bytes
from utils.files import atomic_write

T = TypeVar("T")

logger = logging.getLogger("main")

ITEM_SECONDS = 60.0  # a tracker that takes longer for one item hangs
SILENT_SECONDS = 2.0  # at the end of a run, a longer wait for a tracker is logged
MOST_ITEMS = 1000  # may wait for one tracker
MOST_BYTES = 2**29
LONGEST_NAME = 200  # characters in the name of a file; most systems allow 255
STOP = "stop"
METHODS = ("start", "scalars", "image", "histogram", "text", "back_to", "finish")


class About(NamedTuple):
    """Facts about the run, for its trackers."""

    folder: Path
    title: str
    config: dict
    step: int  # the step at which the run starts or resumes


class Publisher:
    """All trackers of a run. Its methods never raise, and only copy what they are passed."""

    def __init__(self, trackers: Iterable[object] = (), about: About | None = None) -> None:
        for tracker in trackers:
            has_method = any(hasattr(tracker, method) for method in METHODS)
            if isinstance(tracker, str | type) or not has_method:
                need = f"an object with any of {', '.join(METHODS)}"
                raise UserError(f"trackers: {tracker!r} is not a tracker: {need}")
        self.channels = [Channel(tracker, about) for tracker in trackers]
        self.closed, self.warned = False, set()

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Publish numbers by name."""
        channels = self.channels_for("scalars")
        if channels and (numbers := self.attempt("scalars", f"at step {step}", as_numbers, values)):
            for channel in channels:
                channel.put("scalars", step, dict(numbers))

    def image(self, step: int, name: str, picture: Any) -> None:
        """Publish an array (H, W) or (H, W, channels), the bytes of a PNG file, or a figure.

        A figure is an object with Matplotlib's method `savefig`.
        """
        channels, what = self.channels_for("image"), (f"image {name}", f"at step {step}")
        encode = partial(self.attempt, *what, as_png)
        if channels and (copy := self.attempt(*what, Picture, picture, encode)):
            for channel in channels:
                channel.put("image", step, name, copy, size=copy.size)

    def histogram(self, step: int, name: str, values: Any) -> None:
        """Publish the distribution of an array's values."""
        if not (channels := self.channels_for("histogram")):
            return
        copy = self.attempt(f"histogram {name}", f"at step {step}", flat_copy, values)
        if copy is not None:
            for channel in channels:
                channel.put("histogram", step, name, copy, size=copy.nbytes)

    def text(self, step: int, name: str, text: object) -> None:
        """Publish a text."""
        for channel in self.channels_for("text"):
            channel.put("text", step, name, str(text), size=len(str(text)))

    def back_to(self, step: int) -> None:
        """Publish that the run continues from an earlier step."""
        for channel in self.channels_for("back_to"):
            channel.put("back_to", step)

    def close(self, metrics: Mapping[str, Any], seconds: float = 30.0) -> bool:
        """Let all trackers finish, wait for them at most `seconds`, and return whether all ended.

        If one has not, the caller should leave by os._exit, since the libraries that the tracker
        has loaded may keep the interpreter from ending.
        """
        until = monotonic() + seconds
        if not self.closed:
            self.closed = True
            last = self.attempt("last values", "at the end", as_numbers, metrics) or {}
            for channel in self.channels:
                channel.finish(dict(last))
        for channel in self.channels:
            left = max(0.0, until - monotonic())
            if channel.open and left > SILENT_SECONDS:
                channel.thread.join(SILENT_SECONDS)
                if channel.thread.is_alive():
                    rest = left - SILENT_SECONDS
                    logger.info("Waiting for the tracker %s, at most %.0f s", channel.name, rest)
            left = max(0.0, until - monotonic())
            # A tracker that was dropped may never end.
            channel.thread.join(left if channel.open else min(left, 0.2))
        for channel in self.channels:
            if channel.thread.is_alive():
                channel.drop(f"did not end within {seconds:g} s")
        return not any(channel.thread.is_alive() for channel in self.channels)

    def channels_for(self, method: str) -> list["Channel"]:
        """The channels of trackers that are still in use and have a method."""
        if self.closed:
            return []
        return [c for c in self.channels if c.is_open() and hasattr(c.tracker, method)]

    def attempt(self, what: str, when: str, convert: Callable[..., T], *arguments: Any) -> T | None:
        """The result of a conversion; None, with one warning per `what`, if it fails."""
        try:
            return convert(*arguments)
        except Exception as error:  # an error in a callback must end neither run nor tracker
            if what not in self.warned:
                self.warned.add(what)
                logger.warning("%s %s cannot be published: %s", what, when, summary(error))
            return None


class Channel:
    """One tracker: its thread, and the queue of calls for it."""

    def __init__(self, tracker: object, about: About | None) -> None:
        self.tracker, self.name = tracker, type(tracker).__name__.lower()
        self.queue, self.lock = SimpleQueue(), threading.Lock()
        self.open, self.since, self.step = True, None, about.step if about else 0
        self.bytes_in = self.bytes_out = 0  # each is written by only one thread
        if hasattr(tracker, "start"):
            self.queue.put(("start", (about,), 0))
        self.thread = threading.Thread(target=self.work, name=f"tracker {self.name}", daemon=True)
        self.thread.start()

    def work(self) -> None:
        """The tracker's thread: make one call after the other until STOP."""
        while True:
            method, arguments, size = self.queue.get()
            if method == STOP:
                return
            self.since = monotonic()
            try:
                self.call(method, *arguments)
            except BaseException as error:  # even a SystemExit that a library raises
                logger.debug("tracker %s", self.name, exc_info=True)
                self.drop(summary(error))
            self.since = None
            self.bytes_out += size

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of the tracker; a picture is encoded first, and skipped if that fails."""
        if method not in ("start", "finish"):
            self.step = arguments[0]
        if method == "image":
            step, name, picture = arguments
            if (png := picture.png()) is None:
                return
            arguments = step, name, png
        getattr(self.tracker, method)(*arguments)

    def put(self, method: str, *arguments: Any, size: int = 0) -> None:
        """Queue a call; drop the tracker if too many wait."""
        if self.queue.qsize() >= MOST_ITEMS:
            return self.drop(f"fell behind by {MOST_ITEMS} items")
        if self.bytes_in - self.bytes_out > MOST_BYTES:
            return self.drop(f"fell behind by {format_bytes(self.bytes_in - self.bytes_out)}")
        self.bytes_in += size
        self.queue.put((method, arguments, size))

    def finish(self, metrics: dict[str, float]) -> None:
        """Queue the last call."""
        if self.open and hasattr(self.tracker, "finish"):
            self.queue.put(("finish", (metrics,), 0))
        self.queue.put((STOP, (), 0))

    def is_open(self) -> bool:
        """Whether the tracker is still in use; one that hangs is dropped here."""
        since = self.since  # a local copy, since the thread may end the call at any moment
        if self.open and since is not None and monotonic() - since > ITEM_SECONDS:
            self.drop(f"took more than {ITEM_SECONDS:g} s for one item")
        return self.open

    def drop(self, why: str) -> None:
        """Log once why the tracker is dropped, and empty its queue."""
        with self.lock:
            was_open, self.open = self.open, False
        if not was_open:
            return
        message = "tracker %s: dropped at step %d: %s; the values stay in metrics.jsonl"
        logger.warning(message, self.name, self.step, why)
        with suppress(Empty):
            while True:
                self.queue.get_nowait()
        self.queue.put((STOP, (), 0))


class Picture:
    """A copy of a picture, encoded once, by the first thread that needs it."""

    def __init__(self, picture: Any, encode: Callable[[np.ndarray], bytes | None]) -> None:
        self.lock, self.encode = threading.Lock(), encode
        if hasattr(picture, "savefig"):  # drawn now, since its owner may change or close it
            file = io.BytesIO()
            picture.savefig(file, format="png")
            picture = file.getvalue()
        content = picture if isinstance(picture, bytes) else np.array(picture)
        if isinstance(content, bytes) and not content.startswith(b"\x89PNG"):
            raise ValueError("these bytes are not a PNG file")
        self.size = len(content) if isinstance(content, bytes) else content.nbytes
        self.content: bytes | np.ndarray | None = content

    def png(self) -> bytes | None:
        """The bytes of a PNG file, or None if the encoding failed."""
        with self.lock:
            if isinstance(self.content, np.ndarray):
                self.content = self.encode(self.content)
            return self.content


class PictureFiles:
    """The tracker that keeps the newest picture of each name in the run's folder, for the
    report."""

    def start(self, about: About) -> None:
        self.folder = about.folder / "pictures"

    def image(self, step: int, name: str, png: bytes) -> None:
        self.folder.mkdir(exist_ok=True)
        atomic_write(self.folder / f"{file_name(name)}.png", png)


def file_name(name: str) -> str:
    """A name of a picture as that of a file; a long one is cut, and ends with a hash."""
    quoted = quote(name, safe=" ")
    if len(quoted) <= LONGEST_NAME:
        return quoted
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{re.sub('%.?$', '', quoted[:LONGEST_NAME])} {digest}"


def as_png(array: np.ndarray) -> bytes:
    """An array as the bytes of a PNG file."""
    from training.watching.pictures import as_picture, png

    picture = as_picture(array)
    if picture is None:
        raise ValueError(f"an array of shape {array.shape} is not a picture")
    return png(picture)


def as_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def flat_copy(values: Any) -> Shaped[np.ndarray, "size"]:
    """A read-only copy with one axis; types that NumPy lacks, such as bfloat16, become float32."""
    array = np.array(values).ravel()
    if array.dtype.kind not in "biuf":
        array = array.astype(np.float32)
    array.flags.writeable = False
    return array


def summary(error: BaseException) -> str:
    """An error in one line; messages of UserError and RunError are shown without a class name."""
    message, name = first_line(error), type(error).__name__
    if isinstance(error, UserError | RunError):
        return message or name
    return f"{name}: {message}" if message else name
