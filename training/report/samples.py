"""What a language model wrote while it was trained: the texts in samples.jsonl, by step."""

import json

import numpy as np

from training.report.markup import DOT, folded, note, section, tag
from utils import cut
from utils.files import inside, lines_of

FILE = "samples.jsonl"
STEPS = 40  # are shown, from the whole run; the file has all of them
OPEN = 1  # the newest steps, whose texts are not folded
TEXTS = 8  # shown for each step
LONGEST = 4000  # characters of a text
MOST_BYTES = 2**26  # read from the file


def samples(run):
    """The part of the page about samples; None if there are none."""
    path = run.folder / FILE
    try:
        steps = read_samples(inside(run.folder, FILE)) if path.exists() else {}
    except OSError as error:
        fault = f"{FILE} cannot be read: {error.strerror or error}"
        return section("Samples", tag("p.problem", fault))
    if not steps:
        return None
    newest = sorted(steps, reverse=True)
    places = np.linspace(0, len(newest) - 1, min(STEPS, len(newest)))
    shown = [newest[i] for i in places.round().astype(int)]
    parts = []
    for i, step in enumerate(shown):
        title = f"step {step:,}{DOT}epoch {steps[step][0]['epoch']:,}"
        texts = texts_of(steps[step])
        parts.append(tag("div", tag("h3", title), texts) if i < OPEN else folded(title, texts))
    left = len(newest) - len(shown)
    more = f"and the texts of {left} more steps in {FILE}" if left else None
    return section("Samples", parts, note(more))


def read_samples(path):
    """{step: [row, ...]} of the valid lines."""
    steps, size = {}, 0
    for line in lines_of(path):
        size += len(line)
        if size > MOST_BYTES:
            break
        try:
            row = json.loads(line)
            known = all(isinstance(row[name], str) for name in ("prompt", "text"))
            if known and type(row["step"]) is int and type(row["epoch"]) is int:
                steps.setdefault(row["step"], []).append(row)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # one that is damaged, or being written
    return steps


def texts_of(rows):
    """The texts of a step, each after its prompt."""
    texts = [
        tag("pre.sample", tag("b", cut(row["prompt"], LONGEST)), cut(row["text"], LONGEST))
        for row in rows[:TEXTS]
    ]
    more = f"and {len(rows) - TEXTS} more in {FILE}" if len(rows) > TEXTS else None
    return [*texts, note(more)]
