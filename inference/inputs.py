"""What a user names, as batches of raw inputs: images, folders of them, or one file of arrays."""

import importlib.util
from pathlib import Path

import numpy as np

from data_loader.folder import ENDINGS, pixels
from utils import UserError, first_line

ARRAYS = {".npz", ".npy"}


def batches(paths, key, predictor, size):
    """(a name for each input, {input: raw array}), `size` of them at a time; of the images only those are in memory."""
    files = files_of(paths)
    arrays = [file for file in files if file.suffix.lower() in ARRAYS]
    if arrays and len(files) > 1:
        raise UserError(f"{arrays[0]}: is to stand alone; name images, or one file of arrays")
    if arrays:
        found = read_arrays(arrays[0], key, predictor)
        for start in range(0, count(arrays[0], found), size):
            part = {name: array[start : start + size] for name, array in found.items()}
            yield (
                [f"{arrays[0].name}[{start + i}]" for i in range(len(next(iter(part.values()))))],
                part,
            )
    else:
        only, shape = only_input(predictor), image_shape(files[0], predictor)
        for start in range(0, len(files), size):
            part = files[start : start + size]
            yield list(map(str, part)), {only: np.stack([image(file, shape) for file in part])}


def files_of(paths):
    """All files that are named, a folder by the images and arrays in it."""
    found = []
    for path in map(Path, paths):
        try:
            found += inside(path) if path.is_dir() else [path]
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if missing := [path for path in found if not path.exists()]:
        raise UserError(
            f"{missing[0]}: there is no such file or folder; name images, a folder of them, or an npz"
        )
    return found


def inside(folder):
    """The images and arrays in a folder."""
    known = ENDINGS | ARRAYS
    files = sorted(
        file
        for file in folder.iterdir()
        if file.suffix.lower() in known and not file.name.startswith(".")
    )
    if not files:
        raise UserError(
            f"{folder}: no images in this folder; known endings: {', '.join(sorted(known))}"
        )
    return files


def read_arrays(path, key, predictor):
    """{input: array} of a file; an npz holds the `key`, or, for a model of several inputs, an array for each."""
    names = (
        {name: name for name in predictor.inputs}
        if len(predictor.inputs) > 1
        else {only_input(predictor): key}
    )
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {only_input(predictor): loaded}
        with loaded:
            missing = [stored for stored in names.values() if stored not in loaded.files]
            if not missing:
                return {name: loaded[stored] for name, stored in names.items()}
    except UserError:
        raise
    except Exception as error:  # of many kinds, by what is wrong with the bytes
        raise UserError(f"{path}: cannot be read: {first_line(error)}") from error
    if not loaded.files:
        raise UserError(
            f"{path}: holds no arrays; save some with numpy.savez({path.name!r}, {key}=...)"
        )
    mend = (
        "name one with --key"
        if len(names) == 1
        else "the model takes an array for each of its inputs"
    )
    raise UserError(f"{path}: has no {', '.join(missing)}, only {', '.join(loaded.files)}; {mend}")


def count(path, arrays):
    """How many inputs the arrays hold, one in each row."""
    for name, array in arrays.items():
        if array.ndim == 0:
            raise UserError(
                f"{path}: {name} is a single {array.dtype}; give an array with one row for each input"
            )
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"{path}: needs one row for each input in every array, found {lengths}")
    length = next(iter(lengths.values()))
    if length == 0:
        raise UserError(
            f"{path}: holds no inputs; its shape is {list(next(iter(arrays.values())).shape)}"
        )
    return length


def only_input(predictor):
    """The name of the input of a model that has one."""
    if len(predictor.inputs) > 1:
        raise UserError(
            f"the model has several inputs; put an array for each into one npz: {', '.join(predictor.inputs)}"
        )
    return next(iter(predictor.inputs))


def image_shape(path, predictor):
    """The (height, width, channels) of the images that the model takes."""
    if importlib.util.find_spec("PIL") is None:
        raise UserError(f"{path}: reading images needs Pillow; install it with: pip install pillow")
    shape, _ = predictor.inputs[only_input(predictor)]
    if predictor.form.layout == "nchw":
        shape = (*shape[1:], shape[0])
    if len(shape) != 3 or None in shape or shape[2] not in (1, 3):
        raise UserError(
            f"{path}: the model takes arrays of {list(shape)}, no images of a known size; name an npz"
        )
    return shape


def image(path, shape):
    """An image in the size of the model's, as bytes."""
    return pixels(path, shape[:2], {1: "gray", 3: "rgb"}[shape[2]])
