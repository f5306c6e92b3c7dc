"""Rotary positions (Su et al., 2021): pairs of features are turned by an angle that grows with the
position, so that a product of a query and a key depends on their distance only."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# (cosines, sines)
Angles = tuple[Float[Array, "*batch time 1 pairs"], Float[Array, "*batch time 1 pairs"]]


def rotation(
    positions: Int[Array, "*batch time"], dim: int, base: float | Array = 10_000.0
) -> Angles:
    """(cosines, sines) of the angles of positions, (..., T), for heads of `dim` features; both are
    (..., T, 1, dim / 2)."""
    speeds = base ** (-jnp.arange(0, dim, 2) / dim)
    angles = positions[..., None, None] * speeds
    return jnp.cos(angles), jnp.sin(angles)


def rotary(
    x: Float[Array, "batch time heads dim"], angles: Angles
) -> Float[Array, "batch time heads dim"]:
    """x, (B, T, H, D), turned by `rotation`; feature i is paired with feature i + D / 2."""
    cos, sin = angles
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
