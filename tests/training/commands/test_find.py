"""--find-lr and --find-batch: what they try, and what they suggest."""

import logging
import re

import numpy as np
import pytest

import train
from training.commands import find_batch
from training.commands.find_batch import Tried, search
from training.commands.find_lr import find_lr, learning_rates, smoothed, suggestion
from utils import UserError
from wiring.build import build

CONFIG = {
    "title": "Find",
    "model": {"name": "mlp", "args": {"dims": [8]}},
    "data": {"name": "digits", "args": {"train_size": 256, "test_size": 32}},
    "loader": {"batch_size": 32},
    "preprocess": ["to_unit"],
    "loss": "cross_entropy",
    "optimizer": {"name": "sgd", "args": {"lr": 0.01}},
    "schedule": None,
}
FACTORS = np.geomspace(1e-3, 1e3, 100)


def test_suggests_the_rate_at_which_the_loss_falls_fastest():
    noise = 0.05 * np.random.default_rng(0).normal(size=100)
    falls = 2 - np.tanh(2 * np.log10(FACTORS))  # fastest at 1
    explodes = (FACTORS / 300) ** 3
    found = suggestion(FACTORS, smoothed(falls + explodes + noise, 100))
    assert 0.4 < found.steepest < 2.5
    assert 10 < found.lowest < 150 and not found.at_edge
    assert found.suggested == found.steepest < found.lowest / 10
    found = suggestion(FACTORS, smoothed(-np.log(FACTORS), 100))
    assert found.at_edge
    cliff = np.where(FACTORS < 1, 2 - 0.001 * FACTORS, 1.0) + FACTORS**3 / 1e3  # lowest at once
    found = suggestion(FACTORS, cliff)
    assert found.suggested == found.lowest / 10 < found.steepest


@pytest.mark.parametrize(
    "losses",
    [np.full(100, 2.0), 2 + FACTORS, np.r_[9.0, 2 + FACTORS[1:]]],
    ids=["flat", "rising", "one step"],
)
def test_suggests_nothing_where_the_loss_never_falls(losses):
    assert suggestion(FACTORS, losses) is None


def test_smoothing_keeps_a_line_to_its_ends():
    line = np.linspace(3, 1, 50)
    np.testing.assert_allclose(smoothed(line, 100), line, rtol=1e-12)


def test_finds_all_learning_rates_of_an_optimizer():
    rules = [["head/.*", {"name": "adamw", "args": {"lr": 0.5}}]]
    muon = {"name": "muon", "args": {"lr": 0.02, "adamw_lr": 0.002, "b2": 0.9, "lr_rule": None}}
    chain = [{"name": "clip"}, {"name": "groups", "args": {"rules": rules}}, muon]
    assert learning_rates(chain, "optimizer") == {
        "optimizer.1.args.rules.0.1.args.lr": 0.5,
        "optimizer.2.args.lr": 0.02,
        "optimizer.2.args.adamw_lr": 0.002,
    }


@pytest.mark.slow
@pytest.mark.parametrize("training", [{}, {"replicas": 2}], ids=str)
def test_find_lr_measures_the_run_and_leaves_only_a_page(tmp_path, capsys, training):
    config = CONFIG | {"checkpoint": {"dir": str(tmp_path)}, "training": training}
    level = logging.getLogger("main").level
    assert find_lr(build(config, "c.json"), 60) == 0
    assert logging.getLogger("main").level == level
    out = capsys.readouterr().out
    rate = float(re.search(r"Suggestion: optimizer.args.lr=(\S+)\n", out)[1])
    assert 0.01 < rate < 1  # plain gradient descent on this data diverges at about 3
    assert [path.name for path in (tmp_path / "Find").iterdir()] == ["find-lr.html"]
    page = (tmp_path / "Find" / "find-lr.html").read_text()
    assert re.search(r'"best":\d', page) and f"optimizer.args.lr={rate:.2g}" in page
    with pytest.raises(UserError, match="--find-lr: takes at least 20 steps, got 3"):
        find_lr(build(config, "c.json"), 3)


@pytest.mark.parametrize(
    ("first", "unit", "most", "limit", "largest"),
    [
        (32, 1, 10_000, 700, (623, 700)),
        (32, 8, 10_000, 700, (616, 696)),
        (512, 1, 10_000, 3, (3, 3)),
        (32, 1, 300, 10**6, (300, 300)),
        (500, 1, 300, 10**6, (300, 300)),
        (5, 8, 400, 10**6, (400, 400)),
        (64, 1, 10**6, 0, None),
    ],
)
def test_the_largest_batch_that_fits_is_found(first, unit, most, limit, largest):
    def attempt(size):
        return Tried(size, 1, 100.0 * size if size <= limit else None)

    done = search(attempt, first, unit, most)
    sizes = [one.size for one in done]
    assert len(set(sizes)) == len(sizes) and max(sizes) <= max(most, unit)
    assert all(size % unit == 0 for size in sizes)
    fitting = [one.size for one in done if one.speed]
    assert (largest is None and not fitting) or largest[0] <= max(fitting) <= largest[1]


@pytest.mark.slow
def test_find_batch_stops_at_the_memory(capsys, monkeypatch):
    monkeypatch.setattr(find_batch, "memory_limit", lambda: 1.0e6)
    monkeypatch.setattr(find_batch, "SECONDS", 0.01)
    assert find_batch.find_batch(build(CONFIG, "c.json")) == 0
    out = capsys.readouterr().out
    largest = int(re.search(r"The largest that fits: (\d+)", out)[1])
    assert 32 <= largest < 256 and "does not fit" in out
    assert re.search(r"Suggestion: loader.batch_size=\d+", out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--find-lr", "--find-batch"], "--find-lr and --find-batch do not go together"),
        (["--find-lr", "a.b=3"], "takes a number of steps, got 'a.b=3'"),
        (["--find-lr", "0"], "takes a number of steps, got '0'"),
        (["--resume", ""], "--resume is empty; was a variable of the shell not set?"),
        (["--evaluate="], "--evaluate is empty"),
        (["--list", ""], "--list is empty"),
        (["-c", ""], "--config is empty"),
        (["--find-batch", "--processes", "2"], "--processes takes a number"),
    ],
)
def test_wrong_options_are_named(capsys, arguments, message):
    with pytest.raises(SystemExit):
        train.parse(arguments)
    assert message in capsys.readouterr().err
