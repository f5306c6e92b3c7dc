"""The U-net of diffusion models (Ho et al., 2020): from a noisy image, the time that says how noisy
it is, and perhaps a class, to an image of the same shape."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from model.base import Model
from model.checks import Depth, check_image, check_widths
from model.layers.activations import silu
from model.layers.attention import attention, attention_init
from model.layers.conv import conv2d, conv2d_init
from model.layers.dropout import dropout as drop
from model.layers.dropout import split_key
from model.layers.embedding import embedding, embedding_init
from model.layers.initializers import normal, zeros
from model.layers.linear import linear, linear_init
from model.layers.norm import group_norm, group_norm_init
from utils.forms import Count, CountOrZero, Fraction, checked


@checked
def unet(
    input_shape: tuple[int, ...],
    num_classes: CountOrZero,
    widths: tuple[Count, ...] = (32, 64),
    depth: Depth = 1,
    attended: CountOrZero = 1,
    heads: Count = 4,
    groups: Count = 8,
    patch: Count = 1,
    dropout: Fraction = 0.0,
) -> Model:
    """`depth` residual blocks per width on the way down, where each later width halves the image
    size, and on the way up, where each block also reads the output of its counterpart.

    The blocks of the last `attended` widths and of the middle have attention with `heads` heads.
    The group norms have `groups` groups. The first width has 1 / `patch` of the image size. The
    model takes {"image": ..., "time": 0 to 1, "label": ...}; the label -1 means no class, and with
    `num_classes` 0 there is no label.
    """
    check_sizes(input_shape, widths, patch, groups, heads, attended)
    options = {"groups": groups, "heads": heads}

    def init(key: Array) -> tuple[PyTree, PyTree]:
        k1, k2, k3, k4, k5, k6 = jax.random.split(key, 6)
        channels, features = input_shape[-1], 4 * widths[0]
        params = {
            "stem": conv2d_init(k1, channels, widths[0], patch),
            "time": [linear_init(k2, widths[0], features), linear_init(k3, features, features)],
            **levels_init(k4, widths, depth, attended, features),
            "norm": group_norm_init(widths[0]),
            "head": linear_init(k5, widths[0], patch**2 * channels, init=zeros),
        }
        if num_classes:
            params["label"] = embedding_init(k6, num_classes + 1, features, init=normal(1.0))
        return params, {}

    def apply(
        params: PyTree,
        state: PyTree,
        x: dict[str, Array],
        *,
        train: bool = False,
        key: Array | None = None,
    ) -> tuple[Float[Array, "batch height width channels"], PyTree]:
        conditions = silu(embedded(params, x, num_classes))
        keys = iter(split_key(key, 2 * depth * len(widths) + 2))

        def block(
            own: PyTree, y: Float[Array, "batch height width in_dim"]
        ) -> Float[Array, "batch height width out_dim"]:
            rate = {"rate": dropout, "train": train}
            return block_apply(own, y, conditions, next(keys), **options, **rate)

        y, seen = conv2d(params["stem"], x["image"], stride=patch, padding="VALID"), []
        for level in params["down"]:
            y = conv2d(level["shrink"], y, stride=2, padding="VALID") if "shrink" in level else y
            for own in level["blocks"]:
                y = block(own, y)
                seen.append(y)
        first, attend, last = params["middle"]
        y = block(last, attention_block(attend, block(first, y), **options))
        for level in reversed(params["up"]):
            for own in level["blocks"]:
                y = block(own, jnp.concatenate([y, seen.pop()], axis=-1))
            y = unfolded(linear(level["enlarge"], y), 2) if "enlarge" in level else y
        y = silu(group_norm(params["norm"], y, groups=groups))
        return unfolded(linear(params["head"], y), patch), state

    return Model(init, apply, inputs=partial(inputs_of, tuple(input_shape), num_classes))


def inputs_of(input_shape: tuple[int, ...], num_classes: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of one example for the model."""
    spec = {"image": jax.ShapeDtypeStruct(input_shape, jnp.float32)}
    spec["time"] = jax.ShapeDtypeStruct((), jnp.float32)
    return spec | ({"label": jax.ShapeDtypeStruct((), jnp.int32)} if num_classes else {})


def check_sizes(
    input_shape: tuple[int, ...],
    widths: tuple[int, ...],
    patch: int,
    groups: int,
    heads: int,
    attended: int,
) -> None:
    check_image(input_shape)
    check_widths("widths", widths)
    side = patch * 2 ** (len(widths) - 1)
    if input_shape[0] % side or input_shape[1] % side:
        size = f"{input_shape[0]} x {input_shape[1]}"
        raise ValueError(
            f"widths: {len(widths)} widths and patch {patch} need an image whose sides are "
            f"multiples of {side}, got {size}; use fewer widths, or pad the images"
        )
    with_attention = widths[-max(attended, 1) :]
    for name, number, those in (("groups", groups, widths), ("heads", heads, with_attention)):
        for width in those:
            if width % number:
                raise ValueError(f"{name}: {number} must divide the width {width}")


