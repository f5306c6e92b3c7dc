"""The page that runs a model in a browser: it answers as Python does, sees a drawing as MNIST's digits are, asks no network."""

import json
import re
import time
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.demo import page, runtime
from inference.demo.page import write_demo, write_page
from inference.demo.pixels import BYTES, UNIT, Pixels, pixels_of
from inference.load import NHWC, Form
from tests.training.browser import PROGRAM, browser
from training.preprocess import normalize, to_unit
from training.watching.pictures import png
from utils import UserError

in_browser = pytest.mark.skipif(
    PROGRAM is None or runtime.kept() is None,
    reason="needs Chromium, and ONNX Runtime Web in the cache: python -m inference.demo.runtime",
)
SIDE = "(({left, top, width}) => [left, top, width])(document.getElementById('board').getBoundingClientRect())"
BARS = "[...document.querySelectorAll('#bars li')].map(row => [row.firstChild.textContent, row.lastChild.textContent])"
SEEN = """(() => {  // a copy, so that the page's own canvas is not read back
    const seen = document.getElementById("seen"), copy = new OffscreenCanvas(seen.width, seen.height).getContext("2d");
    copy.drawImage(seen, 0, 0);
    return Array.from(copy.getImageData(0, 0, seen.width, seen.height).data);
})()"""


def shipped(inputs, preprocess=(), form=NHWC, loss="cross_entropy"):
    """What load() makes of a checkpoint, as far as a page asks."""
    return SimpleNamespace(
        inputs=inputs, preprocess=preprocess, form=form, config={"loss": {"name": loss}}
    )


