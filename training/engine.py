"""What a run computes: its compiled programs, made from shapes alone, so that threads compile them while the data is loaded."""

from functools import partial

import jax
import jax.numpy as jnp

from data_loader.base import Arrays
from training.base import TrainState
from training.devices.options import MeshOptions
from training.devices.sharding import Plan, make_mesh, replicated
from training.evaluator import Evaluator, rows_of
from training.feed import Resident, form_on_device, make_feed, nbytes
from training.lanes import Lanes
from training.programs import Start, loops_are_slow, placed
from training.tally import Watch
from training.update import read_of, shapes_of_values, zero_sums
from utils import UserError, named_leaves

EVERYTHING = Watch()  # every metric, in every phase, as a mean
SEED = jax.ShapeDtypeStruct((), jnp.uint32)


class Engine:
    """The programs of a run and the feeds of its sets.

    `sets` are {"train": dataset, "test": dataset, ...}, where Arrays may hold shapes, for data that `fill` brings;
    `make_update(unroll=...)` answers the Update; `freeze` holds the state as it was before a step that is not finite; `watch` is
    what is measured; `tried` names the held-out sets whose programs are compiled ahead as well; `mesh` and `sharding` tell where
    arrays live, as in training/devices/sharding.py.
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
        freeze=False,
        watch=EVERYTHING,
        limit=None,
        stacked=None,
        tried=(),
        mesh=MeshOptions(),  # noqa: B008
        sharding=None,
    ):
        stacked = replicas > 1 and (jax.default_backend() != "cpu" if stacked is None else stacked)
        self.plan = plan = Plan(make_mesh(mesh), sharding)
        self.lanes = Lanes(range(seed, seed + replicas), plan.mesh, stacked)
        self.feeds = make_feeds(sets, options, self.lanes, limit)
        self.forms = forms_of(sets)
        feed, whole = self.feeds["train"], replicated(plan.mesh)
        draw = partial(first_trees, model)
        params, state = jax.eval_shape(draw, SEED)
        places = plan.of_params(params), whole
        self.trees = trees = placed(params, places[0]), placed(state, whole)
        looped = not loops_are_slow(objective, *trees, feed.shapes)
        self.update = make_update(unroll=not looped)
        modes = watch.modes(shapes_of_values(objective, *trees, feed.shapes), "TRAIN", "EPOCH")
        self.gathers = rows_of("train", feed, modes)  # how many rows CONCAT gathers in an epoch
        self.ring, self.leaves = watch.ring, tuple(named_leaves(trees[0]))
        zeros = partial(
            zero_sums, objective, *trees, feed.shapes, freeze=freeze, watch=watch, rows=self.gathers
        )
        first = partial(first_state, self.update)
        carry = jax.eval_shape(first, *trees, SEED)
        self.places = plan._replace(stacked=stacked).of_state(
            carry._replace(sums=jax.eval_shape(zeros))
        )
        self.program = feed.program("train", *training(self.update), looped, self.places)
        if not stacked:  # the longest one comes first
            self.program.begin(
                (), placed(carry._replace(sums=jax.eval_shape(zeros)), self.places), *feed.forms()
            )
        self.draw = Start(draw, places, SEED)
        self.first = Start(first, plan.of_state(carry), *trees, SEED)
        self.zeros = self.lanes.start(zeros)  # of a lane
        # With rows or steps that are kept one by one, all zeros are much more than those of a log line.
        alone = self.gathers or self.ring
        self.zero_window = (
            self.lanes.start(lambda: zeros()["window"]) if alone else lambda: self.zeros()["window"]
        )
        held_out = {name: feed for name, feed in self.feeds.items() if name != "train"}
        self.evaluator = Evaluator(objective, held_out, self.lanes, trees, watch, looped, tried)

    def suits(self, sets):
        """Whether it was made for sets of this form."""
        return all(type(dataset) is Arrays for dataset in sets.values()) and self.forms == forms_of(
            sets
        )

    def fill(self, sets):
        """Bring the data that was not there yet."""
        for name, feed in self.feeds.items():
            feed.fill(sets[name])

    def close(self):
        """End the threads that read ahead."""
        for feed in self.feeds.values():
            feed.close()


def forms_of(sets):
    """What the sets that are held in arrays are to the programs."""
    return {
        name: jax.tree.map(form_on_device, dataset.arrays)
        for name, dataset in sets.items()
        if type(dataset) is Arrays
    }


def make_feeds(sets, options, lanes, limit=None):
    """{set: its feed}; as many sets as fit the budget live on the device, the first ones first. All must have one form."""
    feeds, budget = {}, options.device_budget_mb * 2**20
    try:
        for name, dataset in sets.items():
            shuffle = name == "train" and options.shuffle
            feeds[name] = make_feed(
                dataset, options, lanes, shuffle=shuffle, budget=budget, limit=limit
            )
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
        raise UserError(
            f"data: an example of the {name} set is {form(batch)}, one of the {whose} set is {form(expected)}"
        )


def training(update):
    """(step, report) of training: the carry is the TrainState, the report what is read of its sums."""
    return lambda _, ts, batch, valid: update.step(ts, batch, valid), lambda ts: read_of(ts.sums)


def first_trees(model, seed):
    """(params, state) of a replica, drawn from its seed."""
    return model.init(jax.random.fold_in(jax.random.key(seed), 2**32 - 1))  # no run takes that step


def first_state(update, params, state, seed):
    """The TrainState before the first step, but for its sums."""
    opt, ema = update.init(params)
    ts = TrainState(jnp.int32(0), seed, params, state, opt, ema, {}, jnp.float32(1))
    return jax.tree.map(jnp.copy, ts)  # no two leaves of a donated tree may be the same buffer
