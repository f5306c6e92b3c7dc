"""The page on which a language model writes, in a browser: what it writes, and its form."""

from collections import OrderedDict
from functools import partial

import jax
import numpy as np
import pytest

from data_loader.tokenizers.plain import CharacterTokenizer
from inference.demo.text import page_tokenizer, write_text_page
from inference.export import step_function
from inference.generate import TOKEN
from model.generate import generate
from model.gpt import gpt
from model.sampling import Sampling
from tests.inference.test_demo import needs_page, text, wait_for
from utils import named_leaves

pytestmark = [pytest.mark.slow, needs_page]
GREEDY = Sampling(temperature=0)
CONTEXT = 12


@pytest.fixture(scope="module")
def little(tmp_path_factory):
    """(a function that writes the page of an untrained model, one that lets it write in JAX)"""
    from inference.lowering.trace import trace
    from inference.to_onnx import write_onnx

    tokenizer = CharacterTokenizer(" abcdefghijklmnopqrstuvwxyz")
    model = gpt((CONTEXT,), tokenizer.end_of_text, dim=16, depth=2)  # it ends no text
    params = jax.tree.map(lambda p: 5 * p, model.init(jax.random.key(0))[0])
    cache = jax.eval_shape(lambda: model.cache(1)["cache"])
    leaves = {TOKEN: jax.ShapeDtypeStruct((1,), np.int32)} | named_leaves(cache)
    specs = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in leaves.items()}
    step = partial(step_function, model, jax.tree.structure(cache), list(named_leaves(cache)))
    path = tmp_path_factory.mktemp("little") / "little.onnx"
    write_onnx(trace(step, {"params": params, "state": {}}, OrderedDict(specs)), path)

    def page(end=None, **facts):
        end = None if end is None else int(tokenizer.encode(end)[0])
        known = page_tokenizer(tokenizer) | {"end": end} | facts
        write_text_page(path, path.with_suffix(".html"), "A <little> model", CONTEXT, known)
        return path.with_suffix(".html")

    def write(prompt, count):
        return tokenizer.decode(*generate(model, params, [tokenizer.encode(prompt)], count, GREEDY))

    return page, write


def fill(chromium, **values):
    """Type these values into the fields of the form."""
    for id, value in values.items():
        for method in ("focus", "select"):
            chromium.js(f"document.getElementById('{id}').{method}()")
        chromium.ask("Input.insertText", text=str(value))


def press(chromium, key, code, modifiers=0):
    names = {"key": key, "code": key, "windowsVirtualKeyCode": code}
    for kind in ("rawKeyDown", "keyUp"):
        chromium.ask("Input.dispatchKeyEvent", type=kind, modifiers=modifiers, **names)


def start(chromium, button="write"):
    chromium.js(f"document.getElementById('{button}').click()")


def test_what_is_typed_is_continued_and_the_ends_of_the_context_are_shown(chromium, little):
    page, write = little
    chromium.open(page())
    fill(chromium, prompt="once upon", tokens=30, temperature=0)
    count = "9 tokens; the model has room for 12"
    assert wait_for(lambda: text(chromium, "count"), lambda value: value == count)
    chromium.js("document.getElementById('prompt').focus()")
    press(chromium, "Enter", 13, modifiers=2)
    status = wait_for(lambda: text(chromium, "status"), bool)
    new = write("once upon", 30)
    assert len(new) == 30 and text(chromium, "text") == "once upon" + new
    # 4 tokens are written when 12 are read, then 7 after each half that is read again.
    assert "The context of 12 tokens was full 4 times, where you see ┊" in status
    assert chromium.js("document.querySelectorAll('#text .full').length") == 4
    start(chromium, "reuse")
    assert chromium.js("document.getElementById('prompt').value") == "once upon" + new
    count = "39 tokens, but the model has room for 12: it reads the last 6"
    assert wait_for(lambda: text(chromium, "count"), lambda value: value == count)
    start(chromium)
    assert wait_for(lambda: text(chromium, "status"), lambda value: value.startswith("30 tokens"))
    assert text(chromium, "text") == "once upon" + new + write(new[-6:], 30)
    assert chromium.js("document.querySelector('#text .unread').textContent.length") == 33
    assert {url.split(":")[0] for url in chromium.requests()} == {"file", "blob"}
    assert chromium.complaints() == []


def test_the_seed_decides_the_text_which_can_be_stopped(chromium, little):
    chromium.open(little[0]())
    options = "{tokens: 40, seed: %d, topK: 20, topP: 0.99}"
    texts = [chromium.js(f"write('once', {options % seed})") for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith("once")
    for stop in (lambda: press(chromium, "Escape", 27), lambda: start(chromium, "stop")):
        fill(chromium, prompt="once", tokens=1_000_000, temperature=0)
        start(chromium)
        wait_for(lambda: len(text(chromium, "text")), lambda length: length > 10)
        stop()
        status = wait_for(lambda: text(chromium, "status"), bool)
        assert status.startswith("Stopped after ")
    assert chromium.complaints() == []


def test_a_text_ends_where_the_model_ends_it(chromium, little):
    page, write = little
    new = write("once", 30)
    end = next(letter for letter in new if new.index(letter) > 1)
    chromium.open(page(end))
    fill(chromium, prompt="once", temperature=0)
    start(chromium)
    count = new.index(end)
    status = wait_for(lambda: text(chromium, "status"), bool)
    assert status.startswith(f"The model ended the text after {count} tokens")
    assert text(chromium, "text") == "once" + new[:count]


def test_mistakes_of_the_form_are_named(chromium, little):
    chromium.open(little[0]())
    fill(chromium, prompt="once 5")
    unknown = "Line 1, column 6: the model never saw the character “5” (U+0035)"
    assert wait_for(lambda: text(chromium, "problem"), bool).startswith(unknown)
    start(chromium)
    assert wait_for(lambda: text(chromium, "problem"), bool).startswith(unknown)
    assert not text(chromium, "text")
    chromium.js("document.getElementById('prompt').value = ''")
    start(chromium)
    assert wait_for(lambda: text(chromium, "problem"), bool).startswith("The prompt is empty, and")
    fill(chromium, prompt="once", topP=2, tokens=5)
    assert text(chromium, "problem") == ""
    start(chromium)  # the browser shows the message of the field
    assert chromium.js("document.activeElement.id") == "topP" and not text(chromium, "text")
    fill(chromium, topP=0.5)
    start(chromium)
    assert wait_for(lambda: text(chromium, "status"), bool)
    assert chromium.complaints() == []
