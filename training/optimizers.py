"""Optimizers: init(params) -> state, update(grads, state, params) -> (updates to add, state)."""

import re
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from training.base import Number, Optimizer
from training.transforms import (
    NO_DECAY,
    add_decay,
    matching,
    of_blocks,
    partition,
    scale,
    stateless,
)
from utils import is_stacked, map_named
from utils.forms import Fraction, NonNegative, Positive, checked, regex

BY_ADAMW = r".*(embed|head).*|(.*/)?(tokens|positions|label)/weight"


def zeros(params: PyTree) -> PyTree:
    """A tree of zeros, with a separate buffer for every leaf."""
    return jax.tree.map(jnp.zeros_like, params)


def squares(tree: PyTree) -> PyTree:
    """Every leaf squared."""
    return jax.tree.map(jnp.square, tree)


def moving_average(decay: Number, old: PyTree, new: PyTree) -> PyTree:
    """decay * old + (1 - decay) * new."""
    return jax.tree.map(lambda o, n: decay * o + (1 - decay) * n, old, new)


def unbiased(decay: Number, step: Int[Array, ""], mean: PyTree) -> PyTree:
    """Correct the bias of a moving average that started at zero, after `step` steps."""
    correction = 1 / (1 - decay**step)  # one division, instead of one per element of the tree
    return jax.tree.map(lambda m: m * correction.astype(m.dtype), mean)


