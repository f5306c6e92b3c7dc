"""Formulas of JAX, Flax, Equinox and users are exported as the ops that the format has for them."""

from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from inference.lowering.trace import trace
from inference.runtimes import open_model
from inference.to_tflite import write_tflite
from tests.inference.models import example, images
from tests.inference.onnx_runtime import assert_equal_to_jax, exported


def ops(function, x, weights=None, opset=20):
    """{op: how often it occurs} in the ONNX file of a function (weights, x), compared with JAX."""
    proto = exported(function, weights or {}, x, opset=opset)
    assert_equal_to_jax(proto, function, weights or {}, x)
    return Counter(node.op_type for node in proto.graph.node)


def together(functions, x):
    """The ops of several functions of x in one file; each is one node, and equal ones are one."""
    return set(ops(lambda _, x: {name: f(x) for name, f in functions.items()}, x))


def gelu_by_hand(x):
    return 0.5 * x * (1 + jax.lax.erf(x / jnp.sqrt(2)))


def gpt2_gelu(x):
    return 0.5 * x * (1.0 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS = {
    "relu": (jax.nn.relu, "Relu"),
    "relu6": (jax.nn.relu6, "Clip"),
    "clip": (lambda x: jnp.clip(x, 0, 6), "Clip"),
    "hard_tanh": (jax.nn.hard_tanh, "Clip"),
    "gelu": (jax.nn.gelu, "Gelu"),
    "exact gelu": (lambda x: jax.nn.gelu(x, approximate=False), "Gelu"),
    "gelu by hand": (gelu_by_hand, "Gelu"),
    "gelu of GPT-2": (gpt2_gelu, "Gelu"),
    "softplus": (jax.nn.softplus, "Softplus"),
    "elu": (jax.nn.elu, "Elu"),
    "elu with an alpha": (lambda x: jax.nn.elu(x, 0.3), "Elu"),
    "selu": (jax.nn.selu, "Selu"),
    "leaky_relu": (lambda x: jax.nn.leaky_relu(x, 0.2), "LeakyRelu"),
    "hard_swish": (jax.nn.hard_swish, "HardSwish"),
    "hard_sigmoid": (jax.nn.hard_sigmoid, "HardSigmoid"),
    "soft_sign": (jax.nn.soft_sign, "Softsign"),
    "softplus by hand": (lambda x: jnp.where(x > 20, x, jnp.log1p(jnp.exp(x))), "Softplus"),
    "gelu by a distribution": (lambda x: x * jax.scipy.stats.norm.cdf(x), "Gelu"),
    "mish": (jax.nn.mish, "Mish"),
    "sigmoid by hand": (lambda x: 1 / (1 + jnp.exp(-x)), "Sigmoid"),
    "softmax": (jax.nn.softmax, "Softmax"),
    "softmax along an axis": (lambda x: jax.nn.softmax(x, axis=1), "Softmax"),
    "log_softmax": (lambda x: jax.nn.log_softmax(x, axis=-2), "LogSoftmax"),
    "standardize": (jax.nn.standardize, "LayerNormalization"),
}


def test_activations_are_one_node_each():
    functions = {name: function for name, (function, _) in ACTIVATIONS.items()}
    found = together(functions, 3 * images(5, 8))
    assert found - {"Identity"} == {op for _, op in ACTIVATIONS.values()}


def test_logsumexp_subtracts_the_maximum_before_its_one_sum():
    found = ops(lambda _, x: jax.nn.logsumexp(x, axis=1), images(5, 8))
    assert set(found) == {"ReduceMax", "Clip", "Sub", "ReduceLogSumExp", "Add", "Squeeze"}


@pytest.mark.slow
def test_activations_are_few_ops_in_tflite(tmp_path):
    x = 3 * images(5, 8)
    names = [
        "relu6",
        "gelu",
        "exact gelu",
        "elu",
        "leaky_relu",
        "hard_swish",
        "softmax",
        "gelu by hand",
    ]
    functions = [ACTIVATIONS[name][0] for name in names]

    def function(_, x):
        return {str(i): f(x) for i, f in enumerate(functions)}

    write_tflite(trace(function, {}, example(x)), tmp_path / "a.tflite")
    model = open_model(tmp_path / "a.tflite")
    found = {op["op_name"] for op in model.interpreter._get_ops_details()} - {"DELEGATE"}
    assert found == {"RELU6", "GELU", "ELU", "LEAKY_RELU", "HARD_SWISH", "SOFTMAX"}
    outputs = model({"input": x})
    for i, f in enumerate(functions):
        np.testing.assert_allclose(outputs[str(i)], f(x), atol=1e-5)


def not_quite(x):
    """Functions that differ from a known formula in one place."""
    centred = x - x.mean(-1, keepdims=True)
    other = jnp.flip(x, 1)
    return {
        "constant of gelu": 0.5 * x * (1 + jax.lax.erf(x * 0.7)),
        "two arrays in gelu": 0.5 * x * (1 + jax.lax.erf(other * 0.5**0.5)),
        "two axes in softmax": jnp.exp(x) / jnp.exp(x).sum(1, keepdims=True).sum(2, keepdims=True),
        "max of another array": jnp.exp(x - other.max(-1, keepdims=True))
        / jnp.exp(x).sum(-1)[..., None],
        "variance of a sample": centred * jax.lax.rsqrt(x.var(-1, ddof=1, keepdims=True) + 1e-5),
        "variance of another array": centred / jnp.sqrt(other.var(-1, keepdims=True) + 1e-5),
        "eps outside the root": centred / (x.std(-1, keepdims=True) + 1e-2),
        "0 where x is nan": jnp.where(x > 0, x, 0),
        "elu of two arrays": jnp.where(x > 0, x, jnp.expm1(other)),
        "square of another": x * jax.lax.rsqrt(jnp.square(other).mean(-1, keepdims=True) + 1e-5),
    }


@pytest.mark.slow
def test_what_differs_in_one_place_is_not_recognized():
    found = ops(lambda _, x: not_quite(x), images(5, 8))
    fused = {op for _, op in ACTIVATIONS.values()}
    assert not fused & set(found)


def beyond_small_arrays(x):
    """Known formulas with a bound or a number that few inputs reach."""
    gelu, probabilities = jax.nn.gelu(x), jax.nn.softmax(x)
    return {
        "a bound of the output": jnp.maximum(jax.nn.leaky_relu(x, 0.1), -500),
        "a bound of one sign": jnp.minimum(jax.nn.relu(x), 1e4),
        "a bound of a scaled input": jnp.where(x * 1e-3 > 2, 0, jax.nn.silu(x)),
        "a negative bound of a scaled input": jnp.where(x * 1e-3 < -2, -9, jax.nn.relu(x)),
        "a clipped norm": jnp.clip(jax.nn.standardize(x), -2, 2),
        "a clipped softmax": jnp.log(jnp.maximum(probabilities, 1e-20)),
        "a number beside a softmax": jnp.log(probabilities + 1e-9),
        "no gelu of -infinity": jnp.where(jnp.isinf(x), 0, gelu),
    }


@pytest.mark.slow
def test_what_few_inputs_reach_is_kept():
    x = np.concatenate([size * images(5, 8) for size in (1, 100, 1e4)])
    x[0, 0, 0], x[1, 0, 1] = 1e5, -np.inf
    ops(lambda _, x: beyond_small_arrays(x), x)


def test_in_bfloat16_a_function_close_to_gelu_is_not_recognized():
    def function(_, x):
        x = x.astype(jnp.bfloat16)
        return (x * jax.nn.sigmoid(1.702 * x)).astype(float)

    assert "Gelu" not in {node.op_type for node in exported(function, {}, images(5, 8)).graph.node}


def learned(module, x, **kwargs):
    """(function, weights) of a Flax module with random weights."""
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.asarray(x), **kwargs))
    weights = jax.tree.map(lambda s: random.uniform(0.5, 2, s.shape).astype(np.float32), shapes)
    return (lambda w, x: module.apply(w, x, **kwargs)), weights


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (nn.LayerNorm(), (5, 8), {"LayerNormalization": 1}),
        (nn.LayerNorm(use_fast_variance=False, use_bias=False), (5, 8), {"LayerNormalization": 1}),
        (nn.RMSNorm(), (5, 8), {"Mul": 2, "ReduceMean": 1, "Add": 1, "Sqrt": 1, "Div": 1}),
        (nn.BatchNorm(use_running_average=True), (4, 4, 8), {"Mul": 1, "Add": 1}),
        (nn.InstanceNorm(), (4, 4, 8), {"Transpose": 2, "InstanceNormalization": 1}),
        (
            nn.GroupNorm(num_groups=2),
            (4, 4, 8),
            {"Transpose": 2, "Reshape": 2, "InstanceNormalization": 1, "Mul": 1, "Add": 1},
        ),
    ],
)
def test_the_norms_of_flax_are_those_of_our_layers(module, shape, expected):
    x = images(*shape)
    function, weights = learned(module, x)
    assert ops(function, x, weights) == expected


