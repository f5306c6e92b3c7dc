"""Before the first step: evaluate one batch of every held-out set, check the monitored metrics, and
log what will run and the memory that it needs, so that errors do not appear only after an hour."""

import logging
from dataclasses import replace

import jax

from training.devices.sharding import shard_bytes
from training.observers import name_of, reported_by
from training.options import monitor_for
from training.runs.shape_check import check_monitors
from utils import UserError, format_bytes

logger = logging.getLogger("main")


class DryRun:
    """The observer for the beginning of a run. `monitor` is checkpoint.monitor; `shows_histograms`
    says whether any tracker shows histograms."""

    def __init__(self, recipe, trainer, reader, rates, monitor, shows_histograms):
        self.recipe, self.trainer, self.reader, self.rates = recipe, trainer, reader, rates
        self.monitor, self.shows_histograms = monitor, shows_histograms

    def on_start(self, run):
        recipe, trainer, reader = self.recipe, self.trainer, self.reader
        measured = [*reader.values("train", trainer.training_sums().epoch), *self.rates(0)]
        for name in recipe.sets_in_epochs(trainer.feeds):
            trainer.try_out(name)
            values = reader.values(name, trainer.evaluation_sums(name))
            measured += values if recipe.training.eval_every else []
        for name in recipe.sets_at_end(trainer.feeds):
            trainer.try_out(name)
        evaluated = recipe.sets_monitored(trainer.feeds)
        monitors = {
            f"{name_of(c)}.monitor": monitor_for(
                getattr(c, "monitor", None), evaluated, "test_loss"
            )
            for c in recipe.callbacks
        }
        monitors |= {"checkpoint.monitor": self.monitor}
        measured += [name for c in recipe.callbacks for name in reported_by(c, evaluated)]
        check_monitors(monitors, [name for name in measured if "/" not in name])
        for callback in recipe.callbacks:
            if getattr(callback, "restore_best", False):
                watched = monitors[f"{name_of(callback)}.monitor"]
                check_same_best(callback, watched, replace(recipe.checkpoint, monitor=self.monitor))
        if self.monitor is None and "test" in trainer.feeds and {*evaluated} - {"test"}:
            logger.info(
                "No checkpoint.monitor: the last weights will be tested, not the best ones on the "
                "validation set"
            )
        if recipe.logging.histograms and not self.shows_histograms:
            logger.warning(
                "logging.histograms: no tracker here shows them; use tensorboard, wandb or trackio"
            )
        batch = jax.tree.leaves(trainer.feed.shapes)[0].shape[0]
        steps = "Epochs of unknown length, batches"
        if run.steps is not None:
            limits = run.epochs and run.steps * run.epochs, recipe.training.max_steps
            in_all = min(filter(None, limits), default="as many as max_seconds takes")
            steps = f"{run.steps} steps per epoch, {in_all} in all,"
        count = len(trainer.replicas.seeds)
        replicas = f", {count} replicas" if count > 1 else ""
        devices = on_devices(trainer.plan.mesh)
        logger.info("%s of %d examples each, on %s%s", steps, batch, devices, replicas)

    def log_memory(self):
        """Log how long compiling the step took, and the memory of a device that the run needs."""
        trainer = self.trainer
        trainer.prepare()
        seconds = trainer.compile_seconds()
        if not seconds:
            logger.info("Nothing is compiled (--debug), so this is slow")
            return
        needs = {
            "state": sum(map(device_bytes, trainer.states)),
            "data": sum(feed.nbytes for feed in trainer.feeds.values()),
        }
        if trainer.program.memory:
            needs["step"] = trainer.program.memory["temp_size_in_bytes"]
        parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in needs.items())
        total = format_bytes(sum(needs.values()))
        logger.info("Compiled in %.1f s; memory about %s: %s", seconds, total, parts)


def check_same_best(callback, watched, options):
    """Refuse a callback that restores the best checkpoint, if another one is the best for it."""
    best = options.monitor
    if watched not in (best, None) or (best and callback.sign() != options.sign()):
        raise UserError(
            f"callbacks: {name_of(callback)}: restore_best restores the best checkpoint by "
            f"checkpoint.monitor, which is {best}, and it watches {watched}; "
            "name the same metric in both, with the same mode"
        )


def on_devices(mesh):
    """The devices of a mesh, such as 8 x NVIDIA H200 (data 2 x fsdp 4), in 2 processes."""
    axes = [f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1]
    shape = f" ({' x '.join(axes)})" if axes and axes != [f"data {mesh.size}"] else ""
    processes = f", in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{mesh.size} x {mesh.devices.flat[0].device_kind}{shape}{processes}"


def device_bytes(tree):
    """The bytes of a tree of arrays that one device holds."""
    return sum(shard_bytes(leaf, leaf.sharding) for leaf in jax.tree.leaves(tree))
