"""Pictures without a drawing library: PNG files, grids of examples and confusion matrices.

They are fast, since callbacks draw them while a run trains.
"""

import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, UInt8
from numpy.typing import ArrayLike

Picture: TypeAlias = UInt8[np.ndarray, "height width"] | UInt8[np.ndarray, "height width 3"]
Colour: TypeAlias = tuple[int, int, int]

# A font of 5 x 8 dots: the five columns of every character from ' ' to '~', the lowest bit on top.
FONT = bytes.fromhex(
    "000000000000005f00000007000700147f147f14242a7f2a12231308646236495620500008070300001c224100"
    "0041221c002a1c7f1c2a08083e080800807030000808080808000060600020100804023e5149453e00427f4000"
    "72494949462141494d331814127f1027454545393c4a49493141211109073649494936464949291e0000140000"
    "004034000000081422411414141414004122140802015909063e415d594e7c1211127c7f494949363e41414122"
    "7f4141413e7f494949417f090909013e415151737f0808087f00417f41002040413f017f081422417f40404040"
    "7f021c027f7f0408107f3e4141413e7f090909063e4151215e7f09192946264949493203017f01033f4040403f"
    "1f2040201f3f4038403f631408146303047804036159494d43007f4141410204081020004141417f0402010204"
    "4040404040000307080020545478407f284444383844444428384444287f385454541800087e090218a4a49c78"
    "7f0804047800447d40002040403d007f1028440000417f40007c047804787c080404783844444438fc18242418"
    "18242418fc7c08040408485454542404043f44243c4040207c1c2040201c3c4030403c44281028444c9090907c"
    "4464544c440008364100000077000000413608000201020402"
)
COLUMNS = np.frombuffer(FONT, np.uint8).reshape(-1, 5, 1)
GLYPHS = np.unpackbits(COLUMNS, axis=2, bitorder="little").swapaxes(1, 2).astype(bool)
BROAD, TALL = 6, 8  # dots: from one character to the next, and from top to bottom
INK, FAINT, PAPER = (38, 41, 46), (148, 152, 158), (255, 255, 255)
# Blue and orange, which nearly everyone can distinguish.
RIGHT, WRONG = np.array((8, 81, 156)), np.array((200, 64, 0))


def png(array: ArrayLike) -> bytes:
    """The bytes of a PNG file: grey from uint8 (H, W), coloured from uint8 (H, W, 3)."""
    array = np.asarray(array)
    valid = array.ndim in (2, 3) and array.shape[2:] in ((), (3,)) and array.size
    if array.dtype != np.uint8 or not valid:
        found = f"{array.dtype} {array.shape}"
        raise ValueError(f"png: needs uint8 of shape (H, W) or (H, W, 3), got {found}")
    height, width = array.shape[:2]
    # Each line begins with the number of its filter: 0, none.
    lines = np.zeros((height, 1 + array[0].size), np.uint8)
    lines[:, 1:] = array.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if array.ndim == 3 else 0, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n"
    chunks = {b"IHDR": header, b"IDAT": zlib.compress(lines.tobytes(), 3), b"IEND": b""}
    for kind, data in chunks.items():  # each with its length and checksum
        content = kind + data
        file += struct.pack(">I", len(data)) + content + struct.pack(">I", zlib.crc32(content))
    return file


