"""The progress bar: on a terminal and in a notebook, and nowhere else."""

import sys
from types import SimpleNamespace

import pytest

from training.watching.console import ProgressBar

RUN = SimpleNamespace(steps=10, position=0, epoch=3)


def drawn(capsys):
    """What a bar writes over the steps of an epoch."""
    bar = ProgressBar()
    bar.on_epoch_start(RUN)
    bar.on_chunk(RUN, SimpleNamespace(steps=10))
    bar.on_stop(RUN)
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
