"""The cases on which files are verified: real and random inputs, and JAX's outputs for them."""

import sys

import jax
import numpy as np

from inference.examples import Examples
from inference.lowering.trace import UNBATCHED, describe, of_batch
from inference.samples import is_constant, random_inputs, resized_inputs
from inference.verify import BATCHES, check_finite, repeated, sizes_at, take
from utils import RunError, UserError, echo


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


def known_inputs(examples, own, size):
    """{kind: inputs that are not random}, at least `size` of them where there are enough."""
    known = {}
    if examples:  # more than one, since random inputs get the range of these
        known["real"] = examples.first(size if size == UNBATCHED else max(size, *BATCHES))
    if own:
        known["own"] = own
    return known


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
