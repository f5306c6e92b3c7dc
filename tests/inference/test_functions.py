"""Exports from Python: any function of arrays as any format, and what the files say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference import verify
from inference.functions import export, export_signatures
from inference.runtimes import open_model
from model.base import Model
from utils import RunError, UserError

FORMATS = ("onnx", "tflite", "stablehlo")
SLOW = pytest.mark.slow
WEIGHT = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(2, 5, 6)).astype(np.float32)


@pytest.fixture(autouse=True)
def without_latency(monkeypatch):
    """How long a file takes is not measured here, which would take most of the time."""
    monkeypatch.setattr(verify, "latency", lambda model, arrays: 0.0)


def mean_product(params, x):
    """A model of sequences of any length."""
    return jnp.tanh(x @ params["w"]).mean(1)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_a_function_is_exported_with_names_and_free_sizes(format, tmp_path):
    path = tmp_path / f"model.{format}"
    names = {"input_names": ["steps"], "output_names": ["scores"]}
    report = export(mean_product, {"w": WEIGHT}, X, path, free=["1:length:2-"], **names)
    assert list(tmp_path.iterdir()) == [path]
    assert report["sizes"] == {"steps": ["batch", "length", "6"], "scores": ["batch", "3"]}
    kinds = {check["data"] for check in report["checks"]}
    others = {f"random, length {size}" for size in (2, 3, 8)}
    assert kinds == {"random", "real"} | others
    x = np.random.default_rng(2).normal(size=(3, 9, 6)).astype(np.float32)
    outputs = open_model(path)({"steps": x})
    expected = mean_product({"w": WEIGHT}, x)
    np.testing.assert_allclose(outputs["scores"], expected, rtol=1e-5, atol=1e-6)


def test_stablehlo_needs_only_jax_and_keeps_the_structure(tmp_path):
    def function(_, x):
        return {"sum": x["a"] + x["b"], "shape": jnp.arange(x["a"].shape[0])}

    example = {"a": X[:, 0], "b": X[:, 1]}
    export(lambda x: function(None, x), None, example, tmp_path / "pair.stablehlo")
    data = bytearray((tmp_path / "pair.stablehlo").read_bytes())
    exported = jax.export.deserialize(data)
    assert set(exported.platforms) >= {"cpu", "cuda", "tpu"}
    for size in (1, 4):
        given = {key: np.resize(array, (size, 6)) for key, array in example.items()}
        result, expected = exported.call(given), function(None, given)
        assert jax.tree.all(jax.tree.map(np.array_equal, result, expected))


@pytest.mark.slow
@pytest.mark.parametrize("route", ["native", pytest.param("jax2tf", marks=pytest.mark.torture)])
def test_inputs_and_outputs_keep_their_order_and_names_in_every_file(route, tmp_path):
    """Programs that read no names pass the inputs by position."""
    from ai_edge_litert.interpreter import Interpreter
    from onnxruntime import InferenceSession

    def products(x, t, a):
        return tuple(x * i - t + a * a for i in range(12))  # 10 is not between 1 and 2

    example = (X[:, 0], X[:, 1], X[:, 2])
    for format in ("onnx", "tflite"):
        export(products, None, example, tmp_path / f"a.{format}", route=route)
    session, reader = InferenceSession(tmp_path / "a.onnx"), Interpreter(str(tmp_path / "a.tflite"))
    inputs, outputs = reader.get_input_details(), reader.get_output_details()
    names = [x.name for x in session.get_inputs()]
    assert names == [each["name"] for each in inputs] == ["x", "t", "a"]
    named = [x.name for x in session.get_outputs()]
    assert named == [each["name"] for each in outputs] == list(map(str, range(12)))

    for each in inputs:
        reader.resize_tensor_input(each["index"], example[0].shape)
    reader.allocate_tensors()
    for each, array in zip(inputs, example, strict=True):
        reader.set_tensor(each["index"], array)
    reader.invoke()
    in_onnx = session.run(None, dict(zip(names, example, strict=True)))
    in_tflite = [reader.get_tensor(each["index"]) for each in outputs]
    for results in zip(in_onnx, in_tflite, products(*example), strict=True):
        np.testing.assert_allclose(results[0], results[2], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(results[1], results[2], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "stablehlo", pytest.param("tflite", marks=SLOW)])
def test_params_may_be_tables_in_float64_and_random_keys(format, tmp_path):
    """As plain JAX and the state of a Flax model with dropout have them."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.attention = nnx.MultiHeadAttention(2, 6, rngs=rngs, decode=False)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.attention(x))

    net = Net()
    net.eval()
    graph, weights = nnx.split(net)
    table = np.random.default_rng(0).normal(size=(7, 6))
    params = {"net": weights, "table": table, "key": jax.random.key(1)}

    def function(params, ids):
        noise = jax.random.normal(params["key"], (6,))
        return nnx.merge(graph, params["net"])(params["table"][ids] + noise)

    ids = np.array([[0, 6, 2], [3, 3, 5]], np.int32)
    path = tmp_path / f"a.{format}"
    export(function, params, ids, path, **{} if format == "stablehlo" else {"route": "native"})
    noise = np.asarray(jax.random.normal(jax.random.key(1), (6,)))
    [result] = open_model(path)({"input": ids[:1]}).values()
    expected = net((table[ids[:1]] + noise).astype(np.float32))
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_several_arguments_without_a_batch_are_named_as_the_parameters(tmp_path):
    def product(left, right, scale):
        return left @ right * scale

    example = (X[0], WEIGHT, np.float32(2))
    path = tmp_path / "product.onnx"
    report = export(product, None, example, path, batched=False, free=["left:0:rows"])
    assert report["inputs"]["left"] == "float32[None, 6]"
    assert report["inputs"]["right"] == "float32[6, 3]" and report["inputs"]["scale"] == "float32[]"
    given = {"left": X[1, :4], "right": WEIGHT, "scale": np.array(3, np.float32)}
    [result] = open_model(path)(given).values()
    np.testing.assert_allclose(result, X[1, :4] @ WEIGHT * 3, rtol=1e-5, atol=1e-5)
    assert {check["batch"] for check in report["checks"]} == {None}


