"""--find-lr: the learning-rate range test. The rate rises exponentially over some steps with the
run's own data and update, until the loss explodes."""

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from data_loader.base import loaded
from training.base import Parts
from training.checkpoint.pretrained import fitted_to_data, pretrained_from
from training.commands.start import checked_recipe, computed_statistics
from training.engine import Trainer
from training.preprocess import with_statistics
from training.recipe import Recipe, compose
from training.rows import GOOD
from training.run import Reader
from training.sets import split_sets
from training.transforms import check_rate
from training.watching.console import silenced
from utils import DONE, RunError, UserError, echo
from utils.files import atomic_write

RANGE = 1000.0  # from a thousandth of the config's rates to a thousand times
FEWEST = 20  # steps
EXPLODED = 3.0  # times the first loss, above the lowest


class RangeTest(NamedTuple):
    """The result of a range test, as factors of the rates in the config."""

    steepest: float  # where the loss falls fastest
    lowest: float
    at_edge: bool  # whether the loss still falls at the end of the range

    @property
    def suggested(self) -> float:
        """Where the loss falls fastest, but at most a tenth of where it is lowest."""
        return min(self.steepest, self.lowest / 10)


@silenced()
def find_lr(parts: Parts, steps: int) -> int:
    """Print the rates at which the loss falls fastest and is lowest, and write a page about it."""
    if steps < FEWEST:
        raise UserError(f"--find-lr: takes at least {FEWEST} steps, got {steps}")
    recipe, sets = ready(parts)
    assert parts.config is not None and parts.title is not None
    check_rate(recipe.optimizer, "--find-lr", "test the optimizer inside of it alone")
    rates = learning_rates(parts.config["optimizer"], "optimizer")
    rates |= learning_rates(parts.config["update"], "update")
    name, first = next(iter(rates.items()), ("the factor of all updates", 1.0))
    print(
        f"Up to {steps} steps, from a thousandth of {name} = {short(first)} to a thousand times it"
    )
    factors = np.geomspace(1 / RANGE, RANGE, steps)
    with closing(Trainer(recipe, sets)) as trainer:
        pretrained = pretrained_from(recipe.training.pretrained, recipe.model)
        trainer.start(pretrained or fitted_to_data(recipe, sets["train"]))
        losses = np.array(list(losses_by_rate(trainer, recipe.reader(trainer), factors)))
    if len(losses) < 3:
        raise RunError(
            f"--find-lr: the loss exploded, or was not finite, after {len(losses)} steps, at a "
            "thousandth of the learning rate of the config; lower it, or look for the cause with "
            "--debug"
        )
    factors = factors[: len(losses)]
    curve = smoothed(losses, steps)
    result = suggestion(factors, curve)
    ended = "" if len(losses) == steps else ", where the loss exploded"
    span = f"{name} from {short(first * factors[0])} to {short(first * factors[-1])}{ended}"
    lines = [f"{len(losses)} steps with {span}", *lines_of_result(result, rates, name, first)]
    echo(*lines, sep="\n")
    target = Path(parts.checkpoint.dir) / parts.title / "find-lr.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    tried = first * factors
    best = result and float(tried[np.argmin(abs(np.log(factors / result.suggested)))])
    text = page(parts.title, lines, name, tried, losses, curve, best)
    atomic_write(target, text.encode())
    print(f"The curve is drawn in {target}")
    return DONE


def ready(parts: Parts) -> tuple[Recipe, dict[str, Any]]:
    """(the recipe of a config's parts, {"train": the training set}), with the statistics that
    preprocessing needs."""
    if parts.beyond:
        raise UserError("\n".join(parts.beyond))
    recipe, _ = checked_recipe(parts)
    sets = loaded(parts.data, parts.loader)
    if parts.unfitted:
        parts = with_statistics(parts, computed_statistics(parts, sets))
        recipe = compose(parts, recipe.plan)
    train = split_sets(sets, recipe.loader, recipe.training.overfit_batches)["train"]
    return recipe, {"train": train}


def learning_rates(node: Any, path: str) -> dict[str, float]:
    """{path in the config: value} of all learning rates in a node."""
    items = node.items() if isinstance(node, dict) else ()
    items = enumerate(node) if isinstance(node, list | tuple) else items
    rates = {}
    for key, value in items:
        if isinstance(value, dict | list | tuple):
            rates |= learning_rates(value, f"{path}.{key}")
        elif str(key).endswith(("lr", "learning_rate")) and type(value) in (int, float):
            rates[f"{path}.{key}"] = value
    return rates


