"""Text as examples for a language model: read from files, divided into documents and sets, and
turned into tokens when a run starts.

A .jsonl file has one document per line, under a key of its JSON object; in any other file, a
separator ends a document. Documents without any text are left out.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from data_loader.base import Data, DataOfHelper, Tokenizer, UntrainedTokenizer, named_sets
from data_loader.cache import cached
from data_loader.loader import SPLIT, random_stream
from data_loader.paths import files_below, paths, reading
from data_loader.tokenizers.plain import UntrainedCharacters, characters, token_dtype
from data_loader.tokenizers.saved import from_json
from data_loader.tokens import ABOUT, Stream, window_data
from utils import PACKAGE, UserError, check_memory, cut, main_memory
from utils.files import open_file, parse_json
from utils.forms import Count, CountOrZero, Fraction, LocalPath, checked

SEPARATOR, FIELD = "<|endoftext|>", "text"
VERSION = 3  # increase it when the documents of the same files change: prepared tokens are kept
# Where a long text may be cut, since no token of the usual encodings reaches across: at a single
# line break between two characters that are not spaces, of which the second is not a slash.
BETWEEN_TOKENS = re.compile(r"(?<=\S)\n(?=[^\s/])")
SIZE = 2**24  # bytes of a part of a file, if it has several documents
LARGEST = 2**28  # bytes of text that are turned into tokens each time a run starts
SLOW = 0.5  # seconds; a result that took longer is cached for the next run


class Prepared(NamedTuple):
    """The tokens of each set, their tokenizer, and their size."""

    tokens: dict[str, np.ndarray]
    tokenizer: Tokenizer
    bytes_per_token: float


@checked
def text(
    train: LocalPath,
    val: LocalPath | None = None,
    test: LocalPath | None = None,
    length: Count = 256,
    tokenizer: Tokenizer | None = None,
    separator: str | None = None,
    field: str = FIELD,
    val_size: Fraction = 0.1,
    test_size: Fraction = 0.0,
    split_seed: CountOrZero = 0,
    documents: Literal["joined", "apart"] = "joined",
) -> Data:
    """Windows of `length` tokens from text in UTF-8: a file, a folder or a pattern per set. A file
    is one document, or several with `separator` (<|endoftext|>) between them; a .jsonl has one per
    line, under the key `field` of an object. If `val` or `test` is left out, the set is a share of
    the documents of `train`, `val_size` or `test_size`. The default tokenizer is `characters`."""
    given = named_sets(train, val, test)
    files = {name: text_files(path) for name, path in given.items()}
    total = sum(os.path.getsize(file) for named in files.values() for file in named)
    if total > LARGEST:
        raise UserError(
            f"{train}: {total / 2**20:.0f} MB of text are too many to prepare at each start; "
            f"do it once with `python -m data_loader.tokenize {train} --out data/tokens`, and use "
            "the dataset `tokens`"
        )
    shares = {"val": 0.0 if val else val_size, "test": 0.0 if test else test_size}

    def corpus() -> Corpus:
        parts = {
            name: [part for file in named for part in parts_of(file, separator, field)]
            for name, named in files.items()
        }
        found = corpus_of(train, parts.pop("train"), shares, split_seed, separator)
        for name, own in parts.items():
            found = found.extended(name, own)
        return found

    content = {
        name: [[digest_of(file), is_json_lines(file)] for file in named]
        for name, named in files.items()
    }
    settings = [content, separator, field, shares, split_seed]
    made = prepared("text", settings, corpus, tokenizer or characters())
    sources = {name: given.get(name, train) for name in made.tokens}
    return text_data(made, sources, length, documents)


def digest_of(file: str) -> str:
    with open_file(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def prepared(
    name: str,
    settings: list[Any],
    corpus: "Callable[[], Corpus]",
    tokenizer: Tokenizer | UntrainedTokenizer,
) -> Prepared:
    """The tokens of corpus(); those of an earlier run with the same settings if they are cached."""
    kind = identity(tokenizer)
    if kind is None:
        return tokenized(corpus(), tokenizer)

    def arrays() -> dict[str, Any]:
        made = tokenized(corpus(), tokenizer)
        tokens = {f"tokens/{key}": array for key, array in made.tokens.items()}
        return tokens | {"tokenizer": made.tokenizer.to_json(), "rate": made.bytes_per_token}

    key = hashlib.sha256(json.dumps([VERSION, *settings, kind]).encode()).hexdigest()
    kept = cached(f"{name}-v{VERSION}-{key[:24]}", arrays, SLOW)
    tokens = {key[7:]: array for key, array in kept.items() if key.startswith("tokens/")}
    return Prepared(tokens, from_json(str(kept["tokenizer"])), float(kept["rate"]))


def tokenized(corpus: "Corpus", tokenizer: Tokenizer | UntrainedTokenizer) -> Prepared:
    """The tokens of all documents, by a tokenizer that is trained on them if it is not yet."""
    if isinstance(tokenizer, UntrainedTokenizer):
        tokenizer = tokenizer.train([*corpus.texts(tokenizer)])
    tokens, size = corpus.tokens(tokenizer)
    return Prepared(tokens, tokenizer, size / max(1, sum(map(len, tokens.values()))))


def text_data(
    made: Prepared,
    sources: Mapping[str, str],
    length: int,
    documents: Literal["joined", "apart"],
) -> DataOfHelper:
    """The Data of prepared tokens; `sources` are the names of the texts of each set."""
    streams = {
        name: (sources[name], Stream([(f"{sources[name]} ({name})", tokens)]))
        for name, tokens in made.tokens.items()
    }
    return window_data(
        streams,
        length,
        documents,
        vocab_size=made.tokenizer.vocab_size,
        end_of_text=made.tokenizer.end_of_text,
        tokenizer=made.tokenizer,
        bytes_per_token=made.bytes_per_token,
    )


def identity(tokenizer: Tokenizer | UntrainedTokenizer) -> str | None:
    """A text that distinguishes a tokenizer from others; None for a user's own, whose code may have
    changed."""
    if not type(tokenizer).__module__.startswith(f"{PACKAGE}data_loader."):
        return None
    return repr(tokenizer) if isinstance(tokenizer, UntrainedTokenizer) else tokenizer.to_json()


class Document(NamedTuple):
    """The text of one document, and its name in messages."""

    text: str
    name: str


# Files.


def text_files(name: str) -> list[str]:
    """The files of a path, a folder with all folders in it, or a pattern; sorted."""
    is_folder = os.path.isdir(name)
    files = sorted(filter(os.path.isfile, files_below(name))) if is_folder else paths(name, ".txt")
    if not files:
        raise UserError(f"{name}: has no files in it; put text files there, in UTF-8")
    for file in map(Path, files):
        if file.suffix.lower() in (".bin", ".npy") or file.name == ABOUT:
            raise UserError(
                f"{file}: belongs to prepared tokens, and is not text; move the tokens out of "
                f"{name}, or name the text files alone, as with a pattern; the dataset `tokens` "
                "reads prepared tokens"
            )
    return files


class Part(NamedTuple):
    """Some documents of a file: a range of its bytes, and the line in which it begins."""

    file: str
    start: int
    end: int
    line: int
    separator: str | None
    field: str

    def documents(self) -> list[Document]:
        text = text_of(self.file, self.start, self.end - self.start, self.line)
        return documents_of(self.file, text, self.separator, self.line, self.field)


def parts_of(file: str, separator: str | None = None, field: str = FIELD) -> list[Part]:
    """The parts of a file: about SIZE bytes each, between documents."""
    import mmap

    end = os.path.getsize(file)
    if end <= SIZE:
        return [Part(file, 0, end, 1, separator, field)]
    ending = "\n" if is_json_lines(file) else unix_lines(separator or SEPARATOR)
    mark = re.compile(rb"\r?\n".join(map(re.escape, ending.encode().split(b"\n"))))
    parts, start, line = [], 0, 1
    most = int(min(main_memory(), end))  # bytes of a part, which is read as a whole
    with open_file(file) as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while start < end:
            found = mark.search(data, start + SIZE, start + most)
            stop = found.end() if found else end
            check_memory(f"{file}: the document in line {line}", stop - start)
            parts.append(Part(file, start, stop, line, separator, field))
            line += sum(data[i : min(i + SIZE, stop)].count(10) for i in range(start, stop, SIZE))
            start = stop
    return parts


def text_of(path: str, start: int = 0, size: int | None = None, line: int = 1) -> str:
    """The text of a file, or of `size` bytes from `start` on, where `line` begins."""
    with reading(path), open_file(path) as file:
        size = os.fstat(file.fileno()).st_size if size is None else size
        check_memory(path, size)
        file.seek(start)
        data = file.read(size)
    return decoded(path, data, start, line)


def decoded(path: object, data: bytes, start: int = 0, line: int = 1) -> str:
    """The text in the bytes of a file, which must be UTF-8. Lines end with \\n, also where the file
    has \\r\\n, as files of Windows do."""
    place = data.find(0)  # in no text, but in UTF-16
    if place < 0:
        try:
            text = data.decode()
            return unix_lines(text.removeprefix("\ufeff") if start == 0 else text)
        except UnicodeDecodeError as error:
            place = error.start
    line += data.count(b"\n", 0, place)
    raise UserError(
        f"{path}: byte {start + place} (0x{data[place]:02x}, in line {line}) is not UTF-8 text; "
        "convert the file, as with `iconv -f utf-16 -t utf-8` or `iconv -f latin1 -t utf-8`; read "
        "tokens with the dataset `tokens`, and leave out other binary files"
    )


def unix_lines(text: str) -> str:
    """The text with \\n at the end of its lines, instead of \\r\\n."""
    return text.replace("\r\n", "\n")


def is_json_lines(path: str) -> bool:
    return Path(path).suffix.lower() == ".jsonl"


def documents_of(
    path: str, text: str, separator: str | None = None, first_line: int = 1, field: str = FIELD
) -> list[Document]:
    """The documents in the text of a file, or in the part of it that begins with `first_line`."""
    if is_json_lines(path):
        lines = enumerate(text.split("\n"), first_line)
        places = [(f"{path}: line {number}", line) for number, line in lines if line.strip()]
        found = [Document(text_in(field, place, line), place) for place, line in places]
    else:
        found, line = [], first_line
        separator = unix_lines(separator or SEPARATOR)
        for piece in text.split(separator):
            name = path if piece == text else f"{path}: document from line {line}"
            found.append(Document(piece, str(name)))
            line += piece.count("\n") + separator.count("\n")
    return [document for document in found if document.text.strip()]


def text_in(field: str, place: str, line: str) -> str:
    """The text under the key `field` of the JSON object in a line."""
    try:
        found = parse_json(line)
        text = found.get(field) if isinstance(found, dict) else None
        if isinstance(text, str):
            text.encode()  # an error for half of a surrogate pair, which JSON can express
            return unix_lines(text)
    except ValueError as error:
        why = getattr(error, "msg", error)
        raise UserError(
            f'{place}: is not JSON: {why}; a line of a .jsonl holds a document, {{"text": "..."}}'
        ) from error
    raise UserError(
        f"{place}: has no text under the key {field!r}, but {cut(repr(found), 200)}; name "
        "the key of the text with `field`"
    )


# Sets.


class Given(NamedTuple):
    """Documents in memory, in place of a part of a file."""

    made: list[Document]

    def documents(self) -> list[Document]:
        return self.made


# {set: the indices of its documents in a part, or None for all of them}
SetRows: TypeAlias = dict[str, np.ndarray | list[int] | None]


class Corpus(NamedTuple):
    """Parts of text whose documents belong to sets."""

    parts: list[tuple[Part | Given, SetRows]]
    shares: dict[str, float]  # of the held-out sets
    several: bool  # whether there are several documents

    def by_part(self) -> "list[Corpus]":
        """A Corpus of each part alone."""
        return [self._replace(parts=[part]) for part in self.parts]

    def chosen(self) -> Iterator[dict[str, list[Document]]]:
        """{set: its documents} of each part."""
        for part, rows in self.parts:
            documents = part.documents()
            yield {
                name: documents if some is None else [documents[i] for i in some]
                for name, some in rows.items()
            }

    def texts(self, tokenizer: UntrainedTokenizer) -> Iterator[str]:
        """The texts on which a tokenizer is trained: those of the training set, but of all sets for
        `characters`, so that it knows all their characters."""
        of_all = isinstance(tokenizer, UntrainedCharacters)
        for sets in self.chosen():
            for name, documents in sets.items():
                if of_all or name == "train":
                    yield from (document.text for document in documents)

    def tokens(self, tokenizer: Tokenizer) -> tuple[dict[str, np.ndarray], int]:
        """({set: its tokens}, the number of bytes of the text)"""
        pieces: dict[str, list[np.ndarray]] = {}
        size = 0
        for sets in self.chosen():
            for name, documents in sets.items():
                size += sum(len(document.text.encode()) for document in documents)
                some = encoded(tokenizer, documents, self.several)
                pieces.setdefault(name, []).append(some)
        return {name: np.concatenate(some) for name, some in pieces.items()}, size

    def extended(self, name: str, parts: list[Part]) -> "Corpus":
        """This corpus, with all documents of further parts as a set of their own."""
        whole: SetRows = {name: None}
        return self._replace(parts=self.parts + [(part, whole) for part in parts], several=True)


def corpus_of(
    name: str,
    parts: list[Any],
    shares: dict[str, float],
    seed: int,
    separator: str | None = None,
    mapped: Callable[..., Iterable[int]] = map,
) -> Corpus:
    """The documents of some parts, drawn from the seed into the sets of which `shares` has the
    shares, and train, which has the rest. A `separator` that divides no file is logged. `mapped`
    may count the documents in parallel."""
    shares = {key: share for key, share in shares.items() if share}
    counts = np.array([*mapped(count_of, parts)])
    total = int(counts.sum())
    if not total:
        raise UserError(f"{name}: holds no text; put text into it, in UTF-8")
    if separator and counts.max() == 1 and len({part.file for part in parts}) == len(parts):
        message = "%s: the separator %r divides no file into documents; is it in the text?"
        logging.getLogger("main").warning(message, name, separator)
    if total == 1:
        [document] = [one for part in parts for one in part.documents()]
        one_each: SetRows = {name: [i] for i, name in enumerate(("train", *shares))}
        return Corpus([(Given(divided(document, shares)), one_each)], shares, several=False)
    ends = np.cumsum(counts)
    rows: list[SetRows] = [{} for _ in parts]
    for key, indices in split_indices(total, shares, seed, name).items():
        pieces = np.split(indices, np.searchsorted(indices, ends[:-1]))
        for row, piece, first in zip(rows, pieces, ends - counts, strict=True):
            row[key] = piece - first
    return Corpus(list(zip(parts, rows, strict=True)), shares, several=True)


def count_of(part: Part | Given) -> int:
    return len(part.documents())


def split_indices(
    count: int, shares: dict[str, float], seed: int, name: str
) -> dict[str, np.ndarray]:
    """{set: the sorted indices of its documents}, drawn from the seed; `name` is for messages."""
    counts = {key: max(1, round(share * count)) for key, share in shares.items()}
    if sum(counts.values()) >= count:
        raise UserError(
            f"{name}: {count} documents are too few for the sets train, {', '.join(counts)}; make "
            "val_size and test_size smaller, or give each set its own files"
        )
    order = random_stream(seed, SPLIT).permutation(count)
    *held_out, train = np.split(order, np.cumsum([*counts.values()], dtype=int))
    return {"train": np.sort(train)} | dict(zip(counts, map(np.sort, held_out), strict=True))


def divided(document: Document, shares: dict[str, float]) -> list[Document]:
    """The parts of a document for train, val and test, in this order. A part ends at the end of a
    line, if there are lines."""
    text, texts = document.text, []
    end = len(text)
    for share in reversed(shares.values()):
        start = max(0, end - round(share * len(text)))
        start = text.rfind("\n", 0, start) + 1 or start
        texts.append(text[start:end])
        end = start
    texts.append(text[:end])
    if "" in texts:
        raise UserError(
            f"{document.name}: {len(text)} characters are too few for the sets train, "
            f"{', '.join(shares)}; change val_size and test_size, or give each set its own files"
        )
    return [Document(one, document.name) for one in reversed(texts)]


# Tokens.


def encoded(tokenizer: Tokenizer, documents: list[Document], several: bool) -> np.ndarray:
    """The tokens of documents, one after the other. If there are `several`, the token that ends a
    document follows each of them."""
    end = tokenizer.end_of_text
    dtype = token_dtype(tokenizer.vocab_size)
    ending = [np.array([end], dtype)] if several and end is not None else []
    pieces = [np.zeros(0, dtype)]
    for document in documents:
        for text in pieces_of(document.text):
            try:
                pieces.append(np.asarray(tokenizer.encode(text)).astype(dtype))
            except UserError as error:
                found = error
                try:
                    tokenizer.encode(document.text)  # its error has the line in the document
                except UserError as whole:
                    found = whole
                raise UserError(f"{document.name}: {found}") from error
        pieces += ending
    return np.concatenate(pieces)


def pieces_of(text: str, size: int = 2**20) -> Iterator[str]:
    """A long text in pieces of about this size, cut between tokens."""
    start = 0
    while start < len(text):
        found = BETWEEN_TOKENS.search(text, start + size)
        end = found.end() if found else len(text)
        yield text[start:end]
        start = end
