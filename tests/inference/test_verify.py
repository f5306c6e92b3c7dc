"""How an exported file is verified: its inputs, and the comparison with JAX."""

import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from inference.load import NHWC, Form
from inference.lowering.trace import trace
from inference.verify import compare, difference, random_inputs, table, table_sizes
from tests.inference.conftest import read_report
from utils import RunError


def loaded_model(dtype, shape=(40,), form=NHWC, **facts):
    inputs = jax.ShapeDtypeStruct(shape, dtype)
    return SimpleNamespace(inputs=inputs, parts=SimpleNamespace(facts=facts), form=form)


def test_random_inputs_cover_the_range_that_a_model_takes():
    (floats,) = random_inputs(loaded_model(np.float32), 64).values()
    assert floats.shape == (64, 40) and abs(floats.mean()) < 0.1 and abs(floats.std() - 1) < 0.1
    (pixels,) = random_inputs(loaded_model(np.uint8), 64).values()
    assert (pixels.min(), pixels.max()) == (0, 255)
    (tokens,) = random_inputs(loaded_model(np.int32, vocab_size=50), 64).values()
    assert set(np.unique(tokens)) == set(range(50)) and tokens.dtype == np.int32


def test_random_inputs_are_in_the_range_of_each_feature_of_the_data():
    low, high = np.array([0, -5, 1000, 7]), np.array([1, 5, 5000, 7])
    seen = np.linspace(low, high, 30).astype(np.float32)
    seen[3, 0] = np.nan  # a value that is missing
    model = loaded_model(np.float32, (4,))
    (drawn,) = random_inputs(model, 500, {"input": seen}).values()
    assert (drawn.min(0) >= low).all() and (drawn.max(0) <= high).all()
    assert ((drawn.max(0) - drawn.min(0)) >= 0.9 * (high - low)).all()
    columns = np.array([[3, 0, 250], [9, 1, 255]], np.uint8)
    (drawn,) = random_inputs(loaded_model(np.uint8, (3,)), 500, {"input": columns}).values()
    assert drawn.dtype == np.uint8
    assert drawn.min(0).tolist() == [3, 0, 250] and drawn.max(0).tolist() == [9, 1, 255]
    channels = np.stack([np.full((6, 6), 0.5), np.eye(6) * 9]).astype(np.float32)
    nchw = loaded_model(np.float32, (2, 6, 6), Form("nchw"))
    (drawn,) = random_inputs(nchw, 50, {"input": channels[None]}).values()
    assert (drawn[:, 0] == 0.5).all() and drawn[:, 1].min((0, 2)).max() < 1


def test_integers_are_drawn_within_the_table_that_they_index():
    params = {"tokens": np.ones((50, 2), np.float32), "kinds": np.ones((2, 3), np.float32)}

    def lookup(weights, x):
        rows = jax.vmap(jax.jit(lambda ids: weights["params"]["tokens"][ids.reshape(-1)]))(x["ids"])
        kinds = jax.numpy.take(weights["params"]["kinds"], x["kind"][:, 0], axis=1, mode="clip")
        return rows.sum((1, 2)) + kinds.sum(0) + x["count"]

    leaf = jax.ShapeDtypeStruct((40,), np.int32)
    inputs = {
        "ids": leaf,
        "kind": jax.ShapeDtypeStruct((1,), np.uint8),
        "count": leaf.update(shape=()),
    }
    sizes = table_sizes(trace(lookup, {"params": params, "state": {}}, inputs))
    assert sizes == {"ids": 50, "kind": 3}
    model = loaded_model(np.int32)
    (drawn,) = random_inputs(model, 64, None, {"input": 50}).values()
    assert set(np.unique(drawn)) == set(range(50))
    seen = {"input": np.full((3, 40), 60)}  # such an id would be an error in some runtimes
    (drawn,) = random_inputs(model, 64, seen, {"input": 50}).values()
    assert set(np.unique(drawn)) == set(range(50))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_on_one_side_is_an_infinite_error(bad):
    finite = {"output": np.array([[1.0, 2.0], [3.0, 4.0]])}
    damaged = {"output": np.array([[1.0, 2.0], [3.0, bad]])}
    assert difference(damaged, finite)["relative_error"] == np.inf
    assert difference(finite, damaged)["relative_error"] == np.inf
    assert difference(damaged, damaged)["relative_error"] == 0


