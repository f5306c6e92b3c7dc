"""Open a checkpoint or an exported file as one kind of object that takes raw inputs, and read
images, folders of them, or one file of arrays or of a table, in batches.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from data_loader.images import ENDINGS, need_pillow, pixels
from data_loader.npy_files import claimed
from data_loader.table import rows_of
from inference.folders import REPORT
from inference.load import (
    NHWC,
    Form,
    Preprocess,
    as_names,
    check_tokens,
    find_config,
    load_to_export,
    output_kind,
    prepare,
    raw_input,
)
from inference.lowering.trace import named
from inference.runtimes import PACKAGES, Arrays, Specs, open_model
from inference.verify import Reference, repeated
from training.checkpoint.storage import chosen_checkpoint
from utils import RunError, UserError, check_memory, first_line
from utils.files import is_object, parse_json, read_file
from wiring.build import build_preprocess
from wiring.config import read

ARRAYS = {".npz", ".npy"}
TABLES = {".csv", ".tsv", ".parquet"}
OUTPUT_KINDS = ("logits", "probabilities", "numbers")


class Predictor(NamedTuple):
    """`model` maps {input: a batch} to {output: a batch}."""

    model: Callable[[Arrays], Arrays]
    inputs: Specs  # of one example
    size: int | None  # the only batch size that it takes
    preprocess: Sequence[Preprocess]  # the preprocessing that raw inputs still need
    form: Form
    output_kind: str  # one of OUTPUT_KINDS
    classes: list[str]  # the class names, as far as they are known
    table: dict[str, Any] | None = (
        None  # how the rows of a table are read; None if it was not trained on one
    )
    structure: Any = None  # how the inputs are nested, if known
    raw_shape: tuple[int, ...] | None = None  # the shape of an image before preprocessing, if known
    vocab_size: int | None = None  # for a language model, if known


def open_predictor(arguments: Namespace) -> Predictor:
    """The predictor for the model on the command line."""
    path = Path(arguments.model)
    if path.suffix.lower() in PACKAGES and not arguments.best:
        return open_export(path, arguments)
    path = chosen_checkpoint(path, arguments.best)
    exportable = load_to_export(arguments.config, path, trusted=arguments.trust)
    inputs = {
        name: (leaf.shape, leaf.dtype) for name, leaf in named(exportable.inputs, "input").items()
    }
    table = exportable.table
    if table and not is_table(table):
        raise UserError(f"{path}: data.args of its config does not describe how to read a table")
    shape = getattr(raw_input(exportable.parts, exportable.parts.facts), "shape", ())
    return Predictor(
        Reference(exportable),
        inputs,
        size=None,
        preprocess=exportable.preprocess,
        form=exportable.form,
        output_kind=exportable.output_kind,
        classes=as_names(exportable.classes),
        table=table,
        structure=jax.tree.structure(exportable.inputs),
        raw_shape=shape if len(shape) == 3 else None,
        vocab_size=exportable.parts.facts.get("vocab_size"),
    )


def open_export(path: Path, arguments: Namespace) -> Predictor:
    """The predictor for an exported file, described by the report beside it or by a config."""
    model = open_model(path)
    inputs = {name: (shape[1:], dtype) for name, (shape, dtype) in model.inputs.items()}
    fixed = {shape[0] for shape, _ in model.inputs.values() if shape} - {None}
    size = fixed.pop() if fixed else None
    report = path.parent / REPORT
    unknown = {"form": NHWC, "output_kind": None, "classes": []}
    described = read_report(report) if report.is_file() else unknown
    predictor = Predictor(model, inputs, size, (), **described)
    form, kind, table = predictor.form, predictor.output_kind, predictor.table
    file = arguments.config or (path.parent / "config.json" if report.is_file() else None)
    is_prepared = form.preprocess or arguments.prepared
    if file is None or (is_prepared and kind):
        return predictor._replace(output_kind=kind or "numbers")
    record = {} if arguments.config else {"config": read(file, trusted=arguments.trust)}
    config, name, trusted, folders = find_config(
        arguments.config, file, record, (), arguments.trust
    )
    facts = {"columns": table["columns"]} if table else {}
    preprocess = (
        () if is_prepared else tuple(build_preprocess(config, name, trusted, folders, facts))
    )
    kind = kind or output_kind(config, form, predictor.classes)
    return predictor._replace(preprocess=preprocess, output_kind=kind)


def read_report(path: Path) -> dict[str, Any]:
    """{field of a Predictor: what an export's report says about it}"""
    try:
        report = parse_json(read_file(path))
        kind = report["output_kind"]
        form = Form(**report["form"])
        flags = [form.preprocess, form.softmax]
        if form.layout not in ("nhwc", "nchw") or not all(isinstance(flag, bool) for flag in flags):
            raise ValueError(f"form must say layout, preprocess and softmax, got {report['form']}")
        if kind not in OUTPUT_KINDS:
            raise ValueError(f"output_kind must be one of {', '.join(OUTPUT_KINDS)}, got {kind!r}")
        table = report.get("table")
        if table is not None and not is_table(table):
            raise ValueError("table must say columns, missing and separator")
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else first_line(error)
        fix = "export again, or move the model to another folder and pass its config with -c"
        raise UserError(f"{path}: is not a report of an export: {why}; {fix}") from error
    known = {"table": table, "vocab_size": report.get("vocab_size")}
    return known | {"form": form, "output_kind": kind, "classes": as_names(report.get("classes"))}


def batches(
    paths: Sequence[str], key: str, predictor: Predictor, size: int
) -> Iterator[tuple[list[str], Arrays]]:
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
        file = arrays[0]
        is_table_file = file.suffix.lower() not in ARRAYS
        inputs = read_table(file, predictor) if is_table_file else read_arrays(file, key, predictor)
        count = count_rows(file, inputs)
        for start in range(0, count, size):
            batch = {name: array[start : start + size] for name, array in inputs.items()}
            rows = range(start, min(start + size, count))
            yield [f"{file.name}[{i}]" for i in rows], batch
    else:
        name, shape = only_input(predictor), image_shape(files[0], predictor)
        mode = "gray" if shape[2] == 1 else "rgb"
        for start in range(0, len(files), size):
            batch = files[start : start + size]
            images = np.stack([pixels(file, shape[:2], mode) for file in batch])
            yield list(map(str, batch)), {name: images}


def find_files(paths: Sequence[str]) -> list[Path]:
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


def list_folder(folder: Path) -> list[Path]:
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


def read_arrays(path: Path, key: str, predictor: Predictor) -> Arrays:
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


def read_table(path: Path, predictor: Predictor) -> Arrays:
    """{input: the rows of a CSV or Parquet file}, encoded as in training."""
    if predictor.table is None:
        fix = "pass its checkpoint, or the file in the folder of its export; otherwise, an npz"
        raise UserError(f"{path}: the model is not known to be one of a table; if it is, {fix}")
    return {only_input(predictor): rows_of(str(path), **predictor.table)}


def count_rows(path: Path, arrays: Arrays) -> int:
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


def only_input(predictor: Predictor) -> str:
    """The name of the only input of the model."""
    if len(predictor.inputs) > 1:
        names = ", ".join(predictor.inputs)
        raise UserError(f"the model has several inputs; put one array for each in an npz: {names}")
    return next(iter(predictor.inputs))


def image_shape(path: Path, predictor: Predictor) -> tuple[int, int, int]:
    """The (height, width, channels) of the images that the preprocessing takes, or the model."""
    need_pillow(path)
    shape: tuple[Any, ...] = predictor.inputs[only_input(predictor)][0]
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


def shape_after(preprocess: Sequence[Preprocess], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that preprocessing gives an image; that of the image where it fails."""
    image = jax.ShapeDtypeStruct(shape, np.uint8)
    try:
        for fn in preprocess:
            image = jax.eval_shape(fn, image)
        return image.shape
    except Exception:  # it may be the user's own; the error is reported with the inputs
        return shape


def is_table(value: object) -> bool:
    """Whether these are arguments of `rows_of`; they may come from an untrusted source."""
    if type(value) is not dict or value.keys() != {"columns", "missing", "separator"}:
        return False
    columns, missing, separator = value["columns"], value["missing"], value["separator"]
    valid = is_object(columns, is_texts) and is_texts(missing) and type(separator) is str
    return valid and len(separator) == 1 and separator not in '\r\n"'


def is_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)


def predictions(predictor: Predictor, arguments: Namespace) -> Iterator[tuple[list[str], Arrays]]:
    """Yield (one name per input, {output: one row per input}), batch by batch.

    All batches have one size; the last one is padded, and the rows of the padding are dropped.
    """
    size = predictor.size
    for names, raw in batches(arguments.inputs, arguments.key, predictor, size or arguments.batch):
        size = size or len(names)  # the first batch is the largest
        check_tokens(raw, predictor.vocab_size, names.__getitem__)
        inputs = prepare_batch(predictor, repeated(raw, size), arguments.prepared)
        try:
            outputs = predictor.model(inputs)
        except Exception as error:  # the runtimes raise many kinds
            raise RunError(
                f"{arguments.model}: fails on {names[0]} to {names[-1]}: {first_line(error)}"
            ) from error
        for name, array in outputs.items():
            if np.shape(array)[:1] != (size,):
                shape = list(np.shape(array))
                raise UserError(
                    f"{arguments.model}: for {size} inputs, {name} has the shape {shape}; "
                    "it must have one row per input"
                )
        yield names, {name: array[: len(names)] for name, array in outputs.items()}


def prepare_batch(predictor: Predictor, raw: Arrays, is_prepared: bool) -> Arrays:
    """{input: a batch in the form and dtype that the model takes}"""
    preprocess = () if is_prepared else predictor.preprocess
    try:
        if preprocess:
            raw = dict(zip(predictor.inputs, preprocessed(predictor, raw), strict=True))
        inputs = {name: prepare((), predictor.form, array) for name, array in raw.items()}
    except UserError:
        raise
    except Exception as error:  # preprocessing may be the user's own code
        raise UserError(
            f"preprocessing fails on the inputs: {first_line(error)}; "
            "if they are preprocessed already, pass --prepared"
        ) from error
    return {name: cast(name, array, predictor, is_prepared) for name, array in inputs.items()}


def preprocessed(predictor: Predictor, raw: Arrays) -> list[np.ndarray]:
    """The arrays of the preprocessed inputs. The preprocessing takes what the data has: an array,
    or a nest of them."""
    structure = predictor.structure
    if structure is None and len(raw) > 1:
        fix = "export it with --with-preprocess, or pass preprocessed arrays and --prepared"
        raise UserError(f"the config's preprocess takes all inputs of the model together; {fix}")
    structure = structure or jax.tree.structure(0)
    nest = jax.tree.unflatten(structure, [raw[name] for name in predictor.inputs])
    return jax.tree.leaves(prepare(predictor.preprocess, NHWC, nest))


def cast(name: str, array: np.ndarray, predictor: Predictor, is_prepared: bool) -> np.ndarray:
    """An array in the model's dtype; raises if more than rounding would change its numbers."""
    shape, dtype = predictor.inputs[name]
    given = array.shape[1:]
    if len(given) != len(shape) or any(
        wanted not in (None, size) for wanted, size in zip(shape, given, strict=True)
    ):
        fix = "the first axis counts the inputs and is not part of these shapes"
    elif fits(array, dtype):
        return array.astype(dtype, copy=False)
    elif is_integer(array.dtype) and is_integer(dtype):
        fix = f"its numbers, {array.min()} to {array.max()}, do not fit"
    elif is_prepared:
        fix = "without --prepared, the config's preprocessing is applied"
    elif predictor.preprocess or predictor.form.preprocess:
        fix = f"pass an array of {dtype}"
    else:
        fix = (
            "pass the config with its preprocessing, -c config.json, "
            f"or an array of {dtype} with --prepared"
        )
    wanted = f"{dtype}{[size or 'any' for size in shape]}".replace("'", "")
    raise UserError(f"{name}: the model takes {wanted}, this is {array.dtype}{list(given)}; {fix}")


def fits(array: np.ndarray, dtype: np.dtype) -> bool:
    """Whether a cast only rounds: between floats of any width, or integers within the range."""
    dtypes = (array.dtype, dtype)
    if array.dtype == dtype or all(jnp.issubdtype(each, jnp.floating) for each in dtypes):
        return True
    if not all(map(is_integer, dtypes)):
        return False
    return np.iinfo(dtype).min <= array.min() and array.max() <= np.iinfo(dtype).max


def is_integer(dtype: np.dtype) -> bool:
    return dtype.kind in "iu"
