"""Text as data: documents, their division into sets, tokenizers, and the stories."""

import base64
import json
import re
import sys

import numpy as np
import pytest

from data_loader.base import loaded
from data_loader.loader import collate
from data_loader.stories import KINDS, THINGS, stories, written
from data_loader.text import (
    Given,
    corpus_of,
    documents_of,
    parts_of,
    pieces_of,
    text,
    text_of,
    tokenized,
)
from data_loader.tokenizers.bpe import Bpe, bpe
from data_loader.tokenizers.plain import CharacterTokenizer, characters
from data_loader.tokenizers.plain import bytes as bytes_part
from data_loader.tokenizers.saved import from_json, streamed, tokenizer_file
from utils import UserError

MIXED = "Grüße, 世界! 🙂\n\ndon't  stop 1234567"


def documents(texts, name="a.txt"):
    return documents_of(name, "<|endoftext|>".join(texts))


def divided(documents, shares, seed=0):
    (sets,) = corpus_of("a.txt", [Given(documents)], shares, seed).chosen()
    return sets


def texts_of(data, name):
    """The text of a set, with | where a document ends."""
    dataset = loaded(data)[name]
    x, y = next(dataset.read_batches([np.arange(len(dataset))], collate))
    x = x["tokens"] if isinstance(x, dict) else x
    ids = np.r_[x.ravel()[: dataset.labels], dataset.stream.take(dataset.labels, 1)]
    assert (y.ravel()[: dataset.labels] == ids[1:]).all() or dataset.boundary is not None
    pieces = np.split(ids, np.flatnonzero(ids == data.tokenizer.end_of_text) + 1)
    return "|".join(map(data.tokenizer.decode, pieces))


# Tokenizers.


@pytest.mark.parametrize("name", ["bytes", "characters", "bpe"])
def test_a_tokenizer_returns_the_text_also_as_it_is_stored_and_piece_by_piece(name):
    if name == "bpe":
        pytest.importorskip("tokenizers", reason="optional")
    part = {"bytes": bytes_part(), "characters": characters()}.get(name) or bpe(vocab_size=300)
    tokenizer = part.train([MIXED]) if hasattr(part, "train") else part
    ids = tokenizer.encode(MIXED)
    assert ids.dtype == np.uint16 and ids.max() < tokenizer.vocab_size
    again = from_json(tokenizer.to_json())
    assert (again.encode(MIXED) == ids).all() and again.vocab_size == tokenizer.vocab_size
    assert again.end_of_text == tokenizer.end_of_text < tokenizer.vocab_size
    with_end = [*ids.tolist(), tokenizer.end_of_text]
    assert again.decode(with_end) == MIXED
    for _ in range(3):  # long enough for the window of `streamed` to move
        ids = np.r_[ids, ids]
    pieces = list(streamed(tokenizer, ids))
    assert "".join(pieces) == MIXED * 8
    assert len(pieces) > 8 * 10 and not any("\ufffd" in piece for piece in pieces)
    with pytest.raises(UserError, match=rf"token 1 is {tokenizer.vocab_size}, outside"):
        tokenizer.decode([0, tokenizer.vocab_size])


@pytest.mark.parametrize("text", ["漢", "漢字" * 12, "é" * 20 + "aé", "é😀" * 9, "a" * 30])
def test_characters_of_several_byte_tokens_are_streamed_whole(text):
    """As Llama's tokenizer, which decodes each byte of an incomplete character as a replacement."""
    from tokenizers import Tokenizer, decoders, models

    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"a": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Bpe(tokenizer)
    pieces = list(streamed(tokenizer, tokenizer.encode(text)))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_an_unknown_character_is_named_with_its_place():
    tokenizer = characters().train(["abc\n", "de"])
    assert tokenizer.alphabet == "\nabcde"
    with pytest.raises(UserError, match=r"line 2, column 3: the character 'é' \(U\+00E9\)"):
        tokenizer.encode("abc\nabé")
    with pytest.raises(UserError, match=r"'a' is in the alphabet twice"):
        CharacterTokenizer("aba")
    assert characters("xyz").encode("zx").tolist() == [2, 0]


