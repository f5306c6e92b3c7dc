"""The inputs on which files are verified, and JAX's outputs for them: examples of the data, random
inputs like them, and those of the user.
"""

import sys

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from data_loader.base import fingerprint, has_items
from data_loader.base import loaded as load_datasets
from data_loader.loader import collate, collated
from data_loader.npy_files import claimed
from inference.load import prepare
from inference.lowering.equations import open_jaxpr
from inference.lowering.trace import UNBATCHED, Scalar, describe, named, of_batch
from inference.verify import check_finite, repeated, rows_of, sizes_at, take
from training.checkpoint.probe import seeded_inputs
from utils import RunError, UserError, check_memory, echo, first_line

# Primitives whose results are numbers of their operands, in another form.
SAME_NUMBERS = """
    convert_element_type reshape broadcast_in_dim squeeze slice clamp transpose concatenate rev copy
    select_n max min dynamic_slice
"""
SAME_NUMBERS = set(SAME_NUMBERS.split())


class Examples:
    """Batches of ({input: array}, targets); raises UserError if there is no usable data."""

    def __init__(self, exportable):
        if exportable.parts.data is None:
            raise UserError(exportable.data_error)
        if getattr(exportable.parts.model, "inputs", None):
            raise UserError("the model takes other inputs than those of the data")
        self.exportable = exportable
        self.datasets = load_datasets(exportable.parts.data, exportable.parts.loader)
        if not all(map(has_items, self.datasets.values())):
            raise UserError("data: comes in batches, so no single example can be read")
        self.test_set = self.datasets.get("test")
        self.check_shapes()

    def check_shapes(self):
        """Raise if the data's inputs do not have the shape that the model takes."""
        inputs, _ = self.batch(self.datasets["train"], [0])
        for name, leaf in named(self.exportable.inputs, "input").items():
            shape = inputs[name].shape[1:]
            if shape != leaf.shape:
                raise UserError(
                    f"the data's inputs have shape {shape}, the model takes {leaf.shape}"
                )

    @property
    def source(self):
        """Where the data comes from: its own description, or its name in the config."""
        return getattr(self.datasets["train"], "source", self.exportable.config["data"]["name"])

    def differs_from_training_data(self):
        """Whether the checkpoint was trained on other data than this."""
        trained_on = self.exportable.record.get("data", {}).get("train")
        return trained_on is not None and trained_on != fingerprint(self.datasets["train"])

    def first(self, count):
        """The first inputs of the test set, or of the training set if there is no test set."""
        dataset = self.datasets["train"] if self.test_set is None else self.test_set
        return self.batch(dataset, range(min(count, len(dataset))))[0]

    def spread(self, count):
        """Inputs of the training set at equal distances."""
        dataset = self.datasets["train"]
        count = min(count, len(dataset))
        return self.batch(dataset, [i * len(dataset) // count for i in range(count)])[0]

    def test_batches(self, size):
        """The test set, batch by batch."""
        for start in range(0, len(self.test_set), size):
            yield self.batch(self.test_set, range(start, min(start + size, len(self.test_set))))

    def batch(self, dataset, indices):
        collate_fn = self.exportable.parts.loader.of("test").collate_fn or collate
        batch = collated([dataset[i] for i in indices], collate_fn)
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise UserError("the data's examples are not (input, target) pairs")
        raw, targets = batch
        prepared = jax.tree.leaves(prepare(self.exportable.preprocess, self.exportable.form, raw))
        names = named(self.exportable.inputs, "input")
        if len(prepared) != len(names):
            found = ", ".join(named(raw, "input"))
            raise UserError(f"the data's inputs are {found}, the model takes {', '.join(names)}")
        return dict(zip(names, prepared, strict=True)), targets


class Rows:
    """Given examples, {input: array}, in place of a config's data."""

    test_set, source = None, "the example"

    def __init__(self, inputs, batch):
        self.inputs = inputs
        self.count = 1 if batch == UNBATCHED else rows_of(inputs)

    def first(self, count):
        """The first rows, or all if there is no batch."""
        return take(self.inputs, 0, count)

    def spread(self, count):
        """Rows at equal distances."""
        if self.count == 1:
            return self.inputs
        count = min(count, self.count)
        rows = np.arange(count) * self.count // count
        return {
            name: array[rows] if np.ndim(array) else array for name, array in self.inputs.items()
        }


def random_inputs(exportable, size, seen=None, tables=None):
    """Seeded random inputs: numbers between the smallest and the largest that each feature has in
    the examples `seen`. Integers that index a table are any of its rows, whose number is in
    `tables`, or any token of a vocabulary.

    Without examples, or where all numbers of these are equal, they are standard normal floats.
    """
    drawn = jax.tree.map(np.asarray, seeded_inputs(of_batch(exportable.inputs, size)))
    inputs = named(drawn, "input")
    random, channels_first = np.random.default_rng(0), exportable.form.layout == "nchw"
    for name, array in inputs.items():
        is_integer = np.issubdtype(array.dtype, np.integer)
        known = [(tables or {}).get(name), exportable.parts.facts.get("vocab_size")]
        rows = min([count for count in known if count], default=None) if is_integer else None
        if rows:
            inputs[name] = random.integers(rows, size=array.shape).astype(array.dtype)
        elif seen and array.dtype != bool and (is_integer or not is_constant(seen[name])):
            axis = 1 if channels_first and array.ndim == 4 else array.ndim - 1
            inputs[name] = drawn_like(seen[name], axis, array.shape, random)
    return inputs


def is_constant(array):
    """Whether all numbers are equal; a scalar has no others, so it is constant only if it is 0."""
    return array.dtype != bool and array.min() == array.max() and (array.ndim > 0 or array == 0)


def drawn_like(seen, axis, shape, random):
    """Random numbers between the extremes that `seen` has for each feature, along this axis; around
    a single float, between a half of it and one and a half; if all integers are equal, from 0 to
    them."""
    if not np.issubdtype(seen.dtype, np.integer):
        numbers = np.nan_to_num(seen.astype(float), nan=0, posinf=0, neginf=0)
        ends = extremes(numbers, axis, shape) if seen.ndim else (numbers / 2, numbers * 3 / 2)
        return random.uniform(*ends, shape).astype(seen.dtype)
    low, high = extremes(seen, axis, shape)
    if is_constant(seen):
        low, high = min(low, 0), max(high, 1)
    return random.integers(low, high, shape, endpoint=True).astype(seen.dtype)


def extremes(numbers, axis, shape):
    """The smallest and largest numbers of each feature, or those of all features together if this
    shape has another number of features, or no feature has two numbers."""
    axes = tuple(i for i in range(numbers.ndim) if i != axis or numbers.ndim == 1)
    low, high = numbers.min(axes, keepdims=True), numbers.max(axes, keepdims=True)
    is_other_count = numbers.ndim > 1 and numbers.shape[axis] != shape[axis]
    is_together = is_other_count or (low == high).all()
    return (numbers.min(), numbers.max()) if is_together else (low, high)


def resized_inputs(inputs, shapes):
    """The inputs, repeated or cut along each axis to the sizes of a tree of shapes."""
    results = {}
    for name, spec in named(shapes, "input").items():
        array = inputs[name]
        for axis, size in enumerate(spec.shape):
            array = np.take(array, np.arange(size) % array.shape[axis], axis)
        results[name] = array
    return results


def table_sizes(traced):
    """{input: the size of the smallest axis that its integers index}, for inputs of integers."""
    sizes, inputs = {}, dict.fromkeys(traced.weights) | {name: name for name in traced.inputs}

    def walk(jaxpr, names):
        """The name of the input whose numbers each result holds, or None."""
        jaxpr = open_jaxpr(jaxpr)
        held = dict(zip(jaxpr.invars, names, strict=True))

        def name_of(atom):
            return None if isinstance(atom, Literal) else held.get(atom)

        for eqn in jaxpr.eqns:
            names = list(map(name_of, eqn.invars))
            if eqn.primitive.name == "gather" and names[1]:
                shape = eqn.invars[0].aval.shape
                indexed = [shape[axis] for axis in eqn.params["dimension_numbers"].start_index_map]
                known = [size for size in (*indexed, sizes.get(names[1])) if isinstance(size, int)]
                sizes.update({names[1]: min(known)} if known else {})
            results = [None] * len(eqn.outvars)
            if eqn.primitive.name in SAME_NUMBERS:
                results = [next(filter(None, names), None)]
            if eqn.primitive.name == "gather":  # a column
                results = names[:1]
            for inner, values in inner_jaxprs(eqn, names):
                results = walk(inner, values)
            held |= dict(zip(eqn.outvars, results, strict=False))
        return list(map(name_of, jaxpr.outvars))

    walk(traced.jaxpr, inputs.values())
    return sizes


def inner_jaxprs(eqn, names):
    """(jaxpr, the names of its arguments) for each jaxpr that an equation calls, but not loops that
    run until a condition holds."""
    for param in eqn.params.values():
        for inner in param if isinstance(param, tuple | list) else [param]:
            if isinstance(inner, Jaxpr | ClosedJaxpr):
                values = names[1:] if eqn.primitive.name == "cond" else names
                if len(open_jaxpr(inner).invars) == len(values):
                    yield inner, values


def own_inputs(path, exportable, is_batched=True):
    """{input: array} of an npz or npy file of inputs as the exported file takes them."""
    specs = named(exportable.inputs, "input")
    try:
        check_memory(f"--inputs: {path}", sum(claimed(path).values()))
        content = np.load(path, allow_pickle=False)
        arrays = {"input": content} if isinstance(content, np.ndarray) else dict(content)
    except UserError:
        raise
    except Exception as error:  # damaged files raise many kinds
        raise UserError(f"--inputs: {path}: cannot be read: {first_line(error)}") from error
    if len(specs) == len(arrays) == 1:  # there is only one that it can be
        arrays = dict(zip(specs, arrays.values(), strict=True))
    if missing := [name for name in specs if name not in arrays]:
        found = ", ".join(arrays) or "nothing"
        raise UserError(f"--inputs: {path}: has no {', '.join(missing)}, only {found}")
    batched = {name: is_batched and not isinstance(spec, Scalar) for name, spec in specs.items()}
    arrays = {
        name: as_spec(path, name, arrays[name], spec, batched[name]) for name, spec in specs.items()
    }
    if not is_batched:
        return arrays
    lengths = {name: len(array) for name, array in arrays.items() if batched[name]}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise UserError(f"--inputs: {path}: needs one row per input in every array, got {lengths}")
    return arrays


def as_spec(path, name, array, spec, is_batched=True):
    """An array in the type of an input, once its shape is known to be that of a batch of them."""
    shape = array.shape[1:] if is_batched else array.shape
    fits = (array.ndim or not is_batched) and shape == spec.shape
    fits = fits and array.dtype.kind not in "OSUMm"
    is_float = [jax.numpy.issubdtype(dtype, np.floating) for dtype in (array.dtype, spec.dtype)]
    if not fits or not (all(is_float) or np.array_equal(array, array.astype(spec.dtype))):
        takes = f"{spec.dtype}{[*['any'][:is_batched], *spec.shape]}".replace("'", "")
        found = f"{array.dtype}{list(array.shape)}"
        fix = "pass what the file takes, preprocessed unless the file does that"
        raise UserError(f"--inputs: {path}: the file takes {name} {takes}, got {found}; {fix}")
    return array.astype(spec.dtype)


def load_examples(exportable, arguments, own):
    """(the config's data, None), or (None, why it cannot be loaded).

    `own` are the user's inputs, or None.
    """
    is_int8 = arguments.quantize == "int8"
    int8_needs = "--quantize int8: takes its ranges from training data"
    try:
        examples = Examples(exportable)
    except (UserError, RunError) as error:
        if is_int8 and not own:
            message = f"which cannot be loaded: {error}; or pass some with --inputs FILE.npz"
            raise UserError(f"{int8_needs}, {message}") from error
        kinds = "your inputs" if own else "random inputs only"
        echo(f"Verified on {kinds}, no data can be loaded: {error}", file=sys.stderr)
        return None, str(error)
    if arguments.quantize and examples.differs_from_training_data():
        message = (
            f"{examples.source} is not the data that the checkpoint was trained on; "
            "set it, as in data.args.dir=..."
        )
        if is_int8:
            raise UserError(f"{int8_needs}, but {message}")
        echo(f"Scored on other data: {message}", file=sys.stderr)
    return examples, None


def check_sizes(exportable, tried, batch):
    """Raise if the model itself fails at one of the `tried_shapes`."""
    for sizes, shapes in tried:
        try:
            jax.eval_shape(exportable.function, exportable.weights, of_batch(shapes, batch or 2))
        except Exception as error:  # the model may be the user's own
            raise UserError(
                f"--free: the model itself fails with {in_words(sizes)}: {describe(error)}; give "
                "the sizes that it takes, as in --free 1:length:8-512, or leave out --free"
            ) from error


def in_words(sizes):
    return " ".join(f"{name} {size}" for name, size in sizes.items())


def inputs_of(exportable, known, size, tables, tried, is_real_only):
    """{kind: a batch of inputs}; the kinds of other free sizes are such as `random, length 9`."""
    inputs = {kind: repeated(take(x, 0, size), size) for kind, x in known.items()}
    seen = next(iter(known.values()), None)
    if not is_real_only:
        say_constant(seen or {}, tables)
        inputs = {"random": random_inputs(exportable, size, seen, tables)} | inputs
    for sizes, shapes in tried:
        kind = next(iter(inputs))
        if is_real_only:
            other = resized_inputs(inputs[kind], of_batch(shapes, size))
        else:
            other = random_inputs(exportable._replace(inputs=shapes), size, seen, tables)
        inputs[f"{kind}, {in_words(sizes)}"] = other
    return inputs


def say_constant(seen, tables):
    """Say which random inputs do not have the range of the real ones, which have none."""
    for name, array in seen.items():
        if is_constant(array):
            number = array.reshape(-1)[0]
            drawn = "standard normal" if array.dtype.kind == "f" else "between 0 and it"
            drawn = f"any of the {tables[name]} rows of its table" if name in tables else drawn
            echo(f"{name}: is {number} everywhere, so random inputs are {drawn}", file=sys.stderr)


def check_varied(samples, tables, source):
    """Raise if int8 cannot take its ranges from these inputs, since one of them is constant. Counts
    may be, such as the lengths of sequences: integers that are neither pixels nor index a table."""
    for name in samples[0]:
        arrays = [sample[name] for sample in samples]
        is_count = arrays[0].dtype.kind in "iu" and arrays[0].itemsize > 1 and name not in tables
        if np.ndim(arrays[0]) and not is_count and is_constant(np.concatenate(arrays)):
            number = arrays[0].reshape(-1)[0]
            why = f"where all numbers of the input {name} are {number}; pass real inputs"
            raise UserError(f"--quantize int8: takes its ranges from {source}, {why}")


def cases_of(reference, inputs, batches):
    """{kind: (inputs, expected)}; see `verify`. Random inputs are left out if JAX returns no finite
    number for them, and there are others."""
    cases = {kind: (batch, reference.outputs(batch)) for kind, batch in inputs.items()}
    for kind, (_, expected) in list(cases.items()):
        try:
            for size in sizes_at(kind, batches):
                check_finite(expected(size))
        except RunError as error:
            if not kind.startswith("random") or len(cases) == 1:
                raise RunError(f"on {kind} inputs, {error}") from error
            echo(f"Not verified on {kind} inputs: {error}", file=sys.stderr)
            del cases[kind]
    return cases
