"""Formulas of normalizations and of attention; those of activations are in formulas.py."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
from jax import lax

from inference.lowering import foreign_ops
from inference.lowering.formulas import EPS, LOWEST, SCALE, Replacement
from inference.lowering.steps import Step, is_float
from inference.lowering.unify import contracted_sizes
from model.layers.norm import by_statistics, group_norm, layer_norm, rms_norm

# Normalizations.


def fast(x, mean, axes):
    return jnp.square(x).mean(axes, keepdims=True) - jnp.square(mean)


def centred(x, mean, axes):
    return jnp.square(x - mean).mean(axes, keepdims=True)


def positive(variance):
    return lambda *args: jnp.maximum(0.0, variance(*args))


VARIANCES = [centred, fast, positive(centred), positive(fast)]


def unscaled(x, inverse):
    return x * inverse


def scaled_last(x, inverse, scale):
    return x * inverse * scale


def scaled_together(x, inverse, scale):
    return x * (inverse * scale)


def scaled_first(x, inverse, scale):
    return x * scale * inverse


SCALINGS = [unscaled, scaled_last, scaled_together, scaled_first]


def inner_axes(x):
    """The axes of an image's pixels."""
    return tuple(range(1, x.ndim - 1))


def normalized(variance, scaling, shifted, axes):
    """The formula of a normalization over the last axis, or over `axes(x)`."""

    def formula(x, *params):
        over = axes(x)
        mean = x.mean(over, keepdims=True) if variance else 0.0
        spread = variance(x, mean, over) if variance else jnp.square(x).mean(over, keepdims=True)
        inverse = lax.rsqrt(spread + EPS)
        y = scaling(x - mean if variance else x, inverse, *params[: scaling is not unscaled])
        return y + params[-1] if shifted else y

    return formula


def params_of(scaling, shifted, args):
    """A norm's params, {"scale", "bias"}, from the arrays of a formula, which may lack both."""
    x, *params = args
    has_scale = scaling is not unscaled
    channels = x.shape[-1]
    scale, bias = params[0] if has_scale else 1, params[-1] if shifted else 0
    params = {"scale": scale, "bias": bias}
    return {
        key: jnp.broadcast_to(jnp.asarray(value, x.dtype), channels)
        for key, value in params.items()
    }


def with_channels(count, rank=1, axis=-1):
    """The `candidates` of a formula of an array of at least this rank and `count` vectors with one
    number for each of its channels."""

    def candidates(aval, part):
        if is_float(aval.dtype) and len(aval.shape) >= rank:
            channels = jax.ShapeDtypeStruct((aval.shape[axis],), aval.dtype)
            yield [aval, *[channels] * count], {}

    return candidates


def normalizations():
    """Layer, RMS and instance normalization, in all their forms."""
    needs = frozenset({"rsqrt", "reduce_sum"})
    for variance, scaling, shifted in product([*VARIANCES, None], SCALINGS, (True, False)):
        candidates = with_channels((scaling is not unscaled) + shifted)

        def norm(*args, eps, scaling=scaling, shifted=shifted):
            return layer_norm(params_of(scaling, shifted, args), args[0], eps=float(eps))

        def rms(*args, eps, scaling=scaling):
            return rms_norm(
                {"scale": params_of(scaling, False, args)["scale"]}, args[0], eps=float(eps)
            )

        formula = normalized(variance, scaling, shifted, lambda x: (-1,))
        if variance or not shifted:
            yield Replacement(needs, formula, norm if variance else rms, candidates)
        if not variance or scaling in (scaled_last, scaled_first):
            continue

        def by_instance(*args, eps, scaling=scaling, shifted=shifted):
            params, x = params_of(scaling, shifted, args), args[0]
            return group_norm(params, x, groups=x.shape[-1], eps=float(eps))

        candidates = with_channels((scaling is not unscaled) + shifted, rank=3)
        formula = normalized(variance, scaling, shifted, inner_axes)
        yield Replacement(needs, formula, by_instance, candidates)


