"""The structure of exported ONNX graphs: few nodes, named weights, free sizes."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.airbench import airbench
from model.convnext import convnext
from model.gan import gan
from model.layers.conv import conv2d
from model.layers.norm import layer_norm
from model.mixer import mixer
from model.mlp import mlp
from model.projected import projected
from model.resnet import resnet
from model.rnn import rnn
from model.vit import vit
from tests.inference.cases import BATCH
from tests.inference.layer_cases import NORM4
from tests.inference.models import images, with_weights
from tests.inference.onnx_runtime import assert_close, assert_equal_to_jax, exported, run
from utils import named_leaves

pytestmark = pytest.mark.contract


def exported_model(model, x, batch=None):
    """The ModelProto of a model, compared with JAX."""
    function, weights = with_weights(model)
    proto = exported(function, weights, x, batch)
    assert_equal_to_jax(proto, function, weights, x)
    return proto


def ops(proto):
    return Counter(node.op_type for node in proto.graph.node)


def dims(value):
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


@pytest.mark.slow
def test_the_sample_model_is_small_and_its_weights_keep_their_names():
    model = convnext((28, 28, 1), 10)
    proto = exported_model(model, images(28, 28, 1))
    assert len(proto.graph.node) <= 36
    assert sum(np.prod(weight.dims) for weight in proto.graph.initializer) < 13_810
    paths = set(named_leaves(jax.eval_shape(model.init, jax.random.key(0))[0]))
    stored = {weight.name for weight in proto.graph.initializer} & paths
    # this kernel sees a single pixel, so it is a scale, folded into the convolution before it
    assert paths - stored == {"blocks/2/dwconv/weight"}
    assert dims(proto.graph.input[0]) == ["batch", 28, 28, 1]
    assert dims(proto.graph.output[0]) == ["batch", 10]
    assert proto.producer_name == "rawtree"


def test_a_batch_may_be_fixed():
    proto = exported_model(mlp((4, 4, 1), 3, dims=(8,)), images(4, 4, 1, count=2), batch=2)
    assert dims(proto.graph.input[0]) == [2, 4, 4, 1] and dims(proto.graph.output[0]) == [2, 3]


@pytest.mark.slow
def test_a_resnet_has_neither_norms_nor_transpositions_between_its_convolutions():
    resnet_ops = ops(exported_model(resnet((8, 8, 3), 10, widths=(4, 8), depth=1), images(8, 8, 3)))
    assert resnet_ops["Transpose"] == 1  # of the input
    assert set(resnet_ops) == {"Transpose", "Conv", "Relu", "Add", "ReduceMean", "Gemm"}
    assert (resnet_ops["Conv"], resnet_ops["Relu"], resnet_ops["Add"]) == (6, 5, 2)


@pytest.mark.slow
def test_airbench_is_its_layers_and_the_norms_after_pools():
    counts = ops(exported_model(airbench((9, 10, 3), 5, widths=(4, 6)), images(9, 10, 3)))
    layers = {"Conv": 5, "Gelu": 5, "MaxPool": 2, "ReduceMax": 1, "MatMul": 1}
    assert counts == layers | {"Mul": 2, "Add": 2, "Transpose": 1}


@pytest.mark.slow
def test_a_vit_and_a_residual_convnext_equal_jax():
    vision = vit((8, 8, 1), 10, dim=8, depth=2, heads=2, expansion=2)
    vit_ops = ops(exported_model(vision, images(8, 8, 1)))
    assert (vit_ops["Softmax"], vit_ops["LayerNormalization"], vit_ops["Gelu"]) == (2, 5, 2)
    exported_model(convnext((16, 16, 3), 5, dims=(4, 6), residual=True), images(16, 16, 3))


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_recurrent_layers_equal_jax_at_any_lengths(cell):
    model = rnn((20, 3), 4, cell=cell, dim=5, depth=2, bidirectional=True)
    function, weights = with_weights(model)
    x = {"sequence": images(20, 3), "length": np.array([20, 1, 7], np.int32)[:BATCH]}
    proto = exported(function, weights, x)
    expected = np.asarray(jax.jit(function)(weights, x))
    assert_close(run(proto, x), {"output": expected})
    assert ops(proto)[cell.upper()] == 4 and not {"Scan", "Loop"} & set(ops(proto))


@pytest.mark.slow
def test_a_mixer_the_generator_of_a_gan_and_a_projected_encoder_equal_jax():
    exported_model(mixer((8, 8, 1), 10, dim=8, depth=2), images(8, 8, 1))
    exported_model(gan((8, 12, 1), latent=6, width=4), images(6))
    exported_model(projected((8, 8, 1), mlp((8, 8, 1), 6, dims=(8,)), 5, 4), images(8, 8, 1))


@pytest.mark.slow
def test_products_without_a_channel_axis_are_not_folded():
    """Products with several matrices, of integers, or scaled along another axis than the last."""
    one, many = images(4, 4)[0], images(5, 4, 4)[0]

    def function(w, x):  # (B, 5, 4)
        rows, integers = jnp.arange(5.0)[:, None], (x * 9).astype(int)
        return {
            "matrices": jnp.einsum("bik,ikj->bij", x, many) * jnp.arange(4.0),
            "rows": (x @ one) * rows + rows,
            "columns": (x @ one) * jnp.arange(4.0) + 1,
            "integers": integers[:, 0] @ jnp.arange(8).reshape(4, 2) + jnp.arange(2),
            "batch": x[:, 0] @ one + jnp.sin(x[:, 1]),
        }

    x = images(5, 4)
    assert_equal_to_jax(exported(function, {}, x), function, None, x)


def test_a_weight_that_is_used_twice_is_stored_once():
    def function(w, x):
        return jnp.tanh(x @ w["params"]["tied"]) @ w["params"]["tied"]

    weights = {"params": {"tied": images(6, 6)[0]}, "state": {}}
    proto = exported(function, weights, images(6))
    assert [entry.name for entry in proto.graph.initializer] == ["tied"]


def test_outputs_that_are_inputs_constants_or_the_same_tensor_keep_their_names():
    def function(w, x):
        y, size = jnp.sin(x), x.shape[0] * jnp.ones(())
        return {"input_again": x, "constant": jnp.arange(3), "one": y, "two": y, "size": size}

    x = images(2)
    expected = {"input_again": x, "constant": np.arange(3, dtype=np.int32)}
    expected |= {"one": np.sin(x), "two": np.sin(x), "size": np.array(BATCH, np.float32)}
    assert_close(run(exported(function, {}, x), {"input": x}), expected)


def test_sizes_are_computed_from_the_size_of_the_batch():
    def function(w, x):
        size = x.shape[0]
        half, line = (size + 1) // 2, jnp.arange(2 * size * size - 1)
        square = jnp.zeros((size, half)) + x.sum()
        return {"half": x[:half], "line": line, "rest": line[size % 2 :], "square": square}

    proto = exported(function, {}, images(2))
    for size in (1, 2, 5):
        assert_equal_to_jax(proto, function, None, images(2, count=size))


def test_layers_within_loops_and_branches():
    """Their weights are stored in the outer graph, with their names."""

    def function(w, x):
        def step(y, scale):
            y = jax.lax.cond(
                y.mean() > 0, lambda: conv2d(w["params"], y), lambda: layer_norm(NORM4, y)
            )
            return y * scale, y.max((1, 2))

        return jax.lax.scan(step, x, jnp.arange(1.0, 4))

    weights = {"params": {"weight": images(3, 3, 4, 4)[0] / 4}, "state": {}}
    x = images(5, 5, 4)
    proto = exported(function, weights, x)
    assert_equal_to_jax(proto, function, weights, x)
    assert "weight" in {entry.name for entry in proto.graph.initializer}


def test_a_tied_embedding_is_stored_once():
    """Its table is read by rows, and as a matrix in the other order of its axes."""

    def function(w, ids):
        table = w["params"]["table"]
        x = jnp.take(table, ids, axis=0)
        return {"all": x @ table.T, "sum": jnp.einsum("bd,vd->bv", x.mean(1), table)}

    weights = {"params": {"table": images(6, 4)[0]}, "state": {}}
    ids = np.array([[0, 5, 2], [1, 1, 3]], np.int32)
    proto = exported(function, weights, ids)
    assert_equal_to_jax(proto, function, weights, ids)
    assert sum(np.prod(entry.dims) == 24 for entry in proto.graph.initializer) == 1
    assert ops(proto)["Transpose"] <= 1
