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

from benchmarks.peers.batches import accuracy_of, training_batches
from benchmarks.peers.by_optax import mean_loss, optimizer_of

VARIANTS = ("",)


class Trainer:
    """The flat list of all trained arrays, and the step that updates it."""

    def __init__(self, workload, data):
        self.data, self.batch_size = data, workload.batch_size
        model, state = make_model(workload)
        params, self.static = eqx.partition(model, eqx.is_inexact_array)
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        optim = optimizer_of(workload, len(data["train"][0]), decayed, outputs_last=False)
        self.leaves, self.tree = jax.tree.flatten((params, state, optim.init(params)))
        self.step = make_step(self.tree, self.static, optim, workload.label_smoothing)

    def epoch(self, seed):
        metrics = []
        for x, y in training_batches(self.data["train"], self.batch_size, seed):
            self.leaves, step_metrics = self.step(self.leaves, x, y)
            metrics.append(step_metrics)
        return float(np.mean([loss for loss, _ in jax.device_get(metrics)]))

    def accuracy(self):
        params, state, _ = jax.tree.unflatten(self.tree, self.leaves)
        model = eqx.nn.inference_mode(eqx.combine(params, self.static))
        return accuracy_of(lambda x: predict(model, state, x), self.data["test"])


def make_model(workload):
    """(model, state), made by one compiled program: one by one, the arrays take seconds longer."""

    @eqx.filter_jit
    def make(key):
        k1, k2 = jr.split(key)
        factory = eqx.nn.make_with_state(MODELS[workload.model])
        model, state = factory(workload.shape, **workload.args, key=k1)
        return initialized(model, k2), state

    return make(jr.key(0))


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
        return isinstance(node, eqx.nn.Linear | eqx.nn.Conv2d)

    return [node for node in jax.tree.leaves(model, is_leaf=has_weight) if has_weight(node)]


def decayed(params):
    """All parameters except scales and biases; a convolution's bias has the shape (C, 1, 1)."""
    return jax.tree.map(lambda leaf: leaf.ndim in (2, 4), params)


def make_step(tree, static, optim, label_smoothing):
    def loss_fn(params, state, x, y):
        logits, state = batched(eqx.combine(params, static), state, x)
        loss = mean_loss(logits, y, label_smoothing)
        return loss, (state, jnp.mean(logits.argmax(-1) == y))

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)

    @jax.jit
    def step(leaves, x, y):
        params, state, opt_state = jax.tree.unflatten(tree, leaves)
        (loss, (state, accuracy)), grads = grad_fn(params, state, x, y)
        updates, opt_state = optim.update(grads, opt_state, params)
        new = eqx.apply_updates(params, updates), state, opt_state
        return jax.tree.leaves(new), (loss, accuracy)

    return step


@eqx.filter_jit
def predict(model, state, x):
    return batched(model, state, x)[0]


def batched(model, state, x):
    """The logits of images (B, H, W, C); Equinox's layers take one image, as (C, H, W)."""
    x = x.transpose(0, 3, 1, 2)
    return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)


class ChannelNorm(eqx.nn.LayerNorm):
    """Layer norm over the channels of (C, H, W)."""

    def __call__(self, x):
        return jax.vmap(jax.vmap(super().__call__, 1, 1), 1, 1)(x)


class ConvNeXtBlock(eqx.Module):
    dwconv: eqx.nn.Conv2d
    norm: ChannelNorm
    expand: eqx.nn.Conv2d
    project: eqx.nn.Conv2d
    residual: bool = eqx.field(static=True)

    def __init__(self, dim, kernel=7, expansion=2, residual=False, *, key):
        k1, k2, k3 = jr.split(key, 3)
        depthwise = {"padding": "SAME", "groups": dim}
        self.dwconv = eqx.nn.Conv2d(dim, dim, kernel, **depthwise, use_bias=False, key=k1)
        self.norm = ChannelNorm(dim, eps=1e-6)
        self.expand = eqx.nn.Conv2d(dim, expansion * dim, 1, use_bias=False, key=k2)
        self.project = eqx.nn.Conv2d(expansion * dim, dim, 1, use_bias=False, key=k3)
        self.residual = residual

    def __call__(self, x):
        y = self.project(jax.nn.gelu(self.expand(self.norm(self.dwconv(x))), approximate=False))
        return x + y if self.residual else y


class ConvNeXt(eqx.Module):
    features: list
    norm: eqx.nn.LayerNorm
    hidden: eqx.nn.Linear
    classes: eqx.nn.Linear

    def __init__(self, shape, dims=(8, 16, 32), head_dim=64, patch=4, depths=None, *, key, **block):
        depths = depths or [1] * len(dims)
        keys = iter(jr.split(key, len(dims) + sum(depths) + 2))
        self.features = []
        for i, (a, b) in enumerate(pairwise((shape[-1], *dims))):
            size = 2 if i else patch
            down = eqx.nn.Conv2d(a, b, size, size, use_bias=False, key=next(keys))
            norm = ChannelNorm(a if i else b, eps=1e-6)
            self.features += [norm, down] if i else [down, norm]
            for _ in range(depths[i]):
                self.features.append(ConvNeXtBlock(b, **block, key=next(keys)))
        self.norm = eqx.nn.LayerNorm(dims[-1], eps=1e-6)
        self.hidden = eqx.nn.Linear(dims[-1], head_dim, key=next(keys))
        self.classes = eqx.nn.Linear(head_dim, 10, key=next(keys))

    def __call__(self, x, state):
        for layer in self.features:
            x = layer(x)
        return self.classes(self.hidden(self.norm(x.mean((1, 2))))), state


