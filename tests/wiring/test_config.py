"""Reading a config file and overriding its values."""

import json
import typing

import pytest

from utils import UserError
from wiring import parts
from wiring.config import (
    NULL_IS_A_VALUE,
    leaves,
    override,
    read,
    read_layers,
    source_of,
    text_of_problems,
)
from wiring.keys import sections


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"title": "a",\n  "seed": }', r"config.json: line 2, column 11: not JSON"),
        (
            '{"title": "a",\n  "loader": {"batch_size": 8,\n\n',
            r"line 2: not JSON: the file ends before its last bracket is closed\n"
            r'  "loader": {"batch_size": 8,$',
        ),
        ('{"seed": 1', "line 1: not JSON: the file ends before its last bracket is closed"),
        ("\n", "config.json: the file is empty"),
        ('{"seed": 1, "seed": 2}', "'seed' occurs twice"),
        ("[1]", "must contain an object"),
        ('{"a": ' * 2000 + "1" + "}" * 2000, "config.json: it is nested more than 64 levels deep"),
        ("[" * 90 + "]" * 90, "it is nested more than 64 levels deep"),
        ('{"seed": -' + "1" * 5000 + "}", "config.json: it has an integer of thousands of digits"),
        ('{"a": "' + "x" * 10**5, r'line 1, column 7: not JSON: .*\n  {"a": "x{,73}\n'),
    ],
)
def test_the_message_names_the_place_in_a_bad_file(config_file, text, message):
    with pytest.raises(UserError, match=message):
        read(config_file(text))


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.json: there is no such file"):
        read(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        ("a.b=3", {"a": {"b": 1}}, {"a": {"b": 3}}),
        ("a.b=text", {}, {"a": {"b": "text"}}),
        ("a=[1, 2]", {"a": None}, {"a": [1, 2]}),
        ("a.1.b=true", {"a": [0, {"b": False}]}, {"a": [0, {"b": True}]}),
        ("a.args.lr=0.1", {"a": "adamw"}, {"a": {"name": "adamw", "args": {"lr": 0.1}}}),
        ("a=x=y", {}, {"a": "x=y"}),
    ],
)
def test_an_override_sets_its_value(text, before, after):
    assert override(before, text) == after


def test_an_override_of_the_arguments_of_a_default_part_names_it():
    text = "objective.args.views=flipped"
    part = {"name": "supervised", "args": {"views": "flipped"}}
    assert override({}, text) == {"objective": part}
    assert override({"objective": "mixup"}, text)["objective"]["name"] == "mixup"


def test_an_override_does_not_change_its_argument():
    config = {"a": {"b": 1}}
    override(config, "a.b=2")
    assert config == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "path.to.key=value"),
        ("a..0=1", "'a..0=1': an override has the form path.to.key=value"),
        (".b=1", "path.to.key=value"),
        ("b.=1", "path.to.key=value"),
        ("a.5=1", "no key or index '5' in"),
        ("b.c=1", "no key or index 'c' in 3"),
        ("a." + "9" * 5000 + "=1", "there is no key or index"),
        ("b=" + "9" * 5000, "an integer of thousands of digits"),
        ("b=" + "[" * 70 + "]" * 70, "more than 64 levels deep"),
        ('b={"c": 1, "c": 2}', "'c' occurs twice"),
    ],
)
def test_refuses_an_override_of_a_path_that_does_not_exist(text, message):
    with pytest.raises(UserError, match=message):
        override({"a": [1], "b": 3}, text)


