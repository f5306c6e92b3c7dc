"""When a run is saved, in the background, and which of its checkpoints are kept."""

import logging
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np

from training.checkpoint import storage
from training.checkpoint.background import Background
from training.checkpoint.record import FORMAT
from utils import RunError

logger = logging.getLogger("main")

LOGS = ("metrics.jsonl", "train.log")  # a checkpoint notes how long they are, and a run that goes on cuts them back to it


@dataclass
class Cut:
    """A run at one moment, as a checkpoint holds it."""

    states: list  # a copied TrainState for each replica
    logged: list | None  # each replica's sums at the latest log line of the epoch, if there was one
    where: dict  # step, epoch, position and what else the loop remembers


class Keeper:
    """Writes the checkpoints of a run into its folder: the last `keep`, and the best `save_top_k` by `monitor`.

    `record` goes into every one: config, facts, data; `probe(params, state)` answers arrays that tell what the model means.
    """

    def __init__(self, folder, options, record=None, probe=None):
        self.folder, self.options, self.probe = Path(folder), options, probe
        self.sign = options.sign()
        self.record = {"config": {}, "facts": {}, "data": {}} | (record or {})
        self.regular, self.best = [], []  # names, the oldest first; [name, value], the best first
        self.saved, self.time = None, time.monotonic()  # (step, position, whole) of the latest, and when it was taken
        self.background = Background()
        several = jax.process_count() > 1
        form = {"auto": "orbax" if several else "safetensors"}.get(options.format, options.format)
        self.suffix = storage.SUFFIXES[form]

    def due(self, step):
        """Whether a run is to be saved now, within an epoch or not."""
        by_step = self.options.every_steps and step % self.options.every_steps == 0
        return by_step or (self.options.every_seconds and time.monotonic() - self.time >= self.options.every_seconds)

    def steps_left(self, step):
        """Steps until the next save by steps."""
        return self.options.every_steps - step % self.options.every_steps if self.options.every_steps else 2**30

    def epoch_ended(self, run, cut):
        """Save a run at the end of an epoch, where that is due or the best so far; `cut()` takes the Cut."""
        by_epoch = self.options.every_epochs and run.epoch % self.options.every_epochs == 0
        due = by_epoch or run.epoch == run.epochs or self.due(run.step)
        value = run.metrics.get(self.options.monitor)
        if due or self.is_among_best(value):
            self.save(cut, f"checkpoint-epoch_{run.epoch}", regular=bool(due), value=value)

    def within_epoch(self, run, cut, whole=False):
        """Save a run as it stands."""
        between = run.position == 0 and run.step > 0
        self.save(cut, f"checkpoint-epoch_{run.completed}" if between else f"checkpoint-step_{run.step}", whole=whole)

    def ended(self, run, cut):
        """Save where a run stopped, whole if it is to be gone on with, and wait until all is written."""
        self.wait()
        whole = self.options.save_optimizer_state or not run.finished
        if self.saved != (run.step, run.position, whole):
            self.within_epoch(run, cut, whole)
            self.background.join()
            self.background.check()  # now there is nothing to go on with
        if self.best:
            names = ", ".join(f"{self.folder / name} ({value:.4f})" for name, value in self.best)
            logger.info("Best by %s: %s", self.options.monitor, names)

    def is_among_best(self, value):
        """Whether a value is one of the best `save_top_k`; what was not measured, or is not finite, is not."""
        if value is None or not np.isfinite(value):
            return False
        return len(self.best) < self.options.save_top_k or self.sign * value < self.sign * self.best[-1][1]

    def save(self, cut, name, *, regular=True, value=None, whole=False):
        """Write a cut in the background, then delete what is no longer to be kept."""
        self.wait()  # never two copies of a state
        self.undo = before = (self.regular, self.best)
        if regular:
            last = [*(n for n in self.regular if n != name), name]
            self.regular = last if self.options.keep is None else last[-self.options.keep :]
        self.best = [entry for entry in self.best if entry[0] != name]
        if self.is_among_best(value):
            ranked = sorted([*self.best, [name, value]], key=lambda entry: self.sign * entry[1])
            self.best = ranked[: self.options.save_top_k]
        kept = {*self.regular, *(entry[0] for entry in self.best)}
        retired = {*before[0], *(entry[0] for entry in before[1])} - kept
        taken, whole = cut(), whole or self.options.save_optimizer_state
        self.saved, self.time = (taken.where["step"], taken.where["position"], whole), time.monotonic()
        known = {"best": self.best, "regular": self.regular, "whole": whole, "lengths": self.lengths()}
        self.background.start(partial(self.write, taken, name, known, retired))

    def write(self, cut, name, known, retired):
        """The files of a checkpoint, one for each replica; runs in the background."""
        for log in known["lengths"]:  # the record must not promise more than what is on the disk
            flush_to_disk(self.folder / log)
        paths = storage.places(self.folder, name, len(cut.states), self.suffix)
        for replica, (path, ts) in enumerate(zip(paths, cut.states, strict=True)):
            if self.suffix != storage.SUFFIXES["orbax"]:  # which can write what is spread over several hosts
                ts = jax.device_get(jax.tree.map(storage.without_key_type, ts))
            tree = as_saved(ts, cut, replica, known["whole"])
            if self.probe is not None:
                tree |= self.probe(ts.params if ts.ema is None else ts.ema, ts.state)
            mine = {"seed": int(ts.seed), "replica": replica, "replicas": len(paths), "format": FORMAT}
            storage.save(path, tree, {**self.record, **cut.where, **known, **mine})
        logger.info("Saved %s", ", ".join(map(str, paths)))
        old = [path for gone in retired for path in storage.files(self.folder, gone)]
        for path in [*old, *(set(storage.files(self.folder, name)) - set(paths))]:  # also of the same name in another format
            storage.delete(path)

    def check(self):
        """Tell of an error of the background: the run stops by it, or goes on without that checkpoint."""
        try:
            self.background.check()
        except (RunError, OSError) as error:
            self.regular, self.best = self.undo
            self.saved = None
            if self.options.on_write_error == "stop":
                raise
            logger.error("%s; going on without it", error)

    def wait(self):
        """Until everything is written."""
        self.background.join()
        self.check()

    def newest(self):
        """The newest good checkpoint, or None."""
        self.wait()
        found, wrong = storage.newest(self.folder)
        for message in wrong:
            logger.warning(message)
        return found

    def last(self):
        """Where the latest checkpoint is, or None."""
        return self.folder / self.regular[-1] if self.regular else None

    def lengths(self):
        """The bytes of the logs so far."""
        return {log: (self.folder / log).stat().st_size for log in LOGS if (self.folder / log).exists()}

    def resumed(self, found):
        """Go on after a checkpoint: with what it knew as the best, and the older ones that are there."""
        names, record = list(storage.checkpoints(self.folder)), found.record
        self.best = [entry for entry in record["best"] if entry[0] in names]
        others = {entry[0] for entry in self.best} - set(record["regular"])
        self.regular = [name for name in names[: names.index(found.name) + 1] if name not in others]
        self.saved, self.time = (record["step"], record["position"], record["whole"]), time.monotonic()


class NoKeeper:
    """Keeps nothing, for a run without a folder."""

    def due(self, step):
        return False

    def steps_left(self, step):
        return 2**30

    def check(self):
        """Nothing is written, so nothing fails."""

    def epoch_ended(self, run, cut):
        """Nothing is saved, here and in the next ones."""

    within_epoch = ended = epoch_ended

    wait = newest = last = check


def as_saved(ts, cut, replica, whole):
    """The tree that a checkpoint holds: within an epoch with its sums, and without the optimizer's state if not whole."""
    if not whole:
        return {"params": ts.params, "state": ts.state, "ema": ts.ema}
    tree = ts._asdict()
    if not cut.where["position"]:
        del tree["sums"]
    elif cut.logged:
        tree["logged"] = cut.logged[replica]
    return tree


def flush_to_disk(path):
    """Make sure that what was written to a file so far survives a loss of power."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
