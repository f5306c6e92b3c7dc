"""A sweep from the first trial to the comparison: halving, kills, failures, the best config."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import chdir, contextmanager
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from search.checks import check_stored
from search.page import run_of, write_page
from search.program import EachTrial, own_values
from search.spec import parse_spec
from search.sweep_folder import Sweep, Trial, merged, read_sweep
from search.trial import Pause
from search.workers import run_all
from sweep import best_config, main
from tests.processes import ROOT, call, captured, finished, start, wait_for_line
from tests.processes import run as run_train
from tests.test_resume import SMALL
from tests.training.browser import PROGRAM, browser
from tests.training.report.saved_run import EVIL, rows, save
from training.checkpoint.keeper import protected
from training.checkpoint.storage import load
from training.options import CheckpointOptions
from training.run import TIMES
from utils import UserError

CONFIG = SMALL | {"checkpoint": {"monitor": "test_loss"}, "training": {"epochs": 4}}
RATES = {"optimizer.args.lr": [0.0001, 0.01, 0.001, 0.003]}


def sweep_of(folder, scores=(), halving=None, epochs=9, **given):
    """A sweep with one trial for each list of scores."""
    given = {"keys": {"seed": list(range(len(scores) or 2))}, "halving": halving} | given
    spec = parse_spec(given, "grid.json", "grid")
    trials = [Trial(i, {"seed": i}) for i in range(len(scores))]
    for trial, pairs in zip(trials, scores, strict=True):
        trial.scores = [list(pair) for pair in pairs]
        trial.epochs = max((pair[0] for pair in pairs), default=0)
        trial.finished = trial.epochs == epochs
    about = "small.json", "test_loss", 1, epochs
    return Sweep(folder / "Small" / "grid", spec, CONFIG, *about, trials)


def numbers(sweep):
    due, until = sweep.due()
    return [trial.number for trial in due], until


def test_halving_continues_the_best_of_those_that_paused_together(tmp_path):
    first = [0.9, 0.2, 0.8, 0.3, 0.7, 0.4, 0.6, 0.5]
    halving = {"first": 1, "factor": 3}
    sweep = sweep_of(tmp_path, [[] for _ in first], halving)
    assert numbers(sweep) == ([*range(8)], 1)
    sweep = sweep_of(tmp_path, [[(1, v)] for v in first[:7]] + [[]], halving)
    assert numbers(sweep) == ([7], 1)
    assert sweep.state(sweep.trials[0]) == "paused"
    paused = [[(1, value)] for value in first]
    sweep = sweep_of(tmp_path, paused, halving)
    assert numbers(sweep) == ([1, 3, 5], 3)
    assert [sweep.state(trial) for trial in sweep.trials[:2]] == ["stopped", "paused"]
    paused[1].append((3, 0.19))  # now the third is better
    paused[3].append((3, 0.1))
    assert numbers(sweep_of(tmp_path, paused, halving)) == ([5], 3)
    paused[5].append((3, 0.35))
    assert numbers(sweep_of(tmp_path, paused, halving)) == ([3], None)
    sweep = sweep_of(tmp_path, paused, halving)
    sweep.trials[3].failed = "it diverged"  # no other trial continues instead of it
    assert numbers(sweep) == ([], None)
    assert [trial.number for trial in sweep.ranked()][:2] == [1, 5]
    assert sweep.ranked()[-1].number == 3

    # A trial that failed on its way to the next pause does not count as one of the best.
    sweep = sweep_of(tmp_path, paused, halving)
    sweep.trials[3].failed, sweep.trials[3].epochs = "it diverged", 2
    sweep.trials[3].scores = [[1, 0.01]]
    assert numbers(sweep) == ([1], None)


def test_a_stored_sweep_is_refused_if_any_of_its_trials_reaches_beyond_it(tmp_path):
    sweep = sweep_of(tmp_path, [[], []])
    for trial, file in zip(sweep.trials, ("rows.jsonl", "/etc/rows.jsonl"), strict=True):
        trial.values = {"logging.trackers": [{"name": "jsonl", "args": {"file": file}}]}
    check_stored(sweep, trusted=True)
    with pytest.raises(UserError, match=r"/etc/rows\.jsonl"):
        check_stored(sweep, trusted=False)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("monitor", None, "monitor"),
        ("programs", [1], "programs"),
        ("programs", [[0, 7]], "trials"),
        ("trials.1.number", 0, "trials"),
        ("trials.0.values", {"other": 1}, "trials"),
        ("trials.0.scores.0.1", math.nan, "trials.0.scores.0.1"),
        ("trials.0.epochs", "\0", "trials.0.epochs"),
        ("source", "base.json\ntouch x #", "source"),
        ("config.checkpoint", [], "config"),
        ("spec.keys.seed", {"uniform": [1]}, "spec: keys.seed: uniform: must be [low, high]"),
    ],
)
def test_a_damaged_sweep_is_refused_with_the_place(tmp_path, path, value, named):
    sweep = sweep_of(tmp_path, [[(1, 0.5)], []])
    sweep.folder.mkdir(parents=True)
    sweep.save()
    content = json.loads((sweep.folder / "sweep.json").read_text())
    *keys, last = path.split(".")
    place = reduce(lambda node, key: node[int(key) if key.isdigit() else key], keys, content)
    place[int(last) if last.isdigit() else last] = value
    (sweep.folder / "sweep.json").write_text(json.dumps(content))
    for option in ("--resume", "--report", "--best"):
        code, _, err = captured(tmp_path, lambda o=option: main([o, str(sweep.folder)]))
        assert code == 2 and err.startswith(f"{sweep.folder / 'sweep.json'}: ") and named in err


def test_a_trial_that_failed_does_not_count_and_one_that_ended_early_stays(tmp_path):
    scores = [[(1, 0.5)], [], [(1, 0.4)], [(1, 0.3)], [(1, 0.2)]]
    sweep = sweep_of(tmp_path, scores, {"first": 1, "factor": 2})
    sweep.trials[1].failed = "no memory"
    assert numbers(sweep) == ([4, 3], 2)  # the best 2 of 4
    sweep.trials[4].finished = True  # by early_stopping
    assert numbers(sweep) == ([3], 2)
    sweep.trials[3].epochs, sweep.trials[3].scores = 2, [[1, 0.3], [2, 0.25]]
    assert numbers(sweep) == ([], None)  # trial 4 is the better of the two
    without = sweep_of(tmp_path, [[], [(9, 1.0)], []])
    assert numbers(without) == ([0, 2], None)


def test_a_sweep_continues_with_more_trials_but_not_with_another_spec(tmp_path):
    def drawn(trials, high=1.0, **given):
        keys = {"optimizer.args.lr": {"uniform": [0.1, high]}}
        sweep = sweep_of(tmp_path, keys=keys, trials=trials, **given)
        sweep.folder.mkdir(parents=True, exist_ok=True)
        return sweep

    stored = merged(drawn(2), drawn(2))
    stored.trials[1].scores = [[1, 0.5]]
    stored.save()
    assert read_sweep(stored.folder) == stored
    more = merged(drawn(4, workers=2), read_sweep(stored.folder))
    assert len(more.trials) == 4 and more.trials[1].scores and more.spec.workers == 2
    with pytest.raises(UserError) as error:
        merged(drawn(1, high=0.5, halving={}), read_sweep(stored.folder))
    message = str(error.value)
    assert "made with another spec or config\n  keys.optimizer.args.lr.uniform.1: 1.0 -> 0.5" in (
        message
    )
    assert "trials: 2 -> 1" in message and "halving: null -> (absent)" in message
    assert f"--resume {stored.folder}" in message


def saved_sweep(folder, config=CONFIG):
    """A sweep with five trials: a normal one, the best, one that stopped, one that failed with a
    folder, one without; and one that has not begun."""
    scores = [[(1, 0.5), (4, 0.4)], [(1, 0.3), (4, 0.125)], [(1, 0.9)], [(1, 0.6)], [], []]
    sweep = sweep_of(folder, scores, {"factor": 2}, epochs=4)
    sweep.config = config
    sweep.trials[3].failed, sweep.trials[4].failed = "step 11 was not finite\nmore", EVIL
    for trial in sweep.trials[:4]:
        lines = list(rows(tests=[0.5, *[pair[1] for pair in trial.scores[-1:]] * 3]))
        trained = {"title": "grid", "checkpoint": {"dir": "x"}, "seed": trial.number}
        save(sweep.run_dir(trial), lines, config | trained | {"run_name": trial.name})
    sweep.save()
    return sweep


def test_the_comparison_has_every_trial_and_is_sorted(tmp_path):
    sweep = saved_sweep(tmp_path)
    text = write_page(sweep).read_text()
    names = re.findall(r"trial_00\d", text[text.index("standings") : text.index("</table>")])
    assert list(dict.fromkeys(names)) == [f"trial_00{i}" for i in (1, 0, 2, 3, 4, 5)]
    assert "trial_003: step 11 was not finite" in text and EVIL not in text
    parallel = text[text.index("chart parallel") : text.index("</figure>", text.index("parallel"))]
    assert parallel.count("<g ") == 6


def test_best_is_the_resolved_config_of_the_best_trial_as_a_run_of_its_own(tmp_path):
    config = best_config(saved_sweep(tmp_path))
    assert config["seed"] == 1 and config["title"] == "Small"
    assert "run_name" not in config and config["checkpoint"]["dir"] == "saved"
    code, out, _ = captured(tmp_path, lambda: main(["--best", str(tmp_path / "Small/grid")]))
    assert code == 0 and json.loads(out) == config
    with pytest.raises(UserError, match="no trial has a value of test_loss yet"):
        best_config(sweep_of(tmp_path, [[], []]))
    code, _, err = captured(tmp_path, lambda: main(["--best", "Small"]))
    assert code == 2 and "has no sweep.json; did you mean Small/grid?" in err


def test_the_comparison_in_a_browser(tmp_path):
    if PROGRAM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    path = write_page(saved_sweep(tmp_path))
    with browser(tmp_path) as page:
        for width in (1100, 360):
            page.open(path, width=width)
            assert page.complaints() == []
            assert all(url.startswith(("file:", "data:")) for url in page.requests())
            assert page.js("document.documentElement.scrollWidth") == width
        drawn = "[...document.querySelectorAll('.parallel g path')].map(p => p.getTotalLength())"
        lengths = page.js(drawn)
        assert sum(length > 1000 for length in lengths) == 4  # those with a value
        assert page.js("document.querySelectorAll('.parallel .marks b').length") == 2


class Seen:
    """What an observer sees of a run."""

    def __init__(self, completed):
        self.completed, self.finished = completed, completed == 4


@pytest.mark.parametrize("before", [[], [4.0, 3.0]])
def test_the_last_weights_of_a_trial_that_ended_within_an_epoch_count(tmp_path, before):
    sweep = sweep_of(tmp_path, [[]])
    folder = sweep.run_dir(sweep.trials[0])
    folder.mkdir(parents=True)
    lines = [
        {"epoch": n, "step": 10 * n, "test_loss": loss, "end_of_epoch": True}
        for n, loss in enumerate(before, 1)
    ]
    lines += [{"epoch": 3, "step": 23, "final": "the last weights", "test_loss": 2.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sweep.record(sweep.trials[0], finished=True)
    assert sweep.trials[0].score(9) == 2.5


def test_a_pause_is_after_its_epoch_and_not_after_the_last():
    pause = Pause(2)
    end = {"end_of_epoch": True}
    assert pause.on_row(Seen(1), end) is None and pause.on_row(Seen(2), {}) is None
    assert pause.on_row(Seen(2), end)["pause"] and pause.on_start(Seen(3))["pause"]
    assert Pause(4).on_row(Seen(4), end) is None


# Trials as one program.


def test_the_trials_of_programs_and_their_retry(tmp_path, monkeypatch):
    monkeypatch.setattr("search.sweep_folder.TOGETHER", 3)
    sweep = sweep_of(tmp_path, [[]] * 7)
    sweep.folder.mkdir(parents=True)
    assert sweep.next_program() is None
    sweep.form = "program"
    assert sweep.next_program() == sweep.next_program() == 0
    for trial in sweep.trials[:3]:
        trial.finished = True
    assert sweep.next_program() == 1 and sweep.programs == [[0, 1, 2], [3, 4, 5]]
    for trial in sweep.trials[3:6]:
        trial.failed = "no memory"
    assert sweep.next_program() is None and numbers(sweep)[0] == [6]  # alone, so it is a process
    assert read_sweep(sweep.folder).programs == sweep.programs
    sweep.trials[0].failed = "diverged"
    sweep.retry()
    assert sweep.programs == [[1, 2], [3, 4, 5]] and sweep.next_program() == 1
    config = sweep.program_config(sweep.trials_of(1))
    assert config["training"]["vary"] == {"seed": [3, 4, 5]}
    assert config["training"]["replicas"] == 3 and config["training"]["on_nonfinite"] == "skip"


def test_where_a_program_fails_each_trial_is_a_process_unless_a_program_was_demanded(tmp_path):
    command = ["-c", "import sys; sys.exit('--trial' not in sys.argv and 1 or 3)"]
    for form, programs, code in (("auto", [], 3), ("program", [[0, 1]], 1)):
        sweep = sweep_of(tmp_path / form, [[], []], form=form)
        sweep.form = "program"
        sweep.folder.mkdir(parents=True)
        lock = os.open(sweep.folder, os.O_RDONLY)
        with restored_signals():
            assert run_all(sweep, command, dict(os.environ), lock) == 1
        os.close(lock)
        assert sweep.programs == programs
        assert [trial.failed for trial in sweep.trials] == [f"ended with exit code {code}"] * 2


def test_a_checkpoint_is_kept_where_it_is_among_the_best_of_any_trial(tmp_path):
    options = CheckpointOptions(monitor="test_loss", save_top_k=1)
    each, run = EachTrial(tmp_path, options, 3, True), SimpleNamespace(history=[])
    each.failed[2] = (1, "it diverged")
    for epoch, (saved, losses) in enumerate([(1, (5, 4, 0)), (1, (4, 3, 0)), (1, (3, 6, 0))], 1):
        values = {f"test_loss/{i}": float(loss) for i, loss in enumerate(losses)}
        run.epoch, run.history = epoch, [*run.history, {"epoch": epoch, **values}]
        assert bool(each.on_row(run, {"end_of_epoch": True})) == saved
    names = {"checkpoint-epoch_1", "checkpoint-epoch_2", "checkpoint-epoch_3"}
    assert protected(tmp_path, names) == {"checkpoint-epoch_2", "checkpoint-epoch_3"}


def test_the_values_of_one_trial_have_their_usual_names():
    row = {"epoch": 1, "train_loss": 2.0, "train_loss/0": 1.0, "train_loss/1": 3.0}
    row |= {"learning_rate/0": 0.1, "learning_rate/1": 0.2, "examples_per_second": 8.0}
    own = {"epoch": 1, "train_loss": 3.0, "learning_rate": 0.2, "examples_per_second": 4.0}
    assert own_values(row, 1, 2) == own and list(own_values(row, 1, 2)) == list(own)


def test_the_comparison_shows_a_program_in_progress(tmp_path):
    sweep = sweep_of(tmp_path, [[], [], []])
    sweep.form, sweep.programs = "program", [[1, 2]]
    losses = {"train_loss": 4.0, "train_loss/0": 3.0, "train_loss/1": 5.0, "seconds": 1.5}
    save(sweep.program_dir(0), [{"epoch": 1, "step": 9, **losses, "end_of_epoch": True}], CONFIG)
    assert run_of(sweep, sweep.trials[0]) is None
    for trial, loss in ((1, 3.0), (2, 5.0)):
        run = run_of(sweep, sweep.trials[trial])
        values = {name: curve.values.tolist() for name, curve in run.metrics.epochs.items()}
        assert (
            values == {"train_loss": [loss], "seconds": [1.5]} and run.label == f"trial_00{trial}"
        )
    assert "trial_002" in write_page(sweep).read_text()


# Whole sweeps, in processes.


# What differs between the record of a trial of a program and of one by itself.
CHANGING = ("seconds", "lengths")
AS_ALONE = {"$schema": "", "checkpoint": {}, "title": "grid"}


@contextmanager
def restored_signals():
    """A sweep handles signals from then on."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def write(folder, spec, config=CONFIG):
    (folder / "small.json").write_text(json.dumps(config))
    (folder / "grid.json").write_text(json.dumps(spec))


