"""The trainer: the compiled programs of a run, and its state on the devices.

The programs are made from shapes alone, so that threads compile them while the data is still
loading: `Trainer(recipe, shapes)`, then `start(sets)`. After that it trains some steps, evaluates a
set, and copies or replaces its state. The loop decides when an epoch begins, a log line is written
or a checkpoint is saved.
"""

import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from data_loader.base import Arrays
from training import tally
from training.base import key_data
from training.feed import make_feeds, spec_on_device
from training.gradient import check_per_example
from training.metrics import phase_of
from training.objective import shapes_of_values
from training.programs import RareProgram, loops_are_slow, placed
from training.replicas import Replicas, as_inputs, first_state, first_weights
from training.update import genuine, loop_for, read_of, zero_sums
from utils import RunError, UserError, named_leaves

SEED = jax.ShapeDtypeStruct((), jnp.uint32)


class Trainer:
    """Trains and evaluates the replicas of a recipe on `sets`, {"train": dataset, "test": dataset,
    ...}, where Arrays may hold specs of the arrays that `start` is called with. Without a "train"
    set it only evaluates. If its programs cannot be traced, `explain` is called with {set: the
    shapes of a batch}, and may raise an error that says why."""

    def __init__(self, recipe, sets, stacked=None, explain=None):
        options, self.plan = recipe.training, recipe.plan.on_devices()
        self.recipe, self.pool = recipe, ThreadPoolExecutor(2, "compile")
        self.replicas = Replicas(recipe.seeds, self.plan, self.pool, stacked)
        self.numbers = [as_inputs(numbers) for numbers in recipe.varied_numbers]  # of each replica
        self.lane_numbers = self.replicas.joined(self.numbers)
        self.feeds = make_feeds(sets, recipe.loader, self.replicas, options.limit_batches)
        self.feed, self.set_specs = self.feeds.get("train"), specs_of(sets)
        try:
            self.begin_programs(recipe, sets)
        except Exception as error:
            self.close()
            if explain and not isinstance(error, UserError | RunError):
                explain({name: feed.shapes for name, feed in self.feeds.items()})
            raise
        self.rate_scale, self.states = 1.0, []
        # The latest snapshot, whose memory the next one reuses: new memory costs 4 times the copy.
        self.copies = []
        self.copy = jax.jit(
            lambda ts, memory: jax.tree.map(jnp.copy, ts), donate_argnums=1, keep_unused=True
        )

    # Programs.

    def begin_programs(self, recipe, sets):
        """Make all programs, and begin to compile those that are sure to be used."""

        def draw(seed, numbers):
            """The (params, state) of a replica with these numbers."""
            return first_weights(recipe.with_numbers(numbers).model, seed)

        of_replica, whole = (SEED, self.numbers[0]), self.plan.whole  # specs of its seed, numbers
        params, state = jax.eval_shape(draw, *of_replica)
        shardings = self.plan.of_params(params), whole
        self.weight_specs = placed(params, shardings[0]), placed(state, whole)
        self.leaf_names = tuple(named_leaves(params))
        shapes = next(iter(self.feeds.values())).shapes
        self.looped = not loops_are_slow(recipe.objective, *self.weight_specs, shapes)
        values = shapes_of_values(recipe.objective, *self.weight_specs, shapes)
        self.metric_shapes = {label: tree for label, tree in values.items() if label != "loss"}
        self.program, self.empty_tallies = None, {}
        if self.feed:
            self.begin_training_programs(values, of_replica)
            self.draw = RareProgram(draw, shardings, *of_replica, pool=self.pool)
        self.begin_evaluation_programs([*recipe.sets_in_epochs(sets), *recipe.sets_at_end(sets)])

    def begin_training_programs(self, values, of_replica):
        """Begin to compile the training step, which takes longest, and the programs that make the
        first state and its sums. Specs are of the objective's values, a replica's seed, numbers."""
        recipe, metric_plan, shapes = self.recipe, self.recipe.metric_plan, self.feed.shapes
        unroll, steps = not self.looped, self.feed.steps  # unroll microbatches where loops are slow
        self.passes = recipe.make_update(unroll, steps).passes
        metric_plan.check(values)
        check_per_example(values, jax.tree.leaves(shapes)[0].shape[0])
        modes = metric_plan.modes(values, "TRAIN", "EPOCH")
        self.concat_rows = rows_of("train", self.feed, modes)
        freeze = recipe.training.on_nonfinite != "skip"
        settings = {"freeze": freeze, "metric_plan": metric_plan, "rows": self.concat_rows}
        zeros = partial(zero_sums, recipe.objective, *self.weight_specs, shapes, **settings)

        def make_state(params, state, seed, numbers):
            """The TrainState of a replica with these numbers, without its sums."""
            update = recipe.with_numbers(numbers).make_update(unroll, steps)
            return first_state(update, params, state, seed)

        specs = (*self.weight_specs, *of_replica)
        made = jax.eval_shape(make_state, *specs)
        carry = made._replace(sums=jax.eval_shape(zeros))
        shardings = self.replicas.lanes_plan.of_state(carry)
        step, report = train_functions(recipe, unroll, steps)
        loop = loop_for(carry, self.replicas.stacked) if self.looped else None
        self.program = self.feed.program("train", step, report, loop, shardings)
        if not self.replicas.stacked:
            self.program.begin(self.lane_numbers[0], placed(carry, shardings), *self.feed.specs())
        self.zeros = self.replicas.start(zeros)
        self.zero_window = lambda: self.zeros()["window"]
        if self.concat_rows or metric_plan.ring:  # then all sums are much larger than a log line's
            self.zero_window = self.replicas.start(lambda: zeros()["window"])
        self.make_state = RareProgram(make_state, self.plan.of_state(made), *specs, pool=self.pool)

    def begin_evaluation_programs(self, compile_now):
        """Make the program of each held-out set; begin to compile those of the sets in
        `compile_now`, which are known to be evaluated."""
        held_out = {name: feed for name, feed in self.feeds.items() if name != "train"}
        loop = jax.lax.fori_loop if self.looped else None
        self.evaluation_programs = {
            name: feed.program(name, *evaluation_functions(self.recipe, name), loop)
            for name, feed in held_out.items()
        }
        made = {}
        for name, feed in held_out.items():
            shapes = shapes_of_values(self.recipe.objective, *self.weight_specs, feed.shapes)
            modes = self.recipe.metric_plan.modes(shapes, phase_of(name), "EPOCH")
            if feed.steps is None:  # a callback cannot gather a set of unknown length
                hidden = self.recipe.metric_plan.hidden
                gathered = {k for k, mode in modes.items() if mode == "CONCAT" and k in hidden}
                modes = {label: mode for label, mode in modes.items() if label not in gathered}
            key = (tuple(modes.items()), rows_of(name, feed, modes))
            if key not in made:  # sets that are measured alike share one program for empty tallies
                empty = partial(tally.empty, modes, shapes, key[1])
                carry = placed(jax.eval_shape(empty), self.plan.whole)
                made[key] = self.replicas.start(empty), carry
            self.empty_tallies[name], carry = made[key]
            if name in compile_now and not self.replicas.stacked:
                consts = (*self.weight_specs, np.int32(0), np.int32(0), self.lane_numbers[0])
                self.evaluation_programs[name].begin(consts, carry, *feed.specs())

    def suits(self, sets):
        """Whether it was made for sets of these shapes."""
        in_arrays = all(type(dataset) is Arrays for dataset in sets.values())
        return in_arrays and self.set_specs == specs_of(sets)

    def prepare(self):
        """Compile the training step now. Return whether it had not been compiled before."""
        if self.program.compiled is not None:
            return False
        lane = self.feed.peek()
        if lane is not None:
            self.program.prepare(self.lane_numbers[0], self.states[0], *lane)
        return lane is not None

    def compile_seconds(self):
        """The seconds that compiling the training step and the evaluations has taken so far."""
        programs = [*([self.program] if self.program else []), *self.evaluation_programs.values()]
        return sum(program.seconds for program in programs)

    # State.

    def start(self, sets, pretrained=None):
        """Put the data on the devices, and draw the first state of each replica; `pretrained` may
        replace its (params, state)."""
        for name, feed in self.feeds.items():
            feed.fill(sets[name])
        seeds = map(np.uint32, self.replicas.seeds)
        own = list(zip(seeds, self.numbers, strict=True))  # of each replica
        weights = [self.draw(*each) for each in own]
        if pretrained:
            weights = [self.put_weights(pretrained(*drawn)) for drawn in weights]
        states = [self.make_state(*w, *each) for w, each in zip(weights, own, strict=True)]
        self.states = self.stack_states(states)

    def stack_states(self, states):
        """From a TrainState per replica to one per lane."""
        return self.replicas.stack(states, self.replicas.lanes_plan.of_state(states[0]))

    def put_weights(self, weights):
        """(params, state) on the devices."""
        params, state = weights
        return self.plan.put(params, self.plan.of_params(params)), self.plan.put(state)

    def replica_states(self):
        """The TrainState of each replica."""
        return self.replicas.unstack(self.states)

    def snapshot(self):
        """A copy of each replica's TrainState, which stays valid until the next snapshot reuses its
        memory. An accelerator may have no room for it, so there it is made in the host's memory.
        With several processes, it stays on the devices until it is written."""
        if jax.default_backend() != "cpu" and jax.process_count() == 1:
            return jax.device_get([jax.tree.map(key_data, ts) for ts in self.replica_states()])
        reusable = jax.tree.structure(self.copies) == jax.tree.structure(self.states)
        memory = self.copies if reusable else [None] * len(self.states)
        copies = [self.copy(*pair) for pair in zip(self.states, memory, strict=True)]
        self.copies = copies if jax.default_backend() == "cpu" else []
        return self.replicas.unstack(copies)

    def restore(self, states):
        """Continue from one TrainState per replica; their seeds decide the order of the data."""
        self.replicas.seeds = [int(ts.seed) for ts in states]
        self.rate_scale = float(states[0].lr_scale)
        self.states, self.copies = [], []  # freed first, since there may be no room for both
        self.states = self.stack_states(
            [self.plan.put(ts, self.plan.of_state(ts)) for ts in states]
        )
        if jax.default_backend() == "cpu":
            # JAX may use the host's arrays without a copy, and these must not be donated.
            self.states = [self.copy(ts, None) for ts in self.states]

    def scale_rate(self, factor):
        """Multiply every later update by this factor."""
        self.rate_scale = float(np.float32(factor))  # the precision of a checkpoint
        rows = np.full(self.states[0].lr_scale.shape, factor, np.float32)
        self.states = [ts._replace(lr_scale=self.plan.put(rows)) for ts in self.states]

    # Work.

    def begin(self, epoch, start=0):
        """Begin an epoch of training, or resume it after its first `start` batches."""
        self.feed.begin(epoch, start)
        if start == 0:
            self.states = [ts._replace(sums=self.zeros()) for ts in self.states]

    def train(self, count):
        """Take up to `count` steps, and return (how many were taken, the epoch's sums so far, on
        the device)."""
        return advance(self.feed, self.program, self.lane_numbers, self.states, count)

    def new_window(self):
        """Begin the sums of the next log line; the sums of the previous line are in its report."""
        window = self.zero_window
        self.states = [ts._replace(sums=ts.sums | {"window": window()}) for ts in self.states]

    def read(self, reports):
        """Wait for the sums, and return them as NumPy arrays, one tree per replica."""
        return self.replicas.unstack(jax.device_get(reports))

    def sums(self):
        """All sums of the epoch so far, of each replica."""
        return self.read([ts.sums for ts in self.states])

    def zero_sums(self):
        """The sums of one replica before its first step, on the host."""
        return self.read([self.zeros()])[0]

    def weights(self):
        """The (params, state) of each lane that are evaluated."""
        return [ts.evaluated() for ts in self.states]

    def evaluate(self, name, count=2**30, stopped=lambda: False, weights=None, epoch=0, step=0):
        """The tally of a whole set by each replica, with `weights` (of each lane) or the current
        weights, which were trained for so many steps; None if `stopped` returns True between two
        calls of `count` batches. The randomness of a batch depends on the set, the epoch and the
        batch alone."""
        consts, before, taken = self.at(epoch, step, weights or self.weights()), None, 1
        self.feeds[name].begin(epoch=1)
        tallies = [self.empty_tallies[name]() for _ in range(self.replicas.lanes)]
        while taken:
            program = self.evaluation_programs[name]
            taken, reports = advance(self.feeds[name], program, consts, tallies, count)
            jax.block_until_ready(before)  # while the next batches compute
            before = reports
            if taken and stopped():
                return None
        return self.read(tallies)

    def try_out(self, name):
        """Evaluate one batch of a set, so that an error is found before hours of training."""
        self.feeds[name].begin(epoch=1)
        tallies = [self.empty_tallies[name]() for _ in range(self.replicas.lanes)]
        consts = self.at(0, 0, self.weights())
        advance(self.feeds[name], self.evaluation_programs[name], consts, tallies, 1)
        return self.read(tallies)

    def at(self, epoch, step, weights):
        """What is constant in an evaluation, for each lane: (params, state, epoch, step,
        numbers)."""
        shape = len(self.replicas.seeds) if self.replicas.stacked else ()
        when = np.full(shape, epoch, np.int32), np.full(shape, step, np.int32)
        return [(*lane, *when, own) for lane, own in zip(weights, self.lane_numbers, strict=True)]

    def close(self):
        """End the threads that read ahead, and those that compile."""
        for feed in self.feeds.values():
            feed.close()
        self.pool.shutdown(wait=False, cancel_futures=True)