def embedded(
    params: PyTree, x: dict[str, Array], num_classes: int
) -> Float[Array, "batch features"]:
    """(B, features): the time and the class, as the blocks get them."""
    if not isinstance(x, dict):
        fix = "the objective denoising_diffusion makes them of images"
        raise ValueError(f"x: needs a dict of image, time and label, got an array; {fix}")
    first, second = params["time"]
    y = sinusoids(x["time"], first["weight"].shape[0]).astype(x["image"].dtype)
    y = linear(second, silu(linear(first, y)))
    if num_classes:
        label = x["label"].astype(jnp.int32)  # an unsigned one would wrap around
        # The first row is for no class; a label past the last one makes NaN.
        y = y + embedding(params["label"], jnp.maximum(label, -1) + 1)
    return y


def sinusoids(time: Float[Array, "batch"], dim: int) -> Float[Array, "batch dim"]:
    """(B,) times from 0 to 1 -> (B, dim): sines and cosines of 1 to 1000 radians per unit."""
    half = dim // 2
    rates = 1000 * jnp.exp(-math.log(1000) / max(half - 1, 1) * jnp.arange(half))
    angles = time[:, None].astype(jnp.float32) * rates
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return jnp.pad(waves, ((0, 0), (0, dim - 2 * half)))


def levels_init(
    key: Array, widths: tuple[int, ...], depth: int, attended: int, features: int
) -> dict[str, list]:
    """The blocks of each width on the way down and up, and the blocks in the middle."""

    def block(key: Array, in_dim: int, width: int, with_attention: bool) -> PyTree:
        params = block_init(key, in_dim, width, features)
        if with_attention:
            params["attention"] = attention_block_init(jax.random.fold_in(key, 1), width)
        return params

    down, up, before, last = [], [], widths[0], widths[-1]
    for i, width in enumerate(widths):
        with_attention = i >= len(widths) - attended
        k1, k2, *keys = jax.random.split(jax.random.fold_in(key, i), 2 * depth + 2)
        sizes = [before] + [width] * (depth - 1)
        blocks = [block(k, n, width, with_attention) for k, n in zip(keys, sizes, strict=False)]
        down.append({"blocks": blocks})
        blocks = [block(k, 2 * width, width, with_attention) for k in keys[depth:]]
        up.append({"blocks": blocks})
        if i > 0:
            down[i]["shrink"] = conv2d_init(k1, before, before, 2)
            up[i]["enlarge"] = linear_init(k2, width, 4 * before)
        before = width
    k1, k2, k3 = jax.random.split(jax.random.fold_in(key, len(widths)), 3)
    middle = [block(k, last, last, False) for k in (k1, k2)]
    middle.insert(1, attention_block_init(k3, last))
    return {"down": down, "middle": middle, "up": up}


def block_init(key: Array, in_dim: int, out_dim: int, features: int) -> PyTree:
    k1, k2, k3, k4 = jax.random.split(key, 4)
    params = {
        "norm1": group_norm_init(in_dim),
        "conv1": conv2d_init(k1, in_dim, out_dim, 3),
        "condition": linear_init(k2, features, out_dim),
        "norm2": group_norm_init(out_dim),
        "conv2": conv2d_init(k3, out_dim, out_dim, 3, init=zeros),  # a block begins as its shortcut
    }
    return params | ({"shortcut": linear_init(k4, in_dim, out_dim)} if in_dim != out_dim else {})


def block_apply(
    params: PyTree,
    x: Float[Array, "batch height width in_dim"],
    conditions: Float[Array, "batch features"],
    key: Array | None,
    *,
    groups: int,
    heads: int,
    rate: float | Array,
    train: bool,
) -> Float[Array, "batch height width out_dim"]:
    """x, or a linear map of it, plus two convolutions of x, between which the conditions of the
    example are added to every pixel; then attention, if the block has it."""
    y = conv2d(params["conv1"], silu(group_norm(params["norm1"], x, groups=groups)))
    y = y + linear(params["condition"], conditions)[:, None, None]
    y = silu(group_norm(params["norm2"], y, groups=groups))
    y = conv2d(params["conv2"], drop(key, y, rate, train=train))
    x = (linear(params["shortcut"], x) if "shortcut" in params else x) + y
    if "attention" in params:
        x = attention_block(params["attention"], x, groups=groups, heads=heads)
    return x


def attention_block_init(key: Array, dim: int) -> PyTree:
    return {"norm": group_norm_init(dim), "attention": attention_init(key, dim)}


def attention_block(
    params: PyTree, x: Float[Array, "batch height width in_dim"], *, groups: int, heads: int
) -> Float[Array, "batch height width in_dim"]:
    """x plus attention among all of its pixels."""
    y = group_norm(params["norm"], x, groups=groups)
    y = y.reshape(y.shape[0], y.shape[1] * y.shape[2], y.shape[3])
    return x + attention(params["attention"], y, heads=heads).reshape(x.shape)


def unfolded(
    x: Float[Array, "batch height width in_dim"], factor: int
) -> Float[Array, "batch out_height out_width out_dim"]:
    """(B, H, W, factor * factor * C) -> (B, factor * H, factor * W, C): each pixel becomes a square
    of pixels, whose rows follow each other in its channels."""
    if factor == 1:
        return x
    batch, height, width, channels = x.shape
    rows = x.reshape(batch * height, width, factor, channels // factor).swapaxes(1, 2)
    return rows.reshape(batch, factor * height, factor * width, channels // factor**2)