@pytest.mark.slow
def test_a_convolution_of_flax_takes_in_its_batch_norm(tmp_path):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = nn.relu(nn.BatchNorm(use_running_average=True)(nn.Conv(4, (3, 3))(x)))
            return x

    function, weights = learned(Block(), images(6, 6, 2))
    assert ops(function, images(6, 6, 2), weights) == {"Transpose": 2, "Conv": 2, "Relu": 2}


def test_the_layers_of_nnx_are_those_of_linen():
    x, layers = images(5, 8), [nnx.LayerNorm(8, rngs=nnx.Rngs(0)), nnx.RMSNorm(8, rngs=nnx.Rngs(0))]
    assert ops(lambda _, x: layers[0](x), x) == {"LayerNormalization": 1}
    assert ops(lambda _, x: layers[1](x), x)["ReduceMean"] == 1


@pytest.mark.slow
def test_the_layers_of_equinox_are_recognized_under_vmap():
    eqx = pytest.importorskip("equinox", reason="Equinox is not installed")
    x = images(5, 8)
    norm = jax.vmap(jax.vmap(eqx.nn.LayerNorm(8)))
    assert ops(lambda _, x: norm(x), x) == {"LayerNormalization": 1}
    group = jax.vmap(eqx.nn.GroupNorm(4, 8))
    assert ops(lambda _, x: group(x), images(8, 4, 4))["InstanceNormalization"] == 1
    attention = eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0))
    found = ops(lambda _, x: jax.vmap(lambda y: attention(y, y, y))(x), x, opset=23)
    assert found["Attention"] == 1 and "Softmax" not in found


