"""Helpers of several callbacks: class labels, sets, and files in the run's folder."""

import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from training.loss import along
from training.metrics import classes
from training.watching.pictures import Picture, as_picture
from training.watching.view import View
from utils import RunError, UserError
from utils.files import MOST_LINES, append, atomic_write, parse_json, read_file

logger = logging.getLogger("main")

ARRAYS = (jax.Array, np.ndarray)
FIX = "remove it from `callbacks`, or check what the model and the dataset return"


def class_label(
    name: str, output: Any, target: Any
) -> tuple[Int[Array, "*positions"], Bool[Array, ""]]:
    """(classes, whether they are valid) of one target: integers, or distributions over classes.
    The class of an element whose weight is 0 is -1."""
    needed = f"{name}: needs class labels, but"
    if isinstance(target, dict) and target.keys() == {"target", "weight"}:
        label, valid = class_label(name, output, target["target"])
        return jnp.where(along(target["weight"], label) == 0, -1, label), valid
    if not (isinstance(output, ARRAYS) and isinstance(target, ARRAYS)):
        raise UserError(f"{needed} an output or a target is a nest of arrays; {FIX}")
    integers = jnp.issubdtype(target.dtype, jnp.integer) and output.ndim
    integers = integers and target.shape == output.shape[:-1]
    if not (integers or target.shape == output.shape) or output.shape[-1:] in ((), (1,)):
        form = f"{target.dtype}{list(target.shape)}"
        found = f"the output of an example has the shape {output.shape} and its target is {form}"
        raise UserError(f"{needed} {found}; {FIX}")
    if integers:
        return jnp.asarray(target, jnp.int32), jnp.bool_(True)
    valid = (target >= 0).all() & (jnp.abs(target.sum(axis=-1) - 1) < 1e-2).all()
    return classes(output, target), valid


def check_labels(name: str, dataset: str, invalid: int) -> None:
    """Refuse targets that have the output's shape but are not distributions."""
    if invalid:
        found = f"{invalid} targets of the {dataset} set are neither classes nor distributions"
        raise UserError(f"{name}: needs class labels, but {found} over them; {FIX}")


def named(label: int | None, names: Sequence[str] | None) -> str:
    """What to call a class: its name, or its number if it has none; "" for None."""
    if label is None:
        return ""
    return names[label] if names and 0 <= label < len(names) else str(label)


def names_of_classes(view: View) -> dict[str, list[str]]:
    """{"classes": their names} for a file in pictures/; empty if they are unknown."""
    return {"classes": list(view.classes)} if view.classes else {}


def pictures_of(name: str, images: Sequence[np.ndarray]) -> list[Picture]:
    """The images that a model has made as pictures; refuses what does not have their shape."""
    pictures = [picture for x in images if (picture := as_picture(x)) is not None]
    if len(pictures) < len(images):
        raise UserError(f"{name}: the model makes {list(images[0].shape)}, not images")
    return pictures


def check_sets(name: str, sets: tuple[str, ...] | None, view: View) -> None:
    """Refuse a set that is never evaluated."""
    held_out = [set_name for set_name in view.sets if set_name != "train"]
    for wanted in sets or ():
        if wanted not in held_out:
            existing = ", ".join(held_out) or "none"
            raise UserError(f"{name}: sets: no held-out set {wanted!r}; there are: {existing}")


def after_evaluation(memory: dict[str, Any], value: float, min_delta: float) -> dict[str, Any]:
    """A memory of the best value and the evaluations since then, after one more; low is good."""
    best = math.inf if memory["best"] is None else memory["best"]
    if value < best - min_delta:
        return memory | {"best": value, "waited": 0}
    return memory | {"waited": memory["waited"] + 1}


def monitored(monitor: str, sign: int, row: dict[str, Any]) -> float | None:
    """The value of a metric in a row of an epoch, or of an evaluation within one, with a sign by
    which low is good; None if it was not measured there."""
    is_whole = row.get("end_of_epoch") or row.get("evaluation")
    return sign * row[monitor] if is_whole and monitor in row else None


def is_held_out(name: str, sets: tuple[str, ...] | None) -> bool:
    """Whether a set that was evaluated is held out, and one of `sets` (None: all)."""
    return name != "train" and (sets is None or name in sets)


def write_numbers(view: View, name: str, content: dict[str, Any]) -> None:
    """Write the numbers of a picture, as JSON, into the run folder's pictures/, if it has one."""
    if view.folder is None:
        return
    folder = view.folder / "pictures"
    with write_errors(view, folder):
        folder.mkdir(exist_ok=True)
        atomic_write(folder / name, json.dumps(content).encode())


def append_lines(view: View, name: str, lines: Iterable[str]) -> None:
    """Append lines to a file in the run's folder, if the run has one."""
    if view.folder is None:
        return
    with write_errors(view, view.folder / name):
        append(view.folder / name, "".join(f"{line}\n" for line in lines))


def cut_back(view: View, name: str, step: int) -> None:
    """Remove the lines after a step from a file in the run's folder, as the run continues there and
    writes them again."""
    path = view.folder and view.folder / name
    text = read_file(path, MOST_LINES).decode(errors="replace") if path and path.exists() else ""
    lines = text.splitlines(keepends=True)
    kept = []
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):  # an incomplete line is removed too
            kept += [line] if parse_json(line)["step"] <= step else []
    if kept != lines:
        atomic_write(path, "".join(kept).encode())


@contextmanager
def write_errors(view: View, path: Path) -> Iterator[None]:
    """An error while writing ends the run, or is logged if checkpoint.on_write_error is "go_on"."""
    try:
        yield
    except (OSError, RunError) as error:
        is_own = isinstance(error, RunError)
        message = str(error) if is_own else f"{path}: cannot be written: {error.strerror}"
        if view.config.get("checkpoint", {}).get("on_write_error") != "go_on":
            raise RunError(message) from error
        logger.warning("%s", message)
