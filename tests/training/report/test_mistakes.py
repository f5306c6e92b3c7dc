"""The confusion matrices and worst predictions of a report."""

import base64
import json
import os
from urllib.parse import quote

import numpy as np

from tests.training.report.saved_run import report, save, save_pictures
from training.watching.pictures import png


def test_a_confusion_matrix(tmp_path):
    folder = save(tmp_path / "run")
    picture = save_pictures(folder, matrix=[[8, 2, 0], [0, 9, 1], [3, 0, 7]])
    page = report(folder)
    cells = [e for e in page.all("td") if "data-tip" in e[1]]
    assert [text for _, _, text, _ in cells] == ["8", "2", "0", "0", "9", "1", "3", "0", "7"]
    assert cells[1][1]["data-tip"] == "0, taken for 1: 2 (20.0% of its row)"
    assert cells[8][1]["data-tip"] == "2, right: 7 (70.0% of its row)"
    confused = [text for text in page.texts("td") if "taken for" in text]
    assert confused == ["2 taken for 0", "0 taken for 1", "1 taken for 2"]
    assert "24 of 30 right (80.0%)." in page.source
    assert "0 taken for 1" in page.texts("div", class_="card")[0]
    sources = [e[1]["src"].removeprefix("data:image/png;base64,") for e in page.all("img")]
    assert [base64.b64decode(source) for source in sources] == [picture, picture]


def test_a_right_prediction_is_not_called_a_mistake(tmp_path):
    """A model that is nearly always right has right predictions among its worst ones."""
    folder = save(tmp_path / "run")
    save_pictures(folder)
    path = folder / "pictures" / "worst-test.json"
    example = json.loads(path.read_text())["examples"][0]
    pairs = [(1, 1, -0.0), (0, 1, 2.0), (None, None, 1.0)]
    examples = [example | {"label": a, "predicted": b, "loss": loss} for a, b, loss in pairs]
    path.write_text(json.dumps({"set": "test", "epoch": 4, "examples": examples}))
    right, wrong, unknown = report(folder).texts("div", class_="card")
    assert "1, right" in right and "taken for" not in right and "loss 0 " in right
    assert "0 taken for 1" in wrong and "? taken for ?" in unknown


def test_the_newest_pictures_of_callbacks_are_in_the_page(tmp_path):
    folder = save(tmp_path / "run")
    picture = save_pictures(folder)
    drawn = {f"x{i:02}": png(np.full((1, 1), i, np.uint8)) for i in range(26)}
    drawn["a<b>%2F"] = drawn.pop("x25")
    for i, (name, content) in enumerate(drawn.items()):
        path = folder / "pictures" / f"{quote(name)}.png"
        path.write_bytes(content)
        os.utime(path, (i, i))
    for name in ("worst-test", "confusion_matrix-test"):  # their numbers are shown instead
        (folder / "pictures" / f"{name}.png").write_bytes(picture)
    (folder / "pictures" / "broken.png").write_text("GIF")
    page = report(folder)
    shown = {e[1]["alt"]: e[1]["src"].partition(",")[2] for e in page.all("img")}
    expected = {name: drawn[name] for name in [*list(drawn)[3:]]}
    named = {name: base64.b64decode(shown[name]) for name in shown if name in drawn}
    assert named == expected
    assert len(shown) == len(expected) + 2  # a mistake, and the first batch
    assert "broken.png cannot be shown" in page.source and "and 3 more in pictures/" in page.source


def test_classes_are_called_by_their_names_and_unknown_ones_by_numbers(tmp_path):
    folder = save(tmp_path / "run")
    save_pictures(folder, matrix=[[8, 2, 0], [0, 9, 1], [3, 0, 7]])
    for path in (folder / "pictures").glob("*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"classes": ["<oak>", "elm"]}))
    page = report(folder)
    tips = [e[1]["data-tip"] for e in page.all("td") if "data-tip" in e[1]]
    assert tips[1] == "<oak>, taken for elm: 2 (20.0% of its row)"
    assert tips[8] == "2, right: 7 (70.0% of its row)"
    assert "2 taken for <oak>" in page.texts("td")
    assert "<oak> taken for elm" in page.texts("div", class_="card")[0]
    assert "<oak>" not in page.source
