"""Which checkpoint of a run a command takes: the one that is named, the newest, or the best."""

import sys
from pathlib import Path

from ranges import local_path
from training.checkpoint.storage import checkpoints, records
from utils import UserError, echo, quoted


def checkpoint_at(path, best=False):
    """The checkpoint at a path; in a run's folder the newest one, or the best one. Of several
    replicas, the file of the first one."""
    path = local_path("path", path)
    if not path.is_dir() or path.name.startswith("checkpoint-"):  # Orbax writes folders
        if best:
            raise UserError(f"{path}: is not a run, of which the best checkpoint can be taken")
        return path
    if not (found := checkpoints(path)):
        newest = lambda folder: folder.stat().st_mtime_ns  # noqa: E731
        runs = sorted({file.parent for file in path.glob("*/checkpoint-*")}, key=newest)
        exported = sorted(file for file in path.glob("*.*") if file.suffix in (".onnx", ".tflite"))
        fix = f"did you mean {quoted(runs[-1])}?" if runs else "name a checkpoint or a run"
        if exported and not runs:
            fix = f"for exported files, run `python inference/predict.py {quoted(exported[0])} ...`"
        raise UserError(f"{path}: holds no checkpoint; {fix}")
    if not best:
        return list(found.values())[-1][0]
    name, why = best_in(path)
    if name is None:
        raise UserError(
            f"{path}: has no best checkpoint: no checkpoint has a finite value of {why}; "
            f"name one: {', '.join(found)}"
        )
    if name not in found:
        raise UserError(
            f"{path}: the best checkpoint, {name} ({why}), is no longer there; "
            f"put it back, or name another one: {', '.join(found)}"
        )
    return found[name][0]


def best_in(folder):
    """(the name of a run's best checkpoint, as its newest one records it, the metric with its
    value); (None, the metric) if there is none."""
    record = [{}, *records(folder).values()][-1]
    monitor = record.get("monitor") or "checkpoint.monitor"
    for name, value in record.get("best", [])[:1]:
        return name, f"{monitor} {value:.4f}"
    return None, monitor


def chosen_checkpoint(path, best=False):
    """`checkpoint_at` for a command: a line on stderr says which checkpoint that is."""
    file = checkpoint_at(path, best)
    name, which = file.stem.split("-replica_")[0], ""
    if file != Path(path).expanduser():
        own, why = best_in(file.parent)
        which = f" (the newest; --best takes {own}, {why})" if own else " (the newest)"
        if name == own:
            which = f" (the best: {why})"
    echo(f"Checkpoint: {file}{which}", file=sys.stderr)
    return file