def test_what_is_no_tokenizer_is_an_error(tmp_path):
    deep = "[" * 20_000 + "]" * 20_000
    for content in ("[]", "3", "nothing", '{"type": "words"}', '{"type": "characters"}', deep):
        with pytest.raises(UserError, match=r"here: is not a tokenizer"):
            from_json(content, "here")
    with pytest.raises(UserError, match=r"is not a tokenizer .*surrogates not allowed"):
        from_json(r'{"type": "characters", "alphabet": "a\ud800"}')
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="but binary"):
        tokenizer_file(tmp_path / "binary.json")
    with pytest.raises(UserError, match="no such file"):
        tokenizer_file(tmp_path / "none.json")


@pytest.mark.parametrize("name", ["gpt2", "cl100k_base", "o200k_base"])
def test_a_tiktoken_file_encodes_as_tiktoken_does(tmp_path, name):
    pytest.importorskip("tokenizers", reason="optional")
    tiktoken = pytest.importorskip("tiktoken", reason="only a reference")
    from tiktoken._educational import bpe_train

    from data_loader.tokenizers.bpe import KNOWN

    known = [document.text for document in written(0, 12)]
    ranks = bpe_train("".join(known[:6]) + MIXED, 330, KNOWN[name][0], visualise=None)
    path = tmp_path / f"{name}.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for t, i in ranks.items()))
    reference = tiktoken.Encoding(
        name, pat_str=KNOWN[name][0], mergeable_ranks=ranks, special_tokens={}
    )
    tokenizer = tokenizer_file(path)
    assert tokenizer.end_of_text == KNOWN[name][1]["<|endoftext|>"]
    for each in [*known[6:], MIXED, "", " \r\n\n\tx HELLO'LL we'Re 007  "]:
        assert tokenizer.encode(each).tolist() == reference.encode(each)
        assert tokenizer.decode(tokenizer.encode(each)) == each
    path.rename(tmp_path / "own.tiktoken")
    with pytest.raises(UserError, match="set `pattern`, or give the file its published name"):
        tokenizer_file(tmp_path / "own.tiktoken")
    own = bpe(file=str(tmp_path / "own.tiktoken"), pattern=KNOWN[name][0])
    assert own.encode(MIXED).tolist() == reference.encode(MIXED) and own.end_of_text == 330
    for line in ("!! 2", "AAAA 99999999", "AAAA -1", "A" * 10_000 + " 1", "AAAA " + "9" * 5000):
        (tmp_path / "own.tiktoken").write_text(f"AAAA 1\n{line}\n")
        with pytest.raises(UserError, match=r"own\.tiktoken: line 2 is not a token in base64"):
            bpe(file=str(tmp_path / "own.tiktoken"), pattern=".")


def test_a_tokenizer_of_huggingface_loads_as_it_is(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="optional")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Metaspace(), tokenizers.decoders.ByteFallback()]
    )
    special = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=special)
    made.train_from_iterator([d.text for d in written(0, 20)], trainer)
    made.enable_truncation(8)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_file(tmp_path / "tokenizer.json")
    ids = tokenizer.encode("Anna went home with Karl and Lucy")
    assert len(ids) > 8 and tokenizer.end_of_text == 1
    assert tokenizer.decode(ids) == "".join(streamed(tokenizer, ids)) == made.decode(ids.tolist())
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["x"] = 10**9
    with pytest.raises(UserError, match=r"here: a token has the number 1000000000, above 16777215"):
        from_json(json.dumps(content), "here")


def test_bpe_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install -r training/optional\.txt"):
        bpe()


# Documents.


def test_documents_are_drawn_into_sets_and_a_single_one_is_cut_at_lines():
    some = documents([f"text {i}\n" for i in range(20)])
    sets = divided(some, {"val": 0.1, "test": 0.2}, seed=3)
    assert {name: len(part) for name, part in sets.items()} == {"train": 14, "val": 2, "test": 4}
    assert sorted(d for part in sets.values() for d in part) == sorted(some)
    assert divided(some, {"val": 0.1}, 3) != divided(some, {"val": 0.1}, 4)
    one = documents(["".join(f"line {i:02}\n" for i in range(50))])
    sets = divided(one, {"val": 0.09, "test": 0.11}, seed=0)  # 36 and 44 of 400 characters
    joined = "".join(part[0].text for part in sets.values())
    assert list(sets) == ["train", "val", "test"] and joined == one[0].text
    assert [part[0].text.count("\n") for part in sets.values()] == [39, 5, 6]
    assert all(part[0].text.endswith("\n") for part in sets.values())
    with pytest.raises(UserError, match=r"a\.txt: 2 documents are too few"):
        divided(documents(["a", "b"]), {"val": 0.5, "test": 0.5}, 0)


