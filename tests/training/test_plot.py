"""The picture of a run."""

import json

import pytest

from training.plot import plot
from utils import UserError


def rows(count):
    return [
        {"epoch": e, "train_loss": 1 / e, "test_loss": 2 / e, "test_accuracy": e / 9, "end_of_epoch": True}
        for e in range(1, count)
    ]


def test_a_picture_of_two_runs(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        lines = [{"epoch": 1, "train_loss": 9.0}, *rows(5)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    plot([tmp_path / "a", tmp_path / "b"], tmp_path / "curves.png")
    header = (tmp_path / "curves.png").read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    width, height = int.from_bytes(header[16:20]), int.from_bytes(header[20:24])
    assert width == 2 * 675 and height == 450  # two panels: loss and accuracy


def test_a_folder_without_metrics(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.jsonl: there is no such file"):
        plot([tmp_path], tmp_path / "curves.png")
