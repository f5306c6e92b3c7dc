"""Metrics of one example: (output, target) -> scalar or dict.

If a metric has an attribute `finish`, that function maps the means to the reported value. Labels
may be ignored, and elements have weights, as in training/loss.py: `accuracy` is then the share of
all tokens of a set that are right. The end of the file decides which metrics a run measures where.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, Num, PyTree

from training import loss
from training.base import (
    Freq,
    LossFunction,
    Metric,
    Metrics,
    Mode,
    Phase,
    Tracked,
    Weighted,
    marked,
)
from training.loss import (
    along,
    averaged,
    binary_cross_entropy,
    label_and_weight,
    one_hot,
    same_shape,
    target_and_weight,
)
from utils import UserError, parameters_of
from utils.forms import Count, Positive, checked

NORMS = ("gradient_norm", "parameter_norm")
NEEDS = ("learning_rate", *NORMS, "leaf_statistics", "per_step")  # what a callback may need


def accuracy(
    logits: Num[Array | np.ndarray, "..."], label: PyTree, *, ignore_label: int | None = None
) -> Metric:
    """1 if the label has the largest logit, and no logit is NaN."""
    label, weight = label_and_weight(logits, label, ignore_label)
    best, is_number = likeliest(logits)
    hits = (best == classes(logits, label)) & is_number
    return averaged(hits.astype(jnp.float32), weight)


def top_k_accuracy(
    logits: Num[Array | np.ndarray, "..."],
    label: PyTree,
    *,
    k: Count = 5,
    ignore_label: int | None = None,
) -> Metric:
    """1 if the logit of the label is among the `k` largest, and no logit is NaN."""
    if not 1 <= k <= logits.shape[-1]:
        largest = f"the {logits.shape[-1]} classes"
        raise ValueError(f"k: must be at least 1 and at most {largest}, got {k}")
    label, weight = label_and_weight(logits, label, ignore_label)
    best = jax.lax.top_k(logits, k)[1]
    hits = jnp.any(best == classes(logits, label)[..., None], axis=-1) & likeliest(logits)[1]
    return averaged(hits.astype(jnp.float32), weight)


def binary_accuracy(logits: ArrayLike, label: PyTree, *, ignore_label: int | None = None) -> Metric:
    """The share of the labels, each 0 or 1, that are predicted correctly; a logit above 0 predicts
    1. For one or several labels per example, as with the loss `binary_cross_entropy`."""
    label, weight = target_and_weight(label, ignore_label)
    x, z = same_shape(logits, label)
    hits = jnp.where(x > 0, z == 1, (x <= 0) & (z == 0))  # no NaN is right
    return averaged(hits.astype(jnp.float32), weight)


@marked(finish=jnp.sqrt)
def rmse(output: Array, target: PyTree) -> Metric:
    """The root of the mean squared difference."""
    return loss.mse(output, target)


def mae(output: Array, target: PyTree) -> Metric:
    """The mean absolute difference."""
    return loss.mae(output, target)


@marked(finish=jnp.exp)
def perplexity(
    logits: Num[Array | np.ndarray, "..."], label: PyTree, *, ignore_label: int | None = None
) -> Metric:
    """exp of the mean cross entropy: how many equally likely classes would be as hard to guess."""
    return loss.cross_entropy(logits, label, ignore_label=ignore_label)


@checked
def bits_per_byte(
    logits: Num[Array | np.ndarray, "..."],
    label: PyTree,
    *,
    bytes_per_token: Positive,
    ignore_label: int | None = None,
) -> Metric:
    """The mean cross entropy in bits, for each byte of the text instead of each token, so that
    models with different tokenizers can be compared."""
    loss_of_token = loss.cross_entropy(logits, label, ignore_label=ignore_label)
    scale = 1 / (jnp.log(2) * bytes_per_token)
    if isinstance(loss_of_token, Weighted):
        return loss_of_token._replace(value=scale * loss_of_token.value)
    return jax.tree.map(lambda value: scale * value, loss_of_token)


def f1_finish(means: dict[str, Array]) -> Array:
    """2 tp / (2 tp + fp + fn), averaged over the classes that occur."""
    weight = 2 * means["tp"] + means["fp"] + means["fn"]
    occurs = weight != 0  # NaN stays NaN
    scores = 2 * means["tp"] / jnp.where(occurs, weight, 1)
    return jnp.sum(scores, axis=-1) / jnp.maximum(jnp.sum(occurs, axis=-1), 1)


@marked(finish=f1_finish)
def f1(
    logits: Num[Array | np.ndarray, "..."], label: PyTree, *, ignore_label: int | None = None
) -> Metric:
    """The harmonic mean of precision and recall, averaged over the classes that occur. Logits with
    a NaN predict no class."""
    count = logits.shape[-1]
    label, weight = label_and_weight(logits, label, ignore_label)
    label = classes(logits, label)
    weight = jnp.ones(()) if weight is None else weight
    weight = jnp.broadcast_to(along(weight, label), label.shape).reshape(-1, 1)
    best, is_number = likeliest(logits)
    predicted = weight * one_hot(jnp.where(is_number, best, -1), count).reshape(-1, count)
    actual = one_hot(label, count).reshape(-1, count)
    tp = jnp.sum(predicted * actual, axis=0)
    fn = jnp.sum(weight * actual, axis=0) - tp
    return {"tp": tp, "fp": jnp.sum(predicted, axis=0) - tp, "fn": fn}


def likeliest(
    logits: Num[Array | np.ndarray, "*axes classes"],
) -> tuple[Int[Array, "*axes"], Bool[Array, "*axes"]]:
    """(the class with the largest logit, whether no logit is NaN)"""
    best = jnp.argmax(logits, axis=-1)  # the index of the first NaN, if there is one
    return best, ~jnp.isnan(jnp.take_along_axis(logits, best[..., None], axis=-1)[..., 0])


def classes(logits: Num[Array | np.ndarray, "..."], label: ArrayLike) -> Array:
    """The label as a class: itself, or the most likely class of a distribution."""
    label = jnp.asarray(label)
    if label.shape == logits.shape:
        return jnp.argmax(label, axis=-1)
    if label.shape != logits.shape[:-1]:
        shapes = f"the output has the shape {logits.shape} and the target {label.shape}"
        raise ValueError(f"{shapes}; expected {logits.shape[:-1]}")
    return label


class MetricPlan(NamedTuple):
    """What a run measures besides its loss."""

    rules: Mapping[str, Tracked] = MappingProxyType(
        {}
    )  # {label: Tracked}; all others are a MEAN in every line
    hidden: frozenset[str] = frozenset()  # labels that are measured for callbacks alone
    needs: frozenset[str] = frozenset()  # which of NEEDS are measured
    per_step: bool = False  # whether the values of single steps are reported

    def modes(self, labels: Iterable[str], phase: Phase, freq: Freq) -> dict[str, Mode]:
        """{label: mode} of what is measured in a phase, for log lines of a freq."""
        rules = {label: self.rules.get(label, Tracked(None)) for label in labels}
        return {
            label: rule.mode
            for label, rule in rules.items()
            if rule.freq in ("ANY", freq)
            and covers(rule.phase, phase)
            and (freq == "EPOCH" or not self.aside(label))
        }

    def check(self, returned: Iterable[str]) -> None:
        """Refuse a rule for what the objective does not return for each example."""
        for label in self.rules.keys() - {*returned}:
            others = ", ".join(sorted({*returned} - {"loss"})) or "none"
            fix = "remove it from `metrics`, or let the objective return it"
            if label in self.hidden:
                fix = "remove its callback, or let the objective call `metrics_per_example`"
            raise UserError(
                f"metrics: {label} is not measured, since the objective does not return it; {fix} "
                f"(it returns: {others})"
            )

    def aside(self, label: str) -> bool:
        """Whether a label is for callbacks alone, and never logged."""
        mode = self.rules[label].mode if label in self.rules else None
        return label in self.hidden or mode == "CONCAT"

    @property
    def norms(self) -> list[str]:
        """The names of the norms of a step; with `_leaves`, it has one per leaf."""
        leaves = [f"{name}_leaves" for name in NORMS] if "leaf_statistics" in self.needs else []
        return [*(name for name in NORMS if name in self.needs), *leaves]


def covers(phase: Phase, other: Phase) -> bool:
    """Whether a metric for `phase` is measured in the phase `other`, one of TRAIN, VAL, TEST."""
    return phase in ("ANY", other) or (phase == "EVAL" and other != "TRAIN")


def phase_of(set_name: str) -> Phase:
    """The phase of a set: any set that is neither `train` nor `test` is for validation."""
    phases: dict[str, Phase] = {"train": "TRAIN", "test": "TEST"}
    return phases.get(set_name, "VAL")


def check_ignored(loss: LossFunction | None, metrics: Metrics) -> None:
    """Refuse metrics that count what the loss ignores, unless their `ignore_label` is given."""
    ignored = getattr(loss, "keywords", {}).get("ignore_label")
    for label, metric in metrics.items() if ignored is not None else ():
        could = "ignore_label" in parameters_of(getattr(metric, "func", metric))
        if could and "ignore_label" not in getattr(metric, "keywords", {}):
            raise UserError(
                f"metrics: {label} counts the labels {ignored}, which the loss ignores; "
                f"give it ignore_label={ignored} as well, or None to count them"
            )


def check_binary(loss: LossFunction | None, metrics: Metrics) -> None:
    """Refuse metrics of one class per example with the loss for labels that are independent."""
    if getattr(loss, "func", loss) is not binary_cross_entropy:
        return
    for label, metric in metrics.items():
        function = getattr(metric, "func", metric)
        if function in (accuracy, top_k_accuracy, f1):
            raise UserError(
                f"metrics: {label} is for one class per example, but the loss binary_cross_entropy "
                "is for labels that are independent; use binary_accuracy, or the loss "
                "cross_entropy (if the classes exclude each other after all, pass a function that "
                f"calls {function.__name__})"
            )
