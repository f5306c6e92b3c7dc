"""Examples for a language model: windows of a long row of tokens, (tokens, the next tokens).

The dataset `tokens` reads files of tokens that are larger than memory: .bin as nanoGPT and llm.c
write them, and .npy.
"""

import copy
import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

import numpy as np

from data_loader.base import Batch, CollateFn, Data, DataOfHelper, Tokenizer, named_sets
from data_loader.loader import SHIFT, collate, collated, random_stream
from data_loader.nest import Nest, map_nest
from data_loader.npy_files import header_of
from data_loader.paths import paths
from data_loader.tokenizers.saved import from_json, tokenizer_file
from utils import UserError, cut
from utils.files import check_kind, open_file, parse_json, read_file
from utils.forms import Count, CountOrZero, LocalPath, NonNegative, checked, form

IGNORED = -1  # the label of positions that do not count
SAMPLES = 64  # windows in the fingerprint of a stream
ABOUT = "tokens.json"  # facts that data_loader/tokenize.py writes about the files beside it
TOKENIZER = "tokenizer.json"
# llm.c: 256 int32 before the tokens: a number for each width, a version, the number of tokens.
HEADER = 256
LLM_C = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}
DType: TypeAlias = Literal["uint16", "uint32"]
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
FOR_TEXT = "for text, use the dataset `text`, or prepare it by `python -m data_loader.tokenize`"
LOOKED_AT = 4096  # tokens at each of several places of a file, to find one of another type


@checked
def tokens(
    train: LocalPath,
    val: LocalPath | None = None,
    test: LocalPath | None = None,
    length: Count = 1024,
    dtype: Literal["uint16", "uint32"] | None = None,
    vocab_size: Count | None = None,
    documents: Literal["joined", "apart"] = "joined",
    end_of_text: CountOrZero | None = None,
    tokenizer: LocalPath | None = None,
) -> Data:
    """Windows of `length` tokens from .bin or .npy files, a path or a pattern per set, of any size.
    `dtype`, `vocab_size`, `end_of_text` and the file of the `tokenizer` are found beside files that
    `python -m data_loader.tokenize` wrote. With documents "apart", the tokens of a document do not
    see other documents in the same window."""
    files = {name: paths(each, ".bin") for name, each in named_sets(train, val, test).items()}
    about = shared_description(
        list(dict.fromkeys(Path(f).parent for each in files.values() for f in each))
    )
    dtype = dtype or about.get("dtype")
    made_by: Tokenizer | None = None
    if tokenizer:
        made_by = tokenizer_file(tokenizer)
    elif "tokenizer" in about:
        made_by = from_json(about["tokenizer"])
    vocab_size = vocab_size or about.get("vocab_size") or (made_by and made_by.vocab_size)
    if vocab_size is None:
        raise ValueError(
            "vocab_size: is unknown; set it (GPT-2's is 50257), or `tokenizer`, the file of the "
            "tokenizer that made the tokens"
        )
    if end_of_text is None:
        end_of_text = about.get("end_of_text", made_by and made_by.end_of_text)
    dtype = dtype or ("uint32" if vocab_size > 2**16 else None)  # None: llm.c's, or uint16
    streams = {}
    for name, named in files.items():
        stream = Stream([(path, opened(path, dtype, vocab_size)) for path in named])
        more = f" and {len(named) - 1} more files" if len(named) > 1 else ""
        streams[name] = f"{named[0]}{more}", stream
    return window_data(
        streams,
        length,
        documents,
        vocab_size=vocab_size,
        end_of_text=end_of_text,
        tokenizer=made_by,
        bytes_per_token=about.get("bytes_per_token"),
    )


class About(TypedDict):
    """The file tokens.json beside files of tokens."""

    dtype: Literal["uint16", "uint32"]
    vocab_size: Count
    end_of_text: CountOrZero | None
    bytes_per_token: NotRequired[NonNegative | None]
    tokens: NotRequired[dict]


