"""Write a web page that runs an exported model: one file, which works offline."""

import base64
import gzip
import hashlib
import html
import json
from pathlib import Path
from string import Template

from inference.demo.pixels import UNIT, pixels_of
from inference.demo.runtime import PROGRAM, SCRIPT, VERSION, runtime
from utils import UserError, named_leaves
from utils.files import atomic_write

HERE = Path(__file__).parent
SCRIPTS = (
    *("model.js", "prediction.js", "pixels.js"),
    *("draw.js", "image.js", "numbers.js", "start.js"),
)
SIDES = range(8, 65)  # of the images that a user may draw
LONGEST = 2**29 - 25  # characters of a text in Chromium, which reads the model as one


def write_demo(model, page, exportable, classes=None):
    """Write a page for the ONNX file `model`, of an `Exportable`; `classes` are the names."""
    leaves = named_leaves(exportable.inputs)
    if len(leaves) != 1:
        raise UserError(f"--demo: needs a model with one input; this one takes {', '.join(leaves)}")
    (example,) = leaves.values()
    write_page(
        model,
        page,
        Path(model).stem,
        example.shape,
        layout=exportable.form.layout,
        pixels=pixels_of(exportable),
        kind=exportable.output_kind,
        labels=classes,
    )


def write_page(
    model, page, title, shape, *, layout="nhwc", pixels=UNIT, kind="logits", labels=None
):
    """Write a page for the ONNX file `model`, whose examples have this shape and these pixels.

    `kind` says what the model returns: "logits" or "probabilities" of the classes `labels`, or
    "numbers". The user draws a small square image of one channel, and chooses any other image.
    """
    facts = {
        "title": title,
        "shape": list(shape),
        "output_kind": kind,
        "labels": labels,
        **input_facts(shape, layout, pixels),
    }
    atomic_write(page, document(model, facts, "prediction.html", SCRIPTS).encode())


def input_facts(shape, layout, pixels):
    """How the user enters an example: by drawing, by choosing an image, or as numbers."""
    channels = 0 if layout == "nchw" else 2
    if len(shape) != 3 or shape[channels] not in (1, 3, 4):
        return {"input": "numbers"}
    height, width = (size for axis, size in enumerate(shape) if axis != channels)
    is_drawn = shape[channels] == 1 and height == width and height in SIDES
    size = {"height": height, "width": width, "channels": shape[channels], "layout": layout}
    return {"input": "draw" if is_drawn else "image", **size, **pixels._asdict()}


def document(model, facts, body, scripts, **contents):
    """The text of a page that holds a model, and other contents by the ids of their elements."""
    if Path(f"{model}.data").exists():
        raise UserError(f"--demo: {model.name} has its weights in a second file, which no page has")
    files = runtime()
    script = "\n".join(map(part, ("session.js", *scripts)))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Only this script may run, and the runtime that it unpacks. Without `connect-src`, the browser
    # does not let the page request anything.
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}' blob: 'wasm-unsafe-eval'"
    )
    contents |= {"runtime": files[SCRIPT], "program": files[PROGRAM]}
    contents |= {"model": Path(model).read_bytes()}
    elements = {
        id: f'<script type="text/plain" id="{id}">{packed(content)}</script>'
        for id, content in contents.items()
    }
    if len(elements["model"]) > LONGEST:
        raise UserError(
            f"--demo: {model.name} is larger than what a browser reads of a page, about "
            f"{LONGEST * 3 // 4 >> 20} MiB; --quantize dynamic makes it smaller"
        )
    return Template(part("page.html")).substitute(
        policy=policy,
        title=html.escape(facts["title"]),
        version=VERSION,
        style=part("style.css"),
        body=part(body),
        script=script,
        facts=json.dumps(facts).replace("<", "\\u003c"),
        packed="\n".join(elements.values()),
    )


def part(name):
    """The text of a file that is a part of pages."""
    return HERE.joinpath(name).read_text(encoding="utf-8")


def packed(content):
    """Bytes as text; compression makes the runtime four times smaller."""
    return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()
