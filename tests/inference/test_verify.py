"""How an exported file is verified: its inputs, and the comparison with JAX."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from inference.verify import TOLERANCE, compare, difference, random_inputs, table
from utils import RunError


def loaded_model(dtype, **facts):
    return SimpleNamespace(
        inputs=jax.ShapeDtypeStruct((40,), dtype), parts=SimpleNamespace(facts=facts)
    )


def test_random_inputs_cover_the_range_that_a_model_takes():
    (floats,) = random_inputs(loaded_model(np.float32), 64).values()
    assert floats.shape == (64, 40) and abs(floats.mean()) < 0.1 and abs(floats.std() - 1) < 0.1
    (pixels,) = random_inputs(loaded_model(np.uint8), 64).values()
    assert (pixels.min(), pixels.max()) == (0, 255)
    (tokens,) = random_inputs(loaded_model(np.int32, vocab_size=50), 64).values()
    assert set(np.unique(tokens)) == set(range(50)) and tokens.dtype == np.int32


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
    cases = x, lambda size, rerun=False: {"output": 2 * x["input"][:size]}
    check = compare(model, "random", 8, x, cases[1], TOLERANCE["float32"], classes)
    report = {"file": "a.onnx", "route": "native", "nodes": 1, "bytes": 9, "judged": ["random"]}
    report |= {"checks": [check], "latency_ms": {"8": 0.5}, "inputs": {}, "outputs": {}}
    head, row = table({"onnx": report}).splitlines()[:2]
    assert ("same class" in head) == ("100.0%" in row) == classes
    assert head.index("latency") == row.index("0.500 ms")


def test_an_output_that_depends_on_the_batch_is_compared_with_a_run_on_the_same_batch():
    def model(inputs):
        return {"output": inputs["input"] - inputs["input"].mean(0)}

    def expected(size, rerun=False):
        if rerun:
            return model({"input": x[:size]})
        return {"output": model({"input": x})["output"][:size]}

    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    check = compare(model, "random", 3, {"input": x}, expected, TOLERANCE["float32"])
    assert check == {
        "data": "random",
        "batch": 3,
        "absolute_error": 0.0,
        "relative_error": 0.0,
        "same_argmax": 1.0,
    }
