"""The engine of a run: the states of its replicas, and the compiled programs that train and evaluate them."""

from functools import partial

import jax
import jax.numpy as jnp

from training.base import TrainState
from training.checkpoint.storage import without_key_type
from training.evaluator import Evaluator, advance, rows_of
from training.feed import Lanes, Resident, make_feed, nbytes
from training.programs import compiled_start, loops_are_slow
from training.sharding import make_mesh, replicated
from training.tally import Watch
from training.update import read_of, shapes_of_values, zero_sums
from utils import UserError, named_leaves

EVERYTHING = Watch()  # every metric, in every phase, as a mean


class Runner:
    """Trains and evaluates the replicas of a run; their states stay on the devices.

    `sets` are {"train": dataset, "test": dataset, ...}; `make_update(unroll=...)` answers the Update; `restore` may replace the
    first (params, state); `freeze` holds the state as it was before a step that is not finite; `watch` is what is measured.
    Replicas are one vmapped program on accelerators; on the CPU one program called for each is faster (a ResNet step: 181 ms
    against 814).
    """

    def __init__(
        self,
        model,
        objective,
        make_update,
        sets,
        options,
        *,
        seed=0,
        replicas=1,
        restore=None,
        freeze=False,
        watch=EVERYTHING,
        limit=None,
        stacked=None,
    ):
        stacked = jax.default_backend() != "cpu" if stacked is None else stacked
        self.lanes = Lanes(range(seed, seed + replicas), make_mesh(), stacked and replicas > 1)
        self.feeds = make_feeds(sets, options, self.lanes, limit)
        self.feed = feed = self.feeds["train"]
        trees = self.first_trees(model)
        trees = [restore(*tree) for tree in trees] if restore else trees
        looped = not loops_are_slow(objective, *trees[0], feed.shapes)
        self.update = make_update(unroll=not looped)
        self.program = feed.program("train", *training(self.update), looped)
        held_out = {name: feed for name, feed in self.feeds.items() if name != "train"}
        self.evaluator = Evaluator(objective, held_out, self.lanes, trees[0], watch, looped)
        modes = watch.modes(shapes_of_values(objective, *trees[0], feed.shapes), "TRAIN", "EPOCH")
        self.gathers = rows_of("train", feed, modes)  # how many rows CONCAT gathers in an epoch
        self.ring, self.leaves = watch.ring, tuple(named_leaves(trees[0][0]))
        zeros = partial(zero_sums, objective, *trees[0], feed.shapes, freeze=freeze, watch=watch, rows=self.gathers)
        self.zeros = self.lanes.start(zeros)  # of a lane
        # With rows or steps that are kept one by one, all zeros are much more than those of a log line.
        alone = self.gathers or self.ring
        self.zero_window = self.lanes.start(lambda: zeros()["window"]) if alone else lambda: self.zeros()["window"]
        self.rate_scale = 1.0
        self.states = self.first_states(trees, self.update)
        self.copies = []  # the latest snapshot, whose memory the next one takes: fresh memory costs four times the copy
        self.copy = jax.jit(lambda ts, memory: jax.tree.map(jnp.copy, ts), donate_argnums=1, keep_unused=True)

    def first_trees(self, model):
        """(params, state) of each replica, drawn from its seed."""
        keys = [jax.random.fold_in(jax.random.key(seed), 2**32 - 1) for seed in self.lanes.seeds]  # no run takes that step
        init = compiled_start(model.init, self.lanes.mesh, keys[0])
        return [init(key) for key in keys]

    def first_states(self, trees, update):
        """The TrainState of each lane."""

        def first(params, state, seed):
            opt, ema = update.init(params)
            ts = TrainState(jnp.int32(0), seed, params, state, opt, ema, {}, jnp.float32(1))
            return jax.tree.map(jnp.copy, ts)  # no two leaves of a donated tree may be the same buffer

        arguments = [(*tree, jnp.uint32(seed)) for tree, seed in zip(trees, self.lanes.seeds, strict=True)]
        start = compiled_start(first, self.lanes.mesh, *arguments[0])
        return self.lanes.stack([start(*a) for a in arguments])

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
        self.states = [ts._replace(sums=ts.sums | {"window": self.zero_window()}) for ts in self.states]

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
        self.states = [ts._replace(lr_scale=jnp.full_like(ts.lr_scale, factor)) for ts in self.states]

    def snapshot(self):
        """A copy of each replica's TrainState, which the next snapshot takes away, but not the next step. An accelerator may have
        no room for a second one, so there it is made in the host's memory."""
        if jax.default_backend() != "cpu" and jax.process_count() == 1:
            return jax.device_get([jax.tree.map(without_key_type, ts) for ts in self.replica_states()])
        same = jax.tree.structure(self.copies) == jax.tree.structure(self.states)
        memory = self.copies if same else [None] * len(self.states)
        self.copies = [self.copy(*both) for both in zip(self.states, memory, strict=True)]
        return self.lanes.unstack(self.copies)

    def restore(self, states):
        """Go on from one TrainState for each replica; their seeds decide the order of the data."""
        self.lanes.seeds = [int(ts.seed) for ts in states]
        self.rate_scale = float(states[0].lr_scale)
        placed = self.lanes.stack(jax.device_put(states, replicated(self.lanes.mesh)))
        self.states = [self.copy(ts, None) for ts in placed]  # JAX may have borrowed the host's memory, which must not be donated

    def replica_states(self):
        """The TrainState of each replica."""
        return self.lanes.unstack(self.states)

    def close(self):
        """End the threads that read ahead."""
        for feed in self.feeds.values():
            feed.close()


def make_feeds(sets, options, lanes, limit=None):
    """{set: its feed}; as many sets as fit the budget live on the device, the first ones first. All must have one form."""
    feeds, budget = {}, options.device_budget_mb * 2**20
    try:
        for name, dataset in sets.items():
            shuffle = name == "train" and options.shuffle
            feeds[name] = make_feed(dataset, options, lanes, shuffle=shuffle, budget=budget, limit=limit)
            budget -= nbytes(dataset) if isinstance(feeds[name], Resident) else 0
            first = next(iter(feeds))
            check_form(name, feeds[name].shapes, first, feeds[first].shapes)
    except BaseException:
        for feed in feeds.values():
            feed.close()
        raise
    return feeds


def check_form(name, batch, first, expected):
    """The examples of every set must be of the shape and type of the first one's."""

    def form(tree):
        return jax.tree.map(lambda a: f"{a.dtype}{list(a.shape[1:])}", tree)

    if form(batch) != form(expected):
        whose = "training" if first == "train" else first
        raise UserError(f"data: an example of the {name} set is {form(batch)}, one of the {whose} set is {form(expected)}")


def training(update):
    """(step, report) of training: the carry is the TrainState, the report what is read of its sums."""
    return lambda _, ts, batch, valid: update.step(ts, batch, valid), lambda ts: read_of(ts.sums)
