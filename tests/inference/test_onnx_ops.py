"""Each case of the ONNX table against JAX, in ONNX Runtime; and what the files look like."""

from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.lowering.trace import trace
from inference.lowering.walk import Missing
from inference.to_onnx import OPSETS, check, onnx_model, write_onnx
from model.base import Model
from model.convnext import convnext
from model.layers.conv import conv2d, conv2d_init
from model.layers.norm import layer_norm
from model.mlp import mlp
from model.resnet import resnet
from model.vit import vit
from tests.inference import coverage
from tests.inference.cases import (
    BATCH,
    GROUPS,
    ONNX_GAPS,
    REMARKS,
    TFLITE_GAPS,
    jax_answers,
    together,
    without,
)
from tests.inference.layer_cases import NORM4
from utils import named_leaves


def without_gaps(name):
    return without(GROUPS[name], ONNX_GAPS)


def wanted(name, batch):
    """What JAX answers to a group's first examples."""
    missing = [case for case in GROUPS[name].cases if case in ONNX_GAPS]
    return {
        path: array
        for path, array in jax_answers(name, batch).items()
        if path.split("/")[0] not in missing
    }


def shapes(arrays):
    return {
        name: jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for name, array in arrays.items()
    }


def answers(model, inputs):
    """{name: array} of ONNX Runtime for a ModelProto."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return dict(
        zip(
            [output.name for output in session.get_outputs()],
            session.run(None, inputs),
            strict=True,
        )
    )


def compare(found, wanted):
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype), name
        if array.dtype.kind == "f":
            scale = np.abs(array[np.isfinite(array)]).max(initial=1)
            np.testing.assert_allclose(
                found[name], array, rtol=1e-5, atol=1e-6 * scale, err_msg=name
            )
        else:
            np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("name", GROUPS)
def test_each_case_equals_jax_at_any_batch(name):
    group = without_gaps(name)
    model = onnx_model(trace(together(group), {}, shapes(group.inputs)))
    check(model)
    for batch in (1, BATCH):
        compare(
            answers(model, {key: array[:batch] for key, array in group.inputs.items()}),
            wanted(name, batch),
        )


@pytest.mark.parametrize("opset", sorted({*OPSETS} - {20}))
def test_activations_and_layers_equal_jax_at_every_opset(opset):
    for name in ("Activations", "Layers of sequences", "Layers of images"):
        group = without_gaps(name)
        model = onnx_model(trace(together(group), {}, shapes(group.inputs)), opset)
        check(model)
        assert [entry.version for entry in model.opset_import] == [opset]
        compare(answers(model, group.inputs), wanted(name, BATCH))


def test_a_gap_is_one():
    for group in GROUPS.values():
        for case in ONNX_GAPS.keys() & group.cases.keys():
            with pytest.raises(Missing):
                onnx_model(
                    trace(
                        together(group._replace(cases={case: group.cases[case]})),
                        {},
                        shapes(group.inputs),
                    )
                )


def trained(model):
    """A model as if trained: no weight is 0 or 1, no two are equal; its function and its weights."""
    random = np.random.default_rng(0)
    params, state = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(
        lambda leaf: (0.3 * random.normal(size=leaf.shape)).astype(np.float32), params
    )
    state = jax.tree.map(lambda leaf: random.uniform(0.5, 2, leaf.shape).astype(np.float32), state)
    return lambda w, x: model.apply(w["params"], w["state"], x)[0], {
        "params": params,
        "state": state,
    }


def images(*shape, count=BATCH):
    return np.random.default_rng(1).normal(size=(count, *shape)).astype(np.float32)


def exported(model, x, batch=None):
    """The ModelProto of a model, which answers as JAX does."""
    function, weights = trained(model)
    proto = onnx_model(trace(function, weights, jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch))
    check(proto)
    compare(answers(proto, {"input": x}), {"output": np.asarray(jax.jit(function)(weights, x))})
    return proto


def ops(model):
    return Counter(node.op_type for node in model.graph.node)


def dims(value):
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def test_the_sample_is_lean_and_its_weights_keep_their_names():
    model = convnext((28, 28, 1), 10)
    proto = exported(model, images(28, 28, 1))
    assert len(proto.graph.node) <= 36
    assert sum(np.prod(weight.dims) for weight in proto.graph.initializer) < 13_810
    paths = set(named_leaves(jax.eval_shape(model.init, jax.random.key(0))[0]))
    named = {weight.name for weight in proto.graph.initializer} & paths
    # one kernel, over a single pixel, is a scale, which the convolution before it has taken in
    assert paths - named == {"blocks/2/dwconv/weight"}
    assert dims(proto.graph.input[0]) == ["batch", 28, 28, 1] and dims(proto.graph.output[0]) == [
        "batch",
        10,
    ]
    assert proto.producer_name == "rawtree"


def test_a_batch_may_be_fixed():
    proto = exported(mlp((4, 4, 1), 3, dims=(8,)), images(4, 4, 1, count=2), batch=2)
    assert dims(proto.graph.input[0]) == [2, 4, 4, 1] and dims(proto.graph.output[0]) == [2, 3]


def test_resnet_is_convolutions_without_norms_or_transpositions_between():
    found = ops(exported(resnet((8, 8, 3), 10, widths=(4, 8), depth=1), images(8, 8, 3)))
    assert found["Transpose"] == 1  # of the input
    assert set(found) == {"Transpose", "Conv", "Relu", "Add", "ReduceMean", "Gemm"}
    assert (found["Conv"], found["Relu"], found["Add"]) == (6, 5, 2)


def test_vit_and_a_residual_convnext_equal_jax():
    found = ops(exported(vit((8, 8, 1), 10, dim=8, depth=2, heads=2, expansion=2), images(8, 8, 1)))
    assert (found["Softmax"], found["LayerNormalization"], found["Gelu"]) == (2, 5, 2)
    exported(convnext((16, 16, 3), 5, dims=(4, 6), residual=True), images(16, 16, 3))


def test_a_convolution_that_others_read_keeps_its_weight():
    """Its scaled copy alone is folded; were it scaled in place, the first output would be wrong."""

    def init(key):
        return conv2d_init(key, 2, 3, 3), {}

    def apply(params, state, x, *, train=False, key=None):
        y = conv2d(params, x)
        return jnp.concatenate([y, y * 2 + 1, conv2d(params, x[:, ::-1])], -1), state

    found = ops(exported(Model(init, apply), images(5, 5, 2)))
    assert found["Conv"] == 2 and found["Mul"] == 1


def test_only_what_has_channels_is_folded():
    """Products with several matrices, of integers, or scaled along another axis than the last."""
    one, many = images(4, 4)[0], images(5, 4, 4)[0]

    def function(w, x):  # (B, 5, 4)
        rows, whole = jnp.arange(5.0)[:, None], (x * 9).astype(int)
        return {
            "matrices": jnp.einsum("bik,ikj->bij", x, many) * jnp.arange(4.0),
            "rows": (x @ one) * rows + rows,
            "columns": (x @ one) * jnp.arange(4.0) + 1,
            "integers": whole[:, 0] @ jnp.arange(8).reshape(4, 2) + jnp.arange(2),
            "batch": x[:, 0] @ one + jnp.sin(x[:, 1]),
        }

    x = images(5, 4)
    proto = onnx_model(trace(function, {}, jax.ShapeDtypeStruct((5, 4), jnp.float32)))
    check(proto)
    compare(
        answers(proto, {"input": x}),
        {k: np.asarray(v) for k, v in jax.jit(function)(None, x).items()},
    )


def test_a_weight_that_is_used_twice_is_stored_once():
    weight = images(6, 6)[0]

    def function(w, x):
        return jnp.tanh(x @ w["params"]["tied"]) @ w["params"]["tied"]

    proto = onnx_model(
        trace(
            function,
            {"params": {"tied": weight}, "state": {}},
            jax.ShapeDtypeStruct((6,), jnp.float32),
        )
    )
    assert [entry.name for entry in proto.graph.initializer] == ["tied"]


def test_outputs_that_are_inputs_or_constants_or_the_same_tensor_have_their_names():
    def function(w, x):
        y = jnp.sin(x)
        return {
            "given": x,
            "known": jnp.arange(3),
            "one": y,
            "two": y,
            "shape": x.shape[0] * jnp.ones(()),
        }

    proto = onnx_model(trace(function, {}, jax.ShapeDtypeStruct((2,), jnp.float32)))
    check(proto)
    x = images(2)
    known = {"given": x, "known": np.arange(3, dtype=np.int32), "one": np.sin(x), "two": np.sin(x)}
    compare(answers(proto, {"input": x}), known | {"shape": np.float32(BATCH).reshape(())})


def test_sizes_are_computed_from_that_of_the_batch():
    def function(w, x):
        size = x.shape[0]
        half, more = (size + 1) // 2, jnp.arange(2 * size * size - 1)
        return {
            "half": x[:half],
            "more": more,
            "rest": more[size % 2 :],
            "square": jnp.zeros((size, half)) + x.sum(),
        }

    proto = onnx_model(trace(function, {}, jax.ShapeDtypeStruct((2,), jnp.float32)))
    check(proto)
    for size in (1, 2, 5):
        x = images(2, count=size)
        compare(
            answers(proto, {"input": x}),
            {k: np.asarray(v) for k, v in function(None, jnp.asarray(x)).items()},
        )


def test_layers_within_loops_and_branches():
    """Their weights are stored outside, where they are found by their names."""
    weight = images(3, 3, 4, 4)[0] / 4

    def function(w, x):
        def step(y, scale):
            y = jax.lax.cond(
                y.mean() > 0, lambda: conv2d(w["params"], y), lambda: layer_norm(NORM4, y)
            )
            return y * scale, y.max((1, 2))

        return jax.lax.scan(step, x, jnp.arange(1.0, 4))

    weights = {"params": {"weight": weight}, "state": {}}
    x = images(5, 5, 4)
    proto = onnx_model(trace(function, weights, jax.ShapeDtypeStruct((5, 5, 4), jnp.float32)))
    check(proto)
    compare(
        answers(proto, {"input": x}),
        {k: np.asarray(v) for k, v in named_leaves(function(weights, x)).items()},
    )
    assert "weight" in {entry.name for entry in proto.graph.initializer}


def test_a_primitive_that_the_table_lacks_is_named_with_the_line_that_asks_for_it(tmp_path):
    def function(w, x):
        return jax.jit(lambda a: jax.lax.digamma(a))(x)  # here

    with pytest.raises(Missing, match=r"digamma \(.*test_onnx_ops.py:\d+") as missing:
        write_onnx(
            trace(function, {}, jax.ShapeDtypeStruct((2,), jnp.float32)), tmp_path / "a.onnx"
        )
    line = int(str(missing.value).split(".py:")[1].split(":")[0])
    assert Path(__file__).read_text().splitlines()[line - 1].endswith("# here")
    assert not list(tmp_path.iterdir())


def test_integers_of_what_is_no_number_and_of_the_largest_ones():
    def function(_, x):
        return {
            kind: x.astype(kind)
            for kind in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
        }

    x = np.array(
        [
            [
                np.nan,
                np.inf,
                -np.inf,
                -1.7,
                255.5,
                256,
                32767.5,
                65535.9,
                2**31 - 128,
                2**31,
                2**32,
                2**63,
                2**64,
                -1e20,
            ]
        ]
    )
    with jax.enable_x64(True), np.errstate(over="ignore"):
        for dtype in (np.float16, np.float32, np.float64):
            given = x.astype(dtype)
            proto = onnx_model(trace(function, {}, jax.ShapeDtypeStruct(x.shape[1:], dtype)))
            check(proto)
            compare(
                answers(proto, {"input": given}),
                {k: np.asarray(v) for k, v in jax.jit(function)(None, given).items()},
            )


def test_what_is_too_small_or_too_large_for_fewer_bits():
    function = jax.jit(lambda _, x: jax.lax.reduce_precision(x, 5, 10))
    x = np.array(
        [[1e-5, -1e-5, 6.2e-5, 1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520, np.nan, np.inf, -np.inf]],
        np.float32,
    )
    proto = onnx_model(trace(function, {}, jax.ShapeDtypeStruct(x.shape[1:], x.dtype)))
    np.testing.assert_array_equal(answers(proto, {"input": x})["output"], function(None, x))


@pytest.mark.parametrize(
    "function", [lambda x: jnp.abs(x + 1j), lambda x: x.astype(complex), lambda x: jnp.cumprod(x)]
)
def test_what_onnx_has_no_form_of_is_named_with_its_line(function):
    with pytest.raises(
        Missing,
        match=r"(complex64 numbers|a running total over the batch) \(.*test_onnx_ops.py:\d+",
    ):
        onnx_model(trace(lambda _, x: function(x), {}, jax.ShapeDtypeStruct((2,), jnp.float32)))


def test_other_types_of_numbers():
    """ONNX has no bfloat16 to speak of: what JAX computes in it is computed in float32."""
    model, x = convnext((8, 8, 1), 3, dims=(4, 6)), images(8, 8, 1)
    function, weights = trained(model)
    wanted = np.asarray(jax.jit(function)(weights, x))
    for dtype, kept, accuracy in [
        (jnp.float16, np.float16, 1e-2),
        (jnp.bfloat16, np.float32, 3e-2),
    ]:
        half = jax.tree.map(lambda leaf: leaf.astype(dtype), weights)  # noqa: B023
        proto = onnx_model(trace(function, half, jax.ShapeDtypeStruct((8, 8, 1), dtype)))
        check(proto)
        found = answers(proto, {"input": x.astype(kept)})["output"]
        assert found.dtype == kept
        assert np.abs(found - wanted).max() < accuracy * np.abs(wanted).max()
    with jax.enable_x64(True):
        double = jax.tree.map(lambda leaf: leaf.astype(np.float64), weights)
        proto = onnx_model(trace(function, double, jax.ShapeDtypeStruct((8, 8, 1), np.float64)))
        compare(
            answers(proto, {"input": x.astype(np.float64)}), {"output": wanted.astype(np.float64)}
        )


def test_the_page_of_coverage_is_as_the_cases_are():
    assert coverage.FILE.read_text() == coverage.page(), (
        "stale; python -m tests.inference.coverage writes it"
    )


def test_gaps_and_remarks_are_about_cases():
    cases = [case for group in GROUPS.values() for case in group.cases]
    assert len(cases) == len(set(cases))
    assert {*ONNX_GAPS, *TFLITE_GAPS, *REMARKS} <= set(cases)
