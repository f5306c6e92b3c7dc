"""Files of tokens that are larger than memory: .bin as nanoGPT and llm.c write them, and .npy."""

from pathlib import Path
from typing import Literal

import numpy as np

from data_loader.base import Data
from data_loader.npy_files import header_of
from data_loader.record_files import paths
from data_loader.windows import Stream, Windows, window_data
from utils import UserError, cut
from utils.files import check_kind, open_file, parse_json, read_file
from utils.forms import Count, CountOrZero, LocalPath, checked

ABOUT = "tokens.json"  # facts that data_loader/tokenize.py writes about the files beside it
TOKENIZER = "tokenizer.json"
# llm.c: 256 int32 before the tokens: a number for each width, a version, the number of tokens.
HEADER = 256
LLM_C = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}
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
    files = {
        name: paths(pattern, ".bin")
        for name, pattern in {"train": train, "val": val, "test": test}.items()
        if pattern is not None
    }
    about = shared_description(
        list(dict.fromkeys(Path(f).parent for each in files.values() for f in each))
    )
    dtype, own = dtype or about.get("dtype"), tokenizer or about.get("tokenizer")
    made_by = tokenizer_at(own) if own else None
    vocab_size = vocab_size or about.get("vocab_size") or (made_by and made_by.vocab_size)
    if vocab_size is None:
        raise ValueError(
            "vocab_size: is unknown; set it (GPT-2's is 50257), or `tokenizer`, the file of the "
            "tokenizer that made the tokens"
        )
    if end_of_text is None:
        end_of_text = about.get("end_of_text", made_by and made_by.end_of_text)
    boundary = check_boundary(documents, end_of_text, vocab_size)
    dtype = dtype or ("uint32" if vocab_size > 2**16 else None)  # None: llm.c's, or uint16
    sets = {}
    for name, named in files.items():
        stream = Stream([(path, opened(path, dtype, vocab_size)) for path in named])
        source = f"{named[0]} and {len(named) - 1} more files" if len(named) > 1 else named[0]
        keywords = {"boundary": boundary, "tokenizer": made_by, "source": source}
        sets[name] = Windows(stream, length, vocab_size, **keywords)
    facts = {"vocab_size": vocab_size, "bytes_per_token": about.get("bytes_per_token")}
    return window_data(sets, length, tokenizer=made_by, **facts)


def check_boundary(documents, end_of_text, vocab_size):
    """The token at which documents are kept apart, or None."""
    if documents == "joined":
        return None
    if end_of_text is None or end_of_text >= vocab_size:
        found = "is unknown" if end_of_text is None else f"is {end_of_text}"
        raise ValueError(
            f"end_of_text: {found}; to keep documents apart, set it to the token that ends each "
            f"of them (GPT-2's is 50256), below the vocab_size {vocab_size}"
        )
    return end_of_text


def shared_description(folders):
    """The content of tokens.json in the first folder; raises if another folder's tokens were made
    with another tokenizer."""
    about = described(folders[0])
    for folder in folders[1:]:
        other = described(folder)
        if about and other and preparation_of(about) != preparation_of(other):
            raise UserError(
                f"{folder}: its tokens were made with another tokenizer than those in "
                f"{folders[0]}; prepare both with one --tokenizer, a tokenizer.json"
            )
    return about


def preparation_of(about):
    """The parts of tokens.json that must be equal for files that are used together."""
    tokenizer = tokenizer_at(about["tokenizer"]).to_json() if "tokenizer" in about else None
    return [about[key] for key in ("dtype", "vocab_size", "end_of_text")], tokenizer


def described(folder):
    """The content of tokens.json in a folder, {} without one; `tokenizer` is the path beside it."""
    path = folder / ABOUT
    if not path.exists():
        return {}
    try:
        kept = facts_of(parse_json(read_file(path).decode()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = cut(str(error), 200)
        raise UserError(
            f"{path}: is not what data_loader.tokenize writes ({why}); prepare the files again"
        ) from error
    beside = folder / TOKENIZER
    return kept | ({"tokenizer": str(beside)} if beside.exists() else {})


def facts_of(about):
    """The values of tokens.json that are used; raises if they cannot be what was written."""
    kept = {key: about[key] for key in ("dtype", "vocab_size", "end_of_text")}
    kept["bytes_per_token"] = about.get("bytes_per_token")
    vocab_size, end, rate = (kept[key] for key in ("vocab_size", "end_of_text", "bytes_per_token"))
    is_valid = {
        "dtype": kept["dtype"] in DTYPES,
        "vocab_size": type(vocab_size) is int and 1 <= vocab_size <= 2**31,
        "end_of_text": end is None or (type(end) is int and 0 <= end < 2**31),
        "bytes_per_token": rate is None or (type(rate) in (int, float) and 0 <= rate < 2**31),
    }
    for key, valid in is_valid.items():
        if not valid:
            raise ValueError(f"{key} is {kept[key]!r}")
    return kept


def tokenizer_at(path):
    from data_loader.tokenizers.saved import tokenizer_file

    return tokenizer_file(path)


def opened(path, dtype, vocab_size):
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


def numpy_file(path):
    with open_file(path) as file:
        header_of(file)  # which is limited
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(
            f"{path}: is {array.dtype}{list(array.shape)}; tokens are one row of integers, such "
            "as uint16"
        )
    return array


def binary_file(path, dtype):
    """A .bin file: raw numbers, or llm.c's header and then numbers."""
    size = Path(path).stat().st_size
    start = np.fromfile(path, "<i4", min(HEADER, size // 4)) if size >= 4 * HEADER else ()
    if len(start) and int(start[0]) in LLM_C:
        found, count = LLM_C[int(start[0])], int(start[2])
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


def check_looks(path, array, vocab_size):
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
        narrower = some.dtype == DTYPES["uint32"] and (some >= 2**16).mean() > 0.5
        hint = "; is it a file of uint16?" if narrower else "; is it of another tokenizer or dtype?"
        stream.check(int(start), some, vocab_size, hint)
