"""python tests/other_system.py windows|macos FOLDER: train, resume, evaluate, report, export and
predict, while what that system lacks is hidden from the project's code, and only from it.

What cannot be imitated here: the system's own runtime libraries and its terminals.
"""

import builtins
import errno
import fcntl
import importlib
import json
import os
import pathlib
import shutil
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
SYSTEM, FOLDER = sys.argv[1:]
WINDOWS = SYSTEM == "windows"
NO_FILES = ("/proc", "/sys", "/dev/shm")
MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty"} if WINDOWS else set()
ON_WINDOWS = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN"}
HIDDEN = {"os": {"sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate"}}
if WINDOWS:
    HIDDEN["os"] |= {"register_at_fork", "fork", "forkpty", "pread", "pwrite", "preadv", "confstr"}
    HIDDEN["os"] |= {"sysconf", "uname", "getuid", "geteuid", "getgid", "killpg", "getpgid"}
    HIDDEN["os"] |= {"setsid", "mkfifo", "wait", "wait3", "wait4", "nice", "statvfs", "chown"}
    HIDDEN["os"] |= {"posix_spawn", "openpty", "getloadavg", "O_NONBLOCK", "O_DIRECTORY", "sync"}
    HIDDEN["signal"] = {name for name in dir(signal) if name.startswith("SIG")} - ON_WINDOWS
    HIDDEN["signal"] |= {"pthread_sigmask", "alarm", "setitimer", "sigwait", "pause"}


class Lacking(ModuleType):
    """A module without some of its names, and with others replaced."""

    def __init__(self, module, hidden, **replaced):
        super().__init__(module.__name__)
        self.__dict__.update(replaced, _module=module, _hidden=hidden)

    def __getattr__(self, name):
        if name in self._hidden:
            raise AttributeError(f"{SYSTEM} has no {self._module.__name__}.{name}")
        return getattr(self._module, name)


def is_ours(path):
    return str(path or "").startswith(f"{ROOT}/") and "site-packages" not in path


def from_ours():
    """Whether the caller of the caller is the project's code."""
    path = sys._getframe(2).f_globals.get("__file__")
    return is_ours(path) and path != __file__


def is_open(path):
    """Whether this process has a file open, which Windows then neither renames nor deletes."""
    path, descriptors = os.path.realpath(path), "/proc/self/fd"
    links = [f"{descriptors}/{number}" for number in os.listdir(descriptors)]
    return path in [os.readlink(link) for link in links if os.path.lexists(link)]


def refuse_open(*paths):
    for path in paths:
        if os.path.isfile(path) and is_open(path):
            raise PermissionError(errno.EACCES, "is open", str(path))


# What the project sees of os on Windows.


def open_descriptor(path, flags, *rest):
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "is a folder", str(path))
    return os.open(path, flags, *rest)


def fsync(descriptor):
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "is not open for writing")
    os.fsync(descriptor)


def rename(source, target):
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "exists", str(target))
    refuse_open(source)
    return os.rename(source, target)


def replace(source, target):
    refuse_open(source, target)
    return os.replace(source, target)


def kill(*_):
    raise AssertionError("os.kill ends any process on Windows")


def locking(descriptor, _mode, _count):
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PermissionError(errno.EACCES, "is locked") from error


SEEN = {"os": Lacking(os, HIDDEN["os"])}
if WINDOWS:
    replaced = {"open": open_descriptor, "fsync": fsync, "rename": rename, "replace": replace}
    SEEN["os"] = Lacking(os, HIDDEN["os"], name="nt", kill=kill, **replaced)
    SEEN["signal"] = Lacking(signal, HIDDEN["signal"])
    SEEN["msvcrt"] = SimpleNamespace(LK_NBLCK=2, locking=locking)
real = SimpleNamespace(
    imported=builtins.__import__,
    open=builtins.open,
    read_text=Path.read_text,
    write_text=Path.write_text,
    rename=Path.rename,
    unlink=Path.unlink,
)


def import_module(name, globals=None, *rest, **settings):
    if is_ours((globals or {}).get("__file__")) and globals["__file__"] != __file__:
        if name in MODULES:
            raise ModuleNotFoundError(f"{SYSTEM} has no module {name}")
        if name in SEEN:
            return SEEN[name]
    return real.imported(name, globals, *rest, **settings)


