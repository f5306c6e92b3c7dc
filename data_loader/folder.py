"""Images in one folder per class, decoded by threads when they are used, and kept in memory."""

import math
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from data_loader.base import Batch, CollateFn, Data
from data_loader.images import ENDINGS, MODES, UNREAD, Color, need_pillow, pixels
from data_loader.loader import collated
from utils import UserError, format_bytes
from utils.forms import Count, CountOrZero, LocalPath, at_most, checked

PIECE = 8  # images that a thread decodes per task: a task per image would cost 2 ms per batch


@checked
def folder(
    dir: LocalPath,
    image_size: tuple[int, int],
    color: Literal["rgb", "gray"] = "rgb",
    threads: Annotated[Count, at_most(1024)] | None = None,
    cache_mb: CountOrZero = 1024,
) -> Data:
    """Images of `dir`/{train,val,test}/<class>/ or `dir`/<class>/, resized to [height, width].

    `threads` decode them, by default one per core. Up to `cache_mb` of them, the training set's
    first, are kept in memory, so that they are decoded only once.
    """
    if isinstance(image_size, int) or len(image_size) != 2 or min(image_size) < 1:
        raise ValueError(f"image_size: must be [height, width], both at least 1, got {image_size}")
    need_pillow("folder")
    roots = _roots(Path(dir))
    classes = _classes(roots["train"])
    sets, left = {}, cache_mb * 2**20
    for name in sorted(roots, key=("train", "val", "test").index):
        files = _files(roots[name], classes)
        sets[name] = Images(
            files,
            classes,
            image_size,
            color,
            threads=threads or usable_cores(),
            cache_bytes=left,
            source=roots[name],
        )
        left -= sets[name].cache.nbytes
    example = (np.zeros((*image_size, MODES[color][1]), np.uint8), np.zeros((), np.int32))
    sizes = {name: len(dataset) for name, dataset in sets.items()}
    return Data(example, sizes, lambda: sets, num_classes=len(classes), classes=tuple(classes))


def usable_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Images:
    """(image, label) of files on disk. As many of the first images as `cache_bytes` can hold are
    kept after they are decoded."""

    def __init__(
        self,
        files: list[tuple[Path, int]],
        classes: list[str],
        image_size: tuple[int, int],
        color: Color,
        *,
        threads: int,
        cache_bytes: int,
        source: Path,
    ) -> None:
        self.files = files  # [(path, label)]
        self.classes = classes
        self.image_size = image_size
        self.color: Color = color
        self.threads = threads
        shape = (*image_size, MODES[color][1])
        kept = min(len(files), cache_bytes // math.prod(shape))
        # The system allocates the memory of an empty array only as it is written.
        self.cache, self.is_cached = np.empty((kept, *shape), np.uint8), np.zeros(kept, bool)
        self.source = (
            f"{source} ({len(files)} files; {kept} decoded images are kept in "
            f"{format_bytes(self.cache.nbytes)} of memory)"
        )

    @property
    def advice(self) -> str:
        """What to do if a run waits for these images."""
        more = f"use more data.args.threads (now {self.threads}), if there are more cores"
        if len(self.cache) == len(self.files):
            return f"decoded images are kept, so the next epochs wait less; {more}"
        needed = math.ceil(math.prod(self.cache.shape[1:]) * len(self.files) / 2**20)
        return (
            f"only {len(self.cache)} of {len(self.files)} decoded images are kept: raise "
            f"data.args.cache_mb, to {needed} for this set; {more}; or store smaller images"
        )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int32]:
        path, label = self.files[index]
        if not 0 <= index < len(self.cache):
            return pixels(path, self.image_size, self.color), np.int32(label)
        if not self.is_cached[index]:
            self.cache[index] = pixels(path, self.image_size, self.color)
            self.is_cached[index] = True
        return self.cache[index].copy(), np.int32(label)

    def read_batches(self, order: Iterable[np.ndarray], collate_fn: CollateFn) -> Iterator[Batch]:
        """One batch for each row of `order`. While one is collected, threads decode the next."""
        pool = ThreadPoolExecutor(self.threads, "decode")
        ahead: deque[Iterator[list]] = deque()

        def examples(piece: np.ndarray) -> list[tuple[np.ndarray, np.int32]]:
            return [self[int(i)] for i in piece]

        def collect() -> Batch:
            return collated(list(chain.from_iterable(ahead.popleft())), collate_fn)

        try:
            for row in order:
                pieces = np.split(row, range(PIECE, len(row), PIECE))
                ahead.append(pool.map(examples, pieces))
                if len(ahead) > 1:
                    yield collect()
            while ahead:
                yield collect()
        finally:  # also when the consumer leaves early
            pool.shutdown(cancel_futures=True)


def _roots(root: Path) -> dict[str, Path]:
    """{set: its folder of class folders}; without a train folder, `root` is the training set."""
    names = _classes(root)
    if "train" not in names:
        return {"train": root}
    unknown = sorted(set(names) - {"train", "val", "test"})
    if unknown:
        raise UserError(
            f"{root}: has the folder {unknown[0]!r} beside train; allowed: train, val, test"
        )
    return {name: root / name for name in names}


def _classes(root: Path) -> list[str]:
    """The sorted names of the class folders; a class's label is its index in this list."""
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; it should hold one folder of images per class")
    classes = sorted(
        path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    if not classes:
        raise UserError(f"{root}: no folders in it; it should hold one folder of images per class")
    return classes


def is_image(path: Path, endings: Collection[str] = ENDINGS) -> bool:
    """Whether a file counts as an image; hidden ones, such as macOS's ._a.png, do not."""
    return path.suffix.lower() in endings and not path.name.startswith(".")


def _files(root: Path, classes: list[str]) -> list[tuple[Path, int]]:
    """[(path, label)] of the images under root; a new class or one without images is an error."""
    unknown = sorted(set(_classes(root)) - set(classes))
    if unknown:
        raise UserError(
            f"{root}: has the class {unknown[0]!r}, training has only {', '.join(classes)}"
        )
    for path in filter(is_image, root.iterdir()):
        if path.is_file():
            raise UserError(f"{path}: is in no class; move it into the folder of its class")
    files = []
    for label, name in enumerate(classes):
        if (root / name).is_dir():  # a class may be missing in the test set
            files += [(path, label) for path in _images(root / name)]
    return files


def _images(folder: Path) -> list[Path]:
    """The sorted images in the folder of a class. An image that would be left out is an error: in
    a folder within this one, or with the ending of a format that is not read."""
    with os.scandir(folder) as entries:  # which knows the folders without a call for each name
        is_folder = {Path(entry.path): entry.is_dir() for entry in entries}
    images = sorted(path for path in is_folder if is_image(path) and not is_folder[path])
    for path in sorted(is_folder):
        if is_image(path, UNREAD) and not is_folder[path]:
            raise UserError(
                f"{path}: images with the ending {path.suffix} are not read; convert it to PNG or "
                "JPEG, or delete it"
            )
        if not is_folder[path] or path.name.startswith("."):
            continue
        if inner := next(filter(is_image, path.rglob("*")), None):
            raise UserError(
                f"{inner}: is in a folder within {folder}, which is read as the folder of a class; "
                f"move it into {folder}; the folders of sets are called train, val and test"
            )
    if not images:
        raise UserError(f"{folder}: no images in it; known endings: {', '.join(sorted(ENDINGS))}")
    return images
