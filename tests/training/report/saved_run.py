"""Folders of runs to make a report of, and a parser of the report's page."""

import base64
import json
from html.parser import HTMLParser

import numpy as np

from training.report.page import write_report
from training.watching.pictures import png

CONFIG = {
    "title": "Sample",
    "seed": 1,
    "model": {"name": "mlp", "args": {"dims": [16]}},
    "training": {"epochs": 4},
}
ENVIRONMENT = {
    "command": ["train.py", "-c", "c.json"],
    "python": "3.11",
    "packages": {"jax": "1.2"},
    "data": {"train": {"examples": 9}},
}
LOSSES, TESTS = [1.6338145732879639, 0.5, 0.25, 0.125], [1.25, 0.5, 0.375, 0.4375]
EVIL = (
    '"><script>window.evil = 1</script><img src="http://127.0.0.1:1/x" onerror="window.evil = 1">'
    "'</title></style>&amp;"
)
VOID = {"meta", "img", "input", "br"}


def rows(losses=LOSSES, tests=TESTS, steps=10):
    """The initial row; then for every epoch two rows within it and the row that ends it."""
    yield {"epoch": 0, "step": 0, "initial": True, "test_loss": 2.5, "test_accuracy": 0.1}
    for epoch, (train, test) in enumerate(zip(losses, tests, strict=True), 1):
        for step in (3, 6):
            yield {
                "epoch": epoch,
                "step": (epoch - 1) * steps + step,
                "train_loss": train * (1 + 1 / step),
                "learning_rate": 0.001 * epoch,
                "examples_per_second": 1000.0 + epoch,
                "waiting": 0.01,
            }
        line = {"train_loss": train, "train_accuracy": 1 - train / 2, "test_loss": test}
        if test is not None:
            line |= {"test_accuracy": 1 - test / 2, "test_loss/0": test, "test_loss/1": test + 1}
        yield {
            "epoch": epoch,
            "step": epoch * steps,
            **line,
            "gradient_norm/blocks/0/weight": 2.0 * epoch,
            "seconds": 30.0,
            "compile_seconds": 1.0 if epoch == 1 else 0.0,
            "examples_per_second": 900.0 + epoch,
            "end_of_epoch": True,
        }


def save(folder, lines=None, config=CONFIG, finished=True):
    """Write a run's folder and return it."""
    folder.mkdir(parents=True)
    lines = rows() if lines is None else lines
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lines))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    log = "[main INFO]    : 2026-11-20 {} - {}\n"
    (folder / "train.log").write_text(
        log.format("13:14:22,345", "The model has 12730 parameters") + log.format("13:59:01,1", ".")
    )
    if finished:
        (folder / "finished.json").write_text("{}")
    return folder


def save_pictures(folder, matrix=((8, 2), (1, 9)), evil=False):
    """Write the files of the callbacks confusion_matrix and sample_images; return the picture."""
    (folder / "pictures").mkdir()
    picture = png(np.arange(64, dtype=np.uint8).reshape(8, 8))
    name = EVIL if evil else "test"
    example = {
        "index": 7,
        "label": name if evil else 0,
        "predicted": name if evil else 1,
        "loss": 3.25,
        "png": base64.b64encode(picture).decode(),
    }
    for file, value in {
        "confusion_matrix-test.json": {"set": name, "epoch": 4, "matrix": matrix},
        "worst-test.json": {"set": name, "epoch": 4, "examples": [example]},
    }.items():
        (folder / "pictures" / file).write_text(json.dumps(value))
    (folder / "pictures" / "first_batch.png").write_bytes(picture)
    return picture


def save_samples(folder, *rows):
    """Write the file of the callback sample_text."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "samples.jsonl").write_text("".join(f"{line}\n" for line in lines))


def save_evil(folder):
    """A run in which every text is an attack."""
    last = {"epoch": 5, "step": 50, "test_loss": 1.0}
    names = {f"test_{EVIL}": 1.0, EVIL: 2.0, f"gradient_norm/{EVIL}": 1.0}
    model = {"name": EVIL, "args": {EVIL: EVIL}}
    save(
        folder,
        [*rows(), last | names, last | {"final": EVIL}],
        {"title": EVIL, EVIL: EVIL, "model": model, "data": EVIL},
    )
    environment = {EVIL: {EVIL: {EVIL: [EVIL]}}, "command": [EVIL]}
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "train.log").write_text(f"[main WARNING] {EVIL}\n")
    (folder / EVIL.replace("/", "")).write_text("")
    save_pictures(folder, evil=True)
    save_samples(folder, {"step": 3, "epoch": 1, "prompt": EVIL, "text": EVIL})
    return folder


class Page(HTMLParser):
    """The elements of a page: (name, attributes, text, names of the elements around it)."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.open = [], []
        self.source = path.read_text()
        self.feed(self.source)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        element = [tag, dict(attributes), "", [e[0] for e in self.open]]
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for element in self.open:
            element[2] += data

    def all(self, tag, **attributes):
        wanted = {key.rstrip("_"): value for key, value in attributes.items()}.items()
        found = [element for element in self.elements if element[0] == tag]
        return [e for e in found if all(e[1].get(key) == value for key, value in wanted)]

    def texts(self, tag, **attributes):
        return [text for _, _, text, _ in self.all(tag, **attributes)]

    def charts(self):
        """{title: the data that the page's script draws}"""
        title, charts = None, {}
        for name, _, text, around in self.elements:
            if name == "h3":
                title = text
            elif name == "script" and around[-1] == "figure":
                charts[title] = json.loads(text)
        return charts


def report(*folders, **options):
    return Page(write_report(folders, **options))