def run_sweep(folder, *arguments, code=0):
    [(out, err)] = finished([start(folder, *arguments, program="sweep.py")], 300, code)
    assert "Traceback" not in out + err, err
    return out, err


def rows_of(run):
    """The rows of metrics.jsonl without times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = r".*(seconds|per_second|waiting)"
    return [{k: v for k, v in row.items() if not re.fullmatch(timed, k)} for row in lines]


def same(run, other):
    """Whether two runs ended with the same bits."""
    ends = [load(each / "checkpoint-epoch_4.params")[0] for each in (run, other)]
    assert ends[0].keys() == ends[1].keys()
    for name in ends[0]:
        np.testing.assert_array_equal(ends[0][name], ends[1][name], err_msg=name)
    assert rows_of(run) == rows_of(other)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with a finished sweep over four rates, of which none was ever paused."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder, {"keys": RATES, "workers": 2})
    run_sweep(folder, "-c", "small.json", "grid.json")
    return folder / "saved" / "Small" / "grid"


@pytest.mark.slow
def test_a_survivor_of_halving_equals_the_run_that_was_never_paused(whole, tmp_path):
    write(tmp_path, {"keys": RATES, "workers": 2, "halving": {"first": 1, "factor": 2}})
    out, _ = run_sweep(tmp_path, "-c", "small.json", "grid.json")
    sweep = read_sweep(tmp_path / "saved/Small/grid")
    assert sorted(trial.epochs for trial in sweep.trials) == [1, 1, 2, 4]
    states = [sweep.state(trial) for trial in sweep.ranked()]
    assert states == ["finished", "stopped", "stopped", "stopped"]
    assert "paused after epoch 1: test_loss" in out
    best = sweep.ranked()[0]
    same(sweep.run_dir(best), whole / best.name)


@pytest.mark.slow
def test_trials_are_normal_runs_and_the_best_config_trains(whole):
    folder = whole.parents[2]
    best = read_sweep(whole).ranked()[0].name
    code, out, _ = call(folder, "--evaluate", whole / best)
    assert code == 0 and "test_loss" in out
    code, out, _ = call(folder, "--report", whole / best)
    assert code == 0 and (whole / best / "report.html").exists()
    code, out, _ = captured(folder, lambda: main(["--best", str(whole)]))
    (folder / "best.json").write_text(out)
    code, out, err = call(folder, "-c", "best.json", "--check")
    assert code == 0, err
    out, _ = run_sweep(folder, "-c", "small.json", "grid.json")
    assert "starts" not in out  # all trials are finished
    write(folder, {"keys": RATES | {"seed": [1]}})
    out, err = run_sweep(folder, "-c", "small.json", "grid.json", code=2)
    assert "was made with another spec or config" in err


@pytest.mark.slow
def test_a_program_that_is_killed_continues_and_its_trials_are_normal_runs(whole, tmp_path):
    write(tmp_path, {"keys": RATES, "form": "program"})
    process = start(tmp_path, "-c", "small.json", "grid.json", program="sweep.py")
    wait_for_line(process, "program_000 starts with 4 trials")
    folder = tmp_path / "saved/Small/grid"
    wait_until(lambda: [*folder.glob("program_000/checkpoint-epoch_1.params")])
    process.kill()
    finished([process], code=-signal.SIGKILL)
    assert not any(trial.over for trial in read_sweep(folder).trials)
    out, _ = run_sweep(tmp_path, "-c", "small.json", "grid.json")
    assert "program_000 continues with 4 trials" in out and "trial_003 finished after" in out
    assert not (folder / "program_000").exists()
    assert "trial_003" in (folder / "comparison.html").read_text()
    for trial, alone in zip(read_sweep(folder).trials, read_sweep(whole).trials, strict=True):
        run, other = folder / trial.name, whole / trial.name
        assert trial.scores[-1] == pytest.approx(alone.scores[-1], rel=1e-4)
        ends = [load(each / "checkpoint-epoch_4.params") for each in (run, other)]
        for name, array in ends[0][0].items():
            np.testing.assert_allclose(array, ends[1][0][name], rtol=1e-3, atol=1e-5, err_msg=name)
        own, expected = ({k: r[k] for k in r if k not in CHANGING} for _, r in ends)
        assert own.pop("config") | AS_ALONE == expected.pop("config") | AS_ALONE
        assert own.pop("metrics") == pytest.approx(expected.pop("metrics"), rel=1e-4)
        measured = [each.pop("evaluated") for each in (own, expected)]
        measured = [{k: v for k, v in each.items() if k not in TIMES} for each in measured]
        assert measured[0] == pytest.approx(measured[1], rel=1e-4)
        ((name, value),), ((expected_name, expected_value),) = own.pop("best"), expected.pop("best")
        assert name == expected_name and value == pytest.approx(expected_value, rel=1e-4)
        assert own == expected
        files, others = ({path.name for path in each.iterdir()} for each in (run, other))
        assert files == {name for name in others if not name.startswith("evaluation-")}
        for row, one in zip(rows_of(run), rows_of(other), strict=True):
            assert row == pytest.approx(one, rel=1e-4)
    config, best = best_config(read_sweep(folder)), best_config(read_sweep(whole))
    assert config["optimizer"] == best["optimizer"] and config["training"] == best["training"]
    code, out, _ = call(tmp_path, "--evaluate", folder / "trial_001")
    last = rows_of(folder / "trial_001")[-1]["test_loss"]
    assert code == 0 and json.loads(out)["metrics"]["test_loss"] == pytest.approx(last, rel=1e-4)
    code, out, _ = run_train(tmp_path, "--resume", folder / "trial_001", "training.epochs=5")
    assert code == 0 and "Changed: training.epochs: 4 -> 5" in out
    assert len(rows_of(folder / "trial_001")) == 5 * 3


@pytest.mark.slow
def test_a_trial_that_fails_is_recorded_and_the_others_go_on(tmp_path):
    steps = {"keys": {"optimizer.args.lr": [1e30, 0.01]}}
    sgd = {"optimizer": {"name": "sgd", "args": {"lr": 0.01}}, "training": {"epochs": 1}}
    write(tmp_path, steps, CONFIG | sgd)
    out, _ = run_sweep(tmp_path, "-c", "small.json", "grid.json")
    sweep = read_sweep(tmp_path / "saved/Small/grid")
    assert [trial.failed is None for trial in sweep.trials] == [False, True]
    assert "NaN or infinite" in sweep.trials[0].failed and "trial_000 failed: " in out
    assert "NaN or infinite" in (sweep.folder / "comparison.html").read_text()
    with chdir(tmp_path):
        assert sweep.ranked()[0].number == 1
    out, _ = run_sweep(tmp_path, "--resume", sweep.folder)
    assert "starts" not in out
    out, _ = run_sweep(tmp_path, "--resume", sweep.folder, "--retry")
    assert "trial_000 starts" in out and "trial_001" not in out


def test_ctrl_c_ends_the_checks_of_a_sweep_even_where_python_ignores_exceptions(tmp_path):
    write(tmp_path, {"keys": RATES})
    code = """
