"""Self-supervision: a model learns without labels which two views show the same example."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num, PyTree

from model.base import Model
from training.base import Functions, LossFunction, Measured, Metrics, Number, Objective
from training.loss import at_least_float32
from training.objective import inputs, x_of
from utils import UserError
from utils.forms import Positive, checked


@checked
def simclr(
    model: Model,
    loss: LossFunction,
    metrics: Metrics,
    preprocess: Functions,
    augment: Functions,
    temperature: Positive = 0.5,
) -> Objective:
    """Chen et al. (2020): the view most similar to an augmented view, among all other views in the
    batch, must be the second one of its example. Labels, `loss` and `metrics` are not used. The
    model's output is compared, or its "projection" (see the model `projected`). `matched` is how
    often the second view is the most similar one. An evaluation augments, too, with other keys."""

    def objective(
        params: PyTree,
        state: PyTree,
        batch: PyTree,
        key: Array,
        train: bool,
        mask: Bool[Array, "batch"],
    ) -> Measured:
        if train and len(mask) < 2:
            fix = "raise loader.batch_size, or lower training.accumulate"
            raise UserError(f"objective: simclr compares examples, and a batch has only one; {fix}")
        *view_keys, model_key = jax.random.split(key, 3)
        views = [inputs(preprocess, augment, k, x_of(batch), None)[0] for k in view_keys]
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), *views)
        output, state = model.apply(params, state, both, train=train, key=model_key)
        output = output["projection"] if isinstance(output, dict) else output
        losses, matched = nt_xent(output, mask, temperature)
        return losses, state, {"matched": matched}

    return Objective(objective)


def nt_xent(
    z: Num[Array, "views ..."], mask: Bool[Array, "batch"], temperature: Number
) -> tuple[Float[Array, "batch"], Float[Array, "batch"]]:
    """(the loss of each example, whether its views are matched) of their first views, then of their
    second ones, (2 B, D): the cross entropy of finding the other view by the cosine, among the
    views of the examples in `mask`, (B,)."""
    z = at_least_float32(z).reshape(z.shape[0], -1)
    # Unlike the gradient of a norm, the gradient of this is not NaN at 0.
    z = z / jnp.sqrt(jnp.maximum(jnp.sum(z * z, axis=1, keepdims=True), 1e-16))
    rows = jnp.arange(len(z))
    is_other_view = rows[:, None] == (rows + len(mask)) % len(z)
    # An example outside of the mask is still matched with its own view, so its loss is finite.
    is_candidate = (jnp.tile(mask, 2) | is_other_view) & (rows[:, None] != rows)
    scores = jnp.where(is_candidate, z @ z.T / temperature, jnp.finfo(z.dtype).min)
    positive = jnp.sum(scores, axis=1, where=is_other_view)
    losses = jax.nn.logsumexp(scores, axis=1) - positive
    matched = (positive >= scores.max(1)).astype(z.dtype)
    return losses.reshape(2, -1).mean(0), matched.reshape(2, -1).mean(0)
