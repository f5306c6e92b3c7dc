"""python inference/predict.py MODEL INPUT...: what a checkpoint, a .tflite or a .onnx says of images or of arrays; all the same.

Inputs are raw, as the config's data has them; what the config says of preprocessing is done here, unless it is in the file.
"""

import argparse
import csv
import io
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

# The project's root comes first.
from inference.load import Form, load, prepared  # noqa: E402
from inference.lowering.trace import named  # noqa: E402
from inference.runtimes import PACKAGES, open_model  # noqa: E402
from inference.verify import Reference, in_batches  # noqa: E402
from utils import BAD_INPUT, DONE, FAILED, RunError, UserError, atomic_write, first_line  # noqa: E402
from wiring.build import build_preprocess  # noqa: E402
from wiring.config import read  # noqa: E402


class Predictor(NamedTuple):
    """`answer` maps {input: a batch} to {output: a batch}; `inputs` is {name: (shape of one, type)}."""

    answer: Any
    inputs: dict
    preprocess: tuple  # what is still to be done to raw inputs
    form: Form
    size: int  # of a batch


def main(argv=None):
    """Run the command line; a mistake of the user's ends in one message and an exit code."""
    arguments = parse(argv)
    try:
        predict(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except (RunError, OSError) as error:
        print(error, file=sys.stderr)
        return FAILED
    return DONE


def parse(argv):
    parser = argparse.ArgumentParser(description="Ask a model, in whatever form, about images or arrays.")
    say = parser.add_argument
    say("model", help="a checkpoint, a .tflite or a .onnx")
    say("inputs", nargs="+", metavar="INPUT", help="images, a folder of them, or .npz and .npy files")
    say("-c", "--config", help="the config (default: what the checkpoint remembers, or lies beside the file)")
    say("--trust", action="store_true", help="let a config that was left by a run import what its dotted names say")
    say("--key", default="x", help="the array of an npz (default: x)")
    say("--prepared", action="store_true", help="the arrays are preprocessed already")
    say("--top", type=int, default=3, help="how many classes to print (default: 3)")
    say("--batch", type=int, default=64, help="how many inputs at once (default: 64)")
    say("--csv", metavar="FILE", help="write every output there")
    arguments = parser.parse_args(argv)
    for name in ("top", "batch"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: must be at least 1")
    return arguments


def predict(arguments):
    """Print the likeliest classes of every input, and write all outputs."""
    predictor = opened(arguments)
    names, raw = read_inputs(arguments.inputs, arguments.key, predictor)
    outputs = in_batches(predictor.answer, ready(predictor, raw, arguments.prepared), predictor.size)
    values = next(iter(outputs.values()))
    classes = len(outputs) == 1 and values.ndim == 2 and values.shape[1] > 1
    if classes and not predictor.form.softmax:
        values = probabilities(values)
    for name, row in zip(names, values, strict=True):
        print(f"{name}  {told(row, arguments.top) if classes else ' '.join(f'{v:.6g}' for v in row.reshape(-1)[:8])}")
    if arguments.csv:
        atomic_write(arguments.csv, as_csv(names, {"p": values} if classes else outputs, classes).encode())


def opened(arguments):
    """The model that is named, with what is known of its inputs."""
    path = Path(arguments.model)
    if path.suffix not in PACKAGES:
        shipped = load(arguments.config, path, trusted=arguments.trust)
        inputs = {name: (leaf.shape, leaf.dtype) for name, leaf in named(shipped.inputs, "input").items()}
        return Predictor(Reference(shipped, arguments.batch), inputs, shipped.preprocess, shipped.form, arguments.batch)
    model = open_model(path)
    beside = path.parent / "verification.json"
    form = Form(**json.loads(beside.read_text())["form"]) if beside.is_file() else Form()
    config = arguments.config or (path.parent / "config.json" if beside.is_file() else None)
    trusted = bool(arguments.config) or arguments.trust
    preprocess = build_preprocess(read(config), str(config), trusted) if config and not form.preprocess else ()
    inputs = {name: (shape[1:], np.dtype(dtype)) for name, (shape, dtype) in model.inputs.items()}
    sizes = {shape[0] for shape, _ in model.inputs.values()}
    return Predictor(model, inputs, tuple(preprocess), form, sizes.pop() or arguments.batch)


def read_inputs(paths, key, predictor):
    """(a name for each input, {input: raw batch})"""
    paths = [
        file
        for path in map(Path, paths)
        for file in (sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path])
    ]
    arrays = [path for path in paths if path.suffix in (".npz", ".npy")]
    if arrays and len(paths) > 1:
        raise UserError(f"{arrays[0]}: is to stand alone; name images, or one file of arrays")
    if not paths:
        raise UserError("there are no files in what is named")
    if not arrays:
        return [str(path) for path in paths], {only_input(predictor): np.stack([image(path, predictor) for path in paths])}
    found = read_arrays(arrays[0], key, predictor)
    return [f"{arrays[0].name}[{i}]" for i in range(len(next(iter(found.values()))))], found


def read_arrays(path, key, predictor):
    """{input: array} of a file; an npz holds the `key`, or, for a model of several inputs, an array for each."""
    try:
        loaded = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: cannot be read: {first_line(error)}") from error
    if path.suffix == ".npy":
        return {only_input(predictor): loaded}
    names = {name: name for name in predictor.inputs} if len(predictor.inputs) > 1 else {only_input(predictor): key}
    if missing := set(names.values()) - set(loaded.files):
        raise UserError(f"{path}: has no {', '.join(sorted(missing))}, only {', '.join(loaded.files)}; name one with --key")
    return {name: loaded[stored] for name, stored in names.items()}


def only_input(predictor):
    """The name of the input of a model that has one."""
    if len(predictor.inputs) > 1:
        raise UserError(f"the model has several inputs; put an array for each into one npz: {', '.join(predictor.inputs)}")
    return next(iter(predictor.inputs))


def image(path, predictor):
    """An image in the size of the model's, as bytes."""
    from data_loader.folder import pixels

    shape, _ = predictor.inputs[only_input(predictor)]
    if predictor.form.layout == "nchw":
        shape = (*shape[1:], shape[0])
    if len(shape) != 3 or shape[2] not in (1, 3):
        raise UserError(f"{path}: the model takes arrays of {shape}, no images; name an npz")
    return pixels(path, shape[:2], {1: "gray", 3: "rgb"}[shape[2]])


def ready(predictor, raw, is_prepared):
    """{input: a batch as the model takes it}"""
    preprocess = () if is_prepared else predictor.preprocess
    try:
        inputs = {name: prepared(preprocess, predictor.form, array) for name, array in raw.items()}
    except (ValueError, TypeError) as error:
        raise UserError(
            f"the inputs are not as preprocessing needs them: {first_line(error)}; if it is done already: --prepared"
        ) from error
    for name, array in inputs.items():
        shape, dtype = predictor.inputs[name]
        if array.shape[1:] != shape or array.dtype != dtype:
            raise UserError(f"{name}: the model takes {dtype}{list(shape)}, this is {array.dtype}{list(array.shape[1:])}")
    return inputs


def probabilities(logits):
    """The softmax of each row."""
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def told(row, top):
    """The likeliest classes of one input."""
    return "  ".join(f"{i}: {row[i]:.4f}" for i in np.argsort(-row, kind="stable")[:top])


def as_csv(names, outputs, classes):
    """A line for each input: all outputs, and of classes the likeliest."""
    flat = {name: array.reshape(len(names), -1) for name, array in outputs.items()}
    text = io.StringIO()
    write = csv.writer(text, lineterminator="\n").writerow
    write(["input", *(["class"] if classes else []), *(f"{name}_{i}" for name, a in flat.items() for i in range(a.shape[1]))])
    for i, name in enumerate(names):
        row = [value for array in flat.values() for value in array[i]]
        write([name, *([int(np.argmax(row))] if classes else []), *(f"{value:.8g}" for value in row)])
    return text.getvalue()


if __name__ == "__main__":
    sys.exit(main())
