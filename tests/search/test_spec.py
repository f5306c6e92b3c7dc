"""The spec of a sweep: which trials it means, and its mistakes."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import sweep
from search.checks import checked_sweep
from search.spec import Optuna, parse_spec, planned, read_spec, to_check
from tests.processes import captured
from tests.test_resume import SMALL
from utils import UserError

LR = {"optimizer.args.lr": {"log_uniform": [1e-4, 1e-1]}}


def spec_of(**given):
    return parse_spec(given, "grid.json", "grid")


def test_a_grid_has_every_combination_in_order():
    trials = planned(spec_of(keys={"seed": [1, 2], "model.args.dims": [[8], [16, 8]]}))
    assert trials == [
        {"seed": seed, "model.args.dims": dims} for seed in (1, 2) for dims in ([8], [16, 8])
    ]


def test_variants_are_crossed_with_the_other_keys_and_pairs_share_the_drawn_values():
    variants = {"sam": {"update": "sam"}, "lion": {"optimizer": "lion", "seed": 3}}
    grid = spec_of(keys={"optimizer.args.lr": [0.1, 0.2]}, variants=variants)
    assert [trial["variant"] for trial in planned(grid)] == ["sam", "sam", "lion", "lion"]
    lion = planned(grid)[-1]
    # The variant is set first, so that the keys can change what it sets.
    expected = [("optimizer", "lion"), ("seed", 3), ("optimizer.args.lr", 0.2)]
    assert list(grid.overrides(lion).items()) == expected
    drawn = planned(spec_of(keys=LR, variants=variants, trials=3))
    assert len(drawn) == 6
    for sam, lion in zip(drawn[::2], drawn[1::2], strict=True):
        assert sam == lion | {"variant": "sam"}
    alone = planned(spec_of(variants=variants))
    assert alone == [{"variant": "sam"}, {"variant": "lion"}]


def test_labels_name_the_difference_between_trials():
    keys = {"optimizer.args.lr": [0.1], "model.args.dims": [[8]], "loss": ["mse"]}
    spec = spec_of(keys=keys, variants={"sam": {}})
    assert spec.label(planned(spec)[0]) == "sam, lr=0.1, dims=[8], loss=mse"
    same_ends = spec_of(keys={"optimizer.0.args.lr": [0.1], "optimizer.1.args.lr": [0.2]})
    expected = "optimizer.0.args.lr=0.1, optimizer.1.args.lr=0.2"
    assert same_ends.label(planned(same_ends)[0]) == expected.replace("optimizer.", "")


def test_random_values_depend_on_the_seed_and_the_number_of_the_trial_alone():
    keys = LR | {"loader.batch_size": [32, 64, 128]}
    first, more, other = (
        planned(spec_of(keys=keys, trials=n, seed=seed)) for n, seed in ((5, 0), (9, 0), (5, 1))
    )
    assert more[:5] == first == planned(spec_of(keys=keys, trials=5))
    assert not any(trial in other for trial in first)
    assert len({trial["optimizer.args.lr"] for trial in more}) == 9


@pytest.mark.parametrize("kind", ["uniform", "log_uniform"])
def test_the_distribution_of_a_range(kind):
    trials = planned(spec_of(keys={"seed": {kind: [0.001, 10]}}, trials=2000))
    values = np.sort([trial["seed"] for trial in trials])
    assert values[0] >= 0.001 and values[-1] <= 10
    shares = np.log(values / 0.001) / np.log(10_000) if kind == "log_uniform" else values / 10
    # The statistic of Kolmogorov and Smirnov, at its 1 % point.
    assert np.abs(shares - np.arange(2000) / 2000).max() < 1.63 / np.sqrt(2000)


MISTAKES = {
    "keys: must name the keys of the config that vary": {},
    "keys.seed: the list is empty": {"keys": {"seed": []}},
    "keys.seed: 2 is in the list twice": {"keys": {"seed": [2, 2]}},
    "keys.seed: must be a list of values, or a range": {"keys": {"seed": 3}},
    "keys.seed: no range 'log_unifrom'; did you mean 'log_uniform'?": {
        "keys": {"seed": {"log_unifrom": [1, 2]}}
    },
    "keys.seed: log_uniform: must begin above 0, found [0, 1]": {
        "keys": {"seed": {"log_uniform": [0, 1]}},
        "trials": 2,
    },
    "keys.seed: uniform: the range [2, 1] is empty; low must be below high": {
        "keys": {"seed": {"uniform": [2, 1]}},
        "trials": 2,
    },
    "keys.seed: uniform: must be [low, high], two finite numbers": {
        "keys": {"seed": {"uniform": [2]}}
    },
    "keys.seed: integer: must be two whole numbers": {"keys": {"seed": {"integer": [1, 2.5]}}},
    'keys.seed: a grid has no ranges, found {"uniform": [1, 2]}; name its values in a list, or '
    'draw from it with "trials": 20': {"keys": {"seed": {"uniform": [1, 2]}}},
    "trials: is missing; say how many random draws": {"keys": LR, "sampler": "random"},
    "trials: a grid has one trial for every combination": {
        "keys": {"seed": [1]},
        "trials": 3,
        "sampler": "grid",
    },
    "trials: must be at least 1, got 0": {"keys": LR, "trials": 0},
    'sampler: found "bayes"; allowed: "auto", "grid", "random", "optuna"': {
        "keys": LR,
        "sampler": "bayes",
    },
    "seeed: no such key; did you mean 'seed'?": {"keys": LR, "trials": 3, "seeed": 1},
    "optimizer.args.lr: no such key (name, keys, variants, sampler, trials, seed, form, workers, "
    "engine, halving); "
    'did you mean "keys": {"optimizer.args.lr": ...}?': {"optimizer.args.lr": [1]},
    "name: must be usable as a folder name, found": {"keys": {"seed": [1]}, "name": "a/b"},
    "halving.frist: no such key; did you mean 'first'?": {
        "keys": {"seed": [1]},
        "halving": {"frist": 1},
    },
    "halving: must be an object or null, found true": {
        "keys": {"seed": [1]},
        "halving": True,
    },
    "halving.factor: must be at least 2, got 1": {"keys": {"seed": [1]}, "halving": {"factor": 1}},
    "keys.training.epochs: all trials of successive halving have the same": {
        "keys": {"training.epochs": [1]},
        "halving": {},
    },
    "keys.optimizer: it replaces the node that keys.optimizer.args.lr changes; name": {
        "keys": LR | {"optimizer": ["adamw", "lion"]},
        "trials": 2,
    },
    "keys.seed: it replaces the node that variants.a.seed changes": {
        "keys": {"seed": [1, 2]},
        "variants": {"a": {"seed": 3}},
    },
    "variants.a: must be an object, found 3": {"variants": {"a": 3}},
    "variants.a.title: title is the same for all trials": {"variants": {"a": {"title": "b"}}},
    'engine: found "pbs"; allowed: "local", "slurm", "ray"': {"keys": LR, "engine": "pbs"},
    "keys.checkpoint.monitor: checkpoint is the same for all trials; set it in the config": {
        "keys": {"checkpoint.monitor": ["test_loss"]}
    },
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_of_a_spec(message):
    with pytest.raises(UserError) as error:
        spec_of(**MISTAKES[message])
    assert f"grid.json: {message}" in str(error.value)


def test_all_mistakes_of_a_spec_are_found_at_once(tmp_path):
    path = tmp_path / "grid.json"
    path.write_text('{"keys": {"seed": [], "title": ["a"]}, "wrokers": 2, "trials": "many"}')
    with pytest.raises(UserError) as error:
        read_spec(path)
    assert "did you mean 'workers'?" in str(error.value) and 'found "many"' in str(error.value)
    path.write_text('{"keys": {"seed": [], "title": ["a"]}}')
    with pytest.raises(UserError) as error:
        read_spec(path)
    assert len(str(error.value).splitlines()) == 2
    path.write_text("{keys}")
    with pytest.raises(UserError, match=r"grid.json: line 1, column 2: not JSON"):
        read_spec(path)


def checked(tmp_path, spec, **changes):
    (tmp_path / "small.json").write_text(json.dumps({**SMALL, **changes}))
    return checked_sweep(tmp_path / "small.json", (), spec)


def test_the_config_is_checked_with_the_values_of_all_trials(tmp_path):
    keys = {
        "optimizer.args.lrr": [0.1],
        "optimzer.args.lr": [0.1],
        "loader.batch_size": [64, -1],
        "model.args.dims": [[8], ["a"]],
    }
    with pytest.raises(UserError) as error:
        checked(tmp_path, spec_of(keys=keys))
    message = str(error.value)
    assert "small.json: optimzer: no such key; did you mean 'optimizer'?" in message
    assert "small.json: optimizer.args.lrr: adamw has no such argument; did you mean" in message
    assert "batch_size: must be at least 1, got -1 (trial_002, trial_003)" in message
    assert "(trial_001, trial_003)" in message  # the dims


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "strange.loss"}, "strange.loss' would import code"),
        ({"optimizer": {"name": "sgd", "args": {"lr": 0.1}}}, "would import code"),
        ({"checkpoint": {"monitor": "test_loss", "dir": "~/runs"}}, "outside of this config's f"),
        ({"logging": {"trackers": [{"name": "jsonl", "args": {"file": "/x"}}]}}, "is written out"),
    ],
)
def test_a_config_that_the_user_did_not_name_reaches_nothing_else(tmp_path, changes, message):
    config = {"checkpoint": {"monitor": "test_loss"}, **SMALL, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "grid.json").write_text('{"keys": {"seed": [1, 2]}}')
    lines = ["from training.base import Optimizer", "import missing", "def sgd(lr) -> Optimizer: 1"]
    (tmp_path / "strange.py").write_text("\n".join(lines))  # its sgd would replace Rawtree's
    code, _, err = captured(tmp_path, lambda: sweep.main(["grid.json", "--check"]))
    assert code == 2 and message in err, err
    assert not (tmp_path / "saved").exists()


@pytest.mark.slow
def test_a_sweep_needs_a_metric_that_is_known_where_trials_pause(tmp_path):
    seeds = {"seed": [1, 2]}
    with pytest.raises(UserError, match=r"checkpoint.monitor: no metric says which"):
        checked(tmp_path, spec_of(keys=seeds))
    every = {"training": {"epochs": 4, "eval_every": 2}, "checkpoint": {"monitor": "test_loss"}}
    with pytest.raises(UserError, match=r"training.eval_every: must divide halving.first, 1"):
        checked(tmp_path, spec_of(keys=seeds, halving={}), **every)
    epochs = spec_of(keys={"training.epochs": [4, 1]})
    with pytest.raises(UserError, match=r"eval_every: must be at most training.epochs, 1, .* 2"):
        checked(tmp_path, epochs, **every)
    by_steps = {"training": {"epochs": None, "max_steps": 25}} | {"checkpoint": every["checkpoint"]}
    assert checked(tmp_path, spec_of(keys=seeds), **by_steps).epochs is None
    with pytest.raises(UserError, match=r"training.epochs: is null, and halving needs a number"):
        checked(tmp_path, spec_of(keys=seeds, halving={}), **by_steps)
    with pytest.raises(UserError, match=r"checkpoint.monitor"):
        checked(tmp_path, spec_of(keys=seeds), checkpoint={"monitor": "test_los"})
    made = checked(tmp_path, spec_of(keys=seeds), loader={"val_size": 40, "batch_size": 64})
    assert (made.monitor, made.sign, str(made.folder)) == ("val_loss", 1, "saved/Small/grid")
    at_home = {"monitor": "test_loss", "dir": "~/runs"}
    made = checked(tmp_path, spec_of(keys=seeds), checkpoint=at_home)
    assert made.folder == Path.home() / "runs" / "Small" / "grid"


@pytest.mark.slow
def test_trials_are_one_program_where_they_differ_only_in_numbers_of_the_step(tmp_path):
    monitored = {"checkpoint": {"monitor": "test_loss"}}
    keys = {"optimizer.args.lr": [0.1, 0.01], "seed": [1, 2], "loss.args.label_smoothing": [0, 0.1]}
    made = checked(tmp_path, spec_of(keys=keys), **monitored)
    assert (made.form, made.why) == ("program", "")
    demanded = spec_of(keys={"seed": [1, 2], "loader.batch_size": [32, 64]}, form="program")
    with pytest.raises(UserError) as error:
        checked(tmp_path, demanded, callbacks=["confusion_matrix"], **monitored)
    assert "form: the trials cannot run as one program; change that, or" in str(error.value)
    assert "trials that run by themselves: callbacks (add callbacks=[])" in str(error.value)
    with pytest.raises(UserError) as error:
        checked(tmp_path, demanded, **monitored)
    assert "training.vary.loader.batch_size: only numbers of model, loss," in str(error.value)


@pytest.mark.parametrize(
    ("why", "spec", "changes"),
    [
        ("", {"keys": LR, "trials": 2, "form": "processes"}, {}),
        ("workers: 2", {"keys": LR, "trials": 2, "workers": 2}, {}),
        ("halving", {"keys": LR, "trials": 2, "halving": {}}, {}),
        ("keys: there is only one", {"keys": LR, "trials": 1}, {}),
        ("variants", {"keys": LR, "trials": 2, "variants": {"a": {}}}, {}),
        ('found ["relu", "gelu"]', {"keys": {"model.args.activation": ["relu", "gelu"]}}, {}),
        ("training.max_seconds", {"keys": LR, "trials": 2}, {"training": {"max_seconds": 9}}),
        ("optimizer.args.momentum cannot all", {"keys": {"optimizer.args.momentum": [0, 0.9]}}, {}),
    ],
)
def test_other_trials_are_processes_and_the_reason_is_printed(tmp_path, why, spec, changes):
    optimizer = {"name": "sgd", "args": {"lr": 0.1}}
    changes = {"checkpoint": {"monitor": "test_loss"}, "optimizer": optimizer} | changes
    made = checked(tmp_path, spec_of(**spec), **changes)
    assert made.form == "processes" and why in made.why and bool(why) == bool(made.why)
    assert made.why in made.form_text()


def test_optuna_is_only_needed_where_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    planned(spec_of(keys=LR, trials=2))
    with pytest.raises(UserError, match="optuna is not installed; install it"):
        Optuna(spec_of(keys=LR, trials=2, sampler="optuna"))
    assert len(to_check(spec_of(keys=LR | {"seed": [1, 2, 3]}, trials=2, sampler="optuna"))) == 4


def test_optuna_learns_from_the_scores_and_proposes_the_same_again():
    pytest.importorskip("optuna")
    keys = LR | {"model.args.dims": [[8], [16]], "loader.batch_size": {"integer": [8, 16]}}
    spec = spec_of(keys=keys, trials=40, sampler="optuna", variants={"a": {}, "b": {}})
    results = []

    def proposed():
        sampler = Optuna(spec)
        for result in results:
            sampler.tell(*result)
        return sampler.ask(len(results))

    for number in range(40):
        values = proposed()
        assert values == proposed()
        assert 1e-4 <= values["optimizer.args.lr"] <= 1e-1 and values["variant"] in "ab"
        assert values["model.args.dims"] in ([8], [16])
        assert values["loader.batch_size"] in range(8, 17)
        far = abs(np.log10(values["optimizer.args.lr"]) + 2)  # the best rate is 0.01
        results.append((values, None if number in (3, 4) else far, number == 3))
    late = [abs(np.log10(values["optimizer.args.lr"]) + 2) for values, _, _ in results[20:]]
    assert np.median(late) < 0.3  # of random values, 0.75
