"""Resuming a run: find and lock its folder, read the newest whole checkpoint or the one that is
named, compare config and data, cut the logs back, and restore the state of the trainer."""

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import PyTree

from training.checkpoint import storage
from training.checkpoint.keeper import LOGS
from training.checkpoint.pretrained import Pretrained
from training.checkpoint.probe import Arrays, Probe, check_meaning, probe_of
from training.checkpoint.run_folder import FINISHED, flat, new_folder
from training.checkpoint.trees import check_fits, weights_of
from training.engine import Trainer
from training.observers import Point
from training.options import TrainingOptions
from training.processes import (
    check_alike,
    check_visible,
    from_first,
    is_first,
    several,
    together,
)
from training.recipe import Recipe
from training.rows import TrainingSums, below
from training.watching import metric_log
from utils import WINDOWS, Damaged, RunError, UserError, cut, first_line, quoted, relative_path
from utils.files import check_links, inside, locked, read_json

logger = logging.getLogger("main")

# Keys whose values may differ when a run is resumed.
FREE = ("training.epochs", "training.max_steps", "training.max_seconds", "training.on_nonfinite")
FREE += ("training.rollbacks", "training.detect_nans", "checkpoint", "logging", "mesh", "sharding")
FREE += ("model.args.scan", "data.args.threads", "data.args.cache_mb", "data.args.workers")
SILENT = ("title", "resume", "run_name", "$schema")  # keys that do not change what the run computes
ABSENT = "(absent)"
TOKENIZER = "fingerprint of the tokenizer"


# The folder of a run.


class Locked(RunError):
    """Another process trains in this folder."""


class Lock:
    """Keeps other processes from training in a folder, until it is closed or this process ends."""

    def __init__(self, folder: Path) -> None:
        check_links(folder)
        try:
            self.handle = locked(folder, wait=0.5)  # a report locks it for a moment
        except BlockingIOError:
            raise Locked(
                f"{folder}: another process is training this run; wait for it, or stop it first"
            ) from None
        if not WINDOWS:  # a child that outlives this process does not train
            os.register_at_fork(after_in_child=self.close)

    def close(self) -> None:
        if self.handle is not None:
            os.close(self.handle)
        self.handle = None


class OpenedRun(NamedTuple):
    """A run's folder, locked for this process."""

    folder: Path
    checkpoint: storage.Checkpoint | None  # the one to resume from; None if the run has none yet
    lock: Lock | None  # None in all processes except process 0
    skipped: list[str]  # messages that say what is wrong with newer checkpoints
    branches: bool = False  # whether a new run begins from the checkpoint

    def unlock(self) -> None:
        """Let other processes train this run."""
        if self.lock:
            self.lock.close()

    def overridden(self) -> "OpenedRun":
        """This run, to be continued although a callback stopped it, or model/ has changed."""
        if self.checkpoint is None:
            return self
        record = self.checkpoint.record | {"stopped": False}
        arrays = [
            {name: array for name, array in each.items() if not name.startswith("probe/")}
            for each in self.checkpoint.arrays
        ]
        return self._replace(checkpoint=self.checkpoint._replace(arrays=arrays, record=record))


def is_run(folder: Path) -> bool:
    """Whether a run has begun in this folder."""
    return (folder / "config.json").exists() and (folder / "environment.json").exists()


def begun(folder: Path) -> int:
    """When a run was begun, to compare runs."""
    return (folder / "environment.json").stat().st_mtime_ns


def unfinished(
    base: str | Path, title: str, run_name: str | None = None
) -> tuple[OpenedRun, None] | tuple[None, str]:
    """(the OpenedRun of the latest unfinished run of this title, None), or (None, why there is
    none). With a name it is the run of that name, also if it is finished."""
    runs = Path(base) / title
    folders = [runs / run_name] if run_name else runs.glob("*")
    folders = [path for path in folders if is_run(path) and not path.is_symlink()]
    reasons = []
    for folder in sorted(folders, key=begun, reverse=True):
        if (folder / FINISHED).exists() and not run_name:
            reasons.append(f"{folder} is finished")
            continue
        try:
            return open_run(folder), None
        except Locked:
            reasons.append(f"{folder} is being trained by another process")
    if reasons:
        return None, f"No unfinished run of {title} ({reasons[0]})"
    return None, f"No run of {title} to resume"


