"""What callbacks wrote into the folder of a run: texts of a language model (samples.jsonl), and in
pictures/ confusion matrices, worst predictions and pictures."""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
from jaxtyping import Float

from training.report.markup import DOT, Html, empty, folded, note, plain, section, table, tag
from training.report.read import Run, picture_files, read_json, unlinked
from utils import cut
from utils.files import inside, lines_of, open_file

# Texts.

SAMPLES = "samples.jsonl"
STEPS = 40  # are shown, from the whole run; the file has all of them
OPEN = 1  # the newest steps, whose texts are not folded
TEXTS = 8  # shown for each step
LONGEST = 4000  # characters of a text
MOST_TEXT = 2**26  # read from the file


def samples(run: Run) -> Html | None:
    """The part of the page about samples; None if there are none."""
    path = run.folder / SAMPLES
    try:
        steps = read_samples(inside(run.folder, SAMPLES)) if path.exists() else {}
    except OSError as error:
        fault = f"{SAMPLES} cannot be read: {error.strerror or error}"
        return section("Samples", tag("p.problem", fault))
    if not steps:
        return None
    newest = sorted(steps, reverse=True)
    places = np.linspace(0, len(newest) - 1, min(STEPS, len(newest)))
    shown = [newest[i] for i in places.round().astype(int)]
    parts = []
    for i, step in enumerate(shown):
        title = f"step {step:,}{DOT}epoch {steps[step][0].epoch:,}"
        texts = texts_of(steps[step])
        parts.append(tag("div", tag("h3", title), texts) if i < OPEN else folded(title, texts))
    left = len(newest) - len(shown)
    more = f"and the texts of {left} more steps in {SAMPLES}" if left else None
    return section("Samples", parts, note(more))


class Sample(NamedTuple):
    """A text of a language model."""

    epoch: int
    prompt: str
    text: str


def read_samples(path: Path) -> dict[int, list[Sample]]:
    """{step: its texts} of the valid lines."""
    steps, size = {}, 0
    for line in lines_of(path):
        size += len(line)
        if size > MOST_TEXT:
            break
        try:
            row = json.loads(line)
            sample = Sample(row["epoch"], row["prompt"], row["text"])
            kinds = tuple(map(type, (row["step"], *sample)))
            if kinds == (int, int, str, str):
                steps.setdefault(row["step"], []).append(sample)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # one that is damaged, or being written
    return steps


def texts_of(rows: list[Sample]) -> list[object]:
    """The texts of a step, each after its prompt."""
    texts = [
        tag("pre.sample", tag("b", cut(row.prompt, LONGEST)), cut(row.text, LONGEST))
        for row in rows[:TEXTS]
    ]
    more = f"and {len(rows) - TEXTS} more in {SAMPLES}" if len(rows) > TEXTS else None
    return [*texts, note(more)]


# Mistakes.

NUMBERED = 20  # classes; of a larger matrix, the picture is shown that the callback drew
# The strength of a colour, in percent, from which white is easier to read on it than black.
DEEP = {"right": 72, "wrong": 87}
WORST = 64  # predictions that are shown
FILES = 24  # at most, of one kind; each set has one


def mistakes(run: Run) -> Html | None:
    """The part of the page about mistakes; None if there are no files about them."""
    matrices = from_files(run, "confusion_matrix-*.json", confusion)
    parts = [*matrices, *from_files(run, "worst-*.json", worst)]
    return section("Mistakes", *parts) if parts else None


def from_files(
    run: Run, pattern: str, show: Callable[[dict[str, Any], Path], Html]
) -> Iterator[Html]:
    """What `show` makes of each file, or why it cannot."""
    for path in picture_files(run.folder, pattern)[:FILES]:
        value, fault = read_json(path)
        try:
            yield tag("p.problem", fault) if fault else show(value, path)
        except (TypeError, ValueError, OverflowError) as error:
            yield tag("p.problem", f"{path.name} cannot be shown: {error}")


def caption(title: str, value: dict[str, Any]) -> Html:
    """A title, with the set of a file and the epoch in which it was measured."""
    name, epoch = (short_text(value.get(key)) for key in ("set", "epoch"))
    return tag("figcaption", tag("h3", title), tag("span.muted", f"{name}, epoch {epoch}"))


def confusion(value: dict[str, Any], path: Path) -> Html:
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
        if count := float(wrong[row, column]):
            share = percent(shares[row, column])
            rows.append([f"{names[row]} taken for {names[column]}", plain(count), share])
    pairs = table(["", "times", "of its row"], rows) if rows else note("Nothing.")
    right, total = np.trace(counts), counts.sum()
    share = percent(right / max(total, 1e-300))
    summary = note(f"{plain(right)} of {plain(total)} right ({share}).")
    matrix = tag("figure.matrix", caption("confusion matrix", value), drawn)
    return tag("div.pair", matrix, tag("div", tag("h3", "most often confused"), pairs, summary))