def test_a_byte_that_is_not_utf8_is_named_with_its_place(tmp_path):
    path = tmp_path / "latin.txt"
    for mark in (b"", b"\xef\xbb\xbf"):
        path.write_bytes(mark + "fine\nGrüße".encode("latin1"))
        with pytest.raises(
            UserError, match=rf"latin\.txt: byte {7 + len(mark)} \(0xfc, in line 2\) is not UTF-8"
        ):
            text_of(path)
    path.write_bytes(b"\xef\xbb\xbfmarked")
    assert text_of(path) == "marked"
    path.write_bytes(b"\xfe\xff" + "text".encode("utf-16-be"))
    with pytest.raises(UserError, match=r"byte 2 \(0x00, in line 1\) is not UTF-8.*-f utf-16 -t"):
        text_of(path)
    path.write_bytes(b"fine\nfin\0")
    with pytest.raises(UserError, match=r"byte 8 \(0x00, in line 2\) is not .*`tokens`"):
        text_of(path)
    path.write_bytes(b"x" * 10 + b"\n" + b"\xffy")
    with pytest.raises(UserError, match=r"byte 11 \(0xff, in line 4\)"):
        text_of(path, 5, 7, line=3)


def test_lines_end_alike_whatever_system_wrote_the_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\ntwo\r\n")
    assert text_of(tmp_path / "a.txt") == "one\n\ntwo\n"
    [document] = documents_of("a.jsonl", '{"text": "one\\r\\ntwo"}\r\n')
    assert document.text == "one\ntwo"


def test_long_texts_are_cut_only_where_no_token_reaches_across():
    pytest.importorskip("tokenizers", reason="optional")
    lines = "".join(d.text for d in written(1, 40)) + "a\n\n  b\n c \nd\ne"
    pieces = list(pieces_of(lines, 100))
    assert "".join(pieces) == lines and len(pieces) > 50
    tokenizer = bpe(vocab_size=400).train([lines])
    cut = np.concatenate([tokenizer.encode(piece) for piece in pieces])
    assert cut.tolist() == tokenizer.encode(lines).tolist()


def test_a_large_file_has_parts_between_documents(tmp_path, monkeypatch):
    monkeypatch.setattr("data_loader.text.SIZE", 100)
    texts = [document.text for document in written(2, 10)]
    path = tmp_path / "a.txt"
    path.write_text("<|endoftext|>".join(texts))
    parts = parts_of(str(path))
    assert len(parts) == 10
    found = [document for part in parts for document in part.documents()]
    assert [document.text for document in found] == texts
    whole = documents_of(str(path), path.read_text())
    assert {d.name for d in found[1:]} <= {str(path)} | {d.name for d in whole}


LINES = ['{"text": "one\\u2028 two", "id": 1}', "", '{"id": 2, "text": "<|endoftext|> three"}\r']


def test_a_jsonl_file_has_a_document_in_each_line():
    found = documents_of("a.jsonl", "\n".join(LINES), separator=" ", first_line=5)
    assert [(d.text, d.name) for d in found] == [
        ("one\u2028 two", "a.jsonl: line 5"),
        ("<|endoftext|> three", "a.jsonl: line 7"),
    ]
    bodies = documents_of("a.JSONL", '{"body": "x"}\n{"body": "y", "text": "z"}', field="body")
    assert [d.text for d in bodies] == ["x", "y"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("text", "is not JSON: Expecting value; a line"),
        ("[" * 20_000 + "]" * 20_000, "is not JSON: it is nested more than 64 levels deep"),
        ('{"text": ' + "9" * 5000 + "}", "is not JSON: it has an integer of thousands of digits"),
        ('["text"]', r"has no text under the key 'text', but \['text'\]; name the key"),
        ('{"body": "x"}', "has no text under the key 'text', but {'body': 'x'}; name the key"),
        ('{"text": ["x"]}', "has no text under the key 'text', but "),
        (r'{"text": "ab\ud800"}', "is not JSON: .* surrogates not allowed"),
    ],
)
def test_a_bad_line_of_a_jsonl_file_is_named(line, message):
    with pytest.raises(UserError, match=rf"a\.jsonl: line 2: {message}"):
        documents_of("a.jsonl", f"{LINES[0]}\n{line}\n")


# The datasets.


