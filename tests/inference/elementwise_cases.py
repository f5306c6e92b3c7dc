"""Elementwise ops of jax.numpy and jax.lax: functions of a batch of examples."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

EDGES = np.array([-1, -0.25, 0.5, 1], np.float32)

LAX = """
    abs neg sign exp exp2 sin cos sinh cosh erf logistic tan atan asinh ceil floor cbrt square
"""

UNARY = {
    **{name: getattr(lax, name) for name in LAX.split()},
    "lax.tanh": lax.tanh,
    "erfc": lambda x: (lax.erfc(x), 1e4 * lax.erfc(jnp.abs(x) + 2)),
    "erf_inv": lambda x: lax.erf_inv(jnp.tanh(x)),
    "asin": lambda x: lax.asin(jnp.tanh(x)),
    "acos": lambda x: lax.acos(jnp.tanh(x)),
    "atanh": lambda x: lax.atanh(jnp.tanh(x)),
    "acosh": lambda x: lax.acosh(1 + jnp.abs(x)),
    "log": lambda x: lax.log(jnp.abs(x)),
    "sqrt": lambda x: lax.sqrt(jnp.abs(x)),
    "rsqrt": lambda x: lax.rsqrt(jnp.abs(x)),
    "expm1": lambda x: (lax.expm1(x), 1e6 * lax.expm1(1e-6 * x)),
    "log1p": lambda x: (lax.log1p(jnp.abs(x)), 1e6 * lax.log1p(1e-6 * x)),
    "round": lambda x: (jnp.round(x * 2), lax.round(x * 2)),  # half to even, half away from zero
    "round of odd numbers": lambda x: lax.round(
        jnp.where(x > 0, jnp.float32(8388609), jnp.float32(-0.49999997))
    ),
    "NaN as an integer": lambda x: (jnp.log(x).astype(jnp.int32), jnp.log(x).astype(jnp.uint8)),
    "is_finite": lambda x: jnp.isfinite(1 / jnp.floor(x)),
    "isnan": lambda x: jnp.isnan(jnp.log(x)),
    "integer_pow": lambda x: (x**2, x**3, x**4, x**-1, x**-2, jnp.log(x) ** 0),
    "integer_pow that wraps": lambda x: (
        (300 * jnp.sign(x)).astype(jnp.int32) ** 4,
        (100 * jnp.abs(jnp.sign(x))).astype(jnp.uint8) ** 5,
    ),
    "reduce_precision": lambda x: [
        lax.reduce_precision(x, *bits) for bits in [(8, 23), (8, 7), (5, 10)]
    ],
    "clamp": lambda x: jnp.clip(x, -0.5, 0.7),
    "searchsorted": lambda x: (
        jnp.searchsorted(EDGES, x),
        jnp.searchsorted(jnp.sort(x[0]), jnp.log(x), side="right"),
    ),
    "searchsorted, compare_all": lambda x: (
        jnp.digitize(x, EDGES),
        jnp.searchsorted(jnp.log(x[0]), jnp.log(x), method="compare_all"),
    ),
    "interp": lambda x: jnp.interp(x, EDGES, EDGES**2),
    "nan_to_num": lambda x: jnp.nan_to_num(jnp.log(x)),
    "jax.nn.relu": jax.nn.relu,
    "jax.nn.gelu": lambda x: (jax.nn.gelu(x), jax.nn.gelu(x, approximate=False)),
    "jax.nn.silu": jax.nn.silu,
    "jax.nn.elu": jax.nn.elu,
    "jax.nn.softmax": lambda x: (jax.nn.softmax(x), jax.nn.log_softmax(x)),
    "jax.nn.softplus": jax.nn.softplus,
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=-1),
    "lgamma": lax.lgamma,
    "digamma": lax.digamma,
    "nextafter": lambda x: jnp.nextafter(x, 0.0),
    "bitcast": lambda x: lax.bitcast_convert_type(x, jnp.int32),
    "random numbers from a constant key": lambda x: (
        x + jax.random.normal(jax.random.fold_in(jax.random.key(0), 7), (6,))
    ),
    "random numbers from a computed key": lambda x: jax.random.bernoulli(
        jnp.abs(x[0, :2]).astype(jnp.uint32), 0.5, (6,)
    ),
    "one_hot": lambda x: jax.nn.one_hot(jnp.argmax(x, 1), 6),
}

BINARY = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "rem": lambda x, y: lax.rem(5 * x, y),
    "mod": lambda x, y: jnp.mod(5 * x, y),
    "pow": lambda x, y: jnp.abs(x) ** y,
    "atan2": jnp.arctan2,
    "max": lambda x, y: jnp.maximum(x, jnp.log(y)),  # the nan of log(y) is kept
    "min": lambda x, y: jnp.minimum(x, jnp.log(y)),
    "comparisons": lambda x, y: (x < y, x <= y, x > y, x >= y, x == y, x != y),
    "logic": lambda x, y: ((x > 0) & (y > 0), (x > 0) | (y > 0), (x > 0) ^ (y > 0), ~(x > 0)),
    "where": lambda x, y: jnp.where(x > y, x, 2.0),
    "select by index": lambda x, y: lax.select_n(
        jnp.clip(jnp.round(x + 1), 0, 2).astype(int), x, y, x + y
    ),
    "logaddexp": jnp.logaddexp,
    "stop_gradient": lambda x, y: lax.stop_gradient(x) + y,
    "broadcasting": lambda x, y: x[:, :, None] + y[:, None, :] + jnp.arange(6.0),
    "outer broadcasting": lambda x, y: x[:, None] - y[None],  # (B, B, 6)
}

INTEGERS = {
    "integer arithmetic": lambda i, j: (
        i + j,
        i - j,
        i * j,
        -i,
        jnp.abs(i),
        jnp.sign(i),
        i**3,
        i**0,
    ),
    "integer division": lambda i, j: (lax.div(i, j), i // j),  # one truncates, one floors
    "integer division by 0": lambda i, j: (i // (j - 3), lax.rem(i, j - 3), jnp.gcd(i, j)),
    "leading zeros": lambda i, j: (lax.clz(i), lax.clz(j.astype(jnp.uint8))),
    "bitcast to unsigned": lambda i, j: lax.bitcast_convert_type(i, jnp.uint32),
    "bytes along axes": lambda i, j: (
        jnp.pad(i.astype(jnp.uint8), ((0, 0), (1, 2)), mode="edge"),
        jnp.pad(j.astype(jnp.int8), ((0, 0), (1, 2)), constant_values=3),
        jnp.cumsum(i.astype(jnp.uint8), axis=1),
        lax.population_count(i.astype(jnp.uint8)),
    ),
    "comparison of booleans": lambda i, j: ((i > 0) < (j > 0), (i > 0) >= (j > 0)),
    "selection of booleans": lambda i, j: (
        jnp.where(i > 0, i > 3, j > 0),
        jnp.where(i > 0, i.astype(jnp.int8), j.astype(jnp.int8)),
    ),
    "integer remainder": lambda i, j: (lax.rem(i, j), i % j),
    "integer comparisons": lambda i, j: (i < j, i == j),
    "integer limits": lambda i, j: (jnp.maximum(i, j), jnp.minimum(i, j), jnp.clip(i, -3, 3)),
    "bits": lambda i, j: (i & j, i | j, i ^ j, ~i),
    "shifts": lambda i, j: (i << 3, i >> 2, i.astype(jnp.uint32) >> 3),
    "shift_right_logical": lambda i, j: lax.shift_right_logical(i, 2),
    "population_count": lambda i, j: lax.population_count(i),
    "conversion of floats out of range": lambda i, j: [
        (i * 1e9).astype(t) for t in ("int8", "uint8", "int16", "int32", "uint32")
    ],
    "small integers": lambda i, j: (
        i.astype(jnp.uint8) * 7,
        i.astype(jnp.int8) + j.astype(jnp.int8),
    ),
    "conversions": lambda i, j: (
        i / j,
        (i * 0.37).astype(int),
        i.astype(bool),
        (i > 0).astype(jnp.float32) * 0.5,
    ),
    "integer reductions": lambda i, j: (i.sum(1), i.max(1), i.prod(1), i.argmax(1)),
    "integer reductions that wrap": lambda i, j: [
        result
        for x in (i * 2**28, (i * 7**9).astype(jnp.uint32), (i * 31).astype(jnp.int16))
        for result in (x.sum(1, dtype=x.dtype), x.prod(1, dtype=x.dtype), lax.cummax(x, axis=1))
    ],
    "boolean reductions": lambda i, j: ((i > 0).any(1), (i > -9).all(1)),
    "integer product": lambda i, j: i @ jnp.arange(12).reshape(6, 2),
    "integer sort": lambda i, j: (jnp.sort(i, axis=1), jnp.argsort(i % 3, axis=1)),
    "integer cumsum": lambda i, j: (jnp.cumsum(i, axis=1), lax.cummax(i, axis=1)),
    "half precision": lambda i, j: (i.astype(jnp.bfloat16) * 0.5 + 1).astype(jnp.float32),
}
