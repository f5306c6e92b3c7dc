"""Logging as in logger_config.json: where lines go, and the message for each mistake in it."""

import copy
import json
import logging
import logging.config
from pathlib import Path

import numpy as np
import pytest

import train
from model.mlp import mlp
from training.commands.failure import to_log
from training.fit import fit
from training.optimizers import sgd
from training.watching.console import check_logging, file_handlers, set_up_logging
from utils import UserError

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = json.loads((ROOT / "logger_config.json").read_text())
logger = logging.getLogger("main")


@pytest.fixture(autouse=True)
def unchanged_logging(monkeypatch):
    """Every test leaves the loggers as it found them."""
    monkeypatch.setattr(train, "end_at_signals", lambda: None)
    # It would close the handlers of pytest and of libraries, which write into pytest's streams.
    monkeypatch.setattr(logging.config, "_clearExistingHandlers", lambda: None)
    before = {each: (each.handlers[:], each.level, each.propagate) for each in (logger, root())}
    monkeypatch.setattr(logging, "raiseExceptions", logging.raiseExceptions)
    yield
    for each, (handlers, level, propagate) in before.items():
        each.handlers[:], each.propagate = handlers, propagate
        each.setLevel(level)


def root():
    return logging.getLogger()


@pytest.fixture
def settings(tmp_path):
    """A function that writes logger_config.json, with a change, and returns its folder."""

    def write(change=None):
        content = copy.deepcopy(SHIPPED)
        text = (
            change if isinstance(change, str) else json.dumps((change or dict)(content) or content)
        )
        (tmp_path / "logger_config.json").write_text(text)
        return tmp_path

    return write


def renamed_handler(content):
    content["handlers"]["to_disk"] = content["handlers"].pop("file")
    content["loggers"]["main"]["handlers"] = ["to_disk"]


def no_file_handler(content):
    del content["handlers"]["file"]
    content["loggers"]["main"]["handlers"] = ["console"]


def another_file(content):
    content["handlers"]["file"]["filename"] = "logs/all.txt"


def root_alone(content):
    content["root"] = content.pop("loggers")["main"]


@pytest.mark.parametrize(
    "change", [None, renamed_handler, no_file_handler, another_file, root_alone]
)
def test_the_runs_log_has_every_line_once_whatever_the_handlers_are(settings, tmp_path, change):
    folder = tmp_path / "run"
    folder.mkdir()
    check_logging(settings(change))
    set_up_logging(settings(change), folder / "train.log")
    logger.info("a line")
    to_log("an error")
    for handler in file_handlers():
        handler.close()
    lines = (folder / "train.log").read_text().splitlines()
    assert [line.rpartition(" - ")[2] for line in lines] == ["a line", "an error"]
    assert lines[0].startswith("[main INFO]    : ")
    assert (folder / "logs" / "all.txt").exists() == (change is another_file)


def set_at(path, value):
    """A change of one setting."""

    def change(content):
        *keys, last = path.split("/")
        for key in keys:
            content = content[key]
        content[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('{"version": 1,\n "handlers": {]}', r"line 2, column 15: not JSON"),
        ("[]", r"must contain an object"),
        (set_at("handlers", ["console"]), r"handlers: must be an object of objects"),
        (
            set_at("handlers/console/formatter", "lines"),
            r"handlers.console: there is no formatter 'lines'; there are: line",
        ),
        (
            set_at("handlers/console/class", "logging.StreamHandlr"),
            r"handlers.console: .*StreamHandlr",
        ),
        (set_at("handlers/file/filename", 7.5), r"handlers.file: "),
        (
            set_at("loggers/main/handlers", ["console", "disk"]),
            r"loggers.main: there is no handler 'disk'; there are: console, file",
        ),
        (set_at("loggers/main/level", "LOUD"), r"loggers.main: Unknown level: 'LOUD'"),
        (
            set_at("loggers", {"Main": {"handlers": ["console"]}}),
            r"loggers: log lines go to the logger 'main'; add it, or root \(there are: Main\)",
        ),
        (set_at("version", 2), r"version: must be 1, found 2"),
    ],
)
def test_the_message_for_a_mistake_in_the_settings(settings, change, message):
    with pytest.raises(UserError, match=rf"logger_config.json: {message}"):
        check_logging(settings(change))


def test_check_finds_missing_settings_and_changes_no_logger(
    settings, tmp_path, monkeypatch, capsys
):
    before = logger.handlers[:], root().handlers[:]
    in_use = logging.FileHandler(tmp_path / "other.log")
    check_logging(settings())
    assert (logger.handlers, root().handlers) == before
    assert in_use.stream and not in_use.stream.closed
    in_use.close()
    (tmp_path / "logger_config.json").unlink()
    monkeypatch.setattr(train, "ROOT", tmp_path)
    assert train.main(["-c", str(ROOT / "config.json"), "--check"]) == 2
    assert "logger_config.json: there is no such file; restore it" in capsys.readouterr().err


def test_a_run_with_wrong_settings_ends_before_it_has_a_folder(
    settings, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(train, "ROOT", settings(set_at("loggers/main/handlers", ["x"])))
    saved = tmp_path / "saved"
    arguments = ["-c", str(ROOT / "config.json"), "data=digits", f"checkpoint.dir={saved}"]
    assert train.main(arguments) == 2
    assert "there is no handler 'x'" in capsys.readouterr().err
    assert not list(saved.glob("*/*"))


@pytest.mark.slow
@pytest.mark.parametrize("shown", [True, False])
def test_the_progress_bar_can_be_turned_off(shown, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    y = np.zeros(8, np.int32)
    log = {"progress_bar": shown}
    fit(mlp((2,), 2, (2,)), (np.ones((8, 2), "f"), y), optimizer=sgd(0.1), epochs=1, log=log)
    assert ("Epoch 1:" in capsys.readouterr().err) == shown
