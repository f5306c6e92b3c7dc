"""Export a function of arrays from Python, without a config: Flax, Equinox or plain JAX.

    from inference.functions import export

    report = export(model.apply, variables, images, "digits.onnx")

Each file is verified against JAX before it is moved to its place.
"""

import inspect
import os
import re
import tempfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from inference.child import Child
from inference.convert_tflite import FORMATS, parse
from inference.exporter import Exporter
from inference.load import NHWC, Exportable, Form, Loaded, forward, no_parts
from inference.lowering.trace import UNBATCHED, Scalar, named
from inference.lowering.value import on_host
from inference.packages import first_import
from inference.runtimes import Arrays
from inference.to_tflite import write_merged
from inference.verify import Rows
from model.base import Model
from model.layers.blocks import unrolled
from utils import RunError, UserError, named_leaves

Function = Any  # a function, a Model, what `load` returns, or a module of Flax or Haiku
# Options of the command line that are about checkpoints and configs.
NOT_OPTIONS = {"weights", "config", "overrides", "name", "out", "force", "trust", "formats", "demo"}
NOT_OPTIONS |= {"input", "input_layout", "with_preprocess", "with_softmax", "shape"}
# An option in a message of the command line, and its value if that is a number or a text.
FLAG = re.compile(
    r"(?<![\w./-])--([a-z]+(?:-[a-z]+)*)"
    r"(?: (?:(N|\d+)\b(?!:)|([A-Z]+\.npz|\d+:[\w:*-]+|int8|native)))?"
)


@contextmanager
def python_names() -> Iterator[None]:
    """Write the options in messages as arguments in Python."""
    try:
        yield
    except (UserError, RunError) as error:
        error.args = (as_arguments(str(error)),)
        raise


def as_arguments(message: str) -> str:
    """A message of the command line in which `--free 1:n` has become `free="1:n"`."""

    def argument(match: re.Match[str]) -> str:
        name, number, text = match[1].replace("-", "_"), match[2], match[3]
        return f"{name}={number}" if number else f'{name}="{text}"' if text else name

    return FLAG.sub(argument, message.replace("--formats onnx", "a path that ends in .onnx"))


