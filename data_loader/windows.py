"""Examples for a language model: windows of a long row of tokens, (tokens, the next tokens)."""

import copy
import hashlib
from bisect import bisect_right
from itertools import accumulate

import numpy as np

from data_loader.base import Data
from data_loader.loader import SHIFT, collate, collated, random_stream
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
        slots = np.asarray(indices, np.int64) * self.length
        places = (self.first + slots) % self.labels
        if len(self.stream.arrays) == 1 and (places + self.length <= self.labels).all():
            pieces = self.stream.arrays[0].take(places[:, None] + np.arange(self.length + 1))
            self.check(places, pieces)
            x, y = pieces[:, :-1].astype(np.int32), pieces[:, 1:].astype(np.int32)
            begins = np.zeros(x.shape, bool)
        else:
            x, y, begins = self.rows_around(places)
        for row in np.flatnonzero(slots + self.length > self.labels):
            y[row, max(self.labels - slots[row], 0) :] = IGNORED
        begins[:, 0] = True
        return (x, y) if self.boundary is None else self.apart(x, y, begins)

    def rows_around(self, places):
        """(tokens, labels, where the stream begins again) of windows that may reach beyond the end
        of the stream, or of a file."""
        x = np.empty((len(places), self.length), np.int32)
        y, begins = np.empty_like(x), np.zeros(x.shape, bool)
        for row, place in enumerate(places.tolist()):
            filled = 0
            while filled < self.length:
                count = min(self.length - filled, self.labels - place)
                piece = self.stream.take(place, count + 1)
                self.check([place], piece[None])
                x[row, filled : filled + count] = piece[:-1]
                y[row, filled : filled + count] = piece[1:]
                begins[row, filled] = True
                filled, place = filled + count, 0
        return x, y, begins

    def check(self, places, pieces):
        """Raise for a token outside the vocabulary."""
        if pieces.max() >= self.vocab_size:
            for place, piece in zip(places, pieces, strict=True):
                self.stream.check(int(place), piece, self.vocab_size)

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


def window_data(sets, length, **facts):
    """The Data of {set: Windows}; `facts` are fields of Data, such as vocab_size."""
    for name, windows in sets.items():
        if windows.labels < length:
            raise UserError(
                f"{windows.source}: the {name} set has {len(windows.stream)} tokens, too few for "
                f"one window of {length} and the token after it; make `length` smaller, or the "
                "set larger"
            )
    x, y = next(iter(sets.values()))[0]
    x = {name: np.zeros_like(a) for name, a in x.items()} if isinstance(x, dict) else x * 0
    sizes = {name: len(windows) for name, windows in sets.items()}
    return Data((x, y * 0), sizes, lambda: sets, ignore_label=IGNORED, **facts)