@checked
def sgd(lr: Positive, momentum: Fraction = 0.0, nesterov: bool = False) -> Optimizer:
    """Gradient descent; with momentum, along a decaying sum of the gradients."""
    if nesterov and momentum == 0:
        raise ValueError("nesterov: needs momentum, which is 0; set momentum, for example to 0.9")

    def decaying_sum(old: PyTree, grads: PyTree) -> PyTree:
        return jax.tree.map(lambda m, g: momentum * m + g, old, grads)

    def update(grads: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        m = decaying_sum(state["m"], grads)
        return scale(-lr, decaying_sum(m, grads) if nesterov else m), {"m": m}

    if momentum == 0:
        return stateless(lambda grads, params: scale(-lr, grads), "step")
    return Optimizer(lambda params: {"m": zeros(params)}, update, "step")


@checked
def adagrad(lr: Positive = 0.01, initial: NonNegative = 0.1, eps: Positive = 1e-7) -> Optimizer:
    """AdaGrad (Duchi et al., 2011): gradients divided by the root of the sum of all their squares.
    The sum starts at `initial`."""

    def init(params: PyTree) -> PyTree:
        return {"sum": jax.tree.map(lambda p: jnp.full_like(p, initial), params)}

    def update(grads: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        total = jax.tree.map(jnp.add, state["sum"], squares(grads))
        return jax.tree.map(lambda g, s: -lr * g / jnp.sqrt(s + eps), grads, total), {"sum": total}

    return Optimizer(init, update, "step")


@checked
def rmsprop(
    lr: Positive = 0.001, decay: Fraction = 0.9, eps: Positive = 1e-8, momentum: Fraction = 0.0
) -> Optimizer:
    """RMSProp (Hinton, 2012): SGD on gradients divided by the root of their recent mean square."""
    descent = sgd(lr, momentum)

    def update(grads: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        v = moving_average(decay, state["v"], squares(grads))
        direction = jax.tree.map(lambda g, v: g / (jnp.sqrt(v) + eps), grads, v)
        updates, sgd_state = descent.update(direction, state["sgd"])
        return updates, {"v": v, "sgd": sgd_state}

    return Optimizer(
        lambda params: {"v": zeros(params), "sgd": descent.init(params)}, update, "step"
    )


def adam_init(params: PyTree) -> dict[str, PyTree]:
    """Zero moments at step 0."""
    return {"step": jnp.zeros((), jnp.int32), "m": zeros(params), "v": zeros(params)}


def adam_direction(
    grads: PyTree, state: PyTree, b1: Number, b2: Number, eps: Number, nesterov: bool = False
) -> tuple[PyTree, dict[str, PyTree]]:
    """Adam's direction: the mean gradient divided by the root of the mean square, and the state.
    With `nesterov`, the mean is that after one more step with the same gradient (Dozat, 2016)."""
    step = state["step"] + 1
    m = moving_average(b1, state["m"], grads)
    v = moving_average(b2, state["v"], squares(grads))
    mean, square = unbiased(b1, step, m), unbiased(b2, step, v)
    if nesterov:
        mean = moving_average(b1, unbiased(b1, step + 1, m), unbiased(b1, step, grads))
    direction = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mean, square)
    return direction, {"step": step, "m": m, "v": v}


@checked
def adam(
    lr: Positive = 0.001,
    b1: Fraction = 0.9,
    b2: Fraction = 0.999,
    eps: Positive = 1e-8,
    nesterov: bool = False,
) -> Optimizer:
    """Adam (Kingma and Ba, 2015); with `nesterov`, NAdam."""

    def update(grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        direction, state = adam_direction(grads, state, b1, b2, eps, nesterov)
        return scale(-lr, direction), state

    return Optimizer(adam_init, update, "step")


@checked
def adamw(
    lr: Positive = 0.001,
    b1: Fraction = 0.9,
    b2: Fraction = 0.999,
    eps: Positive = 1e-8,
    weight_decay: NonNegative = 0.01,
    exclude: str = NO_DECAY,
    include: str = ".*",
    nesterov: bool = False,
) -> Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019); with `nesterov`, NAdamW.
    Params decay whose name the regex `include` matches and `exclude` does not."""
    regex(exclude=exclude, include=include)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        direction, state = adam_direction(grads, state, b1, b2, eps, nesterov)
        return scale(-lr, add_decay(direction, params, weight_decay, exclude, include)), state

    init = matching(adam_init, (exclude, NO_DECAY), (include, ".*"))
    return Optimizer(init, update, "step")


@checked
def lamb(
    lr: Positive = 0.001,
    b1: Fraction = 0.9,
    b2: Fraction = 0.999,
    eps: Positive = 1e-6,
    weight_decay: NonNegative = 0.01,
    exclude: str = NO_DECAY,
    include: str = ".*",
) -> Optimizer:
    """LAMB (You et al., 2020): AdamW with each leaf's direction scaled to the norm of the leaf.
    It is for very large batches. Params decay whose name the regex `include` matches and `exclude`
    does not."""
    unscaled = adamw(1.0, b1, b2, eps, weight_decay, exclude, include)

    def with_norm_of(
        param: Float[Array, "*axes"], change: Float[Array, "*axes"]
    ) -> Float[Array, "*axes"]:
        norm, param_norm = jnp.linalg.norm(change), jnp.linalg.norm(param)
        # A param of zeros keeps the change unscaled; otherwise it would never change.
        return change * jnp.where((norm == 0) | (param_norm == 0), 1, param_norm / norm)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        changes, state = unscaled.update(grads, state, params)
        return scale(lr, map_named(of_blocks(with_norm_of), params, changes)), state

    return Optimizer(unscaled.init, update, "step")


@checked
def lion(
    lr: Positive = 0.0001,
    b1: Fraction = 0.9,
    b2: Fraction = 0.99,
    weight_decay: NonNegative = 0.001,
    exclude: str = NO_DECAY,
    include: str = ".*",
) -> Optimizer:
    """Lion (Chen et al., 2023): the sign of a mean of momentum and gradient; only one buffer.
    Params decay whose name the regex `include` matches and `exclude` does not."""
    regex(exclude=exclude, include=include)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        direction = jax.tree.map(jnp.sign, moving_average(b1, state["m"], grads))
        m = moving_average(b2, state["m"], grads)
        return scale(-lr, add_decay(direction, params, weight_decay, exclude, include)), {"m": m}

    init = matching(lambda params: {"m": zeros(params)}, (exclude, NO_DECAY), (include, ".*"))
    return Optimizer(init, update, "step")


def orthogonal(
    matrix: Float[Array, "rows columns"], iterations: int = 5, eps: float = 1e-8
) -> Float[Array, "rows columns"]:
    """The matrix with all singular values near 1, by Newton-Schulz iterations of a quintic."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix  # x @ x.T is then the smaller of the two products
    x = x / (jnp.linalg.norm(x) + eps)
    for _ in range(iterations):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if is_tall else x


def is_matrix(name: str, leaf: Array | jax.ShapeDtypeStruct) -> bool:
    """Whether a leaf, or its part for one of several stacked blocks, is a matrix, or the kernel
    (H, W, in, out) of a convolution with in > 1."""
    shape = leaf.shape[is_stacked(name) :]
    return len(shape) == 2 or (len(shape) == 4 and shape[2] > 1)


def orthogonal_step(direction: Float[Array, "*axes out"]) -> Float[Array, "*axes out"]:
    """The direction made orthogonal as a matrix (..., out), and larger if it has more outputs."""
    matrix = direction.reshape(-1, direction.shape[-1])
    step = orthogonal(matrix) * max(1, matrix.shape[1] / matrix.shape[0]) ** 0.5
    return step.reshape(direction.shape)


def muon_of_matrices(
    lr: Number, beta: Number, weight_decay: Number, exclude: str, include: str
) -> Annotated[Optimizer, "no part"]:
    """Muon for a tree that holds only matrices and kernels."""

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        step = state["step"] + 1
        m = moving_average(beta, state["m"], grads)
        ahead = moving_average(beta, unbiased(beta, step + 1, m), unbiased(beta, step, grads))
        direction = map_named(of_blocks(orthogonal_step), ahead)
        updates = scale(-lr, add_decay(direction, params, weight_decay, exclude, include))
        return updates, {"step": step, "m": m}

    return Optimizer(
        lambda params: {"step": jnp.zeros((), jnp.int32), "m": zeros(params)}, update, "step"
    )


@checked
def muon(
    lr: Positive = 0.02,
    beta: Fraction = 0.95,
    weight_decay: NonNegative = 0.0,
    exclude: str = NO_DECAY,
    by_adamw: str = BY_ADAMW,
    adamw_lr: Positive = 0.001,
    b1: Fraction = 0.9,
    b2: Fraction = 0.999,
    eps: Positive = 1e-8,
    include: str = ".*",
) -> Optimizer:
    """Muon (Jordan et al., 2024) for matrices; AdamW, with its own learning rate, for the rest.
    The kernel of a convolution counts as the matrix (H * W * in, out), unless it has one input
    channel, as in a depthwise convolution. AdamW also updates the names that `by_adamw` matches."""
    regex(by_adamw=by_adamw)

    def label(tree: dict[str, Array]) -> dict[str, str]:
        kinds = {n: "muon" if is_matrix(n, leaf) else "adamw" for n, leaf in tree.items()}
        return kinds | {name: "adamw" for name in tree if re.fullmatch(by_adamw, name)}

    matrices = muon_of_matrices(lr, beta, weight_decay, exclude, include)
    # Only `matching` below sees all names that `exclude` may match, so AdamW does not check it.
    others = adamw(adamw_lr, b1, b2, eps, weight_decay, exclude, include)._replace(init=adam_init)
    both = partition(label, {"muon": matrices, "adamw": others})
    rules = (exclude, NO_DECAY), (by_adamw, BY_ADAMW), (include, ".*")
    init = matching(both.init, *rules)
    return Optimizer(init, both.update, "step")
