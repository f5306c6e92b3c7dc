"""The whole grammar of the random models: templates, layers, and here loops and branches."""

import jax
import jax.numpy as jnp

from tests.inference.zoo_layers import LAYERS
from tests.inference.zoo_rules import ROUNDING, templates
from tests.inference.zoo_templates import BOOLEANS, EXACT, INTEGERS, MOVES, SUMS


def loop(d):
    """A loop whose carry keeps its shape."""
    x = d.value("f", rank=1)
    aval = d.avals[x]
    body = d.inner({"c": aval})
    steps = d.choice([2, 3, 20])
    forms = [
        f"lax.fori_loop(0, {steps}, lambda k, c: jnp.tanh({body}) * 0.5 + c * 0.25 + k / 9, {x})",
        f"lax.while_loop(lambda s: s[1] < {steps}, "
        f"lambda s: (jnp.tanh(s[0]) + 0.1, s[1] + 2), ({x}, 0))[0]",
        f"lax.scan(lambda c, _: (jnp.tanh({body}) + c * 0.25, None), {x}, None, length={steps})[0]",
        f"lax.scan(lambda c, k: (c * 0.5 + k, c.sum(-1)), {x}, jnp.arange({steps}.0), "
        "reverse=True)[1]",
        f"lax.fori_loop(0, {x}.shape[0], lambda k, c: c.at[k].add(jnp.tanh(c[0])), {x})",
    ]
    return d.choice(forms), None


def loop_over_rows(d):
    x = d.value("f", rank=2)
    row = jax.ShapeDtypeStruct(d.avals[x].shape[1:], jnp.float32)
    body, moved = d.inner({"r": row}), f"jnp.moveaxis({x}, {d.axis(x)}, 0)"
    forms = [
        f"lax.map(lambda r: {body}, {x})",
        f"jax.vmap(lambda r: {body})({x})",
        f"jax.vmap(lambda r: {body}, out_axes=-1)({x})",
        f"lax.scan(lambda c, r: (jnp.tanh(c + r), c * r), jnp.zeros_like({x}[0]), {x})[1]",
        f"lax.scan(lambda c, r: (c * 0.5 + r, c), jnp.zeros_like({moved}[0]), {moved}, "
        "reverse=True)[1]",
        f"jax.vmap(lambda r: lax.fori_loop(0, 3, lambda k, c: jnp.tanh(c) + r, r))({x})",
        f"jax.vmap(lambda r: lax.scan(lambda c, q: (c * 0.5 + q, c), r[0], r)[1])({x})",
        f"jax.vmap(jax.vmap(lambda r: r * r.sum()))({x})",
    ]
    return d.choice(forms), None


def loop_by_data(d):
    """The number of steps depends on each example."""
    x, count = d.value("f", rank=2, exact=True), "jnp.abs(r.ravel()[0]).astype(int)"
    forms = [
        "jax.vmap(lambda r: lax.while_loop(lambda s: s[1] < jnp.abs(r).max(), "
        f"lambda s: (jnp.tanh(s[0]) + r, s[1] + 1), (r, 0.0))[0])({x})",
        f"jax.vmap(lambda r: lax.fori_loop(0, {count}, lambda k, c: c * 0.5 + k, r))({x})",
        f"lax.while_loop(lambda s: s.sum() < 40, lambda s: s + jnp.abs({x}).max() + 1, {x})",
        f"jax.vmap(lambda r: lax.cond(r.sum() > 0, lambda: r * 0.3, lambda: jnp.sin(r)))({x})",
        f"jax.vmap(lambda r: lax.switch({count} % 3, [jnp.sin, jnp.abs, lambda c: c / 3], r))({x})",
    ]
    return d.choice(forms), None


def branch(d):
    x, flag = d.value("f"), d.value("fiub", exact=True)
    body = d.inner({"c": d.avals[x]})
    other = d.inner({"c": d.avals[x]})
    forms = [
        f"lax.cond({flag}.sum() > 0, lambda c: {body}, lambda c: c * 0.5, {x})",
        f"lax.switch(jnp.abs({flag}.sum()).astype(int) % 4, "
        f"[lambda c: jnp.tanh({body}) * 0 + c, jnp.sin, lambda c: c + 1], {x})",
        f"lax.cond({flag}.max() > 1, lambda c: {body}, lambda c: {other}, {x})",
        f"lax.select_n({flag}.sum().astype(int) % 3, {x}, -{x}, {x} * 0.3)",
    ]
    return d.choice(forms), None


OWN = [*LAYERS, loop, loop_over_rows, loop_by_data, branch]
INNER = [*templates(ROUNDING, None), *templates(MOVES, 0), *templates(SUMS, 1)]
SIMPLE = [(MOVES, 0), (EXACT, 0), (SUMS, 1), (INTEGERS, 0), (BOOLEANS, 0), (ROUNDING, None)]
TEMPLATES = [rule for text, cost in SIMPLE for rule in templates(text, cost)]
RULES = [*TEMPLATES, *OWN * (len(TEMPLATES) // len(OWN))]  # half and half
