"""The command that prepares text once: the same tokens as `text`, restartable, in parallel."""

import json
import subprocess
import sys

import numpy as np
import pytest

from data_loader import tokenize
from data_loader.base import Tokenizer, loaded
from data_loader.stories import written
from data_loader.text import text
from data_loader.tokenizers.saved import tokenizer_file
from data_loader.tokens import tokens
from tests.processes import ROOT


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a few files of stories; each file has several parts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("data_loader.text.SIZE", 2000)
    (tmp_path / "texts").mkdir()
    stories = [document.text for document in written(0, 40)]
    for i in range(3):
        path = tmp_path / "texts" / f"{i}.txt"
        path.write_text("<|endoftext|>".join(stories[13 * i : 13 * i + 13]))
    return tmp_path


def run(*words, code=0):
    assert tokenize.main([*words, "--processes", "1"]) == code


def arrays(dataset):
    return dataset.stream.take(0, len(dataset.stream))


@pytest.mark.parametrize("name", ["bytes", "characters", "bpe"])
def test_the_files_have_the_tokens_that_text_makes(folder, name, capsys):
    if name == "bpe":
        pytest.importorskip("tokenizers", reason="optional")
    size = ["--vocab-size", "300"] if name == "bpe" else []
    run("texts", "--out", "out", "--tokenizer", name, *size, "--test-size", "0.2")
    paths = [str(folder / "out" / f"{name}.bin") for name in ("train", "val", "test")]
    prepared = tokens(*paths, length=32)
    part = {"name": name, "args": {"vocab_size": 300} if name == "bpe" else {}}
    at_once = text("texts", length=32, test_size=0.2, tokenizer=part_of(part))
    assert prepared.vocab_size == at_once.vocab_size and prepared.sizes == at_once.sizes
    assert prepared.bytes_per_token == pytest.approx(at_once.bytes_per_token)
    expected = loaded(at_once)
    for key, dataset in loaded(prepared).items():
        np.testing.assert_array_equal(arrays(dataset), arrays(expected[key]), err_msg=key)
    assert prepared.tokenizer.to_json() == at_once.tokenizer.to_json()
    assert "tokens in out/train.bin" in capsys.readouterr().out
    assert {path.name for path in (folder / "out").iterdir()} == {
        "train.bin", "val.bin", "test.bin", "tokens.json", "tokenizer.json"
    }  # fmt: skip


def test_the_lines_of_a_jsonl_file_are_documents(folder, capsys):
    """In parts of several lines, beside files of another kind."""
    files = sorted((folder / "texts").iterdir())
    texts = [one for file in files for one in file.read_text().split("<|endoftext|>")]
    lines = [json.dumps({"body": one}) + "\n" for one in texts]
    (folder / "lines.jsonl").write_text("".join(lines) + "\n")
    run("texts", "--out", "out")
    run("lines.jsonl", "--out", "of_lines", "--field", "body")
    for name in ("train.bin", "val.bin", "tokens.json"):
        assert (folder / "of_lines" / name).read_bytes() == (folder / "out" / name).read_bytes()
    lines[30] = '{"body": 1}\n'
    (folder / "lines.jsonl").write_text("".join(lines))
    run("lines.jsonl", "--out", "again", "--field", "body", code=2)
    found = "lines.jsonl: line 31: has no text under the key 'body', but {'body': 1}"
    assert found in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["<|endoftext|>", "<|endoftext|>\n", "<|endoftext|>\n\n"])
def test_a_file_may_end_with_a_separator_and_a_line_break(folder, ending):
    """Also if that is where one of its parts ends."""
    (folder / "end.txt").write_text("a long document\n" * 200 + "<|endoftext|>b\n" * 150 + ending)
    run("end.txt", "--out", "out")
    about = json.loads((folder / "out" / "tokens.json").read_text())
    assert about["tokens"]["train"] + about["tokens"]["val"] > 16 * 200 + 2 * 149


def part_of(node):
    from wiring.tree import Scope, built, read

    return built(read(Tokenizer, node, "tokenizer", Scope()), {}, [])


def test_the_file_of_a_tokenizer_in_place_of_its_name_is_an_error_with_the_form():
    from wiring.tree import Scope, read

    problem = str(read(Tokenizer, "out/tokenizer.json", "data.args.tokenizer", Scope()))
    assert problem.startswith("data.args.tokenizer: 'out/tokenizer.json' is a file")
    assert problem.endswith('{"name": "bpe", "args": {"file": "out/tokenizer.json"}}')


def test_a_single_document_is_cut_as_text_cuts_it(folder):
    (folder / "one.txt").write_text("".join(f"line {i}\n" for i in range(200)))
    run("one.txt", "--out", "out", "--tokenizer", "characters")
    prepared = loaded(tokens("out/train.bin", "out/val.bin", length=8))
    for key, dataset in loaded(text("one.txt", length=8)).items():
        np.testing.assert_array_equal(arrays(prepared[key]), arrays(dataset))


