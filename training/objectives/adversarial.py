"""Two networks that learn from each other: a generator of examples, and a discriminator between
these and real ones. The objective has a loss for each, the update an optimizer for each."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, PyTree

from model.base import Model
from training.base import (
    Functions,
    LossFunction,
    Measured,
    Metrics,
    Objective,
    Optimizer,
    StepResult,
    TrainState,
    Update,
)
from training.objective import inputs, x_of
from training.transforms import NO_STEP, kind_of
from training.update import apply_updates, counts_of, genuine, mean_of, moving_average, step_key
from utils import UserError
from utils.forms import NonNegative, checked


@checked
def adversarial(
    model: Model,
    loss: LossFunction,
    metrics: Metrics,
    preprocess: Functions,
    augment: Functions,
    penalty: NonNegative = 5.0,
) -> Objective:
    """Goodfellow et al. (2014), for a model such as `gan`, with the update `alternating`. The loss
    has the terms "discriminator", for how well it distinguishes real examples, and "generator", for
    how well generated examples pass for real ones; each has a gradient for its own network alone.
    Labels, `loss` and `metrics` are not used. `accuracy_discriminator` is how often the
    discriminator is right. `penalty` is R1 (Mescheder et al., 2018): half of it times the squared
    length of the discriminator's gradient at real examples. Without it, the discriminator soon
    wins, and the generator gets almost no gradient."""
    shape_of_noise = getattr(model, "inputs", None)
    noise = shape_of_noise() if shape_of_noise else None
    if not isinstance(noise, jax.ShapeDtypeStruct):
        raise UserError(
            "objective: adversarial needs a model that makes examples from noise, such as `gan`"
        )

    def objective(
        params: PyTree, state: PyTree, batch: PyTree, key: Array, train: bool
    ) -> Measured:
        augment_key, noise_key, *keys = jax.random.split(key, 5)
        augmentation = augment if train else ()
        real, _ = inputs(preprocess, augmentation, augment_key, x_of(batch), None)
        z = jax.random.normal(noise_key, (real.shape[0], *noise.shape), real.dtype)

        def apply(params: PyTree, x: Array, state: PyTree, key: Array) -> tuple[Array, PyTree]:
            return model.apply(params, state, x, train=train, key=key)

        made, state = apply(params, z, state, keys[0])

        def total_of_real(real: Array) -> tuple[Array, tuple[Array, PyTree]]:
            logits, new_state = apply(params, real, state, keys[1])
            return logits.sum(), (logits, new_state)

        slopes, (of_real, state) = jax.grad(total_of_real, has_aux=True)(real)
        steep = jnp.sum(jnp.square(slopes), axis=tuple(range(1, slopes.ndim)))
        # Each network is a constant in the loss of the other. XLA computes the two calls once.
        to_pass, _ = apply(jax.lax.stop_gradient(params), made, state, keys[2])
        of_made, state = apply(params, jax.lax.stop_gradient(made), state, keys[2])
        real_loss, made_loss = jax.nn.softplus(-of_real), jax.nn.softplus(of_made)
        losses = {
            "discriminator": (real_loss + made_loss) / 2 + penalty / 2 * steep,
            "generator": jax.nn.softplus(-to_pass),
        }
        right = ((of_real > 0).astype(float) + (of_made < 0)) / 2
        named = {f"loss_{name}": term for name, term in losses.items()}
        return losses, state, {**named, "accuracy_discriminator": right}

    return Objective(objective)


def alternating(
    objective: Objective,
    generator: Optimizer,
    *,
    discriminator: Optimizer,
    ema: float | None = None,
) -> Update:
    """First the discriminator takes a step, then the generator, against the new discriminator. Each
    minimizes the term of the loss with its name. The argument `discriminator` is its optimizer; the
    config's `optimizer` updates the generator."""
    if kind_of(discriminator) == "gradients":
        raise UserError(f"update.args.discriminator: {NO_STEP}")
    optimizers = {"discriminator": discriminator, "generator": generator}

    def init(params: PyTree) -> tuple[PyTree, PyTree | None]:
        if params.keys() != optimizers.keys():
            names = ", ".join(map(str, params))
            needed = "a model with the params 'discriminator' and 'generator', such as `gan`"
            raise UserError(f"update: alternating needs {needed}; this one has {names}")
        # An optimizer sees the whole names of the params, by which its rules may choose.
        opt = {name: one.init({name: params[name]}) for name, one in optimizers.items()}
        return opt, None if ema is None else params

    def step(ts: TrainState, batch: PyTree, valid: ArrayLike) -> StepResult:
        key, mask = step_key(ts), genuine(batch, valid)
        new, opt, grads, losses, metrics = ts, {}, {}, {}, {}
        for i, (name, optimizer) in enumerate(optimizers.items()):
            arguments = new, batch, mask, jax.random.fold_in(key, i)
            grads[name], (losses, state, metrics) = gradient_of(objective, name, *arguments)
            own = {name: ts.params[name]}
            updates, opt[name] = optimizer.update({name: grads[name]}, ts.opt[name], own)
            changed = apply_updates(ts._replace(params=own), updates)
            new = new._replace(params=new.params | changed, state=state)
        averaged = None if ema is None else moving_average(ts.ema, new.params, ema, ts.step)
        new = new._replace(opt=opt, ema=averaged)
        return StepResult(new, grads, losses, metrics)

    return Update(init, step)


def gradient_of(
    objective: Objective,
    name: str,
    ts: TrainState,
    batch: PyTree,
    mask: Bool[Array, "batch"],
    key: Array,
) -> tuple[PyTree, Measured]:
    """(the gradient of a network's term of the loss for its params, what the objective returns)."""

    def own_loss(own: PyTree) -> tuple[Array, Measured]:
        results = objective(ts.params | {name: own}, ts.state, batch, key, True, mask)
        term = term_of(results[0], name)
        return mean_of(term, mask, counts_of(term, mask)), results

    return jax.grad(own_loss, has_aux=True)(ts.params[name])


def term_of(losses: PyTree, name: str) -> Float[Array, "batch"]:
    """The term of the loss that a network is trained for."""
    if not isinstance(losses, dict) or name not in losses:
        found = ", ".join(losses) if isinstance(losses, dict) else "a single loss"
        needed = f"a loss with the term {name!r}, such as that of the objective `adversarial`"
        raise UserError(f"update: alternating needs {needed}; there is {found}")
    return losses[name]
