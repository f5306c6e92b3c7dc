"""The demo page in a browser: its predictions, its drawings, and that it requests nothing."""

import re
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.demo import runtime
from inference.demo.page import Pixels, write_demo, write_page
from tests.inference.made import linear_model
from tests.inference.test_demo_page import image, loaded_model
from tests.training.browser import PROGRAM
from training.preprocess import to_unit
from training.watching.pictures import png

pytestmark = needs_page = pytest.mark.skipif(
    PROGRAM is None or runtime.cached() is None,
    reason="needs Chromium, and ONNX Runtime Web in the cache: python -m inference.demo.runtime",
)
BOARD = """(({left, top, width}) => [left, top, width])(
    document.getElementById("board").getBoundingClientRect())"""
BARS = """[...document.querySelectorAll("#bars li")].map(
    row => [row.firstChild.textContent, row.lastChild.textContent])"""
SEEN = """(() => {  // reads a copy, since reading may change how the page's own canvas is drawn
    const seen = document.getElementById("seen");
    const copy = new OffscreenCanvas(seen.width, seen.height).getContext("2d");
    copy.drawImage(seen, 0, 0);
    return Array.from(copy.getImageData(0, 0, seen.width, seen.height).data);
})()"""


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """(the page of an untrained convnext, the same file as a function in ONNX Runtime)"""
    from inference.lowering.trace import trace
    from inference.to_onnx import write_onnx
    from model.convnext import convnext

    model, random = convnext((28, 28, 1), 10, dims=(8, 16, 32)), np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params, state = jax.tree.map(
        lambda leaf: random.normal(0, 0.3, leaf.shape).astype(leaf.dtype), shapes
    )
    path = tmp_path_factory.mktemp("sample") / "mnist.onnx"
    apply = lambda weights, x: model.apply(weights["params"], weights["state"], x)[0]  # noqa: E731
    write_onnx(trace(apply, {"params": params, "state": state}, image(28, 28, 1)), path)
    write_demo(path, path.with_suffix(".html"), loaded_model(image(28, 28, 1), (to_unit,)))
    return path.with_suffix(".html"), session(path)


def session(path):
    import onnxruntime

    model = onnxruntime.InferenceSession(path)
    return lambda x: model.run(None, {"input": x})[0]


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


def text(page, id):
    return page.js(f"document.getElementById('{id}').textContent")


def clear(page):
    page.js("document.getElementById('clear').click()")


def percentages(page):
    """{label: per cent} of the bars; None for a bar without a prediction."""
    return {name: float(share.rstrip("%")) if share else None for name, share in page.js(BARS)}


def wait_for(get, condition):
    """Call `get` until its value satisfies the condition; returns that value."""
    deadline = time.monotonic() + 30
    while not condition(value := get()):
        assert time.monotonic() < deadline, value
        time.sleep(0.02)
    return value


def draw(page, *points):
    """Draw a stroke through points, which are shares of the board's side."""
    left, top, side = page.js(BOARD)
    events = [
        {"x": left + side * x, "y": top + side * y, "button": "left", "buttons": 1}
        for x, y in points
    ]
    send = partial(page.ask, "Input.dispatchMouseEvent", clickCount=1)
    send(type="mousePressed", **events[0])
    for event in events[1:]:
        send(type="mouseMoved", **event)
    send(type="mouseReleased", **events[-1])


def seen_image(page):
    """The drawing as the model sees it."""
    return np.reshape(page.js(SEEN), (28, 28, 4))[..., 0].astype(float)


def longest_side(pixels):
    """The height or width of a drawing in pixels, without pixels that are a tenth covered."""
    return max(np.ptp(np.flatnonzero((pixels > 25).any(axis))) + 1 for axis in (0, 1))


@pytest.mark.slow
def test_logits_are_equal_to_those_in_python(chromium, sample):
    page, python = sample
    x = np.random.default_rng(1).uniform(0, 1, (3, 28, 28, 1)).astype(np.float32)
    chromium.open(page)
    batch = chromium.js(f"predict({x.tolist()})")
    single = chromium.js(f"predict({x[1].ravel().tolist()})")
    np.testing.assert_allclose(np.reshape(batch, (3, 10)), python(x), rtol=0, atol=1e-4)
    np.testing.assert_allclose(single, python(x)[1], rtol=0, atol=1e-4)
    too_short = "predict(new Array(783).fill(0)).catch(error => error.message)"
    assert "783 numbers" in chromium.js(too_short)
    # The page itself, and the runtime that it unpacks.
    assert {re.sub(":.*", "", url) for url in chromium.requests()} == {"file", "blob"}
    assert chromium.complaints() == []


