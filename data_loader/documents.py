"""Text files as documents: separated, divided into sets, and turned into tokens.

A .jsonl file has one document per line, under a key of its JSON object; in any other file, a
separator ends a document.
"""

import os
import re
from typing import NamedTuple

import numpy as np

from data_loader.loader import SPLIT, random_stream
from data_loader.text_files import is_json_lines, text_of, unix_lines
from utils import UserError, check_memory, main_memory
from utils import cut as shortened
from utils.files import open_file, parse_json

SEPARATOR, FIELD = "<|endoftext|>", "text"
VERSION = 3  # increase it when the documents of the same files change: prepared tokens are kept
SIZE = 2**24  # bytes of a part of a file, if it has several documents


class Document(NamedTuple):
    """The text of one document, and its name in messages."""

    text: str
    name: str


def documents_of(path, text, separator=None, first_line=1, field=FIELD):
    """The documents in the text of a file, or in the part of it that begins with `first_line`: in a
    .jsonl, the texts under `field` in its lines; in other files, the texts between separators."""
    if is_json_lines(path) and (text.strip() or first_line > 1):
        lines = enumerate(text.split("\n"), first_line)
        places = ((f"{path}: line {number}", line) for number, line in lines)
        return [Document(text_in(field, *place), place[0]) for place in places if place[1].strip()]
    if not text.strip():
        raise UserError(f"{path}: is empty; remove it, or put text into it")
    separator = separator_of(separator)
    pieces = text.split(separator)
    if len(pieces) == 1:
        return [Document(text, str(path))]
    documents, line = [], first_line
    for number, piece in enumerate(pieces, 1):
        if piece.strip():
            documents.append(Document(piece, f"{path}: document from line {line}"))
        # A separator may begin or end a file, and several lines may be empty.
        elif separator.strip() and 1 < number < len(pieces):
            raise UserError(
                f"{path}: line {line}: a document is empty: there are two {separator!r} in a row; "
                "remove one"
            )
        line += piece.count("\n") + separator.count("\n")
    if not documents:
        raise UserError(f"{path}: holds only separators; remove it, or put text into it")
    return documents


def separator_of(named):
    """The separator of the documents in the text of a file."""
    return unix_lines(named or SEPARATOR)


def text_in(field, place, line):
    """The text under the key `field` of the JSON object in a line."""
    try:
        found = parse_json(line)
    except ValueError as error:
        why = f"{error.msg} at character {error.pos + 1}" if hasattr(error, "pos") else error
        raise UserError(
            f'{place}: is not JSON: {why}; a line of a .jsonl holds a document, {{"text": "..."}}'
        ) from error
    if not isinstance(found, dict) or field not in found:
        keys = ", ".join(map(repr, found)) if isinstance(found, dict) else "no object"
        raise UserError(
            f"{place}: has no key {field!r}, only {shortened(keys, 200) or 'an empty object'}; "
            "name the key of the text with `field`"
        )
    text = found[field]
    if not isinstance(text, str):
        raise UserError(f"{place}: {field!r} must be a text, got {shortened(repr(text), 40)}")
    if not text.strip():
        raise UserError(f"{place}: the document is empty; remove the line")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # which JSON can express
        raise UserError(
            f"{place}: {field!r} has half of a surrogate pair at character "
            f"{error.start + 1}, which is not text; remove it"
        ) from error
    return unix_lines(text)


def divided(documents, sizes, seed):
    """{set: documents}, where `sizes` are the shares of val and test; train has the rest. If there
    is only one document, it is cut."""
    sizes = {name: size for name, size in sizes.items() if size}
    if len(documents) == 1:
        return cut(documents[0], sizes)
    indices = split_indices(len(documents), sizes, seed, documents[0].name)
    return {name: [documents[i] for i in rows] for name, rows in indices.items()}


def chosen_of(documents, rows, sizes):
    """{set: its documents}, where `rows` is {set: their indices}, or {set: None} if there is only
    one document, which is cut."""
    if None in rows.values():
        return divided(documents, sizes, 0)
    return {name: [documents[i] for i in own] for name, own in rows.items()}


