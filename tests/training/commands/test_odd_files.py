"""Files of a run that hold something other than what a run writes: what is odd is left out, or is
an error that names the file."""

import json

import pytest

from training.checkpoint.keeper import protected
from training.watching.metric_log import epoch_rows
from utils import UserError
from utils.files import parse_json, read_json

DEEP = "[" * 5000 + "]" * 5000
GOOD = {"epoch": 1, "step": 4, "test_loss": 0.5, "end_of_epoch": True}
ODD_ROWS = [{"epoch": "1"}, {"step": None}, {"step": True}, {"test_loss": "x"}, {"test_loss": [1]}]


def test_odd_rows_of_metrics_are_left_out(tmp_path):
    lines = [json.dumps(GOOD | odd) for odd in ODD_ROWS]
    lines.insert(3, json.dumps(GOOD | {"test_loss": None}))
    text = "\n".join([*lines, '{"end_of_epoch": true}', json.dumps(GOOD), ""])
    (tmp_path / "metrics.jsonl").write_text(text + "what a killed run had written of its last")
    found = epoch_rows(tmp_path, len(text))
    assert [row["test_loss"] for row in found[1:]] == [0.5]
    assert found[0]["test_loss"] != found[0]["test_loss"]  # null is NaN


@pytest.mark.parametrize("line", [DEEP, "7", "[]", "\ud800", "{}x", '{"end_of_epoch": tru}', ""])
def test_a_line_of_metrics_that_no_run_writes_is_an_error(tmp_path, line):
    text = f"{json.dumps(GOOD)}\n{line}\n"
    (tmp_path / "metrics.jsonl").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(
        UserError, match=r"metrics.jsonl, line 2: cannot be read: .*; restore the f"
    ):
        epoch_rows(tmp_path, 10**6)


@pytest.mark.parametrize("text", [DEEP, "5", '{"best": 5, "reading": null}', '{"best": [[[], 1]]}'])
def test_an_odd_file_of_the_evaluator_protects_all(tmp_path, text):
    (tmp_path / "evaluator.json").write_text(text)
    assert protected(tmp_path, {"a", "b"}) == {"a", "b"}


@pytest.mark.parametrize("content", [DEEP.encode(), b"{", b"\xff", b"9" * 5000, b"null", b"[]"])
def test_a_file_that_is_no_json_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"config.json: cannot be read: .*; restore the file"):
        read_json(tmp_path / "config.json")


def test_json_is_read_up_to_a_depth():
    assert parse_json("[" * 63 + "]" * 63)
    for levels in (65, 900, 10**5):
        with pytest.raises(ValueError, match="more than 64 levels deep"):
            parse_json('{"a":' * levels + "1" + "}" * levels)
