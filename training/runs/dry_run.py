"""Before the first step: what will run and what it needs, and a dry run of what would else fail after an hour."""

import logging

import jax

from training.devices.sharding import shard_bytes
from training.evaluations import at_the_end, in_epochs
from training.measures import check_monitors
from training.watching.hooks import called
from utils import format_bytes

logger = logging.getLogger("main")


def check(loop):
    """Measure one batch of every held-out set, look whether what is monitored is measured, and tell what will run."""
    runner, options = loop.runner, loop.options
    measured = [*loop.reader.values("train", [runner.zero_sums()["epoch"]]), *loop.learning_rate(0)]
    for name in in_epochs(runner.feeds, options):
        named = loop.reader.values(name, runner.try_out(name))
        measured += named if options.eval_every else []
    for name in at_the_end(runner.feeds, options):
        loop.reader.values(name, runner.try_out(name))
    monitors = {
        f"{called(callback)}.monitor": getattr(callback, "monitor", None)
        for callback in loop.callbacks
    }
    check_monitors(
        monitors | {"checkpoint.monitor": loop.keeper.monitor},
        [name for name in measured if "/" not in name],
    )
    if loop.reporting.histograms and not loop.log.publish.channels_for("histogram"):
        logger.warning("logging.histograms: no tracker here shows them; name tensorboard or wandb")
    tell(loop.run, runner)


def tell(run, runner):
    """What will run, in a few lines."""
    batch = jax.tree.leaves(runner.feed.shapes)[0].shape[0]
    steps = (
        "An epoch of unknown length"
        if run.steps is None
        else f"{run.steps} steps an epoch, {run.steps * run.epochs} in all,"
    )
    several = f", {len(runner.lanes.seeds)} replicas" if len(runner.lanes.seeds) > 1 else ""
    logger.info(
        "%s of %d examples each, on %s%s", steps, batch, on_devices(runner.lanes.mesh), several
    )


def on_devices(mesh):
    """The devices of a mesh in words: 8 x NVIDIA H200 (data 2 x fsdp 4), in 2 processes."""
    axes = [f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1]
    arranged = f" ({' x '.join(axes)})" if axes and axes != [f"data {mesh.size}"] else ""
    processes = f", in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{mesh.size} x {mesh.devices.flat[0].device_kind}{arranged}{processes}"


def tell_of_memory(runner):
    """What compiling the step took, and what it and the data need of a device's memory."""
    needs = {
        "state": size(runner.states[0]) * len(runner.states),
        "data": sum(feed.nbytes for feed in runner.feeds.values()),
    }
    needs |= {"step": runner.program.memory["temp_size_in_bytes"]} if runner.program.memory else {}
    shown = ", ".join(f"{name} {format_bytes(n)}" for name, n in needs.items())
    if not runner.compiled():
        logger.info("Nothing is compiled (--debug), so this is slow")
        return
    logger.info(
        "Compiled in %.1f s; memory about %s: %s",
        runner.compiled(),
        format_bytes(sum(needs.values())),
        shown,
    )


def size(tree):
    """The bytes of a tree of arrays on one device."""
    return sum(shard_bytes(leaf, leaf.sharding) for leaf in jax.tree.leaves(tree))
