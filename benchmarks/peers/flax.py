"""Flax NNX and Optax, as in Flax's MNIST tutorial; its performance guide recommends
`cached_partial`."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.peers.optax import Trainer, mean_loss, optimizer_of


class Residual(nnx.Module):
    """Adds a block to its input, or to a projection of it."""

    def __init__(self, block, shortcut=lambda x: x):
        self.block, self.shortcut = block, shortcut

    def __call__(self, x):
        return self.shortcut(x) + self.block(x)


class Classifier(nnx.Module):
    """Features, their mean over the pixels or the tokens, and a head."""

    def __init__(self, features, *head):
        self.features, self.head = nnx.Sequential(*features), nnx.Sequential(*head)

    def __call__(self, x):
        x = self.features(x)
        return self.head(x.mean(tuple(range(1, x.ndim - 1))))


def gelu(x):
    return nnx.gelu(x, approximate=False)


def convnext(
    shape, dims, kernel=7, expansion=2, head_dim=64, residual=False, patch=4, depths=None, *, rngs
):
    def patches(dim_in, dim, size):
        options = {"strides": size, "padding": "VALID", "use_bias": False}
        return nnx.Conv(dim_in, dim, (size, size), **options, rngs=rngs)

    def block(dim):
        depthwise = {"feature_group_count": dim, "use_bias": False, "rngs": rngs}
        return nnx.Sequential(
            nnx.Conv(dim, dim, (kernel, kernel), **depthwise),
            nnx.LayerNorm(dim, rngs=rngs),
            nnx.Linear(dim, expansion * dim, use_bias=False, rngs=rngs),
            gelu,
            nnx.Linear(expansion * dim, dim, use_bias=False, rngs=rngs),
        )

    layers = [patches(shape[-1], dims[0], patch), nnx.LayerNorm(dims[0], rngs=rngs)]
    for i, dim in enumerate(dims):
        if i > 0:
            layers += [nnx.LayerNorm(dims[i - 1], rngs=rngs), patches(dims[i - 1], dim, 2)]
        for _ in range(depths[i] if depths else 1):
            layers.append(Residual(block(dim)) if residual else block(dim))
    head = [nnx.Linear(dims[-1], head_dim, rngs=rngs), nnx.Linear(head_dim, 10, rngs=rngs)]
    return Classifier(layers, nnx.LayerNorm(dims[-1], rngs=rngs), *head)


def conv_norm(dim_in, dim, size, stride=1, groups=1, *, rngs):
    options = {"strides": stride, "feature_group_count": groups, "use_bias": False}
    conv = nnx.Conv(dim_in, dim, (size, size), **options, rngs=rngs)
    return nnx.Sequential(conv, nnx.BatchNorm(dim, momentum=0.9, rngs=rngs))


def resnet(shape, widths, depth, *, rngs):
    layers, dim_in = [conv_norm(shape[-1], widths[0], 3, rngs=rngs), nnx.relu], widths[0]
    for i, dim in enumerate(widths):
        for j in range(depth):
            stride = 2 if i > 0 and j == 0 else 1
            first = conv_norm(dim_in, dim, 3, stride, rngs=rngs)
            body = nnx.Sequential(first, nnx.relu, conv_norm(dim, dim, 3, rngs=rngs))
            shortcut = [conv_norm(dim_in, dim, 1, stride, rngs=rngs)] if stride > 1 else []
            layers += [Residual(body, *shortcut), nnx.relu]
            dim_in = dim
    return Classifier(layers, nnx.Linear(dim_in, 10, rngs=rngs))


def net(shape, layers, *, rngs):
    parts, width = [], shape[-1]
    for layer in layers:
        options = {"strides": layer.stride, "use_bias": False, "rngs": rngs}
        size = width, layer.width, (layer.kernel, layer.kernel)
        if layer.kind == "up":
            conv = nnx.ConvTranspose(*size, **options)
        else:
            conv = nnx.Conv(*size, feature_group_count=layer.groups, **options)
        width = layer.width
        parts += [conv, *NORMS[layer.norm](width, rngs), nnx.relu]
    return Classifier(parts, nnx.Linear(width, 10, rngs=rngs))


NORMS = {
    "batch": lambda width, rngs: [nnx.BatchNorm(width, momentum=0.9, rngs=rngs)],
    "group": lambda width, rngs: [nnx.GroupNorm(width, 8, rngs=rngs)],
    "layer": lambda width, rngs: [nnx.LayerNorm(width, rngs=rngs)],
    "none": lambda width, rngs: [],
}


class RNN(nnx.Module):
    """Reads sequences, of which `lengths` says whether they are padded with zeros."""

    def __init__(self, shape, cell, dim, depth=1, bidirectional=False, lengths=False, *, rngs):
        make = {"lstm": nnx.OptimizedLSTMCell, "gru": nnx.GRUCell}[cell]
        ends, self.lengths = (False, True) if bidirectional else (False,), lengths
        widths = [shape[-1], *[dim * len(ends)] * depth]
        self.layers = nnx.List(
            nnx.List(
                nnx.RNN(make(width, dim, rngs=rngs), return_carry=True, reverse=end, keep_order=end)
                for end in ends
            )
            for width in widths[:-1]
        )
        self.head = nnx.Linear(widths[-1], 10, rngs=rngs)

    def __call__(self, x):
        lengths = (x != 0).any(-1).sum(-1) if self.lengths else None
        for layer in self.layers:
            carries, outputs = zip(*(end(x, seq_lengths=lengths) for end in layer), strict=True)
            x = jnp.concatenate(outputs, -1)
        last = [carry[1] if isinstance(carry, tuple) else carry for carry in carries]
        return self.head(jnp.concatenate(last, -1))


class TransformerBlock(nnx.Module):
    def __init__(self, dim, heads, *, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(dim, rngs=rngs), nnx.LayerNorm(dim, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, dim, decode=False, rngs=rngs)
        self.expand = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.project = nnx.Linear(4 * dim, dim, rngs=rngs)

    def __call__(self, x, mask=None):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.project(gelu(self.expand(self.norm2(x))))


class Tokens(nnx.Module):
    """Patches of an image, each with a learned position."""

    def __init__(self, shape, patch, dim, *, rngs):
        options = {"strides": patch, "padding": "VALID", "rngs": rngs}
        self.patches = nnx.Conv(shape[-1], dim, (patch, patch), **options)
        count = shape[0] // patch * (shape[1] // patch)
        positions = 0.02 * jax.random.truncated_normal(rngs.params(), -2, 2, (count, dim))
        self.positions = nnx.Param(positions)

    def __call__(self, x):
        x = self.patches(x)
        return x.reshape(x.shape[0], -1, x.shape[-1]) + self.positions


def vit(shape, patch=4, dim=64, depth=4, heads=4, *, rngs):
    blocks = [TransformerBlock(dim, heads, rngs=rngs) for _ in range(depth)]
    layers = [Tokens(shape, patch, dim, rngs=rngs), *blocks, nnx.LayerNorm(dim, rngs=rngs)]
    return Classifier(layers, nnx.Linear(dim, 10, rngs=rngs))


def mlp(shape, dims, *, rngs):
    layers = [lambda x: x.reshape(x.shape[0], -1)]
    for a, b in pairwise((int(np.prod(shape)), *dims)):
        layers += [nnx.Linear(a, b, rngs=rngs), nnx.relu]
    return nnx.Sequential(*layers, nnx.Linear(dims[-1], 10, rngs=rngs))


class GPT(nnx.Module):
    def __init__(self, shape, vocab_size, dim, depth, heads, *, rngs):
        small = nnx.initializers.normal(0.02)
        self.tokens = nnx.Embed(vocab_size, dim, embedding_init=small, rngs=rngs)
        self.positions = nnx.Embed(shape[0], dim, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List([TransformerBlock(dim, heads, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(dim, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(x)
        y = self.tokens(x) + self.positions(jnp.arange(x.shape[1]))
        for block in self.blocks:
            y = block(y, mask)
        return self.tokens.attend(self.norm(y))


MODELS = {f.__name__: f for f in (convnext, resnet, net, vit, mlp)} | {"rnn": RNN}


def trainer(workload, data, variant):
    """A model and its optimizer, which one jitted step updates in place."""
    rngs = nnx.Rngs(0)
    if workload.is_text:
        model = GPT(workload.shape, workload.classes, **workload.args, rngs=rngs)
    else:
        model = MODELS[workload.model](workload.shape, **workload.args, rngs=rngs)
    for _, node in nnx.iter_graph(model):
        is_layer = isinstance(node, nnx.Module) and hasattr(node, "dtype")
        if workload.precision != "float32" and is_layer:
            node.dtype = jnp.dtype(workload.precision)  # the params stay in float32
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    decay_or_muon = optimizer_of(workload, len(data["train"][0]), decayed)
    optimizer = nnx.Optimizer(model, decay_or_muon, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        def loss_fn(model):
            logits = model(x).astype(jnp.float32)
            return mean_loss(workload, logits, y), jnp.mean(logits.argmax(-1) == y)

        measured, grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        return measured

    model.train()
    cached = nnx.cached_partial(step, model, optimizer)
    forward = nnx.jit(lambda model, x: model(x))

    def predict(_, x):
        model.eval()  # the cached step keeps a view of its own, which stays in training mode
        return forward(model, x)

    return Trainer(
        workload,
        data,
        parameters,
        None,
        lambda _, x, y: (None, cached(x, y)),
        predict,
    )


def decayed(params):
    """All parameters except biases and scales."""
    return nnx.map_state(lambda path, _: path[-1] not in ("bias", "scale"), params)
