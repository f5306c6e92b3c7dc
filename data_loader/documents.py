"""Text as documents: read from files, divided into sets, and turned into tokens.

A .jsonl file has one document per line, under a key of its JSON object; in any other file, a
separator ends a document. Documents without any text are left out.
"""

import logging
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_loader.loader import SPLIT, random_stream
from data_loader.paths import files_below, paths
from data_loader.tokenizers.plain import UntrainedCharacters, token_dtype
from data_loader.tokens import ABOUT
from utils import UserError, check_memory, main_memory
from utils import cut as shortened
from utils.files import open_file, parse_json

SEPARATOR, FIELD = "<|endoftext|>", "text"
VERSION = 3  # increase it when the documents of the same files change: prepared tokens are kept
# Where a long text may be cut, since no token of the usual encodings reaches across: at a single
# line break between two characters that are not spaces, of which the second is not a slash.
BETWEEN_TOKENS = re.compile(r"(?<=\S)\n(?=[^\s/])")
SIZE = 2**24  # bytes of a part of a file, if it has several documents


class Document(NamedTuple):
    """The text of one document, and its name in messages."""

    text: str
    name: str


# Files.


def text_files(name):
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

    def documents(self):
        text = text_of(self.file, self.start, self.end - self.start, self.line)
        return documents_of(self.file, text, self.separator, self.line, self.field)


def parts_of(file, separator=None, field=FIELD):
    """The parts of a file: about SIZE bytes each, between documents."""
    import mmap

    end = os.path.getsize(file)
    if end <= SIZE:
        return [Part(file, 0, end, 1, separator, field)]
    mark = "\n" if is_json_lines(file) else separator_of(separator)
    lines = map(re.escape, mark.encode().split(b"\n"))
    mark = re.compile(rb"\r?\n".join(lines))
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


def text_of(path, start=0, size=None, line=1):
    """The text of a file, or of `size` bytes from `start` on, where `line` begins."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size if size is None else size
            check_memory(path, size)
            file.seek(start)
            data = file.read(size)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    return decoded(path, data, start, line)


def decoded(path, data, start=0, line=1):
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


def unix_lines(text):
    """The text with \\n at the end of its lines, instead of \\r\\n."""
    return text.replace("\r\n", "\n")


def is_json_lines(path):
    return Path(path).suffix.lower() == ".jsonl"


def separator_of(named):
    """The separator of the documents in the text of a file."""
    return unix_lines(named or SEPARATOR)


def documents_of(path, text, separator=None, first_line=1, field=FIELD):
    """The documents in the text of a file, or in the part of it that begins with `first_line`."""
    if is_json_lines(path):
        lines = enumerate(text.split("\n"), first_line)
        places = [(f"{path}: line {number}", line) for number, line in lines if line.strip()]
        found = [Document(text_in(field, place, line), place) for place, line in places]
    else:
        found, line, separator = [], first_line, separator_of(separator)
        for piece in text.split(separator):
            name = path if piece == text else f"{path}: document from line {line}"
            found.append(Document(piece, str(name)))
            line += piece.count("\n") + separator.count("\n")
    return [document for document in found if document.text.strip()]


def text_in(field, place, line):
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
        f"{place}: has no text under the key {field!r}, but {shortened(repr(found), 200)}; name "
        "the key of the text with `field`"
    )


# Sets.


class Given(NamedTuple):
    """Documents in memory, in place of a part of a file."""

    made: list[Document]

    def documents(self):
        return self.made


class Corpus(NamedTuple):
    """Parts of text whose documents belong to sets."""

    parts: list[Part | Given]
    rows: list[dict]  # for each part, {set: the indices of its documents, or None for all of them}
    shares: dict[str, float]  # of the held-out sets
    several: bool  # whether there are several documents

    def by_part(self):
        """A Corpus of each part alone."""
        pairs = zip(self.parts, self.rows, strict=True)
        return [self._replace(parts=[part], rows=[row]) for part, row in pairs]

    def chosen(self):
        """{set: its documents} of each part."""
        for part, rows in zip(self.parts, self.rows, strict=True):
            documents = part.documents()
            yield {
                name: documents if some is None else [documents[i] for i in some]
                for name, some in rows.items()
            }

    def texts(self, tokenizer):
        """The texts on which a tokenizer is trained: those of the training set, but of all sets for
        `characters`, so that it knows all their characters."""
        of_all = isinstance(tokenizer, UntrainedCharacters)
        for sets in self.chosen():
            for name, documents in sets.items():
                if of_all or name == "train":
                    yield from (document.text for document in documents)

    def tokens(self, tokenizer):
        """({set: its tokens}, the number of bytes of the text)"""
        pieces, size = {}, 0
        for sets in self.chosen():
            for name, documents in sets.items():
                size += sum(len(document.text.encode()) for document in documents)
                some = encoded(tokenizer, documents, self.several)
                pieces.setdefault(name, []).append(some)
        return {name: np.concatenate(some) for name, some in pieces.items()}, size

    def extended(self, name, parts):
        """This corpus, with all documents of further parts as a set of their own."""
        rows = self.rows + [{name: None}] * len(parts)
        return self._replace(parts=self.parts + parts, rows=rows, several=True)


def corpus_of(name, parts, shares, seed, separator=None, mapped=map):
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
        made = Given(cut(document, shares))
        rows = {name: [i] for i, name in enumerate(("train", *shares))}
        return Corpus([made], [rows], shares, several=False)
    ends, rows = np.cumsum(counts), [{} for _ in parts]
    for key, indices in split_indices(total, shares, seed, name).items():
        pieces = np.split(indices, np.searchsorted(indices, ends[:-1]))
        for row, piece, first in zip(rows, pieces, ends - counts, strict=True):
            row[key] = piece - first
    return Corpus(parts, rows, shares, several=True)


def count_of(part):
    return len(part.documents())


def split_indices(count, shares, seed, name):
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


def cut(document, shares):
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


def encoded(tokenizer, documents, several):
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
                found = error_of_document(error, tokenizer, document)
                raise UserError(f"{document.name}: {found}") from error
        pieces += ending
    return np.concatenate(pieces)


def error_of_document(error, tokenizer, document):
    """The error with line numbers of the whole document instead of a piece."""
    try:
        tokenizer.encode(document.text)
    except UserError as whole:
        return whole
    return error


def pieces_of(text, size=2**20):
    """A long text in pieces of about this size, cut between tokens."""
    start = 0
    while start < len(text):
        found = BETWEEN_TOKENS.search(text, start + size)
        end = found.end() if found else len(text)
        yield text[start:end]
        start = end
