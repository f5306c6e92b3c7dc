"""Reading a config file and overriding its values."""

import pytest

from utils import UserError
from wiring.config import override, read


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"title": "a",\n  "seed": }', r"config.json: line 2, column 11: not JSON"),
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


def test_an_override_does_not_change_its_argument():
    config = {"a": {"b": 1}}
    override(config, "a.b=2")
    assert config == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "path.to.key=value"),
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