class MLP(eqx.Module):
    layers: list

    def __init__(self, shape, dims=(128, 128), *, key):
        widths = (int(np.prod(shape)), *dims, 10)
        sizes = zip(pairwise(widths), jr.split(key, len(dims) + 1), strict=True)
        self.layers = [eqx.nn.Linear(*size, key=k) for size, k in sizes]

    def __call__(self, x, state):
        x = x.ravel()
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x), state


class TransformerBlock(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    expand: eqx.nn.Linear
    project: eqx.nn.Linear

    def __init__(self, dim, heads, expansion, *, key):
        k1, k2, k3 = jr.split(key, 3)
        biases = {"use_query_bias": True, "use_value_bias": True, "use_output_bias": True}
        self.norm1 = eqx.nn.LayerNorm(dim, eps=1e-6)
        self.norm2 = eqx.nn.LayerNorm(dim, eps=1e-6)
        self.attention = eqx.nn.MultiheadAttention(heads, dim, **biases, key=k1)
        self.expand = eqx.nn.Linear(dim, expansion * dim, key=k2)
        self.project = eqx.nn.Linear(expansion * dim, dim, key=k3)

    def __call__(self, x):
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y)
        y = jax.vmap(self.expand)(jax.vmap(self.norm2)(x))
        return x + jax.vmap(self.project)(jax.nn.gelu(y, approximate=False))


class ViT(eqx.Module):
    patches: eqx.nn.Conv2d
    positions: jax.Array
    blocks: list
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, shape, patch=4, dim=64, depth=4, heads=4, expansion=4, *, key):
        k1, k2, k3, *keys = jr.split(key, depth + 3)
        self.patches = eqx.nn.Conv2d(shape[-1], dim, patch, patch, key=k1)
        self.positions = 0.02 * jr.normal(k2, ((shape[0] // patch) * (shape[1] // patch), dim))
        self.blocks = [TransformerBlock(dim, heads, expansion, key=k) for k in keys]
        self.norm = eqx.nn.LayerNorm(dim, eps=1e-6)
        self.head = eqx.nn.Linear(dim, 10, key=k3)

    def __call__(self, x, state):
        x = self.patches(x)
        x = x.reshape(x.shape[0], -1).T + self.positions  # (T, D)
        for block in self.blocks:
            x = block(x)
        return self.head(jax.vmap(self.norm)(x).mean(0)), state


class Unit(eqx.Module):
    """A convolution and its batch norm."""

    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm

    def __init__(self, in_dim, out_dim, kernel, stride=1, *, key):
        options = {"padding": "SAME", "use_bias": False, "key": key}
        self.conv = eqx.nn.Conv2d(in_dim, out_dim, kernel, stride, **options)
        self.norm = eqx.nn.BatchNorm(out_dim, axis_name="batch", momentum=0.9, mode="batch")

    def __call__(self, x, state):
        return self.norm(self.conv(x), state)


class ResNetBlock(eqx.Module):
    first: Unit
    second: Unit
    shortcut: Unit | None

    def __init__(self, in_dim, out_dim, stride, *, key):
        k1, k2, k3 = jr.split(key, 3)
        self.first = Unit(in_dim, out_dim, 3, stride, key=k1)
        self.second = Unit(out_dim, out_dim, 3, key=k2)
        changes = stride != 1 or in_dim != out_dim
        self.shortcut = Unit(in_dim, out_dim, 1, stride, key=k3) if changes else None

    def __call__(self, x, state):
        y, state = self.first(x, state)
        y, state = self.second(jax.nn.relu(y), state)
        if self.shortcut is not None:
            x, state = self.shortcut(x, state)
        return jax.nn.relu(x + y), state


class ResNet(eqx.Module):
    stem: Unit
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, shape, widths=(16, 32, 64), depth=3, *, key):
        k1, k2, key = jr.split(key, 3)
        self.stem = Unit(shape[-1], widths[0], 3, key=k1)
        plan = []
        for a, b in pairwise((widths[0], *widths)):
            plan += [(a, b, 2 if plan else 1)] + [(b, b, 1)] * (depth - 1)
        sizes = zip(plan, jr.split(key, len(plan)), strict=True)
        self.blocks = [ResNetBlock(*size, key=k) for size, k in sizes]
        self.head = eqx.nn.Linear(widths[-1], 10, key=k2)

    def __call__(self, x, state):
        x, state = self.stem(x, state)
        x = jax.nn.relu(x)
        for block in self.blocks:
            x, state = block(x, state)
        return self.head(x.mean((1, 2))), state


MODELS = {"convnext": ConvNeXt, "mlp": MLP, "vit": ViT, "resnet": ResNet}


def trainer(workload, data, variant):
    return Trainer(workload, data)
