"""The rules of the grammar that need more than a template: layers, products, reads and writes at
computed positions, and convolutions.
"""

from tests.inference.zoo_draw import Redraw

UPDATES = {  # {method of x.at[...]: its argument}
    **{"set": "2", "add": "1", "subtract": "1", "multiply": "2", "divide": "2", "power": "2"},
    **{"max": "1", "min": "1", "apply": "jnp.abs"},
}
MODES = ("clip", "fill", "wrap", "promise_in_bounds", None)


def dense(d):
    x = d.value("f", rank=2, where=has_known_end)
    size, out = d.sizes(x)[-1], d.number(2, 7)
    weight = f'"weight": {d.weight(size, out)}'
    bias = f', "bias": {d.weight(out)}' if d.chance(0.5) else ""
    return f"linear({{{weight}{bias}}}, {x}) * 0.5", None


def normalized(d):
    x = d.value("f", rank=2, where=has_known_end)
    size = d.sizes(x)[-1]
    norm = d.choice(["layer_norm", "rms_norm"])
    return f'{norm}({{"scale": {d.weight(size)}, "bias": {d.weight(size)}}}, {x})', None


def attended(d):
    x = d.value("f", where=lambda aval: aval.ndim == 3 and all(map(is_known, aval.shape[1:])))
    size = d.sizes(x)[-1]
    heads = d.choice([n for n in (1, 2, 3) if size % n == 0])
    layers = ", ".join(
        f'"{name}": {{"weight": {d.weight(size, size)} / 4, "bias": {d.weight(size)}}}'
        for name in ("query", "key", "value", "out")
    )
    causal = d.choice(["", ", causal=True"])
    return f"attention({{{layers}}}, {x}, heads={heads}{causal})", None


def embedded(d):
    ids = d.value("iu", where=lambda aval: aval.dtype.name != "uint32" and aval.ndim < 4)
    return f'embedding({{"weight": {d.weight(9, 4)}}}, {ids} % 9)', 0


def embedded_flags(d):
    b = d.value("b")
    return f"{d.weight(2, 3)}[{b}.astype(int)]", 0


def product(d):
    x = d.value("f", rank=2, where=has_known_end)
    size, out = d.sizes(x)[-1], d.number(1, 5)
    forms = (
        f"{x} @ {d.weight(size, out)}",
        f'jnp.einsum("...i,ij->j...", {x}, {d.weight(size, out)})',
        f'jnp.einsum("ji,...i->j...", {d.weight(out, size)}, {x})',
        f"jnp.dot({x}, {d.weight(size)})",
        f'jnp.einsum("...i,kij->k...j", {x}, {d.weight(2, size, out)})',
        f'jnp.einsum("b...i,i->b", {x}, {d.weight(size)})',
        f'jnp.einsum("b...i,ij->...bj", {x}, {d.weight(size, out)})',
    )
    return f"{d.choice(forms)} * 0.5", None


def product_of_three(d):
    x = d.value("f", where=lambda aval: aval.ndim == 3)
    forms = ("bij,bkj->bik", "bij,bij->bi", "bij,ckj->bick", "bij,cij->bc", "bij,bik->jk")
    return f'jnp.einsum("{d.choice(forms)}", {x}, {d.value(like=x)})', None


def taken(d):
    x, ids = d.value("fiub"), d.value("iu")
    if d.chance(0.4):
        ids = d.choice(["jnp.array([1, 0, 1])", "jnp.array([[2, 9], [-1, 0]])", "-1"])
    axis, mode = d.axis(x, free=True), d.choice(["clip", "wrap", "fill"])
    fill = ", fill_value=3" if mode == "fill" else ""
    return f'jnp.take({x}, {ids}, axis={axis}, mode="{mode}"{fill})', 0