def run_folder_of(named: str | Path, option: str = "--resume") -> Path:
    """The folder of a run; the user may name the folder or one of its checkpoints."""
    named = Path(named)
    folder = named.parent if named.name.startswith("checkpoint-") else named
    if not named.exists():
        if folder != named and (present := storage.checkpoints(folder)):
            files = ", ".join(path.name for path in present.values())
            raise UserError(f"{option} {named}: there is no such checkpoint; {folder} has {files}")
        auto = ", or use --resume auto" if option == "--resume" else ""
        raise UserError(
            f"{option} {named}: there is no such folder; name a run, as saved/<title>/<run>{auto}"
        )
    if not (folder / "config.json").exists():
        runs = [path for path in (*folder.glob("*"), folder.parent) if is_run(path)]
        hint = f"; did you mean {quoted(max(runs, key=begun))}?" if runs else ""
        raise UserError(
            f"{option} {named}: is not the folder of a run: it has no config.json{hint}"
        )
    return folder


def open_run(folder: Path, name: str | None = None) -> OpenedRun:
    """Lock a run's folder and read the checkpoint to resume from: the one of this name, or the
    newest valid one."""
    lock = Lock(folder)
    try:
        if name:
            return OpenedRun(folder, storage.read(folder, name, whole=True), lock, [])
        checkpoint, errors = storage.newest(folder)
        if checkpoint is None:
            refuse_lost_checkpoints(folder, errors)
        return OpenedRun(folder, checkpoint, lock, [f"{error}; skipped" for error in errors])
    except BaseException:
        lock.close()
        raise


def refuse_lost_checkpoints(folder: Path, errors: Sequence[Damaged]) -> None:
    """Raise if a folder without a valid checkpoint had one: the run must not start over. If there
    is no sign of one, the process was killed before it had written the first one."""
    reasons = [*map(str, errors), *storage.evidence_of_lost(folder)]
    if (folder / FINISHED).exists():
        reasons.append(f"{FINISHED} is there, so there was a checkpoint")
    if reasons:
        lines = "\n  ".join([f"{folder}: no checkpoint of this run can be resumed", *reasons])
        raise UserError(f"{lines}\nPut back what is missing, or begin a new run")


def open_at(named: str | Path, run_name: str | None) -> OpenedRun:
    """The OpenedRun that `--resume` names: a folder, or a checkpoint in it. A new run begins from a
    checkpoint that is not the newest one, or if it shall have another name. The run of the
    checkpoint is not locked then, since nothing in it will change."""
    folder = run_folder_of(named)
    if Path(named) == folder:
        return open_run(folder)
    name = Path(named).stem
    is_newest = name == [None, *storage.checkpoints(folder)][-1]
    own_name = read_json(folder / "config.json").get("run_name")
    if is_newest and (not run_name or run_name in (own_name, folder.name)):
        return open_run(folder, name)
    check_links(folder)
    return OpenedRun(folder, storage.read(folder, name, whole=True), None, [], branches=True)


def open_by_first(open_folder: Callable[[], OpenedRun | None]) -> OpenedRun | None:
    """The OpenedRun that `open_folder` returns in process 0, or None. The other processes read the
    same checkpoint."""
    own = None

    def open_here() -> tuple[str, bool] | None:
        nonlocal own
        own = open_folder()
        return own and (str(own.folder), own.branches)

    if (of_first := from_first(open_here)) is None or not several():
        return own
    folder, branches = Path(of_first[0]), of_first[1]
    checkpoint = storage.for_all(folder, lambda: own and own.checkpoint)
    return own or OpenedRun(folder, checkpoint, None, [], branches)