def as_picture(x: Any) -> Picture | None:
    """An example as uint8 (H, W) or (H, W, 3), or None if it does not have an image's shape."""
    try:
        x = np.asarray(x)
    except ValueError:  # a list of lists of different lengths
        return None
    numeric = x.dtype.kind in "buifV" and not x.dtype.names  # V: bfloat16
    if not numeric or x.ndim not in (2, 3) or x.shape[2:] not in ((), (1,), (3,)) or not x.size:
        return None
    x = x[..., 0] if x.shape[2:] == (1,) else x
    if x.dtype == np.uint8:
        return x
    x = x.astype(np.float64)
    finite = x[np.isfinite(x)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    low, high = (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)
    x = np.nan_to_num(x, nan=low, posinf=high, neginf=low)
    return np.rint((x - low) * (255 / max(high - low, 1e-30))).clip(0, 255).astype(np.uint8)


def grid(
    pictures: Sequence[ArrayLike],
    columns: int | None = None,
    scale: int | None = None,
    gap: int = 2,
    captions: Sequence[object] | None = None,
) -> Picture:
    """Pictures side by side, each with its caption below it; grey if all of them are grey.

    Small pictures are enlarged by a whole factor.
    """
    pictures = [np.asarray(p) for p in pictures]
    if not pictures:
        return np.full((1, 1), 255, np.uint8)
    if any(p.ndim == 3 for p in pictures):
        pictures = [p if p.ndim == 3 else np.repeat(p[..., None], 3, axis=2) for p in pictures]
    height, width = (max(p.shape[axis] for p in pictures) for axis in (0, 1))
    scale = scale or max(1, round(96 / max(height, width)))
    height, width = height * scale, width * scale
    captions = [str(caption)[: 2 * LONGEST + 1] for caption in captions or ()]
    inner = width
    width = max(width, BROAD * max(map(len, captions), default=0) + 2)
    size = 2 if BROAD * 2 * max(map(len, captions), default=0) < width - 6 else 1
    under = TALL * size + 4 if captions else 0
    columns = min(columns or math.ceil(math.sqrt(len(pictures))), len(pictures))
    rows = math.ceil(len(pictures) / columns)
    high, wide = height + under + gap, width + gap
    shape = (rows * high + gap, columns * wide + gap, *pictures[0].shape[2:])
    sheet = np.full(shape, 255, np.uint8)
    for i, picture in enumerate(pictures):
        top, left = gap + i // columns * high, gap + i % columns * wide
        large = picture.repeat(scale, axis=0).repeat(scale, axis=1)
        begin = left + (width - inner) // 2
        sheet[top : top + large.shape[0], begin : begin + large.shape[1]] = large
        if captions:
            below = sheet[top + height : top + high, left : left + width]
            write(below, captions[i], (width / 2, under / 2 + 1), size)
    return sheet


def text_mask(text: str, size: int = 1) -> Bool[np.ndarray, "height width"]:
    """Where a line of text has ink; a character that the font lacks becomes a question mark."""
    codes = [ord(c) - 32 if " " <= c <= "~" else ord("?") - 32 for c in text]
    line = np.zeros((TALL, BROAD * len(codes)), bool)
    for i, code in enumerate(codes):
        line[:, BROAD * i : BROAD * i + 5] = GLYPHS[code]
    return line[:, :-1].repeat(size, axis=0).repeat(size, axis=1)


def write(
    sheet: Picture,
    text: str,
    centre: tuple[float | int, float | int],
    size: int = 1,
    colour: Colour = INK,
    upward: bool = False,
) -> None:
    """Write a line of text into a picture around (x, y); what does not fit is cut off."""
    mask = np.rot90(text_mask(text, size)) if upward else text_mask(text, size)
    left, top = (max(0, round(c - n / 2)) for c, n in zip(centre, mask.shape[::-1], strict=True))
    mask = mask[: sheet.shape[0] - top, : sheet.shape[1] - left]
    area = sheet[top : top + mask.shape[0], left : left + mask.shape[1]]
    area[mask] = colour if sheet.ndim == 3 else colour[0]


NUMBERED = 20  # classes; the numbers of more would be too many to read
LARGEST = 1000  # classes; if there are more, neighbours share a cell
BEFORE, AFTER = 64, 14  # pixels around the cells: with the labels of an axis, and without
LONGEST = 14  # characters of a class's name
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # cells between two labels of an axis


def confusion_matrix_picture(
    counts: ArrayLike, normalized: bool = False, names: Sequence[str] | None = None
) -> UInt8[np.ndarray, "height width 3"]:
    """A confusion matrix with a row for each true label, right cells blue and wrong ones orange.

    The share of a cell in its row determines how strong its colour is. Classes have numbers unless
    there are `names`.
    """
    counts = np.asarray(counts, np.float64)
    each = math.ceil(len(counts) / LARGEST)
    starts = range(0, len(counts), each)
    counts = np.add.reduceat(np.add.reduceat(counts, starts, axis=0), starts, axis=1)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-30)
    names = names and [str(names[i])[:LONGEST] for i in starts]
    labels = names or [str(i) for i in starts]
    # The pixels before the cells, where the labels of an axis are.
    before = max(BEFORE, 34 + 2 * BROAD * max(map(len, labels))) if names else BEFORE
    if len(counts) > NUMBERED:
        return framed(shades(shares), max(1, 640 // len(counts)), labels, before)
    texts = {}
    for cell, share in np.ndenumerate(shares):
        texts[cell] = f"{100 * share:.1f}" if normalized else short(float(counts[cell]))
    side = max(44, 12 + 2 * BROAD * max(map(len, texts.values())))
    sheet = framed(shades(shares), side, labels, before)
    for (row, column), text in texts.items():
        dark = shares[row, column] > (0.3 if row == column else 0.2)
        ink = PAPER if dark else INK if counts[row, column] else FAINT
        centre = before + (column + 0.5) * side, AFTER + (row + 0.5) * side
        write(sheet, text, centre, 2, ink)
    return sheet


def short(count: float) -> str:
    """A count in at most five characters: 1234, 56k, 7M."""
    for size, unit in ((1, ""), (1e3, "k"), (1e6, "M")):
        if count < 9999.5 * size:
            return f"{count / size:.0f}{unit}"
    return f"{count:.0e}"


def shades(shares: Float[np.ndarray, "classes classes"]) -> UInt8[np.ndarray, "classes classes 3"]:
    """The colour of each cell; mistakes have stronger colours, so that rare ones are visible."""
    right = np.eye(len(shares), dtype=bool)[..., None]
    strength = shares[..., None] ** np.where(right, 0.5, 0.35)
    return np.rint(255 + (np.where(right, RIGHT, WRONG) - 255) * strength).astype(np.uint8)


def framed(
    colours: UInt8[np.ndarray, "classes classes 3"], cell: int, labels: Sequence[str], before: int
) -> UInt8[np.ndarray, "height width 3"]:
    """The cells, enlarged to `cell` pixels, between two axes with a label for each cell."""
    side = len(colours) * cell
    sheet = np.full((AFTER + side + before, before + side + AFTER, 3), 255, np.uint8)
    cells = sheet[AFTER : AFTER + side, before : before + side]
    cells[:] = colours.repeat(cell, axis=0).repeat(cell, axis=1)
    if cell >= 8:  # white lines between the cells
        cells[::cell], cells[:, ::cell] = 255, 255
    else:
        cells[[0, -1]], cells[:, [0, -1]] = FAINT, FAINT
    apart = next(n for n in TICKS if n * cell >= 40)
    upward = 2 * BROAD * max(map(len, labels)) > apart * cell  # the labels of the columns
    for i in range(0, len(colours), apart):
        middle, half = (i + 0.5) * cell, BROAD * len(labels[i])
        write(sheet, labels[i], (before - 10 - half, AFTER + middle), 2)
        below = 10 + half if upward else 18
        write(sheet, labels[i], (before + middle, AFTER + side + below), 2, upward=upward)
    write(sheet, "true label", (12, AFTER + side / 2), 2, FAINT, upward=True)
    write(sheet, "predicted", (before + side / 2, AFTER + side + before - 16), 2, FAINT)
    return sheet
