"""The trainer: the compiled programs of a run, and its state on the devices.

`Trainer(recipe, sets)` puts the data on the devices and traces shapes; `start()` draws the first
state and begins to compile, in threads. After that it trains some steps, evaluates a set, and
copies or replaces its state. The loop decides when an epoch begins, a log line is written or a
checkpoint is saved.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.stages import Compiled, Lowered, Traced
from jax.typing import ArrayLike
from jaxtyping import Array, Int, PyTree

from model.base import Model
from training.base import Mode, Numbers, Sets, TrainState, Update, Weights, key_data
from training.contracts import check_metrics, guarded_model
from training.feed import Feed, Step, make_feeds
from training.metrics import phase_of
from training.objective import values_of
from training.rows import EvaluationRow, Row, Sums, TrainingSums, row_of_batch
from training.update import first_not_finite, genuine, made_floats, with_refusal
from utils import UserError, format_bytes, named_leaves, shown_if_slow

if TYPE_CHECKING:
    from training.devices.sharding import Plan
    from training.recipe import Recipe

logger = logging.getLogger("main")

SEED = jax.ShapeDtypeStruct((), jnp.uint32)
NO_LIMIT = 2**30
# The most rows of a call, and the bytes of a call's rows: they are zeroed and read at every call.
MOST_ROWS, ROW_BYTES = 8192, 2**20


class Called(NamedTuple):
    """A call of a program."""

    steps: int
    rows: list[Row]  # of each lane, on the device


class Constants(NamedTuple):
    """What stays the same in all batches of an evaluation, for one lane."""

    params: PyTree
    state: PyTree
    epoch: Int[Array | np.ndarray, "*replicas"]
    step: Int[Array | np.ndarray, "*replicas"]  # how many steps trained the params
    numbers: Numbers


class Trainer:
    """Trains and evaluates the replicas of a recipe on `sets`, {"train": dataset, "test": dataset,
    ...}. Without a "train" set it only evaluates."""

    def __init__(self, recipe: Recipe, sets: Sets, stacked: bool | None = None) -> None:
        options, self.plan = recipe.training, recipe.plan.on_devices()
        self.recipe, self.pool = recipe, ThreadPoolExecutor(2, "compile")
        self.halts = options.on_nonfinite != "skip"
        self.replicas = Replicas(recipe.seeds, self.plan, self.pool, stacked)
        self.numbers = [as_inputs(numbers) for numbers in recipe.varied_numbers]  # of each replica
        self.lane_numbers = self.replicas.joined(self.numbers)
        self.feeds = make_feeds(sets, recipe.loader, self.replicas, options.limit_batches)
        self.evaluated_early = [*recipe.sets_in_epochs(sets), *recipe.sets_at_end(sets)]
        try:
            self.make_programs()
        except Exception:
            self.close()
            raise
        self.rate_scale, self.states = 1.0, []
        self.error = None  # of the data, to be raised before the next step
        self.first_not_finite = quick(first_not_finite)
        # The latest snapshot, whose memory the next one reuses: new memory costs 4 times the copy.
        self.copies = []
        self.copy = jax.jit(
            lambda ts, memory: jax.tree.map(jnp.copy, ts), donate_argnums=1, keep_unused=True
        )

    @property
    def feed(self) -> Feed:
        """The feed of the training set."""
        return self.feeds["train"]

    # Programs.

    def draw(self, seed: ArrayLike, numbers: Numbers) -> Weights:
        """The (params, state) of a replica with these numbers."""
        return first_weights(self.recipe.with_numbers(numbers).model, seed)

    def make_programs(self) -> None:
        """Trace the shapes of the weights and of the objective's values, and make all programs."""
        recipe, feeds = self.recipe, self.feeds
        self.weight_specs = jax.eval_shape(self.draw, SEED, self.numbers[0])
        self.leaf_names = tuple(named_leaves(self.weight_specs[0]))
        traced = {
            name: recipe.traced(self.weight_specs, feed.shapes, train=name == "train")
            for name, feed in feeds.items()
        }
        self.looped = not loops_are_slow(next(iter(traced.values())))
        # Of each set: the shapes of what the objective returns.
        self.values = {name: values_of(trace) for name, trace in traced.items()}
        # Of each set: the modes of what is measured, and a row as shapes.
        self.modes, self.rows = {}, {}
        if "train" in feeds:
            held_out = [trace for name, trace in traced.items() if name != "train"]
            held_out = held_out or [recipe.traced(self.weight_specs, self.feed.shapes, train=False)]
            for trace in held_out:
                check_metrics(recipe.metric_plan, self.values["train"], values_of(trace))
            self.make_training_program(self.values["train"])
        loop, self.evaluation_programs = jax.lax.fori_loop if self.looped else None, {}
        for name in [name for name in feeds if name != "train"]:
            modes = recipe.metric_plan.modes(self.values[name], phase_of(name), "EPOCH")
            self.modes[name], self.rows[name] = modes, row_spec(modes, self.values[name])
            step = evaluation_step(recipe, name, modes)
            capacity = self.capacity(self.rows[name], feeds[name].steps)
            self.evaluation_programs[name] = feeds[name].program(name, step, loop, capacity)

    def make_training_program(self, values: dict[str, PyTree]) -> None:
        """Make the program of the training step, and the function that makes the first state;
        `values` are the shapes of the objective's values."""
        recipe, metric_plan = self.recipe, self.recipe.metric_plan
        unroll, steps = not self.looped, self.feed.steps  # unroll microbatches where loops are slow
        self.passes = recipe.make_update(unroll, steps).passes

        def make_state(params: PyTree, state: PyTree, seed: Array, numbers: Numbers) -> TrainState:
            """The TrainState of a replica with these numbers."""
            update = recipe.with_numbers(numbers).make_update(unroll, steps)
            return first_state(update, params, state, seed)

        carry = jax.eval_shape(make_state, *self.weight_specs, SEED, self.numbers[0])
        self.make_state = quick(make_state, self.plan.of_state(carry))
        of_epoch, of_line = (metric_plan.modes(values, "TRAIN", f) for f in ("EPOCH", "STEP"))
        modes, norms = of_epoch | of_line, metric_plan.norms
        number, leaves = jax.ShapeDtypeStruct((), jnp.int32), (len(self.leaf_names),)
        row: Row = {
            **row_spec(modes, values),
            "steps": number,
            "bad": number,
            "norms": {
                name: jax.ShapeDtypeStruct(leaves if name.endswith("_leaves") else (), jnp.float32)
                for name in norms
            },
        }
        self.modes["train"], self.rows["train"] = {"epoch": of_epoch, "line": of_line}, row
        step = training_step(recipe, modes, norms, unroll, steps)
        loop = jax.lax.fori_loop if self.looped else None
        shardings = self.replicas.lanes_plan.of_state(carry)
        capacity = self.capacity(row, steps)
        self.program = self.feed.program("train", step, loop, capacity, shardings)

    def capacity(self, row: Row | EvaluationRow, steps: int | None) -> int:
        """The most steps of a call that makes one such row for each."""
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(row))
        return max(
            1, min(MOST_ROWS, ROW_BYTES // size // len(self.replicas.seeds), steps or MOST_ROWS)
        )

    def begin_to_compile(self) -> None:
        """Compile the training step, which takes longest, and the evaluations that are sure to be
        used, in threads."""
        self.program.begin(self.lane_numbers[0], self.states[0], *self.feed.specs())
        consts = self.at(0, 0, self.weights())[0]
        for name in self.evaluated_early:
            arguments = consts, self.no_examples(), *self.feeds[name].specs()
            self.evaluation_programs[name].begin(*arguments)

    def prepare(self) -> None:
        """Wait until the training step is compiled, and log what it took and what it needs."""
        if self.program.compiled:
            return
        self.program.prepare(self.lane_numbers[0], self.states[0], *self.feed.specs())
        if not self.compile_seconds():
            logger.info("Nothing is compiled (--debug), so this is slow")
            return
        needs = self.memory()
        parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in needs.items())
        total = format_bytes(sum(needs.values()))
        logger.info("Compiled in %.1f s; memory about %s: %s", self.compile_seconds(), total, parts)

    def memory(self) -> dict[str, int]:
        """The bytes that one device needs: {"state": ..., "data": ..., and where it is known,
        "step": those of the temporary arrays of a step}."""

        def held(leaf: Array) -> int:
            return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

        needs = {
            "state": sum(map(held, jax.tree.leaves(self.states))),
            "data": sum(feed.nbytes for feed in self.feeds.values()),
        }
        if self.program.memory:
            needs["step"] = self.program.memory["temp_size_in_bytes"]
        return needs

    def compile_seconds(self) -> float:
        """The seconds that compiling the training step and the evaluations has taken so far."""
        programs = [
            *([self.program] if "train" in self.feeds else []),
            *self.evaluation_programs.values(),
        ]
        return sum(program.seconds for program in programs)

    # State.

    def start(
        self, pretrained: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] | None = None
    ) -> None:
        """Draw the first state of each replica, where `pretrained` may replace its (params, state),
        and begin to compile."""
        draw = quick(self.draw, (self.plan.of_params(self.weight_specs[0]), self.plan.whole))
        own = list(zip(map(np.uint32, self.replicas.seeds), self.numbers, strict=True))
        weights = [draw(*each) for each in own]
        if pretrained:
            weights = [self.put_weights(pretrained(*drawn)) for drawn in weights]
        states = [self.make_state(*w, *each) for w, each in zip(weights, own, strict=True)]
        self.states = self.stack_states(states)
        self.begin_to_compile()

    def stack_states(self, states: list[TrainState]) -> list[TrainState]:
        """From a TrainState per replica to one per lane."""
        return self.replicas.stack(states, self.replicas.lanes_plan.of_state(states[0]))

    def put_weights(self, weights: Weights) -> Weights:
        """(params, state) on the devices."""
        params, state = weights
        return self.plan.put(params, self.plan.of_params(params)), self.plan.put(state)

    def replica_states(self) -> list[TrainState]:
        """The TrainState of each replica."""
        return self.replicas.unstack(self.states)

    def leaf_not_finite(self) -> str | None:
        """The name of the first array of a state that is not finite, or None. A step whose loss
        and gradients are finite can make one, if the optimizer or the statistics overflow."""
        for ts in self.replica_states():
            number = int(self.first_not_finite(ts))
            if number >= 0:
                return made_floats(ts)[number][0]
        return None

    def snapshot(self) -> list[TrainState]:
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

    @property
    def seeds(self) -> list[int]:
        """The seed of each replica."""
        return self.replicas.seeds

    def restore(self, states: list[TrainState], seeds: Sequence[int]) -> None:
        """Continue from one TrainState per replica, with these seeds, which decide the randomness
        and the order of the data."""
        self.replicas.seeds = list(seeds)
        self.rate_scale = float(states[0].lr_scale)
        self.states, self.copies = [], []  # freed first, since there may be no room for both
        own = zip(states, map(np.uint32, seeds), strict=True)
        states = [ts._replace(seed=seed, halted=np.bool(False)) for ts, seed in own]
        self.states = self.stack_states(
            [self.plan.put(ts, self.plan.of_state(ts)) for ts in states]
        )
        if jax.default_backend() == "cpu":
            # JAX may use the host's arrays without a copy, and these must not be donated.
            self.states = [self.copy(ts, None) for ts in self.states]

    def scale_rate(self, factor: float) -> None:
        """Multiply every later update by this factor."""
        self.rate_scale = float(np.float32(factor))  # the precision of a checkpoint
        rows = np.full(self.states[0].lr_scale.shape, factor, np.float32)
        self.states = [ts._replace(lr_scale=self.plan.put(rows)) for ts in self.states]

    # Work.

    def begin(self, epoch: int, start: int = 0) -> None:
        """Begin an epoch of training, or resume it after its first `start` batches."""
        self.error = None  # the data is read again
        self.feed.begin(epoch, start)

    def training_sums(self) -> TrainingSums:
        """The TrainingSums before the first step of an epoch."""
        replicas, per_step = len(self.replicas.seeds), self.recipe.metric_plan.per_step
        return TrainingSums(self.modes["train"], self.rows["train"], replicas, per_step)

    def train(self, count: int) -> tuple[int, list[Called]]:
        """Take up to `count` steps, and return (how many were taken, their calls). If the data
        fails after some of them, its error is raised by the next call, so that no row is lost."""
        if self.error:
            raise self.error
        calls = []
        try:
            advance(self.feed, self.program, self.lane_numbers, self.states, count, calls)
        except (Exception, SystemExit) as error:  # the user's code may call sys.exit
            if not calls:
                raise
            self.error = error
        return sum(steps for steps, _ in calls), calls

    def latest_batch(self) -> PyTree:
        """The raw batch of the first replica in the latest step, on the device."""
        lane = self.feed.latest()
        return jax.tree.map(lambda a: a[0], lane) if self.replicas.stacked else lane

    def read(self, calls: list[Called]) -> list[Row]:
        """Wait for the rows of calls, and return those of each replica, as NumPy arrays."""
        own = [[] for _ in self.replicas.seeds]
        for taken, lanes in jax.device_get(calls):
            for replica, rows in enumerate(self.replicas.unstack(lanes)):
                own[replica].append(jax.tree.map(lambda a, n=taken: a[:n], rows))
        return [jax.tree.map(lambda *a: np.concatenate(a), *rows) for rows in own]

    def weights(self) -> list[Weights]:
        """The (params, state) of each lane that are evaluated."""
        return [ts.evaluated() for ts in self.states]

    def evaluate(
        self,
        name: str,
        count: int = NO_LIMIT,
        stopped: Callable[[], bool] = bool,
        weights: list[Weights] | None = None,
        epoch: int = 0,
        step: int = 0,
        limit: int | None = None,
    ) -> list[Sums] | None:
        """The Sums of a whole set, or of its first `limit` batches, by each replica; None if
        `stopped` returns True between two calls of `count` batches. `weights` are the (params,
        state) of each, or the current ones, and were trained for `step` steps. The randomness of a
        batch depends on the set, the epoch and the batch alone."""
        left = NO_LIMIT if limit is None else limit
        lanes = self.replicas.stack(weights) if weights else self.weights()
        consts, unread, taken = self.at(epoch, step, lanes), None, 1
        self.feeds[name].begin(epoch=1)
        carries = [self.no_examples() for _ in range(self.replicas.lanes)]
        sums = self.evaluation_sums(name)
        while taken or unread:
            program, calls = self.evaluation_programs[name], []
            taken = advance(self.feeds[name], program, consts, carries, min(count, left), calls)
            left -= taken
            for each, rows in zip(sums, self.read(unread) if unread else (), strict=False):
                each.add(rows)  # while the next batches compute
            unread = calls
            if taken and stopped():
                return None
        return sums

    def try_out(self, name: str) -> None:
        """Evaluate one batch of a set, so that an error is found before hours of training."""
        self.feeds[name].begin(epoch=1)
        carries = [self.no_examples() for _ in range(self.replicas.lanes)]
        consts = self.at(0, 0, self.weights())
        advance(self.feeds[name], self.evaluation_programs[name], consts, carries, 1, [])
        jax.block_until_ready(carries)

    def evaluation_sums(self, name: str) -> list[Sums]:
        """The Sums of no batch of a set, of each replica."""
        return [Sums(self.modes[name], self.rows[name]) for _ in self.replicas.seeds]

    def no_examples(self) -> Array:
        """The number of examples before an evaluation, of a lane."""
        return self.plan.put(np.zeros(self.replicas.shape, np.int32))

    def at(self, epoch: int, step: int, weights: list[Weights]) -> list[Constants]:
        """The Constants of an evaluation, for each lane."""
        shape = self.replicas.shape
        when = np.full(shape, epoch, np.int32), np.full(shape, step, np.int32)
        return [
            Constants(*lane, *when, own)
            for lane, own in zip(weights, self.lane_numbers, strict=True)
        ]

    def close(self) -> None:
        """End the threads that read ahead, and those that compile."""
        for feed in self.feeds.values():
            feed.close()
        self.pool.shutdown(wait=False, cancel_futures=True)


