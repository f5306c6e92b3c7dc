"""The export mark: a function under `@op` runs as it is written, and the exporter sees it whole, as one op with its attributes.

So a layer may compute in whatever form is fastest, and still be shipped as the one op that its target has for it. Arrays
among the arguments are the op's inputs, everything else is an attribute.
"""

import functools
import inspect
from contextlib import contextmanager

import jax
from jax.extend import core, source_info_util
from jax.interpreters import ad, batching, mlir

source_info_util.register_exclusion(__file__)  # messages name the layer, and who called it

marked_p = core.Primitive("marked")
marked_p.multiple_results = True
marking = False


@contextmanager
def marks_shown():
    """Trace functions under `@op` as ops. Both ways the traces of before are forgotten: jit would answer with one of them."""
    global marking
    jax.clear_caches()
    marking = True
    try:
        yield
    finally:
        marking = False
        jax.clear_caches()


def op(function=None, *, any_rank=False):
    """Mark a function. `any_rank`: further leading axes of its data give as many of its result, so that vmap keeps the mark."""
    if function is None:
        return functools.partial(op, any_rank=any_rank)
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        if not marking:
            return function(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return show(function, any_rank, (given.args, given.kwargs))

    return call


def show(function, any_rank, given):
    """The results of the function, as those of one op; as they are where it reads what its caller computes by no argument."""
    leaves, tree = jax.tree.flatten(given)
    operands = [leaf for leaf in leaves if is_operand(leaf)]
    attributes = tuple(None if is_operand(leaf) else Attribute(leaf) for leaf in leaves)

    def flat(*operands):
        args, kwargs = filled(tree, attributes, operands)
        return function(*args, **kwargs)

    jaxpr, out = jax.make_jaxpr(flat, return_shape=True)(*operands)
    if any(isinstance(const, jax.core.Tracer) for const in jaxpr.consts):
        return flat(*operands)
    params = {
        "function": function,
        "any_rank": any_rank,
        "tree": tree,
        "attributes": attributes,
        "jaxpr": jaxpr,
    }
    out_tree = jax.tree.structure(out)
    return jax.tree.unflatten(out_tree, marked_p.bind(*operands, **params, out_tree=out_tree))


def is_operand(leaf):
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


class Attribute:
    """A value that is no input of the op."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return repr(self.value)


def filled(tree, attributes, operands):
    """(args, kwargs) of the marked function, with these operands."""
    operands = iter(operands)
    return jax.tree.unflatten(tree, [a.value if a else next(operands) for a in attributes])


def inlined(*operands, jaxpr, **_):
    return core.jaxpr_as_fun(jaxpr)(*operands)


def batched(operands, axes, *, function, any_rank, tree, attributes, jaxpr, out_tree):
    """The mark again where nothing but the data is mapped and the op takes further leading axes; else what is inside."""
    args, _ = jax.tree.unflatten(
        tree, [a or i for i, a in zip(numbers(attributes), attributes, strict=True)]
    )
    data = {i for i in args if type(i) is int}
    mapped = {i for i, axis in enumerate(axes) if axis is not None}
    if any_rank and mapped == data:
        moved = [
            jax.numpy.moveaxis(x, axes[i], 0) if i in data else x for i, x in enumerate(operands)
        ]
        out = show(function, any_rank, filled(tree, attributes, moved))
    else:
        out = jax.vmap(core.jaxpr_as_fun(jaxpr), axes, 0)(*operands)
    return jax.tree.leaves(out), [0] * out_tree.num_leaves


def numbers(attributes):
    """The place of each leaf among the operands."""
    place = -1
    for attribute in attributes:
        place += attribute is None
        yield place


def differentiated(primals, tangents, *, jaxpr, **_):
    return jax.jvp(core.jaxpr_as_fun(jaxpr), primals, tuple(map(ad.instantiate_zeros, tangents)))


marked_p.def_impl(inlined)
marked_p.def_abstract_eval(lambda *avals, jaxpr, **_: jaxpr.out_avals)
mlir.register_lowering(marked_p, mlir.lower_fun(inlined, multiple_results=True))
batching.primitive_batchers[marked_p] = batched
ad.primitive_jvps[marked_p] = differentiated
