"""Equinox and Optax, as in Equinox's CNN and stateful-layer examples: a model of one example, under
`jax.vmap`.

The step follows the page "Low-overhead training loops" of its tricks: `jax.jit` over flat leaves is
faster than `eqx.filter_jit` for small models. Weights and biases are initialized as ours are, in
the way that its FAQ shows: with its own initialization it learns more slowly.
"""

from itertools import pairwise

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from equinox import nn

from benchmarks.peers.optax import Trainer, mean_loss, optimizer_of

RELU = nn.Lambda(jax.nn.relu)
GELU = nn.Lambda(lambda x: jax.nn.gelu(x, approximate=False))
MEAN = nn.Lambda(lambda x: x.mean((1, 2)))


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of (C, H, W)."""

    def __call__(self, x, *, key=None):
        return jax.vmap(jax.vmap(super().__call__, 1, 1), 1, 1)(x)


class OfTokens(eqx.Module):
    """A layer for each token of (T, D)."""

    layer: eqx.Module

    def __call__(self, x, *, key=None):
        return jax.vmap(self.layer)(x)


class Residual(nn.StatefulLayer):
    """Adds a block to its input, or to a projection of it."""

    block: nn.Sequential
    shortcut: nn.Sequential | None = None

    def __call__(self, x, state, *, key=None):
        y, state = self.block(x, state)
        if self.shortcut is not None:
            x, state = self.shortcut(x, state)
        return x + y, state


class Attention(nn.MultiheadAttention):
    """Self-attention."""

    def __call__(self, x, *, key=None):
        return super().__call__(x, x, x)


class Tokens(eqx.Module):
    """Patches of an image, each with a learned position."""

    patches: nn.Conv2d
    positions: jax.Array

    def __call__(self, x, *, key=None):
        x = self.patches(x)
        return x.reshape(x.shape[0], -1).T + self.positions  # (T, D)


def convnext(
    shape, keys, dims, kernel=7, expansion=2, head_dim=64, residual=False, patch=4, depths=None
):
    def conv(dim_in, dim, size, stride=1, **options):
        return nn.Conv2d(dim_in, dim, size, stride, use_bias=False, key=next(keys), **options)

    def block(dim):
        return nn.Sequential(
            [
                conv(dim, dim, kernel, padding="SAME", groups=dim),
                ChannelNorm(dim, eps=1e-6),
                conv(dim, expansion * dim, 1),
                GELU,
                conv(expansion * dim, dim, 1),
            ]
        )

    layers = [conv(shape[-1], dims[0], patch, patch), ChannelNorm(dims[0], eps=1e-6)]
    for i, dim in enumerate(dims):
        if i > 0:
            layers += [ChannelNorm(dims[i - 1], eps=1e-6), conv(dims[i - 1], dim, 2, 2)]
        for _ in range(depths[i] if depths else 1):
            layers.append(Residual(block(dim)) if residual else block(dim))
    head = [nn.LayerNorm(dims[-1], eps=1e-6), nn.Linear(dims[-1], head_dim, key=next(keys))]
    return nn.Sequential([*layers, MEAN, *head, nn.Linear(head_dim, 10, key=next(keys))])


def resnet(shape, keys, widths, depth):
    def unit(dim_in, dim, size, stride=1):
        options = {"padding": "SAME", "use_bias": False, "key": next(keys)}
        norm = nn.BatchNorm(dim, axis_name="batch", momentum=0.9, mode="batch")
        return [nn.Conv2d(dim_in, dim, size, stride, **options), norm]

    layers, dim_in = [*unit(shape[-1], widths[0], 3), RELU], widths[0]
    for i, dim in enumerate(widths):
        for j in range(depth):
            stride = 2 if i > 0 and j == 0 else 1
            body = nn.Sequential([*unit(dim_in, dim, 3, stride), RELU, *unit(dim, dim, 3)])
            shortcut = nn.Sequential(unit(dim_in, dim, 1, stride)) if stride > 1 else None
            layers += [Residual(body, shortcut), RELU]
            dim_in = dim
    return nn.Sequential([*layers, MEAN, nn.Linear(dim_in, 10, key=next(keys))])


def vit(shape, keys, patch=4, dim=64, depth=4, heads=4):
    def norm():
        return OfTokens(nn.LayerNorm(dim, eps=1e-6))

    def linear(dim_in, dim_out):
        return OfTokens(nn.Linear(dim_in, dim_out, key=next(keys)))

    biases = {"use_query_bias": True, "use_value_bias": True, "use_output_bias": True}
    positions = 0.02 * jr.normal(next(keys), ((shape[0] // patch) * (shape[1] // patch), dim))
    layers = [Tokens(nn.Conv2d(shape[-1], dim, patch, patch, key=next(keys)), positions)]
    for _ in range(depth):
        attention = [norm(), Attention(heads, dim, **biases, key=next(keys))]
        perceptron = [norm(), linear(dim, 4 * dim), GELU, linear(4 * dim, dim)]
        layers += [Residual(nn.Sequential(block)) for block in (attention, perceptron)]
    mean = nn.Lambda(lambda x: x.mean(0))
    return nn.Sequential([*layers, norm(), mean, nn.Linear(dim, 10, key=next(keys))])


def mlp(shape, keys, dims):
    layers = [nn.Lambda(jnp.ravel)]
    for a, b in pairwise((int(np.prod(shape)), *dims)):
        layers += [nn.Linear(a, b, key=next(keys)), RELU]
    return nn.Sequential([*layers, nn.Linear(dims[-1], 10, key=next(keys))])


MODELS = {f.__name__: f for f in (convnext, resnet, vit, mlp)}


def trainer(workload, data, variant):
    """A flat list of all trained arrays, which a jitted step updates."""

    @eqx.filter_jit  # by one compiled program: one by one, the arrays take seconds longer
    def make(key):
        k1, k2 = jr.split(key)
        factory = eqx.nn.make_with_state(MODELS[workload.model])
        model, state = factory(workload.shape, iter(jr.split(k1, 256)), **workload.args)
        return initialized(model, k2), state

    model, state = make(jr.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    optim = optimizer_of(workload, len(data["train"][0]), decayed)
    leaves, tree = jax.tree.flatten((params, state, optim.init(params)))

    def loss_fn(params, state, x, y):
        logits, state = batched(eqx.combine(params, static), state, x)
        return mean_loss(workload, logits, y), (state, jnp.mean(logits.argmax(-1) == y))

    @jax.jit
    def step(leaves, x, y):
        params, state, opt_state = jax.tree.unflatten(tree, leaves)
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (state, accuracy)), grads = grad_fn(params, state, x, y)
        updates, opt_state = optim.update(grads, opt_state, params)
        new = eqx.apply_updates(params, updates), state, opt_state
        return jax.tree.leaves(new), (loss, accuracy)

    @jax.jit
    def predict(leaves, x):
        params, state, _ = jax.tree.unflatten(tree, leaves)
        return batched(nn.inference_mode(eqx.combine(params, static)), state, x)[0]

    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    return Trainer(workload, data, parameters, leaves, step, predict)


def batched(model, state, x):
    """The logits of images (B, H, W, C); Equinox's layers take one image, as (C, H, W)."""
    x = x.transpose(0, 3, 1, 2)
    return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)


def initialized(model, key):
    """The model with weights of variance 1 / fan-in, and biases of 0."""
    init, old = jax.nn.initializers.lecun_normal(in_axis=1, out_axis=0), weights(model)
    new = [init(k, weight.shape) for k, weight in zip(jr.split(key, len(old)), old, strict=True)]
    return eqx.tree_at(biases, eqx.tree_at(weights, model, new), replace_fn=jnp.zeros_like)


def weights(model):
    return [layer.weight for layer in weight_layers(model)]


def biases(model):
    return [layer.bias for layer in weight_layers(model) if layer.bias is not None]


def weight_layers(model):
    """All linear layers and convolutions."""

    def has_weight(node):
        return isinstance(node, nn.Linear | nn.Conv2d)

    return [node for node in jax.tree.leaves(model, is_leaf=has_weight) if has_weight(node)]


def decayed(params):
    """All parameters except scales and biases; a convolution's bias has the shape (C, 1, 1)."""
    return jax.tree.map(lambda leaf: leaf.ndim in (2, 4), params)
