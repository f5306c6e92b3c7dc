"""Names that the user chooses for the inputs and outputs of an exported file."""

import re
from collections import OrderedDict

import jax

from inference.lowering.trace import named, of_batch
from utils import UserError


def renamed(exportable, input_names, output_names, batch=None):
    """The model with other names for its inputs and outputs, given in the order of its own names.

    What is not given keeps its names.
    """
    if not input_names and not output_names:
        return exportable
    shapes = of_batch(exportable.inputs, batch or 2)
    out = jax.eval_shape(exportable.function, exportable.weights, shapes)
    ins = chosen("--input-names", input_names, named(exportable.inputs, "input"))
    outs = chosen("--output-names", output_names, named(out, "output", ins))
    if both := set(ins) & set(outs):
        raise UserError(
            f"--output-names: {min(both)!r} is the name of an input as well; choose another"
        )
    function, structure = exportable.function, jax.tree.structure(exportable.inputs)

    def with_names(weights, inputs):
        outputs = function(weights, jax.tree.unflatten(structure, [inputs[name] for name in ins]))
        return OrderedDict(zip(outs, jax.tree.leaves(outputs), strict=True))

    inputs = OrderedDict(zip(ins, jax.tree.leaves(exportable.inputs), strict=True))
    return exportable._replace(function=with_names, inputs=inputs)


def chosen(option, names, present):
    """The names of an option, or those that are present; raises if they do not fit."""
    if not names:
        return list(present)
    if len(names) != len(present):
        raise UserError(
            f"{option}: has {len(names)} names, the model has {len(present)}: {', '.join(present)}"
        )
    for i, name in enumerate(names):
        if not re.fullmatch(r"[A-Za-z_][\w./-]*", name):
            raise UserError(f"{option}: {name!r} is not a name; begin it with a letter")
        if name in names[:i]:
            raise UserError(f"{option}: {name!r} is given twice")
    return list(names)
