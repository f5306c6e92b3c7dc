"""Fetching a file from a list of mirrors: checked, atomic, and never waiting long for a machine without a network."""

import gzip
import hashlib
import sys
import threading
import time
import zlib
from concurrent.futures import Future
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from utils import RunError, UserError, atomic_write

TIMEOUT = 5  # seconds of silence after which a mirror is given up
SLOWEST = 10_000  # bytes per second, on the whole, below which it is given up too


class Unreachable(RunError):
    """No mirror answered with a file: no network, most likely."""


class WrongContent(Exception):
    """A mirror answered, but not with the file that was asked for."""


def fetch(urls, path, digest=None, timeout=TIMEOUT):
    """Download `path` from the first mirror that has it; digest: md5 or sha256 of the file, packed or unpacked."""
    path, reasons = Path(path), {}
    for url in urls:
        try:
            data = _try(url, timeout)
            _check(data, digest)
        except (OSError, HTTPException, WrongContent) as error:
            reasons[url] = error
        else:
            return _save(path, data)
    answered = any(isinstance(error, WrongContent) for error in reasons.values())
    lines = "".join(f"\n  {url}: {error}" for url, error in reasons.items())
    raise (RunError if answered else Unreachable)(f"{path.name} could not be downloaded:{lines}")


def damaged(path, found):
    """The error for a file that is there but is not what it should be."""
    return UserError(
        f"{path}: {found}; delete it, so that it is downloaded again, or put a whole copy there"
    )


def _try(url, timeout):
    """The bytes of a mirror. A fault that passes, unlike silence or a refusal, is tried once more."""
    try:
        return _read(url, timeout)
    except (TimeoutError, HTTPError):
        raise
    except (OSError, HTTPException):
        time.sleep(timeout / 10)
        return _read(url, timeout)


def _read(url, timeout):
    from tqdm import tqdm

    with _open(url, timeout) as response:
        start, data = time.monotonic(), bytearray()
        total = int(response.headers.get("Content-Length") or 0)
        with tqdm(
            desc=url,
            total=total or None,
            unit="B",
            unit_scale=True,
            disable=not sys.stderr.isatty(),
        ) as bar:
            while chunk := response.read1(1 << 20):
                data += chunk
                bar.update(len(chunk))
                if time.monotonic() - start > timeout + len(data) / SLOWEST:
                    raise TimeoutError(
                        f"too slow: {len(data)} bytes in {time.monotonic() - start:.0f} s"
                    )
    if len(data) < total:
        raise ConnectionError(f"the connection ended after {len(data)} of {total} bytes")
    return bytes(data)


def _open(url, timeout):
    """urlopen in a thread of its own: a name lookup that hangs heeds no timeout."""
    answer = Future()

    def work():
        try:
            answer.set_result(urlopen(url, timeout=timeout))
        except Exception as error:
            reason = getattr(error, "reason", None)  # what a URLError wraps
            answer.set_exception(reason if isinstance(reason, OSError) else error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return answer.result(timeout)
    except TimeoutError as error:
        raise TimeoutError(f"no answer in {timeout} s") from error


def _check(data, digest):
    """Raise WrongContent unless the digest is that of the data, packed or unpacked."""
    if digest is None:
        return
    kind = {32: "md5", 64: "sha256"}[len(digest)]
    found = hashlib.new(kind, data).hexdigest()
    try:
        if digest not in (found, hashlib.new(kind, _unpack(data)).hexdigest()):
            raise WrongContent(
                f"answered with other content: {len(data)} bytes of {kind} {found}, expected {digest}"
            )
    except ValueError as error:
        raise WrongContent(f"answered with {error}") from error


def _unpack(data):
    """The bytes inside gzip-compressed bytes; others are returned as they are. Damaged ones raise ValueError."""
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"damaged gzip data ({error})") from error


def _save(path, data):
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{path.parent}: cannot be made: {error.strerror}") from error
    atomic_write(path, data)
