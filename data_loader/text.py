"""Text files as examples for a language model, turned into tokens when a run starts."""

import hashlib
import json
import os
from typing import Literal, NamedTuple

import numpy as np

from data_loader.base import Data, Tokenizer, named_sets
from data_loader.cache import cached
from data_loader.documents import (
    FIELD,
    VERSION,
    corpus_of,
    is_json_lines,
    parts_of,
    text_files,
)
from data_loader.tokenizers.plain import characters
from data_loader.tokenizers.saved import from_json
from data_loader.windows import Stream, window_data
from utils import PACKAGE, UserError
from utils.files import open_file
from utils.forms import Count, CountOrZero, Fraction, LocalPath, checked

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

    def corpus():
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


def digest_of(file):
    with open_file(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def prepared(name, settings, corpus, tokenizer):
    """The tokens of corpus(), of a run before with the same settings if they were cached."""
    kind = identity(tokenizer)
    if kind is None:
        return tokenized(corpus(), tokenizer)

    def arrays():
        made = tokenized(corpus(), tokenizer)
        tokens = {f"tokens/{key}": array for key, array in made.tokens.items()}
        return tokens | {"tokenizer": made.tokenizer.to_json(), "rate": made.bytes_per_token}

    key = hashlib.sha256(json.dumps([VERSION, *settings, kind]).encode()).hexdigest()
    kept = cached(f"{name}-v{VERSION}-{key[:24]}", arrays, SLOW)
    tokens = {key[7:]: array for key, array in kept.items() if key.startswith("tokens/")}
    return Prepared(tokens, from_json(str(kept["tokenizer"])), float(kept["rate"]))


def tokenized(corpus, tokenizer):
    """The tokens of all documents, by a tokenizer that is trained on them if it is not yet."""
    if hasattr(tokenizer, "train"):
        tokenizer = tokenizer.train([*corpus.texts(tokenizer)])
    tokens, size = corpus.tokens(tokenizer)
    return Prepared(tokens, tokenizer, size / max(1, sum(map(len, tokens.values()))))


def text_data(made, sources, length, documents):
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


def identity(tokenizer):
    """A text that distinguishes a tokenizer from others; None for a user's own, whose code may have
    changed."""
    if not type(tokenizer).__module__.startswith(f"{PACKAGE}data_loader."):
        return None
    return tokenizer.to_json() if hasattr(tokenizer, "to_json") else repr(tokenizer)
