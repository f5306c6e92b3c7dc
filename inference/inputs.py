"""Read the inputs of a command line, images, folders of them, or one file of arrays or of a table,
in batches."""

from pathlib import Path

import jax
import numpy as np

from data_loader.images import ENDINGS, need_pillow, pixels
from data_loader.npy_files import claimed
from data_loader.table import rows_of
from utils import UserError, check_memory, first_line

ARRAYS = {".npz", ".npy"}
TABLES = {".csv", ".tsv", ".parquet"}


def batches(paths, key, predictor, size):
    """Yield (one name per input, {input: raw array}) for `size` inputs at a time.

    Only one batch of images is in memory at a time.
    """
    files = find_files(paths)
    rows = ARRAYS | TABLES  # a model of a table takes no images, so any other file is a table
    arrays = [file for file in files if predictor.table or file.suffix.lower() in rows]
    if arrays and len(files) > 1:
        fix = "pass images, or one file of arrays or of a table"
        raise UserError(f"{arrays[0]}: cannot be combined with other inputs; {fix}")
    if arrays:
        read = read_arrays if arrays[0].suffix.lower() in ARRAYS else read_table
        inputs = read(arrays[0], key, predictor)
        count = count_rows(arrays[0], inputs)
        for start in range(0, count, size):
            batch = {name: array[start : start + size] for name, array in inputs.items()}
            rows = range(start, min(start + size, count))
            yield [f"{arrays[0].name}[{i}]" for i in rows], batch
    else:
        name, shape = only_input(predictor), image_shape(files[0], predictor)
        for start in range(0, len(files), size):
            batch = files[start : start + size]
            yield list(map(str, batch)), {name: np.stack([image(file, shape) for file in batch])}


def find_files(paths):
    """All files of these paths, with folders replaced by the images and arrays in them."""
    files = []
    for path in map(Path, paths):
        try:
            files += list_folder(path) if path.is_dir() else [path]
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if missing := [path for path in files if not path.exists()]:
        fix = "pass images, a folder of them, an npz or a table"
        raise UserError(f"{missing[0]}: no such file or folder; {fix}")
    return files


def list_folder(folder):
    """The images and arrays in a folder."""
    endings = ENDINGS | ARRAYS
    files = sorted(
        file
        for file in folder.iterdir()
        if file.suffix.lower() in endings and not file.name.startswith(".")
    )
    if not files:
        raise UserError(
            f"{folder}: no images in this folder; known endings: {', '.join(sorted(endings))}"
        )
    return files


def read_arrays(path, key, predictor):
    """{input: array} of a file.

    An npz holds the array `key`, or, for a model with several inputs, one array for each of them.
    """
    names = {name: name for name in predictor.inputs}
    if len(names) == 1:
        names = {only_input(predictor): key}
    try:
        sizes = claimed(path)
        content = np.load(path, mmap_mode="r", allow_pickle=False)
        if isinstance(content, np.ndarray):
            return {only_input(predictor): content}
        with content:
            missing = [stored for stored in names.values() if stored not in content.files]
            if not missing:
                for stored in names.values():  # a few bytes may unpack to gigabytes
                    check_memory(f"{path}: {stored}", sizes[stored.removesuffix(".npy")])
                return {name: content[stored] for name, stored in names.items()}
    except UserError:
        raise
    except Exception as error:  # damaged files raise many kinds
        raise UserError(f"{path}: cannot be read: {first_line(error)}") from error
    if not content.files:
        raise UserError(
            f"{path}: holds no arrays; save some with numpy.savez({path.name!r}, {key}=...)"
        )
    fix = "pass another --key" if len(names) == 1 else "the model takes one array per input"
    raise UserError(f"{path}: has no {', '.join(missing)}, only {', '.join(content.files)}; {fix}")


def read_table(path, _, predictor):
    """{input: the rows of a CSV or Parquet file}, encoded as in training."""
    if predictor.table is None:
        fix = "pass its checkpoint, or the file in the folder of its export; otherwise, an npz"
        raise UserError(f"{path}: the model is not known to be one of a table; if it is, {fix}")
    return {only_input(predictor): rows_of(str(path), **predictor.table)}


def count_rows(path, arrays):
    """The number of inputs in the arrays, which hold one input per row."""
    for name, array in arrays.items():
        if array.ndim == 0:
            raise UserError(
                f"{path}: {name} is a single {array.dtype}; pass an array with one row per input"
            )
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"{path}: needs one row per input in every array, got {lengths}")
    length = next(iter(lengths.values()))
    if length == 0:
        shape = list(next(iter(arrays.values())).shape)
        raise UserError(f"{path}: holds no inputs; its shape is {shape}")
    return length


def only_input(predictor):
    """The name of the only input of the model."""
    if len(predictor.inputs) > 1:
        names = ", ".join(predictor.inputs)
        raise UserError(f"the model has several inputs; put one array for each in an npz: {names}")
    return next(iter(predictor.inputs))


def image_shape(path, predictor):
    """The (height, width, channels) of the images that the preprocessing takes, or the model."""
    need_pillow(path)
    shape, _ = predictor.inputs[only_input(predictor)]
    if predictor.form.layout == "nchw":
        shape = (*shape[1:], shape[0])
    shape = predictor.raw_shape or shape
    if len(shape) != 3 or None in shape or shape[2] not in (1, 3):
        raise UserError(
            f"{path}: the model takes arrays of {list(shape)}, not images of a fixed size; "
            "pass an npz"
        )
    if predictor.raw_shape is None and (made := shape_after(predictor.preprocess, shape)) != shape:
        why = f"the config's preprocess makes {list(made)} of images of the model's size"
        raise UserError(f"{path}: {why}; pass an npz, or export with --with-preprocess")
    return shape


def shape_after(preprocess, shape):
    """The shape that preprocessing gives an image; that of the image where it fails."""
    image = jax.ShapeDtypeStruct(shape, np.uint8)
    try:
        for fn in preprocess:
            image = jax.eval_shape(fn, image)
        return image.shape
    except Exception:  # it may be the user's own; the error is reported with the inputs
        return shape


def image(path, shape):
    """An image as bytes, resized to the model's size."""
    return pixels(path, shape[:2], {1: "gray", 3: "rgb"}[shape[2]])
