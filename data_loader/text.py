"""Text files as examples for a language model, turned into tokens when a run starts."""

import hashlib
import io
import json
import logging
import os
import time
import zipfile
from typing import Literal, NamedTuple

import numpy as np

from data_loader.base import Data, Tokenizer
from data_loader.documents import (
    FIELD,
    VERSION,
    divided,
    documents_of,
    encoded,
    ready,
    separator_of,
)
from data_loader.text_files import is_json_lines, text_files, text_of
from data_loader.tokenizers.plain import UntrainedCharacters, characters
from data_loader.tokenizers.saved import from_json
from data_loader.tokens import check_boundary
from data_loader.windows import Stream, Windows, window_data
from utils import PACKAGE, RunError, UserError, user_cache
from utils.files import atomic_write
from utils.forms import Count, CountOrZero, Fraction, LocalPath, checked

LARGEST = 2**28  # bytes of text that are turned into tokens each time a run starts
SLOW = 0.5  # seconds; a result that took longer is cached for the next run


class Prepared(NamedTuple):
    """The tokens of each set, their tokenizer, and their size."""

    tokens: dict  # {set: array}
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
    tokenizer = tokenizer or characters()
    given = {"train": train, "val": val, "test": test}
    files = {name: text_files(path) for name, path in given.items() if path is not None}
    total = sum(os.path.getsize(file) for named in files.values() for file in named)
    if total > LARGEST:
        raise UserError(
            f"{train}: {total / 2**20:.0f} MB of text are too many to prepare at each start; "
            f"do it once with `python -m data_loader.tokenize {train} --out data/tokens`, and use "
            "the dataset `tokens`"
        )
    texts = {name: [(file, text_of(file)) for file in named] for name, named in files.items()}
    if separator and not any(separator_of(separator) in one for _, one in texts["train"]):
        message = "%s: the separator %r is not in the text, so it divides no file into documents"
        logging.getLogger("main").warning(message, train, separator)
    shares = {"val": 0.0 if val else val_size, "test": 0.0 if test else test_size}

    def make():
        sets = {
            name: [one for pair in pairs for one in documents_of(*pair, separator, field=field)]
            for name, pairs in texts.items()
        }
        several = sum(map(len, sets.values())) > 1
        sets = divided(sets.pop("train"), shares, split_seed) | sets
        return prepared(sets, tokenizer, several)

    content = {
        name: [
            [hashlib.sha256(one.encode()).hexdigest(), is_json_lines(file)] for file, one in pairs
        ]
        for name, pairs in texts.items()
    }
    settings = [content, separator, field, shares, split_seed, identity(tokenizer)]
    sources = {name: path or train for name, path in given.items()}
    return text_data(cached("text", settings, make), sources, length, documents)


def prepared(sets, tokenizer, several):
    """The tokens of {set: documents}. A tokenizer is trained on the documents of `train`, but
    `characters` on those of all sets. `several` says whether there are several documents."""
    every = [document for documents in sets.values() for document in documents]
    of_all = isinstance(tokenizer, UntrainedCharacters)
    tokenizer = ready(tokenizer, every if of_all else sets["train"])
    tokens = {name: encoded(tokenizer, part, several) for name, part in sets.items()}
    size = sum(len(document.text.encode()) for document in every)
    return Prepared(tokens, tokenizer, size / max(1, sum(map(len, tokens.values()))))


def text_data(made, sources, length, documents):
    """The Data of prepared tokens; `sources` are the names of the texts of each set."""
    tokenizer, vocab_size = made.tokenizer, made.tokenizer.vocab_size
    boundary = check_boundary(documents, tokenizer.end_of_text, vocab_size)
    sets = {
        name: Windows(
            Stream([(f"{sources[name]} ({name})", array)]),
            length,
            vocab_size,
            boundary=boundary,
            tokenizer=tokenizer,
            source=sources[name],
        )
        for name, array in made.tokens.items()
    }
    facts = {"vocab_size": vocab_size, "bytes_per_token": made.bytes_per_token}
    return window_data(sets, length, tokenizer=tokenizer, **facts)


def identity(tokenizer):
    """A text that distinguishes a tokenizer from others; None for a user's own, whose code may have
    changed."""
    if not type(tokenizer).__module__.startswith(f"{PACKAGE}data_loader."):
        return None
    return tokenizer.to_json() if hasattr(tokenizer, "to_json") else repr(tokenizer)


def cached(name, settings, make):
    """make(), cached in the user's folder under a hash of the settings if it takes long."""
    if settings[-1] is None:
        return make()
    digest = hashlib.sha256(json.dumps([VERSION, settings]).encode()).hexdigest()
    path = f"{name}-v{VERSION}-{digest[:24]}.npz"
    try:
        with np.load(user_cache() / path, allow_pickle=False) as file:
            tokens = {key[7:]: file[key] for key in file.files if key.startswith("tokens/")}
            tokenizer = from_json(str(file["tokenizer"]))
            return Prepared(tokens, tokenizer, float(file["bytes_per_token"]))
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile):
        begin = time.perf_counter()
        made = make()  # the file is missing or damaged
    if time.perf_counter() - begin > SLOW:
        buffer = io.BytesIO()
        arrays = {f"tokens/{name}": array for name, array in made.tokens.items()}
        about = {"tokenizer": made.tokenizer.to_json(), "bytes_per_token": made.bytes_per_token}
        np.savez(buffer, **arrays, **about)
        try:
            user_cache().mkdir(parents=True, exist_ok=True)
            atomic_write(user_cache() / path, buffer.getvalue())
        except (OSError, RunError, RuntimeError) as error:  # RuntimeError: no home folder
            logger = logging.getLogger("main")
            logger.warning("%s: cannot be cached for the next run: %s", name, error)
    return made
