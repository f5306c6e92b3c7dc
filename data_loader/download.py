"""Download a file from a list of mirrors: checked, atomic, and with a short wait if offline."""

import gzip
import hashlib
import io
import sys
import threading
import time
import zlib
from collections.abc import Iterable
from concurrent.futures import Future
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from utils import RunError, UserError, format_bytes
from utils.files import atomic_write

TIMEOUT = 5  # seconds without data after which a mirror is given up
MOST_BYTES = 2**28  # in a file, as received and unpacked; the largest has 170 million
SLOWEST = 10_000  # bytes per second on average, below which a mirror is given up


class Unreachable(RunError):
    """No mirror returned a file, probably because there is no network."""


class WrongContent(Exception):
    """A mirror returned something other than the requested file."""


def fetch(
    urls: Iterable[str],
    path: str | Path,
    digest: str | None = None,
    timeout: int | float = TIMEOUT,
    most: int = MOST_BYTES,
) -> None:
    """Download `path` from the first mirror that has it.

    `digest` is the md5 or sha256 of the file, gzip-compressed or not; neither may have more than
    `most` bytes.
    """
    path, errors, reached = Path(path), {}, False
    for url in urls:
        try:
            data = _try(url, timeout, most)
            _check(data, digest, most)
        except Exception as error:  # after any failure, the next mirror is tried
            errors[url] = str(error) or type(error).__name__
            reached |= isinstance(error, WrongContent)
        else:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RunError(f"{path.parent}: cannot be created: {error.strerror}") from error
            atomic_write(path, data)
            return
    lines = "".join(f"\n  {url}: {error}" for url, error in errors.items())
    raise (RunError if reached else Unreachable)(f"{path.name} could not be downloaded:{lines}")


def damaged(path: str | Path, problem: str) -> UserError:
    """The error for a file that exists but has the wrong content."""
    return UserError(
        f"{path}: {problem}; delete it, so that it is downloaded again, or replace it with a "
        "complete copy"
    )


def _try(url: str, timeout: int | float, most: int) -> bytes:
    """The bytes from a mirror; one retry, but not after silence or an HTTP error."""
    try:
        return _read(url, timeout, most)
    except (TimeoutError, HTTPError):
        raise
    except (OSError, HTTPException):
        time.sleep(timeout / 10)
        return _read(url, timeout, most)


def _read(url: str, timeout: int | float, most: int) -> bytes:
    from tqdm import tqdm

    with _open(url, timeout) as response:
        start, data = time.monotonic(), bytearray()
        total = getattr(response, "length", None) or 0  # None: unknown, or not a number
        quiet = sys.stderr is None or not sys.stderr.isatty()
        with tqdm(desc=url, total=total or None, unit="B", unit_scale=True, disable=quiet) as bar:
            while received := response.read1(1 << 20):
                data += received
                bar.update(len(received))
                if len(data) > most:
                    raise WrongContent(f"returned more than {format_bytes(most)}")
                elapsed = time.monotonic() - start
                if elapsed > timeout + len(data) / SLOWEST:
                    raise TimeoutError(f"too slow: {len(data)} bytes in {elapsed:.0f} s")
    if len(data) < total:
        raise ConnectionError(f"the connection ended after {len(data)} of {total} bytes")
    return bytes(data)


def _open(url: str, timeout: int | float) -> HTTPResponse:
    """urlopen in its own thread, since its timeout does not cover a name lookup that hangs."""
    response = Future()

    def work() -> None:
        try:
            response.set_result(urlopen(url, timeout=timeout))
        except Exception as error:
            reason = getattr(error, "reason", None)  # what a URLError wraps
            response.set_exception(reason if isinstance(reason, OSError) else error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return response.result(timeout)
    except TimeoutError as error:
        raise TimeoutError(f"no response in {timeout} s") from error


def _check(data: bytes, digest: str | None, most: int) -> None:
    """Raise WrongContent unless the digest is that of the data, as received or unpacked."""
    if digest is None:
        return
    kind = {32: "md5", 64: "sha256"}[len(digest)]
    actual = hashlib.new(kind, data).hexdigest()
    if digest not in (actual, _digest_unpacked(data, kind, most)):
        raise WrongContent(
            f"returned other content: {len(data)} bytes with {kind} {actual}, expected {digest}"
        )


def _digest_unpacked(data: bytes, kind: str, most: int) -> str | None:
    """The digest of the content of gzip data, unpacked piece by piece since a few bytes may unpack
    to gigabytes; None for other data."""
    if not data.startswith(b"\x1f\x8b"):
        return None
    digest, size = hashlib.new(kind), 0
    try:
        with gzip.open(io.BytesIO(data)) as unpacked:
            while part := unpacked.read(1 << 20):
                digest.update(part)
                size += len(part)
                if size > most:
                    raise WrongContent(f"returned gzip data of more than {format_bytes(most)}")
    except (OSError, EOFError, zlib.error) as error:
        raise WrongContent(f"returned damaged gzip data ({error})") from error
    return digest.hexdigest()
