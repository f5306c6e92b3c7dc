"""Exported files as functions: the names of their outputs, and how their failures are reported."""

import numpy as np
import pytest

from inference.packages import quiet
from inference.runtimes import open_model
from inference.verify import compare
from utils import RunError


@pytest.fixture(scope="module")
def swapped(tmp_path_factory):
    """A TFLite file from elsewhere, whose outputs have the names of its inputs."""
    import tensorflow as tf

    class Swapped(tf.Module):
        @tf.function(
            input_signature=[tf.TensorSpec([None, 4], tf.int32, name=name) for name in "ab"]
        )
        def __call__(self, a, b):
            return {"a": b + 1, "b": a // b}

    model = Swapped()
    path = tmp_path_factory.mktemp("swapped") / "SWAPPED.TFLITE"
    function = model.__call__.get_concrete_function()
    with quiet():
        converter = tf.lite.TFLiteConverter.from_concrete_functions([function], model)
        path.write_bytes(converter.convert())
    return path


def test_the_error_of_a_file_that_fails_contains_the_reason(swapped):
    zeros = {name: np.zeros((2, 4), np.int32) for name in "ab"}
    message = r"SWAPPED\.TFLITE: fails on real inputs, batch 2: .*Division by 0"
    with pytest.raises(RunError, match=message):
        compare(open_model(swapped), "real", 2, zeros, lambda size: zeros, 1e-5)


def test_after_a_shape_that_it_rejects_a_model_accepts_the_previous_one(swapped):
    model = open_model(swapped)
    ones = {name: np.ones((2, 4), np.int32) for name in "ab"}
    model(ones)
    with pytest.raises(RuntimeError):
        model({"a": ones["a"], "b": np.ones((2, 3), np.int32)})
    np.testing.assert_array_equal(model(ones)["a"], ones["b"] + 1)
