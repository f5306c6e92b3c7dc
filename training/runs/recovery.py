"""A loop put back to a checkpoint; what happens when a run diverges or crashes."""

import logging

import jax
import jax.numpy as jnp
import numpy as np

from training.checkpoint.restore import check_meaning, filled, probe_of, sums_so_far
from training.devices.placing import fetched
from training.devices.processes import is_first, several
from training.runs.folder import cut_back
from training.update import cleared
from training.watching.console import Silent
from training.watching.hooks import remember
from utils import RunError, UserError, first_line

logger = logging.getLogger("main")

ADVICE = (
    "A label outside the classes does that, as training.detect_nans=true will tell; else lower the learning rate (to go on with "
    "--resume and a changed config, say --override), clip the gradients, or set training.on_nonfinite to 'skip' or 'rollback'"
)


class Diverged(RunError):
    """A step whose loss, gradients or new state are not finite."""

    def __init__(self, step, leaf, message="", windows=()):
        super().__init__(message)
        self.step, self.leaf = step, leaf  # batches taken before it; what was hit first
        self.windows = windows  # of each replica, what the log line after it would have told


def nothing_was_logged(found):
    """Whether a checkpoint is from before the first row, so that the run had not even measured its initial weights."""
    return not found.record["step"] and not found.record["lengths"].get("metrics.jsonl")


def restore(loop, found):
    """Put a loop where a checkpoint was taken."""
    run, runner, record = loop.run, loop.runner, found.record
    zeros, now = runner.zero_sums(), jax.eval_shape(lambda ts: ts, runner.replica_states()[0])
    trees = check_fits(found, now, len(runner.lanes.seeds))
    run.step, run.position, loop.elapsed, loop.rollbacks = (
        record[k] for k in ("step", "position", "elapsed", "rollbacks")
    )
    run.epoch, run.completed = record["epoch"], record["epoch"] - bool(run.position)
    run.metrics, loop.stop_answered = record["metrics"], loop.stop_answered or record["stopped"]
    run.stopped = bool(run.signal) or loop.stop_answered
    run.history = [row for row in loop.log.epochs() if row["epoch"] <= run.completed]
    line_goes_on = True
    for tree, arrays in zip(trees, found.arrays, strict=True):
        tree["sums"], line_goes_on = sums_so_far(arrays, zeros) if run.position else ({}, True)
    loop.flight.go_on_from(record["lined"] if line_goes_on else run.position)
    runner.restore([now._replace(**tree) for tree in trees])
    remember(loop.all_callbacks, record["callbacks"])
    loop.keeper.resumed(found)


def check_fits(found, template, replicas):
    """The trees of each replica in a checkpoint but for its sums, if it fits a TrainState, of which shapes suffice."""
    if found is None:
        return []
    if len(found.arrays) != replicas:
        raise UserError(
            f"{found.name}: replicas: it holds {len(found.arrays)}, this run has {replicas}"
        )
    like = {name: tree for name, tree in template._asdict().items() if name != "sums"}
    return [
        filled(path, arrays, like) for path, arrays in zip(found.paths, found.arrays, strict=True)
    ]


def check_unchanged(runner, probe, pretrained, found):
    """Refuse to start or go on from weights to which model/ has since given another meaning."""
    ts = runner.replica_states()[0]

    def ask(*weights):  # what several processes hold may fit none of their hosts
        return probe(*(runner.on_devices(weights) if several() else weights))

    if pretrained:
        logger.info("Starting from %s", pretrained)
        pretrained.check_probe(ask, ts.params, ts.state)
    if found and probe_of(found.arrays[0]):
        path, arrays, weights = (
            found.paths[0],
            found.arrays[0],
            "params" if ts.ema is None else "ema",
        )
        tree = filled(path, arrays, {weights: ts.params, "state": ts.state})
        answer = ask(tree[weights], tree["state"])
        check_meaning(
            path, probe_of(arrays), answer, "say --override to go on with the model as it is now"
        )


