"""What a run got wrong: confusion matrices and the worst mistakes, from the files in its pictures/ folder."""

import base64

import numpy as np

from training.report.markup import Html, empty, section, table, tag
from training.report.numbers import plain
from training.report.read import read_json

NUMBERED = 20  # classes; with more, a matrix is drawn without numbers
CELLS = 8_000  # of a drawing; with more, the most frequent ones are drawn
WORST = 64  # mistakes that are shown
LARGEST = 4 * 2**20  # bytes of a picture


class Unusable(Exception):
    """A file that is not as it should be."""


def mistakes(run):
    """The part of the page about what was got wrong; None where nothing tells of it."""
    found = [*told(run, "confusion_matrix-*.json", confusion), *told(run, "worst-*.json", worst)]
    return section("Mistakes", *found) if found else None


def told(run, pattern, show):
    """What each of the files shows, or why it does not."""
    for path in sorted((run.folder / "pictures").glob(pattern)):
        value, problem = read_json(path)
        try:
            yield tag("p", problem, class_="problem") if problem else show(value)
        except Unusable as error:
            yield tag("p", f"{path.name} cannot be shown: {error}", class_="problem")


def place(value):
    """The set, and when it was measured."""
    name, epoch = value.get("set"), value.get("epoch")
    return (
        f"{name}{f', epoch {epoch}' if isinstance(epoch, int) else ''}"
        if isinstance(name, str)
        else ""
    )


def confusion(value):
    """A confusion matrix with what is most often confused."""
    counts = counts_of(value.get("matrix"))
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-300)
    heat = (
        numbered(counts, shares, value.get("normalized") is True)
        if len(counts) <= NUMBERED
        else drawn(counts, shares)
    )
    wrong = np.where(np.eye(len(counts), dtype=bool), 0, counts)
    pairs = [divmod(int(i), len(counts)) for i in np.argsort(-wrong, axis=None, kind="stable")[:8]]
    rows = [
        [f"{row} taken for {column}", plain(wrong[row, column]), percent(shares[row, column])]
        for row, column in pairs
        if wrong[row, column]
    ]
    right = np.trace(counts) / max(counts.sum(), 1e-300)
    return tag(
        "div",
        tag(
            "figure",
            tag(
                "figcaption",
                tag("h3", "confusion matrix"),
                tag("span", place(value), class_="muted"),
            ),
            heat,
            class_="matrix",
        ),
        tag(
            "div",
            tag("h3", "most often confused"),
            table(["", "times", "of its row"], rows, class_="pairs")
            if rows
            else tag("p", "Nothing.", class_="note"),
            tag(
                "p",
                f"{plain(np.trace(counts))} of {plain(counts.sum())} right ({percent(right)}).",
                class_="note",
            ),
        ),
        class_="pair",
    )


def counts_of(rows):
    """The counts as a square array."""
    try:
        counts = np.asarray(rows, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise Unusable("its matrix is not one of numbers") from None
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1] or not counts.size:
        raise Unusable(f"its matrix is not square: {' x '.join(map(str, counts.shape))}")
    if not (np.isfinite(counts) & (counts >= 0)).all():
        raise Unusable("its matrix has counts that are negative or not finite")
    return counts


def percent(share):
    return f"{100 * share:.1f}%" if share < 0.9995 or share == 1 else f"{100 * share:.2f}%"


def tip(row, column, count, share):
    """What pointing at a cell tells."""
    verdict = "right" if row == column else f"taken for {column}"
    return f"{row}, {verdict}: {plain(count)} ({percent(share)} of its row)"


def strength(row, column, share):
    """How deep a cell's colour is, in percent; that of mistakes is strengthened, for the rare ones to be seen too."""
    return round(100 * share ** (0.5 if row == column else 0.35))


