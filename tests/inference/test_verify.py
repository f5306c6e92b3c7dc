"""What an exported file is asked, and how its answers are judged."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from inference.verify import TOLERANCE, compare, difference, random_inputs
from utils import RunError


def shipped(dtype, **facts):
    return SimpleNamespace(
        inputs=jax.ShapeDtypeStruct((40,), dtype), parts=SimpleNamespace(facts=facts)
    )


def test_random_inputs_are_of_the_whole_range_that_a_model_takes():
    (floats,) = random_inputs(shipped(np.float32), 64).values()
    assert floats.shape == (64, 40) and abs(floats.mean()) < 0.1 and abs(floats.std() - 1) < 0.1
    (pixels,) = random_inputs(shipped(np.uint8), 64).values()
    assert (pixels.min(), pixels.max()) == (0, 255)
    (tokens,) = random_inputs(shipped(np.int32, vocab_size=50), 64).values()
    assert set(np.unique(tokens)) == set(range(50)) and tokens.dtype == np.int32


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_on_one_side_alone_is_off_without_bound(bad):
    wanted = {"output": np.array([[1.0, 2.0], [3.0, 4.0]])}
    found = {"output": np.array([[1.0, 2.0], [3.0, bad]])}
    assert difference(found, wanted)["relative_error"] == np.inf
    assert difference(wanted, found)["relative_error"] == np.inf
    assert difference(found, found)["relative_error"] == 0


def test_of_numbers_none_of_which_is_finite_nothing_is_said():
    nothing = {"output": np.full((2, 2), np.nan)}
    with pytest.raises(RunError, match="no finite number"):
        difference(nothing, nothing)


def test_an_output_of_another_size_is_asked_for_again_with_just_these_inputs():
    def model(inputs):
        return {
            "output": inputs["input"] - inputs["input"].mean(0)
        }  # mixes the examples of a batch

    def answers(size, exactly=False):
        return (
            model({"input": x[:size]})
            if exactly
            else {"output": model({"input": x})["output"][:size]}
        )

    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    check = compare(model, "random", 3, {"input": x}, answers, TOLERANCE["float32"])
    assert check == {
        "data": "random",
        "batch": 3,
        "absolute_error": 0.0,
        "relative_error": 0.0,
        "same_argmax": 1.0,
    }