def test_a_norm_by_hand_under_vmap():
    def norm(scale, x):  # of one vector
        return scale * (x - x.mean()) / jnp.sqrt(x.var() + 1e-5)

    def function(w, x):
        return jax.vmap(jax.vmap(norm, (None, 0)), (None, 1), 1)(w["params"]["scale"], x)

    weights = {"params": {"scale": images(8)[0]}, "state": {}}
    assert ops(function, images(5, 8), weights) == {"LayerNormalization": 1}


HEADS = images(5, 2, 4)
PARTS = {"MatMul": 2, "Softmax": 1, "Transpose": 4, "Mul": 1}


def self_attention(x, **options):
    return jax.nn.dot_product_attention(x, jnp.sin(x), jnp.cos(x), **options)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_jax_is_one_node_from_opset_23_and_few_before(causal):
    def function(_, x):
        return self_attention(x, is_causal=causal)

    found = ops(function, HEADS) - Counter(["Sin", "Cos"])
    assert found == PARTS | ({"Where": 1} if causal else {})
    assert ops(function, HEADS, opset=23)["Attention"] == 1


@pytest.mark.slow
def test_attention_with_a_bias_and_a_mask_that_leaves_a_row_nothing():
    bias = images(2, 5, 5, count=1)

    def function(_, x):
        mask = x[:, :, 0, :1].swapaxes(1, 2)[:, None] > jnp.array([9, 0, 0, 0, 0])[:, None]
        return {
            "both": self_attention(x, bias=jnp.asarray(bias), mask=mask),
            "bias": self_attention(x, bias=jnp.asarray(bias), scale=0.3),
            "mask": nn.dot_product_attention(x, jnp.sin(x), x, mask=mask),
        }

    for opset in (20, 23):
        assert ops(function, HEADS, opset=opset)["Softmax"] == (3 if opset == 20 else 2)


@pytest.mark.slow
def test_multi_head_attention_of_flax():
    x = images(5, 8)
    module = nn.MultiHeadDotProductAttention(num_heads=2)
    function, weights = learned(module, x)
    assert ops(function, x, weights, opset=23)["Attention"] == 1
    found = ops(function, x, weights)
    assert (found["MatMul"], found["Softmax"], found["Transpose"]) == (6, 1, 4)


@pytest.mark.slow
def test_formulas_within_loops_and_branches_and_with_a_shared_part():
    def function(_, x):
        def step(y, scale):
            y = jax.lax.cond(y.mean() > 0, jax.nn.silu, lambda y: jax.nn.gelu(y * scale), y)
            return y, y.max(1)

        mean = x.mean(-1, keepdims=True)
        normal = (x - mean) / jnp.sqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-5)
        return {"loop": jax.lax.scan(step, x, jnp.arange(1.0, 4)), "mean": mean, "normal": normal}

    x = images(5, 8)
    proto = exported(function, {}, x)
    assert_equal_to_jax(proto, function, {}, x)
    assert "Gelu" in str(proto.graph.node) and "Tanh" not in str(proto.graph.node)
    assert Counter(node.op_type for node in proto.graph.node)["LayerNormalization"] == 1


def test_a_model_of_flax_in_bfloat16():
    x = images(5, 8)
    module = nn.Sequential([nn.LayerNorm(dtype=jnp.bfloat16), nn.Dense(4, dtype=jnp.bfloat16)])
    function, weights = learned(module, x)
    proto = exported(function, weights, x)
    assert "LayerNormalization" in {node.op_type for node in proto.graph.node}
