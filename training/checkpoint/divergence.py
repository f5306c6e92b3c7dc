"""What happens when a run diverges: it goes back to a checkpoint, or it saves its last finite state
and fails."""

import logging
from collections.abc import Mapping
from typing import Any, Never

import jax

from training.checkpoint.keeper import Keeper
from training.checkpoint.resume import cut_back, point_of
from training.checkpoint.storage import Checkpoint
from training.devices.sharding import fetched
from training.engine import Trainer
from training.observers import Bad, Point
from training.options import TrainingOptions
from training.processes import is_first
from training.watching import metric_log
from training.watching.metric_log import MetricLog
from training.watching.view import View
from utils import RunError, first_line

logger = logging.getLogger("main")

CHOICES = ("stop", "skip", "rollback")  # of training.on_nonfinite


def description_of_bad_step(step: int, epoch: int, leaf: str) -> str:
    """What was wrong in a step; `leaf` names the first array that was bad."""
    return f"In step {step} (epoch {epoch}) {leaf} was NaN or infinite"


def advice(on_nonfinite: str) -> str:
    """What the user can do, besides what `training.on_nonfinite` does already."""
    stops = " with on_nonfinite=stop" if on_nonfinite == "skip" else ""
    others = " or ".join(f"'{name}'" for name in CHOICES[1:] if name != on_nonfinite)
    return (
        "Common causes: a label outside the classes, an index outside an embedding, or NaN in the "
        f"data, as detect_nans=true{stops} will show (in a config, training.detect_nans). "
        "Otherwise lower the learning rate (to resume with another one, pass --resume and "
        "--override, or resume='override' to fit), clip the gradients, or set the option "
        f"on_nonfinite to {others}"
    )


class Diverged(RunError):
    """A step whose loss or gradients are not finite."""

    def __init__(self, step: int, leaf: str, message: str) -> None:
        super().__init__(message)
        self.step, self.leaf = step, leaf  # steps taken before it; what was bad first