@pytest.mark.slow
def test_a_model_with_running_statistics_and_a_flax_module_are_exported(tmp_path):
    def apply(params, state, x, *, train=False, key=None):
        return (x - state["mean"]) @ params["w"], state

    own = Model(lambda key: ({"w": WEIGHT}, {"mean": np.ones(6)}), apply)
    path = tmp_path / "own.onnx"
    with pytest.raises(UserError, match="the model has a state, such as 'mean'; pass state=, "):
        export(own, {"w": WEIGHT}, X[:, 0], path)
    export(own, {"w": WEIGHT}, X[:, 0], path, state={"mean": np.full(6, 2, np.float32)})
    [result] = open_model(path)({"input": X[:, 1]}).values()
    np.testing.assert_allclose(result, (X[:, 1] - 2) @ WEIGHT, rtol=1e-4, atol=1e-5)

    import flax.linen as nn
    from onnx import load

    module = nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(2)])
    variables = module.init(jax.random.key(0), X[:, 0])
    export(module, variables, X[:, 0], tmp_path / "flax.onnx")
    names = {weight.name for weight in load(tmp_path / "flax.onnx").graph.initializer}
    assert "params/layers_0/kernel" in names
    [result] = open_model(tmp_path / "flax.onnx")({"input": X[:, 1]}).values()
    np.testing.assert_allclose(result, module.apply(variables, X[:, 1]), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_several_signatures_share_their_weights_and_keep_their_loops(tmp_path):
    from ai_edge_litert.interpreter import Interpreter

    weight = np.random.default_rng(3).normal(size=(64, 64)).astype(np.float32) / 8

    def repeated(params, x):
        return jax.lax.while_loop(lambda y: y.max() < 9, lambda y: y + 1, x @ params["w"])

    def once(params, x):
        return {"y": jnp.tanh(x @ params["w"]), "size": x.max(1)}

    x = np.random.default_rng(4).normal(size=(2, 64)).astype(np.float32)
    path = tmp_path / "two.tflite"
    functions = {"once": (once, x), "first": (repeated, x), "again": (repeated, x)}
    reports = export_signatures(functions, {"w": weight}, path)
    assert path.stat().st_size < weight.nbytes + 16_000 < sum(r["bytes"] for r in reports.values())
    interpreter = Interpreter(str(path))
    assert set(interpreter.get_signature_list()) == set(functions)
    for name, (function, _) in functions.items():
        for size in (1, 3):
            given = np.resize(x, (size, 64))
            result = interpreter.get_signature_runner(name)(input=given)
            expected = function({"w": weight}, given)
            for key, array in (expected if name == "once" else {"output": expected}).items():
                np.testing.assert_allclose(result[key], array, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("a.pt", {}, "must end in one of .tflite, .onnx, .stablehlo"),
        ("gone/a.onnx", {}, "gone: no such folder; create it first"),
        ("a.onnx", {"opsett": 18}, "export: has no option 'opsett'; there are batch"),
        ("a.onnx", {"opset": 5}, "opset: must be 18 to 23, got 5"),
        ("a.onnx", {"input_names": ["a", "b"]}, "input_names: has 2 names, the model has 1: inp"),
        ("a.onnx", {"output_names": ["0"]}, "output_names: '0' is not a name; begin it with a"),
        ("a.onnx", {"input_names": "x", "output_names": "x"}, "'x' is the name of an input as"),
        ("a.stablehlo", {"quantize": "int8"}, "quantize: does not apply to stablehlo"),
        ("a.onnx", {"free": "2:depth"}, "model itself fails with depth 1: TypeError: dot_general"),
        ("a.onnx", {"free": "2:depth"}, 'as in free="1:length:8-512", or leave out free'),
        ("a.onnx", {"batch": 2, "batches": 3}, "batches: the batch is fixed by batch=2; remove"),
        ("a.onnx", {"classes": ["a", "b"]}, "2 names, but no output has as many numbers for each"),
        ("a.onnx", {"batch": 3, "batched": False}, "which batched=False excludes"),
        ("a.onnx", {"batches": [3], "batched": False}, "batches is about a batch, which batched"),
    ],
)
def test_a_mistake_is_refused_and_writes_nothing(path, options, message, tmp_path):
    folder = tmp_path / "folder.onnx"
    folder.mkdir()
    with pytest.raises(UserError) as error:
        export(mean_product, {"w": WEIGHT}, X, folder / path, **options)
    assert message in str(error.value) and "--" not in str(error.value)
    assert not list(folder.iterdir())