def after_divergence(loop, bad):
    """Go back to the last checkpoint, if that is wanted and was not done too often; else save what was finite, and end."""
    run, keeper, options = loop.run, loop.keeper, loop.options
    what = f"step {bad.step + 1} (epoch {run.epoch}) was not finite: {bad.leaf} was hit first"
    found = (
        keeper.newest()
        if options.on_nonfinite == "rollback" and loop.rollbacks < options.rollbacks
        else None
    )
    if found:
        count = loop.rollbacks + 1
        restore(loop, found)
        reseed(loop, count)
        if is_first():
            cut_back(keeper.folder, found.record["lengths"], ["metrics.jsonl"])
        loop.log.forget(run.step)
        seeds = ", ".join(map(str, loop.runner.lanes.seeds))
        logger.warning(
            "%s. Back to %s with seed %s (%d of %d)",
            what,
            found.name,
            seeds,
            count,
            options.rollbacks,
        )
        return
    spent = f"The run went back {loop.rollbacks} times already. " if loop.rollbacks else ""
    save_frozen(loop, bad)
    last = keeper.last()
    advice = ADVICE
    if options.detect_nans:
        what, advice = f"{what}.\n{culprit(loop, bad)}", ""
    where = f"The last finite state is {last}. " if last else "No checkpoint was written. "
    raise Diverged(bad.step, bad.leaf, f"{what}.\n{spent}{where}{advice}".rstrip())


def culprit(loop, bad):
    """The layer and the operation that made the first value that is not finite, found by taking the step once more, by hand."""
    from training.debugging.nan_search import first_bad_op

    run, runner = loop.run, loop.runner
    states = runner.replica_states()
    bad_ones = [r for r, ts in enumerate(states) if int(ts.sums["first_bad"]) == bad.step]
    replica = next(iter(bad_ones), 0)  # a single one was cleared when it was saved
    batches = runner.feed.batch(run.epoch, run.position + bad.step - run.step)
    if batches is None:
        return "The step cannot be taken once more, so the operation is not known: its data cannot be read again"
    ts = jax.tree.map(
        lambda leaf: leaf if leaf.is_fully_addressable else fetched(leaf), states[replica]
    )
    try:
        told = first_bad_op(
            runner.update.step, ts._replace(sums=cleared(ts.sums)), *batches[replica]
        )
    except (
        Exception
    ) as error:  # whatever becomes of the search, the run ends by what it was asked about
        return f"Looking for the operation failed: {type(error).__name__}: {first_line(error)}"
    return (
        told
        or "Taken once more, by hand, the step is finite: its operations are not those of the compiled one"
    )


def reseed(loop, count):
    """Other randomness, and another order of the data, for the rest of the run."""
    loop.rollbacks = count
    states = loop.runner.replica_states()
    seeds = [
        (int(ts.seed) + 2654435769 * count) % 2**32 for ts in states
    ]  # odd, so no count gives the same twice
    loop.runner.restore(
        [ts._replace(seed=np.uint32(seed)) for ts, seed in zip(states, seeds, strict=True)]
    )


def save_frozen(loop, bad):
    """Save the state, which stayed as it was before the bad step. Replicas that went on have no common step to save."""
    runner, run = loop.runner, loop.run
    if len(runner.lanes.seeds) == 1 and bad.step > 0:
        window = {"window": bad.windows[0]}  # which may have begun anew behind the bad step
        runner.restore(
            [ts._replace(sums=cleared(ts.sums) | window) for ts in runner.replica_states()]
        )
        loop.flight.go_on_from(loop.flight.told)
        run.position, run.step = run.position + bad.step - run.step, bad.step
        loop.keeper.ended(run, loop.cut)
    else:
        loop.keeper.wait()


def rescue(loop, error):
    """Save the state before a crash ends the run, if there is something to save and it can be."""
    if not loop.underway or isinstance(
        error, RunError
    ):  # a disk that failed, or a divergence, which saved what it could
        return
    if several():  # the others do not know of it, and nothing can be saved without them
        return
    run, runner = loop.run, loop.runner
    try:
        loop.flight.settle(Silent())
        steps = {int(jnp.ravel(ts.step)[0]) for ts in runner.states}
        if run.step == 0 or len(steps) > 1:
            return
        step = steps.pop()
        run.position, run.step = run.position + step - run.step, step
        loop.keeper.ended(run, loop.cut)
    except Exception as second:
        logger.warning("The state could not be saved: %s", first_line(second))