def test_a_folder_of_texts_is_divided_by_files(tmp_path):
    (tmp_path / "texts" / "sub").mkdir(parents=True)
    contents = [f"{'abcdefghij'[i]} says {i}. " * 3 for i in range(10)]
    for i, content in enumerate(contents):
        (tmp_path / "texts" / ("sub" if i % 2 else "") / f"{i}.txt").write_text(content)
    (tmp_path / "texts" / ".hidden").write_bytes(b"\xff")
    data = text(str(tmp_path / "texts"), length=8, val_size=0.2)
    sets = {name: texts_of(data, name).rstrip("|").split("|") for name in ("train", "val")}
    assert len(sets["train"]) == 8 and sorted(sets["train"] + sets["val"]) == sorted(contents)
    assert data.vocab_size == len(set("".join(contents))) + 1
    ends = len(contents)
    size = len("".join(contents))
    assert data.bytes_per_token == pytest.approx(size / (size + ends))


def test_sets_may_have_files_of_their_own_and_documents_may_be_kept_apart(tmp_path):
    (tmp_path / "a.txt").write_text("one two\n---\nthree four five\n---\nsix")
    (tmp_path / "b.txt").write_text("seven eight")
    paths = str(tmp_path / "a.txt"), str(tmp_path / "b.txt")
    data = text(*paths, length=5, separator="\n---\n", tokenizer=bytes_part(), documents="apart")
    assert texts_of(data, "train") == "one two|three four five|six|"
    assert texts_of(data, "val") == "seven eight|" and data.vocab_size == 257
    x, _ = loaded(data)["train"][1]
    assert data.tokenizer.decode(x["tokens"]) == "woth"
    assert x["segments"].tolist() == [1, 1, 1, 2, 2]


def test_a_text_too_short_for_a_window_and_one_too_large_are_errors(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("some words\n" * 10)
    with pytest.raises(
        UserError, match=r"a\.txt: the val set has 11 tokens, too few for one window"
    ):
        text(str(path), length=16)
    monkeypatch.setattr("data_loader.text.LARGEST", 100)
    with pytest.raises(UserError, match=r"python -m data_loader\.tokenize .*a\.txt --out"):
        text(str(path), length=4)


def test_slow_work_is_kept_and_found_again_until_the_text_changes(tmp_path, monkeypatch, cache):
    monkeypatch.setattr("data_loader.text.SLOW", -1)
    path = tmp_path / "a.txt"
    path.write_text("some words\n" * 30)
    first = text(str(path), length=8)
    (kept,) = cache.iterdir()
    monkeypatch.setattr("data_loader.text.tokenized", None)  # calling it would fail
    again = text(str(path), length=16)
    assert texts_of(again, "train") == texts_of(first, "train")
    assert again.bytes_per_token == first.bytes_per_token == 1
    for other in ({"split_seed": 1}, {"val_size": 0.2}, {"separator": "e"}, {"field": "body"}):
        with pytest.raises(TypeError):
            text(str(path), length=8, **other)
    kept.write_bytes(kept.read_bytes()[:100])
    with pytest.raises(TypeError):
        text(str(path), length=8)
    path.write_text("other words\n" * 30)
    with pytest.raises(TypeError):
        text(str(path), length=8)


def test_a_tokenizer_is_trained_on_the_training_set_alone():
    """But `characters` on all sets, so that it knows all their characters."""
    seen = []

    class Untrained:
        def train(self, texts):
            seen.extend(texts)
            return bytes_part()

    corpus = corpus_of("a.txt", [Given(documents(["one", "two"]))], {}, 0)
    corpus = corpus.extended("val", [Given(documents(["three"]))])
    assert tokenized(corpus, Untrained()).tokenizer.vocab_size == 257
    assert seen == ["one", "two"]
    assert tokenized(corpus, characters()).tokenizer.alphabet == "ehnortw"


def test_the_stories_are_drawn_from_the_seed_and_agree_with_themselves():
    some = [document.text for document in written(0, 300)]
    assert some == [document.text for document in written(0, 300)]
    assert some[:10] != [document.text for document in written(1, 10)]
    assert len(set(some)) == 300
    thing = re.compile(rf"(?:{'|'.join(KINDS)}) (?:{'|'.join(THINGS)})")
    for story in some:
        assert len(set(thing.findall(story))) == 1 < len(thing.findall(story))
        assert "{" not in story and " a o" not in story and story.endswith(".\n")
    data = stories(count=60, length=32)
    assert texts_of(data, "val").count("|") == 6
    assert data.vocab_size < 70 and 0.99 < data.bytes_per_token < 1