FACTORS = {1: 2.0, 5: 3.0, 512: 4.0}  # the sizes of a model that JAX traces as any other


@pytest.mark.parametrize(
    ("axis", "options", "message"),
    [
        (0, {}, "batch 1, it .* the model treats a batch of 1 in another way; .* with batch=N"),
        (0, {"batches": [5, 3]}, "the model treats a batch of 5 in another way"),
        (1, {"free": "1:n:2-"}, r'on random inputs, .*; give the range .*as in free="1:length:8-'),
        (1, {"free": "1:n"}, "on random, n 1 inputs, .* or leave out free"),
        (1, {"free": "1:n:2-512"}, "on random, n 512 inputs, .* or leave out free"),
    ],
)
def test_each_size_is_compared_with_a_run_of_jax_at_that_size(axis, options, message, tmp_path):
    """JAX never says that a free size equals a key of a dict."""

    def function(x):
        return x.sum(-1) * FACTORS.get(x.shape[axis], 1.0)

    x = X if options.get("free") == "1:n:2-" else X[:, :4]  # 5 is the size of the data, or not
    with pytest.raises(RunError, match=message):
        export(function, None, x, tmp_path / "a.onnx", route="native", **options)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "stablehlo"])
def test_a_scalar_is_one_number_for_the_whole_batch(format, tmp_path):
    def scaled(x, temperature, steps):
        return jnp.exp(x @ WEIGHT / temperature) + steps

    path = tmp_path / f"a.{format}"
    report = export(scaled, None, (X, 0.7, 3), path, free="x:1:length:2-")
    assert report["inputs"]["temperature"] == "float32[]" and report["inputs"]["steps"] == "int32[]"
    given = {"x": X[:1, :3], "temperature": np.array(2, np.float32), "steps": np.array(1, np.int32)}
    [result] = open_model(path)(given).values()
    np.testing.assert_allclose(result, scaled(X[:1, :3], 2, 1), rtol=1e-5)


@pytest.mark.slow
def test_an_example_of_zeros_is_verified_on_random_numbers_and_refused_for_int8(tmp_path, capsys):
    def function(count, x, ids):
        rows = jnp.asarray(WEIGHT)[ids].sum(-1)
        return (x + WEIGHT.mean(1)) * jnp.tanh(rows + count)[:, None]

    count, zeros, path = np.full(2, 5, np.int32), np.zeros(2, np.int32), tmp_path / "a.onnx"
    report = export(function, None, (count, 0 * X[:, 0], zeros), path)
    printed = capsys.readouterr().err
    assert "x: is 0.0 everywhere, so random inputs are standard normal" in printed
    assert "ids: is 0 everywhere, so random inputs are any of the 6 rows of its table" in printed
    assert {check["data"] for check in report["checks"]} == {"random", "real"}
    for x, name in ((0 * X[:, 0], "x"), (X[:, 0], "ids")):
        with pytest.raises(UserError) as error:
            export(function, None, (count, x, zeros), path, quantize="int8")
        message = 'quantize="int8": takes its ranges from the example, where all numbers of'
        assert f"{message} the input {name} are 0" in str(error.value)


