"""The progress bar: on a terminal and in a notebook, and nowhere else."""

import io
import logging
import sys
import time
from types import SimpleNamespace

import pytest

import utils
from training.watching.console import ProgressBar

RUN = SimpleNamespace(steps=10, position=10, epoch=3)


def drawn(capsys):
    """What a bar writes over the steps of an epoch."""
    bar = ProgressBar()
    bar.on_steps(RUN)
    bar.on_end(RUN)
    return capsys.readouterr().err


@pytest.fixture
def fresh_tqdm(monkeypatch):
    """tqdm decides at its first import which bar it draws."""
    for name in [name for name in sys.modules if name.startswith("tqdm.auto")]:
        monkeypatch.delitem(sys.modules, name)


def notebook(kernel):
    """The module IPython as a program sees it, in a notebook or at a prompt."""
    config = {"IPKernelApp": {}} if kernel else {"TerminalIPythonApp": {}}
    return SimpleNamespace(get_ipython=lambda: SimpleNamespace(config=config))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("kernel", "shown"), [(True, True), (False, False), (None, False)])
def test_a_notebook_gets_a_bar_although_its_output_is_no_terminal(
    kernel, shown, monkeypatch, capsys, fresh_tqdm
):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    if kernel is not None:
        monkeypatch.setitem(sys.modules, "IPython", notebook(kernel))
    written = drawn(capsys)
    assert ("Epoch 3: " in written and "/10" in written) == shown


@pytest.mark.parametrize("terminal", [False, True])
def test_what_takes_long_is_shown_and_what_is_quick_is_not(monkeypatch, caplog, terminal):
    class Screen(io.StringIO):
        def isatty(self):
            return terminal

    monkeypatch.setattr(utils, "SLOW", 30.0)
    monkeypatch.setattr(sys, "stderr", Screen())
    with caplog.at_level("INFO", "main"), utils.shown_if_slow("Reading nothing"):
        pass
    monkeypatch.setattr(utils, "SLOW", 0.01)
    with caplog.at_level("INFO", "main"), utils.shown_if_slow("Reading the data: sums"):
        time.sleep(0.5)
    logged, shown = [record.getMessage() for record in caplog.records], sys.stderr.getvalue()
    assert "nothing" not in shown
    assert logged == ([] if terminal else ["Reading the data: sums ..."])
    assert bool(shown) == terminal and ("Reading the data: sums: 00:0" in shown) == terminal


def test_a_line_is_printed_before_logging_is_set_up_only_where_it_is_wanted(monkeypatch, capsys):
    monkeypatch.setattr(utils, "SLOW", 0.0)
    monkeypatch.setattr(utils, "logger", logging.Logger("none of the run"))
    for early in (False, True):
        with utils.shown_if_slow("Importing", early):
            time.sleep(0.1)
    assert capsys.readouterr().out == "Importing ...\n"
