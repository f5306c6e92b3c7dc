"""Templates of expressions that compute without rounding; zoo_rules.py fills their slots."""

# Slots: f float, e float without rounding, i integer, n int32, b bool, u uint8 or int8, a anything;
# f2 another value of the same shape and dtype as f; axis, any (axis, of which the size may be
# free), last (size), ones (for all axes but the last), and the numbers k and m from 1 to 3.
MOVES = """
    jnp.transpose({a})
    jnp.swapaxes({a}, 0, {axis})
    jnp.moveaxis({a}, {axis}, 0)
    jnp.flip({a}, {any})
    {a}[..., ::-1]
    {a}[..., 1:]
    {a}[::2]
    {a}[:, ::-2]
    {a}[..., None]
    {a}[-1]
    {a}.ravel()
    {a}.ravel(order="F")
    {a}.reshape({a}.shape[0], -1)
    {a}.reshape({a}.shape[0], -1, order="F")
    {a}.reshape(-1, {last})
    lax.reshape({a}, ({a}.size,), dimensions=tuple(range({a}.ndim))[::-1])
    lax.reshape({a}, ({a}.size,), (*range(1, {a}.ndim), 0))
    jnp.concatenate([{a}, {a2}], {any})
    jnp.stack([{a}, {a2}], {axis})
    jnp.repeat({a}, {k}, axis={axis})
    jnp.tile({a}, ({k}, 1))
    jnp.roll({a}, {k}, {any})
    jnp.roll({a}, -{k}, {axis})
    jnp.pad({a}, [(0, 0)] * ({a}.ndim - 1) + [({k}, {m})], mode="edge")
    jnp.pad({a}, [(0, 0)] * ({a}.ndim - 1) + [({k}, 1)], mode="reflect")
    jnp.pad({a}, [(0, 0)] * ({a}.ndim - 1) + [({k}, {m})], mode="wrap")
    jnp.pad({a}, [({k}, 0)] + [(0, 0)] * ({a}.ndim - 1))
    lax.pad({a}, jnp.zeros((), {a}.dtype), [(0, 0, 0)] * ({a}.ndim - 1) + [(-1, {k}, {m})])
    lax.pad({a}, jnp.ones((), {a}.dtype), [(0, 0, 0)] * ({a}.ndim - 1) + [({k}, -2, 1)])
    jnp.broadcast_to({a}[None], (2, *{a}.shape))
    jnp.expand_dims({a}, {axis})
    jnp.split({a}, 2, axis={axis})[1]
    jnp.array_split({a}, 3, axis={axis})[0]
    jnp.rot90({a}, {k}, axes=(0, {axis}))
    jnp.tril({a})
    jnp.triu({a}, 1)
    jnp.diagonal({a}, axis1=-2, axis2=-1)
    jnp.where({b}, {b}, ~{b})
    jnp.where({a} > 1, {a}, {a2})
    jnp.where(jnp.arange({a}.shape[-1]) % 2 == 0, {a}, 0)
    lax.rev({a}, (0, {axis}))
    jax.nn.one_hot({n}, 5, axis={any})
    lax.broadcast_in_dim({a}, (3, *{a}.shape), tuple(range(1, {a}.ndim + 1)))
    lax.expand_dims({a}, (1, -1))
    {e}.at[:, 0].set({k})
    {e}.at[..., 1:3].set({m})
    {e}.at[-1].set(0.5)
"""
EXACT = """
    jnp.maximum({e}, {e2})
    jnp.minimum({e}, 0.5)
    jnp.clip({e}, -0.5, {k})
    jnp.abs({e})
    -{e}
    jnp.sign({e})
    jnp.floor({e})
    jnp.ceil({e})
    jnp.round({e})
    jnp.trunc({e})
    lax.round({e})
    jnp.fmod({e}, 2.0)
    jnp.remainder({e}, 1.5)
    lax.rem({e}, 1.25)
    jnp.floor_divide({e}, 0.5)
    jnp.sort({e}, axis={any})
    jnp.sort({e}, axis={any}, descending=True)
    jnp.median({e}, axis={axis})
    jnp.max({e}, axis={any})
    jnp.min({e}, axis=({any},), keepdims=True)
    jnp.quantile({e}, 0.5, axis={axis})
    lax.top_k({e}, 2)[0]
    lax.top_k({e}, {last})[0]
    lax.cummax({e}, axis={axis}, reverse=True)
    lax.cummin({e}, axis={any})
    jnp.nan_to_num({e} / {e2})
    jnp.heaviside({e}, 0.5)
    jnp.where(jnp.isfinite(1 / {e}), {e}, 0.25)
    jnp.ptp({e}, axis={axis})
    jnp.select([{e} > 1, {e} < -1], [{e}, {e2}], 0.0)
    {e}.astype(jnp.bfloat16).astype(jnp.float32)
    ({e}.astype(jnp.float16) * 0.5).astype(jnp.float32)
    lax.reduce_precision({e}, 5, 10)
"""
SUMS = """
    {e} + {e2}
    {e} - {e2}
    {e} * 0.5
    {e} + jnp.arange({last})
    {e} - {e}.sum({any}, keepdims=True)
    jnp.sum({e}, axis={any})
    jnp.sum({e}, axis=(0, {axis}))
    jnp.cumsum({e}, axis={any})
    lax.cumsum({e}, axis={axis}, reverse=True)
    jnp.trace({e}, axis1=-2, axis2=-1)
    jnp.diff({e}, axis={axis})
    jnp.ediff1d({e})
    jax.vmap(lambda r: jnp.convolve(r.ravel(), jnp.array([1.0, 2.0, 0.5]), mode="same"))({e})
    lax.associative_scan(jnp.add, {e}, axis={axis})
    jnp.square(jnp.clip({e}, -2, 2))
    lax.reduce_window({e}, 0.0, lax.add, {ones} + (2,), {ones} + (1,), "SAME")
    lax.reduce_window({e}, -jnp.inf, lax.max, {ones} + (3,), {ones} + (2,), "VALID")
    lax.reduce_window({e}, jnp.inf, lax.min, {ones} + (2,), {ones} + (1,), "SAME")
    jax.ops.segment_sum({e}, jnp.arange({e}.shape[0]) % 2, 3)
    jnp.clip(jax.ops.segment_max({e}, jnp.arange({e}.shape[0]) % 2, 2), -9, 9)
    jnp.clip(jax.ops.segment_min({e}, jnp.arange({e}.shape[0]) // 2, 2), -9, 9)
    jax.vmap(lambda r: jax.ops.segment_prod(r, jnp.arange(r.shape[0]) // 3, 2))({e})
    jnp.zeros(7).at[{n} % 7].add(1.0)
    jnp.zeros((4, 5), {e}.dtype).at[{n} % 4, {n2} % 5].max(1.5)
"""
INTEGERS = """
    ({e} * 2).astype(jnp.int32)
    {e}.astype(jnp.int8)
    jnp.abs({e}).astype(jnp.uint8)
    jnp.argmax({e}, axis={any})
    jnp.argmin({e}, axis={axis}, keepdims=True)
    jax.vmap(jnp.argmax)({e})
    jax.vmap(lambda r: jnp.argmin(r, axis=0))({e})
    jnp.argsort({e}, axis={any})
    jnp.argsort({e}, axis={axis}, descending=True)
    lax.top_k({e}, 1)[1]
    jnp.searchsorted(jnp.array([-1.0, 0.0, 0.25, 2.0]), {e})
    jnp.digitize({e}, jnp.array([-1.0, 0.0, 1.0]))
    jnp.count_nonzero({e}, axis={any})
    {i} + {i2}
    {i} * 3 - {i2}
    {i} * {i2}
    {i} // 3
    {i} % 4
    lax.div({i}, {i2} | 1)
    lax.rem({i}, {i2} | 1)
    -{i}
    ~{i}
    jnp.abs({i})
    jnp.sign({i})
    {i} & {i2}
    {i} | 5
    {i} ^ {i2}
    {i} << 2
    {i} >> 1
    lax.shift_right_logical({i}, jnp.ones((), {i}.dtype))
    lax.population_count({i})
    lax.clz({i})
    {i}.sum({any})
    {i}.max({any})
    {i}.prod({axis})
    {i}.min({axis})
    {i} ** 2
    jnp.minimum({i}, {i2})
    jnp.clip({i}, 0, 3)
    jnp.cumsum({i}, axis={axis})
    jnp.cumprod({i}, axis={axis})
    lax.cummax({i}, axis={any})
    jnp.sort({i}, axis={any})
    jnp.argsort({i}, axis={any})
    jnp.argmax({i}, axis={axis})
    jnp.argmin({i}, axis={any})
    {i}.astype(jnp.int32)
    {i}.astype(jnp.uint8)
    {i}.astype(jnp.int16)
    {i}.astype(jnp.uint32)
    {b}.astype(jnp.int32)
    {b}.astype(jnp.uint8)
    {b}.sum({any})
    jnp.cumsum({b}, axis={axis})
    jnp.argmax({b}, axis={axis})
    lax.bitcast_convert_type({e}, jnp.int32)
    lax.bitcast_convert_type({n}, jnp.uint32)
    lax.bitcast_convert_type({u}, jnp.int8)
    jnp.bincount({n}.ravel() % 5, length=5)
    jnp.where({i} > 1, {i}, {i2})
    jnp.arange({a}.shape[0])
    jnp.cumsum(jnp.ones_like({i}), axis={axis})
    jnp.gcd({i}, {i2})
    jnp.bitwise_count({i})
    jnp.take({i}, {n}, axis={axis}, mode="wrap")
    jax.lax.scan(lambda c, r: (c + r, c * r), {i}[0], {i})[1]
    jnp.dot({i}.reshape(-1, {last}), jnp.arange({last}))
    jnp.nonzero({e} > 0, size=4, fill_value=0)[0]
    jnp.unique({n}, size=4, fill_value=9)
    jnp.packbits({b}, axis={axis})
    jnp.unpackbits({u}, axis={axis})
    jax.vmap(lambda r: jnp.zeros(5, int).at[r.ravel() % 5].add(1))({n})
    lax.reduce_and({n}, (0,))
    lax.reduce_or({n}, ({any},))
    lax.reduce_xor({n}, ({axis},))
"""
BOOLEANS = """
    {e} > {e2}
    {e} <= 0.25
    {e} == {e2}
    {i} == {i2}
    {i} != 2
    {i} >= {i2}
    ~{b}
    {b} & {b2}
    {b} | {b2}
    {b} ^ {b2}
    {b} > {b2}
    {b}.any({any})
    {b}.all({axis})
    jnp.isfinite(1 / {e})
    jnp.isnan(jnp.log({e}))
    jnp.isinf(1 / {e})
    jnp.isclose({e}, {e2})
    jnp.signbit({e})
    lax.reduce_xor({b}, ({any},))
    {i}.astype(bool)
    {e}.astype(bool)
    jnp.sort({b}, axis={axis})
    jnp.flip({b}, {any})
    jnp.isin({n}, jnp.array([1, 3, -2]))
    lax.cond({e}.sum() > 0, lambda c: c > 0, lambda c: c < 1, {e2})
"""