@python_names()
def export(
    function: Function,
    params: PyTree,
    example: PyTree,
    path: str | Path,
    *,
    state: PyTree = None,
    classes: Sequence[str] = (),
    batched: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Write `function(params, example)` as a file, .onnx, .tflite or .stablehlo; return its report.

    `function` is a function, or a Model, of which `state` are the running statistics. `params` is
    any tree of arrays, or None for a function of the example alone, or for the weights of what
    `load` returns, whose file takes raw inputs, like its `predict`. `example` is an array or a tree
    of arrays; a tuple holds several arguments. Its values are real inputs: the file is verified on
    them, and int8 takes its ranges from them.

    `classes` are the names of the classes, which are stored in the file. With `batched`, the first
    axis of every input but scalars is a batch of any size; without it, all sizes are those of the
    example. `options` are those of the command line: free=["1:length"], opset=18, quantize="int8",
    batch=4, input_names=["image"], output_names=["logits"], route="native".
    """
    path = Path(path)
    arguments = parsed(path, batched, options)
    with working(path) as (folder, child):
        work = Path(folder) / path.name
        report, _ = write(child, function, params, state, example, work, arguments, classes)
        for file in sorted(Path(folder).iterdir(), key=lambda file: file.name == path.name):
            os.replace(file, path.parent / file.name)  # external weights come before their graph
    return report


@python_names()
def export_signatures(
    functions: dict[str, tuple[Function, PyTree]],
    params: PyTree,
    path: str | Path,
    *,
    batched: bool = True,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """Write several functions as one TFLite file with a signature for each; return their reports.

    `functions` are {name: (function, example)}, with the arguments of `export`. Weights that they
    share are stored once. ONNX has one graph per file: write one file for each function.
    """
    path = Path(path)
    if path.suffix != ".tflite":
        raise UserError(
            f"{path}: only TFLite has several signatures in one file; call export once for each "
            "function, with a path of its own"
        )
    with working(path) as (folder, child):
        files = {name: Path(folder) / f"{i}.tflite" for i, name in enumerate(functions)}
        reports, inputs = {}, {}
        for name, (function, example) in functions.items():
            arguments = parsed(path, batched, options)
            reports[name], inputs[name] = write(
                child, function, params, None, example, files[name], arguments
            )
        work = Path(folder) / path.name
        facts = {"title": path.stem, "code_commit": None, "classes": [], "sizes": {}}
        write_merged(work, files, inputs, facts, child.call)
        os.replace(work, path)
    return reports


@contextmanager
def working(path: Path) -> Iterator[tuple[str, Child]]:
    """(a folder beside a file, a Child in which TensorFlow and the runtimes work), for a while."""
    if not path.parent.is_dir():
        raise UserError(f"{path.parent}: no such folder; create it first")
    folder = tempfile.TemporaryDirectory(dir=path.parent)
    formats = [path.suffix[1:].lower()]
    with folder as name, Child(first_import(formats)) as child:
        if formats != ["stablehlo"]:  # it starts while JAX computes what the file must return
            child.start()
        yield name, child


def write(
    child: Child,
    function: Function,
    params: PyTree,
    state: PyTree,
    example: PyTree,
    path: Path,
    arguments: Namespace,
    classes: Sequence[str] = (),
) -> tuple[dict[str, Any], Arrays]:
    """(the report of a verified file, the example's arrays under the names of its inputs)"""
    exportable = as_exportable(function, params, state, example, arguments.batch, classes)
    inputs = example_arrays(exportable, arguments, example)
    rows = Rows(inputs, arguments.batch)
    exporter = Exporter(arguments, exportable, child, examples=rows, words=as_arguments)
    check_classes(classes, exporter.traced.outputs)
    return exporter.report(arguments.formats[0], path), inputs


def parsed(path: Path, batched: bool, options: dict[str, Any]) -> Namespace:
    """The options as the command line parses them, with its defaults and its messages."""
    format = path.suffix[1:].lower()
    if format not in FORMATS:
        endings = ", ".join(f".{name}" for name in FORMATS)
        raise UserError(f"{path}: must end in one of {endings}")
    for name in ("batch", "batches"):
        if not batched and options.get(name):
            raise UserError(f"export: {name} is about a batch, which batched=False excludes")
    required = ["-w", "-", "--formats", format]
    known = vars(parse(required)).keys() - NOT_OPTIONS
    if unknown := options.keys() - known:
        raise UserError(
            f"export: has no option {min(unknown)!r}; there are {', '.join(sorted(known))}"
        )
    texts = required
    for name, value in options.items():
        values = value if isinstance(value, list | tuple) else [value]
        if value is not None and value is not False and values:
            texts += [f"--{name.replace('_', '-')}", *map(str, [] if value is True else values)]
    arguments = parse(texts)
    arguments.weights = None
    arguments.batch = arguments.batch if batched else UNBATCHED
    return arguments


def as_exportable(
    function: Function,
    params: PyTree,
    state: PyTree,
    example: PyTree,
    batch: int | None,
    classes: Sequence[str] = (),
) -> Exportable:
    """The function, its weights and its inputs as those of a checkpoint."""
    config, form = {}, NHWC
    if isinstance(function, Loaded):
        loaded, config, form = function, function.config, Form(preprocess=True)
        params = unrolled(loaded.params) if params is None else params
        state = unrolled(loaded.state) if state is None else state
        classes = list(classes) or loaded.classes
        function = loaded.model._replace(apply=partial(apply_loaded, loaded))
    if isinstance(function, Model):
        check_state(function, state)
    names, static, structure = named_leaves(params), {}, jax.tree.structure(params)
    for name, leaf in names.items():
        if not hasattr(leaf, "dtype"):
            static[name] = leaf  # such as the activation of an Equinox module
    arrays = {name: on_host(leaf) for name, leaf in names.items() if name not in static}
    call, tree = caller(function, params is not None), as_tree(function, example)

    def run(weights: dict[str, PyTree], inputs: PyTree) -> PyTree:
        leaves = [static[name] if name in static else weights["params"][name] for name in names]
        params = jax.tree.unflatten(structure, leaves)
        xs = [inputs[name] for name in tree] if isinstance(example, tuple) else [inputs]
        return call(params, weights["state"], *xs)

    weights = {"params": arrays, "state": jax.tree.map(on_host, state or {})}
    inputs = jax.tree.map(example_spec, tree)
    if batch != UNBATCHED:
        inputs = without_batch(inputs)
    return Exportable(
        run, weights, inputs, (), form, no_parts(config), "", {"classes": list(classes)}
    )


def apply_loaded(loaded: Loaded, params: PyTree, state: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
    """`Model.apply` of a loaded model for raw inputs."""
    weights = {"params": params, "state": state}
    return forward(loaded.model, loaded.preprocess, NHWC, weights, x), state


def check_state(function: Model, state: PyTree) -> None:
    """Raise if the model has a state that is not given."""
    _, shapes = jax.eval_shape(function.init, jax.random.key(0))
    if missing := named_leaves(shapes).keys() - named_leaves(state or {}).keys():
        fix = "pass state=, the second tree that init and fit return with the params"
        raise UserError(f"export: the model has a state, such as {min(missing)!r}; {fix}")


def check_classes(classes: Sequence[str], outputs: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Raise unless an output has one number for each class."""
    if classes and all(leaf.shape[-1:] != (len(classes),) for leaf in outputs.values()):
        shapes = ", ".join(f"{name} {list(leaf.shape)}" for name, leaf in outputs.items())
        raise UserError(
            f"export: classes has {len(classes)} names, but no output has as many numbers for each "
            f"example: {shapes}"
        )


def caller(function: Function, has_params: bool) -> Callable[..., PyTree]:
    """call(params, state, *inputs) for each kind of function that a user may pass."""
    if isinstance(function, Model):
        return lambda params, state, *xs: function.apply(params, state, *xs)[0]
    if hasattr(function, "init") and hasattr(function, "apply"):  # a module of Flax or Haiku
        return lambda params, state, *xs: function.apply(params, *xs)
    if not callable(function):
        raise UserError(f"export: the function must be callable, got {type(function).__name__}")
    if has_params:
        return lambda params, state, *xs: function(params, *xs)
    return lambda params, state, *xs: function(*xs)


def as_tree(function: Function, example: PyTree) -> PyTree:
    """The inputs as a tree; several arguments are named as the function's parameters are."""
    if not isinstance(example, tuple):
        return example
    try:
        names = list(inspect.signature(function).parameters)[-len(example) :]
    except (TypeError, ValueError):
        names = []
    if len(names) != len(example) or len(example) == 1:
        names = [f"input_{i}" for i in range(len(example))]
    return OrderedDict(zip(names, example, strict=True))


def example_spec(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array, and the dtype that JAX gives it."""
    array = np.asarray(leaf)
    return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))


def without_batch(inputs: PyTree) -> PyTree:
    """The shapes of one example, without the batch that all inputs but scalars share."""
    leaves = named_leaves(inputs)
    if len({leaf.shape[0] for leaf in leaves.values() if leaf.shape}) != 1:
        shapes = ", ".join(f"{name or 'input'} {list(leaf.shape)}" for name, leaf in leaves.items())
        raise UserError(
            f"export: the inputs do not have one batch axis in front: {shapes}; pass an example "
            "with one, or batched=False"
        )

    def of_example(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return leaf.update(shape=leaf.shape[1:]) if leaf.shape else Scalar((), leaf.dtype)

    return jax.tree.map(of_example, inputs)


def example_arrays(exportable: Exportable, arguments: Namespace, example: PyTree) -> Arrays:
    """{input: array} of the caller's example, under the names of the file."""
    names = arguments.input_names or list(named(exportable.inputs, "input"))
    specs, leaves = jax.tree.leaves(exportable.inputs), jax.tree.leaves(example)
    arrays = [np.asarray(leaf).astype(spec.dtype) for leaf, spec in zip(leaves, specs, strict=True)]
    return dict(zip(names, arrays, strict=False))