def test_inputs_without_a_common_batch_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"one batch axis in front: a \[2, 6\], b \[6, 3\]"):
        export(lambda a, b: a @ b, None, (X[:, 0], WEIGHT), tmp_path / "a.onnx")


@pytest.mark.parametrize(
    ("function", "example", "message"),
    [
        (lambda x: None, X, "the model has no outputs: it returns None or an empty tree"),
        (jnp.real, X + 1j, "input: ONNX Runtime takes no complex64; pass its real and its imag"),
    ],
)
def test_a_result_without_numbers_is_refused_and_a_complex_example(
    function, example, message, tmp_path
):
    with pytest.raises(UserError, match=message):
        export(function, None, example, tmp_path / "a.onnx", route="native")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_weights_above_the_limit_of_protobuf_lie_beside_the_graph(tmp_path, monkeypatch):
    import onnx

    from inference import to_onnx

    monkeypatch.setattr(to_onnx, "LARGE", 2000)
    weight = np.random.default_rng(0).normal(size=(6, 100)).astype(np.float32)
    report = export(mean_product, {"w": weight}, X, tmp_path / "large.onnx")
    assert {path.name for path in tmp_path.iterdir()} == {"large.onnx", "large.onnx.data"}
    assert (tmp_path / "large.onnx").stat().st_size < 2000 < weight.nbytes < report["bytes"]
    onnx.checker.check_model(tmp_path / "large.onnx", full_check=True)
    (tmp_path / "moved").mkdir()
    for path in tmp_path.glob("large*"):
        path.rename(tmp_path / "moved" / path.name)
    [result] = open_model(tmp_path / "moved" / "large.onnx")({"input": X}).values()
    np.testing.assert_allclose(result, mean_product({"w": weight}, X), rtol=1e-4, atol=1e-5)
    export(mean_product, {"w": WEIGHT}, X, tmp_path / "small.onnx")
    assert not (tmp_path / "small.onnx.data").exists()


@pytest.mark.slow
def test_inputs_of_ones_own_are_verified_at_other_sizes_too(tmp_path):
    np.savez(tmp_path / "own.npz", input=X[:1] * 3)
    options = {"inputs": tmp_path / "own.npz", "batches": [1, 2], "tolerance": 1e-3}
    params, path = {"w": WEIGHT}, tmp_path / "a.onnx"
    report = export(mean_product, params, X, path, real_only=True, free="1:length", **options)
    kinds = [check["data"] for check in report["checks"]]
    others = [f"real, length {size}" for size in (1, 8, 3)]
    assert kinds[::2] == ["real", "own", *others]
    assert (report["tolerance"], [check["batch"] for check in report["checks"][:2]]) == (
        1e-3,
        [1, 2],
    )
    np.save(tmp_path / "one.npy", X[0])
    report = export(mean_product, params, X[0], path, batched=False, inputs=tmp_path / "one.npy")
    assert [check["data"] for check in report["checks"]] == ["random", "real", "own"]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", pytest.param("tflite", marks=pytest.mark.torture)])
def test_int8_is_judged_on_real_inputs_only(format, tmp_path):
    """Here the features of random inputs, which are independent, differ from each other many times
    as much as those of real inputs: int8 clips the differences."""
    random = np.random.default_rng(0)
    params = {"in": random.normal(size=(8, 64)), "out": random.normal(size=(64, 4))}
    x = random.random((100, 1)) + 0.01 * random.normal(size=(100, 8))  # the features are alike

    def function(params, x):
        x = x - x.mean(-1, keepdims=True)
        return jax.nn.relu(x @ params["in"]) @ params["out"]

    params, x = jax.tree.map(np.float32, (params, x))
    report = export(function, params, x, tmp_path / f"a.{format}", quantize="int8")
    assert report["judged"] == ["real", "own"]
    errors = {kind: [] for kind in ("random", "real")}
    for check in report["checks"]:
        errors[check["data"]].append(check["relative_error"])
    assert max(errors["real"]) < report["tolerance"] < min(errors["random"])