def split_indices(count, sizes, seed, name):
    """{set: the sorted indices of its documents}, drawn from the seed; `name` is for messages."""
    counts = {key: max(1, round(size * count)) for key, size in sizes.items() if size}
    if sum(counts.values()) >= count:
        raise UserError(
            f"{name}: {count} documents are too few for the sets train, {', '.join(counts)}; make "
            "val_size and test_size smaller, or give each set its own files"
        )
    order, sets = random_stream(seed, SPLIT).permutation(count), {}
    for key, size in counts.items():
        sets[key], order = np.sort(order[:size]), order[size:]
    return {"train": np.sort(order)} | sets


def cut(document, sizes):
    """{set: [its part of the document]}: first train, then val, then test. A part ends at the end
    of a line, if there are lines."""
    if sum(sizes.values()) >= 1:
        raise UserError(f"val_size and test_size: leave nothing to train on: {sizes}")
    text, sets, end = document.text, {}, len(document.text)
    for name, size in reversed(sizes.items()):
        start = text.rfind("\n", 0, end - round(size * len(text))) + 1
        start = start or end - round(size * len(text))
        sets[name], end = [Document(text[start:end], document.name)], start
    sets = {"train": [Document(text[:end], document.name)]} | dict(reversed(sets.items()))
    for name, [part] in sets.items():
        if not part.text:
            raise UserError(
                f"{document.name}: {len(text)} characters are too few for the sets "
                f"{', '.join(sets)}: the {name} set is empty; make val_size and test_size larger, "
                "or 0, or give each set its own files"
            )
    return sets


def encoded(tokenizer, documents, several):
    """The tokens of documents, one after the other. If there are `several`, the token that ends a
    document follows each of them."""
    end = tokenizer.end_of_text
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
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
    """A long text in pieces. They end at a single line break between two characters that are not
    spaces, and the second is not a slash, since no token of the usual encodings reaches across
    such a place."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + size) + 1 or len(text)
        while end < len(text) and (text[end - 2].isspace() or is_joined(text[end])):
            end = text.find("\n", end) + 1 or len(text)
        yield text[start:end]
        start = end


def is_joined(character):
    """Whether a token may hold a line break and then this character."""
    return character.isspace() or character == "/"


def ready(tokenizer, documents):
    """The tokenizer, trained on the documents if it is not trained yet."""
    if not hasattr(tokenizer, "train"):
        return tokenizer
    return tokenizer.train([document.text for document in documents])


class Part(NamedTuple):
    """Some documents of a file: a range of its bytes, and the line in which it begins."""

    file: str
    start: int
    end: int
    line: int
    field: str

    def text(self):
        return text_of(self.file, self.start, self.end - self.start, self.line)

    def documents(self, separator, text=None):
        text = self.text() if text is None else text
        return documents_of(self.file, text, separator, self.line, self.field)


def parts_of(file, separator, field=FIELD):
    """The parts of a file: about SIZE bytes each, between documents."""
    import mmap

    end = os.path.getsize(file)
    mark = "\n" if is_json_lines(file) else separator_of(separator)
    lines = map(re.escape, mark.encode().split(b"\n"))
    mark = re.compile(rb"\r?\n".join(lines))
    if end <= SIZE:
        return [Part(file, 0, end, 1, field)]
    parts, start, line = [], 0, 1
    most = int(min(main_memory(), end))  # bytes of a part, which is read as a whole
    with open_file(file) as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while start < end:
            found = mark.search(data, start + SIZE, start + most)
            stop = found.end() if found else end
            # The separator at the end of a file, and a line break after it, make no part.
            stop = end if end - stop <= SIZE and not data[stop:end].strip() else stop
            check_memory(f"{file}: the document in line {line}", stop - start)
            parts.append(Part(file, start, stop, line, field))
            line += sum(data[i : min(i + SIZE, stop)].count(10) for i in range(start, stop, SIZE))
            start = stop
    return parts