class Killed(BaseException):
    """Stands for a signal that ends the process."""


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_command_that_was_killed_continues_to_the_same_files(folder, monkeypatch, after):
    run("texts", "--out", "whole")
    written_parts, write = [], tokenize.write_part

    def killed_after(tokenizer, job):
        if len(written_parts) == after:
            raise Killed
        written_parts.append(job[0])
        write(tokenizer, job)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(tokenize, "write_part", killed_after)
        run("texts", "--out", "out")
    assert not (folder / "out" / "train.bin").exists()
    again = []
    monkeypatch.setattr(
        tokenize, "write_part", lambda *both: again.append(both[1][0]) or write(*both)
    )
    run("texts", "--out", "out")
    assert not set(again) & set(written_parts) and len(again) + after > 10
    for file in ("train.bin", "val.bin", "tokens.json", "tokenizer.json"):
        assert (folder / "out" / file).read_bytes() == (folder / "whole" / file).read_bytes()
    assert not list((folder / "out").glob(".parts-*"))


def test_sets_that_another_tokenizer_made_do_not_stay(folder):
    run("texts", "--out", "out", "--test-size", "0.3")
    assert (folder / "out" / "test.bin").exists()
    run("texts", "--out", "out", "--tokenizer", "characters")
    assert not (folder / "out" / "test.bin").exists() and (folder / "out" / "val.bin").exists()


def killed_after_one_part(monkeypatch, *words):
    write = tokenize.write_part

    def killed(tokenizer, job):
        if job[0].name == "1.npz":
            raise Killed
        write(tokenizer, job)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(tokenize, "write_part", killed)
        run(*words)


@pytest.mark.parametrize("change", ["an option", "a file"])
def test_parts_of_another_preparation_are_not_used(folder, monkeypatch, change):
    """They stay until a command has finished, so that the first one can still be continued."""
    killed_after_one_part(monkeypatch, "texts", "--out", "out", "--tokenizer", "characters")
    (kept,) = (folder / "out").glob(".parts-*")
    words = ["--tokenizer", "bytes" if change == "an option" else "characters"]
    if change == "a file":
        (folder / "texts" / "1.txt").write_text("changed<|endoftext|>twice")
    killed_after_one_part(monkeypatch, "texts", "--out", "out", *words)
    assert kept.exists()
    run("texts", "--out", "out", *words)
    run("texts", "--out", "whole", *words)
    for file in ("train.bin", "val.bin", "tokens.json", "tokenizer.json"):
        assert (folder / "out" / file).read_bytes() == (folder / "whole" / file).read_bytes()
    assert not list((folder / "out").glob(".parts-*"))


# What must not be read as text.


# Files of Windows.


def test_a_separator_that_is_nowhere_in_the_text_is_logged(folder, capsys, caplog):
    run("texts", "--out", "out", "--separator", "%%")
    assert "texts: the separator '%%' divides no file" in caplog.text
    caplog.clear()
    text("texts", length=8, separator="%%")
    assert "texts: the separator '%%' divides no file" in caplog.text
    caplog.clear()
    text("texts", length=8, separator="<|endoftext|>")
    assert not caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.txt"], "none.txt: no such file"),
        (["texts", "--val-size", "1"], "--val-size: must be at least 0 and below 1, got 1.0"),
        (["texts", "--tokenizer", "bpe", "--vocab-size", "0"], "--vocab-size: "),
        (["texts", "--vocab-size", "99"], "--vocab-size: is the size of a bpe to train"),
        (["texts", "--processes", "0"], "--processes: must be at least 1, got 0"),
        (
            ["texts", "--tokenizer", "byts"],
            "--tokenizer: byts: no such file; name the tokenizer.json of a run",
        ),
        (
            ["tiny.txt"],
            "tiny.txt: 4 characters are too few for the sets train, val; change",
        ),
        (["texts", "--tokenizer", "texts/0.txt"], "0.txt: is not a tokenizer"),
        (["bad.txt"], "bad.txt: byte 2 (0xff, in line 1) is not UTF-8"),
        (
            ["marked.txt"],
            "marked.txt: byte 3 (0x00, in line 1) is not UTF-8 text; convert the file",
        ),
        (
            ["wide.txt"],
            "wide.txt: byte 1 (0x00, in line 1) is not UTF-8 text; convert the file",
        ),
    ],
)
def test_a_mistake_is_one_message(folder, capsys, words, message):
    (folder / "tiny.txt").write_text("tiny")
    (folder / "bad.txt").write_bytes(b"ab\xff")
    (folder / "wide.txt").write_bytes("text".encode("utf-16-le"))
    (folder / "marked.txt").write_bytes(b"\xff\xfe" + "text".encode("utf-16-le"))
    assert tokenize.main([*words, "--out", "out"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_processes_of_the_command_write_the_same_files(folder, monkeypatch):
    monkeypatch.setattr("data_loader.text.SIZE", 2**24)
    run("texts", "--out", "one")
    command = [sys.executable, "-m", "data_loader.tokenize", str(folder / "texts")]
    command += ["--out", str(folder / "two"), "--processes", "2"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120, capture_output=True)
    for file in ("train.bin", "val.bin"):
        assert (folder / "one" / file).read_bytes() == (folder / "two" / file).read_bytes()
    about = json.loads((folder / "two" / "tokens.json").read_text())
    assert about["dtype"] == "uint16" and about["end_of_text"] == 256
    assert tokenizer_file(folder / "two" / "tokenizer.json").vocab_size == 257
