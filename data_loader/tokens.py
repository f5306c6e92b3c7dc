"""Files of tokens that are larger than memory: .bin as nanoGPT and llm.c write them, and .npy."""

from pathlib import Path
from typing import Literal, NotRequired, TypedDict

import numpy as np

from data_loader.base import Data, named_sets
from data_loader.npy_files import header_of
from data_loader.paths import paths
from data_loader.tokenizers.saved import from_json, tokenizer_file
from data_loader.windows import Stream, window_data
from utils import UserError, cut
from utils.files import check_kind, open_file, parse_json, read_file
from utils.forms import Count, CountOrZero, LocalPath, NonNegative, checked, form

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
    files = {name: paths(each, ".bin") for name, each in named_sets(train, val, test).items()}
    about = shared_description(
        list(dict.fromkeys(Path(f).parent for each in files.values() for f in each))
    )
    dtype = dtype or about.get("dtype")
    if tokenizer:
        made_by = tokenizer_file(tokenizer)
    else:
        made_by = from_json(about["tokenizer"]) if "tokenizer" in about else None
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


def described(folder):
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


def shared_description(folders):
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
        hint = "; is it of another tokenizer, or of another dtype, uint16 or uint32?"
        stream.check(int(start), some, vocab_size, hint)