def losses_by_rate(
    trainer: Trainer, reader: Reader, factors: Float[np.ndarray, " steps"]
) -> Iterator[float]:
    """The loss of one step at each factor of the learning rates, until it explodes."""
    lowest = first = epoch = 0
    for i, factor in enumerate(factors):
        trainer.scale_rate(factor)
        taken, calls = trainer.train(1) if epoch else (0, [])
        if not taken:  # the first epoch, or one that has ended
            epoch += 1
            trainer.begin(epoch)
            taken, calls = trainer.train(1)
        sums, rows = trainer.training_sums(), trainer.read(calls)
        sums.add(rows)
        loss = reader.values("train", sums.epoch)["train_loss"]
        if any((own["bad"] != GOOD).any() for own in rows) or not math.isfinite(loss):
            return
        yield loss
        first, lowest = (loss, loss) if i == 0 else (first, min(lowest, loss))
        if loss > lowest + EXPLODED * abs(first):
            return


def smoothed(losses: Float[np.ndarray, " steps"], steps: int) -> Float[np.ndarray, " steps"]:
    """The losses smoothed by a bell-shaped window, which does not shift them at the edges."""
    index = np.arange(len(losses))
    width = max(1.0, steps / 40)
    weights = np.exp(-0.5 * ((index - index[:, None]) / width) ** 2)
    # Half of the window is cut off at an edge, so it is narrowed there until it is symmetric.
    room = np.minimum(index, len(losses) - 1 - index)
    weights *= abs(index - index[:, None]) <= room[:, None]
    return weights @ losses / weights.sum(1)


def suggestion(
    factors: Float[np.ndarray, " steps"], curve: Float[np.ndarray, " steps"]
) -> RangeTest | None:
    """The RangeTest from a smoothed curve; None if the loss never falls."""
    low = int(np.argmin(curve))
    spread = float(np.ptp(curve[: low + 1]))
    if low < 2 or spread < 0.02 * abs(curve[0]):
        return None
    slopes = np.gradient(curve[: low + 1])
    steepest = factors[int(np.argmin(slopes))]
    return RangeTest(steepest, factors[low], low == len(curve) - 1)


def lines_of_result(
    result: RangeTest | None, rates: dict[str, float], name: str, first: float
) -> Iterator[str]:
    """Lines with the result, and the overrides that set all learning rates by it."""
    if result is None:
        yield "The loss never falls: no learning rate can be suggested"
        return
    steepest, lowest = short(first * result.steepest), short(first * result.lowest)
    tenth = short(first * result.lowest / 10)
    yield f"The loss falls fastest at {steepest} and is lowest at {lowest} (a tenth is {tenth})"
    if result.at_edge:
        yield f"It still falls at the end of the range: begin with a larger {name}"
    if rates:
        chosen = [f"{path}={short(rate * result.suggested)}" for path, rate in rates.items()]
        yield f"Suggestion: {' '.join(chosen)}"
    else:
        yield f"Suggestion: multiply the learning rate by {short(result.suggested)}"


def short(number: float) -> str:
    return f"{number:.2g}"


def page(
    title: str,
    lines: Sequence[str],
    name: str,
    rates: Float[np.ndarray, " steps"],
    losses: Float[np.ndarray, " steps"],
    curve: Float[np.ndarray, " steps"],
    best: float | None,
) -> str:
    """The page with the curve; a ring marks the suggested rate `best`, unless it is None."""
    from training.report.curves import Line, chart
    from training.report.markup import headline, section, tag
    from training.report.page import document
    from training.report.read import Curve

    drawn = [
        Line(["loss"], 0, Curve(rates, losses), "fine"),
        Line(["smoothed"], 0, Curve(rates, curve), best=best),
    ]
    remark = "Thin: the loss of each step. Thick: smoothed."
    remark += " The ring is at the suggested learning rate." if best else ""
    axis = {"x_name": name.rpartition(".")[2], "log_x": True}
    figure = chart("train_loss", drawn, len(rates), remark=remark, **axis)
    found = section("What was found", [tag("p", line) for line in lines])
    body = [headline(title, "learning-rate range test"), found]
    return document([title, "learning rate"], [*body, section("Loss by learning rate", figure)])
