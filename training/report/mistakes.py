"""What a run got wrong: its confusion matrices and worst predictions, from its pictures/ folder."""

import base64

import numpy as np

from training.report.markup import DOT, note, section, table, tag
from training.report.numbers import plain
from training.report.pictures import beginning, image
from training.report.read import picture_files, read_json

NUMBERED = 20  # classes; of a larger matrix, the picture is shown that the callback drew
# The strength of a colour, in percent, from which white is easier to read on it than black.
DEEP = {"right": 72, "wrong": 87}
WORST = 64  # predictions that are shown
FILES = 24  # at most, of one kind; each set has one


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
            yield tag("p.problem", fault) if fault else show(value, path)
        except (TypeError, ValueError, OverflowError) as error:
            yield tag("p.problem", f"{path.name} cannot be shown: {error}")


def caption(title, value):
    """A title, with the set of a file and the epoch in which it was measured."""
    name, epoch = (short_text(value.get(key)) for key in ("set", "epoch"))
    return tag("figcaption", tag("h3", title), tag("span.muted", f"{name}, epoch {epoch}"))


def confusion(value, path):
    """A confusion matrix, and the pairs of classes that are confused most often."""
    counts = np.asarray(value.get("matrix"), np.float64)
    is_square = counts.ndim == 2 and counts.shape[0] == counts.shape[1] > 0
    if not is_square or not (np.isfinite(counts) & (counts >= 0)).all():
        raise ValueError("its matrix is not a square of counts")
    names = names_of(value, len(counts))
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-300)
    if len(counts) <= NUMBERED:
        drawn = numbered(counts, shares, names, value.get("normalized") is True)
    else:
        drawn = image(beginning(path.with_suffix(".png")), "rows: true label, columns: predicted")
    wrong = np.where(np.eye(len(counts), dtype=bool), 0, counts)
    most = np.argsort(-wrong, axis=None, kind="stable")[:8]
    rows = []
    for row, column in zip(*np.unravel_index(most, wrong.shape), strict=True):
        if count := wrong[row, column]:
            share = percent(shares[row, column])
            rows.append([f"{names[row]} taken for {names[column]}", plain(count), share])
    pairs = table(["", "times", "of its row"], rows) if rows else note("Nothing.")
    right, total = np.trace(counts), counts.sum()
    share = percent(right / max(total, 1e-300))
    summary = note(f"{plain(right)} of {plain(total)} right ({share}).")
    matrix = tag("figure.matrix", caption("confusion matrix", value), drawn)
    return tag("div.pair", matrix, tag("div", tag("h3", "most often confused"), pairs, summary))


def names_of(value, count=0):
    """The names of the classes in a file, or their numbers; at least `count`."""
    names = value.get("classes")
    names = [short_text(name) for name in names] if isinstance(names, list) else []
    return names + [str(i) for i in range(len(names), count)]


def percent(share):
    return f"{100 * share:.1f}%" if share < 0.9995 or share == 1 else f"{100 * share:.2f}%"


def numbered(counts, shares, names, normalized):
    """A table of the counts, or of their shares of the row."""
    rows = []
    for row, line in enumerate(counts):
        cells = [tag("th", names[row], scope="row")]
        for column, count in enumerate(line):
            share = shares[row, column]
            kind, verdict, power = "wrong", f"taken for {names[column]}", 0.35
            if row == column:
                kind, verdict, power = "right", "right", 0.5
            # The colour of mistakes is stronger, so that rare ones can be seen too.
            strength = round(100 * share**power)
            shade = ".deep" if strength > DEEP[kind] else "" if count else ".none"
            text = f"{100 * share:.1f}" if normalized else f"{count:.0f}"
            tip = f"{names[row]}, {verdict}: {plain(count)} ({percent(share)} of its row)"
            cells.append(tag(f"td.{kind}{shade}", text, style=f"--s:{strength}%", data_tip=tip))
        rows.append(cells)
    corner = tag("th.corner", "true \N{DOWNWARDS ARROW} predicted \N{RIGHTWARDS ARROW}")
    size = len(counts)
    return table([corner, *names[:size]], rows, "confusion", style=f"--k:{size}")


def worst(value, path):
    """The examples with the highest loss."""
    examples = value.get("examples")
    if not isinstance(examples, list):
        raise ValueError("it has no list of examples")
    names = names_of(value)
    cards = [card(example, names) for example in examples[:WORST] if isinstance(example, dict)]
    cards = tag("div.cards", cards) if cards else note("No predictions.")
    return tag("figure.worst", caption("worst predictions", value), cards)


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
    verdict = ", right" if right else [" taken for ", tag("b.bad", predicted)]
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
