"""What several callbacks need: class labels, the sets they look at, and where their files go."""

import logging
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np

from training.metrics import classes
from training.watching.metric_log import append
from utils import RunError, UserError, atomic_write

logger = logging.getLogger("main")

MEND = "leave it out of `callbacks`, or look at what the model and the data give"


def class_label(name, output, target):
    """(classes, whether all of them are sound) of one example's target: integers, or distributions over the classes."""
    if not all(isinstance(a, jax.Array | np.ndarray) for a in (output, target)):
        raise UserError(
            f"{name}: needs class labels, but an output or a target is no array, but a nest of them; {MEND}"
        )
    integers = (
        jnp.issubdtype(target.dtype, jnp.integer)
        and output.ndim
        and target.shape == output.shape[:-1]
    )
    if not (integers or target.shape == output.shape) or output.shape[-1:] in ((), (1,)):
        raise UserError(
            f"{name}: needs class labels, but the output of an example has the shape {output.shape} and its target is "
            f"{target.dtype}{list(target.shape)}; {MEND}"
        )
    if integers:
        return target, jnp.bool_(True)
    sound = (target >= 0).all() & (jnp.abs(target.sum(axis=-1) - 1) < 1e-2).all()
    return classes(output, target), sound


def check_labels(name, dataset, unsound):
    """Refuse targets of the output's shape that turned out to be no distributions."""
    if unsound:
        raise UserError(
            f"{name}: needs class labels, but {unsound} targets of the {dataset} set are neither classes nor distributions "
            f"over them; {MEND}"
        )


def check_sets(name, sets, view):
    """Refuse a set that is never evaluated."""
    there = [held_out for held_out in view.sets if held_out != "train"]
    for wanted in sets or ():
        if wanted not in there:
            raise UserError(
                f"{name}: sets: no held-out set {wanted!r}; there are: {', '.join(there) or 'none'}"
            )


def just_measured(hook, sets, view):
    """The wanted sets whose evaluation this hook (validation or test) ends."""
    found = [name for name in view.evaluated if (name == "test") == (hook == "test")]
    return [name for name in found if sets is None or name in sets]


def write_picture_files(view, files):
    """Write {name: bytes} into the run's folder pictures, if it has a folder."""
    if view.folder is None:
        return
    folder = view.folder / "pictures"
    with going_on_if_wished(view, folder):
        folder.mkdir(exist_ok=True)
        for name, data in files.items():
            atomic_write(folder / name, data)


@contextmanager
def going_on_if_wished(view, path):
    """A disk that takes nothing ends the run, but not where checkpoint.on_write_error is 'go_on'."""
    try:
        yield
    except (OSError, RunError) as error:
        message = (
            f"{path}: cannot be written: {error.strerror}"
            if isinstance(error, OSError)
            else str(error)
        )
        if view.config.get("checkpoint", {}).get("on_write_error") != "go_on":
            raise RunError(message) from error
        logger.warning("%s", message)


def append_lines(view, name, lines):
    """Add lines to a file in the run's folder, if it has a folder."""
    if view.folder is None:
        return
    with going_on_if_wished(view, view.folder / name):
        append(view.folder / name, "".join(f"{line}\n" for line in lines))