def indexed(d):
    """x[...] by integers, in every way and mode."""
    x, ids = d.value("fiub", rank=2), d.value("iu")
    column = f"jnp.arange({x}.shape[0])"
    where = d.choice(
        [
            f"[{ids}]",
            f"[:, {ids}]",
            f"[..., {ids} % 3]",
            f"[{column}, {ids}.ravel()[0]]",
            f"[{column}[:, None], jnp.array([0, 1, -1])]",
            "[:, jnp.array([0, 1]), ..., jnp.array([[1], [0]])]",
            f"[{ids}.ravel()[:2]]",
            f"[{ids}.sum() % 2]",
        ]
    )
    mode = d.choice(MODES)
    if mode is None:
        return f"jnp.nan_to_num({x}{where}, nan=0.5)" if d.sizes(x) else f"{x}{where}", 0
    fill = ", fill_value=1" if mode == "fill" else ""
    return f'{x}.at{where}.get(mode="{mode}"{fill})', 0


def along_axis(d):
    x = d.value("fiu", rank=2, exact=True)
    axis = d.axis(x)
    order = f"jnp.argsort({x}, axis={axis})"
    mode = d.choice(["", ', mode="clip"', ', mode="fill", fill_value=2'])
    return f"jnp.take_along_axis({x}, {order} {d.choice(['', '* 2', '- 1'])}, {axis}{mode})", 0


def written(d):
    """Writes at positions that may be equal or outside."""
    x = d.value("fiu", rank=2, exact=True)
    ids = d.value("iu", where=lambda aval: aval.ndim < 3)
    op = d.choice(list(UPDATES))
    if op in ("divide", "power") and d.avals[x].dtype.kind != "f":
        raise Redraw
    column, slices = f"jnp.arange({x}.shape[0])", ["[::2]", "[:, ::2]", "[..., -1]"]
    where = d.choice(
        [
            *slices,
            *(f"[{ids}]", f"[:, {ids}]", f"[..., {ids} % 3]", f"[{column}, {ids}.ravel()[0]]"),
            *(f"[{column}[::-1]]", f"[{column}[:, None], jnp.array([0, 1])]", "[:, 1:3]"),
            *("[jnp.array([0, 0])]", "[:, jnp.array([0, 9, 0])]", "[:, jnp.array([1, 0, 1])]"),
        ]
    )
    mode = d.choice(["", "", ', mode="clip"', ', mode="drop"', ', mode="promise_in_bounds"'])
    if "promise" in mode and where not in slices:
        mode = ""  # what a broken promise does is undefined
    update = UPDATES[op]
    if op in ("add", "max", "multiply") and mode == "" and d.chance(0.4):
        update = f"{x}{where}"
    elif op == "set" and d.chance(0.4):
        update = f"{x}{where} * 2"
    return f"{x}.at{where}.{op}({update}{mode})", 2


def sliced(d):
    x, ids = d.value("fiub", rank=2), d.value("iu")
    axis = d.axis(x)
    size = d.number(1, d.sizes(x)[axis])
    start, first = f"{ids}.ravel()[0]", "i.ravel()[0]"
    part = f"lax.slice_in_dim({x}, 0, {size}, axis={axis})"
    forms = [
        f"lax.dynamic_slice_in_dim({x}, {start}, {size}, {axis})",
        f"lax.dynamic_index_in_dim({x}, {start}, {axis}, keepdims=False)",
        f"lax.dynamic_update_slice_in_dim({x}, {part} + {part}, {start}, {axis})",
        f"jax.vmap(lambda r, i: lax.dynamic_slice_in_dim(r, {first}, {size}, {axis - 1}))"
        f"({x}, {ids})",
        f"jax.vmap(lambda r, i: lax.dynamic_update_index_in_dim(r, 1, {first}, {axis - 1}))"
        f"({x}, {ids})",
        f"jax.vmap(lambda r, i: r.at[i].set(0))({x}, {ids})",
        f"jax.vmap(lambda r, i: r.at[i.ravel()].add(2))({x}, {ids})",
        f"jax.vmap(lambda r, i: r.at[i].get(mode='clip'))({x}, {ids})",
        f"jax.vmap(lambda r: jnp.roll(r, 1, {axis - 1}))({x})",
        f"jax.vmap(lambda r, i: jnp.roll(r, {first}, {axis - 1}))({x}, {ids})",
        f"jnp.roll({x}, {start}, {axis})",
        f"jnp.roll({x}, {x}.shape[0] // 2, 0)",
    ]
    return d.choice(forms), 1


