"""What a run got wrong: its confusion matrices and worst predictions, from its pictures/ folder."""

import base64

import numpy as np

from training.report.markup import DOT, Html, empty, note, section, table, tag
from training.report.numbers import plain
from training.report.read import picture_files, read_json, unlinked
from utils.files import open_file

NUMBERED = 20  # classes; a matrix of more is drawn without numbers
# The strength of a colour, in percent, from which white is easier to read on it than black.
DEEP = {"right": 72, "wrong": 87}
CELLS = 8_000  # in a drawing; if there are more, the most frequent ones are drawn
WORST = 64  # predictions that are shown
LARGEST = 4 * 2**20  # bytes of a picture
FILES = 24  # at most, of one kind; each set has one


class Unusable(Exception):
    """A file's content does not have the expected form."""


def mistakes(run):
    """The part of the page about mistakes; None if there are no files about them."""
    matrices = from_files(run, "confusion_matrix-*.json", confusion)
    parts = [*matrices, *from_files(run, "worst-*.json", worst)]
    return section("Mistakes", *parts) if parts else None


def from_files(run, pattern, show):
    """What `show` makes of each file, or why it cannot."""
    for path in picture_files(run.folder, pattern)[:FILES]:
        value, fault = read_json(path)
        try:
            yield tag("p.problem", fault) if fault else show(value)
        except Unusable as error:
            yield tag("p.problem", f"{path.name} cannot be shown: {error}")


def caption(title, value):
    """A title, with the set of a file and the epoch in which it was measured."""
    return tag("figcaption", tag("h3", title), tag("span.muted", set_and_epoch(value)))


def set_and_epoch(value):
    name, epoch = value.get("set"), value.get("epoch")
    text = f"{name}, epoch {epoch}" if isinstance(epoch, int) else name
    return text if isinstance(name, str) else ""


def confusion(value):
    """A confusion matrix, and the pairs of classes that are confused most often."""
    counts = counts_of(value.get("matrix"))
    names = names_of(value, len(counts))
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-300)
    normalized, few = value.get("normalized") is True, len(counts) <= NUMBERED
    heat = numbered(counts, shares, names, normalized) if few else drawn(counts, shares, names)
    wrong = np.where(np.eye(len(counts), dtype=bool), 0, counts)
    most = np.argsort(-wrong, axis=None, kind="stable")[:8]
    rows = []
    for row, column in zip(*np.unravel_index(most, wrong.shape), strict=True):
        if count := wrong[row, column]:
            share = percent(shares[row, column])
            rows.append([f"{names[row]} taken for {names[column]}", plain(count), share])
    pairs = table(["", "times", "of its row"], rows, class_="pairs") if rows else note("Nothing.")
    right, total = np.trace(counts), counts.sum()
    share = percent(right / max(total, 1e-300))
    summary = note(f"{plain(right)} of {plain(total)} right ({share}).")
    matrix = tag("figure.matrix", caption("confusion matrix", value), heat)
    return tag("div.pair", matrix, tag("div", tag("h3", "most often confused"), pairs, summary))


def counts_of(rows):
    """The counts as a square array."""
    try:
        counts = np.asarray(rows, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise Unusable("its matrix does not consist of numbers") from None
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1] or not counts.size:
        raise Unusable(f"its matrix is not square: {' x '.join(map(str, counts.shape))}")
    if not (np.isfinite(counts) & (counts >= 0)).all():
        raise Unusable("its matrix has counts that are negative or not finite")
    return counts


def names_of(value, count=0):
    """The names of the classes in a file, or their numbers; at least `count`."""
    names = value.get("classes")
    names = [short_text(name) for name in names] if isinstance(names, list) else []
    return names + [str(i) for i in range(len(names), count)]


def percent(share):
    return f"{100 * share:.1f}%" if share < 0.9995 or share == 1 else f"{100 * share:.2f}%"


def cell(row, column, counts, shares, names):
    """(its class, how strong its colour is in percent, the text of its tooltip)"""
    count, share, right = counts[row, column], shares[row, column], row == column
    verdict = "right" if right else f"taken for {names[column]}"
    tip = f"{names[row]}, {verdict}: {plain(count)} ({percent(share)} of its row)"
    # The colour of mistakes is stronger, so that rare ones can be seen too.
    strength = round(100 * share ** (0.5 if right else 0.35))
    return "right" if right else "wrong", strength, tip