def image(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """The page about the sample, untrained, and what ONNX Runtime makes of the same file."""
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
    write_demo(path, path.with_suffix(".html"), shipped(image(28, 28, 1), (to_unit,)))
    return path.with_suffix(".html"), session(path)


def session(path):
    import onnxruntime

    model = onnxruntime.InferenceSession(path)
    return lambda x: model.run(None, {"input": x})[0]


def linear_model(path, shape, classes, kind):
    """A file whose output is the product of its input, flattened, and of the weight that is the answer."""
    from onnx import TensorProto, helper, numpy_helper, save

    size = int(np.prod(shape))
    weight = np.random.default_rng(0).normal(0, 0.1, (size, classes)).astype(np.float32)
    nodes = [
        helper.make_node("Cast", ["input"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["floats"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weight"], ["output"]),
    ]
    inputs = [helper.make_tensor_value_info("input", kind, ["batch", *shape])]
    outputs = [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", classes])]
    graph = helper.make_graph(
        nodes, "linear", inputs, outputs, [numpy_helper.from_array(weight, "weight")]
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return weight


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


def percentages(page):
    """{label: per cent} of the bars; None where there is no answer."""
    return {name: float(share.rstrip("%")) if share else None for name, share in page.js(BARS)}


def until(answer, holds):
    """The answer, as soon as it holds."""
    deadline = time.monotonic() + 30
    while not holds(found := answer()):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def draw(page, *points):
    """Draw a stroke through points, in parts of the board's side."""
    left, top, side = page.js(SIDE)
    places = [
        {"x": left + side * x, "y": top + side * y, "button": "left", "buttons": 1}
        for x, y in points
    ]
    press = partial(page.ask, "Input.dispatchMouseEvent", clickCount=1)
    press(type="mousePressed", **places[0])
    for place in places[1:]:
        press(type="mouseMoved", **place)
    press(type="mouseReleased", **places[-1])


@in_browser
def test_logits_are_those_of_python(chromium, sample):
    page, python = sample
    x = np.random.default_rng(1).uniform(0, 1, (3, 28, 28, 1)).astype(np.float32)
    chromium.open(page)
    batch, single = (
        chromium.js(f"predict({x.tolist()})"),
        chromium.js(f"predict({x[1].ravel().tolist()})"),
    )
    np.testing.assert_allclose(np.reshape(batch, (3, 10)), python(x), rtol=0, atol=1e-4)
    np.testing.assert_allclose(single, python(x)[1], rtol=0, atol=1e-4)
    assert "783 numbers" in chromium.js(
        "predict(new Array(783).fill(0)).catch(error => error.message)"
    )
    assert {re.sub(":.*", "", url) for url in chromium.requests()} == {
        "file",
        "blob",
    }  # itself, and what it unpacks
    assert chromium.complaints() == []


@in_browser
def test_a_stroke_changes_the_prediction_to_that_of_what_the_model_sees(chromium, sample):
    page, python = sample
    chromium.open(page)
    none = {str(digit): None for digit in range(10)}
    assert until(lambda: percentages(chromium), bool) == none
    draw(chromium, (0.1, 0.1), (0.4, 0.1), (0.2, 0.4))  # a small 7 in a corner
    first = until(lambda: percentages(chromium), lambda shares: shares != none)
    draw(chromium, (0.15, 0.25), (0.3, 0.25))
    second = until(lambda: percentages(chromium), lambda shares: shares != first)
    expected = softmax(python((grey(chromium) / 255).astype(np.float32)[None, ..., None])[0])
    np.testing.assert_allclose(list(second.values()), 100 * expected, atol=0.06)  # told to a tenth
    best = max(second, key=second.get)
    assert (
        chromium.js("document.getElementById('best').textContent") == f"{best}{second[best]:.1f}%"
    )
    assert re.fullmatch(
        r"\d+(\.\d)? ms for an answer",
        chromium.js("document.getElementById('latency').textContent"),
    )
    chromium.js("document.getElementById('clear').click()")
    assert until(lambda: percentages(chromium), lambda shares: shares != second) == none
    assert not grey(chromium).any()
    assert chromium.complaints() == []


@in_browser
def test_a_drawing_is_prepared_as_the_digits_of_mnist(chromium, sample):
    chromium.open(sample[0])
    line, chevron = [(0.8, 0.05), (0.8, 0.3)], [(0.1, 0.9), (0.9, 0.2), (0.9, 0.9)]
    seven, slash, corner = (
        [(0.1, 0.1), (0.3, 0.1), (0.2, 0.3)],
        [(0.2, 0.2), (0.7, 0.6)],
        [(0.9, 0.1), (0.5, 0.3), (0.9, 0.8)],
    )
    for points in (line, chevron, seven, slash, corner):
        chromium.js("document.getElementById('clear').click()")
        draw(chromium, *points)
        seen = grey(chromium)
        assert sides(seen) == 20
        centre = [(seen.sum(1 - axis) * np.arange(28)).sum() / seen.sum() for axis in (0, 1)]
        assert np.abs(np.array(centre) - 14).max() <= 0.5, (
            centre
        )  # as in every picture of MNIST: it was moved by whole pixels
        assert seen.max() == 255
        assert len(np.unique(seen)) > 10 or points == line  # slanted edges are smooth


@in_browser
def test_a_dot_is_not_blown_up(chromium, sample):
    chromium.open(sample[0])
    draw(chromium, (0.5, 0.5))
    assert 2 <= sides(grey(chromium)) <= 4


def grey(page):
    """What the model sees."""
    return np.reshape(page.js(SEEN), (28, 28, 4))[..., 0].astype(float)


def sides(picture):
    """How many pixels what is drawn is high or wide, whichever is more; less than a tenth of a pixel's ink does not count."""
    return max(np.ptp(np.flatnonzero((picture > 25).any(axis))) + 1 for axis in (0, 1))


@in_browser
def test_a_picture_reaches_the_model_in_its_layout_and_scale(chromium, tmp_path):
    from onnx import TensorProto

    linear_model(tmp_path / "m.onnx", (3, 8, 6), 12, TensorProto.FLOAT)
    pixels, labels = Pixels([-1.0, 0.0, 2.0], [1.0, 3.0, -2.0]), [f"class <{i}>" for i in range(12)]
    title = "</script><b>$title"
    write_page(
        tmp_path / "m.onnx",
        tmp_path / "m.html",
        title,
        (3, 8, 6),
        layout="nchw",
        pixels=pixels,
        labels=labels,
    )
    picture = np.random.default_rng(0).integers(0, 256, (8, 6, 3), np.uint8)
    (tmp_path / "p.png").write_bytes(png(picture))
    chromium.open(tmp_path / "m.html")
    assert chromium.js("document.title") == title
    chromium.ask("DOM.getDocument")
    node = chromium.ask("Runtime.evaluate", expression="document.getElementById('file')")["result"][
        "objectId"
    ]
    chromium.ask("DOM.setFileInputFiles", files=[str(tmp_path / "p.png")], objectId=node)
    shown = until(lambda: percentages(chromium), bool)
    low, high = np.array(pixels.black), np.array(pixels.white)
    x = np.moveaxis(low + (high - low) * picture / 255, -1, 0).astype(np.float32)
    expected = 100 * softmax(session(tmp_path / "m.onnx")(x[None])[0])
    order = np.argsort(-expected)[:10]
    assert list(shown) == [labels[i] for i in order]  # the ten likeliest
    np.testing.assert_allclose(list(shown.values()), expected[order], atol=0.06)
    assert chromium.complaints() == []


@in_browser
def test_any_other_input_is_asked_for_as_numbers(chromium, tmp_path):
    from onnx import TensorProto

    linear_model(tmp_path / "m.onnx", (4,), 3, TensorProto.INT64)
    write_demo(
        tmp_path / "m.onnx", tmp_path / "m.html", shipped(image(4, dtype=jnp.int32), loss="mse")
    )
    chromium.open(tmp_path / "m.html")

    def enter(text):
        chromium.js(
            f"document.getElementById('values').value = '{text}', document.getElementById('run').click()"
        )

    told, problem = (
        partial(chromium.js, f"document.getElementById('{id}').textContent")
        for id in ("output", "problem")
    )
    until(told, bool)
    enter("[1, -2, 3, 40]")
    answer = until(told, lambda text: not re.search(r"\n0, 0, 0$", text))
    expected = session(tmp_path / "m.onnx")(np.array([[1, -2, 3, 40]]))[0]
    assert answer.startswith("1 \N{MULTIPLICATION SIGN} 3\n")
    np.testing.assert_allclose(
        [float(x) for x in answer.split("\n")[1].split(", ")], expected, rtol=1e-5
    )
    enter("[1, 2")
    assert "JSON" in until(problem, bool)
    enter("[1, 2]")
    assert until(problem, lambda text: "JSON" not in text) == "2 numbers; an example has 4"


@pytest.mark.parametrize(
    ("loss", "form", "answers"),
    [
        ("cross_entropy", NHWC, "logits"),
        ("cross_entropy", Form(softmax=True), "probabilities"),
        ("mse", NHWC, "numbers"),
    ],
)
def test_a_page_knows_what_the_answers_are_and_the_names_of_classes(
    tmp_path, monkeypatch, loss, form, answers
):
    monkeypatch.setattr(page, "runtime", lambda: {runtime.SCRIPT: b"", runtime.PROGRAM: b""})
    (tmp_path / "m.onnx").write_bytes(b"")
    write_demo(
        tmp_path / "m.onnx",
        tmp_path / "m.html",
        shipped(image(8, 8, 1), (), form, loss),
        ["a cat", "a </script>"],
    )
    facts = re.search(
        '<script type="application/json" id="facts">(.*?)</script>',
        (tmp_path / "m.html").read_text(),
    )[1]
    assert {"answers": answers, "labels": ["a cat", "a </script>"]}.items() <= json.loads(
        facts
    ).items()


def test_black_and_white_are_what_preprocessing_makes_of_them():
    scaled = partial(normalize, mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 2.0))
    found = pixels_of(shipped(image(3, 8, 6), (to_unit, scaled), Form(layout="nchw")))
    np.testing.assert_allclose(found.black, [-1, -1, 0], atol=1e-6)
    np.testing.assert_allclose(found.white, [1, 3, 0.5], atol=1e-6)
    already = pixels_of(shipped(image(8, 6, 3), (scaled,)))  # the data's pixels are floats
    np.testing.assert_allclose(already, found, atol=1e-6)
    assert (
        pixels_of(shipped(image(28, 28, 1), (to_unit,)))
        == pixels_of(shipped(image(28, 28, 1)))
        == ([0], [1])
    )
    assert pixels_of(shipped(image(28, 28, 1), (lambda x: x.astype(float),))) == ([0], [255])
    assert pixels_of(shipped(image(28, 28, 1, dtype=jnp.uint8))) == BYTES  # --with-preprocess
    assert pixels_of(shipped(image(16, dtype=jnp.int32))) == UNIT


def brighter_below(x):
    return x / 255 * jnp.arange(8.0)[:, None, None]


def gamma(x):
    return jnp.sqrt(x / 255)


def cropped(x):
    return x[:6] / 255


@pytest.mark.parametrize("wrong", [brighter_below, gamma, cropped])
def test_preprocessing_that_a_page_cannot_do_is_refused(wrong):
    with pytest.raises(UserError, match=r"--demo: the config's preprocess .* --with-preprocess"):
        pixels_of(shipped(image(8, 8, 1), (wrong,)))


def test_a_model_of_several_inputs_is_refused(tmp_path):
    with pytest.raises(UserError, match="one input; this one takes image, text"):
        write_demo(
            tmp_path / "m.onnx",
            tmp_path / "m.html",
            shipped({"image": image(8, 8, 1), "text": image(4)}),
        )
