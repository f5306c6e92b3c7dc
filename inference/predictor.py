"""Open a checkpoint or an exported file as one kind of object that takes raw inputs."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from inference.folders import REPORT
from inference.input_shape import raw_input
from inference.inputs import batches
from inference.load import (
    NHWC,
    Form,
    as_names,
    find_config,
    load_to_export,
    output_kind,
    prepare,
)
from inference.lowering.trace import named
from inference.runtimes import PACKAGES, open_model
from inference.token_check import check_tokens
from inference.verify import Reference, repeated
from training.checkpoint.storage import chosen_checkpoint
from utils import RunError, UserError, first_line
from utils.files import is_object, parse_json, read_file
from wiring.build import build_preprocess
from wiring.config import read

OUTPUT_KINDS = ("logits", "probabilities", "numbers")


class Predictor(NamedTuple):
    """`model` maps {input: a batch} to {output: a batch}."""

    model: Any
    inputs: dict  # {name: (shape of one example, dtype)}; a free dimension is None
    size: int | None  # the only batch size that it takes
    preprocess: tuple  # the preprocessing that raw inputs still need
    form: Form
    output_kind: str  # one of OUTPUT_KINDS
    classes: list  # the class names, as far as they are known
    table: dict | None = None  # how the rows of a table are read; None if it was not trained on one
    structure: Any = None  # how the inputs are nested, if known
    raw_shape: tuple | None = None  # the shape of an image before preprocessing, if known
    vocab_size: int | None = None  # for a language model, if known


def open_predictor(arguments):
    """The predictor for the model on the command line."""
    path = Path(arguments.model)
    if path.suffix.lower() in PACKAGES and not arguments.best:
        return open_export(path, arguments)
    path = chosen_checkpoint(path, arguments.best)
    exportable = load_to_export(arguments.config, path, trusted=arguments.trust)
    inputs = {
        name: (leaf.shape, leaf.dtype) for name, leaf in named(exportable.inputs, "input").items()
    }
    kind = exportable.output_kind
    described = exportable.preprocess, exportable.form, kind, as_names(exportable.classes)
    table = exportable.table
    if table and not is_table(table):
        raise UserError(f"{path}: data.args of its config does not describe how to read a table")
    structure = jax.tree.structure(exportable.inputs)
    shape = getattr(raw_input(exportable.parts, exportable.parts.facts), "shape", ())
    known = {"structure": structure, "raw_shape": shape if len(shape) == 3 else None}
    known["vocab_size"] = exportable.parts.facts.get("vocab_size")
    return Predictor(Reference(exportable), inputs, None, *described, table, **known)


def open_export(path, arguments):
    """The predictor for an exported file, described by the report beside it or by a config."""
    model = open_model(path)
    inputs = {name: (shape[1:], np.dtype(dtype)) for name, (shape, dtype) in model.inputs.items()}
    fixed = {shape[0] for shape, _ in model.inputs.values() if shape} - {None}
    size = fixed.pop() if fixed else None
    report = path.parent / REPORT
    unknown = NHWC, None, [], None, None
    form, kind, classes, table, vocab_size = read_report(report) if report.is_file() else unknown
    file = arguments.config or (path.parent / "config.json" if report.is_file() else None)
    is_prepared = form.preprocess or arguments.prepared
    if file is None or (is_prepared and kind):
        described = form, kind or "numbers", classes, table
        return Predictor(model, inputs, size, (), *described, vocab_size=vocab_size)
    record = {} if arguments.config else {"config": read(file, trusted=arguments.trust)}
    config, *rest = find_config(arguments.config, file, record, (), arguments.trust)
    facts = {"columns": table["columns"]} if table else {}
    preprocess = () if is_prepared else tuple(build_preprocess(config, *rest, facts))
    kind = kind or output_kind(config, form, classes)
    described = form, kind, classes, table
    return Predictor(model, inputs, size, preprocess, *described, vocab_size=vocab_size)


def read_report(path):
    """(form, output kind, class names, `table` and `vocab_size` of a Predictor) from an export's
    report."""
    try:
        report = parse_json(read_file(path))
        # Earlier versions wrote the kind as `answers`.
        kind = report["answers"] if "answers" in report else report["output_kind"]
        form = Form(**report["form"])
        flags = [form.preprocess, form.softmax]
        if form.layout not in ("nhwc", "nchw") or not all(isinstance(flag, bool) for flag in flags):
            raise ValueError(f"form must say layout, preprocess and softmax, got {report['form']}")
        if kind not in OUTPUT_KINDS:
            raise ValueError(f"output_kind must be one of {', '.join(OUTPUT_KINDS)}, got {kind!r}")
        table = report.get("table")  # earlier versions did not write it
        if table is not None and not is_table(table):
            raise ValueError("table must say columns, missing and separator")
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else first_line(error)
        fix = "export again, or move the model to another folder and pass its config with -c"
        raise UserError(f"{path}: is not a report of an export: {why}; {fix}") from error
    return form, kind, as_names(report.get("classes")), table, report.get("vocab_size")


def is_table(value):
    """Whether these are arguments of `rows_of`; they may come from an untrusted source."""
    if type(value) is not dict or value.keys() != {"columns", "missing", "separator"}:
        return False
    columns, missing, separator = value["columns"], value["missing"], value["separator"]
    valid = is_object(columns, is_texts) and is_texts(missing) and type(separator) is str
    return valid and len(separator) == 1 and separator not in '\r\n"'


def is_texts(value):
    return isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)


def predictions(predictor, arguments):
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


def prepare_batch(predictor, raw, is_prepared):
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


def preprocessed(predictor, raw):
    """The arrays of the preprocessed inputs. The preprocessing takes what the data has: an array,
    or a nest of them."""
    structure = predictor.structure
    if structure is None and len(raw) > 1:
        fix = "export it with --with-preprocess, or pass preprocessed arrays and --prepared"
        raise UserError(f"the config's preprocess takes all inputs of the model together; {fix}")
    structure = structure or jax.tree.structure(0)
    nest = jax.tree.unflatten(structure, [raw[name] for name in predictor.inputs])
    return jax.tree.leaves(prepare(predictor.preprocess, NHWC, nest))


def cast(name, array, predictor, is_prepared):
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


def fits(array, dtype):
    """Whether a cast only rounds: between floats of any width, or integers within the range."""
    dtypes = (array.dtype, dtype)
    if array.dtype == dtype or all(jnp.issubdtype(each, jnp.floating) for each in dtypes):
        return True
    if not all(map(is_integer, dtypes)):
        return False
    return np.iinfo(dtype).min <= array.min() and array.max() <= np.iinfo(dtype).max


def is_integer(dtype):
    return dtype.kind in "iu"
