"""Small helpers used everywhere: exit codes, errors for the user, names of leaves, memory."""

import difflib
import inspect
import logging
import os
import re
import shlex
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import PyTree

# Exit codes. STOPPED: a signal ended the run, which the same command can start or continue.
DONE, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 75
INTERRUPTED = 130  # the exit code that shells use for Ctrl-C

WINDOWS = os.name == "nt"
# What stands before the names of Rawtree's modules: "rawtree." where pip has installed it, "" in a
# clone (rawtree/__init__.py).
PACKAGE = __name__.removesuffix("utils")

FOREIGN_ERROR = 1000  # the most characters that are shown of an error of other code
LONGEST_ERROR = 15_000  # the most that are shown of any error, which may quote a config
STACKED = r"(|.*/)(\d{1,4})-(\d{1,4})(|/.*)"  # a leaf of equal blocks, numbered first-last


SLOW = 2.0  # seconds after which a message says what the program is doing

# Control characters, marks that reverse the order in which a line is read, and lone surrogates.
STEERING = re.compile("[\0-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, keep: str = "\n\t") -> str:
    """Text in which all characters that could steer a terminal, but those to `keep`, are escaped as
    in a Python string: a name, or a text, may come from a stranger's file."""
    return STEERING.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def echo(*texts: object, **options: Any) -> None:
    """Print what may come from a file."""
    print(*(printable(str(text)) for text in texts), **options)


def escape_record(record: logging.LogRecord) -> bool:
    """The filter of our logger, whose lines also go to the terminal."""
    record.msg, record.args = printable(record.getMessage()), ()
    return True


logger = logging.getLogger("main")
logger.addFilter(escape_record)


class Failure(Exception):
    """An error whose message is printed without a traceback, and may quote a file."""

    def __str__(self) -> str:
        return printable(super().__str__())


class UserError(Failure):
    """A mistake that the user can fix; printed as one message without a traceback, exit code 2."""


class Damaged(UserError):
    """A file whose content is not what was written into it."""


class UnknownFact(ValueError):
    """An argument was to be inferred from a fact of the run that is unknown.

    Not reported where the config has another problem, since that may be why the fact is unknown.
    """


class RunError(Failure):
    """A run cannot continue for a reason outside its config, such as disk, network or divergence.

    Printed as one message without a traceback, exit code 1.
    """


def run_command(command: Callable[[], int | None], interrupted: str = "interrupted") -> int:
    """Run a command and return its exit code, which is 0 if it returns None. A user's mistake, a
    fault of the machine or Ctrl-C is printed as one message."""
    try:
        return command() or DONE
    except UserError as error:
        print(cut(str(error), LONGEST_ERROR), file=sys.stderr)
        return BAD_INPUT
    except (RunError, OSError) as error:
        print(cut(str(error), LONGEST_ERROR), file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return INTERRUPTED


def did_you_mean(value: object, names: Iterable[str]) -> str:
    """A hint at the most similar of the names; "" if none is similar."""
    near = difflib.get_close_matches(str(value), names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def first_line(error: BaseException | str) -> str:
    """The first line of an error's message, or of a text, which may be empty, or of any length."""
    return cut((str(error).splitlines() or [""])[0], FOREIGN_ERROR)


def where_and_why(error: BaseException) -> str:
    """File, line and message of an error that was raised in a user's file."""
    if isinstance(error, SyntaxError):
        return f"{relative_path(str(error.filename))}, line {error.lineno}: {error.msg}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename
    ]
    # The first frame is that of the caller, which has caught the error.
    own = [frame for frame in frames[1:] if not is_library(frame.filename)]
    file, line = relative_path((own or frames)[-1].filename), (own or frames)[-1].lineno
    return f"{file}, line {line}: {type(error).__name__}: {cut(str(error), FOREIGN_ERROR)}"


def is_library(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    return "-packages" in file or file.startswith(os.path.dirname(os.__file__))


def parameters_of(function: Callable) -> dict[str, inspect.Parameter]:
    """{name: Parameter} of a function; none without a signature, as for some builtins."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def made_by(place: str, factory: Callable, *arguments: Any, **options: Any) -> Any:
    """What a factory returns that the config names at `place`; it may be any function of another
    library, and fail in any way."""
    try:
        return factory(*arguments, **options)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{place}.args.{error}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{place}: it cannot be made: {where_and_why(error)}") from error


def quoted(path: str | Path) -> str:
    """A path in a command, or a hint, that a user may copy into a shell."""
    return shlex.quote(str(path))


def path_name(path: Iterable[Any]) -> str:
    """The name of a leaf: the keys of its path joined by '/', as in `blocks/0/norm/scale`."""
    return "/".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)


def cut(text: str, length: int) -> str:
    """Text of at most this length: of a longer one, its beginning and its end."""
    half = (length - 5) // 2
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"


def named_leaves(tree: "PyTree") -> "dict[str, Any]":
    """All leaves of a tree as {name: leaf}, in the tree's order."""
    from jax.tree_util import tree_flatten_with_path

    return {path_name(path): leaf for path, leaf in tree_flatten_with_path(tree)[0]}


def map_named(fn: Callable, tree: "PyTree", *rest: "PyTree") -> "PyTree":
    """Like jax.tree.map, but fn receives (name, leaf, ...)."""
    from jax.tree_util import tree_map_with_path

    return tree_map_with_path(lambda path, *leaves: fn(path_name(path), *leaves), tree, *rest)


def counts_of_scan(params: dict[str, Any]) -> tuple[int, int]:
    """(how many constants, how many carried values) an equation of lax.scan has, from its params,
    which have another form in JAX 0.11 than before."""
    if "ft_in" not in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def is_stacked(name: str) -> bool:
    """Whether a leaf holds the weights of equal blocks along its first axis, such as
    `blocks/0-11/norm/scale` (model/layers/blocks.py)."""
    return re.fullmatch(STACKED, name) is not None


def single_names(name: str, shape: tuple[int, ...]) -> list[str]:
    """The names of the leaves that are stacked in one of this shape; [] if it cannot be one."""
    found = re.fullmatch(STACKED, name)
    assert found, f"{name} is not the name of a stacked leaf"
    before, first, last, after = found.groups()
    numbers = range(int(first), int(last) + 1)
    return [f"{before}{i}{after}" for i in numbers] if shape[:1] == (len(numbers),) else []


def match_rules(
    rules: Iterable[tuple[str, Any]], names: Iterable[str], default: Any = None
) -> dict[str, Any]:
    """{name: value of the first (regex, value) rule that matches the whole name}.

    A rule that matches no name is an error.
    """
    names = list(names)
    for regex, _ in rules:
        if not any(re.fullmatch(regex, name) for name in names):
            raise UserError(f"the rule {regex!r} matches no name; there are: {', '.join(names)}")
    return {
        name: next((value for regex, value in rules if re.fullmatch(regex, name)), default)
        for name in names
    }


def open_closed_streams() -> None:
    """Open standard input, output and error on the null device where they are closed, as by `2>&-`.
    Else the next file that is opened gets their number, and what C++ prints is written into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free, so this one
            os.set_inheritable(number, True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or this machine, has too little memory."""
    texts = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")
    return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


def format_bytes(n: float) -> str:
    """1536 -> '1.5 KiB'."""
    units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    unit = next((unit for unit, size in units.items() if n >= size), None)
    return f"{n / units[unit]:.1f} {unit}" if unit else f"{n} B"


def peak_of_process() -> int | None:
    """The peak main memory of this process, in bytes; None on Windows."""
    if WINDOWS:
        return None
    # Not getrusage: it also counts the time before the process became Python, when it was as large
    # as its parent.
    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            return int(re.findall(r"VmHWM:\s+(\d+) kB", file.read())[0]) * 1024
    except (OSError, IndexError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def main_memory() -> float:
    """The bytes of main memory that this process can use at most; infinity if that is unknown."""
    sizes = [float("inf")]
    with suppress(AttributeError, ValueError, OSError):  # no sysconf on Windows
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(ValueError, OSError), open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
        sizes.append(int(file.read()))  # "max" in a container without a limit
    return min(sizes)


def check_memory(what: str | Path, size: int) -> None:
    """Refuse to read what claims to be larger than the main memory."""
    if size > (memory := main_memory()):
        sizes = f"{format_bytes(size)}, and this machine has {format_bytes(memory)}"
        raise UserError(f"{what}: would need {sizes} of main memory")


def user_cache() -> Path:
    """The folder for files that can be created again; RuntimeError if the home is unknown."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rawtree"


def relative_path(path: str | Path, start: str | Path = os.curdir) -> str:
    """A path as seen from a folder; the path itself if it is on another drive, on Windows."""
    try:
        return os.path.relpath(path, start)
    except ValueError:
        return str(path)


@contextmanager
def shown_if_slow(what: str, early: bool = False) -> Iterator[None]:
    """Show what the block does once it has taken SLOW seconds: at a terminal as a bar with the time
    so far, otherwise as one log line. `early`: print the line if logging is not set up yet."""
    done = threading.Event()
    thread = threading.Thread(target=show_after, args=(what, done, early), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def show_after(what: str, done: threading.Event, early: bool) -> None:
    """Show `what` once SLOW seconds have passed, unless the event `done` is set before."""
    if done.wait(SLOW) or logger.level >= logging.ERROR:  # as in all processes but the first
        return
    if sys.stderr and sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(desc=what, bar_format="{desc}: {elapsed}", leave=False) as bar:
            bar.start_t -= SLOW
            while not done.wait(0.2):
                bar.refresh()
    elif logger.hasHandlers():
        logger.info("%s ...", what)
    elif early:
        echo(what, "...", flush=True)