def convolved(d):
    """lax.conv_general_dilated over one or two axes."""
    x = d.value("f", where=lambda aval: aval.ndim in (3, 4) and all(map(is_known, aval.shape[1:])))
    channels, axes = d.sizes(x)[-1], d.avals[x].ndim - 2
    groups = d.choice([g for g in range(1, channels + 1) if channels % g == 0])
    kernel = [d.number(1, 3) for _ in range(axes)]
    weight = d.weight(*kernel, channels // groups, groups * d.number(1, 2))
    letters = "HW"[:axes]
    pads = d.choice(["SAME", "VALID", None, None])
    # not negative: XLA on the CPU then reads memory outside of the array
    pads = f'"{pads}"' if pads else [(d.number(0, 3), d.number(0, 2)) for _ in range(axes)]
    many = lambda low, high: tuple(d.number(low, high) for _ in range(axes))  # noqa: E731
    dilated = many(1, 2) if d.chance(0.4) and pads not in ('"SAME"',) else None
    arguments = f"{many(1, 2)}, {pads}, {dilated}, {many(1, 2) if d.chance(0.4) else None}"
    names = f'("N{letters}C", "{letters}IO", "{d.choice(["N" + letters + "C", "NC" + letters])}")'
    call = f"lax.conv_general_dilated({x}, {weight}, {arguments}, {names}, {groups}) / 4"
    return call, None


def convolved_by_example(d):
    """Each example has its own kernel, so that there are as many groups as examples."""
    x = d.value("f", where=lambda aval: aval.ndim == 3 and all(map(is_known, aval.shape[1:])))
    names, stride = '("NWC", "WIO", "NWC")', d.number(1, 2)
    call = f"lax.conv_general_dilated(r[None], r[:2, :, None], ({stride},), [(2, 1)], None, None"
    return f"jax.vmap(lambda r: {call}, {names})[0])({x}) / 4", None


def transposed_convolution(d):
    x = d.value("f", where=is_image)
    channels = d.sizes(x)[-1]
    out = d.number(1, 4)
    weight = d.weight(d.number(1, 3), d.number(1, 3), channels, out)
    stride, padding = d.choice([1, 2, (2, 1)]), d.choice(['"SAME"', '"VALID"'])
    if d.chance(0.5):
        stride = (stride, stride) if isinstance(stride, int) else stride
        names = '("NHWC", "HWIO", "NHWC")'
        options = f"{stride}, {padding}, dimension_numbers={names}"
        return f"lax.conv_transpose({x}, {weight}, {options}) / 4", None
    params = f'{{"weight": {weight}, "bias": {d.weight(out)}}}'
    return f"conv_transpose2d({params}, {x}, stride={stride}, padding={padding}) / 4", None


def image_layer(d):
    x = d.value("f", where=is_image)
    size, groups = d.sizes(x)[-1], d.choice([1, 1, 2, 4])
    if size % groups:
        raise Redraw
    out = groups * d.number(1, 3)
    kernel = d.weight(d.number(1, 3), d.number(1, 3), size // groups, out)
    padding = d.choice(['"SAME"', '"VALID"', "1", "((2, 0), (0, 1))"])
    options = f"stride={d.number(1, 2)}, padding={padding}, dilation={d.number(1, 2)}"
    norm = f'{{"scale": {d.weight(size)}, "bias": {d.weight(size)}}}'
    forms = (
        f'conv2d({{"weight": {kernel}, "bias": {d.weight(out)}}}, {x}, {options}) / 4',
        f"max_pool({x}, {d.number(1, 3)}, stride={d.number(1, 2)}, padding={d.choice([0, 1])})",
        f'avg_pool({x}, 2, stride={d.number(1, 2)}, padding="SAME")',
        f"global_avg_pool({x})",
        f"global_max_pool({x})",
        f"group_norm({norm}, {x}, groups={groups})",
    )
    return d.choice(forms), None


def is_known(size):
    return isinstance(size, int)


def has_known_end(aval):
    return is_known(aval.shape[-1])


def is_image(aval):
    return aval.ndim == 4 and all(map(is_known, aval.shape[1:]))


LAYERS = [dense, normalized, attended, embedded, embedded_flags, product, product_of_three, taken]
LAYERS += [indexed, along_axis, written, sliced, convolved, convolved_by_example]
LAYERS += [transposed_convolution, image_layer]