def branched(
    opened: OpenedRun, run_name: str | None, record: dict[str, Any]
) -> tuple[OpenedRun, dict[str, Any]]:
    """(the OpenedRun of a new run, beside the one from which it branches, with the checkpoint and
    the logs so far; the record with the name of the new run)."""
    former, checkpoint = opened.folder, opened.checkpoint
    assert checkpoint is not None
    own_name = read_json(former / "config.json").get("run_name")
    run_name = None if run_name == own_name else run_name
    parent = Path(relative_path(former.absolute().parent))

    def begin() -> str:
        folder = new_folder(parent.parent, parent.name, run_name)
        try:
            logs = [former / log for log in LOGS if inside(former, log).exists()]
            for path in [*logs, checkpoint.path]:
                copy = shutil.copytree if path.is_dir() else shutil.copyfile
                copy(path, folder / path.name)
        except (OSError, shutil.Error) as error:
            shutil.rmtree(folder)
            why = getattr(error, "strerror", None) or first_line(error)
            raise RunError(f"{folder}: {former} cannot be copied: {why}") from error
        return str(folder)

    folder = Path(from_first(begin))
    check_visible(folder)
    opened = opened._replace(folder=folder, lock=Lock(folder) if is_first() else None)
    return opened, record | {"config": record["config"] | {"run_name": run_name}}


@contextmanager
def holding(
    folder: str | Path | None, resume: bool | Literal["override"], record: dict[str, Any]
) -> Iterator[tuple[storage.Checkpoint | None, Callable[[], None]]]:
    """(the checkpoint that `fit` resumes from, or None; the function that prepares the folder, to
    be called before the run writes); the folder stays locked until the end of the `with` block."""
    if folder is None:
        yield None, lambda: None
        return
    check_alike(flat(record["config"]) | {"data": record["data"]})
    folder = Path(folder)
    if folder.is_file():
        raise UserError(f"folder: {folder} is a file; name a folder")
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    opened = open_by_first(lambda: open_run(folder))
    assert opened is not None

    try:
        with together():
            if not resume and (opened.checkpoint or (folder / metric_log.FILE).exists()):
                done = f" of {opened.checkpoint.completed} epochs" if opened.checkpoint else ""
                raise UserError(
                    f"{folder}: holds a run{done} already, as when a cell runs again; "
                    "continue it (resume=True), name another folder, or delete this one: "
                    f"import shutil; shutil.rmtree({str(folder)!r})"
                )
            override = resume == "override"
            changed = changes(opened, record, override) if opened.checkpoint else []
            opened = opened.overridden() if override else opened

        def begin() -> None:
            if is_first() and resume:
                former = cut_logs(opened)
                for message in [*opened.skipped, *changed, *([former] if former else [])]:
                    logger.warning(message)
                if opened.checkpoint:
                    log_what_is_left(
                        folder, opened.checkpoint, record["config"]["training"]["epochs"]
                    )

        yield opened.checkpoint, begin
    finally:
        opened.unlock()
        with suppress(OSError):  # it is not empty, unless the run was refused
            if is_new:
                folder.rmdir()


# What is left to do.


def nothing_left(opened: OpenedRun, training: TrainingOptions, override: bool) -> str | None:
    """Why there is nothing to resume, or None."""
    if opened.checkpoint is None:
        return None
    folder, record = opened.folder, opened.checkpoint.record
    finished = (folder / FINISHED).exists()
    completed, epochs = opened.checkpoint.completed, training.epochs or math.inf
    why = None
    if completed > epochs or (completed == epochs and (finished or record["position"])):
        why = f"has completed {completed} epochs, and training.epochs is {epochs}"
    elif finished and record["step"] >= (training.max_steps or math.inf):
        why = (
            f"has completed {record['step']} steps, and training.max_steps is {training.max_steps}"
        )
    elif finished and record["seconds"] >= (training.max_seconds or math.inf):
        seconds, limit = record["seconds"], training.max_seconds
        why = f"trained for {seconds:.1f} s, and training.max_seconds is {limit:g}"
    elif finished and record["stopped"] and not override:
        return (
            f"{folder}: a callback stopped it in epoch {record['epoch']}; "
            "add --override to continue nevertheless"
        )
    return why and f"{folder}: {why}; raise it to continue"


