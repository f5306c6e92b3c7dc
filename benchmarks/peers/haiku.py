"""Haiku and Optax, as in Haiku's MNIST and ImageNet examples: modules in `hk.transform_with_state`,
and one jitted update."""

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.peers.batches import accuracy_of, training_batches
from benchmarks.peers.by_optax import mean_loss, optimizer_of

VARIANTS = ("",)


class TrainingState(NamedTuple):
    params: hk.Params
    state: hk.State
    opt_state: optax.OptState


class Trainer:
    """A TrainingState, and the functions that update it and predict with it."""

    def __init__(self, workload, data):
        self.data, self.batch_size = data, workload.batch_size

        def forward(x, is_training):
            return MODELS[workload.model](**workload.args)(x, is_training)

        network = hk.without_apply_rng(hk.transform_with_state(forward))
        optim = optimizer_of(workload, len(data["train"][0]), decayed)
        init = jax.jit(network.init, static_argnames="is_training")
        params, state = init(jax.random.key(0), data["train"][0][:1], is_training=True)
        self.parameters = hk.data_structures.tree_size(params)
        self.state = TrainingState(params, state, optim.init(params))
        self.update, self.predict = make_functions(network, optim, workload.label_smoothing)

    def epoch(self, seed):
        metrics = []
        for x, y in training_batches(self.data["train"], self.batch_size, seed):
            self.state, step_metrics = self.update(self.state, x, y)
            metrics.append(step_metrics)
        return float(np.mean([loss for loss, _ in jax.device_get(metrics)]))

    def accuracy(self):
        return accuracy_of(lambda x: self.predict(self.state, x), self.data["test"])


def decayed(params):
    """All parameters except biases and scales."""
    return hk.data_structures.map(lambda module, name, leaf: name in ("w", "positions"), params)


def make_functions(network, optim, label_smoothing):
    """(update, predict)"""

    def loss_fn(params, state, x, y):
        logits, state = network.apply(params, state, x, is_training=True)
        loss = mean_loss(logits, y, label_smoothing)
        return loss, (state, jnp.mean(logits.argmax(-1) == y))

    @jax.jit
    def update(old, x, y):
        (loss, (state, accuracy)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            old.params, old.state, x, y
        )
        updates, opt_state = optim.update(grads, old.opt_state, old.params)
        params = optax.apply_updates(old.params, updates)
        return TrainingState(params, state, opt_state), (loss, accuracy)

    @jax.jit
    def predict(training_state, x):
        params, state, _ = training_state
        return network.apply(params, state, x, is_training=False)[0]

    return update, predict


def layer_norm():
    return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True, eps=1e-6)


def gelu(x):
    return jax.nn.gelu(x, approximate=False)


class ConvNeXt(hk.Module):
    def __init__(
        self,
        dims=(8, 16, 32),
        kernel=7,
        expansion=2,
        head_dim=64,
        residual=False,
        patch=4,
        depths=None,
    ):
        super().__init__()
        self.dims, self.kernel, self.expansion, self.head_dim = dims, kernel, expansion, head_dim
        self.residual, self.patch, self.depths = residual, patch, depths or [1] * len(dims)

    def __call__(self, x, is_training):
        def block(x, dim):
            y = layer_norm()(hk.DepthwiseConv2D(1, self.kernel, with_bias=False)(x))
            y = gelu(hk.Conv2D(self.expansion * dim, 1, with_bias=False)(y))
            y = hk.Conv2D(dim, 1, with_bias=False)(y)
            return x + y if self.residual else y

        stem = hk.Conv2D(self.dims[0], self.patch, self.patch, padding="VALID", with_bias=False)
        x = layer_norm()(stem(x))
        for i, (dim, depth) in enumerate(zip(self.dims, self.depths, strict=True)):
            if i > 0:
                x = hk.Conv2D(dim, 2, 2, padding="VALID", with_bias=False)(layer_norm()(x))
            for _ in range(depth):
                x = block(x, dim)
        x = layer_norm()(x.mean((1, 2)))
        return hk.Linear(10)(hk.Linear(self.head_dim)(x))


class MLP(hk.Module):
    def __init__(self, dims=(128, 128)):
        super().__init__()
        self.dims = dims

    def __call__(self, x, is_training):
        return hk.nets.MLP([*self.dims, 10])(hk.Flatten()(x))


class ViT(hk.Module):
    def __init__(self, patch=4, dim=64, depth=4, heads=4, expansion=4):
        super().__init__()
        self.patch, self.dim, self.depth = patch, dim, depth
        self.heads, self.expansion = heads, expansion

    def __call__(self, x, is_training):
        x = hk.Conv2D(self.dim, self.patch, self.patch, padding="VALID")(x)
        x = hk.Reshape((-1, self.dim))(x)  # (B, T, D)
        positions_init = hk.initializers.TruncatedNormal(0.02)
        x = x + hk.get_parameter("positions", x.shape[1:], init=positions_init)
        for _ in range(self.depth):
            y, w_init = layer_norm()(x), hk.initializers.VarianceScaling(1.0)
            attention = hk.MultiHeadAttention(self.heads, self.dim // self.heads, w_init=w_init)
            x = x + attention(y, y, y)
            y = gelu(hk.Linear(self.expansion * self.dim)(layer_norm()(x)))
            x = x + hk.Linear(self.dim)(y)
        return hk.Linear(10)(layer_norm()(x).mean(1))


class ResNet(hk.Module):
    def __init__(self, widths=(16, 32, 64), depth=3):
        super().__init__()
        self.widths, self.depth = widths, depth

    def __call__(self, x, is_training):
        def unit(x, dim, kernel, stride=1):
            x = hk.Conv2D(dim, kernel, stride, with_bias=False)(x)
            norm = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)
            return norm(x, is_training)

        def block(x, dim, stride):
            y = unit(jax.nn.relu(unit(x, dim, 3, stride)), dim, 3)
            x = unit(x, dim, 1, stride) if stride != 1 or x.shape[-1] != dim else x
            return jax.nn.relu(x + y)

        x = jax.nn.relu(unit(x, self.widths[0], 3))
        for i, dim in enumerate(self.widths):
            for j in range(self.depth):
                x = block(x, dim, 2 if i > 0 and j == 0 else 1)
        return hk.Linear(10)(x.mean((1, 2)))


MODELS = {"convnext": ConvNeXt, "mlp": MLP, "vit": ViT, "resnet": ResNet}


def trainer(workload, data, variant):
    return Trainer(workload, data)
