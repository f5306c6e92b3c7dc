"""The network of airbench94 (Jordan, 2024), which learns CIFAR-10 in seconds on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from model.base import Model
from model.checks import check_image, check_widths
from model.layers.activations import gelu
from model.layers.conv import conv2d, conv2d_init
from model.layers.initializers import fans, uniform_with_variance
from model.layers.linear import linear, linear_init
from model.layers.norm import batch_norm, batch_norm_init
from model.layers.pool import global_max_pool, max_pool
from utils.forms import Count, Positive, checked

NORM = {"momentum": 0.6, "eps": 1e-12}
EPS = 5e-4  # added to the variances of patches
IMAGES = 500  # how many images have their patches in memory at a time


@checked
def airbench(
    input_shape: tuple[int, ...],
    num_classes: Count,
    widths: tuple[Count, ...] = (64, 256, 256),
    patch: Count = 2,
    scale: Positive = 1 / 9,
) -> Model:
    """A convolution that whitens patches of the image; then for each width two convolutions with
    max pooling after the first; then the maximum over all pixels and a linear layer, times `scale`.

    A new run takes the whitening from its training images; the recipe must freeze `whiten/weight`
    and the scales of the norms, as configs/cifar10_94.json does.
    """
    check_image(input_shape)
    check_widths("widths", widths)
    smallest = patch - 1 + 2 ** len(widths)
    if min(input_shape[:2]) < smallest:
        raise ValueError(
            f"input_shape: {len(widths)} widths need images of at least {smallest}x{smallest} "
            f"pixels, got {tuple(input_shape)}"
        )
    numbers = patch**2 * input_shape[-1]  # in a patch

    def init(key: Array) -> tuple[PyTree, PyTree]:
        whiten_key, head_key, *keys = jax.random.split(key, len(widths) + 2)
        whiten = conv2d_init(whiten_key, input_shape[-1], 2 * numbers, patch, init=narrow_uniform)
        dims = zip(keys, (2 * numbers, *widths), widths, strict=False)
        blocks, states = zip(*(block_init(*dim) for dim in dims), strict=True)
        head = linear_init(head_key, widths[-1], num_classes, bias=False, init=narrow_uniform)
        params = {"whiten": whiten, "blocks": list(blocks), "head": head}
        return params, {"blocks": list(states)}

    def fit(params: PyTree, state: PyTree, x: np.ndarray) -> tuple[PyTree, PyTree]:
        whiten = params["whiten"] | {"weight": jnp.asarray(whitening(x, patch), jnp.float32)}
        return params | {"whiten": whiten}, state

    def apply(
        params: PyTree,
        state: PyTree,
        x: Float[Array, "batch height width channels"],
        *,
        train: bool = False,
        key: Array | None = None,
    ) -> tuple[Float[Array, "batch classes"], PyTree]:
        x, states = gelu(conv2d(params["whiten"], x, padding="VALID")), []
        for block, old in zip(params["blocks"], state["blocks"], strict=True):
            x, new = block_apply(block, old, x, train)
            states.append(new)
        return scale * linear(params["head"], global_max_pool(x)), {"blocks": states}

    return Model(init, apply, fit=fit)


def block_init(key: Array, in_dim: int, out_dim: int) -> tuple[PyTree, PyTree]:
    k1, k2 = jax.random.split(key)
    norm, state = batch_norm_init(out_dim)
    first = conv2d_init(k1, in_dim, out_dim, 3, bias=False, init=identity_first)
    second = conv2d_init(k2, out_dim, out_dim, 3, bias=False, init=identity_first)
    params = {"first": first, "norm1": norm, "second": second, "norm2": norm}
    return params, {"norm1": state, "norm2": state}


def block_apply(
    params: PyTree, state: PyTree, x: Float[Array, "batch height width in_dim"], train: bool
) -> tuple[Float[Array, "batch half_height half_width out_dim"], PyTree]:
    """(B, H, W, in) -> (B, H/2, W/2, out), and the statistics."""
    x = max_pool(conv2d(params["first"], x), 2)
    x, norm1 = batch_norm(params["norm1"], state["norm1"], x, train=train, **NORM)
    x = conv2d(params["second"], gelu(x))
    x, norm2 = batch_norm(params["norm2"], state["norm2"], x, train=train, **NORM)
    return gelu(x), {"norm1": norm1, "norm2": norm2}


def narrow_uniform(key: Array, shape: tuple[int, ...]) -> Array:
    """Uniform up to 1 / sqrt(fan_in), the default of PyTorch."""
    return uniform_with_variance(key, shape, 1 / (3 * fans(shape)[0]))


def identity_first(key: Array, shape: tuple[int, ...]) -> Array:
    """The first outputs of a convolution are its inputs, the other weights are random."""
    height, width, in_dim, out_dim = shape
    weight, same = narrow_uniform(key, shape), min(in_dim, out_dim)
    centre = jnp.zeros((height, width, in_dim, same)).at[height // 2, width // 2]
    return weight.at[..., :same].set(centre.set(jnp.eye(in_dim, same)))


def whitening(x: np.ndarray, size: int) -> np.ndarray:
    """Weights (size, size, channels, 2n) of a convolution whose first n outputs are uncorrelated
    over the patches of the images x, with a mean square of about 1, and whose others are minus
    these. They are the eigenvectors of the patches' second moments, the largest first."""
    x = np.asarray(x, np.float64)
    numbers, moments, count = size**2 * x.shape[-1], 0.0, 0
    for start in range(0, len(x), IMAGES):
        windows = np.lib.stride_tricks.sliding_window_view(
            x[start : start + IMAGES], (size, size), axis=(1, 2)
        )  # (B, H, W, C, size, size)
        patches = np.moveaxis(windows, 3, -1).reshape(-1, numbers)
        moments, count = moments + patches.T @ patches, count + len(patches)
    values, vectors = np.linalg.eigh(moments / count)
    scaled = (vectors / np.sqrt(values + EPS))[:, ::-1]
    return np.concatenate([scaled, -scaled], 1).reshape(size, size, -1, 2 * numbers)
