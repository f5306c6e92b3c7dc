"""The grammar of the random models: rules(draw) -> (an expression, its cost).

A cost of 0 means that the expression only moves numbers; see `Draw.level`.
"""

import re

INPUTS = {  # {name: (shape of an example, dtype, lowest number, end)}; floats are divided by 4
    "x": ((4, 6), "float32", -12, 13),
    "image": ((5, 6, 4), "float32", -12, 13),
    "row": ((6,), "float32", -12, 13),
    "ids": ((3,), "int32", -6, 8),
    "small": ((4,), "uint8", 0, 7),
    "signed": ((4, 2), "int8", -9, 9),
    "mask": ((4, 6), "bool", 0, 2),
}

ROUNDING = """
    {f} + {f2}
    {f} * {f2}
    {f} / (1 + jnp.abs({f2}))
    jnp.tanh({f})
    jnp.sin({f})
    jnp.cos({f})
    jnp.exp(-jnp.abs({f}))
    jnp.expm1(jnp.tanh({f}))
    jnp.log1p(jnp.abs({f}))
    jnp.log(jnp.abs({f}) + 0.5)
    jnp.sqrt(jnp.abs({f}) + 0.25)
    jnp.cbrt({f})
    lax.rsqrt(jnp.abs({f}) + 1)
    lax.erf({f})
    lax.erfc(jnp.tanh({f}))
    lax.erf_inv(0.9 * jnp.tanh({f}))
    jnp.arctan({f})
    jnp.arctan2({f}, {f2} * {f2} + 1)
    jnp.arcsinh({f})
    jnp.arccosh(2 + jnp.abs({f}))
    jnp.arctanh(0.5 * jnp.tanh({f}))
    jnp.sinh(jnp.tanh({f}))
    jnp.cosh(jnp.tanh({f}))
    jnp.exp2(jnp.tanh({f}))
    jnp.power(jnp.abs({f}) + 1, 1.5)
    jnp.tanh({f}) ** 3
    (jnp.abs({f}) + 1) ** -2
    jnp.logaddexp({f}, {f2})
    jnp.hypot({f}, 1.0)
    jnp.sinc(jnp.tanh({f}))
    jnp.reciprocal(1 + jnp.square({f}))
    jnp.mean({f}, axis={any})
    jnp.mean({f}, axis=(0, {axis}))
    jnp.var({f}, axis={axis})
    jnp.std({f}, axis={axis}, keepdims=True)
    jnp.average({f}, axis={axis}, weights=jnp.arange(1.0, 1 + {f}.shape[{axis}]))
    jnp.linalg.norm({f}, axis={axis})
    jnp.cumprod(jnp.tanh({f}), axis={axis})
    lax.cumlogsumexp({f}, axis={axis})
    jax.nn.logsumexp({f}, axis={any})
    jax.nn.softmax({f}, axis={any})
    jax.nn.log_softmax({f}, axis={axis})
    jax.nn.standardize({f}, axis={axis})
    jax.nn.gelu({f})
    jax.nn.gelu({f}, approximate=False)
    jax.nn.silu({f})
    jax.nn.elu({f})
    jax.nn.selu({f})
    jax.nn.celu({f}, 0.5)
    jax.nn.softplus({f})
    jax.nn.glu({f}, axis={axis})
    jax.nn.relu6({f})
    jax.nn.leaky_relu({f})
    jax.nn.hard_swish({f})
    jax.nn.mish({f})
    jax.nn.squareplus({f})
    activations.gelu({f})
    activations.silu({f})
    activations.hard_swish({f})
    activations.softmax({f})
    activations.softplus({f})
    activations.elu({f}, 0.7)
    activations.leaky_relu({f}, 0.2)
    jnp.interp({f}, jnp.array([-2.0, 0.0, 1.0]), jnp.array([0.0, 1.0, -1.0]))
    jnp.polyval(jnp.array([0.5, -1.0, 2.0]), jnp.tanh({f}))
    jnp.abs(jnp.fft.rfft({f}))
    jnp.fft.fft({f}).real
    jnp.fft.ifft({f}).imag
    jnp.fft.rfft({f}, axis={axis}).imag
    jnp.fft.irfft(jnp.fft.rfft({f}) * 0.5)
    jnp.abs(jnp.fft.rfft2({f}))
    jnp.fft.fftshift({f})
    jnp.outer({f}.mean(0), {f2}.mean(0))
    {f} @ {f2}.swapaxes(-1, -2)
    jnp.einsum("...ij,...kj->...ik", {f}, {f2})
    jnp.einsum("...i,...i->...", {f}, {f2})
    jnp.einsum("i...,i...->i", {f}, {f2})
    jnp.einsum("i...,j...->ij", {f}, {f2})
    jnp.tensordot({f}, {f2}, [(0,), (0,)])
    jnp.tensordot({f}, {f2}, [({f}.ndim - 1,), ({f}.ndim - 1,)])
    jnp.kron({f}.mean(0).ravel(), jnp.arange(3.0))
    jnp.cross({f}[..., :3], {f2}[..., 1:4])
    jnp.vander({f}.ravel()[:4] / 3, 3)
    jax.image.resize({f}, (*{f}.shape[:-1], 5), "linear")
    jax.image.resize({f}, (*{f}.shape[:-1], 3), "nearest")
    jax.grad(lambda c: jnp.sum(jnp.tanh(c) * jnp.cos({f2})))({f})
    jax.grad(lambda c: jnp.sum(jax.nn.softmax(c)[..., 0]))({f})
    jax.grad(lambda c: jnp.sum(jnp.max(c, -1)))({f})
    jax.checkpoint(lambda c: jnp.sin(c) * c)({f})
    {i} / 7
    {b} * 0.3
    jnp.var({i} * 0.1)[None]
    jnp.where({b}, 0.3, jnp.cos(1.0))
"""


def templates(text, cost):
    return [template(line.strip(), cost) for line in text.strip().splitlines()]


def template(text, cost):
    """The rule for an expression with slots."""

    def rule(d):
        filled, first = {}, None
        names = list(dict.fromkeys(re.findall(r"\{(\w+)\}", text)))
        for slot in sorted(names, key=lambda name: (len(name) > 1, name)):  # values come first
            if len(slot) == 1 and slot not in "km":
                first = filled[slot] = value_of(d, slot)
            elif len(slot) == 2:
                filled[slot] = d.value(like=filled[slot[0]], exact=slot[0] == "e")
            else:
                filled[slot] = number_of(d, slot, first)
        return re.sub(r"\{(\w+)\}", lambda match: str(filled[match[1]]), text), cost

    rule.__name__ = text
    return rule


def value_of(d, slot):
    if slot in "nu":
        wanted = ("int32",) if slot == "n" else ("int8", "uint8")
        return d.value("iu", rank=1, where=lambda aval: aval.dtype.name in wanted)
    return d.value({"e": "f", "i": "iu", "a": "fiub"}.get(slot, slot), rank=1, exact=slot == "e")


def number_of(d, slot, first):
    if slot == "ones":
        return str((1,) * (len(d.sizes(first)) - 1))
    if slot == "last":
        return d.sizes(first)[-1] or 1
    return d.axis(first, free=slot == "any") if slot in ("axis", "any") else d.number(1, 3)