def numbered(counts, shares, normalized):
    """A table of the counts, or of their shares of the row."""
    rows = []
    for row, line in enumerate(counts):
        cells = [tag("th", row, scope="row")]
        for column, count in enumerate(line):
            share = shares[row, column]
            text = f"{100 * share:.1f}" if normalized else f"{count:.0f}"
            deep = strength(row, column, share)
            kind = ("right" if row == column else "wrong") + (
                " deep" if deep > 60 else "" if count else " none"
            )
            cells.append(
                tag(
                    "td",
                    text,
                    class_=kind,
                    style=f"--s:{deep}%",
                    data_tip=tip(row, column, count, share),
                )
            )
        rows.append(cells)
    head = [
        Html('<th class="corner">predicted \N{RIGHTWARDS ARROW}<br>true \N{DOWNWARDS ARROW}</th>'),
        *range(len(counts)),
    ]
    return table(head, rows, class_="confusion", style=f"--k:{len(counts)}")


def drawn(counts, shares):
    """A drawing of the counts, a square for each that is not zero."""
    size = len(counts)
    cells = np.argsort(-counts, axis=None)[: min(CELLS, np.count_nonzero(counts))]
    squares = []
    for row, column in (divmod(int(i), size) for i in cells):
        share = shares[row, column]
        kind, deep = (
            "right" if row == column else "wrong",
            max(0.08, strength(row, column, share) / 100),
        )
        told = tip(row, column, counts[row, column], share)
        squares.append(
            tag(
                "rect",
                x=column,
                y=row,
                width=1,
                height=1,
                class_=kind,
                fill_opacity=deep,
                data_tip=told,
            )
        )
    left = f" The {CELLS:,} largest counts are shown." if len(cells) == CELLS else ""
    axes = tag("p", f"Rows: true label, 0 to {size - 1}. Columns: predicted.{left}", class_="note")
    return [
        tag(
            "svg",
            squares,
            viewBox=f"0 0 {size} {size}",
            class_="heat",
            shape_rendering="crispEdges",
        ),
        axes,
    ]


def worst(value):
    """The examples with the highest loss."""
    examples = value.get("examples")
    if not isinstance(examples, list):
        raise Unusable("it has no list of examples")
    cards = [card(example) for example in examples[:WORST] if isinstance(example, dict)]
    if not cards:
        return tag(
            "p", f"No mistake{f' on {place(value)}' if place(value) else ''}.", class_="note"
        )
    head = tag("figcaption", tag("h3", "worst mistakes"), tag("span", place(value), class_="muted"))
    return tag("figure", head, tag("div", cards, class_="cards"), class_="worst")


def card(example):
    """One example: its picture, what it is and what it was taken for."""
    label, predicted = (plain_or_text(example.get(key)) for key in ("label", "predicted"))
    loss, index = (plain_or_text(example.get(key)) for key in ("loss", "index"))
    return tag(
        "div",
        picture(example.get("png"), f"example {index}") or tag("div", "no picture", class_="blank"),
        tag("div", tag("b", label), " taken for ", tag("b", predicted, class_="bad")),
        tag("small", f"loss {loss} \N{MIDDLE DOT} #{index}"),
        class_="card",
    )


def plain_or_text(value):
    """A number in few digits, any other value as it is, but short."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)[:40] if value is not None else "?"


def picture(encoded, name):
    """An image from base64, or None."""
    try:
        return image(base64.b64decode(encoded, validate=True), name)
    except (TypeError, ValueError):
        return None


def image(content, name):
    """A PNG within the page; None for what is too large, or no PNG."""
    if len(content) > LARGEST or not content.startswith(b"\x89PNG\r\n\x1a\n"):
        return None
    return empty("img", alt=name, src=f"data:image/png;base64,{base64.b64encode(content).decode()}")


def first_batch(run):
    """What the model was shown first; None where nothing tells of it."""
    try:
        with open(run.folder / "pictures" / "first_batch.png", "rb") as file:
            shown = image(file.read(LARGEST + 1), "the first batch")
    except OSError:
        return None
    problem = tag(
        "p", "first_batch.png cannot be shown: it is too large, or no PNG", class_="problem"
    )
    return section("First batch", tag("div", shown, class_="batch") if shown else problem)