def batch_norms():
    """By given statistics, with the channels last or first."""
    for axis, scaling, shifted in product((-1, 1), SCALINGS, (True, False)):

        def formula(x, mean, var, *params, axis=axis, scaling=scaling, shifted=shifted):
            beside = [-1 if i == axis % x.ndim else 1 for i in range(x.ndim)]
            mean, var, *params = (array.reshape(beside) for array in (mean, var, *params))
            y = scaling(x - mean, lax.rsqrt(var + EPS), *params[: scaling is not unscaled])
            return y + params[-1] if shifted else y

        def op(x, mean, var, *params, eps, axis=axis, scaling=scaling, shifted=shifted):
            x = jnp.moveaxis(x, axis, -1)
            params = params_of(scaling, shifted, (x, *params))
            channels = x.shape[-1:]
            statistics = {
                "mean": jnp.broadcast_to(mean, channels),
                "var": jnp.broadcast_to(var, channels),
            }
            return jnp.moveaxis(by_statistics(params, statistics, x, eps=float(eps)), -1, axis)

        count = 2 + (scaling is not unscaled) + shifted
        rank = 2 if axis == -1 else 3
        candidates = with_channels(count, rank, axis)
        yield Replacement(frozenset({"rsqrt", "sub"}), formula, op, candidates)


def repeated_statistics(variance, x, scale, bias, groups):
    """Flax's group normalization, which repeats the statistics of a group for its channels."""
    grouped = x.reshape(*x.shape[:-1], groups, -1)
    axes = (*range(1, x.ndim - 1), x.ndim)
    mean = grouped.mean(axes, keepdims=True)
    spread = variance(grouped, mean, axes)
    mean, spread = (
        jnp.repeat(y.reshape(x.shape[0], groups), grouped.shape[-1], axis=-1)
        for y in (mean, spread)
    )
    mean, spread = (jnp.expand_dims(y, inner_axes(x)) for y in (mean, spread))
    return (x - mean) * (lax.rsqrt(spread + EPS) * scale) + bias


def channels_last(variance, x, scale, bias, groups):
    grouped, axes = x.reshape(*x.shape[:-1], groups, -1), (*range(1, x.ndim - 1), x.ndim)
    return standardized(variance, grouped, axes).reshape(x.shape) * scale + bias


def channels_first(variance, x, scale, bias, groups):
    grouped = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    y = standardized(variance, grouped, tuple(range(2, x.ndim + 1))).reshape(x.shape)
    scale, bias = (jnp.expand_dims(array, range(1, x.ndim - 1)) for array in (scale, bias))
    return y * scale + bias


def standardized(variance, x, axes):
    mean = x.mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(variance(x, mean, axes) + EPS)


def group_norms():
    needs = frozenset({"rsqrt", "reduce_sum", "reshape"})
    layouts = (repeated_statistics, channels_last, channels_first)
    for layout, variance in product(layouts, VARIANCES):
        axis, place = (1, 1) if layout is channels_first else (-1, -2)

        def candidates(aval, part, axis=axis, place=place):
            if len(aval.shape) < 2:  # without channels
                return
            rank = len(aval.shape) + 1
            shapes = [x.outvars[0].aval.shape for x in part if x.primitive.name == "reshape"]
            for groups in {shape[place] for shape in shapes if len(shape) == rank}:
                if isinstance(groups, int) and aval.shape[axis] % groups == 0:
                    for arrays, _ in with_channels(2, 3, axis)(aval, part):
                        yield arrays, {"groups": groups}

        def op(x, scale, bias, *, groups, eps, axis=axis):
            params = params_of(scaled_last, True, (jnp.moveaxis(x, axis, -1), scale, bias))
            y = group_norm(params, jnp.moveaxis(x, axis, -1), groups=groups, eps=float(eps))
            return jnp.moveaxis(y, -1, axis)

        yield Replacement(needs, partial(layout, variance), op, candidates)