import os, signal, sys, weakref
import search.checks, sweep
def interrupted(*arguments):
    lost = set()
    callback = weakref.ref(lost, lambda _: os.kill(os.getpid(), signal.SIGINT))
    del lost
    raise SystemExit("continued")
search.checks.checked_sweep = interrupted
sys.exit(sweep.main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", code, "-c", "small.json", "grid.json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (75, "Interrupted; nothing was saved\n")


def children(process):
    tasks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(number) for number in tasks.split()]


def wait_until(done):
    deadline = time.time() + 120
    while not done():
        assert time.time() < deadline
        time.sleep(0.01)


def until_steps(folder, trial):
    """Wait until a trial has logged some steps."""
    metrics = folder / "saved/Small/grid" / trial / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_sweep_that_is_killed_or_stopped_continues_exactly(whole, tmp_path, number):
    write(tmp_path, {"keys": RATES, "workers": 2})
    process = start(tmp_path, "-c", "small.json", "grid.json", program="sweep.py")
    wait_for_line(process, "finished")
    until_steps(tmp_path, "trial_002")
    trials = children(process)
    process.send_signal(number)
    code = 75 if number == signal.SIGINT else -signal.SIGKILL
    finished([process], code=code)
    deadline = time.time() + 10
    while any(os.path.exists(f"/proc/{pid}/cwd") for pid in trials) and time.time() < deadline:
        time.sleep(0.05)
    folder = tmp_path / "saved/Small/grid"
    done = [trial.name for trial in read_sweep(folder).trials if trial.finished]
    assert done and not all(trial.over for trial in read_sweep(folder).trials)
    arguments = ("-c", "small.json", "grid.json")
    if number == signal.SIGINT:
        folder = folder.rename(tmp_path / "moved")
        arguments = ("--resume", folder)
    out, _ = run_sweep(tmp_path, *arguments)
    assert not any(f"{name} " in out for name in done)
    for trial in read_sweep(folder).trials:
        assert trial.finished
        same(folder / trial.name, whole / trial.name)
