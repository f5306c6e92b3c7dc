"""Trackio: runs in a folder, read back by Trackio's own code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from training.watching.trackers.trackio_run import trackio as trackio_tracker
from utils import UserError

ROOT = Path(__file__).resolve().parents[4]
# In a process of its own, since Trackio chooses its folder when it is imported.
PROGRAM = """
import sys
sys.path += sys.argv[1:]
import io, json
from pathlib import Path
import numpy as np
from PIL import Image
from training.watching.publish import About
from training.watching.trackers.trackio_run import trackio as tracker_of

config = {"seed": 3, "model": {"name": "mlp", "args": {"dims": [4, 2]}}}

def started(step):
    tracker = tracker_of(group="sizes")
    tracker.start(About(Path("run_a").absolute(), "Title", config, step))
    return tracker

tracker = started(0)
tracker.scalars(1, {"train_loss": 0.5, "learning_rate": 1e-3})
tracker.scalars(2, {"train_loss": float("nan")})
picture = io.BytesIO()
Image.new("L", (5, 3)).save(picture, "png")
tracker.image(2, "grid", picture.getvalue())
tracker.histogram(2, "weight", np.array([0.0, 1.0, 1.0]))
tracker.text(2, "samples", "Once <b> upon")
tracker.finish({"test_loss": 0.75})
tracker = started(2)
tracker.scalars(3, {"train_loss": 0.25})
tracker.finish({"test_loss": 0.125})

from trackio.sqlite_storage import SQLiteStorage
rows = SQLiteStorage.get_logs("Title", "run_a")
config = SQLiteStorage.get_run_config("Title", "run_a")
print("RESULT", json.dumps([SQLiteStorage.get_runs("Title"), rows, config], default=str))
"""


@pytest.mark.slow
def test_a_run_holds_values_config_and_pictures_and_continues(tmp_path):
    pytest.importorskip("trackio")
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "store"), "PYTHONPATH": str(ROOT)}
    environment |= {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *sys.path],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs, rows, config = json.loads(done.stdout.split("RESULT ")[1].splitlines()[0])
    assert runs == ["run_a"]
    assert config["model/args/dims"] == "[4, 2]" and config["seed"] == 3
    losses = [(row["step"], row["train_loss"]) for row in rows if "train_loss" in row]
    assert losses[0] == (1, 0.5) and losses[1][0] == 2 and losses[2] == (3, 0.25)
    assert losses[1][1] != losses[1][1] or losses[1][1] in (None, "NaN")
    assert {"grid", "weight", "samples"} <= {name for row in rows for name in row}
    assert [row["test_loss"] for row in rows if "test_loss" in row] == [0.75, 0.125]


def test_a_missing_package_is_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(UserError, match=r"^trackio: needs .* trackio: pip install trackio$"):
        trackio_tracker()
