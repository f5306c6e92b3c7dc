"""Convolutions against Flax's in every form, and the form chosen for each platform."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax import lax

from model.layers import conv, conv_forms, forms
from model.layers.conv import (
    conv2d,
    conv2d_init,
    conv_transpose2d,
    conv_transpose2d_init,
    plain,
    resolve_padding,
)
from model.layers.pool import avg_pool, max_pool
from tests.model.compare import DTYPES, assert_same, normal, random_params

pytestmark = pytest.mark.contract

# name: (height, width, in), out, kernel, groups, stride, padding, dilation
CASES = {
    "dense": ((6, 5, 3), 4, 3, 1, 1, "SAME", 1),
    "dense_strided": ((7, 6, 3), 4, (3, 2), 1, (2, 1), "SAME", 1),
    "dense_dilated": ((9, 8, 3), 4, 3, 1, 1, "VALID", 2),
    "dense_padded": ((6, 5, 3), 4, 3, 1, 1, ((2, 0), (1, 3)), 1),
    "grouped": ((6, 5, 4), 6, 3, 2, 1, "SAME", 1),
    "grouped_in_blocks": ((5, 4, 48), 24, 3, 6, 2, "SAME", 1),
    "grouped_wide": ((3, 4, 80), 4, (1, 2), 2, 1, "VALID", 1),
    "pointwise": ((6, 5, 3), 4, 1, 1, 1, "SAME", 1),
    "pointwise_strided": ((6, 5, 3), 4, 1, 1, (2, 3), "SAME", 1),
    "pointwise_padded": ((6, 5, 3), 4, 1, 1, 1, 1, 1),
    "patches": ((8, 6, 3), 4, (4, 2), 1, (4, 2), "SAME", 1),
    "patches_cropped": ((7, 5, 3), 4, 2, 1, 2, "VALID", 1),
    "patches_padded": ((7, 5, 3), 4, 2, 1, 2, "SAME", 1),
    "patches_dilated": ((7, 6, 3), 4, 2, 1, 2, "VALID", 2),
    "depthwise": ((7, 7, 4), 4, 7, 4, 1, "SAME", 1),
    "depthwise_one_pixel": ((1, 1, 4), 4, 7, 4, 1, "SAME", 1),
    "depthwise_even_kernel": ((3, 5, 4), 4, (4, 2), 4, 1, "SAME", 1),
    "depthwise_multiplied": ((5, 4, 3), 6, 3, 3, 1, "VALID", 1),
    "depthwise_strided": ((7, 6, 4), 4, 3, 4, (2, 3), "SAME", 2),
    "depthwise_padded": ((5, 4, 4), 4, 3, 4, 1, ((0, 2), (3, 1)), 1),
    "depthwise_rows": ((17, 16, 4), 4, 5, 4, 1, "SAME", 1),
    "depthwise_rows_strided": ((18, 16, 2), 4, (4, 5), 2, (2, 3), ((3, 0), (1, 2)), (2, 1)),
    "depthwise_wide": ((3, 97, 2), 2, (3, 7), 2, (1, 2), "SAME", 1),
}
PRODUCT_ANYWHERE = {"pointwise", "pointwise_strided", "pointwise_padded"}
PRODUCT_ON_CPU = (
    PRODUCT_ANYWHERE | {"patches", "patches_cropped"} | {n for n in CASES if "depthwise" in n}
)


def layer(name):
    shape, out_dim, kernel, groups, stride, padding, dilation = CASES[name]
    params = random_params(conv2d_init, shape[-1], out_dim, kernel, groups=groups)
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    return params, normal(1, 3, *shape), options


def has_convolution(name, platform):
    """Whether the layer is compiled with a convolution instead of matrix products."""
    params, x, options = layer(name)
    forward = jax.jit(lambda params, x: conv2d(params, x, **options))
    exported = jax.export.export(forward, platforms=[platform])(params, x)
    return "stablehlo.convolution" in exported.mlir_module()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_every_form_equals_flax(name, dtype):
    _, out_dim, _, groups, stride, padding, dilation = CASES[name]
    params, x, options = layer(name)
    kernel = params["weight"].shape[:2]
    module = linen.Conv(
        out_dim, kernel, stride, padding, kernel_dilation=dilation, feature_group_count=groups
    )

    def reference(params, x):
        return module.apply({"params": {"kernel": params["weight"], "bias": params["bias"]}}, x)

    assert_same(lambda params, x: conv2d(params, x, **options), reference, params, x, dtype=dtype)


DEPTHWISE = [  # height and width, kernel, stride, padding, dilation
    ((17, 9), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)),
    ((16, 7), (3, 2), (2, 1), ((0, 1), (2, 0)), (1, 1)),
    ((9, 12), (2, 4), (1, 3), ((0, 0), (1, 2)), (2, 1)),
    ((1, 5), (1, 5), (1, 2), ((0, 0), (2, 2)), (1, 1)),
]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["shifted", "banded", "banded_rows"])
@pytest.mark.parametrize("size, kernel, geometry", [(a, b, c) for a, b, *c in DEPTHWISE])
def test_every_depthwise_form_equals_xlas(form, size, kernel, geometry):
    """Also those that the rule does not choose for these shapes."""
    form = getattr(conv_forms, form)
    weight, x = normal(0, *kernel, 1, 3), normal(1, 2, *size, 3)
    expected = plain(x, weight, *geometry)
    g = normal(2, *expected.shape)
    ours, theirs = (
        jax.vjp(lambda x, w, f=f: f(x, w, *geometry), x, weight)[1](g) for f in (form, plain)
    )
    np.testing.assert_allclose(form(x, weight, *geometry), expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    "shape, kernel, stride, form",
    [
        ((128, 32, 32, 32), 3, 1, "shifted"),  # MobileNet
        ((128, 32, 32, 32), 3, 2, "shifted"),
        ((512, 7, 7, 8), 7, 1, "banded"),  # ConvNeXt
        ((66, 58, 58, 4), 8, 1, "banded_rows"),
        ((2, 14, 14, 384), 3, 1, "shifted"),
        ((2, 14, 14, 384), 7, 1, "shifted"),
        ((2, 128, 128, 16), 7, 1, "shifted"),
        ((2, 128, 128, 16), 9, 1, "shifted"),
        ((2, 128, 128, 16), 10, 1, "banded_rows"),  # too many taps to compile one by one
    ],
)
def test_the_form_of_a_depthwise_convolution(shape, kernel, stride, form):
    """The fastest that was measured, unless it compiles for long."""
    pads = resolve_padding("SAME", shape[1:3], (kernel,) * 2, (stride,) * 2)
    assert forms.depthwise_form(shape, (kernel,) * 2, (stride,) * 2, pads, (1, 1)) == form


@pytest.mark.parametrize("name", CASES)
def test_the_form_depends_on_the_platform(name):
    assert has_convolution(name, "cpu") == (name not in PRODUCT_ON_CPU)
    assert has_convolution(name, "cuda") == (name not in PRODUCT_ANYWHERE)


@pytest.mark.parametrize("name", ["pointwise", "patches", "depthwise"])
def test_vmap_over_params_equals_one_call_per_params(name):
    params, x, options = layer(name)
    models = [params, jax.tree.map(lambda p: 2 * p + 1, params)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    together = jax.vmap(lambda p: conv2d(p, x, **options))(stacked)
    separately = jnp.stack([conv2d(p, x, **options) for p in models])
    np.testing.assert_allclose(together, separately, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kernel, stride, padding",
    [
        (3, 2, "SAME"),
        ((2, 3), (2, 1), "VALID"),
        (2, 2, "SAME"),
        (3, 2, ((1, 2), (0, 1))),
        ((2, 1), (3, 3), "VALID"),
        ((5, 4), (2, 3), "SAME"),
        (3, 1, "SAME"),
    ],
)
def test_transposed_equals_flax(kernel, stride, padding, dtype):
    params = random_params(conv_transpose2d_init, 3, 4, kernel)
    module = linen.ConvTranspose(
        4,
        params["weight"].shape[:2],
        (stride, stride) if isinstance(stride, int) else stride,
        padding,
    )

    def reference(params, x):
        return module.apply({"params": {"kernel": params["weight"], "bias": params["bias"]}}, x)

    def ours(params, x):
        return conv_transpose2d(params, x, stride=stride, padding=padding)

    assert_same(ours, reference, params, normal(1, 2, 5, 4, 3), dtype=dtype)


TRANSPOSED = [  # height and width, kernel, stride, padding
    ((5, 4), (3, 3), (2, 2), ((1, 1), (0, 2))),
    ((1, 6), (4, 2), (1, 2), ((2, 3), (1, 0))),
    ((7, 3), (5, 4), (3, 3), ((4, 4), (3, 2))),
    ((4, 4), (2, 2), (2, 2), ((1, 1), (1, 1))),
    ((3, 5), (7, 3), (2, 1), ((6, 5), (2, 2))),
]


@pytest.mark.parametrize("form", [conv_forms.phases_together, conv_forms.phases_apart])
@pytest.mark.parametrize("size, kernel, stride, pads", TRANSPOSED)
def test_every_transposed_form_equals_xlas(form, size, kernel, stride, pads):
    """Also those that the rule does not choose for these shapes.

    Compiled as for users: without optimization, a gradient had a NaN twice in runs of all tests,
    and never where this one ran alone.
    """

    def ours(x, weight):
        return conv_forms.in_phases(form, x, weight, stride, pads)

    def theirs(x, weight):
        return lax.conv_transpose(x, weight, stride, pads, dimension_numbers=conv.LAYOUT)

    x, weight = normal(0, 2, *size, 3), normal(1, *kernel, 3, 4)
    assert_same(ours, theirs, x, weight, jit=jax.jit)


def test_the_form_of_a_transposed_convolution():
    """By its outputs, if each phase has taps and there are not too many phases."""
    assert forms.phases_apart((4, 4, 8, 16), (2, 2))
    assert not forms.phases_apart((4, 4, 8, 15), (2, 2))
    assert not forms.phases_apart((4, 1, 8, 16), (2, 2))
    assert not forms.phases_apart((4, 4, 8, 16), (4, 4))


@pytest.mark.slow
def test_float64_stays_float64():
    with jax.enable_x64(True):
        params = conv2d_init(jax.random.key(0), 4, 4, 3, groups=4, bias=False)
        x = normal(1, 2, 5, 5, 4).astype(np.float64)
        layout = ("NHWC", "HWIO", "NHWC")
        expected = lax.conv_general_dilated(
            x, params["weight"], (1, 1), "SAME", dimension_numbers=layout, feature_group_count=4
        )
        np.testing.assert_allclose(conv2d(params, x), expected, rtol=1e-12, atol=1e-12)


def test_groups_must_divide_both_widths():
    message = r"groups: 3 must divide both in_dim \(6\) and out_dim \(4\)"
    with pytest.raises(ValueError, match=message):
        conv2d_init(jax.random.key(0), 6, 4, 3, groups=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["depthwise", "max_pool", "avg_pool"])
def test_written_gradients_work_for_a_free_batch(name):
    weight = conv2d_init(jax.random.key(0), 4, 4, 3, groups=4)
    layers = {"depthwise": lambda x: conv2d(weight, x)}
    layers |= {each.__name__: lambda x, f=each: f(x, 3, stride=2) for each in (max_pool, avg_pool)}
    gradient = jax.jit(jax.grad(lambda x: jnp.square(layers[name](x)).sum()))
    batch = jax.export.symbolic_shape("b")
    form = jax.ShapeDtypeStruct((*batch, 7, 6, 4), jnp.float32)
    x = normal(0, 3, 7, 6, 4)
    exported = jax.export.export(gradient)(form).call(x)
    np.testing.assert_allclose(exported, gradient(x), rtol=1e-6)


PADS = [((3, 0), (3, 0)), ((0, 3), (1, 2)), ((2, 0), (1, 1)), ((4, 4), (0, 3)), ((1, 3), (3, 1))]


@pytest.mark.slow
@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("kernel", [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_a_padding_wider_than_the_kernel_has_the_gradient_of_a_linear_map(kernel, pads):
    """For a linear map A, <A x, y> is <x, gradient of <A x, y>>. XLA's own gradient would be a
    reference with the same fault."""
    cases = [(conv2d, (1, 1), 1), (conv2d, (2, 1), 1), (conv2d, (1, 2), 4), (conv2d, (1, 1), 2)]
    cases += [(conv_transpose2d, stride, 1) for stride in ((1, 1), (2, 1), (2, 2), (3, 2))]
    for layer, stride, groups in cases:
        params = {"weight": normal(0, *kernel, 4 // groups, 16)}
        fn = jax.jit(partial(layer, params, stride=stride, padding=pads))
        for size in ((3, 1), (6, 6), (5, 8)):
            x, other = normal(1, 2, *size, 4), normal(2, 2, *size, 4)
            y, gradient_for = jax.vjp(fn, x)
            up = normal(3, *y.shape)
            (gradient,) = gradient_for(up)
            both = np.vdot(gradient, other), np.vdot(fn(other), up)
            np.testing.assert_allclose(*both, rtol=1e-3, atol=0.01)
