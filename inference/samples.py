"""The inputs of a verification: random ones, like those of the data, and those of the user."""

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from data_loader.npy_files import claimed
from inference.lowering.equations import open_jaxpr
from inference.lowering.trace import Scalar, named, of_batch
from training.checkpoint.probe import seeded_inputs
from utils import UserError, check_memory, first_line

# Primitives whose results are numbers of their operands, in another form.
SAME_NUMBERS = {"convert_element_type", "reshape", "broadcast_in_dim", "squeeze", "slice", "clamp"}
SAME_NUMBERS |= {
    "transpose",
    "concatenate",
    "rev",
    "copy",
    "select_n",
    "max",
    "min",
    "dynamic_slice",
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
