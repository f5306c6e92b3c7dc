"""Byte-pair encoding, by HuggingFace's `tokenizers`: trained on the text, or read from a file."""

import logging
from dataclasses import dataclass

import numpy as np

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
        return UntrainedBpe(vocab_size, min_frequency)
    if (vocab_size, min_frequency) != (SIZE, FREQUENCY):
        name = "min_frequency" if vocab_size == SIZE else "vocab_size"
        raise ValueError(f"{name}: the tokenizer in `file` is trained already; leave it out")
    from data_loader.tokenizers.saved import tokenizer_file

    return tokenizer_file(file, pattern)


def package():
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

    def train(self, documents):
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

    def __init__(self, made):
        made.no_padding()
        made.no_truncation()
        self.made, vocabulary = made, made.get_vocab()
        self.vocab_size = 1 + max(vocabulary.values(), default=0)
        self.end_of_text = next((vocabulary[end] for end in ENDS if end in vocabulary), None)

    def encode(self, text):
        """The tokens of a text, without any that a model's template would add."""
        ids = self.made.encode(text, add_special_tokens=False).ids
        return np.array(ids, token_dtype(self.vocab_size))

    def decode(self, tokens):
        """The text of tokens; the end of a document is left out."""
        tokens = checked_tokens(tokens, self.vocab_size)
        if self.end_of_text is not None:
            tokens = tokens[tokens != self.end_of_text]
        return self.made.decode(tokens.tolist(), skip_special_tokens=False)

    def to_json(self):
        return self.made.to_str()


def bpe_of(make, source):
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
