"""MLflow: runs in a folder of files, read back by MLflow's own client."""

import io
import math
import os
import sys
from pathlib import Path

import pytest

from training.watching.publish import About
from training.watching.trackers.mlflow_run import is_elsewhere
from training.watching.trackers.mlflow_run import mlflow as mlflow_tracker
from utils import UserError

CONFIG = {"seed": 3, "model": {"name": "mlp", "args": {"dims": [4, 2], "note": "x" * 700}}}
CONFIG |= {f"option_{i}": i for i in range(120)}  # more than MLflow accepts at once


@pytest.fixture
def client(tmp_path, monkeypatch):
    """MLflow's client of the files in a run's folder."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").absolute().as_uri())


def started(folder, step=0, **arguments):
    tracker = mlflow_tracker(**arguments)
    tracker.start(About(folder, "Title", CONFIG, step))
    return tracker


def test_a_run_holds_values_config_pictures_and_texts_and_continues(client, tmp_path):
    from PIL import Image

    tracker = started(tmp_path, name="first", tags=("small", "size=4"))
    tracker.scalars(1, {"train_loss": 0.5, "a, b": 1.0})
    tracker.scalars(2, {"train_loss": float("nan")})
    picture = io.BytesIO()
    Image.new("L", (5, 3)).save(picture, "png")
    tracker.image(2, "grid", picture.getvalue())
    tracker.text(2, "samples", "Once\nupon")
    tracker.finish({"test_loss": 0.75})

    id = (tmp_path / "mlflow_id").read_text().strip()
    run = client.get_run(id)
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert client.get_experiment(run.info.experiment_id).name == "Title"
    assert run.data.tags["size"] == "4" and run.data.tags["small"] == ""
    assert len(run.data.params) == 124
    assert run.data.params["model/args/dims"] == "[4, 2]"
    history = [(m.step, m.value) for m in client.get_metric_history(id, "train_loss")]
    assert history[0] == (1, 0.5) and history[1][0] == 2 and math.isnan(history[1][1])
    assert run.data.metrics["a_ b"] == 1.0 and run.data.metrics["test_loss"] == 0.75
    (text,) = (file.path for file in client.list_artifacts(id, "samples"))
    assert Path(client.download_artifacts(id, text)).read_text() == "Once\nupon"
    (image,) = (file.path for file in client.list_artifacts(id, "grid"))
    with Image.open(client.download_artifacts(id, image)) as opened:
        assert opened.size == (5, 3)

    tracker = started(tmp_path, step=2)
    assert client.get_run(id).info.status == "RUNNING"
    tracker.scalars(3, {"train_loss": 0.25})
    tracker.finish({})
    assert [m.step for m in client.get_metric_history(id, "train_loss")] == [1, 2, 3]
    assert len(client.search_runs([run.info.experiment_id])) == 1


def test_only_files_in_the_runs_folder_need_no_trust(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert not is_elsewhere(None)
    assert is_elsewhere("http://localhost:5000") and is_elsewhere("mlruns")
    monkeypatch.setitem(os.environ, "MLFLOW_TRACKING_URI", "http://localhost:5000")
    assert is_elsewhere(None)


def test_a_missing_package_is_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    with pytest.raises(UserError, match=r"^mlflow: needs .* mlflow-skinny: pip install mlflow-"):
        mlflow_tracker()