@pytest.mark.slow
def test_each_stroke_updates_the_prediction_for_what_the_model_sees(chromium, sample):
    page, python = sample
    chromium.open(page)
    empty = {str(digit): None for digit in range(10)}
    assert wait_for(lambda: percentages(chromium), bool) == empty
    draw(chromium, (0.1, 0.1), (0.4, 0.1), (0.2, 0.4))  # a small 7 in a corner
    first = wait_for(lambda: percentages(chromium), lambda shares: shares != empty)
    draw(chromium, (0.15, 0.25), (0.3, 0.25))
    second = wait_for(lambda: percentages(chromium), lambda shares: shares != first)
    pixels = (seen_image(chromium) / 255).astype(np.float32)
    expected = 100 * softmax(python(pixels[None, ..., None])[0])
    np.testing.assert_allclose(list(second.values()), expected, atol=0.06)  # shown with one decimal
    best = max(second, key=second.get)
    assert text(chromium, "best") == f"{best}{second[best]:.1f}%"
    assert re.fullmatch(r"\d+(\.\d)? ms per prediction", text(chromium, "latency"))
    clear(chromium)
    assert wait_for(lambda: percentages(chromium), lambda shares: shares != second) == empty
    assert not seen_image(chromium).any()
    assert chromium.complaints() == []


def test_a_drawing_is_prepared_like_the_digits_of_mnist(chromium, sample):
    chromium.open(sample[0])
    line = [(0.8, 0.05), (0.8, 0.3)]
    chevron = [(0.1, 0.9), (0.9, 0.2), (0.9, 0.9)]
    seven = [(0.1, 0.1), (0.3, 0.1), (0.2, 0.3)]
    slash = [(0.2, 0.2), (0.7, 0.6)]
    corner = [(0.9, 0.1), (0.5, 0.3), (0.9, 0.8)]
    for points in (line, chevron, seven, slash, corner):
        clear(chromium)
        draw(chromium, *points)
        pixels = seen_image(chromium)
        assert longest_side(pixels) == 20
        # As in MNIST, the image was moved by whole pixels to center its mass.
        center = [(pixels.sum(1 - axis) * np.arange(28)).sum() / pixels.sum() for axis in (0, 1)]
        assert np.abs(np.array(center) - 14).max() <= 0.5, center
        assert pixels.max() == 255
        assert len(np.unique(pixels)) > 10 or points == line  # slanted edges are smooth


def test_a_dot_is_not_enlarged(chromium, sample):
    chromium.open(sample[0])
    draw(chromium, (0.5, 0.5))
    assert 2 <= longest_side(seen_image(chromium)) <= 4


@pytest.mark.slow
def test_an_image_file_reaches_the_model_in_its_layout_and_scale(chromium, tmp_path):
    from onnx import TensorProto

    model, page = tmp_path / "m.onnx", tmp_path / "m.html"
    linear_model(model, (3, 8, 6), 12, TensorProto.FLOAT)
    pixels, labels = Pixels([-1.0, 0.0, 2.0], [1.0, 3.0, -2.0]), [f"class <{i}>" for i in range(12)]
    title = "</script><b>$title"
    write_page(model, page, title, (3, 8, 6), layout="nchw", pixels=pixels, labels=labels)
    picture = np.random.default_rng(0).integers(0, 256, (8, 6, 3), np.uint8)
    (tmp_path / "p.png").write_bytes(png(picture))
    chromium.open(page)
    assert chromium.js("document.title") == title
    chromium.ask("DOM.getDocument")
    element = chromium.ask("Runtime.evaluate", expression="document.getElementById('file')")
    node = element["result"]["objectId"]
    chromium.ask("DOM.setFileInputFiles", files=[str(tmp_path / "p.png")], objectId=node)
    shown = wait_for(lambda: percentages(chromium), bool)
    low, high = np.array(pixels.black), np.array(pixels.white)
    x = np.moveaxis(low + (high - low) * picture / 255, -1, 0).astype(np.float32)
    expected = 100 * softmax(session(model)(x[None])[0])
    order = np.argsort(-expected)[:10]
    assert list(shown) == [labels[i] for i in order]  # the ten likeliest
    np.testing.assert_allclose(list(shown.values()), expected[order], atol=0.06)
    assert chromium.complaints() == []


@pytest.mark.slow
def test_any_other_input_is_entered_as_numbers(chromium, tmp_path):
    from onnx import TensorProto

    model, page = tmp_path / "m.onnx", tmp_path / "m.html"
    linear_model(model, (4,), 3, TensorProto.INT64)
    write_demo(model, page, loaded_model(image(4, dtype=jnp.int32), loss="mse"))
    chromium.open(page)

    def enter(values):
        chromium.js(f"document.getElementById('values').value = '{values}'")
        chromium.js("document.getElementById('run').click()")

    output, problem = (partial(text, chromium, id) for id in ("output", "problem"))
    wait_for(output, bool)
    enter("[1, -2, 3, 40]")
    shown = wait_for(output, lambda value: not re.search(r"\n0, 0, 0$", value))
    assert shown.startswith("1 \N{MULTIPLICATION SIGN} 3\n")
    numbers = [float(x) for x in shown.split("\n")[1].split(", ")]
    expected = session(model)(np.array([[1, -2, 3, 40]]))[0]
    np.testing.assert_allclose(numbers, expected, rtol=1e-5)
    enter("[1, 2")
    assert "JSON" in wait_for(problem, bool)
    enter("[1, 2]")
    message = wait_for(problem, lambda value: "JSON" not in value)
    assert message == "2 numbers; an example has 4"
    for value, fault in (("null", "null is not a number"), ('"a"', '"a" is not a number')):
        enter(f"[1, 2, 3, {value}]")
        wait_for(problem, lambda message, fault=fault: message == fault)
    enter("[1, 2, 3, 1.5]")
    wait_for(problem, lambda message: message == "1.5 is not a number of type int64")