def numbered(counts, shares, names, normalized):
    """A table of the counts, or of their shares of the row."""
    rows = []
    for row, line in enumerate(counts):
        cells = [tag("th", names[row], scope="row")]
        for column, count in enumerate(line):
            kind, strength, tip = cell(row, column, counts, shares, names)
            kind += " deep" if strength > DEEP[kind] else "" if count else " none"
            text = f"{100 * shares[row, column]:.1f}" if normalized else f"{count:.0f}"
            cells.append(tag("td", text, class_=kind, style=f"--s:{strength}%", data_tip=tip))
        rows.append(cells)
    arrows = "predicted \N{RIGHTWARDS ARROW}<br>true \N{DOWNWARDS ARROW}"
    head = [Html(f'<th class="corner">{arrows}</th>'), *names[: len(counts)]]
    return table(head, rows, class_="confusion", style=f"--k:{len(counts)}")


def drawn(counts, shares, names):
    """A drawing of the counts, with a square for each that is not zero."""
    size, squares = len(counts), []
    cells = np.argsort(-counts, axis=None)[: min(CELLS, np.count_nonzero(counts))]
    for row, column in (divmod(int(i), size) for i in cells):
        kind, strength, tip = cell(row, column, counts, shares, names)
        place = {"x": column, "y": row, "width": 1, "height": 1}
        opacity = max(0.08, strength / 100)
        squares.append(tag("rect", **place, class_=kind, fill_opacity=opacity, data_tip=tip))
    left = f" The {CELLS:,} largest counts are shown." if len(cells) == CELLS else ""
    remark = note(f"Rows: true label, 0 to {size - 1}. Columns: predicted.{left}")
    look = {"viewBox": f"0 0 {size} {size}", "class_": "heat", "shape_rendering": "crispEdges"}
    look |= {"role": "img", "aria_label": f"a confusion matrix of {size} classes"}
    return [tag("svg", squares, **look), remark]


def worst(value):
    """The examples with the highest loss."""
    examples = value.get("examples")
    if not isinstance(examples, list):
        raise Unusable("it has no list of examples")
    names = names_of(value)
    cards = [card(example, names) for example in examples[:WORST] if isinstance(example, dict)]
    if cards:
        return tag("figure.worst", caption("worst predictions", value), tag("div.cards", cards))
    where = set_and_epoch(value)
    return note(f"No predictions{f' on {where}' if where else ''}.")


def card(example, names):
    """One example: its picture, its label and its predicted class."""
    label, predicted = (name_of(example.get(key), names) for key in ("label", "predicted"))
    loss, index = (short_text(example.get(key)) for key in ("loss", "index"))
    try:
        content = base64.b64decode(example.get("png"), validate=True)
    except (TypeError, ValueError):
        content = b""
    picture = image(content, f"example {index}") or tag("div.blank", "no picture")
    right = example.get("label") == example.get("predicted") is not None
    verdict = [", right"] if right else [" taken for ", tag("b.bad", predicted)]
    verdict = tag("div", tag("b", label), verdict)
    return tag("div.card", picture, verdict, tag("small", f"loss {loss}{DOT}#{index}"))


def name_of(label, names):
    """The name of a class, or its number as text."""
    known = isinstance(label, int) and 0 <= label < len(names)
    return names[label] if known else short_text(label)


def short_text(value):
    """A float with few digits; the beginning of any other value; "?" for None."""
    text = f"{value + 0.0:.3g}" if isinstance(value, float) else str(value)[:40]
    return "?" if value is None else text


def image(content, name):
    """A PNG within the page; None if it is too large or not a PNG."""
    if len(content) > LARGEST or not content.startswith(b"\x89PNG\r\n\x1a\n"):
        return None
    return empty("img", alt=name, src=f"data:image/png;base64,{base64.b64encode(content).decode()}")


def beginning(path):
    """The bytes of a picture's file, up to one more than are shown."""
    with open_file(unlinked(path)) as file:
        return file.read(LARGEST + 1)


def first_batch(run):
    """The first examples of training; None if there is no picture of them."""
    try:
        shown = image(beginning(run.folder / "pictures" / "first_batch.png"), "the first batch")
    except FileNotFoundError:
        return None
    except OSError:
        shown = None
    fault = tag("p.problem", "first_batch.png cannot be shown: it is too large or not a PNG")
    return section("First batch", tag("div.batch", shown) if shown else fault)
