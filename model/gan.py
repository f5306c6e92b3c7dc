"""Two networks (Goodfellow et al., 2014): a generator of images, and a discriminator that
distinguishes them from real ones. They are convolutional, as in Radford et al., 2015."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from model.base import Model
from model.checks import check_image
from model.layers.activations import leaky_relu, relu, sigmoid
from model.layers.conv import conv2d, conv2d_init
from model.layers.linear import linear, linear_init
from model.layers.norm import layer_norm, layer_norm_init
from utils.forms import Count, checked


@checked
def gan(input_shape: tuple[int, ...], latent: Count = 64, width: Count = 32) -> Model:
    """`apply` is the generator for noise, (B, latent) -> images with values from 0 to 1, and the
    discriminator for images -> logits (B,), above 0 for real ones.

    Both halve, or double, the sides of an image twice. `width` is the number of features at half
    the size of the images; there are twice as many at a quarter of it.
    """
    check_image(input_shape)
    height, side, channels = input_shape
    if height % 4 or side % 4:
        raise ValueError(f"input_shape: height and width must be multiples of 4, got {input_shape}")
    small = (height // 4, side // 4, 2 * width)

    def init(key: Array) -> tuple[PyTree, PyTree]:
        k1, k2 = jax.random.split(key)
        return {
            "generator": generator_init(k1, latent, small, channels),
            "discriminator": discriminator_init(k2, small, channels),
        }, {}

    def apply(
        params: PyTree,
        state: PyTree,
        x: Float[Array, "batch latent"] | Float[Array, "batch height width channels"],
        *,
        train: bool = False,
        key: Array | None = None,
    ) -> tuple[Float[Array, "batch *image"], PyTree]:
        if x.ndim == 2:
            return generator(params["generator"], x, small), state
        return discriminator(params["discriminator"], x), state

    return Model(init, apply, inputs=lambda: jax.ShapeDtypeStruct((latent,), jnp.float32))


def generator_init(key: Array, latent: int, small: tuple[int, int, int], channels: int) -> PyTree:
    k1, k2, k3, k4, k5 = jax.random.split(key, 5)
    height, side, wide = small
    width, last = wide // 2, max(8, wide // 8)
    return {
        "first": linear_init(k1, latent, height * side * wide),
        "norm1": layer_norm_init(wide),
        "up1": linear_init(k2, wide, 4 * width),
        "conv1": conv2d_init(k3, width, width, 3),
        "norm2": layer_norm_init(width),
        "up2": linear_init(k4, width, 4 * last),
        "out": conv2d_init(k5, last, channels, 5),
    }


def generator(
    params: PyTree, z: Float[Array, "batch latent"], small: tuple[int, int, int]
) -> Float[Array, "batch height width channels"]:
    """(B, latent) -> (B, H, W, channels)."""
    x = linear(params["first"], z).reshape(z.shape[0], *small)
    x = doubled(params["up1"], relu(layer_norm(params["norm1"], x)))
    x = relu(layer_norm(params["norm2"], conv2d(params["conv1"], x)))
    return sigmoid(conv2d(params["out"], relu(doubled(params["up2"], x))))


def doubled(
    params: PyTree, x: Float[Array, "batch height width dim"]
) -> Float[Array, "batch double_height double_width out_dim"]:
    """Turn each pixel into 2 x 2 pixels: (B, H, W, C) -> (B, 2 H, 2 W, C'). It is a transposed
    convolution of stride 2 without overlaps, computed as a product of matrices."""
    batch, height, width, _ = x.shape
    x = linear(params, x).reshape(batch, height, width, 2, 2, -1).swapaxes(2, 3)
    return x.reshape(batch, 2 * height, 2 * width, -1)


def discriminator_init(key: Array, small: tuple[int, int, int], channels: int) -> PyTree:
    k1, k2, k3 = jax.random.split(key, 3)
    height, side, wide = small
    return {
        "conv1": conv2d_init(k1, channels, wide // 2, 4),
        "conv2": conv2d_init(k2, wide // 2, wide, 4),
        "out": linear_init(k3, height * side * wide, 1),
    }


def discriminator(
    params: PyTree, x: Float[Array, "batch height width channels"]
) -> Float[Array, "batch"]:
    """(B, H, W, channels) -> (B,)."""
    x = leaky_relu(conv2d(params["conv1"], x, stride=2), 0.2)
    x = leaky_relu(conv2d(params["conv2"], x, stride=2), 0.2)
    return linear(params["out"], x.reshape(x.shape[0], -1))[:, 0]
