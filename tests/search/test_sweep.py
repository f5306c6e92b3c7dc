"""A sweep from the first trial to the comparison: halving, kills, failures, the best config."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import chdir, contextmanager
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

from search import claims, engines
from search.checks import check_stored
from search.loop import train_all
from search.page import write_page
from search.spec import parse_spec
from search.sweep_folder import Sweep, Trial, merged, name_of, propose, read_sweep
from sweep import best_config, main
from tests.processes import call, captured, finished, start, wait_for_line
from tests.processes import run as run_train
from tests.runs import rows_of
from tests.test_resume import SMALL
from tests.training.browser import PROGRAM, browser
from tests.training.report.saved_run import EVIL, LOSSES, rows, save
from training.checkpoint.storage import load
from utils import UserError

CONFIG = SMALL | {"checkpoint": {"monitor": "test_loss"}, "training": {"epochs": 4}}
RATES = {"optimizer.args.lr": [0.0001, 0.01, 0.001, 0.003]}


RATE = "optimizer.args.lr"


def sweep_of(folder, scores=(), halving=None, epochs=9, **given):
    """A sweep with one trial for each list of scores."""
    given = {"keys": {RATE: list(range(len(scores) or 2))}, "halving": halving} | given
    spec = parse_spec(given, "grid.json", "grid")
    trials = [Trial(i, {RATE: i}, name_of(i)) for i in range(len(scores))]
    for i, pairs in enumerate(scores):
        at = max((pair[0] for pair in pairs), default=0)
        reached = {"scores": tuple(pairs), "epochs": at, "finished": at == epochs}
        trials[i] = replace(trials[i], **reached)
    about = "small.json", "test_loss", 1, epochs
    return Sweep(folder / "Small" / "grid", spec, CONFIG, *about, trials=tuple(trials))


def changed(sweep, number, **fields):
    """The sweep with other fields of one trial."""
    trials = list(sweep.trials)
    trials[number] = replace(trials[number], **fields)
    return replace(sweep, trials=tuple(trials))


def numbers(sweep):
    runs, until = sweep.due()
    return [int(run.removeprefix("trial_")) for run in runs], until


def ranks(sweep):
    return [[trial.number for trial in group.trials] for group in sweep.ranked()]


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
    sweep = changed(sweep_of(tmp_path, paused, halving), 3, failed="it diverged")
    assert numbers(sweep) == ([], None)  # no other trial continues instead of it
    assert ranks(sweep)[:2] == [[1], [5]] and ranks(sweep)[-1] == [3]

    # A trial that failed on its way to the next pause does not count as one of the best.
    gone = {"failed": "it diverged", "epochs": 2, "scores": ((1, 0.01),)}
    assert numbers(changed(sweep_of(tmp_path, paused, halving), 3, **gone)) == ([1], None)


def seeded(folder, scores, failed=()):
    """A sweep over rates and seeds, with a score for each pair, or None."""
    keys = {RATE: [0.1, 0.2, 0.3], "seed": [1, 2]}
    sweep = sweep_of(folder, [[(9, s)] if s else [] for s in scores], keys=keys)
    pairs = [(rate, seed) for rate in keys[RATE] for seed in keys["seed"]]
    for i, (rate, seed) in enumerate(pairs):
        why = "it diverged" if i in failed else None
        sweep = changed(sweep, i, values={RATE: rate, "seed": seed}, failed=why)
    return sweep


def test_trials_that_differ_in_their_seed_are_compared_by_their_mean(tmp_path):
    sweep = seeded(tmp_path, [0.1, 0.9, 0.3, 0.4, 0.6, 0.2])
    assert ranks(sweep) == [[2, 3], [4, 5], [0, 1]]
    best = sweep.ranked()[0]
    assert best.values == {RATE: 0.2} and best.mean() == pytest.approx(0.35)
    assert best.spread() == pytest.approx(np.std([0.3, 0.4], ddof=1))
    text = write_page_of(sweep)
    assert (
        re.search(r"0\.35\d* \N{PLUS-MINUS SIGN} 0\.07", text)
        and "mean and standard deviation" in text
    )
    # A rate with which one of the seeds failed is not the best.
    assert ranks(seeded(tmp_path, [0.1, 0.9, 0.3, 0.4, 0.6, 0.2], failed=[3])) == [
        [4, 5], [0, 1], [2, 3],
    ]  # fmt: skip
    # Halving continues both seeds of the best rates.
    halving = replace(sweep.spec, halving={"first": 9, "factor": 3})
    paused = replace(sweep, spec=halving, epochs=27)
    paused = replace(paused, trials=tuple(replace(t, finished=False) for t in paused.trials))
    assert numbers(paused) == ([2, 3], None)


def write_page_of(sweep):
    sweep.folder.mkdir(parents=True, exist_ok=True)
    return write_page(sweep).read_text()


def test_a_stored_sweep_is_refused_if_any_of_its_trials_reaches_beyond_it(tmp_path):
    sweep = sweep_of(tmp_path, [[], []])
    files = [[{"name": "jsonl", "args": {"file": file}}] for file in ("a.jsonl", "/etc/a.jsonl")]
    sweep = replace(sweep, spec=replace(sweep.spec, keys={"logging.trackers": files}))
    for i, trackers in enumerate(files):
        sweep = changed(sweep, i, values={"logging.trackers": trackers})
    check_stored(sweep, trusted=True)
    with pytest.raises(UserError, match=r"/etc/a\.jsonl"):
        check_stored(sweep, trusted=False)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("monitor", None, "monitor"),
        ("sign", 2, "sign"),
        ("form", "both", "form"),
        ("epochs", "\0", "epochs"),
        ("source", "base.json\ntouch x #", "source"),
        ("config", None, "config"),
        ("config.checkpoint", [], "config"),
        ("other", 1, "keys"),
        ("spec.keys.seed", {"uniform": [1]}, "spec: keys.seed: uniform: must be [low, high]"),
    ],
)
def test_a_damaged_sweep_is_refused_with_the_place(tmp_path, path, value, named):
    sweep = sweep_of(tmp_path, keys={"seed": [1, 2]})
    sweep.folder.mkdir(parents=True)
    sweep.save()
    content = json.loads((sweep.folder / "sweep.json").read_text())
    *keys, last = path.split(".")
    reduce(lambda node, key: node[key], keys, content)[last] = value
    (sweep.folder / "sweep.json").write_text(json.dumps(content))
    for option in ("--resume", "--report", "--best"):
        code, _, err = captured(tmp_path, lambda o=option: main([o, str(sweep.folder)]))
        assert code == 2 and err.startswith(f"{sweep.folder / 'sweep.json'}: ") and named in err


def test_a_trial_that_failed_does_not_count_and_one_that_ended_early_stays(tmp_path):
    scores = [[(1, 0.5)], [], [(1, 0.4)], [(1, 0.3)], [(1, 0.2)]]
    sweep = sweep_of(tmp_path, scores, {"first": 1, "factor": 2})
    sweep = changed(sweep, 1, failed="no memory")
    assert numbers(sweep) == ([4, 3], 2)  # the best 2 of 4
    sweep = changed(sweep, 4, finished=True)  # by early_stopping
    assert numbers(sweep) == ([3], 2)
    sweep = changed(sweep, 3, epochs=2, scores=((1, 0.3), (2, 0.25)))
    assert numbers(sweep) == ([], None)  # trial 4 is the better of the two
    without = sweep_of(tmp_path, [[], [(9, 1.0)], []])
    assert numbers(without) == ([0, 2], None)


def test_a_sweep_continues_with_more_trials_but_not_with_another_spec(tmp_path):
    def drawn(trials, high=1.0, **given):
        keys = {"optimizer.args.lr": {"uniform": [0.1, high]}}
        sweep = sweep_of(tmp_path, keys=keys, trials=trials, **given)
        sweep.folder.mkdir(parents=True, exist_ok=True)
        return sweep

    stored = drawn(2)
    stored.save()
    more = merged(drawn(4, workers=2, engine="slurm"), read_sweep(stored.folder))
    more.save()
    first, continued = read_sweep(stored.folder).trials[:2], read_sweep(stored.folder).trials
    assert len(continued) == 4 and continued[:2] == first
    stored.save()
    with pytest.raises(UserError) as error:
        merged(drawn(1, high=0.5, halving={}), read_sweep(stored.folder))
    message = str(error.value)
    assert "made with another spec or config\n  keys.optimizer.args.lr.uniform.1: 1.0 -> 0.5" in (
        message
    )
    assert "trials: 2 -> 1" in message and "halving: null -> (absent)" in message
    assert f"--resume {stored.folder}" in message


def saved_sweep(folder, config=CONFIG):
    """A sweep with six trials: a normal one, the best, one that stopped, one that failed with a
    folder, one without; and one that has not begun."""
    sweep = sweep_of(folder, [[]] * 6, {"factor": 2}, epochs=4)
    best = [[0.5, 0.4, 0.4, 0.4], [0.3, 0.125, 0.2, 0.2], [0.9], [0.6]]
    for trial, tests in zip(sweep.trials, best, strict=False):
        lines = list(rows(LOSSES[: len(tests)], tests))
        trained = {"title": "grid", "checkpoint": {"dir": "x"}, "seed": trial.number}
        named = config | trained | {"run_name": trial.name}
        save(sweep.run_dir(trial), lines, named, finished=len(tests) == 4)
    sweep.fail([sweep.trials[3]], "step 11 was not finite\nmore")
    sweep.fail([sweep.trials[4]], EVIL)
    replace(sweep, config=config).save()
    return read_sweep(sweep.folder)


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
        assert sum(length > 1000 for length in lengths) == 3  # one failed, two have no value
        assert page.js("document.querySelectorAll('.parallel .marks b').length") == 2


@pytest.mark.parametrize("before", [[], [4.0, 3.0]])
def test_the_last_weights_of_a_trial_that_ended_within_an_epoch_count(tmp_path, before):
    sweep = sweep_of(tmp_path, [[]])
    folder = sweep.run_dir(sweep.trials[0])
    folder.mkdir(parents=True)
    sweep.save()
    lines = [
        {"epoch": n, "step": 10 * n, "test_loss": loss, "end_of_epoch": True}
        for n, loss in enumerate(before, 1)
    ]
    lines += [{"epoch": 3, "step": 23, "final": "the last weights", "test_loss": 2.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_sweep(sweep.folder).trials[0].score() == 2.5


# Trials as one program.


def test_the_trials_of_programs_and_their_retry(tmp_path, monkeypatch):
    monkeypatch.setattr("search.sweep_folder.TOGETHER", 3)
    sweep = replace(sweep_of(tmp_path, [[]] * 7), form="program")
    sweep.folder.mkdir(parents=True)
    sweep.save()

    def runs():
        return [trial.run for trial in read_sweep(sweep.folder).trials]

    first, second, alone = "program_000-002", "program_003-005", "trial_006"
    assert runs() == [*[first] * 3, *[second] * 3, alone]  # one that is left is a process
    losses = {f"test_loss/{i}": float(i) for i in range(3)}
    save(sweep.folder / first, [{"epoch": 1, "step": 9, **losses, "end_of_epoch": True}], CONFIG)
    (sweep.folder / second).mkdir()
    sweep = read_sweep(sweep.folder)
    assert [trial.finished for trial in sweep.trials] == [True] * 3 + [False] * 4
    assert [trial.score() for trial in sweep.trials[:3]] == [0, 1, 2]
    assert list(sweep.due()[0]) == [second, alone]
    config = sweep.run_config(sweep.members(second))
    assert config["training"]["vary"] == {RATE: [3, 4, 5]} and config["run_name"] == second
    assert config["training"]["replicas"] == 3 and config["training"]["on_nonfinite"] == "skip"
    sweep.fail([sweep.trials[0]], "it diverged")
    sweep = read_sweep(sweep.folder)
    assert sweep.state(sweep.trials[0]) == "failed" and ranks(sweep)[0] == [1]
    sweep.retry()
    assert runs()[:3] == ["trial_000", first, first]  # alone, since the others did not fail
    # Programs that have begun keep their trials when the sweep grows.
    (sweep.folder / "trial_000").rmdir()
    replace(sweep, spec=replace(sweep.spec, keys={RATE: [*range(9)]})).save()
    assert runs() == [*[first] * 3, *[second] * 3, *["program_006-008"] * 3]


def test_where_a_program_fails_each_trial_is_a_process_unless_a_program_was_demanded(tmp_path):
    def start(command, _slot, _workers):
        code = "import sys; sys.exit(3)"
        return subprocess.Popen([sys.executable, "-c", code, *command])

    for form, now in (("auto", "processes"), ("program", "program")):
        sweep = replace(sweep_of(tmp_path / form, [[], []], form=form), form="program")
        sweep.folder.mkdir(parents=True)
        sweep.save()
        with restored_signals():
            assert train_all(sweep, [], start) == 1
        sweep = read_sweep(sweep.folder)
        assert sweep.form == now
        assert [trial.failed for trial in sweep.trials] == ["ended with exit code 3"] * 2


# Several processes and hosts.


def test_one_process_at_a_time_claims_a_trial_and_a_dead_claim_is_taken_over(tmp_path, monkeypatch):
    with claims.claimed(tmp_path, "trial_000") as mine:
        assert mine and claims.is_claimed(tmp_path, "trial_000")
        with claims.claimed(tmp_path, "trial_000") as other:
            assert not other
        assert not claims.is_claimed(tmp_path, "trial_001")
    assert not claims.is_claimed(tmp_path, "trial_000")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = claims.socket.gethostname()
    claims.create(tmp_path / "claims" / "trial_000.1", f"{host} {ended.pid}")
    assert not claims.is_claimed(tmp_path, "trial_000")
    # A process of another host is alive as long as it renews its claim.
    claims.create(tmp_path / "claims" / "trial_000.2", f"other {ended.pid}")
    assert claims.is_claimed(tmp_path, "trial_000")
    old = time.time() - 2 * claims.STALE
    os.utime(tmp_path / "claims" / "trial_000.2", (old, old))
    assert not claims.is_claimed(tmp_path, "trial_000")
    # Whoever has an old list of the files does not get a claim that was made meanwhile.
    monkeypatch.setattr(claims, "claims_of", lambda folder, run: [])
    with claims.claimed(tmp_path, "trial_000") as mine:
        assert not mine


def test_the_proposals_of_optuna_are_shared_through_the_folder(tmp_path):
    pytest.importorskip("optuna")
    keys = {RATE: {"log_uniform": [1e-4, 0.1]}, "seed": [1, 2]}
    new = sweep_of(tmp_path, keys=keys, trials=2, sampler="optuna")
    new.folder.mkdir(parents=True)
    new.save()
    new = read_sweep(new.folder)
    one, same_one = propose(new), propose(new)  # as two processes do at the same time
    assert one == same_one and len(one.trials) == 1 and one.may_propose()
    both = propose(one)
    assert len(both.trials) == 2 and not both.may_propose()
    assert list(both.due()[0]) == ["trial_000", "trial_001"]
    (new.folder / "trial_000.json").write_text("{}")
    with pytest.raises(UserError, match=r"trial_000\.json: is not what a sweep wrote"):
        read_sweep(new.folder)


def test_an_array_of_slurm_has_the_trials_that_are_left(tmp_path):
    sweep = sweep_of(tmp_path, [[(9, 0.5)], [], [(9, 0.1)], []], workers=2, engine="slurm")
    sweep.folder.mkdir(parents=True)
    path = engines.write_array(sweep, ["python", "sweep.py"])
    text = path.read_text()
    assert "#SBATCH --array=1,3%2\n" in text
    last = f'exec python sweep.py --trial "$SLURM_ARRAY_TASK_ID" {sweep.folder}'
    assert text.splitlines()[-1] == last
    subprocess.run(["bash", "-n", path], check=True)


# Whole sweeps, in processes.


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
    [(out, err)] = finished([start(folder, *arguments, program="sweep.py")], 600, code)
    assert "Traceback" not in out + err, err
    return out, err


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


@pytest.mark.torture
def test_a_survivor_of_halving_equals_the_run_that_was_never_paused(whole, tmp_path):
    write(tmp_path, {"keys": RATES, "workers": 2, "halving": {"first": 1, "factor": 2}})
    out, _ = run_sweep(tmp_path, "-c", "small.json", "grid.json")
    sweep = read_sweep(tmp_path / "saved/Small/grid")
    assert sorted(trial.epochs for trial in sweep.trials) == [1, 1, 2, 4]
    states = [sweep.state(group.trials[0]) for group in sweep.ranked()]
    assert states == ["finished", "stopped", "stopped", "stopped"]
    assert "paused after epoch 1: test_loss" in out
    best = sweep.ranked()[0].trials[0]
    same(sweep.run_dir(best), whole / best.name)


@pytest.mark.slow
def test_two_processes_train_one_sweep_and_an_array_of_slurm_trains_one_trial(whole, tmp_path):
    write(tmp_path, {"keys": RATES, "engine": "slurm", "halving": {"first": 4}})
    out, _ = run_sweep(tmp_path, "-c", "small.json", "grid.json")
    script = tmp_path / "saved/Small/grid/array.sh"
    assert out.splitlines()[-1] == "Submit the trials: sbatch saved/Small/grid/array.sh"
    environment = os.environ | {"SLURM_ARRAY_TASK_ID": "2", "XDG_CACHE_HOME": str(tmp_path / "c")}
    subprocess.run(["bash", script], check=True, env=environment, cwd=tmp_path, timeout=300)
    done = [trial.finished for trial in read_sweep(script.parent).trials]
    assert done == [False, False, True, False]
    write(tmp_path, {"keys": RATES, "halving": {"first": 4}, "form": "processes"})
    content = json.loads((script.parent / "sweep.json").read_text())
    content["spec"]["engine"] = "local"
    (script.parent / "sweep.json").write_text(json.dumps(content))
    both = [start(tmp_path, "--resume", script.parent, program="sweep.py") for _ in range(2)]
    outputs = "".join(out for out, _ in finished(both, 300))
    for name in ("trial_000", "trial_001", "trial_003"):
        assert f"{name} starts" in outputs and f"{name} finished after epoch 4" in outputs
    assert "trial_002 starts" not in outputs
    for trial in read_sweep(script.parent).trials:
        same(script.parent / trial.name, whole / trial.name)


@pytest.mark.slow
def test_a_sweep_through_ray_on_this_machine(whole, tmp_path):
    pytest.importorskip("ray")
    write(tmp_path, {"keys": RATES, "engine": "ray", "workers": 2})
    out, _ = run_sweep(tmp_path, "-c", "small.json", "grid.json")
    assert out.count("finished after epoch 4") == 4
    for trial in read_sweep(tmp_path / "saved/Small/grid").trials:
        same(tmp_path / "saved/Small/grid" / trial.name, whole / trial.name)


@pytest.mark.slow
def test_trials_are_normal_runs_and_the_best_config_trains(whole):
    folder = whole.parents[2]
    best = read_sweep(whole).ranked()[0].trials[0].name
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


@pytest.mark.torture
def test_a_program_that_is_killed_continues_and_its_trials_have_the_values_of_single_runs(
    whole, tmp_path
):
    folder = tmp_path / "saved/Small/grid"
    program = folder / "program_000-003"

    def until_an_epoch(process):
        wait_for_line(process, "program_000-003 starts with 4 trials")
        wait_until(lambda: [*program.glob("checkpoint-epoch_1.params")])

    trials = ended_early(tmp_path, {"form": "program"}, until_an_epoch, signal.SIGKILL)
    assert not any(trial.over for trial in trials)
    out, _ = run_sweep(tmp_path, "-c", "small.json", "grid.json")
    assert "program_000-003 continues with 4 trials" in out and "trial_003 finished after" in out
    assert "trial_003" in (folder / "comparison.html").read_text()
    for trial, alone in zip(read_sweep(folder).trials, read_sweep(whole).trials, strict=True):
        assert trial.finished and len(trial.scores) == len(alone.scores) == 4
        for (epoch, value), (other, expected) in zip(trial.scores, alone.scores, strict=True):
            assert epoch == other and value == pytest.approx(expected, rel=1e-4)
    config, best = best_config(read_sweep(folder)), best_config(read_sweep(whole))
    assert config["optimizer"] == best["optimizer"] and config["training"] == best["training"]
    code, out, _ = call(tmp_path, "--evaluate", program)
    value, expected = json.loads(out)["metrics"], rows_of(whole / "trial_001")[-1]["test_loss"]
    assert code == 0 and value["test_loss/1"] == pytest.approx(expected, rel=1e-4)
    code, out, _ = run_train(tmp_path, "--resume", program, "training.epochs=5")
    assert code == 0 and "Changed: training.epochs: 4 -> 5" in out


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
        assert ranks(sweep) == [[1], [0]]
    out, _ = run_sweep(tmp_path, "--resume", sweep.folder)
    assert "starts" not in out
    out, _ = run_sweep(tmp_path, "--resume", sweep.folder, "--retry")
    assert "trial_000 starts" in out and "trial_001" not in out


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


def ended_early(folder, spec, begun, number):
    """The trials of a sweep that is sent a signal once `begun` returns. On a busy machine they may
    all be over by then; so the sweep is started again."""
    for _ in range(5):
        write(folder, {"keys": RATES} | spec)
        process = start(folder, "-c", "small.json", "grid.json", program="sweep.py")
        begun(process)
        own = children(process)
        process.send_signal(number)
        finished([process], code=None)
        wait_until(lambda own=own: not any(Path(f"/proc/{pid}/cwd").exists() for pid in own))
        trials = read_sweep(folder / "saved/Small/grid").trials
        if not all(trial.over for trial in trials):
            assert process.returncode == (75 if number == signal.SIGINT else -number)
            return trials
        shutil.rmtree(folder / "saved")
    raise AssertionError("the trials were over before the signal")


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.torture)]
)
def test_a_sweep_that_is_killed_or_stopped_continues_exactly(whole, tmp_path, number):

    def until_the_third(process):
        wait_for_line(process, "finished")
        until_steps(tmp_path, "trial_002")

    trials = ended_early(tmp_path, {"workers": 2}, until_the_third, number)
    folder = tmp_path / "saved/Small/grid"
    done = [trial.name for trial in trials if trial.finished]
    assert done
    arguments = ("-c", "small.json", "grid.json")
    if number == signal.SIGINT:
        folder = folder.rename(tmp_path / "moved")
        arguments = ("--resume", folder)
    out, _ = run_sweep(tmp_path, *arguments)
    assert not any(f"{name} " in out for name in done)
    for trial in read_sweep(folder).trials:
        assert trial.finished
        same(folder / trial.name, whole / trial.name)