def described(folder: Path) -> dict[str, Any]:
    """The content of tokens.json in a folder, with the text of the tokenizer beside it; {} without
    one."""
    path, beside = folder / ABOUT, folder / TOKENIZER
    if not path.exists():
        return {}
    try:
        about = form(About).read(parse_json(read_file(path).decode()), ABOUT)
    except (OSError, ValueError) as error:
        why = cut(str(error), 200)
        raise UserError(
            f"{path}: is not what data_loader.tokenize writes ({why}); prepare the files again"
        ) from error
    return about | ({"tokenizer": tokenizer_file(beside).to_json()} if beside.exists() else {})


def shared_description(folders: list[Path]) -> dict[str, Any]:
    """The content of tokens.json in the first folder; raises if another folder's tokens were made
    with another tokenizer."""
    first = described(folders[0])
    for folder in folders[1:]:
        other = described(folder)
        keys = ("dtype", "vocab_size", "end_of_text", "tokenizer") if first and other else ()
        if any(first.get(key) != other.get(key) for key in keys):
            raise UserError(
                f"{folder}: its tokens were made with another tokenizer than those in "
                f"{folders[0]}; prepare both with one --tokenizer, a tokenizer.json"
            )
    return first


def opened(path: str, dtype: DType | None, vocab_size: int) -> np.ndarray:
    """The tokens of a file, memory-mapped, after checking some of them for another type."""
    try:
        check_kind(path)
        if not path.endswith((".bin", ".npy")):
            raise UserError(f"{path}: is neither a .bin nor a .npy file; {FOR_TEXT}")
        array = numpy_file(path) if path.endswith(".npy") else binary_file(path, dtype)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as tokens: {error}") from error
    check_looks(path, array, vocab_size)
    return array


def numpy_file(path: str) -> np.ndarray:
    with open_file(path) as file:
        header_of(file)  # which is limited
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(
            f"{path}: is {array.dtype}{list(array.shape)}; tokens are one row of integers, such "
            "as uint16"
        )
    return array


def binary_file(path: str, dtype: DType | None) -> np.ndarray:
    """A .bin file: raw numbers, or llm.c's header and then numbers."""
    size = Path(path).stat().st_size
    magic, _, count = np.fromfile(path, "<i4", 3).tolist() if size >= 4 * HEADER else (0, 0, 0)
    if magic in LLM_C:
        found = LLM_C[magic]
        if dtype and DTYPES[dtype] != found:
            raise UserError(f"{path}: its header says {found.name}, dtype is {dtype}; leave it out")
        if size != 4 * HEADER + count * found.itemsize:
            raise UserError(
                f"{path}: has {size} bytes, but its header promises {count} tokens of "
                f"{found.name}; copy or prepare it again"
            )
        return np.memmap(path, found, "r", 4 * HEADER, (count,))
    kind = DTYPES[dtype or "uint16"]
    if size == 0 or size % kind.itemsize:
        fix = "it is empty" if size == 0 else "it is damaged, or of another dtype"
        raise UserError(f"{path}: has {size} bytes, no whole number of {kind.name}: {fix}")
    return np.memmap(path, kind, "r")