def advance(feed, program, consts, carries, count):
    """Drive the carries, in place, over up to `count` batches of a set: (batches taken,
    reports)."""
    taken, reports = 0, [None] * len(carries)
    for lanes, steps in feed.calls(count):
        for lane, arguments in enumerate(lanes):
            carries[lane], reports[lane] = program(consts[lane], carries[lane], *arguments)
        taken += steps
    return taken, reports


def train_functions(recipe, unroll, steps=1):
    """(step, report), the functions of the training program, for `steps` steps in an epoch. The
    constants are the replica's numbers, the carry is the TrainState, and the report is taken from
    its sums."""

    def step(numbers, ts, batch, valid):
        return recipe.with_numbers(numbers).make_update(unroll, steps).step(ts, batch, valid)

    return step, lambda ts: read_of(ts.sums)


def evaluation_functions(recipe, name):
    """(step, report), the functions of the program that evaluates a set. The constants are (params,
    state, epoch, step, numbers), the carry is the tally. The random key is a function of the set,
    the epoch and the number of examples before the batch."""
    set_key = zlib.crc32(name.encode())

    def step(consts, seen, batch, valid):
        *weights, epoch, trained, numbers = consts
        key = jax.random.fold_in(jax.random.key(set_key), epoch)
        key = jax.random.fold_in(key, seen["examples"])
        mask = genuine(batch, valid)
        objective = recipe.with_numbers(numbers).objective._replace(step=trained)
        losses, _, metrics = objective(*weights, batch, key, False, mask)
        return tally.merged(seen, tally.of_batch(seen, {**metrics, "loss": losses}, mask))

    return step, tally.without_rows


def specs_of(sets):
    """The specs of the sets that are held in arrays."""
    in_arrays = {name: dataset for name, dataset in sets.items() if type(dataset) is Arrays}
    return {name: jax.tree.map(spec_on_device, data.arrays) for name, data in in_arrays.items()}


def rows_of(name, feed, modes):
    """How many rows CONCAT must hold for a set: one more batch than it has, since a whole batch is
    written."""
    if "CONCAT" not in modes.values():
        return 0
    if feed.steps is None:
        labels = ", ".join(label for label, mode in modes.items() if mode == "CONCAT")
        raise UserError(
            f"metrics: {labels}: CONCAT needs to know how many batches the {name} set has; "
            "give it a __len__"
        )
    return (feed.steps + 1) * jax.tree.leaves(feed.shapes)[0].shape[0]
