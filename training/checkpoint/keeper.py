"""When a run is saved, in the background, and which of its checkpoints are kept."""

import logging
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax

from training.checkpoint import storage
from training.checkpoint.background import Background
from training.checkpoint.retention import Kept, kept_so_far
from training.checkpoint.storage import FORMAT
from training.devices.processes import agreed, is_first, several, together
from utils import Damaged, RunError

logger = logging.getLogger("main")

LOGS = (
    "metrics.jsonl",
    "train.log",
)  # a checkpoint notes how long they are, and a run that goes on cuts them back to it


@dataclass
class Cut:
    """A run at one moment, as a checkpoint holds it."""

    states: list  # a copied TrainState for each replica
    where: dict  # step, epoch, position and what else the loop remembers
    probes: list = ()  # what the model answers for each replica, where that must be asked at once


class Keeper:
    """Writes the checkpoints of a run into its folder: the last `keep`, and the best `save_top_k` by `monitor`.

    `record` goes into every one: config, facts, data; `probe(params, state)` answers arrays that tell what the model means.
    """

    def __init__(self, folder, options, record=None, probe=None):
        self.folder, self.options, self.probe = Path(folder), options, probe
        self.record = {"config": {}, "facts": {}, "data": {}} | (record or {})
        self.kept = self.undo = Kept()  # as it is, and as it was before the write in progress
        self.undeleted = []  # files that would not go
        self.saved, self.time = (
            None,
            time.monotonic(),
        )  # (step, position, whole) of the latest, and when it was taken
        self.background = Background()
        self.monitor = options.monitor
        self.suffix = storage.SUFFIXES[storage.form_for(options.format)]
        options.sign()  # cannot be told later

    def due(self, step):
        """Whether a run is to be saved at this step, within an epoch or not."""
        return bool(self.options.every_steps and step % self.options.every_steps == 0)

    def time_is_up(self):
        """Whether the last save was so long ago that another is due."""
        return bool(
            self.options.every_seconds
            and time.monotonic() - self.time >= self.options.every_seconds
        )

    def steps_left(self, step):
        """Steps until the next save by steps."""
        return (
            self.options.every_steps - step % self.options.every_steps
            if self.options.every_steps
            else 2**30
        )

    def epoch_ended(self, run, cut):
        """Save a run at the end of an epoch, where that is due or the best so far; `cut()` takes the Cut."""
        by_epoch = self.options.every_epochs and run.epoch % self.options.every_epochs == 0
        due = bool(by_epoch or run.epoch == run.epochs or self.due(run.step) or self.time_is_up())
        best = self.kept.is_among_best(run.metrics.get(self.options.monitor), self.options)
        due, best = agreed([due, best])  # a clock and a write that failed are those of one process
        if due or best:
            self.save(run, cut, regular=bool(due))

    def ended(self, run, cut):
        """Save where a run stopped, whole if it is to be gone on with, and wait until all is written."""
        self.wait()
        if (
            self.saved is None
            or self.saved[:2] != (run.step, run.position)
            or not (self.saved[2] or run.finished)
        ):
            self.save(run, cut, whole=not run.finished)
            self.background.join()
            with together():
                self.background.check()  # now there is nothing to go on with
        if self.kept.best:
            names = ", ".join(f"{self.file(name)} ({value:.4f})" for name, value in self.kept.best)
            logger.info("Best by %s: %s", self.options.monitor, names)
        elif self.options.monitor:
            logger.warning(
                "checkpoint.monitor: %s was never measured, or never finite", self.options.monitor
            )

    def save(self, run, cut, *, regular=True, whole=False):
        """Write a cut in the background, then delete what is no longer to be kept."""
        self.wait()  # never two copies of a state
        between = (
            run.position == 0 and run.step > 0
        )  # epochs, so that what was measured belongs to it
        name = f"checkpoint-epoch_{run.completed}" if between else f"checkpoint-step_{run.step}"
        value = run.metrics.get(self.options.monitor) if between else None
        self.undo, self.kept = self.kept, self.kept.add(name, value, self.options, regular)
        taken, whole = cut(), whole or self.options.save_optimizer_state
        if (
            several() and self.probe is not None
        ):  # it takes all of them, so it must not come between the steps of training
            taken.probes = [self.probe(*evaluated(ts)) for ts in taken.states]
        self.saved, self.time = (
            (taken.where["step"], taken.where["position"], whole),
            time.monotonic(),
        )
        known = self.kept._asdict() | {"whole": whole, "lengths": self.lengths()}
        self.background.start(
            partial(self.write, taken, name, known, self.undo.names() - self.kept.names())
        )

    def write(self, cut, name, known, retired):
        """The files of a checkpoint, one for each replica; runs in the background."""
        for log in (
            known["lengths"] if is_first() else ()
        ):  # the record must not promise more than what is on the disk
            flush_to_disk(self.folder / log)
        paths = storage.places(self.folder, name, len(cut.states), self.suffix)
        for replica, (path, ts) in enumerate(zip(paths, cut.states, strict=True)):
            if (
                self.suffix != storage.SUFFIXES["orbax"]
            ):  # which can write what is spread over several hosts
                ts = jax.device_get(jax.tree.map(storage.without_key_type, ts))
            tree = as_saved(ts, cut, known["whole"])
            if self.probe is not None:
                tree |= cut.probes[replica] if cut.probes else self.probe(*evaluated(ts))
            mine = {
                "seed": int(ts.seed),
                "replica": replica,
                "replicas": len(paths),
                "format": FORMAT,
            }
            storage.save(path, tree, {**self.record, **cut.where, **known, **mine})
        logger.info("Saved %s", ", ".join(map(str, paths)))
        if not is_first():
            return
        old = [path for gone in retired for path in storage.files(self.folder, gone)]
        twins = set(storage.files(self.folder, name)) - set(
            paths
        )  # of the same name in another format
        self.undeleted = [
            path
            for path in {*old, *twins, *self.undeleted}
            if path not in paths and not storage.delete(path)
        ]

    def check(self):
        """Tell of an error of the background: the run stops by it, or goes on without that checkpoint. Several processes do so
        when they all wait."""
        if not several():
            self.tell()

    def tell(self):
        try:
            with together():
                self.background.check()
        except (RunError, OSError) as error:
            self.kept, self.saved = self.undo, None
            if self.options.on_write_error == "stop":
                raise
            logger.error("%s; going on without it", error)

    def wait(self):
        """Until everything is written."""
        self.background.join()
        self.tell()

    def newest(self):
        """The newest good checkpoint, or None."""
        self.wait()
        return storage.for_all(self.find_newest)

    def find_newest(self):
        found, wrong = storage.newest(self.folder)
        for error in wrong:
            logger.warning("%s; passed over", error)
        return found

    def best(self):
        """The best good checkpoint by what is monitored, or None."""
        self.wait()
        return storage.for_all(self.find_best)

    def find_best(self):
        for name, _ in self.kept.best:
            try:
                return storage.read_all(name, storage.files(self.folder, name))
            except Damaged as error:
                logger.warning("%s; passed over", error)
        return None

    def last(self):
        """The file of the latest checkpoint, or None."""
        return self.file(self.kept.regular[-1]) if self.kept.regular else None

    def file(self, name):
        """A file of a checkpoint."""
        return next(iter(storage.files(self.folder, name)), self.folder / name)

    def lengths(self):
        """The bytes of the logs so far."""
        return {
            log: (self.folder / log).stat().st_size for log in LOGS if (self.folder / log).exists()
        }

    def resumed(self, found):
        """Go on after a checkpoint, with it and the older ones that are there."""
        records, record = storage.records(self.folder), found.record
        older = list(records)[: list(records).index(found.name) + 1]
        self.kept = kept_so_far(
            {name: records[name] for name in older}, record["regular"], self.options
        )
        self.saved, self.time = (
            (record["step"], record["position"], record["whole"]),
            time.monotonic(),
        )


class NoKeeper:
    """Keeps nothing, for a run without a folder."""

    monitor = None

    def due(self, step):
        return False

    def time_is_up(self):
        return False

    def steps_left(self, step):
        return 2**30

    def epoch_ended(self, run, cut):
        pass

    def ended(self, run, cut):
        pass

    def check(self):
        pass

    def wait(self):
        pass

    def newest(self):
        return None

    def best(self):
        return None

    def last(self):
        return None


def evaluated(ts):
    """The weights of a TrainState that are evaluated."""
    return ts.params if ts.ema is None else ts.ema, ts.state


def as_saved(ts, cut, whole):
    """The tree that a checkpoint holds: within an epoch with its sums, and without the optimizer's state if not whole."""
    if not whole:
        return {"params": ts.params, "state": ts.state, "ema": ts.ema}
    tree = ts._asdict()
    if not cut.where["position"]:
        del tree["sums"]
    return tree


def flush_to_disk(path):
    """Make sure that what was written to a file so far survives a loss of power."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