def advance(
    feed: Feed,
    program: Program,
    consts: Sequence[PyTree],
    carries: list[PyTree],
    count: int,
    calls: list[Called],
) -> int:
    """Drive the carries, in place, over up to `count` batches of a set, and return how many there
    were. To `calls`, (batches, the rows of each lane) is appended for each call of the program."""
    taken = 0
    for lanes, steps in feed.calls(count):
        rows = []
        for lane, arguments in enumerate(lanes):
            carries[lane], row = program(consts[lane], carries[lane], *arguments)
            rows.append(row)
        calls.append(Called(steps, rows))
        taken += steps
    return taken


def row_spec(modes: dict[str, Mode], values: dict[str, PyTree]) -> EvaluationRow:
    """The shapes of a row of these values."""
    mask = jax.ShapeDtypeStruct((jax.tree.leaves(values)[0].shape[0],), bool)
    return jax.eval_shape(partial(row_of_batch, modes), values, mask)


def training_step(
    recipe: Recipe,
    modes: dict[str, Mode],
    norms: Sequence[str] = (),
    unroll: bool = False,
    steps: int | None = 1,
) -> Step:
    """The step of the training program, for `steps` steps in an epoch. The constants are the
    replica's numbers, the carry is the TrainState; `modes` and `norms` say what a row holds."""
    halts = recipe.training.on_nonfinite != "skip"

    def step(
        numbers: Numbers, ts: TrainState, batch: PyTree, valid: ArrayLike
    ) -> tuple[TrainState, Row]:
        update = recipe.with_numbers(numbers).make_update(unroll, steps)
        return with_refusal(update.step, modes, norms, halts)(ts, batch, valid)

    return step


