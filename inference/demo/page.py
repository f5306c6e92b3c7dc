"""A page that runs an exported model in a browser: one file, which opens from a disk and asks no network for anything."""

import base64
import gzip
import hashlib
import html
import json
from pathlib import Path
from string import Template

import jax

from inference.demo.pixels import UNIT, pixels_of
from inference.demo.runtime import PROGRAM, SCRIPT, VERSION, runtime
from inference.load import answers
from utils import UserError, atomic_write, named_leaves

HERE = Path(__file__).parent
SCRIPTS = ("model.js", "answer.js", "pixels.js", "draw.js", "image.js", "numbers.js", "start.js")
SIDES = range(8, 65)  # of a picture that one may draw


def write_demo(model, page, shipped, classes=None):
    """Write a page about the ONNX file `model`, made of what was `shipped`; `classes` are their names."""
    if not isinstance(shipped.inputs, jax.ShapeDtypeStruct):
        raise UserError(
            f"--demo: the page gives a model one input; this one takes {', '.join(named_leaves(shipped.inputs))}"
        )
    facts = {
        "layout": shipped.form.layout,
        "pixels": pixels_of(shipped),
        "answers": answers(shipped.config, shipped.form),
    }
    write_page(model, page, Path(model).stem, shipped.inputs.shape, labels=classes, **facts)


def write_page(
    model, page, title, shape, *, layout="nhwc", pixels=UNIT, answers="logits", labels=None
):
    """Write a page about the ONNX file `model`, which takes examples of `shape`, of black and white `pixels`.

    It `answers` with "logits" or "probabilities" of classes, which `labels` name, or with "numbers". On the page for a square
    picture of one channel one draws; to that for another one shows a picture.
    """
    facts = {
        "title": title,
        "shape": list(shape),
        "answers": answers,
        "labels": labels,
        **asked(shape, layout, pixels),
    }
    atomic_write(page, document(Path(model).read_bytes(), facts).encode())


def asked(shape, layout, pixels):
    """How the page asks for an example: by a drawing, a picture, or numbers."""
    channels = 0 if layout == "nchw" else 2
    if len(shape) != 3 or shape[channels] not in (1, 3, 4):
        return {"input": "numbers"}
    height, width = (size for axis, size in enumerate(shape) if axis != channels)
    drawn = shape[channels] == 1 and height == width and height in SIDES
    size = {"height": height, "width": width, "channels": shape[channels], "layout": layout}
    return {"input": "draw" if drawn else "image", **size, **pixels._asdict()}


def document(model, facts):
    """The page's text."""
    files = runtime()
    script = "\n".join(HERE.joinpath(name).read_text() for name in SCRIPTS)
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(HERE.joinpath("page.html").read_text()).substitute(
        # this script alone runs, with the runtime that it unpacks; without `connect-src` the browser lets nothing be fetched
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}' blob: 'wasm-unsafe-eval'",
        title=html.escape(facts["title"]),
        version=VERSION,
        style=HERE.joinpath("style.css").read_text(),
        script=script,
        facts=json.dumps(facts).replace("<", "\\u003c"),
        runtime=packed(files[SCRIPT]),
        program=packed(files[PROGRAM]),
        model=packed(model),
    )


def packed(content):
    """Bytes as text; compressed, the runtime is a quarter."""
    return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()
