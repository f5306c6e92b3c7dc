"""The observer that writes checkpoints, in the background, and decides which of them are kept."""

import logging
from functools import partial
from pathlib import Path

import jax
import numpy as np

from file_io import to_disk
from training.base import key_data, without_frozen
from training.checkpoint import storage
from training.checkpoint.background import Background
from training.checkpoint.record import FORMAT
from training.checkpoint.retention import Kept, kept_so_far, protected
from training.devices.processes import is_first, several, together
from training.run import NOT_VALUES
from utils import RunError

logger = logging.getLogger("main")

# A checkpoint records the lengths of these files, and a resumed run cuts them back to these.
LOGS = ("metrics.jsonl", "train.log")


class Keeper:
    """Writes the checkpoints of a run into its folder: the last `keep`, and the best `save_top_k`
    by `monitor`.

    `record` becomes part of each checkpoint's record: config, facts, data. `probe(params, state,
    replica)` returns arrays that detect changes in model/.
    """

    def __init__(self, folder, options, record=None, probe=None):
        self.folder, self.options, self.probe = Path(folder), options, probe
        self.record = {"config": {}, "facts": {}, "data": {}} | (record or {})
        self.kept = self.before = Kept()  # now, and before the write in progress
        self.held = set()  # names of checkpoints that an evaluator protects from deletion
        self.latest_name = ""  # of the latest checkpoint
        self.undeleted = []  # files that could not be deleted
        self.saved = None  # (step, position, whole) of the latest checkpoint
        self.latest = None  # the arguments of its `write`, until the next step
        self.background = Background()
        self.monitor = options.monitor
        self.suffix = storage.SUFFIXES[storage.form_for(options.format)]
        options.sign()  # to fail now rather than at the first checkpoint

        every = {
            "epochs": options.every_epochs,
            "steps": options.every_steps,
            "seconds": options.every_seconds,
        }
        self.every = {key: number for key, number in every.items() if number}

    @property
    def memory(self):
        return {"checkpoint": self.latest_name}

    @memory.setter
    def memory(self, stored):
        """The run continues from a checkpoint; it and the older ones count as kept."""
        self.latest_name = stored["checkpoint"]
        records = storage.records(self.folder)
        names = list(records)
        older = names[: names.index(self.latest_name) + 1]
        record = records[self.latest_name]
        self.kept = kept_so_far({n: records[n] for n in older}, record["regular"], self.options)
        self.saved = (record["step"], record["position"], record["whole"])

    # As an observer.

    def on_steps(self, run):
        self.check()
        return {"save": "last"}

    def on_row(self, run, row):
        """Save if these weights are among the best. If they are the last ones of a run that ended
        within an epoch, they are saved already: their checkpoint is written again, with these
        values and the memory that observers had then."""
        value = row.get(self.options.monitor)
        if "end_of_epoch" in row or "evaluation" in row:
            self.check()
            last = "end_of_epoch" in row and run.epoch == run.epochs
            if last or self.kept.is_among_best(value, self.options):
                return {"save": "last" if last else "best"}
        elif row.get("final") and run.position and self.latest is not None and value is not None:
            self.rank_latest(value, row)
        return None

    def rank_latest(self, value, row):
        """Write the latest checkpoint again, with the values of its weights."""
        self.wait()
        snapshot, record, name, _, probes = self.latest
        self.before = self.kept
        self.kept = self.kept.add(name, value, self.options)
        record |= self.kept._asdict() | {"evaluated": values_of(row)}
        retired = self.before.names() - self.kept.names()
        self.background.start(partial(self.write, snapshot, record, name, retired, probes))

    def on_end(self, run):
        """Wait until everything is written."""
        self.background.join()
        with together():
            self.background.check()  # no later checkpoint replaces one that failed
        if self.kept.best:
            names = [f"{self.file(name)} ({value:.4f})" for name, value in self.kept.best]
            logger.info("Best by %s: %s", self.options.monitor, ", ".join(names))
        elif self.options.monitor:
            self.log_no_best(run)

    def log_no_best(self, run):
        """Log why no checkpoint is the best one."""
        monitor = self.options.monitor
        values = [row[monitor] for row in [*run.history, run.metrics] if monitor in row]
        if not run.completed and not values:
            logger.info("No checkpoint is the best one yet, since no epoch was completed")
        elif not values:
            message = "checkpoint.monitor: %s was not measured at the end of any epoch"
            logger.warning(message, monitor)
        elif not np.isfinite(values).any():
            message = "checkpoint.monitor: %s was NaN or infinite at the end of every epoch"
            logger.warning(message, monitor)

    def on_save(self, run, take, kind):
        """Write a Snapshot in the background, then delete what is no longer kept. A "best" one is
        kept only as long as it is among the best; a "whole" one holds the optimizer's state,
        whatever checkpoint.save_optimizer_state says."""
        self.wait()  # the previous write still reads the memory that take() uses again
        whole = kind == "whole" or self.options.save_optimizer_state
        if self.saved == (run.step, run.position, True) or (
            self.saved == (run.step, run.position, False) and (run.finished or not whole)
        ):
            return  # it is there already
        between_epochs = run.position == 0 and run.step > 0
        name = f"epoch_{run.completed}" if between_epochs else f"step_{run.step}"
        self.latest_name = name = f"checkpoint-{name}"
        row = run.row if run.row.get("step") == run.step else {}
        self.before = self.kept
        value = row.get(self.options.monitor)
        self.kept = self.kept.add(name, value, self.options, kind != "best")
        snapshot = take()
        probes = None
        if several() and self.probe is not None:
            # All processes compute it together, so it must not come between the steps of training.
            probes = [self.probe(*ts.evaluated(), r) for r, ts in enumerate(snapshot.states)]
        record = snapshot.record | {"evaluated": values_of(row) if row else None}
        self.saved = record["step"], record["position"], whole
        record |= self.kept._asdict() | {"whole": whole, "lengths": self.lengths()}
        record |= {"monitor": self.options.monitor}
        retired = {*self.before.names(), name} - self.kept.names()  # or another may protect it
        self.latest = snapshot, record, name, retired, probes
        self.background.start(partial(self.write, *self.latest))

    def close(self, run):
        """Let a write finish, unless a signal ends the process, or others may be lost."""
        self.latest = None  # which holds a copy of the state
        if not run.signal and not several():
            self.background.join()

    # Writing.

    def write(self, snapshot, record, name, retired, probes):
        """Write the files of a checkpoint, one for each replica; runs in the background."""
        for log in record["lengths"] if is_first() else ():
            # The logs on the disk must be at least as long as the record says.
            to_disk(self.folder / log)
        states = snapshot.states
        sums = snapshot.sums or [None] * len(states)
        paths = storage.places(self.folder, name, len(states), self.suffix)
        # The file of replica 0 comes last: where it exists, all of them were written.
        for replica, (path, ts) in reversed([*enumerate(zip(paths, states, strict=True))]):
            # Orbax writes arrays that are spread over several hosts; for a safetensors file they
            # are copied to this one.
            if self.suffix != storage.SUFFIXES["orbax"]:
                ts = jax.device_get(jax.tree.map(key_data, ts))
            tree = as_saved(ts, record["whole"], sums[replica])
            if self.probe is not None:
                tree |= probes[replica] if probes else self.probe(*ts.evaluated(), replica)
            own = {"seed": int(ts.seed), "replica": replica, "replicas": len(paths)}
            storage.save(path, tree, {**self.record, **record, **own, "format": FORMAT})
        logger.info("Saved %s", ", ".join(map(str, paths)))
        if not is_first():
            return
        # Checkpoints that an evaluator protects are deleted when it no longer does.
        retired = (retired | self.held) - self.kept.names()
        self.held = protected(self.folder, retired)
        deleted = retired - self.held
        old = {path for gone in deleted for path in storage.files(self.folder, gone)}
        # A checkpoint of the same name in another format is replaced.
        old |= {*storage.files(self.folder, name), *self.undeleted}
        self.undeleted = [path for path in old - set(paths) if not storage.delete(path)]

    def check(self):
        """Raise or log an error of the background. Several processes do this together in `wait`."""
        if not several():
            self.check_together()

    def check_together(self):
        try:
            with together():
                self.background.check()
        except (RunError, OSError) as error:
            self.kept, self.saved = self.before, None
            if self.options.on_write_error == "stop":
                raise
            logger.error("%s; continuing without it", error)

    def wait(self):
        """Wait until no write is in progress."""
        self.background.join()
        self.check_together()

    # Reading.

    def newest(self):
        """The newest valid checkpoint, or None."""
        self.wait()
        return storage.for_all(self.find_newest)

    def find_newest(self):
        checkpoint, errors = storage.newest(self.folder)
        for error in errors:
            logger.warning("%s; skipped", error)
        return checkpoint

    def best(self):
        """(name, value, file, record) of the best checkpoint that is there, or None."""
        for name, value in self.kept.best:
            file = self.file(name)
            if record := storage.record_of(file):
                return name, value, file, record
            logger.warning("%s: the best checkpoint cannot be read any more; skipped", file)
        return None

    def last(self):
        """The file of the latest checkpoint, or None."""
        return self.file(self.kept.regular[-1]) if self.kept.regular else None

    def file(self, name):
        """The first file of a checkpoint, for messages."""
        return next(iter(storage.files(self.folder, name)), self.folder / name)

    def lengths(self):
        """The bytes of the logs so far."""
        logs = [self.folder / log for log in LOGS]
        return {path.name: path.stat().st_size for path in logs if path.exists()}


def values_of(row):
    """The numbers of a row."""
    return {k: v for k, v in row.items() if k not in NOT_VALUES}


def as_saved(ts, whole, sums):
    """The tree that a checkpoint holds: the optimizer's state, and the sums of an epoch in
    progress, only if it is `whole`. Frozen weights are left out; a resumed run reads them again
    from their source."""
    ts = ts._replace(state=without_frozen(ts.state))
    if not whole:
        return {"params": ts.params, "state": ts.state, "ema": ts.ema}
    tree = ts._asdict()
    del tree["halted"]
    return tree if sums is None else tree | {"sums": sums}
