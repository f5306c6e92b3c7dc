"""Pictures without a drawing library: PNG files, grids of examples, confusion matrices. Quick, as runs draw while they train."""

import math
import struct
import zlib

import numpy as np

# A font of 5 x 8 dots: of every character from ' ' to '~' its five columns, the lowest bit on top.
FONT = bytes.fromhex(
    "000000000000005f00000007000700147f147f14242a7f2a12231308646236495620500008070300001c2241000041221c00"
    "2a1c7f1c2a08083e080800807030000808080808000060600020100804023e5149453e00427f400072494949462141494d33"
    "1814127f1027454545393c4a49493141211109073649494936464949291e0000140000004034000000081422411414141414"
    "004122140802015909063e415d594e7c1211127c7f494949363e414141227f4141413e7f494949417f090909013e41515173"
    "7f0808087f00417f41002040413f017f081422417f404040407f021c027f7f0408107f3e4141413e7f090909063e4151215e"
    "7f09192946264949493203017f01033f4040403f1f2040201f3f4038403f631408146303047804036159494d43007f414141"
    "0204081020004141417f04020102044040404040000307080020545478407f284444383844444428384444287f3854545418"
    "00087e090218a4a49c787f0804047800447d40002040403d007f1028440000417f40007c047804787c080404783844444438"
    "fc1824241818242418fc7c08040408485454542404043f44243c4040207c1c2040201c3c4030403c44281028444c9090907c"
    "4464544c440008364100000077000000413608000201020402"
)
GLYPHS = (
    np.unpackbits(np.frombuffer(FONT, np.uint8).reshape(-1, 5, 1), axis=2, bitorder="little")
    .swapaxes(1, 2)
    .astype(bool)
)
BROAD, TALL = 6, 8  # dots from one character to the next, and from top to bottom
INK, FAINT, PAPER = (38, 41, 46), (148, 152, 158), (255, 255, 255)
RIGHT, WRONG = (
    np.array((8, 81, 156)),
    np.array((200, 64, 0)),
)  # blue and orange: told apart by nearly everyone


def png(array):
    """The bytes of a PNG file: grey from uint8 (H, W), coloured from uint8 (H, W, 3)."""
    array = np.asarray(array)
    if (
        array.dtype != np.uint8
        or array.ndim not in (2, 3)
        or array.shape[2:] not in ((), (3,))
        or 0 in array.shape
    ):
        raise ValueError(
            f"png: needs uint8 of shape (H, W) or (H, W, 3), got {array.dtype} {array.shape}"
        )
    height, width = array.shape[:2]
    lines = np.zeros(
        (height, 1 + array[0].size), np.uint8
    )  # each begins with the number of its filter: 0, none
    lines[:, 1:] = array.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if array.ndim == 3 else 0, 0, 0, 0)
    body = zlib.compress(lines.tobytes(), 3)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    )


