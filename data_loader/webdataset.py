"""Images in tar files, as WebDataset writes them, read sample by sample in any order."""

from functools import partial
from typing import Annotated, Any, Literal

import numpy as np

from data_loader.base import Data, Parsed, named_sets
from data_loader.grain import MEMORY_MB, RecordFiles, data_of
from data_loader.images import image_in, need_pillow
from data_loader.npy_files import array_in
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
    sets = named_sets(train, val, test)
    files = {name: RecordFiles(pattern, ".tar") for name, pattern in sets.items()}
    return data_of(files, parse, workers, memory_mb, num_classes=num_classes, classes=classes)


def tar_example(
    record: dict[str, bytes] | bytes,
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
        image, _ = array_in(data)
    else:
        image = image_in(data, f"its .{x}", image_size, color)
    return image, label(*member(record, y), field, classes)


def member(record: dict[str, bytes], endings: str) -> tuple[str, bytes]:
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


def label(
    ending: str, data: bytes, field: str | None, classes: tuple[str, ...] | None
) -> np.int32 | np.float32:
    """The label in a member: a number, or the name of a class."""
    try:
        text = data.decode().strip()
        value: Any = parse_json(text) if ending.endswith("json") or field else text
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
