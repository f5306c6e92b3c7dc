"""The export command's --input and --input-layout: shapes as they are written, and layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference import convert_tflite
from inference.load import channels_first, channels_last, load_to_export
from inference.runtimes import open_model
from tests.inference.conftest import read_report
from utils import UserError

ONNX = ("--name", "small", "--formats", "onnx")


def test_an_input_shape_may_be_quoted():
    parse = convert_tflite.parse_shape
    assert parse(["(1, 1, 28, 14)"]) == parse(["1,1,28,14"]) == parse(["1", "1", "28", "14"])


@pytest.mark.torture
@pytest.mark.parametrize(
    ("given", "layout"),
    [(["1", "1", "28", "14"], []), (["(1, 1, 28, 14)"], ["--input-layout", "nchw"])],
)
def test_an_input_shape_may_have_the_channels_first(convolution, convert, tmp_path, given, layout):
    code, printed = convert(*ONNX, "--input", *given, *layout, **convolution)
    assert code == 0, printed
    note = "--input 1 1 28 14 has the channels first, so the files take images in nchw"
    assert (note in printed) == (not layout)
    path = tmp_path / "out" / "small" / "small.onnx"
    assert open_model(path).inputs["input"][0] == (None, 1, 28, 14)
    assert read_report(tmp_path)["form"]["layout"] == "nchw"
    x = np.random.default_rng(0).random((2, 28, 14, 1), np.float32)
    loaded = load_to_export(convolution["config"], convolution["weights"], shape=(28, 14, 1))
    expected = jax.jit(loaded.function)(loaded.weights, x)
    result = open_model(path)({"input": x.transpose(0, 3, 1, 2)})["output"]
    np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--input", "1", "28", "14", "1", "--input-layout", "nchw"],
            "--input 1 28 14 1: --input-layout nchw has the channels first: --input 1 1 28 14",
        ),
        (
            ["--input", "1,1,28,14", "--input-layout", "nhwc"],
            "--input 1 1 28 14: --input-layout nhwc has the channels last: --input 1 28 14 1, or "
            "--input-layout nchw",
        ),
    ],
)
def test_an_input_shape_in_another_layout_than_stated_is_refused(
    convolution, convert, arguments, message
):
    code, printed = convert(*ONNX, *arguments, **convolution)
    assert (code, printed.splitlines()[-1]) == (2, message)


@pytest.mark.parametrize("shape", [(3, 9, 3), (9, 3), (5, 5, 5)])
@pytest.mark.parametrize("known", [None, (8, 8, 3), (10,)])
def test_a_shape_that_can_be_read_both_ways_is_in_the_stated_layout(shape, known, capsys):
    assert channels_last(shape, None, known) == (shape, "nhwc")
    turned = (*shape[1:], shape[0]) if len(shape) == 3 else shape
    assert channels_last(shape, "nchw", known) == (turned, "nchw")
    assert capsys.readouterr().out == ""


def test_only_images_have_channels():
    with pytest.raises(UserError, match=r"channels\); this one takes \[2\]$"):
        channels_first(jax.ShapeDtypeStruct((2,), jnp.float32))
