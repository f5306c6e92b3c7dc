"""Helpers of several trackers: required packages, file names, flat configs, pictures, texts and
histograms."""

import html
import json
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Shaped

from utils import UserError
from utils.files import MOST_LINES, read_file

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

BINS = 64
# What the run itself writes into its folder: names of files and folders, and beginnings of names.
OF_THE_RUN = ("config.json", "environment.json", "evaluations.jsonl", "evaluator.json")
OF_THE_RUN += ("comparison.html", "finished.json", "gradient_spikes.jsonl", "metrics.jsonl")
OF_THE_RUN += ("model", "pictures", "profile", "report.html", "samples.jsonl", "train.log")
OF_THE_RUN += ("user_modules", "wandb", "wandb_id", "mlruns", "mlflow_id")
BEGINNINGS = (".", "checkpoint-", "evaluation-", "events.out.tfevents")


def needs(tracker: str, fix: str = "pip install -r training/optional.txt", **packages: str) -> None:
    """Refuse a tracker if a package is missing; packages are {module: its name for pip}."""
    for module, package in packages.items():
        # A folder of that name, such as wandb writes, is found but has no origin.
        if getattr(find_spec(module), "origin", None) is None:
            raise UserError(f"{tracker}: needs the package {package}: {fix}")


def check_file_name(file: str, may_be_absolute: bool = False) -> None:
    """Refuse a name that is not one of a file that a tracker may write."""
    path = PurePath(file)
    if not path.name or ".." in path.parts:
        raise ValueError(f"file: must be the name of a file in the run's folder, got {file!r}")
    # Ignore case, since some file systems do.
    first = path.parts[0].casefold()
    if first in OF_THE_RUN or first.startswith(BEGINNINGS):
        raise ValueError(f"file: the run itself writes {file!r}; choose another name")
    if path.is_absolute() and not may_be_absolute:
        hint = "the tracker jsonl can write one file for many runs"
        raise ValueError(f"file: must lie in the run's folder, got {file!r}; {hint}")


def existing_text(path: Path) -> str:
    """The text of a file that a tracker continues."""
    return read_file(path, MOST_LINES).decode()


def flattened(config: Any, prefix: str = "") -> dict[str, Any]:
    """{"optimizer/args/lr": 0.003}: the values of a config by path.

    A list without nested values is one value, as JSON.
    """
    if isinstance(config, list | tuple):
        if not any(isinstance(value, dict | list | tuple) for value in config):
            return {prefix: json.dumps(config)}
        config = dict(enumerate(config))
    if not isinstance(config, dict):
        return {prefix: config}
    leaves = {}
    for key, value in config.items():
        leaves |= flattened(value, f"{prefix}/{key}" if prefix else str(key))
    return leaves


def opened(png: bytes) -> "ImageFile":
    """A picture of Pillow."""
    from PIL import Image

    picture = Image.open(BytesIO(png))
    picture.load()
    return picture


def preformatted(text: str) -> str:
    """A text as HTML that shows its lines unchanged."""
    return f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'


def counts_and_edges(values: Shaped[np.ndarray, "size"]) -> tuple[np.ndarray, np.ndarray] | None:
    """A histogram of the finite values, or None if there are none."""
    values = values[np.isfinite(values)].astype(np.float64)
    if not values.size:
        return None
    low, high = values.min(), values.max()
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return np.histogram(values, BINS)
    # Between values so close to each other, there may be no 64 numbers.
    return np.histogram(values, 1, (low - 0.5, high + 0.5))