def evaluation_step(recipe: Recipe, name: str, modes: dict[str, Mode]) -> Step:
    """The step of the program that evaluates a set. The carry is the number of examples before the
    batch, and the random key is a function of the set, the epoch and that number."""
    set_key = zlib.crc32(name.encode())

    def step(
        constants: Constants, seen: Int[Array, ""], batch: PyTree, valid: ArrayLike
    ) -> tuple[Int[Array, ""], EvaluationRow]:
        params, state, epoch, trained, numbers = constants
        key = jax.random.fold_in(jax.random.key(set_key), epoch)
        key = jax.random.fold_in(key, seen)
        mask = genuine(batch, valid)
        objective = recipe.with_numbers(numbers).objective._replace(step=trained)
        losses, _, metrics = objective(params, state, batch, key, False, mask)
        row = row_of_batch(modes, {**metrics, "loss": losses}, mask)
        return seen + row["examples"], row

    return step


# One program for each replica, or one for all.


USER_BATCHES = "the batches of the data"  # what the error of another size names


class Replicas:
    """The replicas of a run: one call of a program for each, or one for all, stacked on a leading
    axis and vmapped. A lane is the replicas of one call. On accelerators they are stacked; on the
    CPU one call per replica is faster (a ResNet step: 181 ms against 814 ms)."""

    def __init__(
        self,
        seeds: Sequence[int],
        plan: Plan,
        pool: ThreadPoolExecutor | None = None,
        stacked: bool | None = None,
    ) -> None:
        stacked = jax.default_backend() != "cpu" if stacked is None else stacked
        self.seeds, self.plan, self.pool = list(seeds), plan, pool
        self.stacked = stacked and len(seeds) > 1
        self.lanes_plan = plan._replace(stacked=self.stacked)

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return 1 if self.stacked else len(self.seeds)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one number per replica of a lane."""
        return (len(self.seeds),) if self.stacked else ()

    def stack(self, trees: Sequence[PyTree], shardings: PyTree = None) -> list[PyTree]:
        """Turn one tree per replica into one per lane."""
        if not self.stacked:
            return list(trees)
        stack = lambda *trees: jax.tree.map(lambda *a: jnp.stack(a), *trees)  # noqa: E731
        return [jax.jit(stack, out_shardings=shardings)(*trees)]

    def unstack(self, trees: Sequence[PyTree]) -> list[PyTree]:
        """Turn one tree per lane back into one per replica."""
        if not self.stacked:
            return list(trees)
        return [jax.tree.map(itemgetter(r), trees[0]) for r in range(len(self.seeds))]

    def joined(self, pieces: list[PyTree]) -> list[PyTree]:
        """Turn one piece per replica into one per lane, on the host."""
        return [jax.tree.map(lambda *a: np.stack(a), *pieces)] if self.stacked else pieces

    def rows(self, size: int) -> np.ndarray:
        """Which rows of a batch this process reads."""
        self.plan.check_batch(size, USER_BATCHES)
        return self.plan.rows(size)

    def put_batch(self, pieces: list[PyTree], size: int) -> list[PyTree]:
        """This process's rows of a batch of `size` for each replica, put onto the devices."""
        self.plan.check_batch(size, USER_BATCHES)
        return [self.lanes_plan.put_batch(piece, size) for piece in self.joined(pieces)]

    def put_orders(self, orders: list[np.ndarray]) -> list[Array]:
        """The order of an epoch for each replica, sharded like its batches."""
        sharding = self.plan.batch(1 + self.stacked)
        return [self.plan.put(order, sharding) for order in self.joined(orders)]

    def order_spec(self, batches: int, size: int) -> jax.ShapeDtypeStruct:
        """The spec of the order of an epoch in a lane."""
        sharding = self.plan.batch(1 + self.stacked)
        return jax.ShapeDtypeStruct((*self.shape, batches, size), jnp.int32, sharding=sharding)

    def shapes_of_one(self, lane: PyTree) -> PyTree:
        """The specs of one replica's part of a lane."""
        shape = lambda a: a.shape[1:] if self.stacked else a.shape  # noqa: E731
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(shape(a), a.dtype), lane)

    def program(
        self, name: str, function: Callable, axes: tuple[int | None, ...], shardings: PyTree = None
    ) -> Program:
        """The Program of a lane; `axes` says which arguments have an axis of replicas."""
        if self.stacked:  # model/layers/forms.py looks for the name of the axis
            function = jax.vmap(function, in_axes=axes, axis_name="replicas")
        options = {"options": platform_options(), "shardings": shardings, "pool": self.pool}
        return Program(function, self.plan.whole, name, **options)