def names_of(value: dict[str, Any], count: int = 0) -> list[str]:
    """The names of the classes in a file, or their numbers; at least `count`."""
    names = value.get("classes")
    names = [short_text(name) for name in names] if isinstance(names, list) else []
    return names + [str(i) for i in range(len(names), count)]


def percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share < 0.9995 or share == 1 else f"{100 * share:.2f}%"


def numbered(
    counts: Float[np.ndarray, "classes classes"],
    shares: Float[np.ndarray, "classes classes"],
    names: list[str],
    normalized: bool,
) -> Html:
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


def worst(value: dict[str, Any], path: Path) -> Html:
    """The examples with the highest loss."""
    examples = value.get("examples")
    if not isinstance(examples, list):
        raise ValueError("it has no list of examples")
    names = names_of(value)
    cards = [card(example, names) for example in examples[:WORST] if isinstance(example, dict)]
    cards = tag("div.cards", cards) if cards else note("No predictions.")
    return tag("figure.worst", caption("worst predictions", value), cards)


def card(example: dict[str, Any], names: list[str]) -> Html:
    """One example: its picture, its label and its predicted class."""
    label, predicted = (name_of(example.get(key), names) for key in ("label", "predicted"))
    loss, index = (short_text(example.get(key)) for key in ("loss", "index"))
    try:
        content = base64.b64decode(example.get("png", ""), validate=True)
    except (TypeError, ValueError):
        content = b""
    picture = image(content, f"example {index}") or tag("div.blank", "no picture")
    right = example.get("label") == example.get("predicted") is not None
    verdict = ", right" if right else [" taken for ", tag("b.bad", predicted)]
    verdict = tag("div", tag("b", label), verdict)
    return tag("div.card", picture, verdict, tag("small", f"loss {loss}{DOT}#{index}"))


def name_of(label: object, names: list[str]) -> str:
    """The name of a class, or its number as text."""
    if isinstance(label, int) and 0 <= label < len(names):
        return names[label]
    return short_text(label)


def short_text(value: object) -> str:
    """A float with few digits; the beginning of any other value; "?" for None."""
    text = f"{value + 0.0:.3g}" if isinstance(value, float) else str(value)[:40]
    return "?" if value is None else text


# Pictures.

LARGEST = 4 * 2**20  # bytes of a picture
SHOWN = 24  # pictures of callbacks
BYTES = 16 * 2**20  # of all of them


def image(content: bytes, name: str) -> Html | None:
    """A PNG within the page; None if it is too large or not a PNG."""
    if len(content) > LARGEST or not content.startswith(b"\x89PNG\r\n\x1a\n"):
        return None
    return empty("img", alt=name, src=f"data:image/png;base64,{base64.b64encode(content).decode()}")


def beginning(path: Path) -> bytes:
    """The bytes of a picture's file, up to one more than are shown; none if it is unreadable."""
    try:
        with open_file(unlinked(path)) as file:
            return file.read(LARGEST + 1)
    except OSError:
        return b""


def figure(path: Path, content: bytes, caption: Html | None) -> Html:
    """A picture with its caption, or why there is none."""
    fault = tag("p.problem", f"{path.name} cannot be shown: it is too large or not a PNG")
    return tag("figure.batch", caption, image(content, unquote(path.stem)) or fault)


def first_batch(run: Run) -> Html | None:
    """The first examples of training; None if there is no picture of them."""
    path = run.folder / "pictures" / "first_batch.png"
    if path not in picture_files(run.folder, path.name):
        return None
    return section("First batch", figure(path, beginning(path), None))


def written_at(path: Path) -> int:
    """When a file was written, in nanoseconds; 0 if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def pictures(run: Run) -> Html | None:
    """The pictures that no other part of the page shows; None if there are none."""
    if (run.folder / "pictures").is_symlink():
        fault = "pictures is a link, which is not followed"
        return section("Pictures", tag("p.problem", fault))
    paths = [path for path in picture_files(run.folder, "*.png") if not is_elsewhere(path)]
    newest = sorted(paths, key=written_at, reverse=True)[:SHOWN]
    figures, left = [], BYTES
    for path in sorted(newest):
        content = beginning(path)
        left -= len(content)
        caption = tag("figcaption", tag("h3", unquote(path.stem)))
        figures.append(figure(path, content if left >= 0 else b"", caption))
    more = len(paths) - len(newest)
    more = note(f"and {more} more in pictures/") if more else None
    return section("Pictures", figures, more) if figures else None


def is_elsewhere(path: Path) -> bool:
    """Whether another part of the page shows a picture, from its numbers where it has some."""
    return path.name == "first_batch.png" or path.with_suffix(".json").exists()
