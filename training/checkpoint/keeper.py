"""The observer that writes checkpoints, in the background, and decides which of them are kept: the
last ones, the best ones, and those that an evaluator in another process (`--watch`) protects."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from training.base import TrainState, key_data, without_frozen
from training.checkpoint import storage
from training.checkpoint.probe import Arrays, Probe
from training.checkpoint.record import FORMAT, Record
from training.checkpoint.trees import saved_part, weights_of
from training.engine import Trainer
from training.observers import Snapshot
from training.options import CheckpointOptions
from training.processes import from_first, is_first, several, together
from training.run import NOT_VALUES
from training.watching.view import View
from utils import RunError
from utils.files import atomic_write, parse_json, read_file, to_disk

logger = logging.getLogger("main")

# A checkpoint records the lengths of these files, and a resumed run cuts them back to these.
LOGS = ("metrics.jsonl", "train.log")
EVALUATOR = "evaluator.json"  # in the folder of a run, written by its evaluator


class Kept(NamedTuple):
    """The checkpoints to keep: names of the last ones (oldest first), [name, value] of the best."""

    regular: tuple[str, ...] = ()
    best: tuple[list[Any], ...] = ()  # best first

    def names(self) -> set[str]:
        return {*self.regular, *(name for name, _ in self.best)}

    def add(
        self, name: str, value: float | None, options: CheckpointOptions, regular: bool = True
    ) -> "Kept":
        """What to keep with one more checkpoint, whose monitored metric is `value` (or None)."""
        last = [*(n for n in self.regular if n != name), name] if regular else list(self.regular)
        best = tuple(entry for entry in self.best if entry[0] != name)  # it may be written again
        if self._replace(best=best).is_among_best(value, options):
            ranked: list[list[Any]] = [*best, [name, value]]
            best = sorted(ranked, key=lambda entry: options.sign() * entry[1])
        last = last[-options.keep :] if options.keep else last
        return Kept(tuple(last), tuple(best[: options.save_top_k]))

    def is_among_best(self, value: float | None, options: CheckpointOptions) -> bool:
        """Whether a value is among the best `save_top_k`; False if it is None or not finite."""
        if value is None or not np.isfinite(value):
            return False
        sign = options.sign()
        return len(self.best) < options.save_top_k or sign * value < sign * self.best[-1][1]


def kept_so_far(
    records: dict[str, Record], regular: Sequence[str], options: CheckpointOptions
) -> Kept:
    """The checkpoints that a resumed run keeps, of {name: record} with the oldest first. The best
    are ranked again, since the config may have changed."""
    kept = Kept()
    for name, record in records.items():
        value = (record["evaluated"] or {}).get(options.monitor or "")
        kept = kept.add(name, value, options, regular=False)
    best = {name for name, _ in kept.best}
    regular = tuple(name for name in records if name in regular or name not in best)
    return kept._replace(regular=regular)


@dataclass(frozen=True)
class Best:
    """The best checkpoint of a run by checkpoint.monitor."""

    name: str
    path: Path
    epoch: int
    step: int
    monitor: str
    value: float  # of `monitor`
    metrics: dict[str, float] = field(repr=False)  # all that was measured of these weights
    # reads the (params, state) of each replica that are evaluated
    read: Callable[[], list[tuple[PyTree, PyTree]]] = field(repr=False)

    @property
    def params(self) -> PyTree:
        """The first replica's params, as in `run.params`; they are read from the file."""
        return self.read()[0][0]

    @property
    def state(self) -> PyTree:
        """The running statistics that belong to `params`."""
        return self.read()[0][1]