def as_inputs(numbers: Numbers) -> dict[str, np.number]:
    """The numbers of a replica with the types that a compiled program takes."""
    kinds = {int: np.int32, float: np.float32}
    return {path: kinds[type(number)](number) for path, number in numbers.items()}


def first_weights(model: Model, seed: ArrayLike) -> Weights:
    """(params, state) of a replica, drawn from its seed."""
    key = jax.random.fold_in(jax.random.key(seed), 2**32 - 1)  # no step has this key
    return guarded_model(model).init(key)


def first_state(update: Update, params: PyTree, state: PyTree, seed: Array) -> TrainState:
    """The TrainState before the first step."""
    opt, ema = update.init(params)
    ts = TrainState(jnp.int32(0), seed, params, state, opt, ema, jnp.bool(False), jnp.float32(1))
    return jax.tree.map(jnp.copy, ts)  # no two leaves of a donated tree may be the same buffer


# A program.


WORDS = {"const": "weights", "carry": "state"}  # what messages call the arguments of programs
TITLES = {"train": "training step", "step": "step"}
# For programs that run a few times: the sample's initial params compile in a twelfth of the time.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
if jax.__version_info__ < (0, 11):  # a later XLA does not have this option
    QUICKLY["xla_cpu_use_fusion_emitters"] = False
