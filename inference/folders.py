"""The folder of an export: it is written beside its path as `.NAME.PID.tmp` and moved there when it
is finished; what it replaces is `.NAME.PID.former` until the user's files have been moved."""

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from utils import WINDOWS, RunError, UserError, echo
from utils.files import read_json

REPORT = "verification.json"
DAY = 24 * 3600  # seconds


def prepare(folder: Path, force: bool) -> None:
    """Undo or finish what killed exports have begun; then raise if the folder is not free."""
    for stale in abandoned(folder, "tmp"):
        shutil.rmtree(stale, ignore_errors=True)
    for former in abandoned(folder, "former"):
        try:
            restore(former, folder)
        except OSError as error:
            raise UserError(
                f"{former}: is an earlier export that cannot be moved back to {folder.name}: "
                f"{error.strerror}; move it yourself, or choose another --name"
            ) from error
    check_free(folder, force)


def check_free(folder: Path, force: bool) -> None:
    """Raise if the folder exists; a folder that is not an export is never replaced."""
    if not os.path.lexists(folder):
        return
    if not (folder / REPORT).is_file():
        raise UserError(f"{folder}: exists and is not an export; choose another --name")
    if not force:
        raise UserError(
            f"{folder}: already exists; choose another --name, or pass --force to replace it"
        )


@contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder beside `folder`, removed at the end."""
    work = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    parents = [parent for parent in work.parents if not parent.exists()]  # the nearest first
    try:
        work.mkdir(parents=True)
    except OSError as error:
        message = f"{folder}: cannot be created: {error.strerror}; choose another folder with --out"
        raise UserError(message) from error
    try:
        yield work
    except shutil.Error as error:  # it lists every file; the first one is enough
        raise RunError(f"{folder}: cannot be written: {error.args[0][0][2]}") from error
    except OSError as error:
        raise RunError(f"{folder}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
        with suppress(OSError):  # one that is not empty
            for parent in parents:
                parent.rmdir()


def abandoned(folder: Path, kind: str) -> list[Path]:
    """The paths `.NAME.PID.kind` beside a folder whose processes have ended."""
    form = re.compile(rf"\.{re.escape(folder.name)}\.(\d+)\.{kind}")
    names = os.listdir(folder.parent) if folder.parent.is_dir() else []
    found = [(folder.parent / name, form.fullmatch(name)) for name in names]
    return [path for path, match in found if match and has_ended(int(match[1]), path)]


def has_ended(process: int, path: Path) -> bool:
    """Whether the process that made a path has ended. This process has made none yet, so its own
    number is that of an earlier process: in a container, the same numbers are used again."""
    if process == os.getpid():
        return True
    if WINDOWS:  # os.kill would end the process there
        return time.time() - path.stat().st_mtime > DAY
    try:
        os.kill(process, 0)
    except PermissionError:  # it runs, for another user
        return False
    except (OverflowError, ProcessLookupError):
        return True
    return False


def replace(work: Path, folder: Path, force: bool) -> None:
    """Move the finished folder to its final path; keep the user's files in a previous export."""
    check_free(folder, force)  # another process may have created it since the first check
    former = work.with_suffix(".former")
    is_replacing = folder.exists()
    try:
        if is_replacing:
            folder.rename(former)
        work.rename(folder)  # fails if another process has created it since the check
    except OSError as error:
        if is_replacing:
            raise
        raise UserError(
            f"{folder}: was created by another process in the meantime; choose another --name"
        ) from error
    finally:  # also after Ctrl-C
        restore(former, folder)


def restore(former: Path, folder: Path) -> None:
    """Move a former export back if its folder is gone; if there is a new export, move the user's
    files into that, and remove the rest."""
    if not former.exists():
        return
    if not os.path.lexists(folder):
        former.rename(folder)
    elif (folder / REPORT).is_file():
        keep_user_files(former, folder)
        rest = former.with_suffix(".tmp")  # if this is killed, it has no more files of the user
        former.rename(rest)
        shutil.rmtree(rest, ignore_errors=True)


def keep_user_files(previous: Path, folder: Path) -> None:
    """Move the files that the previous export did not write; print those it wrote that are gone."""
    written = files_written(previous / REPORT)
    remaining = [path for path in previous.iterdir() if not (folder / path.name).exists()]
    for path in remaining:
        if path.name not in written:
            path.rename(folder / path.name)
    if removed := sorted(path.name for path in remaining if path.name in written):
        echo(f"Removed with the earlier export: {', '.join(removed)}")


def files_written(report: Path) -> list[str]:
    """The names of the files that an export wrote, by its report; none if that is damaged."""
    with suppress(UserError):
        files = read_json(report).get("files")
        return files if isinstance(files, list) else []
    return []
