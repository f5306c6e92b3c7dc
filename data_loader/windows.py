"""Examples for a language model: windows of a long row of tokens, (tokens, the next tokens)."""

import copy
import hashlib
from bisect import bisect_right
from itertools import accumulate

import numpy as np

from data_loader.base import Data
from data_loader.loader import SHIFT, collate, collated, random_stream
from data_loader.nest import map_nest
from utils import UserError

IGNORED = -1  # the label of positions that do not count
SAMPLES = 64  # windows in the fingerprint of a stream


class Stream:
    """The tokens of several arrays, one after the other; the arrays may be memory-mapped files.

    `named` is [(name for messages, array)].
    """

    def __init__(self, named):
        self.names = [name for name, _ in named]
        # A plain view of a memory map: slices of np.memmap itself cost ten times as much.
        arrays = [np.asarray(array) for _, array in named]
        self.dtypes = [array.dtype for array in arrays]
        # As unsigned numbers, negative tokens are outside of every vocabulary.
        unsigned = [f"{dtype.byteorder}u{dtype.itemsize}" for dtype in self.dtypes]
        self.arrays = [array.view(u) for array, u in zip(arrays, unsigned, strict=True)]
        self.ends = list(accumulate(map(len, self.arrays)))

    def __len__(self):
        return self.ends[-1]

    def locate(self, index):
        """(the number of the array that holds a token, the token's place in it)"""
        i = bisect_right(self.ends, index)
        return i, index - (self.ends[i - 1] if i else 0)

    def take(self, start, count):
        """`count` tokens, beginning at the place `start`."""
        i, first = self.locate(start)
        taken = self.arrays[i][first : first + count]
        while len(taken) < count:
            i += 1
            taken = np.concatenate([taken, self.arrays[i][: count - len(taken)]])
        return taken

    def check(self, start, tokens, vocab_size, hint=""):
        """Raise for the first of the tokens, which begin at `start`, outside the vocabulary."""
        outside = np.flatnonzero(tokens >= vocab_size)
        if len(outside):
            i, place = self.locate(start + int(outside[0]))
            [token] = self.arrays[i][place : place + 1].view(self.dtypes[i])
            raise UserError(
                f"{self.names[i]}: token {place} is {token}, outside the vocabulary "
                f"0..{vocab_size - 1}{hint}"
            )


class Windows:
    """Windows of `length` tokens, in which each token of a stream is predicted exactly once.

    Each shuffled epoch draws where the first window begins; the window that reaches the end of the
    stream continues at its beginning. Positions of the last window beyond the number of tokens
    have the label IGNORED. With a `boundary`, the token that ends a document, the inputs are
    {"tokens", "segments"}: documents in a window have the segments 1, 2, ..., ignored positions
    have 0, and no document's end predicts the beginning of the next.
    """

    def __init__(self, stream, length, vocab_size, *, boundary=None, tokenizer=None, source=None):
        self.stream, self.length, self.vocab_size = stream, length, vocab_size
        self.tokens_per_example, self.ignore_label = length, IGNORED
        self.boundary, self.tokenizer = boundary, tokenizer
        self.source = source or ", ".join(stream.names)
        self.labels = len(stream) - 1  # each token but the first is a label
        self.first = 0  # where the first window begins

    def __len__(self):
        return -(-self.labels // self.length)

    def __getitem__(self, index):
        x, y = self.rows([range(len(self))[index]])
        return ({name: a[0] for name, a in x.items()} if isinstance(x, dict) else x[0]), y[0]

    def in_epoch(self, seed, epoch):
        """These tokens in windows that begin elsewhere, at a start drawn for the epoch."""
        shifted = copy.copy(self)
        shifted.first = int(random_stream(seed, SHIFT + epoch).integers(self.labels))
        return shifted

    def read_batches(self, order, collate_fn):
        """One batch for each row of `order`."""
        for row in order:
            if collate_fn is collate:
                yield self.rows(row)
            else:
                yield collated([self[int(i)] for i in row], collate_fn)

    def rows(self, indices):
        """The batch of these windows."""
        x = np.empty((len(indices), self.length), np.int32)
        y, begins = np.empty_like(x), np.zeros(x.shape, bool)  # begins: a document or the stream
        for row, slot in enumerate(np.asarray(indices, np.int64).tolist()):
            place = (self.first + slot * self.length) % self.labels
            filled = 0
            while filled < self.length:  # a window may reach beyond the end of the stream
                count = min(self.length - filled, self.labels - place)
                piece = self.stream.take(place, count + 1)
                if piece.max() >= self.vocab_size:
                    self.stream.check(place, piece, self.vocab_size)
                x[row, filled : filled + count] = piece[:-1]
                y[row, filled : filled + count] = piece[1:]
                begins[row, filled] = True
                filled, place = filled + count, 0
            y[row, max(self.labels - slot * self.length, 0) :] = IGNORED
        return (x, y) if self.boundary is None else self.apart(x, y, begins)

    def apart(self, x, y, begins):
        """A batch whose documents have different segments."""
        ends = x == self.boundary
        begins[:, 1:] |= ends[:, :-1]
        segments = np.cumsum(begins, axis=1, dtype=np.int32)
        segments[y == IGNORED] = 0
        y[ends] = IGNORED
        return {"tokens": x, "segments": segments}, y

    def fingerprint(self):
        """A short hash of windows from all over the stream, and of its length."""
        digest = hashlib.sha256(f"{len(self.stream)} {self.length} {self.boundary}".encode())
        for start in np.linspace(0, len(self.stream) - self.length, SAMPLES, dtype=np.int64):
            digest.update(self.stream.take(int(start), self.length).astype("<u4"))
        return digest.hexdigest()[:16]


def window_data(
    streams,
    length,
    documents,
    *,
    vocab_size,
    end_of_text=None,
    tokenizer=None,
    bytes_per_token=None,
):
    """The Data of {set: (source, Stream)}. With `documents` "apart", attention stays within the
    documents that `end_of_text` ends."""
    if documents == "apart" and (end_of_text is None or end_of_text >= vocab_size):
        found = "is unknown" if end_of_text is None else f"is {end_of_text}"
        raise ValueError(
            f"end_of_text: {found}; to keep documents apart, set it to the token that ends each "
            f"of them (GPT-2's is 50256), below the vocab_size {vocab_size}"
        )
    boundary = end_of_text if documents == "apart" else None
    sets = {
        name: Windows(
            stream, length, vocab_size, boundary=boundary, tokenizer=tokenizer, source=source
        )
        for name, (source, stream) in streams.items()
    }
    for name, windows in sets.items():
        if windows.labels < length:
            raise UserError(
                f"{windows.source}: the {name} set has {len(windows.stream)} tokens, too few for "
                f"one window of {length} and the token after it; make `length` smaller, or the "
                "set larger"
            )
    example = map_nest(np.zeros_like, next(iter(sets.values()))[0])
    return Data(
        example,
        {name: len(windows) for name, windows in sets.items()},
        lambda: sets,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        bytes_per_token=bytes_per_token,
        ignore_label=IGNORED,
    )
