"""Haiku and Optax, as in Haiku's MNIST and ImageNet examples: modules in `hk.transform_with_state`,
and one jitted update."""

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from benchmarks.peers.optax import Trainer, mean_loss, optimizer_of


class TrainingState(NamedTuple):
    params: hk.Params
    state: hk.State
    opt_state: optax.OptState


def trainer(workload, data, variant):
    def forward(x, is_training):
        return MODELS[workload.model](x, is_training, **workload.args)

    network = hk.without_apply_rng(hk.transform_with_state(forward))
    optim = optimizer_of(workload, len(data["train"][0]), decayed)
    init = jax.jit(network.init, static_argnames="is_training")
    params, state = init(jax.random.key(0), data["train"][0][:1], is_training=True)

    def loss_fn(params, state, x, y):
        logits, state = network.apply(params, state, x, is_training=True)
        return mean_loss(workload, logits, y), (state, jnp.mean(logits.argmax(-1) == y))

    @jax.jit
    def update(old, x, y):
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (state, accuracy)), grads = grad_fn(old.params, old.state, x, y)
        updates, opt_state = optim.update(grads, old.opt_state, old.params)
        params = optax.apply_updates(old.params, updates)
        return TrainingState(params, state, opt_state), (loss, accuracy)

    @jax.jit
    def predict(trained, x):
        return network.apply(trained.params, trained.state, x, is_training=False)[0]

    parameters = hk.data_structures.tree_size(params)
    first = TrainingState(params, state, optim.init(params))
    return Trainer(workload, data, parameters, first, update, predict)


def decayed(params):
    """All parameters except biases and scales."""
    return hk.data_structures.map(lambda module, name, leaf: name in ("w", "positions"), params)


def layer_norm(x):
    return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True, eps=1e-6)(x)


def gelu(x):
    return jax.nn.gelu(x, approximate=False)


def convnext(
    x,
    is_training,
    dims,
    kernel=7,
    expansion=2,
    head_dim=64,
    residual=False,
    patch=4,
    depths=None,
):
    def patches(x, dim, size):
        return hk.Conv2D(dim, size, size, padding="VALID", with_bias=False)(x)

    x = layer_norm(patches(x, dims[0], patch))
    for i, dim in enumerate(dims):
        if i > 0:
            x = patches(layer_norm(x), dim, 2)
        for _ in range(depths[i] if depths else 1):
            y = layer_norm(hk.DepthwiseConv2D(1, kernel, with_bias=False)(x))
            y = gelu(hk.Conv2D(expansion * dim, 1, with_bias=False)(y))
            y = hk.Conv2D(dim, 1, with_bias=False)(y)
            x = x + y if residual else y
    return hk.Linear(10)(hk.Linear(head_dim)(layer_norm(x.mean((1, 2)))))


def mlp(x, is_training, dims):
    return hk.nets.MLP([*dims, 10])(hk.Flatten()(x))


def vit(x, is_training, patch=4, dim=64, depth=4, heads=4):
    x = hk.Reshape((-1, dim))(hk.Conv2D(dim, patch, patch, padding="VALID")(x))  # (B, T, D)
    init = hk.initializers.TruncatedNormal(0.02)
    x = x + hk.get_parameter("positions", x.shape[1:], init=init)
    for _ in range(depth):
        y, w_init = layer_norm(x), hk.initializers.VarianceScaling(1.0)
        x = x + hk.MultiHeadAttention(heads, dim // heads, w_init=w_init)(y, y, y)
        x = x + hk.Linear(dim)(gelu(hk.Linear(4 * dim)(layer_norm(x))))
    return hk.Linear(10)(layer_norm(x).mean(1))


def resnet(x, is_training, widths, depth):
    def unit(x, dim, kernel, stride=1):
        x = hk.Conv2D(dim, kernel, stride, with_bias=False)(x)
        norm = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)
        return norm(x, is_training)

    x = jax.nn.relu(unit(x, widths[0], 3))
    for i, dim in enumerate(widths):
        for j in range(depth):
            stride = 2 if i > 0 and j == 0 else 1
            y = unit(jax.nn.relu(unit(x, dim, 3, stride)), dim, 3)
            x = unit(x, dim, 1, stride) if stride > 1 else x
            x = jax.nn.relu(x + y)
    return hk.Linear(10)(x.mean((1, 2)))


MODELS = {f.__name__: f for f in (convnext, mlp, vit, resnet)}
