"""Byte-pair encoding, by HuggingFace's `tokenizers`: trained on the text, or read from a file.

The .tiktoken files of OpenAI have lines of a token's bytes in base64 and its number. They hold no
merges: two tokens may be joined if their joint bytes are a token, the one with the smallest number
first. HuggingFace's `tokenizers` needs a list of merges in this order.
"""

import base64
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from data_loader.base import Tokenizer
from data_loader.tokenizers.plain import checked_tokens, token_dtype
from utils import UserError, cut
from utils.forms import Count, LocalPath, checked

END_OF_TEXT = "<|endoftext|>"
# What ends a document, in the order in which it is looked for.
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
MISSING = (
    "bpe: needs the package `tokenizers`, which is not installed: "
    "run `pip install -r training/optional.txt`"
)
SMALLEST = 257  # every byte, and the end of a document
SIZE, FREQUENCY = 8192, 2  # of a trained tokenizer, by default
MOST_TOKENS = 2**24

GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
CL100K = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"""
    r"""| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
O200K = (
    rf"""[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    rf"""|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
MOST_TIKTOKEN = 2**24  # of a file; the largest that are published have 4 million
LONGEST = 2**10  # bytes of a token: every place where it can be cut in two is tried
MIDDLE = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
# By the name of the file: (the regex that splits text, {special token: its number}).
KNOWN = {
    "gpt2": (GPT2, {END_OF_TEXT: 50256}),
    "r50k_base": (GPT2, {END_OF_TEXT: 50256}),
    "p50k_base": (GPT2, {END_OF_TEXT: 50256}),
    "cl100k_base": (CL100K, {END_OF_TEXT: 100257, **MIDDLE, "<|endofprompt|>": 100276}),
    "o200k_base": (O200K, {END_OF_TEXT: 199999, "<|endofprompt|>": 200018}),
}


@checked
def bpe(
    vocab_size: Count = SIZE,
    min_frequency: Count = FREQUENCY,
    file: LocalPath | None = None,
    pattern: str | None = None,
) -> Tokenizer:
    """Byte-pair encoding as in GPT-2, with `vocab_size` tokens trained on the text, of pairs that
    occur at least `min_frequency` times; or read from a `file`: HuggingFace's tokenizer.json, or a
    .tiktoken file with the regex `pattern` that splits text."""
    package()
    if file is None:
        if pattern is not None:
            raise ValueError("pattern: belongs to a .tiktoken `file`; leave it out")
        if vocab_size < SMALLEST:
            raise ValueError(f"vocab_size: must be at least {SMALLEST}, got {vocab_size}")
        return UntrainedBpe(vocab_size, min_frequency)  # pyright: ignore[reportReturnType]  # an UntrainedTokenizer
    if (vocab_size, min_frequency) != (SIZE, FREQUENCY):
        name = "min_frequency" if vocab_size == SIZE else "vocab_size"
        raise ValueError(f"{name}: the tokenizer in `file` is trained already; leave it out")
    from data_loader.tokenizers.saved import tokenizer_file

    return tokenizer_file(file, pattern)


def package() -> Any:
    """The package `tokenizers`."""
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(MISSING) from error
    return tokenizers


@dataclass
class UntrainedBpe:
    """A byte-pair encoding that is trained on the text."""

    vocab_size: int
    min_frequency: int

    def train(self, documents: Iterable[str]) -> "Bpe":
        """The tokenizer with the most frequent merges of the documents."""
        library = package()
        made = library.Tokenizer(library.models.BPE())
        made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            min_frequency=self.min_frequency,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        made.train_from_iterator(documents, trainer)
        trained = Bpe(made)
        if trained.vocab_size < self.vocab_size:
            logging.getLogger("main").info(
                "bpe: the vocabulary has only %d tokens, not %d: no other pair occurs %d times",
                *(trained.vocab_size, self.vocab_size, self.min_frequency),
            )
        return trained


class Bpe:
    """A tokenizer of HuggingFace's `tokenizers`."""

    def __init__(self, made: Any) -> None:
        made.no_padding()
        made.no_truncation()
        self.made, vocabulary = made, made.get_vocab()
        self.vocab_size: int = 1 + max(vocabulary.values(), default=0)
        self.end_of_text: int | None = next(
            (vocabulary[end] for end in ENDS if end in vocabulary), None
        )

    def encode(self, text: str) -> np.ndarray:
        """The tokens of a text, without any that a model's template would add."""
        ids = self.made.encode(text, add_special_tokens=False).ids
        return np.array(ids, token_dtype(self.vocab_size))

    def decode(self, tokens: ArrayLike) -> str:
        """The text of tokens; the end of a document is left out."""
        known = checked_tokens(tokens, self.vocab_size)
        if self.end_of_text is not None:
            known = known[known != self.end_of_text]
        return self.made.decode(known.tolist(), skip_special_tokens=False)

    def to_json(self) -> str:
        return self.made.to_str()


def bpe_of(make: Callable[[Any], Any], source: object) -> Bpe:
    """The tokenizer that make(package) returns, from a file of the user's."""
    try:
        made = Bpe(make(package()))
    except UserError:
        raise
    except Exception as error:  # the package raises plain exceptions
        why = cut(str(error), 1000)
        raise UserError(f"{source}: is not a tokenizer of `tokenizers`: {why}") from error
    if made.vocab_size > MOST_TOKENS:  # the package tries all numbers, also those of no token
        number = made.vocab_size - 1
        raise UserError(f"{source}: a token has the number {number}, above {MOST_TOKENS - 1}")
    return made


# Files.


def tokenizer_of(path: Path, data: bytes, pattern: str | None = None) -> Bpe:
    """The tokenizer in the bytes of a .tiktoken file. A file's published name gives the regex and
    the special tokens; in any other file, `pattern` is the regex, and the token that ends a
    document is the number after all others."""
    ranks = read_ranks(path, data)
    if path.stem not in KNOWN and pattern is None:
        raise UserError(
            f"{path}: the regex that splits its text is not in the file; set `pattern`, or give "
            f"the file its published name ({', '.join(KNOWN)})"
        )
    known, special = KNOWN.get(path.stem, (None, {END_OF_TEXT: 1 + max(ranks.values())}))
    letters = byte_letters()
    name = {token: "".join(letters[byte] for byte in token) for token in ranks}

    def make(library: Any) -> Any:
        split, levels = library.pre_tokenizers.Split, library.pre_tokenizers.ByteLevel
        vocabulary = {name[token]: rank for token, rank in ranks.items()} | special
        merges = [(name[left], name[right]) for left, right in merges_of(ranks)]
        made = library.Tokenizer(library.models.BPE(vocabulary, merges, ignore_merges=True))
        made.pre_tokenizer = library.pre_tokenizers.Sequence(
            [
                split(library.Regex(pattern or known), "isolated"),
                levels(add_prefix_space=False, use_regex=False),
            ]
        )
        made.decoder = library.decoders.ByteLevel()
        made.add_special_tokens(list(special))
        return made

    return bpe_of(make, path)


def read_ranks(path: Path, data: bytes) -> dict[bytes, int]:
    """{bytes of a token: its number} of a .tiktoken file."""
    ranks = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            encoded, number_text = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(number_text)
            if not 0 < len(token) <= LONGEST or not 0 <= rank < MOST_TOKENS:
                raise ValueError("its length or its number cannot be that of a token")
            ranks[token] = rank
        except ValueError as error:
            raise UserError(
                f"{path}: line {number} is not a token in base64 and its number ({error}); "
                "copy the file again"
            ) from error
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise UserError(f"{path}: has no token for the byte {missing[0]}; copy the file again")
    return ranks


def merges_of(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """All pairs of tokens that make up a token, in the order in which they are joined."""
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [(a, b) for a, b in cuts if a in ranks and b in ranks]
        yield from sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def byte_letters() -> dict[int, str]:
    """{byte: the visible character by which GPT-2's files name it}."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in visible}
    hidden = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
