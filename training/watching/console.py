"""The output on a terminal, and the destinations of log lines."""

import logging
import logging.config
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils import UserError
from utils.files import read_value

if TYPE_CHECKING:
    from tqdm import tqdm

    from training.run import Run

SETTINGS = "logger_config.json"
LINE = "[%(name)s %(levelname)s]    : %(asctime)s - %(message)s"  # the form of the run's own log
CHECKED = "check of "  # the prefix of loggers' names when settings are only checked

logger = logging.getLogger("main")


def show_on_console() -> None:
    """Send log lines to standard output if logging is not set up, as in a notebook."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler(sys.stdout))


def be_silent() -> None:
    """Log only errors, as all processes but process 0 do."""
    logger.setLevel(logging.ERROR)


@contextmanager
def silenced() -> Iterator[None]:
    """Log only errors within the `with` block or the decorated function."""
    level = logger.level
    be_silent()
    try:
        yield
    finally:
        logger.setLevel(level)


def set_up_logging(root: str | Path, file: Path) -> None:
    """Set up logging by logger_config.json. Relative file names are in the run's folder, and the
    run's own log, `file`, is written even if no handler of the settings does."""
    logging.raiseExceptions = False  # a full disk is reported once, not at every line
    settings = read_settings(root)
    for handler in settings["handlers"].values():
        if isinstance(handler.get("filename"), str):
            handler["filename"] = str(file.parent / handler["filename"])
            Path(handler["filename"]).parent.mkdir(parents=True, exist_ok=True)
    logging.config.dictConfig(settings)
    if os.path.abspath(file) not in [handler.baseFilename for handler in file_handlers()]:
        handler = logging.FileHandler(file, encoding="utf-8")
        handler.setFormatter(logging.Formatter(LINE))
        logger.addHandler(handler)


def file_handlers() -> list[logging.FileHandler]:
    """The handlers of our logger and of its parents that write log lines into files."""
    found, each = [], logger
    while each:
        found += [handler for handler in each.handlers if isinstance(handler, logging.FileHandler)]
        each = each.parent if each.propagate else None
    return found


def check_logging(root: str | Path) -> None:
    """Raise a UserError if logging cannot be set up by logger_config.json; set up nothing."""
    settings = read_settings(root)
    for handler in settings["handlers"].values():
        if isinstance(handler.get("filename"), str):
            handler["filename"] = os.devnull
    SettingsCheck(settings).run()


class SettingsCheck(logging.config.DictConfigurator):
    """Makes everything that settings describe. It changes no logger in use, and closes no handler,
    as `dictConfig` would."""

    def run(self) -> None:
        if self.config.get("version") != 1:
            raise UserError(f"{SETTINGS}: version: must be 1, found {self.config.get('version')}")
        self.make("formatters", self.configure_formatter)
        self.make("filters", self.configure_filter)
        self.make("handlers", self.configure_handler)
        for name, content in self.config.get("loggers", {}).items():
            with self.place(f"loggers.{name}"):
                self.configure_logger(f"{CHECKED}{name}", content)
        if "root" in self.config:
            with self.place("root"):
                self.configure_logger(f"{CHECKED}root", self.config["root"])
        for handler in self.config["handlers"].values():
            handler.close()

    def make(self, section: str, factory: Callable[[dict[str, Any]], Any]) -> None:
        """Replace the entries of a section by the objects that they describe; entries that name
        others come last."""
        entries = self.config.get(section, {})
        for name in sorted(
            entries, key=lambda name: bool({"target", "handlers"} & {*entries[name]})
        ):
            with self.place(f"{section}.{name}"):
                entries[name] = factory(entries[name])

    @contextmanager
    def place(self, place: str) -> Iterator[None]:
        """Add to an error its place and, if a name does not exist, the names that do."""
        try:
            yield
        except Exception as error:  # a handler may be any class
            why = str(error)
            if missing := re.match(r"Unable to (?:set|add) (\w+) '(.*)'$", why):
                present = ", ".join(self.config.get(f"{missing[1]}s", {})) or "none"
                why = f"there is no {missing[1]} {missing[2]!r}; there are: {present}"
            raise UserError(f"{SETTINGS}: {place}: {why or repr(error)}") from error


def read_settings(root: str | Path) -> dict[str, Any]:
    """The content of logger_config.json, which must set up the logger `main`."""
    path = Path(root) / SETTINGS
    absent = f"restore it, for example with: git checkout {SETTINGS}"
    settings = read_value(path, absent)
    if not isinstance(settings, dict):
        raise UserError(f"{path}: must contain an object {{...}}")
    settings = {"version": 1, "handlers": {}} | settings
    for section in ("handlers", "loggers"):
        given = settings.get(section, {})
        if not isinstance(given, dict) or not all(isinstance(v, dict) for v in given.values()):
            raise UserError(f"{path}: {section}: must be an object of objects, by name")
    if logger.name not in settings.get("loggers", {}) and "root" not in settings:
        names = ", ".join(settings.get("loggers", {})) or "none"
        fix = f"log lines go to the logger {logger.name!r}; add it, or root"
        raise UserError(f"{path}: loggers: {fix} (there are: {names})")
    return settings


def in_notebook() -> bool:
    """Whether this is a notebook, whose output is not a terminal but shows progress bars, too."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "IPKernelApp" in getattr(shell, "config", ())


class ProgressBar:
    """The observer that draws a tqdm bar over the steps of an epoch where the output is a terminal
    or a notebook; log lines then print above it."""

    late = True

    def __init__(self) -> None:
        self.every = {"seconds": 1e-9}  # after each chunk
        self.resources, self.bar, self.epoch = ExitStack(), None, None

    def on_steps(self, run: "Run") -> None:
        if self.epoch != run.epoch:
            self.close(run)
            self.epoch, self.bar = run.epoch, self.begun(run)
        if self.bar:
            self.bar.update(run.position - self.bar.n)

    def begun(self, run: "Run") -> "tqdm | None":
        """The bar of an epoch; None where it cannot be shown."""
        if not ((sys.stderr and sys.stderr.isatty()) or in_notebook()):
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without ipywidgets, tqdm draws a bar of text
            from tqdm.auto import tqdm
        from tqdm.contrib.logging import logging_redirect_tqdm

        self.resources.enter_context(logging_redirect_tqdm([logger]))
        settings = {"total": run.steps, "unit": "step", "leave": False}
        return self.resources.enter_context(tqdm(desc=f"Epoch {run.epoch}", **settings))

    def on_evaluated(self, run: "Run", name: str, values: dict[str, float]) -> None:
        if name == "train":  # the epoch's steps are done
            self.close(run)

    def on_end(self, run: "Run") -> None:
        self.close(run)

    def close(self, run: "Run") -> None:
        self.resources.close()
        self.bar = self.epoch = None
