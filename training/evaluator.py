"""Measuring the held-out sets of a run, with whatever weights."""

from functools import partial

import jax
import jax.numpy as jnp

from training import tally
from training.devices.sharding import replicated
from training.programs import placed
from training.update import shapes_of_values
from utils import UserError


class Evaluator:
    """The compiled programs that measure sets: `feeds` are {name: feed}, `trees` the forms of (params, state), `tried` names the
    sets that are sure to be measured."""

    def __init__(self, objective, feeds, lanes, trees, watch, looped=True, tried=()):
        self.feeds, self.lanes = feeds, lanes
        step, report = evaluation(objective)
        self.programs = {
            name: feed.program(name, step, report, looped) for name, feed in feeds.items()
        }
        self.starts, made = {}, {}
        for name, feed in feeds.items():
            shapes = shapes_of_values(objective, *trees, feed.shapes)
            modes = watch.modes(shapes, tally.phase_of(name), "EPOCH")
            if (
                feed.steps is None
            ):  # what a callback wants to gather must do without a set of unknown length
                modes = {
                    label: mode
                    for label, mode in modes.items()
                    if mode != "CONCAT" or label not in watch.hidden
                }
            key = (tuple(modes.items()), rows_of(name, feed, modes))
            if key not in made:  # sets that are measured alike share what makes their start
                empty = partial(tally.empty, modes, shapes, key[1])
                made[key] = (
                    lanes.start(empty),
                    placed(jax.eval_shape(empty), replicated(lanes.mesh)),
                )
            self.starts[name], carry = made[key]
            if name in tried and not lanes.stacked:
                self.programs[name].begin(trees, carry, *feed.forms())

    def measure(self, name, weights, count=2**30, stopped=lambda: False):
        """The tally of a whole set by each replica; None where `stopped` says so between two calls of `count` batches.
        `weights` are (params, state) of each lane."""
        self.feeds[name].begin(epoch=1)
        tallies, taken, before = [self.starts[name]() for _ in range(len(self.lanes))], 1, None
        while taken:
            taken, reports = advance(self.feeds[name], self.programs[name], weights, tallies, count)
            jax.block_until_ready(before)  # while the next ones compute
            before = reports
            if stopped():
                return None
        return self.lanes.unstack(jax.device_get(tallies))

    def try_out(self, name, weights):
        """Measure one batch, so that what does not work is told before an hour of training."""
        self.feeds[name].begin(epoch=1)
        tallies = [self.starts[name]() for _ in range(len(self.lanes))]
        advance(self.feeds[name], self.programs[name], weights, tallies, 1)
        return self.lanes.unstack(jax.device_get(tallies))

    def close(self):
        """End the threads that read ahead."""
        for feed in self.feeds.values():
            feed.close()


def advance(feed, program, consts, carries, count):
    """Drive the carries, in place, over up to `count` batches of a set: (batches taken, reports)."""
    taken, reports = 0, [None] * len(carries)
    for lanes, steps in feed.calls(count):
        for lane, arguments in enumerate(lanes):
            carries[lane], reports[lane] = program(consts[lane], carries[lane], *arguments)
        taken += steps
    return taken, reports


def evaluation(objective):
    """(step, report) of an evaluation: constants are (params, state), the carry is the tally; randomness, if any, is constant."""

    def step(weights, seen, batch, valid):
        losses, _, metrics = objective(*weights, batch, jax.random.key(0), False)
        mask = jnp.arange(len(losses)) < valid
        return tally.merged(seen, tally.of_batch(seen, {**metrics, "loss": losses}, mask))

    return step, tally.without_rows


def rows_of(name, feed, modes):
    """How many rows CONCAT must hold for a set: with one batch to spare, since a batch is written whole."""
    if "CONCAT" not in modes.values():
        return 0
    if feed.steps is None:
        labels = ", ".join(label for label, mode in modes.items() if mode == "CONCAT")
        raise UserError(
            f"metrics: {labels}: CONCAT needs to know how many batches the {name} set has; give it a __len__"
        )
    return (feed.steps + 1) * jax.tree.leaves(feed.shapes)[0].shape[0]