def log_what_is_left(folder: Path, checkpoint: storage.Checkpoint, epochs: int | None) -> None:
    """Log from where a run of `fit` continues, or why there is nothing left to train."""
    completed, record = checkpoint.completed, checkpoint.record
    what = f"resuming after step {record['step']}"
    if epochs and completed >= epochs:
        what = (
            f"has completed its {completed} epochs: nothing is trained; raise `epochs` to continue "
            "it, or name another folder"
        )
    elif record["stopped"]:
        what = (
            f'a callback stopped it in epoch {completed}; resume="override" continues nevertheless'
        )
    logger.info("%s: %s", folder, what)


# What has changed.


def changes(opened: OpenedRun, record: dict[str, Any], override: bool = False) -> list[str]:
    """What changed in config, facts, data and tokenizer since a run's checkpoint, one line each. A
    change that is not allowed is refused unless `override` is True."""
    if opened.checkpoint is None:
        return ["There is no checkpoint yet, so the run starts over"]
    old, new = compared(opened.checkpoint.record), compared(record)
    lines, refused = [], []
    for path in {**old, **new}:
        before, now = old.get(path, ABSENT), new.get(path, ABSENT)
        if before == now or path in SILENT:
            continue
        if path == TOKENIZER and before is not ABSENT:
            found = "no" if now is ABSENT else "another"
            raise UserError(
                f"{opened.folder}: the data has {found} tokenizer, not the run's ({TOKENIZER}: "
                f"{before[:12]} -> {now[:12]}), so its tokens mean something else to the model, "
                "also with --override; undo the change of the data or its tokenizer, or begin a "
                "new run"
            )
        shown = [v if v is ABSENT else cut(json.dumps(v), 200) for v in (before, now)]
        line = f"{path}: {shown[0]} -> {shown[1]}"
        may_change = any(f"{path}.".startswith(f"{k}.") for k in (*FREE, "facts.total_steps"))
        (lines if may_change else refused).append(line)
    if refused and not override:
        shown = "\n  ".join(refused)
        raise UserError(
            f"{opened.folder}: this is not the config, or not the data, of the run\n  {shown}\n"
            "Undo the change, begin a new run, or add --override "
            '(fit: resume="override") to continue with it; '
            f"{', '.join(FREE)} may always change"
        )
    return [f"Changed: {line}" for line in lines + refused]


def compared(record: Mapping[str, Any]) -> dict[str, Any]:
    """{path: value} of all that must be the same when a run is resumed."""
    facts = {
        "facts": record["facts"],
        "fingerprint of the data": record["data"],
        "fingerprint of the objective": record.get("objective"),
        "functions in preprocess": record.get("preprocess"),
    }
    if tokenizer := record.get("tokenizer"):
        facts[TOKENIZER] = hashlib.sha256(tokenizer.encode()).hexdigest()
    return flat(record["config"] | facts)


# The logs.


def cut_logs(opened: OpenedRun) -> str | None:
    """Remove what an interrupted write left, and the log lines after the checkpoint. If the run
    starts over, move its former log away, and return a line that says so; else return None."""
    storage.remove_leftovers(opened.folder)
    if opened.checkpoint is None:
        return set_aside(opened.folder)
    cut_back(opened.folder, opened.checkpoint.record["lengths"], LOGS)
    return None


def cut_back(folder: str | Path, lengths: dict[str, int], names: Iterable[str]) -> None:
    """Cut logs back to the bytes that they had when a checkpoint was taken. A log that is not in
    `lengths` did not exist then."""
    for path in [Path(folder) / name for name in names]:
        size, length = path.stat().st_size if path.exists() else 0, lengths.get(path.name, 0)
        if size < length:
            message = "%s: is shorter than when the checkpoint was taken: lines are missing"
            logger.warning(message, path)
        elif size > length:
            try:
                os.truncate(path, length)
            except OSError as error:
                raise RunError(
                    f"{path}: cannot be cut back to the checkpoint: {error.strerror}"
                ) from error


