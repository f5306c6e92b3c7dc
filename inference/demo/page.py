"""Write a web page that runs an exported model: one file, which works offline."""

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from inference.demo.runtime import PROGRAM, SCRIPT, VERSION, runtime
from inference.load import Exportable
from inference.lowering.trace import describe
from utils import UserError, named_leaves
from utils.files import atomic_write

HERE = Path(__file__).parent
SIDES = range(8, 65)  # of the images that a user may draw
LONGEST = 2**29 - 25  # characters of a text in Chromium, which reads the model as one
FIX = "include it in the exported file with --with-preprocess"


class Pixels(NamedTuple):
    """The values of black and white, one number or one per channel; grey is linear in between."""

    black: float | list
    white: float | list


UNIT, BYTES = Pixels(0, 1), Pixels(0, 255)


def write_demo(
    model: Path, page: Path, exportable: Exportable, classes: Sequence[str] | None = None
) -> None:
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
    model: Path,
    page: Path,
    title: str,
    shape: Sequence[int],
    *,
    layout: str | None = "nhwc",
    pixels: Pixels = UNIT,
    kind: str = "logits",
    labels: Sequence[str] | None = None,
) -> None:
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
    atomic_write(page, document(model, facts, "prediction").encode())


def input_facts(shape: Sequence[int], layout: str | None, pixels: Pixels) -> dict[str, Any]:
    """How the user enters an example: by drawing, by choosing an image, or as numbers."""
    channels = 0 if layout == "nchw" else 2
    if len(shape) != 3 or shape[channels] not in (1, 3, 4):
        return {"input": "numbers"}
    height, width = (size for axis, size in enumerate(shape) if axis != channels)
    is_drawn = shape[channels] == 1 and height == width and height in SIDES
    size = {"height": height, "width": width, "channels": shape[channels], "layout": layout}
    return {"input": "draw" if is_drawn else "image", **size, **pixels._asdict()}


def document(
    model: Path, facts: dict[str, Any], kind: str, *scripts: str, **contents: bytes
) -> str:
    """The text of a page that holds a model, and other contents by the ids of their elements. The
    page has the body and the script of its `kind`, and more `scripts` before that one."""
    if Path(f"{model}.data").exists():
        raise UserError(f"--demo: {model.name} has its weights in a second file, which no page has")
    files = runtime()
    script = "\n".join(part(f"{name}.js") for name in ("session", *scripts, kind))
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
        body=part(f"{kind}.html"),
        script=script,
        facts=json.dumps(facts).replace("<", "\\u003c"),
        packed="\n".join(elements.values()),
    )


def part(name: str) -> str:
    """The text of a file that is a part of pages."""
    return HERE.joinpath(name).read_text(encoding="utf-8")


def packed(content: bytes) -> str:
    """Bytes as text; compression makes the runtime four times smaller."""
    return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()


def pixels_of(exportable: Exportable) -> Pixels:
    """The pixel values of an image model, measured by preprocessing images of one color, and one
    drawn at random, which must agree with them.

    Models of other inputs get UNIT.
    """
    (example,) = jax.tree.leaves(exportable.inputs)
    shape, dtype = example.shape, example.dtype
    if dtype == np.uint8:
        return BYTES
    if len(shape) != 3:
        return UNIT
    if exportable.form.layout == "nchw":
        shape = (*shape[1:], shape[0])  # preprocessing takes channels last
    for kind, full in ((np.uint8, 255), (np.float32, 1)):
        drawn = np.random.default_rng(0).uniform(0, full, shape).astype(kind)
        images = *(jnp.full(shape, share * full, kind) for share in (0, 0.2, 1)), jnp.asarray(drawn)
        try:
            black, grey, white, noise = (preprocessed(exportable.preprocess, x) for x in images)
        except ValueError:  # preprocessing rejects this dtype
            continue
        except Exception as error:  # it may be the user's own, and take several inputs
            message = f"--demo: the config's preprocess fails on an image: {describe(error)}"
            raise UserError(message) from error
        if black.dtype == dtype:
            return linear_pixels(black, grey, white, noise, drawn / full)
    return UNIT


def preprocessed(preprocess: Sequence[Callable[[PyTree], PyTree]], image: Array) -> np.ndarray:
    return np.asarray(reduce(lambda x, fn: fn(x), preprocess, image))


def linear_pixels(
    black: np.ndarray, grey: np.ndarray, white: np.ndarray, noise: np.ndarray, shares: np.ndarray
) -> Pixels:
    """The pixel values; raises unless they are linear and the same at every position. `noise` is
    the image of these shares of white."""
    alike = "--demo: the config's preprocess does not treat all pixels alike, as the page does; "
    span, is_same_shape = white - black, black.shape == shares.shape
    if not is_same_shape or any(np.ptp(image, axis=(0, 1)).any() for image in (black, white)):
        raise UserError(alike + FIX)
    near = 1e-5 * max(np.abs(span).max(), 1e-6)
    if not np.allclose(grey, black + span / 5, atol=near):
        raise UserError(
            f"--demo: the config's preprocess is not linear in the pixels, as the page is; {FIX}"
        )
    if not np.allclose(noise, black + span * shares, atol=near):
        raise UserError(alike + FIX)
    return Pixels(black[0, 0].tolist(), white[0, 0].tolist())
