"""Images in tar files, as WebDataset writes them, read sample by sample in any order."""

import io
from functools import partial
from typing import Annotated, Literal

import numpy as np

from data_loader.base import Data, Parsed
from data_loader.folder import decoded, need_pillow
from data_loader.grain_source import MEMORY_MB, Records, data_of
from data_loader.record_files import RecordFiles
from data_loader.records import npy_array
from utils import UserError, cut
from utils.files import parse_json
from utils.forms import Count, CountOrZero, LocalPath, at_most, checked

IMAGES = "jpg;jpeg;png;webp"


@checked
def webdataset(
    train: LocalPath,
    test: LocalPath | None = None,
    val: LocalPath | None = None,
    x: str = IMAGES,
    y: str = "cls",
    field: str | None = None,
    image_size: tuple[int, int] | None = None,
    color: Literal["rgb", "gray"] = "rgb",
    num_classes: Count | None = None,
    classes: tuple[str, ...] | None = None,
    workers: Annotated[CountOrZero, at_most(1024)] = 0,
    memory_mb: CountOrZero = MEMORY_MB,
) -> Data:
    """Tar files of samples, a path or a pattern per set, such as `train-{000..003}.tar`. `x` and
    `y` are members by their ending; a `json` has its label under the key `field`."""
    if not x.lower().endswith("npy"):
        need_pillow("webdataset")
    parse = partial(
        tar_example, x=x, y=y, field=field, classes=classes, image_size=image_size, color=color
    )
    num_classes = len(classes) if classes and num_classes is None else num_classes
    sets = {
        name: Records(RecordFiles(pattern, ".tar"), parse, workers, num_classes)
        for name, pattern in {"train": train, "val": val, "test": test}.items()
        if pattern is not None
    }
    return data_of(sets, memory_mb, num_classes=num_classes, classes=classes)


def tar_example(
    record,
    *,
    x: str = IMAGES,
    y: str = "cls",
    field: str | None = None,
    classes: tuple[str, ...] | None = None,
    image_size: tuple[int, int] | None = None,
    color: Literal["rgb", "gray"] = "rgb",
) -> Parsed:
    """Members `x` and `y` of a sample in a tar file: an image, or an .npy array, and a label."""
    if not isinstance(record, dict):
        raise UserError("is not a sample of a tar file; `data` should be grain, with its `parse`")
    x, data = member(record, x)
    if x.lower().endswith("npy"):
        image = npy_array(data)
    else:
        try:
            image = decoded(io.BytesIO(data), image_size, color)
        except (OSError, SyntaxError, ValueError) as error:
            raise UserError(f"its .{x} is not a readable image ({error})") from error
    return image, label(*member(record, y), field, classes)


def member(record, endings):
    """(ending, bytes) of the first of the endings, divided by `;`, that a sample has."""
    for ending in endings.split(";"):
        if ending in record:
            return ending, record[ending]
    found = ", ".join(f".{ending}" for ending in record)
    wanted = endings.replace(";", " or .")
    raise UserError(
        f"has no member .{wanted}; it has {found}. Members of a sample must be adjacent: "
        "tar --sort=name"
    )


def label(ending, data, field, classes):
    """The label in a member: a number, or the name of a class."""
    try:
        text = data.decode().strip()
        value = parse_json(text) if ending.endswith("json") or field else text
        for key in field.split(".") if field else ():
            value = value[key]
    except (ValueError, KeyError, TypeError) as error:
        where = f" with a key {field!r}" if field else ""
        raise UserError(f"its .{ending} is not JSON{where} ({cut(repr(error), 200)})") from error
    if classes and value in classes:
        return np.int32(classes.index(value))
    try:
        number = float(value)
        is_whole = number == int(number) and "." not in str(value)
        return np.int32(int(number)) if is_whole else np.float32(number)
    except (ValueError, TypeError, OverflowError) as error:
        found = f"its .{ending} holds {cut(repr(value), 40)}"
        fix = "; set `field`" if isinstance(value, dict) and not field else ""
        fix = f"; allowed: {cut(', '.join(classes), 200)}" if classes else fix or "; set `classes`"
        raise UserError(f"{found}, which is not a label{fix}") from error
