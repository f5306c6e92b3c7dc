"""The engine of a run: the states of its replicas, and the compiled programs that train and evaluate them."""

import jax
import jax.numpy as jnp

from training.base import TrainState
from training.checkpoint.storage import without_key_type
from training.feed import Lanes, Resident, make_feed, nbytes
from training.programs import compiled_start, loops_are_slow
from training.sharding import make_mesh, replicated
from training.update import add_sums, zero_sums
from utils import UserError


class Runner:
    """Trains and evaluates the replicas of a run; their states stay on the devices.

    `sets` are {"train": dataset, "test": dataset, ...}; `make_update(unroll=...)` answers the Update; `restore` may replace the
    first (params, state); `freeze` holds the state as it was before a step that is not finite. Replicas are one vmapped program
    on accelerators; on the CPU one program called for each is faster (a ResNet step: 181 ms against 814).
    """

    def __init__(
        self, model, objective, make_update, sets, options, *, seed=0, replicas=1, restore=None, freeze=False, stacked=None
    ):
        stacked = jax.default_backend() != "cpu" if stacked is None else stacked
        self.lanes = Lanes(range(seed, seed + replicas), make_mesh(), stacked and replicas > 1)
        self.feeds = make_feeds(sets, options, self.lanes)
        batch = self.feeds["train"].shapes
        trees = self.first_trees(model)
        trees = [restore(*tree) for tree in trees] if restore else trees
        looped = not loops_are_slow(objective, *trees[0], batch)
        update = make_update(unroll=not looped)
        self.programs = {
            name: feed.program(*(training(update) if name == "train" else evaluation(objective)), looped)
            for name, feed in self.feeds.items()
        }
        self.zeros = compiled_start(lambda: zero_sums(objective, *trees[0], batch, freeze=freeze), self.lanes.mesh)
        self.states = self.first_states(trees, update)
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

    def empty_sums(self):
        """Zeroed accumulators for each lane."""
        return self.lanes.stack([self.zeros() for _ in self.lanes.seeds])

    def begin(self, epoch, start=0):
        """Start an epoch of training, or go on in it after its first `start` batches."""
        self.feeds["train"].begin(epoch, start)
        if start == 0:
            self.states = [ts._replace(sums=sums) for ts, sums in zip(self.states, self.empty_sums(), strict=True)]

    def train(self, count):
        """Up to `count` steps: how many were taken, and what the epoch has summed up so far, still on the device."""
        return self.advance("train", [()] * len(self.states), self.states, count)

    def evaluate(self, name, count=2**30, stopped=lambda: False):
        """What a whole dataset sums up to; None where `stopped` says so between two calls of `count` batches."""
        self.feeds[name].begin(epoch=1)
        weights = [(ts.params if ts.ema is None else ts.ema, ts.state) for ts in self.states]
        sums, taken, before = self.empty_sums(), 1, None
        while taken:
            taken, reports = self.advance(name, weights, sums, count)
            jax.block_until_ready(before)  # while the next ones compute
            before = reports
            if stopped():
                return None
        return self.read(sums)

    def advance(self, name, consts, carries, count):
        """Drive the carries, in place, over up to `count` batches of a set: (batches taken, reports)."""
        taken, reports = 0, [None] * len(carries)
        for lanes, steps in self.feeds[name].calls(count):
            for lane, arguments in enumerate(lanes):
                carries[lane], reports[lane] = self.programs[name](consts[lane], carries[lane], *arguments)
            taken += steps
        return taken, reports

    def read(self, reports):
        """Sums as NumPy arrays, one tree for each replica; waits for them."""
        return self.lanes.unstack(jax.device_get(reports))

    def scale_rate(self, factor):
        """Multiply every later update by this."""
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
        placed = self.lanes.stack(jax.device_put(states, replicated(self.lanes.mesh)))
        self.states = [self.copy(ts, None) for ts in placed]  # JAX may have borrowed the host's memory, which must not be donated

    def replica_states(self):
        """The TrainState of each replica."""
        return self.lanes.unstack(self.states)

    def close(self):
        """End the threads that read ahead."""
        for feed in self.feeds.values():
            feed.close()


def make_feeds(sets, options, lanes):
    """{set: its feed}; as many sets as fit the budget live on the device, the first ones first. All must have one form."""
    feeds, budget = {}, options.device_budget_mb * 2**20
    try:
        for name, dataset in sets.items():
            feeds[name] = make_feed(dataset, options, lanes, shuffle=name == "train" and options.shuffle, budget=budget)
            budget -= nbytes(dataset) if isinstance(feeds[name], Resident) else 0
            check_form(name, feeds[name].shapes, feeds["train"].shapes)
    except BaseException:
        for feed in feeds.values():
            feed.close()
        raise
    return feeds


def check_form(name, batch, train):
    """The examples of every set must be of the shape and type of the training set's."""

    def form(tree):
        return jax.tree.map(lambda a: f"{a.dtype}{list(a.shape[1:])}", tree)

    if form(batch) != form(train):
        raise UserError(f"data: an example of the {name} set is {form(batch)}, one of the training set is {form(train)}")


def training(update):
    """(step, report) of training: the carry is the TrainState, the report its sums."""
    return lambda _, ts, batch, valid: update.step(ts, batch, valid), lambda ts: ts.sums


def evaluation(objective):
    """(step, report) of an evaluation: constants are (params, state), the carry is the sums; randomness, if any, is constant."""

    def step(weights, sums, batch, valid):
        losses, _, metrics = objective(*weights, batch, jax.random.key(0), False)
        return add_sums(sums, losses, metrics, jnp.arange(len(losses)) < valid)

    return step, lambda sums: sums