class Keeper:
    """Writes the checkpoints of a run into its folder: the last `keep`, and the best `save_top_k`
    by `monitor`.

    `record` becomes part of each checkpoint's record: config, facts, data. `probe(params, state,
    replica)` returns arrays that detect changes in model/. A run that is resumed begins with the
    Checkpoint `resumed`.
    """

    def __init__(
        self,
        folder: str | Path,
        options: CheckpointOptions,
        record: dict[str, Any] | None = None,
        probe: Probe | None = None,
        resumed: storage.Checkpoint | None = None,
    ) -> None:
        self.folder, self.options, self.probe = Path(folder), options, probe
        self.record = {"config": {}, "facts": {}, "data": {}} | (record or {})
        self.kept = self.before = Kept()  # now, and before the write in progress
        self.held: set[str] = set()  # names of checkpoints that an evaluator protects from deletion
        self.undeleted: list[Path] = []  # files that could not be deleted
        # (step, position) of the latest checkpoint; whether it is whole
        self.saved: tuple[tuple[int, int] | None, bool] = (None, False)
        # what it was written from
        self.latest: tuple[Snapshot, dict[str, Any], str, list[Arrays] | None] | None = None
        # of the write in progress
        self.thread: Thread | None = None
        self.error: BaseException | None = None
        self.monitor = options.monitor
        self.suffix = storage.SUFFIXES[storage.format_for(options.format)]
        options.sign()  # to fail now rather than at the first checkpoint

        every = {
            "epochs": options.every_epochs,
            "steps": options.every_steps,
            "seconds": options.every_seconds,
        }
        self.every = {key: number for key, number in every.items() if number}
        if resumed:
            self.continue_from(resumed)

    def continue_from(self, checkpoint: storage.Checkpoint) -> None:
        """The run continues from a Checkpoint; it and the older ones count as kept."""
        record, records = checkpoint.record, storage.records(self.folder)
        names = list(records)
        older = names[: names.index(checkpoint.name) + 1]
        self.kept = kept_so_far({n: records[n] for n in older}, record["regular"], self.options)
        self.saved = (record["step"], record["position"]), record["whole"]

    # As an observer.

    def on_steps(self, run: View) -> dict[str, Any]:
        return {"save": "last"}

    def on_row(self, run: View, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """Save if these weights are among the best. If they are the last ones of a run that ended
        within an epoch, they are saved already: their checkpoint is written again, with these
        values and the memory that observers had then."""
        value = row.get(self.monitor or "")
        if "end_of_epoch" in row or "evaluation" in row:
            if not several():  # several processes raise their errors together, in `wait`
                self.check()
            last = "end_of_epoch" in row and run.epoch == run.epochs
            if last or self.kept.is_among_best(value, self.options):
                return {"save": "last" if last else "best"}
        elif row.get("final") and run.position and self.latest is not None and value is not None:
            self.wait()
            self.start_writing(*self.latest, row)
        return None

    def on_save(self, run: View, take: Callable[[], Snapshot], kind: str) -> None:
        """Write a Snapshot in the background, then delete what is no longer kept. A "best" one is
        kept only as long as it is among the best; a "whole" one holds the optimizer's state,
        whatever checkpoint.save_optimizer_state says."""
        self.wait()  # the previous write still reads the memory that take() uses again
        whole = kind == "whole" or self.options.save_optimizer_state
        between_epochs = run.position == 0 and run.step > 0
        name = f"epoch_{run.completed}" if between_epochs else f"step_{run.step}"
        name = f"checkpoint-{name}"
        at, complete = self.saved
        # A checkpoint from which this process resumed within an epoch may lack the values of an
        # evaluation that a signal cut off, so it is written again.
        resumed_here = self.latest is None and run.position and not run.signal
        there = at == (run.step, run.position) and (complete or run.finished or not whole)
        if there and not resumed_here:
            return
        self.latest = None  # its memory is free for the next copy
        snapshot = take()
        # Several processes compute it together, so it must not come between the steps of training.
        probes = self.probed(snapshot.states) if several() else None
        self.saved = (run.step, run.position), whole
        logs = [self.folder / log for log in LOGS]
        lengths = {path.name: path.stat().st_size for path in logs if path.exists()}
        record = snapshot.record | {"whole": whole, "lengths": lengths, "monitor": self.monitor}
        row = run.row if run.row.get("step") == run.step else {}
        self.start_writing(snapshot, record, name, probes, row, regular=kind != "best")

    def on_end(self, run: View) -> None:
        """Wait until everything is written, and log which checkpoint is the best, or why none."""
        self.join()
        with together():
            self.raise_error()  # no later checkpoint replaces one that failed
        if self.kept.best:
            names = [f"{self.file(name)} ({value:.4f})" for name, value in self.kept.best]
            logger.info("Best by %s: %s", self.monitor, ", ".join(names))
            return
        rows = [*run.history, run.metrics]
        values = [row[self.monitor] for row in rows if self.monitor in row]
        if self.monitor and not np.isfinite(values).any():
            why = "was NaN or infinite" if values else "was not measured"
            level = logging.WARNING if run.completed else logging.INFO
            message = "No checkpoint is the best one: checkpoint.monitor, %s, %s"
            logger.log(level, message, self.monitor, why)

    def close(self, run: View) -> None:
        """Let a write finish, unless a signal ends the process, or others may be lost."""
        self.latest = None  # which holds a copy of the state
        if not run.signal and not several():
            self.join()

    # Writing.

    def start_writing(
        self,
        snapshot: Snapshot,
        record: dict[str, Any],
        name: str,
        probes: list[Arrays] | None,
        row: Mapping[str, Any],
        regular: bool = True,
    ) -> None:
        """Write a checkpoint in the background; `row` has the values of its weights, if they were
        evaluated. No other write may be in progress."""
        self.before = self.kept
        self.kept = self.kept.add(name, row.get(self.monitor or ""), self.options, regular)
        evaluated = {key: value for key, value in row.items() if key not in NOT_VALUES}
        record = record | self.kept._asdict() | {"evaluated": evaluated or None}
        retired = {*self.before.names(), name} - self.kept.names()  # or another may protect it
        self.latest = snapshot, record, name, probes

        def attempt() -> None:
            try:
                self.write(snapshot, record, name, retired, probes)
            except BaseException as error:  # the main thread must see every kind of error
                self.error = error

        # An exiting process does not wait for a daemon thread.
        self.thread = Thread(target=attempt, name="checkpoint", daemon=True)
        self.thread.start()

    def probed(self, states: list[TrainState]) -> list[Arrays] | None:
        """The arrays of the probe of each TrainState."""
        if self.probe is None:
            return None
        return [self.probe(*ts.evaluated(), number) for number, ts in enumerate(states)]

    def write(
        self,
        snapshot: Snapshot,
        record: dict[str, Any],
        name: str,
        retired: set[str],
        probes: list[Arrays] | None,
    ) -> None:
        """Write a checkpoint; runs in the background."""
        for log in record["lengths"] if is_first() else ():
            # The logs on the disk must be at least as long as the record says.
            to_disk(self.folder / log)
        path, states = self.folder / f"{name}{self.suffix}", snapshot.states
        # Orbax writes arrays that are spread over several hosts; for a safetensors file they are
        # copied to this one.
        if self.suffix != storage.SUFFIXES["orbax"]:
            states = jax.device_get(jax.tree.map(key_data, states))
        probes = probes or self.probed(states)
        nothing = [{}] * len(states)
        parts = zip(states, snapshot.sums or nothing, probes or nothing, strict=True)
        trees = [as_saved(ts, record["whole"], sums) | probe for ts, sums, probe in parts]
        tree = trees if len(trees) > 1 else trees[0]
        storage.save(path, tree, {**self.record, **record, "format": FORMAT})
        logger.info("Saved %s", path)
        if not is_first():
            return
        # Checkpoints that an evaluator protects are deleted when it no longer does.
        retired = (retired | self.held) - self.kept.names()
        self.held = protected(self.folder, retired)
        # A checkpoint of the same name in another format is replaced.
        gone = {name, *(retired - self.held)}
        old = {self.folder / f"{n}{suffix}" for n in gone for suffix in storage.SUFFIXES.values()}
        old = {*old, *self.undeleted} - {path}
        self.undeleted = [path for path in old if not delete(path)]

    def join(self) -> None:
        """Wait until no write is in progress."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def raise_error(self) -> None:
        """Raise the error of a write, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def check(self) -> None:
        """Raise or log the error of a write, in all processes."""
        try:
            with together():
                self.raise_error()
        except (RunError, OSError) as error:
            self.kept, self.saved = self.before, (None, False)
            if self.options.on_write_error == "stop":
                raise
            logger.error("%s; continuing without it", error)

    def wait(self) -> None:
        """Wait until no write is in progress, and check it."""
        self.join()
        self.check()

    # Reading.

    def newest(self) -> storage.Checkpoint | None:
        """The newest valid checkpoint, or None."""

        def find() -> storage.Checkpoint | None:
            checkpoint, errors = storage.newest(self.folder)
            for error in errors:
                logger.warning("%s; skipped", error)
            return checkpoint

        self.wait()
        return storage.for_all(self.folder, find)

    def best(self, trainer: Trainer) -> Best | None:
        """The Best of the run that is there, or None."""
        self.wait()

        def find() -> dict[str, Any] | None:
            for name, value in self.kept.best:
                if record := storage.record_of(self.file(name)):
                    metrics = record["evaluated"] or {}
                    return {
                        "name": name,
                        "path": str(self.file(name)),
                        "value": value,
                        "epoch": record["epoch"],
                        "step": record["step"],
                        "metrics": {k: np.nan if v is None else v for k, v in metrics.items()},
                    }
                message = "%s: the best checkpoint cannot be read any more; skipped"
                logger.warning(message, self.file(name))
            return None

        def read(name: str) -> list[tuple[PyTree, PyTree]]:
            checkpoint = storage.read(self.folder, name, verified=not is_first())
            like = trainer.replica_states()[0].evaluated()
            return [trainer.put_weights(tree) for tree in weights_of(checkpoint, *like)]

        if (found := from_first(find)) is None:
            return None
        own = {"path": Path(found["path"]), "monitor": self.monitor}
        return Best(**found | own, read=partial(read, found["name"]))

    def last(self) -> Path | None:
        """The file of the latest checkpoint, or None."""
        return self.file(self.kept.regular[-1]) if self.kept.regular else None

    def file(self, name: str) -> Path:
        """The file of a checkpoint, for messages."""
        return storage.file_of(self.folder, name)


def as_saved(ts: TrainState, whole: bool, sums: PyTree) -> dict[str, PyTree]:
    """The tree that a checkpoint holds: the optimizer's state, and the sums of an epoch in
    progress, only if it is `whole`. Frozen weights are left out; a resumed run reads them again
    from their source. The seed is in the record."""
    ts = ts._replace(state=without_frozen(ts.state))
    if not whole:
        return {"params": ts.params, "state": ts.state, "ema": ts.ema}
    return saved_part(ts) | ({"sums": sums} if sums else {})


def delete(path: Path) -> bool:
    """Delete a checkpoint and return whether that worked. A folder is renamed first, so that a
    partly deleted one is never found under its name."""
    try:
        if path.is_dir():
            hidden = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            path.rename(hidden)
            shutil.rmtree(hidden)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s: cannot be deleted: %s", path, error.strerror)
        return False
    return True


def protect(folder: str | Path, best: Sequence, reading: str | None = None) -> None:
    """Keep the training process from deleting the best checkpoints of an evaluator, [name, value],
    and the one that it reads at the moment."""
    content = {"best": best, "reading": reading}
    atomic_write(Path(folder) / EVALUATOR, (json.dumps(content, indent=2) + "\n").encode())


def protected(folder: str | Path, names: Iterable[str]) -> set[str]:
    """The checkpoints among `names` that an evaluator protects; all, if its file cannot be read."""
    path = Path(folder) / EVALUATOR
    try:
        content = parse_json(read_file(path))
        return set(names) & {content["reading"], *(name for name, _ in content["best"])}
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s: cannot be read (%s): no checkpoint is deleted", path, error)
        return set(names)
