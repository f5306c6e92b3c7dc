"""A checkpoint, a .tflite or a .onnx as one thing: it answers raw inputs, and knows what its answers are."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from inference.inputs import batches
from inference.load import NHWC, Form, answers, config_of, load, prepared
from inference.lowering.trace import named
from inference.runtimes import PACKAGES, open_model
from inference.verify import Reference, repeated
from utils import RunError, UserError, first_line
from wiring.build import build_preprocess
from wiring.config import read

REPORT = "verification.json"
ANSWERS = ("logits", "probabilities", "numbers")


class Predictor(NamedTuple):
    """`model` maps {input: a batch} to {output: a batch}."""

    model: Any
    inputs: dict  # {name: (shape of one, type)}; a free size is None
    size: int | None  # the only size of a batch that it takes
    preprocess: tuple  # what is still to be done to raw inputs
    form: Form
    answers: str  # one of ANSWERS
    classes: list  # their names, as far as they are known


def opened(arguments):
    """The model that the command names."""
    path = Path(arguments.model)
    if path.suffix.lower() in PACKAGES:
        return of_file(path, arguments)
    shipped = load(arguments.config, path, trusted=arguments.trust)
    inputs = {
        name: (leaf.shape, leaf.dtype) for name, leaf in named(shipped.inputs, "input").items()
    }
    told = shipped.form, answers(shipped.config, shipped.form), class_names(shipped)
    return Predictor(Reference(shipped), inputs, None, shipped.preprocess, *told)


def of_file(path, arguments):
    """An exported file, with what the report beside it tells; a lone one is known by the config alone, if one is named."""
    model = open_model(path)
    inputs = {name: (shape[1:], np.dtype(dtype)) for name, (shape, dtype) in model.inputs.items()}
    fixed = {shape[0] for shape, _ in model.inputs.values() if shape} - {None}
    size = fixed.pop() if fixed else None
    beside = path.parent / REPORT
    form, answer, classes = reported(beside) if beside.is_file() else (NHWC, None, [])
    file = arguments.config or (path.parent / "config.json" if beside.is_file() else None)
    is_ready = form.preprocess or arguments.prepared
    if file is None or (is_ready and answer):
        return Predictor(model, inputs, size, (), form, answer or "numbers", classes)
    remembered = {} if arguments.config else {"config": read(file)}
    config, source, trusted = config_of(arguments.config, file, remembered, (), arguments.trust)
    preprocess = () if is_ready else build_preprocess(config, source, trusted)
    return Predictor(
        model, inputs, size, tuple(preprocess), form, answer or answers(config, form), classes
    )


def reported(path):
    """(form, answers, names of the classes) that an export's report tells."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        form, answer = Form(**told["form"]), told["answers"]
        if answer not in ANSWERS:
            raise ValueError(f"answers are {answer!r}, none of {', '.join(ANSWERS)}")
    except (ValueError, TypeError, KeyError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else first_line(error)
        mend = "export again, or move the model to another folder and name its config with -c"
        raise UserError(f"{path}: is not what an export writes: {why}; {mend}") from error
    return form, answer, names(told.get("classes"))


def class_names(shipped):
    """Of data that are a folder of classes; any other would have to be read for it."""
    if shipped.parts.data is None or shipped.config["data"]["name"] != "folder":
        return []
    return names(shipped.parts.data.load()["train"].classes)


def names(classes):
    return list(map(str, classes)) if isinstance(classes, list) else []


def answered(predictor, arguments):
    """(a name for each input, {output: a row for each}), batch after batch of one size, the last one filled up meanwhile."""
    size = predictor.size
    for called, raw in batches(arguments.inputs, arguments.key, predictor, size or arguments.batch):
        size = size or len(called)  # the first batch is the largest
        inputs = ready(predictor, repeated(raw, size), arguments.prepared)
        try:
            outputs = predictor.model(inputs)
        except Exception as error:  # the runtimes' own, of many kinds
            raise RunError(
                f"{arguments.model}: fails on {called[0]} to {called[-1]}: {first_line(error)}"
            ) from error
        for name, array in outputs.items():
            if np.shape(array)[:1] != (size,):
                shape = list(np.shape(array))
                raise UserError(
                    f"{arguments.model}: of {size} inputs, {name} has the shape {shape}: that is no row for each"
                )
        yield called, {name: array[: len(called)] for name, array in outputs.items()}


def ready(predictor, raw, is_prepared):
    """{input: a batch as the model takes it}"""
    preprocess = () if is_prepared else predictor.preprocess
    try:
        inputs = {name: prepared(preprocess, predictor.form, array) for name, array in raw.items()}
    except Exception as error:  # preprocessing may be the user's own
        raise UserError(
            f"the inputs are not as preprocessing needs them: {first_line(error)}; if it is done already: --prepared"
        ) from error
    return {name: taken(name, array, predictor, is_prepared) for name, array in inputs.items()}


def taken(name, array, predictor, is_prepared):
    """An array in the model's type, where no number changes but by rounding."""
    shape, dtype = predictor.inputs[name]
    found = array.shape[1:]
    if len(found) != len(shape) or any(
        wanted not in (None, size) for wanted, size in zip(shape, found, strict=True)
    ):
        mend = "the first axis counts the inputs, and is not one of these"
    elif fits(array, dtype):
        return array.astype(dtype, copy=False)
    elif whole(array.dtype) and whole(dtype):
        mend = f"its numbers, {array.min()} to {array.max()}, do not fit"
    elif is_prepared:
        mend = "without --prepared it is preprocessed by the config"
    elif predictor.preprocess or predictor.form.preprocess:
        mend = f"give it as an array of {dtype}"
    else:
        mend = f"name the config that tells its preprocessing, -c config.json, or give an array of {dtype} that is --prepared"
    wanted = f"{dtype}{[size or 'any' for size in shape]}".replace("'", "")
    raise UserError(f"{name}: the model takes {wanted}, this is {array.dtype}{list(found)}; {mend}")


def fits(array, dtype):
    """Whether an array can be had in a type: floats of any width, integers that are within its range."""
    if array.dtype == dtype or all(
        jnp.issubdtype(kind, jnp.floating) for kind in (array.dtype, dtype)
    ):
        return True
    if not whole(array.dtype) or not whole(dtype):
        return False
    return np.iinfo(dtype).min <= array.min() and array.max() <= np.iinfo(dtype).max


def whole(dtype):
    return dtype.kind in "iu"