# For the CPU.
CPU_OPTIONS = {
    # Without this, XLA drops the barriers of jax.checkpoint before it orders the operations, and
    # then recomputes without saving memory.
    "xla_disable_hlo_passes": "cse_barrier_expander",
    # Eigen computes convolutions and products, YNNPACK only sums: a ResNet-8 takes 0.8 of the time,
    # a small perceptron 0.8 to 0.9, and a large one 1.06.
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE",
}
# The errors of cuDNN's attention, which devices may share by whole heads only.
CUT_HEADS = (
    "Query, key and value should have same sharding",
    "Sharding on head dim is not allowed",
)


class Program:
    """A function that is compiled once, with its second argument, the carry, donated.

    `whole` is the sharding of its rows, and of the carry unless `shardings` are given; `name` is
    the set over which it runs; `arguments` are the names of its arguments if the function's
    signature does not show them; `options` are XLA's; `pool` is a ThreadPoolExecutor that compiles.
    """

    def __init__(
        self,
        function: Callable,
        whole: Sharding,
        name: str = "step",
        *,
        arguments: Sequence[str] = (),
        options: dict[str, Any] | None = None,
        shardings: PyTree = None,
        pool: ThreadPoolExecutor | None = None,
    ) -> None:
        self.function, self.name, self.options, self.pool = function, name, options, pool
        self.shardings = (whole if shardings is None else shardings, whole)
        names = arguments or inspect.signature(function).parameters
        self.arguments = [name.lstrip("_") for name in names]
        self.compiled: Callable | None = None  # the function itself if nothing is compiled
        self.finish: Callable[[], Compiled] | None = (
            None  # returns the compiled program, once it has been traced
        )
        self.seconds = 0.0  # spent on tracing, and on compiling or waiting for it
        # Bytes of arguments, results and temporaries, if the backend reports them.
        self.memory: dict[str, int] | None = None

    @property
    def title(self) -> str:
        """Its name in messages."""
        return TITLES.get(self.name, f"evaluation of {self.name}")

    def begin(self, *arguments: PyTree) -> None:
        """Trace it for these arguments, or for their specs, and start to compile it in a thread.
        Several processes must compile in the same order, so they compile when it is needed."""
        if self.compiled or self.finish:
            return
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]  # untyped
            self.compiled = self.function
            return
        start = time.perf_counter()
        jitted = jax.jit(self.function, donate_argnums=1, out_shardings=self.shardings)
        compile_it = partial(compile_step, jitted.lower(*arguments), self.options)
        if self.pool is not None and jax.process_count() == 1:
            self.finish = self.pool.submit(compile_it).result
        else:
            self.finish = compile_it
        self.seconds += time.perf_counter() - start

    def prepare(self, *arguments: PyTree) -> Callable:
        """Compile for these arguments, without running, or wait until it is compiled; return the
        compiled program."""
        self.begin(*arguments)
        if self.compiled is None and self.finish is not None:
            start = time.perf_counter()
            with shown_if_slow(f"Compiling the {self.title}"):
                self.compiled = compiled = self.finish()
            self.seconds += time.perf_counter() - start
            self.memory = memory_of(compiled)
        assert self.compiled
        return self.compiled

    def __call__(self, *arguments: PyTree) -> Any:
        compiled = self.compiled or self.prepare(*arguments)
        try:
            return compiled(*arguments)
        except (TypeError, ValueError) as error:
            if change := self.change(arguments):
                raise UserError(f"{self.title}: it was compiled for {change}") from error
            raise

    def change(self, arguments: tuple) -> str | None:
        """A text that says how these arguments differ from the compiled ones; None if they do
        not."""
        if not isinstance(self.compiled, Compiled):
            return None
        shardings = self.compiled.in_tree.flatten_up_to(self.compiled.input_shardings)
        before = self.leaves(self.compiled.args_info[0], shardings)
        shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments)]
        now = self.leaves(arguments, shardings)
        for name in before | now:
            (a, sharding), (b, other) = before.get(name, (None, None)), now.get(name, (None, None))
            fix = "; every batch must have one shape and type, so a collate_fn pads to one length"
            fix = fix if name.startswith("batch") else ""
            expected, given = type_and_shape(a), type_and_shape(b)
            if expected != given:
                return f"{name} {expected}, and was now given {given}{fix}"
            if sharding and other and not sharding.is_equivalent_to(other, len(a.shape)):
                layouts = f"laid out as {sharding}, and was now given it as {other}"
                return f"{name} {expected} {layouts}{fix}"
        return None

    def leaves(
        self, trees: Sequence[PyTree], shardings: Sequence[Sharding | None]
    ) -> dict[str, tuple[Any, Sharding | None]]:
        """{name: (leaf, its sharding)} of all arguments."""
        named = zip([WORDS.get(name, name) for name in self.arguments], trees, strict=False)
        pairs = [
            (f"{word} {name}".strip(), leaf)
            for word, tree in named
            for name, leaf in leaves_of(tree)
        ]
        together = zip(pairs, shardings, strict=False)
        return {name: (leaf, sharding) for (name, leaf), sharding in together}