def set_aside(folder: Path) -> str | None:
    """If a run that starts over had logged values, move its logs, and any checkpoints, into a new
    folder. Returns a line that says where, or None."""
    values = folder / metric_log.FILE
    if not values.exists() or not values.stat().st_size:
        return None  # nothing is lost if train.log is appended to
    former = next(path for n in count(1) if not (path := folder / f"former_{n}").exists())
    former.mkdir()
    others = [*storage.files(folder).values()]
    others += [folder / log for log in LOGS if log != values.name and (folder / log).exists()]
    # The values come last: without them, nothing more would be moved if this was interrupted.
    for path in [*others, values]:
        path.rename(former / path.name)
    return f"What the run had logged before is in {former}"


# The state.


def point_of(checkpoint: storage.Checkpoint, trainer: Trainer, folder: str | Path) -> Point:
    """The Point of a checkpoint in the folder of a run. Its seeds are those of the checkpoint,
    which a rollback may have changed, or new ones if the config has changed (--override)."""
    record: dict[str, Any] = {**checkpoint.record}
    states = check_fits(checkpoint, trainer.replica_states())
    if has_other_seeds(trainer.recipe, record["config"]):
        record["seeds"] = list(trainer.recipe.seeds)
    sums, line_continues = sums_so_far(checkpoint, trainer)
    if not line_continues:
        record["lined"] = record["position"]
    length = record["lengths"].get(metric_log.FILE, 0)
    with together():
        rows = metric_log.epoch_rows(folder, length) if is_first() else []
    history = [row for row in rows if row["epoch"] <= checkpoint.completed]
    fresh = not record["step"] and not length
    return Point(states, record, history, checkpoint, fresh, sums)


def sums_so_far(checkpoint: storage.Checkpoint, trainer: Trainer) -> tuple[TrainingSums, bool]:
    """(the TrainingSums of an unfinished epoch in a checkpoint, whether its next log line can use
    them). What is now measured differently starts again."""
    sums = trainer.training_sums()
    if not checkpoint.record["position"]:
        return sums, True
    trees = [below(arrays, "sums") for arrays in checkpoint.arrays]
    epoch_continues, line_continues = sums.take(
        [{name: np.asarray(a) for name, a in tree.items()} for tree in trees]
    )
    if not epoch_continues:
        effect = "those of this epoch cover only the rest of it"
        logger.warning("The metrics have changed since the checkpoint: %s", effect)
    return sums, line_continues


def has_other_seeds(recipe: Recipe, config: dict[str, Any]) -> bool:
    """Whether a recipe has other seeds than the config of a checkpoint."""
    before, now = config.get("training", {}).get("vary") or {}, recipe.training.vary or {}
    same_list = list(before.get("seed", ())) == list(now.get("seed", ()))
    return config.get("seed", recipe.seed) != recipe.seed or not same_list


def check_unchanged(
    trainer: Trainer,
    probe: Probe,
    pretrained: Pretrained | None,
    checkpoint: storage.Checkpoint | None,
) -> None:
    """Refuse to start or resume from weights if model/ now computes something else with them."""
    ts = trainer.replica_states()[0]

    def outputs(
        *weights: PyTree,
    ) -> Arrays:  # weights sharded over processes may be too large for a single host
        return probe(*(trainer.put_weights(weights) if several() else weights))

    if pretrained:
        pretrained.check_probe(outputs, ts.params, ts.state)
    if checkpoint:
        if pretrained:
            pretrained.check_frozen(checkpoint.record, ts.state, checkpoint.name)
        if stored := probe_of(checkpoint.arrays[0]):
            now = outputs(*weights_of(checkpoint, *ts.evaluated())[0])
            fix = "add --override to continue with the model as it is now"
            check_meaning(checkpoint.path, stored, now, fix)
