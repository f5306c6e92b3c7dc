"""Log a run to MLflow: a server, or files in the run's folder."""

import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from training.base import Tracker
from training.watching.publish import About
from training.watching.trackers.common import flattened, needs, opened
from utils import cut
from utils.files import atomic_write, read_file
from utils.forms import NeedsTrust

if TYPE_CHECKING:
    from mlflow import MlflowClient

ID_FILE = "mlflow_id"
FOLDER = "mlruns"
MOST, MOST_METRICS = 100, 1000  # parameters, and metrics, that MLflow accepts at once
LONGEST_KEY, LONGEST_VALUE = 250, 500


def is_elsewhere(uri: str | None) -> bool:
    """Whether the values go to a server or to another folder."""
    return bool(uri or os.environ.get("MLFLOW_TRACKING_URI"))


Uri = Annotated[str | None, NeedsTrust("sends the run away", is_elsewhere)]


def mlflow(
    experiment: str | None = None,
    name: str | None = None,
    tags: tuple[str, ...] = (),
    uri: Uri = None,
) -> Tracker:
    """Log to the MLflow server `uri`; without one, to `mlruns` in the run's folder.

    The default of `uri` is MLFLOW_TRACKING_URI; the default of `experiment` is
    MLFLOW_EXPERIMENT_NAME, or else the title. A tag is `key=value`, or only a key. A resumed run
    continues the same run.
    """
    needs("mlflow", "pip install mlflow-skinny", mlflow="mlflow-skinny", PIL="pillow")
    return Mlflow(experiment, name, tags, uri)


@dataclass
class Mlflow:
    """A small file in the run's folder holds the id that the run has at MLflow. MLflow has no
    histograms, so they are left out."""

    experiment: str | None
    name: str | None
    tags: tuple[str, ...]
    uri: str | None

    def start(self, about: About) -> None:
        # MLflow reports its use to its makers unless this is set before it is imported; and its
        # stores of files are refused unless a variable allows them.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (about.folder / FOLDER).absolute().as_uri()
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        self.client, self.step = MlflowClient(tracking_uri=uri), about.step
        id_file = about.folder / ID_FILE
        if id_file.exists():
            self.id = read_file(id_file).decode(errors="replace").strip()
            try:
                self.client.update_run(self.id, status="RUNNING")
                return
            except MlflowException:
                if not is_missing(self.client, self.id):
                    raise
        self.id = self.client.create_run(
            self.experiment_id(about.title),
            run_name=self.name or about.folder.name,
            tags={name: value for name, _, value in (tag.partition("=") for tag in self.tags)},
        ).info.run_id
        atomic_write(id_file, f"{self.id}\n".encode())
        self.log_config(about.config)

    def experiment_id(self, title: str) -> str:
        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or title
        found = self.client.get_experiment_by_name(name)
        return found.experiment_id if found else self.client.create_experiment(name)

    def log_config(self, config: dict[str, Any]) -> None:
        from mlflow.entities import Param

        params = [
            Param(accepted(name), cut(str(value), LONGEST_VALUE))
            for name, value in flattened(config).items()
        ]
        for first in range(0, len(params), MOST):
            self.client.log_batch(self.id, params=params[first : first + MOST])

    def scalars(self, step: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        self.step, now = step, int(1000 * time.time())
        metrics = [Metric(accepted(name), value, now, step) for name, value in values.items()]
        for first in range(0, len(metrics), MOST_METRICS):
            self.client.log_batch(self.id, metrics=metrics[first : first + MOST_METRICS])

    def image(self, step: int, name: str, png: bytes) -> None:
        self.client.log_image(self.id, opened(png), artifact_file=f"{file_of(name, step)}.png")

    def text(self, step: int, name: str, text: str) -> None:
        self.client.log_text(self.id, text, f"{file_of(name, step)}.txt")

    def back_to(self, step: int) -> None:
        self.scalars(step, {"back_to": step})

    def finish(self, metrics: dict[str, float]) -> None:
        self.scalars(self.step, metrics)
        self.client.set_terminated(self.id, "FINISHED")


def is_missing(client: "MlflowClient", id: str) -> bool:
    """Whether a store has no such run: it was deleted, or belongs to another store."""
    from mlflow.exceptions import MlflowException

    try:
        client.get_run(id)
    except MlflowException as error:
        return error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
    return False


def accepted(name: str) -> str:
    """A name of a value with the characters that MLflow accepts."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:LONGEST_KEY]


def file_of(name: str, step: int) -> str:
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)}/step_{step:08}"