def compile_step(lowered: Lowered, options: dict[str, Any] | None) -> Compiled:
    """The lowered program, compiled with these options of XLA."""
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if any(text in str(error) for text in CUT_HEADS):
            raise UserError(
                "mesh.tensor: cuts a head of attention in two, which a GPU cannot compute in "
                "bfloat16; let mesh.tensor divide the heads, and the heads of keys, or leave "
                'attention whole, by the sharding [[".*attention/.*", []], "tensor"]'
            ) from error
        raise


def leaves_of(batch: PyTree) -> list[tuple[str, Any]]:
    """[(name, leaf)] of a batch, or another tree; the two parts of a pair are named x and y."""
    pair = isinstance(batch, tuple | list) and len(batch) == 2 and not hasattr(batch, "_fields")
    return list(named_leaves({"x": batch[0], "y": batch[1]} if pair else batch).items())


def type_and_shape(leaf: Any) -> str:
    """The type and shape of an array or a spec as a text, such as float32[128,10]."""
    if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
        return "nothing" if leaf is None else f"a {type(leaf).__name__}"
    return f"{jnp.result_type(leaf)}[{','.join(map(str, np.shape(leaf)))}]"


def memory_of(compiled: Compiled) -> dict[str, int] | None:
    """Bytes of a program's arguments, results and temporaries; None if the backend does not
    report."""
    stats = compiled.memory_analysis()
    names = ("temp_size_in_bytes", "argument_size_in_bytes", "output_size_in_bytes")
    return stats and {name: getattr(stats, name) for name in names}


def loops_are_slow(objective: Traced) -> bool:
    """Whether this objective, which is traced, must not run inside a compiled loop, where XLA's CPU
    backend does not use its fast path for dense convolutions (eight steps of a 3x3 convolution: 82
    ms outside, 6,670 ms inside). Its steps are then dispatched one by one."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]  # untyped
        return True  # for debugging, one step is one call
    if jax.default_backend() != "cpu":
        return False
    return "stablehlo.convolution" in objective.lower().as_text()


def quick(function: Callable, shardings: PyTree = None) -> Callable[..., Any]:
    """The compiled form of a function that runs only a few times: it compiles without
    optimization."""
    return jax.jit(function, out_shardings=shardings, compiler_options=QUICKLY)


def platform_options() -> dict[str, Any] | None:
    """XLA's options for a program on the default platform."""
    return CPU_OPTIONS if jax.default_backend() == "cpu" else None
