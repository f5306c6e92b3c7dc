"""Tokenizers read from files and checkpoints, and the text of tokens as they are made."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np

from data_loader.base import Tokenizer
from data_loader.tokenizers.bpe import MOST_TIKTOKEN, Bpe, bpe_of, tokenizer_of
from data_loader.tokenizers.plain import ByteTokenizer, CharacterTokenizer
from utils import UserError, cut
from utils.files import parse_json, read_file

FORMS = "the tokenizer.json of a run or of HuggingFace, or a .tiktoken file"
MOST_BYTES = 2**26  # of a file; the largest that are published have 35 million

SavedTokenizer: TypeAlias = Bpe | ByteTokenizer | CharacterTokenizer


def from_json(text: str, source: str = "tokenizer") -> SavedTokenizer:
    """The tokenizer that `to_json` wrote, or HuggingFace's tokenizer.json."""
    try:
        content = parse_json(text)
        kind = content.get("type")
        if "model" in content:
            return bpe_of(lambda library: library.Tokenizer.from_str(text), source)
        if kind == "bytes":
            return ByteTokenizer()
        if kind == "characters":
            return CharacterTokenizer(content["alphabet"])
        why = f"type {kind!r}"
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        why = str(error)
    raise UserError(f"{source}: is not a tokenizer ({cut(why, 200)}); name {FORMS}")


def tokenizer_file(path: str | Path, pattern: str | None = None) -> SavedTokenizer:
    """The tokenizer in a file; `pattern` is the regex that splits text, for .tiktoken files."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such file; name {FORMS}")
    try:
        if path.suffix != ".tiktoken":
            return from_json(read_file(path, MOST_BYTES).decode(), str(path))
        return tokenizer_of(path, read_file(path, MOST_TIKTOKEN), pattern)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; name {FORMS}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not a tokenizer, but binary; name {FORMS}") from error


def first_tokens(tokenizer: Tokenizer, prompt: str) -> np.ndarray | list[int]:
    """The tokens of the prompt. An empty prompt is the token that ends a document, after which a
    new document begins."""
    if prompt:
        try:
            return tokenizer.encode(prompt)
        except UserError as error:
            raise UserError(f"prompt: {error}") from error
    if tokenizer.end_of_text is None:
        raise UserError(
            "prompt: is empty; this tokenizer has no token that ends a document, after which a new "
            "one could begin; give the text a beginning"
        )
    return [tokenizer.end_of_text]


def streamed(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """The text of tokens, piece by piece as they are made: a character of several tokens appears
    with the last of them."""
    kept: list[int] = []
    shown = 0
    for token in tokens:
        kept.append(int(token))
        text = tokenizer.decode(kept)
        # The last character may not be complete yet: each of its bytes is then a replacement.
        complete = len(text.rstrip("\ufffd"))
        if complete > shown:
            yield text[shown:complete]
            shown = complete
        if complete == len(text) and len(kept) > 16:
            tail = tokenizer.decode(kept[-8:])  # the next text may depend on a few tokens before it
            if text.endswith(tail) and "\ufffd" not in tail:  # no character begins before them
                kept, shown = kept[-8:], len(tail)
    if kept:
        yield tokenizer.decode(kept)[shown:]
