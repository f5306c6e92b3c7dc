"""Text files: those that a path means, and the text in them, which must be UTF-8."""

import os
from pathlib import Path

from data_loader.record_files import paths
from data_loader.tokens import ABOUT
from utils import UserError, check_memory
from utils.files import open_file

# What data_loader/tokenize.py has done so far, in the folder of its results.
PARTS, PLAN = "parts", "plan.json"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # the marks at the beginning of a file


def text_files(name):
    """The files of a path, a folder with all folders in it, or a pattern; sorted."""
    files = files_below(name) if Path(name).is_dir() else paths(name, ".txt")
    for file in map(Path, files):
        is_plan = file.name == PLAN and file.parent.name == PARTS
        if file.suffix.lower() in (".bin", ".npy") or file.name == ABOUT or is_plan:
            raise UserError(
                f"{file}: belongs to prepared tokens, and is not text; move the tokens out of "
                f"{name}, or name the text files alone, as with a pattern; the dataset `tokens` "
                "reads prepared tokens"
            )
    return files


def files_below(folder):
    """The files of a folder and of all folders in it, but for hidden ones; sorted."""
    files = sorted(
        str(path)
        for path in Path(folder).rglob("*")
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    )
    if not files:
        raise UserError(f"{folder}: has no files in it; put text files there, in UTF-8")
    return files


def text_of(path, start=0, size=None, line=1):
    """The text of a file, or of `size` bytes from `start` on, where `line` begins."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size if size is None else size
            check_memory(path, size)
            file.seek(start)
            data = file.read(size)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    return decoded(path, data, start, line)


def decoded(path, data, start=0, line=1):
    """The text in the bytes of a file, which must be UTF-8. Lines end with \\n, also where the file
    has \\r\\n, as files of Windows do."""
    if start == 0 and data.startswith(UTF_16):
        fix = "convert it with `iconv -f utf-16 -t utf-8`"
        raise UserError(f"{path}: is UTF-16, by its first bytes, {data[:2].hex(' ')}; {fix}")
    if (place := data.find(0)) >= 0:
        raise UserError(
            f"{path}: {place_of(data, place, start, line)} is 0, which is in no text; convert "
            "UTF-16 with `iconv -f utf-16 -t utf-8`, read tokens with the dataset `tokens`, and "
            "leave out other binary files"
        )
    try:
        return unix_lines(data.decode("utf-8-sig" if start == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        # The decoder does not count the mark at the beginning of a file.
        place = error.start + 3 * (start == 0 and data.startswith(b"\xef\xbb\xbf"))
        raise UserError(
            f"{path}: {place_of(data, place, start, line)} is not UTF-8; convert the file, as with "
            "`iconv -f latin1 -t utf-8`"
        ) from error


def place_of(data, place, start, line):
    """The place and value of a byte, where the data begin at the byte `start`, in `line`."""
    return f"byte {start + place} (0x{data[place]:02x}, in line {line + data.count(10, 0, place)})"


def unix_lines(text):
    """The text with \\n at the end of its lines, instead of \\r\\n."""
    return text.replace("\r\n", "\n")


def is_json_lines(path):
    return Path(path).suffix.lower() == ".jsonl"
