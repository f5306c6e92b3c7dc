"""Claims: of all processes on all hosts that see the folder of a sweep, one trains a trial.

A claim is a file that names its process, `claims/trial_003.0`. It is dead if its process has ended,
or has not renewed the file for STALE seconds; then the next one, `claims/trial_003.1`, may be made.
No claim is ever deleted, so an old list of the folder's files, as a file system over a network may
return, does no harm.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from utils import WINDOWS
from utils.files import inside

STALE, RENEWED = 300.0, 30.0  # seconds; the clocks of the hosts may differ a little
OVER = "over"


def create(path: Path, text: str) -> bool:
    """Make a file with this text, at once. Whether it was made: of several processes, by one."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def claims_of(folder: Path, run: str) -> list[Path]:
    """The claims of a run, the newest last."""
    found = inside(folder, "claims").glob(f"{run}.*")
    numbered = [path for path in found if path.suffix[1:].isdecimal()]
    return sorted(numbered, key=lambda path: int(path.suffix[1:]))


def is_claimed(folder: Path, run: str) -> bool:
    """Whether a process trains a run."""
    claims = claims_of(folder, run)
    return bool(claims) and is_alive(claims[-1])


def is_alive(claim: Path) -> bool:
    """Whether the process of a claim still runs: one of this host can be looked up."""
    text = claim.read_text(encoding="utf-8")
    if text == OVER or time.time() - claim.stat().st_mtime > STALE:
        return False
    host, _, process = text.rpartition(" ")
    if host != socket.gethostname() or WINDOWS or not process.isdecimal():
        return True
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it belongs to another user
        return True
    return True


@contextmanager
def claimed(folder: Path, run: str) -> Iterator[bool]:
    """Whether this process may train a run, until the block ends."""
    inside(folder, "claims").mkdir(exist_ok=True)
    number = len(claims_of(folder, run))
    claim, over = inside(folder, "claims", f"{run}.{number}"), Event()
    own = f"{socket.gethostname()} {os.getpid()}"
    if is_claimed(folder, run) or not create(claim, own):
        yield False
        return

    def renew() -> None:
        while not over.wait(RENEWED):
            with suppress(OSError):  # the file system may be away for a moment
                os.utime(claim)

    Thread(target=renew, daemon=True).start()
    try:
        yield True
    finally:
        over.set()
        claim.write_text(OVER, encoding="utf-8")
