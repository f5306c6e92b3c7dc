"""Attention against Flax's, and what each position can read."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from model.layers.attention import attend, attention, attention_init
from model.layers.forms import fused_attention
from tests.model.compare import DTYPES, assert_same, normal, quick_jit, random_params

pytestmark = pytest.mark.gpu

B, T, S, DIM, CONTEXT, HEADS = 2, 5, 4, 6, 3, 2


def flax_names(params):
    """Our params in the form of Flax, which splits weights by heads and gives the keys a bias."""
    heads, no_bias = (HEADS, DIM // HEADS), jnp.zeros(DIM, params["key"]["weight"].dtype)
    named = {
        name: {
            "kernel": p["weight"].reshape(-1, *heads),
            "bias": p.get("bias", no_bias).reshape(heads),
        }
        for name, p in params.items()
    }
    kernel = params["out"]["weight"].reshape(*heads, DIM)
    return named | {"out": {"kernel": kernel, "bias": params["out"]["bias"]}}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("cross", [True, False])
def test_equals_flax(cross, masked, dtype):
    params = random_params(attention_init, DIM, context_dim=CONTEXT if cross else None)
    params = jax.tree.map(lambda p: p / 2, params)
    inputs = (normal(1, B, T, DIM), normal(2, B, S, CONTEXT)) if cross else (normal(1, B, T, DIM),)
    mask = None
    if masked:
        mask = jnp.asarray(normal(3, B, 1, T, S if cross else T) > -0.5).at[..., 0].set(True)
    module = linen.MultiHeadAttention(HEADS, dtype=dtype, force_fp32_for_softmax=True)

    def reference(params, *inputs):
        return module.apply({"params": flax_names(params)}, *inputs, mask=mask)

    def ours(params, *inputs):
        return attention(params, *inputs, heads=HEADS, mask=mask)

    assert_same(ours, reference, params, *inputs, dtype=dtype)


def dependencies(**options):
    """Whether output t depends on input s: (T, T)."""
    params, x = random_params(attention_init, DIM), normal(1, 1, T, DIM)
    jacobian = quick_jit(
        jax.jacobian(lambda x: attention(params, x, heads=HEADS, **options)[0].sum(-1))
    )(x)
    return np.abs(jacobian[:, 0]).sum(-1) > 0


def test_causal_attention_reads_only_the_past():
    np.testing.assert_array_equal(dependencies(causal=True), np.tril(np.ones((T, T), bool)))


def test_a_mask_narrows_causal_attention():
    visible = np.arange(T) != 1
    np.testing.assert_array_equal(
        dependencies(causal=True, mask=visible), np.tril(np.ones((T, T), bool)) & visible
    )


def test_a_row_that_may_attend_to_nothing_is_finite():
    params, x = random_params(attention_init, DIM), normal(1, 1, T, DIM)
    nothing = np.zeros((T, T), bool)
    y, grad = quick_jit(
        jax.value_and_grad(lambda x: attention(params, x, heads=HEADS, mask=nothing).sum())
    )(x)
    assert jnp.isfinite(y) and jnp.isfinite(grad).all()


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_a_mask_that_is_added_to_scores_is_refused(without_shape_checks, dtype):
    """Its 0 for what a query may read would hide it."""
    params, x = random_params(attention_init, DIM), normal(1, 1, T, DIM)
    with pytest.raises(ValueError, match=f"^mask: must be True .* got {dtype.__name__}; write"):
        attention(params, x, heads=HEADS, mask=np.zeros((T, T), dtype))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(64, 64), (63, 63), (1, 64), (64, 63)])
@pytest.mark.parametrize("mask", [None, (B, 1, 1, -1), (1, 1, 1, -1), (B, 1, -2, -1)])
@pytest.mark.usefixtures("cudnn_attention")
def test_cudnn_takes_what_attend_gives_it(mask, lengths, causal):
    """This needs no GPU; values are compared below."""
    sizes = {-1: lengths[1], -2: lengths[0]}
    mask = mask and jax.ShapeDtypeStruct([sizes.get(size, size) for size in mask], bool)
    queries, keys = (jax.ShapeDtypeStruct((B, n, 4, 16), jnp.bfloat16) for n in lengths)

    def total(q, k, v, mask):
        return attend(q, k, v, mask, causal=causal).astype(jnp.float32).sum()

    traced = jax.make_jaxpr(jax.grad(total))(queries, keys, keys, mask)
    is_even = all(n % 2 == 0 for n in lengths)
    assert ("dot_product_attention_fwd" in str(traced)) == is_even


def test_cudnn_takes_heads_of_up_to_128_features_in_16_bits(monkeypatch):
    monkeypatch.setattr("model.layers.forms.has_flash_attention", lambda: True)

    def fits(features, dtype):
        q = jax.ShapeDtypeStruct((B, 64, 4, features), dtype)
        return fused_attention(q, q)

    assert [n for n in (12, 16, 128, 136) if fits(n, jnp.bfloat16)] == [16, 128]
    assert fits(16, jnp.float16) and not fits(16, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("length", [64, 63])
def test_shared_heads_of_keys_in_half_precision_equal_jax_in_float32(length):
    sizes = (4, 16), (2, 1), (2, 1)  # heads, scale; so scores reach 50, where bfloat16 is coarse
    q, k, v = (
        jnp.asarray(scale * normal(i, B, length, heads, 16), jnp.bfloat16)
        for i, (heads, scale) in enumerate(sizes)
    )
    rows = jnp.arange(length)[None, None, None] < jnp.array([length, 40])[:, None, None, None]
    for causal in (True, False):
        for mask in (None, rows):
            ours = quick_jit(partial(attend, causal=causal))(q, k, v, mask)
            wide = (a.astype(jnp.float32) for a in (q, k, v))
            expected = jax.nn.dot_product_attention(*wide, mask=mask, is_causal=causal)
            np.testing.assert_allclose(ours.astype(jnp.float32), expected, atol=0.03)


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="heads: 4 must divide the width 6"):
        attention(random_params(attention_init, DIM), normal(1, 1, T, DIM), heads=4)
