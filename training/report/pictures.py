"""The pictures that a run's callbacks drew: the newest of each name, from its pictures/ folder."""

from urllib.parse import unquote

from training.report.markup import note, section, tag
from training.report.mistakes import beginning, image
from training.report.read import picture_files

SHOWN = 24  # pictures
BYTES = 16 * 2**20  # of all of them


def pictures(run):
    """The pictures that no other part of the page shows; None if there are none."""
    if (run.folder / "pictures").is_symlink():
        fault = "pictures is a link, which is not followed"
        return section("Pictures", tag("p.problem", fault))
    paths = [path for path in picture_files(run.folder, "*.png") if not is_elsewhere(path)]
    newest = sorted(paths, key=changed, reverse=True)[:SHOWN]
    figures, left = [], BYTES
    for path in sorted(newest):
        try:
            content = beginning(path)
        except FileNotFoundError:
            continue  # deleted, or replaced, at this moment
        except OSError:
            content = b""
        shown = image(content, unquote(path.stem)) if len(content) <= left else None
        left -= len(content)
        fault = tag("p.problem", f"{path.name} is not shown: it is too large or not a PNG")
        caption = tag("figcaption", tag("h3", unquote(path.stem)))
        figures.append(tag("figure.batch", caption, shown or fault))
    if not figures:
        return None
    more = len(paths) - len(newest)
    return section("Pictures", *figures, note(f"and {more} more in pictures/") if more else None)


def is_elsewhere(path):
    """Whether another part of the page shows a picture, from its numbers where it has some."""
    return path.name == "first_batch.png" or path.with_suffix(".json").exists()


def changed(path):
    """When a file was written; 0 if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
