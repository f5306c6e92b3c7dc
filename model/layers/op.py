"""`@op` marks a function as one op for the exporter; in training it runs unchanged.

A layer can therefore compute in the fastest form and still be exported as the one op that the
target format has for it. Arrays among the arguments are inputs of the op, all else is an attribute.
"""

import functools
import inspect
from contextlib import contextmanager
from contextvars import ContextVar

import jax
from jax.extend import core, source_info_util
from jax.interpreters import ad, batching, mlir

source_info_util.register_exclusion(__file__)  # JAX's messages name the layer and its caller

marked_p = core.Primitive("marked")
marked_p.multiple_results = True
marking = ContextVar("marking", default=False)  # of a thread: others may trace at the same time


@contextmanager
def marks_shown():
    """Trace functions under `@op` as ops.

    JAX's caches are cleared before and after, because jit would reuse a trace of the other kind.
    """
    jax.clear_caches()
    before = marking.set(True)
    try:
        yield
    finally:
        marking.reset(before)
        jax.clear_caches()


def op(function=None, *, any_rank=False):
    """Mark a function as one op.

    With `any_rank`, extra leading axes of its data become leading axes of its result, so that vmap
    keeps the mark.
    """
    if function is None:
        return functools.partial(op, any_rank=any_rank)
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        if not marking.get():
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bind_op(function, any_rank, (bound.args, bound.kwargs))

    return call


def bind_op(function, any_rank, arguments):
    """The results of the function, traced as one op.

    A function that uses an array of its caller without having it as an argument is traced unmarked.
    """
    leaves, tree = jax.tree.flatten(arguments)
    operands = [leaf for leaf in leaves if is_operand(leaf)]
    attributes = tuple(None if is_operand(leaf) else Attribute(leaf) for leaf in leaves)

    def flat(*operands):
        args, kwargs = filled(tree, attributes, operands)
        return function(*args, **kwargs)

    jaxpr, out = jax.make_jaxpr(flat, return_shape=True)(*operands)
    if any(isinstance(const, jax.core.Tracer) for const in jaxpr.consts):
        return flat(*operands)
    out_tree = jax.tree.structure(out)
    results = marked_p.bind(
        *operands,
        function=function,
        any_rank=any_rank,
        tree=tree,
        attributes=attributes,
        jaxpr=jaxpr,
        out_tree=out_tree,
    )
    return jax.tree.unflatten(out_tree, results)


def is_operand(leaf):
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


class Attribute:
    """A value that is not an input of the op."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return repr(self.value)


def filled(tree, attributes, operands):
    """(args, kwargs) of the marked function with these operands filled in."""
    operands = iter(operands)
    return jax.tree.unflatten(tree, [a.value if a else next(operands) for a in attributes])


def unmarked(*operands, jaxpr, **_):
    return core.jaxpr_as_fun(jaxpr)(*operands)


def batch_rule(operands, axes, *, function, any_rank, tree, attributes, jaxpr, out_tree):
    """The op itself if it accepts any rank and only its data is mapped, else its vmapped jaxpr."""
    indices = iter(range(len(operands)))
    args, _ = jax.tree.unflatten(tree, [a or next(indices) for a in attributes])
    data = {i for i in args if type(i) is int}  # arrays passed directly, not in a tree of params
    mapped = {i for i, axis in enumerate(axes) if axis is not None}
    if any_rank and mapped == data:
        moved = [
            jax.numpy.moveaxis(x, axes[i], 0) if i in data else x for i, x in enumerate(operands)
        ]
        out = bind_op(function, any_rank, filled(tree, attributes, moved))
    else:
        out = jax.vmap(core.jaxpr_as_fun(jaxpr), axes, 0)(*operands)
    return jax.tree.leaves(out), [0] * out_tree.num_leaves


def jvp_rule(primals, tangents, *, jaxpr, **_):
    return jax.jvp(core.jaxpr_as_fun(jaxpr), primals, tuple(map(ad.instantiate_zeros, tangents)))


marked_p.def_impl(unmarked)
marked_p.def_abstract_eval(lambda *avals, jaxpr, **_: jaxpr.out_avals)
mlir.register_lowering(marked_p, mlir.lower_fun(unmarked, multiple_results=True))
batching.primitive_batchers[marked_p] = batch_rule
ad.primitive_jvps[marked_p] = jvp_rule