def check_looks(path: str, array: np.ndarray, vocab_size: int) -> None:
    """Refuse a file whose numbers are of another type, or of another vocabulary."""
    stream, count = Stream([(path, array)]), min(LOOKED_AT, len(array))
    for start in np.linspace(0, len(array) - count, 8, dtype=np.int64):
        some = stream.take(int(start), count) if count else array
        if some.dtype == DTYPES["uint16"] and len(some) >= 8 and path.endswith(".bin"):
            wide = some[: len(some) // 2 * 2].view("<u4")
            # The upper half of each uint32 below the vocabulary: rarely anything but zeros.
            if (wide < max(vocab_size, 2**16)).all() and some.any():
                raise UserError(
                    f"{path}: every second number is 0, as in a file of uint32 that is read as "
                    "uint16; set dtype to uint32"
                )
        hint = "; is it of another tokenizer, or of another dtype, uint16 or uint32?"
        stream.check(int(start), some, vocab_size, hint)


# Windows.


class Stream:
    """The tokens of several arrays, one after the other; the arrays may be memory-mapped files.

    `named` is [(name for messages, array)].
    """

    def __init__(self, named: Sequence[tuple[str, np.ndarray]]) -> None:
        self.names = [name for name, _ in named]
        # A plain view of a memory map: slices of np.memmap itself cost ten times as much.
        arrays = [np.asarray(array) for _, array in named]
        self.dtypes = [array.dtype for array in arrays]
        # As unsigned numbers, negative tokens are outside of every vocabulary.
        unsigned = [f"{dtype.byteorder}u{dtype.itemsize}" for dtype in self.dtypes]
        self.arrays = [array.view(u) for array, u in zip(arrays, unsigned, strict=True)]
        self.ends = list(accumulate(map(len, self.arrays)))

    def __len__(self) -> int:
        return self.ends[-1]

    def locate(self, index: int) -> tuple[int, int]:
        """(the number of the array that holds a token, the token's place in it)"""
        i = bisect_right(self.ends, index)
        return i, index - (self.ends[i - 1] if i else 0)

    def take(self, start: int, count: int) -> np.ndarray:
        """`count` tokens, beginning at the place `start`."""
        i, first = self.locate(start)
        taken = self.arrays[i][first : first + count]
        while len(taken) < count:
            i += 1
            taken = np.concatenate([taken, self.arrays[i][: count - len(taken)]])
        return taken

    def check(self, start: int, tokens: np.ndarray, vocab_size: int, hint: str = "") -> None:
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

    def __init__(
        self,
        stream: Stream,
        length: int,
        vocab_size: int,
        *,
        boundary: int | None = None,
        tokenizer: Tokenizer | None = None,
        source: str | None = None,
    ) -> None:
        self.stream, self.length, self.vocab_size = stream, length, vocab_size
        self.tokens_per_example, self.ignore_label = length, IGNORED
        self.boundary, self.tokenizer = boundary, tokenizer
        self.source = source or ", ".join(stream.names)
        self.labels = len(stream) - 1  # each token but the first is a label
        self.first = 0  # where the first window begins

    def __len__(self) -> int:
        return -(-self.labels // self.length)

    def __getitem__(self, index: int) -> Nest:
        x, y = self.rows([range(len(self))[index]])
        return ({name: a[0] for name, a in x.items()} if isinstance(x, dict) else x[0]), y[0]

    def in_epoch(self, seed: int, epoch: int) -> "Windows":
        """These tokens in windows that begin elsewhere, at a start drawn for the epoch."""
        shifted = copy.copy(self)
        shifted.first = int(random_stream(seed, SHIFT + epoch).integers(self.labels))
        return shifted

    def read_batches(self, order: Iterable[np.ndarray], collate_fn: CollateFn) -> Iterator[Batch]:
        """One batch for each row of `order`."""
        for row in order:
            if collate_fn is collate:
                yield self.rows(row)
            else:
                yield collated([self[int(i)] for i in row], collate_fn)

    def rows(self, indices: np.ndarray | list[int]) -> Batch:
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

    def apart(self, x: np.ndarray, y: np.ndarray, begins: np.ndarray) -> Batch:
        """A batch whose documents have different segments."""
        ends = x == self.boundary
        begins[:, 1:] |= ends[:, :-1]
        segments = np.cumsum(begins, axis=1, dtype=np.int32)
        segments[y == IGNORED] = 0
        y[ends] = IGNORED
        return {"tokens": x, "segments": segments}, y

    def fingerprint(self) -> str:
        """A short hash of windows from all over the stream, and of its length."""
        digest = hashlib.sha256(f"{len(self.stream)} {self.length} {self.boundary}".encode())
        for start in np.linspace(0, len(self.stream) - self.length, SAMPLES, dtype=np.int64):
            digest.update(self.stream.take(int(start), self.length).astype("<u4").data)
        return digest.hexdigest()[:16]


def window_data(
    streams: Mapping[str, tuple[str, Stream]],
    length: int,
    documents: Literal["joined", "apart"],
    *,
    vocab_size: int,
    end_of_text: int | None = None,
    tokenizer: Tokenizer | None = None,
    bytes_per_token: float | None = None,
) -> DataOfHelper:
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
