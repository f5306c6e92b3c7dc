"""A run at work: the states of its replicas, and what drives them through the compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np

from training.checkpoint.storage import without_key_type
from training.devices.placing import put
from training.devices.sharding import replicated
from training.engine import Engine
from training.evaluator import advance


class Runner:
    """Trains and evaluates the replicas of a run; their states stay on the devices.

    `restore` may replace the first (params, state); `engine` is one that was made ahead of the data, for the same parts. The
    rest is told in Engine.
    """

    def __init__(
        self, model, objective, make_update, sets, options, *, restore=None, engine=None, **settings
    ):
        self.engine = engine = engine or Engine(
            model, objective, make_update, sets, options, **settings
        )
        self.lanes, self.feeds, self.feed = engine.lanes, engine.feeds, engine.feeds["train"]
        self.update, self.program, self.evaluator = engine.update, engine.program, engine.evaluator
        self.gathers, self.ring, self.leaves = engine.gathers, engine.ring, engine.leaves
        self.zeros, self.zero_window = engine.zeros, engine.zero_window
        engine.fill(sets)
        self.rate_scale = 1.0
        self.states = self.first_states(restore)
        self.copies = []  # the latest snapshot, whose memory the next one takes: fresh memory costs four times the copy
        self.copy = jax.jit(
            lambda ts, memory: jax.tree.map(jnp.copy, ts), donate_argnums=1, keep_unused=True
        )

    def first_states(self, restore):
        """The TrainState of each lane."""
        seeds = [np.uint32(seed) for seed in self.lanes.seeds]
        trees = [self.engine.draw(seed) for seed in seeds]
        trees = [self.on_devices(restore(*tree)) for tree in trees] if restore else trees
        return self.stacked(
            [self.engine.first(*tree, seed) for tree, seed in zip(trees, seeds, strict=True)]
        )

    def on_devices(self, weights):
        """(params, state) where they belong."""
        params, state = weights
        return put(params, self.engine.plan.of_params(params)), put(
            state, replicated(self.lanes.mesh)
        )

    def stacked(self, states):
        """From a TrainState for each replica to one for each lane."""
        plan = self.engine.plan._replace(stacked=self.lanes.stacked)
        return self.lanes.stack(states, plan.of_state(states[0]))

    def begin(self, epoch, start=0):
        """Start an epoch of training, or go on in it after its first `start` batches."""
        self.feed.begin(epoch, start)
        if start == 0:
            self.states = [ts._replace(sums=self.zeros()) for ts in self.states]

    def train(self, count):
        """Up to `count` steps: how many were taken, and what the epoch has summed up so far, still on the device."""
        return advance(self.feed, self.program, [()] * len(self.states), self.states, count)

    def new_window(self):
        """Begin the sums of another log line; those of the last one were read with its steps."""
        self.states = [
            ts._replace(sums=ts.sums | {"window": self.zero_window()}) for ts in self.states
        ]

    def prepare(self):
        """Compile the step ahead of the first one; whether that was still to be done."""
        if self.program.compiled is not None:
            return False
        lane = self.feed.peek()
        if lane is not None:
            self.program.prepare((), self.states[0], *lane)
        return lane is not None

    def evaluate(self, name, count=2**30, stopped=lambda: False, weights=None):
        """The tally of a whole set, by the weights of now or others; None where `stopped` says so between two calls of `count`
        batches."""
        return self.evaluator.measure(name, weights or self.weights(), count, stopped)

    def try_out(self, name):
        """The tally of the first batch of a set."""
        return self.evaluator.try_out(name, self.weights())

    def compiled(self):
        """The seconds that compiling the step and the evaluations took so far."""
        return sum(program.seconds for program in (self.program, *self.evaluator.programs.values()))

    def weights(self):
        """(params, state) of each lane as they are evaluated."""
        return [(ts.params if ts.ema is None else ts.ema, ts.state) for ts in self.states]

    def read(self, reports):
        """Sums as NumPy arrays, one tree for each replica; waits for them."""
        return self.lanes.unstack(jax.device_get(reports))

    def zero_sums(self):
        """The sums of one replica before its first step, on the host."""
        return self.read([self.zeros()])[0]

    def sums(self):
        """The sums of the epoch so far, all of them, of each replica."""
        return self.read([ts.sums for ts in self.states])

    def scale_rate(self, factor):
        """Multiply every later update by this."""
        self.rate_scale = float(factor)
        rows = np.full(self.states[0].lr_scale.shape, factor, np.float32)
        self.states = [
            ts._replace(lr_scale=put(rows, replicated(self.lanes.mesh))) for ts in self.states
        ]

    def snapshot(self):
        """A copy of each replica's TrainState, which the next snapshot takes away, but not the next step. An accelerator may have
        no room for a second one, so there it is made in the host's memory; but what several processes hold stays on the devices
        until it is written."""
        if jax.default_backend() != "cpu" and jax.process_count() == 1:
            return jax.device_get(
                [jax.tree.map(without_key_type, ts) for ts in self.replica_states()]
            )
        same = jax.tree.structure(self.copies) == jax.tree.structure(self.states)
        memory = self.copies if same else [None] * len(self.states)
        copies = [self.copy(*both) for both in zip(self.states, memory, strict=True)]
        self.copies = copies if jax.default_backend() == "cpu" else []
        return self.lanes.unstack(copies)

    def restore(self, states):
        """Go on from one TrainState for each replica; their seeds decide the order of the data."""
        self.lanes.seeds = [int(ts.seed) for ts in states]
        self.rate_scale = float(states[0].lr_scale)
        self.states, self.copies = [], []  # there may be no room for both
        self.states = self.stacked([put(ts, self.engine.plan.of_state(ts)) for ts in states])
        if (
            jax.default_backend() == "cpu"
        ):  # JAX may have borrowed the host's memory, which must not be donated
            self.states = [self.copy(ts, None) for ts in self.states]

    def replica_states(self):
        """The TrainState of each replica."""
        return self.lanes.unstack(self.states)

    def close(self):
        """End the threads that read ahead."""
        self.engine.close()