class Divergence:
    """The observer for steps that are not finite, which halt training before them: the run goes
    back to the last checkpoint with another seed (on_nonfinite: rollback), up to `rollbacks` times,
    or it saves the last finite state and ends."""

    def __init__(
        self, trainer: Trainer, options: TrainingOptions, keeper: Keeper | None, log: MetricLog
    ) -> None:
        self.trainer, self.options, self.keeper, self.log = trainer, options, keeper, log
        self.memory = {"rollbacks": 0}
        # Of the step that ends the run:
        self.what = ""
        self.bad: Bad | None = None
        self.batch: tuple[int, int] | None = None  # its epoch, and its position there
        self.rolls_back = options.on_nonfinite == "rollback"

    def on_start(self, run: View) -> dict[str, Any] | None:
        """There must be a checkpoint to go back to from the first epoch."""
        return {"save": "last"} if self.rolls_back and not run.resumed else None

    def on_bad(self, run: View, bad: Bad) -> dict[str, Any] | None:
        if bad.of_state:
            return self.bad_state(run, bad.leaf)
        if self.options.on_nonfinite == "skip":
            # Steps are refused forever if the state itself is not finite.
            leaf = self.trainer.leaf_not_finite()
            return self.bad_state(run, leaf) if leaf else None
        self.what = description_of_bad_step(bad.step + 1, run.epoch, bad.leaf)
        if reply := self.rollback():
            return reply
        self.bad, self.batch = bad, (run.epoch, run.position + bad.step - run.step)
        if len(self.trainer.seeds) > 1 or bad.step == 0:
            # There is no step that all replicas have in common, or nothing was trained.
            if self.keeper:
                self.keeper.wait()
            self.fail(bad)
        return {"stop": self.what, "back_to": self.point_before(run, bad.step, *self.batch)}

    def bad_state(self, run: View, leaf: str) -> dict[str, Any]:
        """Only a checkpoint is finite: go back to it, or fail."""
        if self.bad:
            self.what += f"; the state before it was not finite either, {leaf}"
        else:
            self.what = f"At step {run.step} (epoch {run.epoch}) {leaf} is NaN or infinite, though "
            self.what += "all losses and gradients were finite"
        if reply := self.rollback():
            return reply
        self.fail(self.bad or Bad(run.step, leaf, 0, of_state=True))

    def rollback(self) -> dict[str, Any] | None:
        """The Reply that goes back to the last checkpoint, if the options allow another one."""
        may_go_back = self.rolls_back and self.memory["rollbacks"] < self.options.rollbacks
        if may_go_back and self.keeper and (checkpoint := self.keeper.newest()):
            return {"back_to": self.rolled_back(self.keeper, checkpoint)}
        return None

    def on_evaluated(self, run: View, name: str, values: Mapping[str, Any]) -> None:
        """Report the steps that were skipped in an epoch of training (on_nonfinite: skip)."""
        if name != "train" or self.options.on_nonfinite != "skip":
            return
        sums = run.sums.epoch
        skipped = sum(each.refused for each in sums)
        if skipped and not any(each.examples for each in sums):
            why = f"no step of epoch {run.epoch} was finite, so all were skipped"
            raise RunError(f"{why}. {advice(self.options.on_nonfinite)}")
        if skipped:
            message = "Epoch %d: skipped %d steps whose loss or gradients were not finite"
            logger.warning(message, run.epoch, skipped)

    def rolled_back(self, keeper: Keeper, checkpoint: Checkpoint) -> Point:
        """The Point of a checkpoint, with other randomness and another order of the data from
        there."""
        count = self.memory["rollbacks"] + 1
        point = point_of(checkpoint, self.trainer, keeper.folder)
        # The number is odd, so that no count gives the same seed twice.
        seeds = [(seed + 2654435769 * count) % 2**32 for seed in point.record["seeds"]]
        if is_first():
            cut_back(keeper.folder, checkpoint.record["lengths"], [metric_log.FILE])
        self.log.back_to(point.record["step"])
        shown = ", ".join(map(str, seeds))
        logger.warning(
            "%s. Back to %s with seed %s (%d of %d)",
            self.what, checkpoint.name, shown, count, self.options.rollbacks,
        )  # fmt: skip
        memories = point.record["memories"] | {type(self).__name__: {"rollbacks": count}}
        keeper.continue_from(checkpoint)
        return point._replace(record=point.record | {"memories": memories, "seeds": seeds})

    def point_before(self, run: View, step: int, epoch: int, position: int) -> Point:
        """The Point before the bad step, which left the state unchanged."""
        record = {
            "seeds": self.trainer.seeds,
            "step": step,
            "position": position,
            "lined": run.line_position,
            "epoch": epoch if position else run.completed,
            "elapsed": 0.0,
            "metrics": run.metrics,
            "stopped": False,
        }
        return Point(self.trainer.replica_states(), record, list(run.history))

    def on_end(self, run: View) -> None:
        """The last finite state is saved; now the run fails."""
        if self.bad:
            self.fail(self.bad)

    def fail(self, bad: Bad) -> Never:
        count = self.memory["rollbacks"]
        spent = f"The run went back {count} times already. " if count else ""
        what, fix = self.what, advice(self.options.on_nonfinite)
        if self.options.detect_nans:
            what, fix = f"{what}.\n{self.culprit(bad.replica)}", ""
        last = self.keeper and self.keeper.last()
        where = f"The last finite state is {last}. " if last else "No checkpoint was written. "
        raise Diverged(bad.step, bad.leaf, f"{what}.\n{spent}{where}{fix}".rstrip())

    def culprit(self, replica: int) -> str:
        """The layer and the operation that made the first value that is not finite, found by taking
        the step again, one operation at a time."""
        from training.watching.nan_search import first_bad_op

        trainer, recipe, feed = self.trainer, self.trainer.recipe, self.trainer.feed
        if self.batch is None or feed is None:
            return "The step that made it is not known"
        batches = feed.batch(*self.batch)
        if batches is None:
            return "The step cannot be taken again, since its data cannot be read again"
        # Replicas may differ in a number, such as the learning rate.
        own = recipe.with_numbers(recipe.varied_numbers[replica])
        update = own.make_update(not trainer.looped, feed.steps)
        ts = jax.tree.map(
            lambda leaf: leaf if leaf.is_fully_addressable else fetched(leaf),
            trainer.replica_states()[replica],
        )
        try:
            sentence = first_bad_op(update.step, ts, *batches[replica])
        except Exception as error:  # if the search fails, the run still ends with its own error
            return f"Looking for the operation failed: {type(error).__name__}: {first_line(error)}"
        return sentence or (
            "Taken again one operation at a time, the step is finite: "
            "the compiled step computes differently"
        )
