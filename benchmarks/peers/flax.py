"""Flax NNX and Optax, as in Flax's MNIST tutorial; its performance guide recommends
`cached_partial`."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.peers.batches import accuracy_of, device_memory, training_batches
from benchmarks.peers.by_optax import mean_loss, optimizer_of

VARIANTS = ("",)


class ConvNeXtBlock(nnx.Module):
    def __init__(self, dim, kernel=7, expansion=2, residual=False, *, rngs):
        size, depthwise = (kernel, kernel), {"feature_group_count": dim, "use_bias": False}
        self.dwconv = nnx.Conv(dim, dim, size, **depthwise, rngs=rngs)
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.expand = nnx.Linear(dim, expansion * dim, use_bias=False, rngs=rngs)
        self.project = nnx.Linear(expansion * dim, dim, use_bias=False, rngs=rngs)
        self.residual = residual

    def __call__(self, x):
        y = self.project(nnx.gelu(self.expand(self.norm(self.dwconv(x))), approximate=False))
        return x + y if self.residual else y


class ConvNeXt(nnx.Module):
    def __init__(
        self, shape, dims=(8, 16, 32), head_dim=64, patch=4, depths=None, *, rngs, **block
    ):
        def patches(dim_in, dim, size):
            options = {"strides": size, "padding": "VALID", "use_bias": False, "rngs": rngs}
            return nnx.Conv(dim_in, dim, (size, size), **options)

        layers = [patches(shape[-1], dims[0], patch), nnx.LayerNorm(dims[0], rngs=rngs)]
        for i, dim in enumerate(dims):
            if i > 0:
                layers += [nnx.LayerNorm(dims[i - 1], rngs=rngs), patches(dims[i - 1], dim, 2)]
            for _ in range(depths[i] if depths else 1):
                layers.append(ConvNeXtBlock(dim, **block, rngs=rngs))
        self.features = nnx.Sequential(*layers)
        self.norm = nnx.LayerNorm(dims[-1], rngs=rngs)
        hidden = nnx.Linear(dims[-1], head_dim, rngs=rngs)
        self.head = nnx.Sequential(hidden, nnx.Linear(head_dim, 10, rngs=rngs))

    def __call__(self, x):
        return self.head(self.norm(self.features(x).mean((1, 2))))


class ConvNorm(nnx.Module):
    def __init__(self, dim_in, dim, size, stride=1, groups=1, *, rngs):
        options = {"strides": stride, "feature_group_count": groups, "use_bias": False}
        self.conv = nnx.Conv(dim_in, dim, (size, size), **options, rngs=rngs)
        self.norm = nnx.BatchNorm(dim, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.conv(x))


class ResidualBlock(nnx.Module):
    def __init__(self, dim_in, dim, stride, *, rngs):
        self.first = ConvNorm(dim_in, dim, 3, stride, rngs=rngs)
        self.second = ConvNorm(dim, dim, 3, rngs=rngs)
        self.shortcut = ConvNorm(dim_in, dim, 1, stride, rngs=rngs) if stride > 1 else lambda x: x

    def __call__(self, x):
        return nnx.relu(self.shortcut(x) + self.second(nnx.relu(self.first(x))))


class ResNet(nnx.Module):
    def __init__(self, shape, widths, depth, *, rngs):
        self.stem = ConvNorm(shape[-1], widths[0], 3, rngs=rngs)
        blocks = [ResidualBlock(widths[0], widths[0], 1, rngs=rngs) for _ in range(depth)]
        for a, b in pairwise(widths):
            blocks += [
                ResidualBlock(a, b, 2, rngs=rngs),
                *(ResidualBlock(b, b, 1, rngs=rngs) for _ in range(depth - 1)),
            ]
        self.blocks = nnx.Sequential(*blocks)
        self.head = nnx.Linear(widths[-1], 10, rngs=rngs)

    def __call__(self, x):
        return self.head(self.blocks(nnx.relu(self.stem(x))).mean((1, 2)))


class MobileNetV1(nnx.Module):
    def __init__(self, shape, plan, *, rngs):
        width = plan[0][0]
        layers = [ConvNorm(shape[-1], width, 3, rngs=rngs), nnx.relu]
        for out, stride in plan:
            depthwise = ConvNorm(width, width, 3, stride, width, rngs=rngs)
            layers += [depthwise, nnx.relu, ConvNorm(width, out, 1, rngs=rngs), nnx.relu]
            width = out
        self.features = nnx.Sequential(*layers)
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(self.features(x).mean((1, 2)))


class TransformerBlock(nnx.Module):
    def __init__(self, dim, heads, *, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(dim, rngs=rngs), nnx.LayerNorm(dim, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, dim, decode=False, rngs=rngs)
        self.expand = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.project = nnx.Linear(4 * dim, dim, rngs=rngs)

    def __call__(self, x, mask=None):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.project(nnx.gelu(self.expand(self.norm2(x)), approximate=False))


class ViT(nnx.Module):
    def __init__(self, shape, patch=4, dim=64, depth=4, heads=4, *, rngs):
        tokens = shape[0] // patch * (shape[1] // patch)
        self.patches = nnx.Conv(
            shape[-1], dim, (patch, patch), strides=patch, padding="VALID", rngs=rngs
        )
        self.positions = nnx.Param(
            0.02 * jax.random.truncated_normal(rngs.params(), -2, 2, (tokens, dim))
        )
        self.blocks = nnx.Sequential(
            *(TransformerBlock(dim, heads, rngs=rngs) for _ in range(depth))
        )
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.head = nnx.Linear(dim, 10, rngs=rngs)

    def __call__(self, x):
        x = self.patches(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


class MLP(nnx.Module):
    def __init__(self, shape, dims, *, rngs):
        sizes = (np.prod(shape), *dims)
        layers = [
            layer for a, b in pairwise(sizes) for layer in (nnx.Linear(a, b, rngs=rngs), nnx.relu)
        ]
        self.layers = nnx.Sequential(*layers, nnx.Linear(sizes[-1], 10, rngs=rngs))

    def __call__(self, x):
        return self.layers(x.reshape(x.shape[0], -1))


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


MODELS = {
    "convnext": ConvNeXt,
    "resnet": ResNet,
    "vit": ViT,
    "mlp": MLP,
    "mobilenet_v1": MobileNetV1,
}


def model_of(workload, rngs):
    if workload.is_text:
        return GPT(workload.shape, workload.classes, **workload.args, rngs=rngs)
    return MODELS[workload.model](workload.shape, **workload.args, rngs=rngs)


class Trainer:
    """A model, its optimizer and its metrics, all of them updated in place by one jitted step."""

    device_memory = staticmethod(device_memory)

    def __init__(self, workload, data):
        self.data = data if jax.default_backend() == "cpu" else jax.device_put(data)
        self.batch_size = workload.batch_size
        self.model = model_of(workload, nnx.Rngs(0))
        for _, node in nnx.iter_graph(self.model):
            layer = isinstance(node, nnx.Module) and hasattr(node, "dtype")
            if workload.precision != "float32" and layer:
                node.dtype = jnp.dtype(workload.precision)  # the params stay in float32
        params = nnx.state(self.model, nnx.Param)
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        adamw_or_muon = optimizer_of(workload, len(data["train"][0]), decayed)
        optimizer = nnx.Optimizer(self.model, adamw_or_muon, wrt=nnx.Param)
        accuracy, loss = nnx.metrics.Accuracy(), nnx.metrics.Average("loss")
        self.metrics = nnx.MultiMetric(accuracy=accuracy, loss=loss)
        self.model.train()
        step = train_step(workload.label_smoothing)
        self.step = nnx.cached_partial(step, self.model, optimizer, self.metrics)

    def epoch(self, seed):
        self.metrics.reset()
        for x, y in training_batches(self.data["train"], self.batch_size, seed):
            self.step(x, y)
        return float(self.metrics.compute()["loss"])

    def accuracy(self):
        self.model.eval()  # the cached step keeps a view of its own, which stays in training mode
        return accuracy_of(lambda x: predict(self.model, x), self.data["test"])


def decayed(params):
    """All parameters except biases and scales."""
    return nnx.map_state(lambda path, _: path[-1] not in ("bias", "scale"), params)


def train_step(label_smoothing):
    @nnx.jit
    def step(model, optimizer, metrics, x, y):
        def loss_fn(model):
            logits = model(x).astype(jnp.float32)
            return mean_loss(logits, y, label_smoothing), logits

        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        metrics.update(loss=loss, logits=logits, labels=y)
        optimizer.update(model, grads)

    return step


@nnx.jit
def predict(model, x):
    return model(x)


def trainer(workload, data, variant):
    return Trainer(workload, data)