def open_file(file, mode="r", *rest, **settings):
    if from_ours():
        if str(file).startswith(NO_FILES):
            raise FileNotFoundError(errno.ENOENT, "does not exist", str(file))
        assert "b" in mode or "encoding" in settings, f"{file}: opened without an encoding"
    return real.open(file, mode, *rest, **settings)


def read_text(path, encoding=None, errors=None):
    assert encoding or not from_ours(), f"{path}: read without an encoding"
    return real.read_text(path, encoding=encoding or "utf-8", errors=errors)


def write_text(path, data, encoding=None, **settings):
    assert encoding or not from_ours(), f"{path}: written without an encoding"
    return real.write_text(path, data, encoding=encoding or "utf-8", **settings)


def rename_path(path, target):
    return Path(rename(path, target) or target) if from_ours() else real.rename(path, target)


def unlink(path, missing_ok=False):
    if from_ours():
        refuse_open(path)
    return real.unlink(path, missing_ok)


def hide():
    """From now on, the project's code sees what the system has."""
    assert not {"utils", "train"} & sys.modules.keys()
    builtins.__import__, builtins.open = import_module, open_file
    pathlib.Path.read_text, pathlib.Path.write_text = read_text, write_text
    if WINDOWS:
        pathlib.Path.rename, pathlib.Path.unlink = rename_path, unlink


CONFIG = {
    "title": "Elsewhere",
    "model": {"name": "mlp", "args": {"dims": [8]}},
    "data": {"name": "digits", "args": {"train_size": 128, "test_size": 32}},
    "loader": {"batch_size": 32},
    "loss": "cross_entropy",
    "preprocess": ["to_unit"],
    "metrics": ["accuracy"],
    "optimizer": {"name": "adamw", "args": {"lr": 0.01}},
    "training": {"epochs": 1},
    "checkpoint": {"monitor": "test_loss", "keep": 1},
    "callbacks": ["confusion_matrix", "sample_images"],
    "logging": {"trackers": ["csv", {"name": "jsonl", "args": {"file": "all.jsonl"}}]},
}


def main():
    os.chdir(FOLDER)
    Path("config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    sys.path.insert(0, str(ROOT))
    hide()
    train, huge_pages, utils, resume, read = map(
        importlib.import_module,
        (
            "train",
            "training.devices.huge_pages",
            "utils",
            "training.checkpoint.resume",
            "training.report.read",
        ),
    )
    assert utils.WINDOWS == WINDOWS and not huge_pages.are_available()
    assert train.main(["-c", "config.json", "--fast-dev-run"]) == 0
    assert train.main(["-c", "config.json"]) == 0
    (run,) = Path("saved/Elsewhere").iterdir()
    options = ["--resume", str(run), "training.epochs=3"]
    assert train.main(["-c", "config.json", *options]) == 0
    rows = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(rows[-1])["epoch"] == 3
    checkpoint = str(run / "checkpoint-epoch_3.params")
    assert train.main(["--evaluate", checkpoint]) == 0
    assert train.main(["--report", str(run)]) == 0
    export_and_predict(checkpoint)
    lock = resume.Lock(run)
    assert train.main(["--resume", str(run), "training.epochs=4"]) == 1  # it is locked
    lock.close()
    assert resume.unfinished("saved", "Elsewhere")[0] is None
    (run / "finished.json").unlink()
    assert read.state_of(run) == "stopped"
    shutil.rmtree(run)
    if WINDOWS:
        assert train.main(["-c", "config.json", "--processes", "2"]) == 2
    print("All of it works")


def export_and_predict(checkpoint):
    import numpy as np

    convert_tflite, predict = map(
        importlib.import_module, ("inference.convert_tflite", "inference.predict")
    )
    options = ["-w", checkpoint, "--formats", "onnx", "--name", "tiny"]
    for _ in range(2):  # the second time, it replaces the first export
        assert convert_tflite.main([*options, "--force"]) == 0
    np.savez("two.npz", x=np.zeros((2, 28, 28, 1), np.uint8))
    assert predict.main(["inference/tiny/tiny.onnx", "two.npz", "--csv", "out.csv"]) == 0
    assert len(Path("out.csv").read_text(encoding="utf-8").splitlines()) == 3


if __name__ == "__main__":
    main()
