"""The demo page without a browser: the facts that it contains, and the models that it refuses."""

import json
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.demo import page, runtime
from inference.demo.page import BYTES, UNIT, pixels_of, write_demo
from inference.load import NHWC, Form, output_kind
from training.preprocess import normalize, to_unit
from utils import UserError


def loaded_model(inputs, preprocess=(), form=NHWC, loss="cross_entropy"):
    """The fields of a loaded model that a page reads."""
    kind = output_kind({"loss": {"name": loss}}, form, None)
    return SimpleNamespace(inputs=inputs, preprocess=preprocess, form=form, output_kind=kind)


def image(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("loss", "form", "kind"),
    [
        ("cross_entropy", NHWC, "logits"),
        ("cross_entropy", Form(softmax=True), "probabilities"),
        ("mse", NHWC, "numbers"),
    ],
)
def test_a_page_contains_the_kind_of_output_and_the_class_names(
    tmp_path, monkeypatch, loss, form, kind
):
    monkeypatch.setattr(page, "runtime", lambda: {runtime.SCRIPT: b"", runtime.PROGRAM: b""})
    model, html = tmp_path / "m.onnx", tmp_path / "m.html"
    model.write_bytes(b"")
    labels = ["a cat", "a </script>"]
    write_demo(model, html, loaded_model(image(8, 8, 1), (), form, loss), labels)
    element = '<script type="application/json" id="facts">(.*?)</script>'
    facts = json.loads(re.search(element, html.read_text())[1])
    assert (facts["output_kind"], facts["labels"]) == (kind, labels)


def test_preprocessing_that_takes_no_image_is_refused_with_its_line():
    def resized(x):
        return x["image"]

    with pytest.raises(UserError, match="--demo: the config's preprocess fails on an image") as why:
        pixels_of(loaded_model(image(8, 6, 3), (resized,)))
    assert f"{__file__}:" in str(why.value)


def test_black_and_white_are_measured_through_the_preprocessing():
    scaled = partial(normalize, mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 2.0))
    of_bytes = pixels_of(loaded_model(image(3, 8, 6), (to_unit, scaled), Form(layout="nchw")))
    np.testing.assert_allclose(of_bytes.black, [-1, -1, 0], atol=1e-6)
    np.testing.assert_allclose(of_bytes.white, [1, 3, 0.5], atol=1e-6)
    of_floats = pixels_of(loaded_model(image(8, 6, 3), (scaled,)))
    np.testing.assert_allclose(of_floats, of_bytes, atol=1e-6)
    digit = image(28, 28, 1)
    assert pixels_of(loaded_model(digit, (to_unit,))) == ([0], [1])
    assert pixels_of(loaded_model(digit)) == ([0], [1])
    assert pixels_of(loaded_model(digit, (lambda x: x.astype(float),))) == ([0], [255])
    with_preprocess = image(28, 28, 1, dtype=jnp.uint8)  # as --with-preprocess exports it
    assert pixels_of(loaded_model(with_preprocess)) == BYTES
    assert pixels_of(loaded_model(image(16, dtype=jnp.int32))) == UNIT


def brighter_below(x):
    return x / 255 * jnp.arange(8.0)[:, None, None]


def gamma(x):
    return jnp.sqrt(x / 255)


def cropped(x):
    return x[:6] / 255


def standard(x):
    return (x - x.mean()) / (x.std() + 1e-6)


def mirrored(x):
    return x[:, ::-1] / 255


@pytest.mark.parametrize("preprocess", [brighter_below, gamma, cropped, standard, mirrored])
def test_preprocessing_that_a_page_cannot_do_is_refused(preprocess):
    with pytest.raises(UserError, match=r"--demo: the config's preprocess .* --with-preprocess"):
        pixels_of(loaded_model(image(8, 8, 1), (preprocess,)))


def test_a_model_with_several_inputs_is_refused(tmp_path):
    loaded = loaded_model({"image": image(8, 8, 1), "text": image(4)})
    with pytest.raises(UserError, match="one input; this one takes image, text"):
        write_demo(tmp_path / "m.onnx", tmp_path / "m.html", loaded)