def write(folder, **files):
    """Configs in a folder; the path of the first."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder / f"{next(iter(files))}.json"


@pytest.mark.parametrize(
    ("child", "expected"),
    [
        ({"training": {"epochs": 3}}, {"training": {"epochs": 3, "ema": 0.9}}),
        ({"training": None}, {"training": ...}),
        ({"training": {"ema": None}}, {"training": {"epochs": 2}}),
        ({"metrics": ["f1"]}, {"metrics": ["f1"]}),
        (
            {"model": {"args": {"dim": 8}}},
            {"model": {"name": "gpt", "args": {"dim": 8, "depth": 2}}},
        ),
        ({"model": {"name": "mlp"}}, {"model": {"name": "mlp"}}),
        ({"model": {"name": "gpt"}}, {}),
        ({"model": "mlp"}, {"model": "mlp"}),
        ({"schedule": {"args": {"end": 1}}}, {"schedule": {"name": "cosine", "args": {"end": 1}}}),
        ({"data": {"args": {"name": "b"}}}, {"data": {"name": "d", "args": {"name": "b", "n": 1}}}),
        ({"checkpoint": {"keep": None}}, {"checkpoint": {"keep": None}}),
        ({"augment": None}, {}),
        ({"training": {"precision": None}}, {}),
        ({"loader": {"prefetch": None, "batch_size": 8}}, {"loader": {"batch_size": 8}}),
        (
            {"loss": {"name": "a", "args": {"x": None}}},
            {"loss": {"name": "a", "args": {"x": None}}},
        ),
        (
            {"model": {"args": {"dim": None, "heads": None}}},
            {"model": {"name": "gpt", "args": {"depth": 2, "heads": None}}},
        ),
    ],
)
def test_a_config_extends_another(tmp_path, child, expected):
    base = {
        "model": {"name": "gpt", "args": {"dim": 4, "depth": 2}},
        "data": {"name": "d", "args": {"name": "a", "n": 1}},
        "training": {"epochs": 2, "ema": 0.9},
        "metrics": ["accuracy", "f1"],
        "schedule": "cosine",
        "checkpoint": {"keep": 3},
    }
    write(tmp_path / "configs", base=base)
    config = read(write(tmp_path / "mine", child={"extends": "../configs/base.json", **child}))
    assert config == {k: v for k, v in {**base, **expected}.items() if v is not ...}


def test_null_stays_where_it_is_a_value_and_not_the_default():
    kinds = {
        (section, name)
        for section, options in sections().items()
        for name, p in parts.arguments(options).items()
        if type(None) in typing.get_args(p.annotation) and p.default is not None
    }
    assert kinds == set(NULL_IS_A_VALUE)


def test_of_several_parents_later_ones_win_and_a_shared_one_comes_first(tmp_path):
    path = write(
        tmp_path,
        child={"extends": ["one.json", "two.json"], "seed": 4},
        one={"extends": "base.json", "title": "one", "loss": "mse", "run_name": "x"},
        two={"extends": "base.json", "loss": None},
        base={"title": "base", "seed": 1, "run_name": "base"},
    )
    assert read(path) == {"title": "one", "seed": 4, "run_name": "x"}


@pytest.mark.parametrize(
    ("parent", "message"),
    [
        ("no.json", r"child.json: extends: 'no.json': there is no such file \(.*no.json\)"),
        (["a.json"], r"b.json: extends: a.json -> b.json -> a.json is a circle"),
        ("child.json", "child.json: extends: child.json -> child.json is a circle"),
        (3, "child.json: extends: must be a path or a list of paths, found 3"),
        ([""], "child.json: extends: must be a path or a list of paths"),
        ("..", r"cannot be read"),
        ("list.json", r"list.json: must contain an object"),
        ("n0.json", "a config can have at most 100 files"),
    ],
)
def test_a_parent_that_cannot_be_used_is_named(tmp_path, parent, message):
    many = {f"n{i}": {"extends": f"n{i + 1}.json"} for i in range(120)}
    files = {"a": {"extends": "b.json"}, "b": {"extends": "a.json"}, "list": [], **many}
    with pytest.raises(UserError, match=message):
        read(write(tmp_path, child={"extends": parent}, **files))


def test_the_config_of_a_run_names_no_other_files(tmp_path):
    path = write(tmp_path, child={"extends": "base.json"}, base={"seed": 1})
    with pytest.raises(UserError, match=r"extends: .*does not name other files; remove it, name"):
        read(path, trusted=False)


def test_the_source_of_each_value_is_known(tmp_path):
    child = {"extends": "base.json", "loader": {"batch_size": 8}, "model": {"args": {"dim": 2}}}
    base = {
        "model": "gpt",
        "loader": {"batch_size": 4, "prefetch": 1},
        "callbacks": [{"name": "a"}],
        "training": {"vary": {"optimizer.args.lr": [1, 2]}},
    }
    overrides = ["callbacks.0.args.x=1", "training.epochs=3"]
    config, layers = read_layers(write(tmp_path, child=child, base=base), overrides)
    found = {path: source_of(path, layers) for path, _ in leaves(config)}
    base, child = str(tmp_path / "base.json"), str(tmp_path / "child.json")
    assert found == {
        "model.name": base,
        "model.args.dim": child,
        "loader.batch_size": child,
        "loader.prefetch": base,
        "callbacks": "command line",
        "training.vary.optimizer.args.lr": base,
        "training.epochs": "command line",
    }
    assert source_of("seed", layers) is None
    problems = ["loader.prefetch: bad", "loader.batch_size: bad", "training.epochs: bad", "x: bad"]
    sources = [
        line.split(":")[0] for line in text_of_problems(problems, "child.json", layers).split("\n")
    ]
    assert sources == [base, "child.json", "child.json", "child.json"]
