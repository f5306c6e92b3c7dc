"""Tokenizers without merges: one token for each byte, or for each character."""

import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from data_loader.base import Tokenizer
from utils import UserError

BYTES = 256


def bytes() -> Tokenizer:  # named in configs
    """One token for each byte of the text in UTF-8, and one that ends a document: 257 tokens."""
    return ByteTokenizer()


def characters(alphabet: str | None = None) -> Tokenizer:
    """One token for each character that occurs in the text, or in `alphabet` if it is given, and
    one that ends a document."""
    if alphabet:
        return CharacterTokenizer(alphabet)
    return UntrainedCharacters()  # pyright: ignore[reportReturnType]  # an UntrainedTokenizer


class ByteTokenizer:
    """Every text can be encoded; tokens that are not valid UTF-8 are decoded as U+FFFD."""

    vocab_size: int = BYTES + 1
    end_of_text: int | None = BYTES

    def encode(self, text: str) -> np.ndarray:
        """The tokens of a text, uint16."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def decode(self, tokens: ArrayLike) -> str:
        """The text of tokens; the end of a document is left out."""
        known = checked_tokens(tokens, self.vocab_size)
        return known[known < BYTES].astype(np.uint8).tobytes().decode(errors="replace")

    def to_json(self) -> str:
        return json.dumps({"type": "bytes"})


@dataclass
class UntrainedCharacters:
    """A character tokenizer whose alphabet comes from the text."""

    def train(self, documents: Iterable[str]) -> "CharacterTokenizer":
        """The tokenizer of the characters that occur in the documents."""
        return CharacterTokenizer("".join(sorted(set().union(*map(set, documents)))))


class CharacterTokenizer:
    """The characters of an alphabet, numbered in its order; the last token ends a document."""

    def __init__(self, alphabet: str) -> None:
        alphabet.encode()  # an error for half of a character, which JSON can express
        codes = code_points(alphabet)
        if len(np.unique(codes)) != len(codes):
            twice = next(c for i, c in enumerate(alphabet) if c in alphabet[:i])
            raise UserError(f"characters: {twice!r} is in the alphabet twice")
        self.alphabet, self.codes = alphabet, codes
        self.end_of_text: int | None = len(codes)
        self.vocab_size = len(codes) + 1
        # The token of each code point; -1 if it is not in the alphabet.
        self.tokens = np.full(int(codes.max(initial=0)) + 2, -1, np.int32)
        self.tokens[codes] = np.arange(len(codes))

    def encode(self, text: str) -> np.ndarray:
        """The tokens of a text; a character outside the alphabet is an error."""
        codes = code_points(text)
        tokens = self.tokens[np.minimum(codes, len(self.tokens) - 1)]
        if len(unknown := np.flatnonzero(tokens < 0)):
            place = int(unknown[0])
            raise UserError(
                f"line {text.count(chr(10), 0, place) + 1}, column "
                f"{place - text.rfind(chr(10), 0, place)}: the character {text[place]!r} "
                f"(U+{ord(text[place]):04X}) is not among the {len(self.codes)} of the tokenizer"
            )
        return tokens.astype(token_dtype(self.vocab_size))

    def decode(self, tokens: ArrayLike) -> str:
        """The text of tokens; the end of a document is left out."""
        known = checked_tokens(tokens, self.vocab_size)
        return self.codes[known[known < len(self.codes)]].tobytes().decode("utf-32-le")

    def to_json(self) -> str:
        return json.dumps({"type": "characters", "alphabet": self.alphabet})


def token_dtype(vocab_size: int) -> np.dtype:
    """The type that stores the tokens of a vocabulary."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def code_points(text: str) -> np.ndarray:
    """The code point of every character."""
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), "<u4")


def checked_tokens(tokens: ArrayLike, vocab_size: int) -> np.ndarray:
    """Tokens as an array; an error if one is outside the vocabulary."""
    row = np.asarray(tokens, np.int64).reshape(-1)
    if len(outside := np.flatnonzero((row < 0) | (row >= vocab_size))):
        place = outside[0]
        raise UserError(
            f"token {place} is {row[place]}, outside the vocabulary 0..{vocab_size - 1}"
        )
    return row