# Attention, without the projections before and after it.

LAYOUTS = {4: ("btnh", "bnth"), 3: ("bth",)}  # axes: batch, position, head, feature
MASKS = ((True, False), (True, True), (False, True), (False, False))  # (causal, a mask)


def attention_candidates(aval, part):
    """All ways to mask, bias and scale attention; the sizes are those of the model's products."""
    products = [eqn for eqn in part if eqn.primitive.name == "dot_general"]
    if not is_float(aval.dtype) or products[0] is not part[0]:
        return
    sizes = [n for eqn in products for n in contracted_sizes(Step("", eqn.params, steps(eqn)))]
    for layout in LAYOUTS.get(len(aval.shape), ()):
        size = dict(zip(layout, aval.shape, strict=True)) | {"s": sizes[0]}
        for size["c"] in dict.fromkeys(sizes[1:4]):
            arrays = [shaped(aval, layout.translate(to), size) for to in (QUERY, KEY, VALUE)]
            scores = scores_of(layout)
            for (causal, masked), biased, scaling in product(MASKS, (True, False), range(3)):
                extras = [shaped(aval, scores, size, bool)] * masked
                extras += [shaped(aval, scores, size)] * biased
                choice = {"layout": layout, "causal": causal, "masked": masked}
                choice |= {"biased": biased, "scaling": scaling}
                yield [*arrays, *extras], choice


QUERY, KEY, VALUE = (str.maketrans(*pair) for pair in (("h", "c"), ("th", "sc"), ("t", "s")))


def steps(eqn):
    return [(x, ()) for x in eqn.invars]


def scores_of(layout):
    return "bnts" if "n" in layout else "bts"


def shaped(aval, letters, size, dtype=None):
    return jax.ShapeDtypeStruct([size[letter] for letter in letters], dtype or aval.dtype)


def attention_formula(q, k, v, *extras, layout, causal, masked, biased, scaling):
    """`scaling`: 0 for none, 1 for a scaled query, 2 for scaled scores."""
    q = q * SCALE if scaling == 1 else q
    heads = ([0, 2], [0, 2]) if layout == "btnh" else ([0, 1], [0, 1])
    heads = heads if len(layout) == 4 else ([0], [0])
    last, length = q.ndim - 1, 2 if layout == "bnth" else 1
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = lax.dot_general(q, k, (([last], [last]), heads), preferred_element_type=wide)
    scores = scores * SCALE if scaling == 2 else scores
    if biased:
        scores = scores + extras[-1]
    mask = extras[0] if masked else True
    if causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool)) & mask
    if causal or masked:
        scores = jnp.where(mask, scores, LOWEST)
    weights = jax.nn.softmax(scores).astype(q.dtype)
    first = range(len(heads[0]))
    y = lax.dot_general(weights, v, (([last], [length]), (first, heads[1])))
    return y.swapaxes(1, 2) if layout == "btnh" else y


def attention(q, k, v, *extras, layout, causal, masked, biased, scaling, scale=1.0, lowest=None):
    def heads_third(x):
        return x[:, :, None] if layout == "bth" else x.swapaxes(1, 2) if layout == "bnth" else x

    mask = extras[0] if masked else None
    bias = extras[-1] if biased else None
    if layout == "bth":
        mask, bias = (None if x is None else x[:, None] for x in (mask, bias))
    numbers = {"scale": float(scale), "lowest": None if lowest is None else float(lowest)}
    y = foreign_ops.weighted_mean(
        *(heads_third(x) for x in (q, k, v)), mask, bias, causal=causal, **numbers
    )
    return y[:, :, 0] if layout == "bth" else heads_third(y)


NEEDS = frozenset({"dot_general", "exp", "reduce_sum"})
ATTENTION = [Replacement(NEEDS, attention_formula, attention, attention_candidates, whole=3)]
NORMS = [*normalizations(), *batch_norms(), *group_norms()]