def test_a_reference_without_finite_numbers_is_an_error():
    nans = {"output": np.full((2, 2), np.nan)}
    with pytest.raises(RunError, match="no finite number"):
        difference(nans, nans)


@pytest.mark.parametrize("classes", [True, False])
def test_only_outputs_that_are_classes_have_a_column_for_them(classes):
    def model(inputs):
        return {"output": inputs["input"] * 2}

    x = {"input": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)}
    check = compare(model, "random", 8, x, lambda size: {"output": 2 * x["input"][:size]}, classes)
    report = {"file": "a.onnx", "route": "native", "nodes": 1, "bytes": 9, "judged": ["random"]}
    report |= {"checks": [check], "latency_ms": {"8": 0.5}, "inputs": {}, "outputs": {}}
    head, row = table({"onnx": report}).splitlines()[:2]
    assert ("same class" in head) == ("100.0%" in row) == classes
    assert head.index("latency") == row.index("0.500 ms")


ONNX = ("--name", "small", "--formats", "onnx", "--route", "native")


@pytest.mark.slow
def test_the_tolerance_is_that_of_the_user(convert, tmp_path):
    code, printed = convert(*ONNX, "--tolerance", 1e-12)
    assert code == 1 and "the tolerance is 1e-12; --tolerance sets another" in printed
    assert convert(*ONNX, "--tolerance", 0.5)[0] == 0
    assert read_report(tmp_path)["formats"]["onnx"]["tolerance"] == 0.5


@pytest.mark.slow
def test_the_user_chooses_what_is_verified(small, convert, tmp_path):
    np.save(tmp_path / "some.npy", np.random.default_rng(0).random((5, 28, 28, 1)))
    options = (
        "--real-only",
        "--inputs",
        tmp_path / "some.npy",
        "--batches",
        2,
        7,
        "--tolerance",
        1,
    )
    code, printed = convert(*ONNX, *options)
    assert code == 0, printed
    report = read_report(tmp_path)["formats"]["onnx"]
    checks = {(check["data"], check["batch"]) for check in report["checks"]}
    assert checks == {(kind, size) for kind in ("real", "own") for size in (2, 7)}
    code, printed = convert(*ONNX, "--force", "--real-only", "data.args.train_size=0")
    assert code == 2 and "--real-only: no data can be loaded" in printed


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 28, 28)), "the file takes input float32[any, 28, 28, 1], got float64[2, 28"),
        (np.full((2, 28, 28, 1), "a"), "the file takes input float32[any, 28, 28, 1], got <U1[2"),
        (np.zeros((0, 28, 28, 1)), "needs one row per input in every array, got {'input': 0}"),
        (np.full((2, 28, 28, 1), None), "cannot be read"),
    ],
)
def test_inputs_that_the_file_does_not_take_are_refused(convert, tmp_path, array, message):
    np.save(tmp_path / "some.npy", array)
    code, printed = convert(*ONNX, "--inputs", tmp_path / "some.npy")
    assert code == 2 and f"--inputs: {tmp_path / 'some.npy'}: {message}" in printed


@pytest.mark.slow
def test_a_batch_size_that_the_model_treats_in_another_way_is_noticed(own, convert):
    code, printed = convert(*ONNX, **own("other_for_seven"))
    message = r"batch 7, it is off by .*the model treats a batch of 7 in another way \(.*own_models"
    assert code == 1 and re.search(message, printed), printed
    code, printed = convert(*ONNX, **own("squeezed_for_two"))  # but its numbers are the same
    assert code == 0 and re.search(r"random +2 ", printed), printed
