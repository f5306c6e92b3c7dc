"""The command that prepares text once: the same tokens as `text`, restartable, in parallel."""

import json
import subprocess
import sys

import numpy as np
import pytest

from data_loader import tokenize
from data_loader.base import loaded
from data_loader.stories import written
from data_loader.text import text
from data_loader.tokenizers.saved import tokenizer_file
from data_loader.tokens import tokens
from tests.processes import ROOT


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a few files of stories; each file has several parts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("data_loader.documents.SIZE", 2000)
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
    assert "lines.jsonl: line 31: 'body' must be a text, got 1" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["<|endoftext|>", "<|endoftext|>\n", "<|endoftext|>\n\n"])
def test_a_file_may_end_with_a_separator_and_a_line_break(folder, ending):
    """Also if that is where one of its parts ends."""
    (folder / "end.txt").write_text("a long document\n" * 200 + "<|endoftext|>b\n" * 150 + ending)
    run("end.txt", "--out", "out")
    about = json.loads((folder / "out" / "tokens.json").read_text())
    assert about["tokens"]["train"] + about["tokens"]["val"] > 16 * 200 + 2 * 149


def part_of(node):
    from wiring.nodes import Nodes

    return Nodes().part("tokenizer", node, "tokenizer")


def test_a_single_document_is_cut_as_text_cuts_it(folder):
    (folder / "one.txt").write_text("".join(f"line {i}\n" for i in range(200)))
    run("one.txt", "--out", "out", "--tokenizer", "characters")
    prepared = loaded(tokens("out/train.bin", "out/val.bin", length=8))
    for key, dataset in loaded(text("one.txt", length=8)).items():
        np.testing.assert_array_equal(arrays(prepared[key]), arrays(dataset))


def test_a_bpe_of_a_single_document_is_trained_on_its_part_for_training(folder):
    pytest.importorskip("tokenizers", reason="optional")
    lines = "".join(f"line {i} of many lines\n" for i in range(300))
    (folder / "one.txt").write_text(lines + 60 * "zzyzx qqq\n")  # only in the validation part
    run("one.txt", "--out", "out", "--tokenizer", "bpe", "--vocab-size", "300")
    part = part_of({"name": "bpe", "args": {"vocab_size": 300}})
    at_once = text("one.txt", length=8, tokenizer=part)
    assert (folder / "out" / "tokenizer.json").read_text() == at_once.tokenizer.to_json()


class Killed(BaseException):
    """Stands for a signal that ends the process."""


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_command_that_was_killed_continues_to_the_same_files(folder, monkeypatch, after):
    run("texts", "--out", "whole")
    written_parts, write = [], tokenize.write_part

    def killed_after(job, **settings):
        if len(written_parts) == after:
            raise Killed
        written_parts.append(job[1])
        write(job, **settings)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(tokenize, "write_part", killed_after)
        run("texts", "--out", "out")
    assert not (folder / "out" / "train.bin").exists()
    again = []
    monkeypatch.setattr(
        tokenize, "write_part", lambda job, **s: again.append(job[1]) or write(job, **s)
    )
    run("texts", "--out", "out")
    assert not set(again) & set(written_parts) and len(again) + after > 10
    for file in ("train.bin", "val.bin", "tokens.json", "tokenizer.json"):
        assert (folder / "out" / file).read_bytes() == (folder / "whole" / file).read_bytes()
    assert not (folder / "out" / "parts").exists()


def test_what_a_killed_command_left_to_delete_is_not_used(folder, monkeypatch):
    """The kill comes when the parts are being deleted."""
    delete = tokenize.shutil.rmtree

    def killed(path, ignore_errors=False):
        if not ignore_errors:
            (path / "plan.json").unlink()
            raise Killed
        delete(path, ignore_errors=True)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(tokenize.shutil, "rmtree", killed)
        run("texts", "--out", "out", "--tokenizer", "characters")
    run("texts", "--out", "out")
    run("texts", "--out", "whole")
    for file in ("train.bin", "val.bin", "tokens.json", "tokenizer.json"):
        assert (folder / "out" / file).read_bytes() == (folder / "whole" / file).read_bytes()
    assert {path.name for path in (folder / "out").iterdir()} == {
        "train.bin", "val.bin", "tokens.json", "tokenizer.json"
    }  # fmt: skip


def test_a_folder_named_parts_of_the_user_is_refused_and_kept(folder, capsys):
    (folder / "out" / "parts").mkdir(parents=True)
    (folder / "out" / "parts" / "notes.md").write_text("mine")
    run("texts", "--out", "out", code=2)
    assert "out/parts: holds files of yours" in capsys.readouterr().err
    assert (folder / "out" / "parts" / "notes.md").read_text() == "mine"


def test_sets_that_another_tokenizer_made_do_not_stay(folder):
    run("texts", "--out", "out", "--test-size", "0.3")
    assert (folder / "out" / "test.bin").exists()
    run("texts", "--out", "out", "--tokenizer", "characters")
    assert not (folder / "out" / "test.bin").exists() and (folder / "out" / "val.bin").exists()


def test_parts_of_another_preparation_are_refused(folder, monkeypatch, capsys):
    monkeypatch.setattr(tokenize, "write_part", lambda *_, **__: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        run("texts", "--out", "out")
    run("texts", "--out", "out", "--val-size", "0.2", code=2)
    assert "holds parts of another preparation" in capsys.readouterr().err
    (folder / "texts" / "1.txt").write_text("changed")
    run("texts", "--out", "out", code=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.txt"], "none.txt: no such file"),
        (["texts", "--val-size", "1"], "--val-size: must be at least 0 and below 1, got 1.0"),
        (["texts", "--tokenizer", "bpe", "--vocab-size", "0"], "--vocab-size: "),
        (["texts", "--vocab-size", "99"], "--vocab-size: is the size of a bpe to train"),
        (["texts", "--processes", "0"], "--processes: must be at least 1, got 0"),
        (["texts", "--tokenizer", "byts"], "byts: no such file"),
        (["texts", "--tokenizer", "texts/0.txt"], "0.txt: is no tokenizer"),
        (["bad.txt"], "bad.txt: byte 2 (0xff, in line 1) is not UTF-8"),
    ],
)
def test_a_mistake_is_one_message(folder, capsys, words, message):
    (folder / "bad.txt").write_bytes(b"ab\xff")
    assert tokenize.main([*words, "--out", "out"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_processes_of_the_command_write_the_same_files(folder, monkeypatch):
    monkeypatch.setattr("data_loader.documents.SIZE", 2**24)
    run("texts", "--out", "one")
    command = [sys.executable, "-m", "data_loader.tokenize", str(folder / "texts")]
    command += ["--out", str(folder / "two"), "--processes", "2"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120, capture_output=True)
    for file in ("train.bin", "val.bin"):
        assert (folder / "one" / file).read_bytes() == (folder / "two" / file).read_bytes()
    about = json.loads((folder / "two" / "tokens.json").read_text())
    assert about["dtype"] == "uint16" and about["end_of_text"] == 256
    assert tokenizer_file(folder / "two" / "tokenizer.json").vocab_size == 257