def chunk(kind, data):
    """A part of a PNG file: its length, kind, data and check sum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def as_picture(x):
    """An example as uint8 (H, W) or (H, W, 3), or None where it has not the shape of an image."""
    try:
        x = np.asarray(x)
    except ValueError:  # a list of lists of different lengths
        return None
    numbers = x.dtype.kind in "buifV" and not x.dtype.names  # V: bfloat16
    if not numbers or x.ndim not in (2, 3) or x.shape[2:] not in ((), (1,), (3,)) or 0 in x.shape:
        return None
    x = x[..., 0] if x.shape[2:] == (1,) else x
    if x.dtype == np.uint8:
        return x
    x = x.astype(np.float64)
    known = x[np.isfinite(x)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    low, high = (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)
    x = np.nan_to_num(x, nan=low, posinf=high, neginf=low)
    return np.rint((x - low) * (255 / max(high - low, 1e-30))).clip(0, 255).astype(np.uint8)


def grid(pictures, columns=None, scale=None, gap=2, captions=None):
    """Pictures side by side, enlarged by a whole factor where they are small, each with its caption below; grey where all are."""
    pictures = [np.asarray(p) for p in pictures]
    if not pictures:
        return np.full((1, 1), 255, np.uint8)
    if any(p.ndim == 3 for p in pictures):
        pictures = [p if p.ndim == 3 else np.repeat(p[..., None], 3, axis=2) for p in pictures]
    height, width = (max(p.shape[axis] for p in pictures) for axis in (0, 1))
    scale = scale or max(1, round(96 / max(height, width)))
    height, width = height * scale, width * scale
    captions = [str(caption) for caption in captions or ()]
    size = 2 if BROAD * 2 * max(map(len, captions), default=0) < width - 6 else 1
    under = TALL * size + 4 if captions else 0
    columns = min(columns or math.ceil(math.sqrt(len(pictures))), len(pictures))
    rows = math.ceil(len(pictures) / columns)
    high, wide = height + under + gap, width + gap
    sheet = np.full(
        (rows * high + gap, columns * wide + gap, *pictures[0].shape[2:]), 255, np.uint8
    )
    for i, picture in enumerate(pictures):
        top, left = gap + i // columns * high, gap + i % columns * wide
        large = picture.repeat(scale, axis=0).repeat(scale, axis=1)
        sheet[top : top + large.shape[0], left : left + large.shape[1]] = large
        if captions:
            write(
                sheet[top + height : top + high, left : left + width],
                captions[i],
                (width / 2, under / 2 + 1),
                size,
            )
    return sheet


def stencil(text, size=1):
    """Where the ink of a line of text goes; a character that the font has not is a question mark."""
    codes = [ord(c) - 32 if " " <= c <= "~" else ord("?") - 32 for c in text]
    line = np.zeros((TALL, BROAD * len(codes)), bool)
    for i, code in enumerate(codes):
        line[:, BROAD * i : BROAD * i + 5] = GLYPHS[code]
    return line[:, :-1].repeat(size, axis=0).repeat(size, axis=1)


def write(sheet, text, middle, size=1, colour=INK, upward=False):
    """Write a line of text into a picture, its middle at (x, y); what does not fit is cut off."""
    mark = np.rot90(stencil(text, size)) if upward else stencil(text, size)
    left, top = (
        max(0, round(m - extent / 2)) for m, extent in zip(middle, mark.shape[::-1], strict=True)
    )
    mark = mark[: sheet.shape[0] - top, : sheet.shape[1] - left]
    sheet[top : top + mark.shape[0], left : left + mark.shape[1]][mark] = (
        colour if sheet.ndim == 3 else colour[0]
    )


NUMBERED = 20  # classes; with more, the numbers would be too many to read
LARGEST = 1000  # classes; with more, neighbours share a cell
BEFORE, AFTER = 64, 14  # pixels around the cells: with the labels of an axis, and without


def matrix(counts, normalized=False):
    """A confusion matrix, a row for each true label: a cell is coloured by its share of the row, blue for what was right."""
    counts = np.asarray(counts, np.float64)
    each = math.ceil(len(counts) / LARGEST)
    starts = np.arange(0, len(counts), each)
    counts = np.add.reduceat(np.add.reduceat(counts, starts, axis=0), starts, axis=1)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-30)
    if len(counts) > NUMBERED:
        return framed(shades(shares), max(1, 640 // len(counts)), each)
    texts = [
        [f"{100 * share:.1f}" for share in row] if normalized else [short(n) for n in row]
        for row in (shares if normalized else counts)
    ]
    cell = max(44, 12 + 2 * BROAD * max(len(text) for row in texts for text in row))
    sheet = framed(shades(shares), cell, each)
    for row, column in np.ndindex(counts.shape):
        dark = shares[row, column] > (0.3 if row == column else 0.2)
        ink = PAPER if dark else INK if counts[row, column] else FAINT
        write(
            sheet,
            texts[row][column],
            (BEFORE + (column + 0.5) * cell, AFTER + (row + 0.5) * cell),
            2,
            ink,
        )
    return sheet


def short(count):
    """A count in at most five characters: 1234, 56k, 7M."""
    for size, unit in ((1, ""), (1e3, "k"), (1e6, "M")):
        if count < 9999.5 * size:
            return f"{count / size:.0f}{unit}"
    return f"{count:.0e}"


def shades(shares):
    """The colour of each cell; that of mistakes is strengthened, for the rare ones to be seen too."""
    right = np.eye(len(shares), dtype=bool)[..., None]
    strength = shares[..., None] ** np.where(right, 0.5, 0.35)
    return np.rint(255 + (np.where(right, RIGHT, WRONG) - 255) * strength).astype(np.uint8)


def framed(colours, cell, each):
    """The cells, enlarged, between their axes; `each` classes share one."""
    side = len(colours) * cell
    sheet = np.full((AFTER + side + BEFORE, BEFORE + side + AFTER, 3), 255, np.uint8)
    cells = sheet[AFTER : AFTER + side, BEFORE : BEFORE + side]
    cells[:] = colours.repeat(cell, axis=0).repeat(cell, axis=1)
    if cell >= 8:  # lines between them
        cells[::cell], cells[:, ::cell] = 255, 255
    else:
        cells[[0, -1]], cells[:, [0, -1]] = FAINT, FAINT
    apart = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if n * cell >= 40)
    for i in range(0, len(colours), apart):
        middle, label = (i + 0.5) * cell, str(i * each)
        write(sheet, label, (BEFORE - 10 - BROAD * len(label), AFTER + middle), 2)
        write(sheet, label, (BEFORE + middle, AFTER + side + 18), 2)
    write(sheet, "true label", (12, AFTER + side / 2), 2, FAINT, upward=True)
    write(sheet, "predicted", (BEFORE + side / 2, AFTER + side + 48), 2, FAINT)
    return sheet
