"""Pictures in the page: the first batch, and the newest that callbacks drew, from pictures/."""

import base64
from urllib.parse import unquote

from training.report.markup import empty, note, section, tag
from training.report.read import picture_files, unlinked
from utils.files import open_file

LARGEST = 4 * 2**20  # bytes of a picture
SHOWN = 24  # pictures of callbacks
BYTES = 16 * 2**20  # of all of them


def image(content, name):
    """A PNG within the page; None if it is too large or not a PNG."""
    if len(content) > LARGEST or not content.startswith(b"\x89PNG\r\n\x1a\n"):
        return None
    return empty("img", alt=name, src=f"data:image/png;base64,{base64.b64encode(content).decode()}")


def beginning(path):
    """The bytes of a picture's file, up to one more than are shown; none if it is unreadable."""
    try:
        with open_file(unlinked(path)) as file:
            return file.read(LARGEST + 1)
    except OSError:
        return b""


def figure(path, content, caption):
    """A picture with its caption, or why there is none."""
    fault = tag("p.problem", f"{path.name} cannot be shown: it is too large or not a PNG")
    return tag("figure.batch", caption, image(content, unquote(path.stem)) or fault)


def first_batch(run):
    """The first examples of training; None if there is no picture of them."""
    path = run.folder / "pictures" / "first_batch.png"
    if path not in picture_files(run.folder, path.name):
        return None
    return section("First batch", figure(path, beginning(path), None))


def pictures(run):
    """The pictures that no other part of the page shows; None if there are none."""
    if (run.folder / "pictures").is_symlink():
        fault = "pictures is a link, which is not followed"
        return section("Pictures", tag("p.problem", fault))
    paths = [path for path in picture_files(run.folder, "*.png") if not is_elsewhere(path)]
    newest = sorted(paths, key=changed, reverse=True)[:SHOWN]
    figures, left = [], BYTES
    for path in sorted(newest):
        content = beginning(path)
        left -= len(content)
        caption = tag("figcaption", tag("h3", unquote(path.stem)))
        figures.append(figure(path, content if left >= 0 else b"", caption))
    more = len(paths) - len(newest)
    more = note(f"and {more} more in pictures/") if more else None
    return section("Pictures", figures, more) if figures else None


def is_elsewhere(path):
    """Whether another part of the page shows a picture, from its numbers where it has some."""
    return path.name == "first_batch.png" or path.with_suffix(".json").exists()


def changed(path):
    """When a file was written; 0 if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
