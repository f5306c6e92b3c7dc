"""The lines that a run logs before its first step: what will run, and on which devices."""

import logging

import jax

logger = logging.getLogger("main")


class FirstLines:
    """The observer that logs these lines. `monitor` is the metric of the best checkpoint, or None;
    `shows_histograms` says whether any tracker shows histograms."""

    def __init__(self, recipe, trainer, monitor, shows_histograms):
        self.recipe, self.trainer = recipe, trainer
        self.monitor, self.shows_histograms = monitor, shows_histograms

    def on_start(self, run):
        recipe, trainer = self.recipe, self.trainer
        validation = {*recipe.sets_monitored(trainer.feeds)} - {"test"}
        if self.monitor is None and "test" in trainer.feeds and validation:
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
        count = len(trainer.seeds)
        replicas = f", {count} replicas" if count > 1 else ""
        devices = on_devices(trainer.plan.mesh)
        logger.info("%s of %d examples each, on %s%s", steps, batch, devices, replicas)


def on_devices(mesh):
    """The devices of a mesh, such as 8 x NVIDIA H200 (data 2 x fsdp 4), in 2 processes."""
    axes = [f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1]
    shape = f" ({' x '.join(axes)})" if axes and axes != [f"data {mesh.size}"] else ""
    processes = f", in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{mesh.size} x {mesh.devices.flat[0].device_kind}{shape}{processes}"
