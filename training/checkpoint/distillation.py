"""Distillation: a model is trained to return what another one, its teacher, returns."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from model.base import Model
from training.base import Objective, Weighted, is_weighted
from training.checkpoint.pretrained import OPTION, digest_of, pretrained_from
from training.loss import averaged, counted, target_and_weight
from training.objective import (
    inputs,
    metrics_per_example,
    of_examples,
    pair_of,
    summed,
    supervised,
)
from training.options import PretrainedOptions
from utils import UserError
from utils.forms import Positive, Share, checked

LossOfExamples = Float[Array, " batch"] | Weighted


@checked
def distillation(
    model: Model,
    loss: Callable,
    metrics: dict[str, Callable],
    preprocess: Sequence[Callable],
    augment: Sequence[Callable],
    teacher: Model,
    weights: str | PretrainedOptions,
    temperature: Positive = 2.0,
    weight: Share = 0.5,
) -> Objective:
    """Hinton et al. (2015): (1 - weight) * loss + weight * temperature**2 * KL divergence between
    the probabilities of the teacher and of the model, both at this temperature. `weights` names the
    weights of the teacher, like `training.pretrained`. An evaluation is as usual."""
    plain = supervised(model, loss, metrics, preprocess, augment)
    params, state = teacher_weights(teacher, weights)
    ignored = getattr(loss, "keywords", {}).get("ignore_label")
    divergence = jax.vmap(partial(soft_loss, temperature=temperature, ignore_label=ignored))

    def mixed(hard: Float[Array, " batch"], soft: Float[Array, " batch"]) -> Float[Array, " batch"]:
        return (1 - weight) * hard + weight * soft

    def objective(
        own: PyTree, own_state: PyTree, batch: PyTree, key: Array, train: bool
    ) -> tuple[LossOfExamples, PyTree, dict[str, PyTree]]:
        if not train:
            return plain(own, own_state, batch, key, train)
        x, target = pair_of(batch)
        augment_key, model_key = jax.random.split(key)
        x, target = inputs(preprocess, augment, augment_key, x, target)
        output, own_state = model.apply(own, own_state, x, train=True, key=model_key)
        taught, _ = teacher.apply(params, state, x, train=False, key=None)
        ours, theirs = (jax.tree.map(lambda a: a.shape[1:], each) for each in (output, taught))
        if ours != theirs:
            shapes = f"{theirs}, the model {ours}"
            raise UserError(f"objective.args.teacher: returns logits of the shape {shapes}")
        losses, terms = summed(of_examples("loss", loss, output, target))
        if isinstance(losses, dict):
            raise UserError("objective: distillation takes no loss of several weighted terms")
        soft = divergence(output, taught, target)
        if is_weighted(losses):  # the loss of a sequence keeps its weight
            losses = Weighted(mixed(losses.value, soft), losses.weight)
        else:
            losses = mixed(losses, soft)
        return losses, own_state, metrics_per_example(metrics, output, target, terms)

    digest = digest_of({"params": params, "state": state})
    return Objective(objective, plain.finish, fingerprints=(("teacher", digest),))


def teacher_weights(teacher: Model, option: str | PretrainedOptions) -> tuple[PyTree, PyTree]:
    """(params, state) of the teacher on the host."""
    shapes = jax.eval_shape(teacher.init, jax.random.key(0))
    try:
        pretrained = pretrained_from(option, teacher)
        assert pretrained is not None
        if pretrained.fresh:
            raise UserError("objective.args.weights.fresh: a teacher needs all of its weights")
        return pretrained(*shapes)
    except UserError as error:  # the message names the option of a run's own weights
        raise UserError(str(error).replace(OPTION, "objective.args.weights")) from error


def soft_loss(
    output: Float[Array, "*places classes"],
    taught: Float[Array, "*places classes"],
    target: PyTree,
    temperature: float,
    ignore_label: int | None,
) -> Float[Array, ""]:
    """The divergence of one example; for a sequence, the mean over the tokens that count in the
    loss."""
    has_weights = isinstance(target, dict) and target.keys() == {"target", "weight"}
    if ignore_label is None and not has_weights:
        return soft_divergence(output, taught, temperature).mean()
    _, weight = target_and_weight(target, ignore_label)
    output, taught = counted(output, weight), counted(taught, weight)
    loss = averaged(soft_divergence(output, taught, temperature), weight)
    return loss.value if isinstance(loss, Weighted) else loss


def soft_divergence(
    output: Float[Array, "*places classes"],
    taught: Float[Array, "*places classes"],
    temperature: float,
) -> Float[Array, "*places"]:
    """temperature**2 * KL(teacher || model) of each distribution over the last axis."""
    model, teacher = (jax.nn.log_softmax(a / temperature) for a in (output, taught))
    shares = jnp.exp(teacher)
    # A class that both mask by a logit of -inf contributes 0 * (-inf + inf), which must be 0.
    return temperature**2 * jnp.where(shares == 0, 0, shares * (teacher - model)).sum(-1)
