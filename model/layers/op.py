"""`@op` marks a function as one op for the exporter; in training it runs unchanged.

A layer can therefore compute in the fastest form and still be exported as the one op that the
target format has for it. Arrays among the arguments are inputs of the op, all else is an attribute.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core, source_info_util
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, PyTree

source_info_util.register_exclusion(__file__)  # JAX's messages name the layer and its caller

Structure = Any  # jax.tree_util.PyTreeDef, which is no class for Pyright
marked_p = core.Primitive("marked")
marked_p.multiple_results = True
marking = ContextVar("marking", default=False)  # of a thread: others may trace at the same time


@contextmanager
def marks_shown() -> Iterator[None]:
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


def op(function: Callable | None = None, *, any_rank: bool = False) -> Callable:
    """Mark a function as one op.

    With `any_rank`, extra leading axes of its data become leading axes of its result, so that vmap
    keeps the mark.
    """
    if function is None:
        return functools.partial(op, any_rank=any_rank)
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not marking.get():
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bind_op(function, any_rank, (bound.args, bound.kwargs))

    return call


def bind_op(function: Callable, any_rank: bool, arguments: PyTree) -> PyTree:
    """The results of the function, traced as one op.

    A function that uses an array of its caller without having it as an argument is traced unmarked.
    """
    leaves, tree = jax.tree.flatten(arguments)
    operands = [leaf for leaf in leaves if is_operand(leaf)]
    attributes = tuple(None if is_operand(leaf) else Attribute(leaf) for leaf in leaves)

    def flat(*operands: Array) -> PyTree:
        args, kwargs = filled(tree, attributes, operands)
        return function(*args, **kwargs)

    jaxpr, out = jax.make_jaxpr(flat, return_shape=True)(*operands)
    if any(isinstance(const, Tracer) for const in jaxpr.consts):
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


def is_operand(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


class Attribute:
    """A value that is not an input of the op."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


def filled(
    tree: Structure, attributes: Sequence[Attribute | None], operands: Iterable[Any]
) -> tuple[tuple, dict[str, Any]]:
    """(args, kwargs) of the marked function with these operands filled in."""
    operands = iter(operands)
    return jax.tree.unflatten(tree, [a.value if a else next(operands) for a in attributes])


def unmarked(*operands: Array, jaxpr: core.ClosedJaxpr, **_: Any) -> list[Array]:
    return core.jaxpr_as_fun(jaxpr)(*operands)


def batch_rule(
    operands: Sequence[Array],
    axes: Sequence[int | None],
    *,
    function: Callable,
    any_rank: bool,
    tree: Structure,
    attributes: Sequence[Attribute | None],
    jaxpr: core.ClosedJaxpr,
    out_tree: Structure,
) -> tuple[list[Array], list[int]]:
    """The op itself if it accepts any rank and only its data is mapped, else its vmapped jaxpr."""
    indices = iter(range(len(operands)))
    args, _ = jax.tree.unflatten(tree, [a or next(indices) for a in attributes])
    data = {i for i in args if type(i) is int}  # arrays passed directly, not in a tree of params
    mapped = {i for i, axis in enumerate(axes) if axis is not None}
    if any_rank and mapped == data:
        moved = [
            x if axis is None else jax.numpy.moveaxis(x, axis, 0)
            for x, axis in zip(operands, axes, strict=True)
        ]
        out = bind_op(function, any_rank, filled(tree, attributes, moved))
    else:
        out = jax.vmap(core.jaxpr_as_fun(jaxpr), axes, 0)(*operands)
    return jax.tree.leaves(out), [0] * out_tree.num_leaves


def jvp_rule(
    primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: core.ClosedJaxpr, **_: Any
) -> tuple[list[Array], list[Array]]:
    return jax.jvp(core.jaxpr_as_fun(jaxpr), primals, tuple(map(ad.instantiate_zeros, tangents)))


marked_p.def_impl(unmarked)
marked_p.def_abstract_eval(lambda *avals, jaxpr, **_: jaxpr.out_avals)
mlir.register_lowering(marked_p, mlir.lower_fun(unmarked, multiple_results=True))
batching.primitive_batchers[marked_p] = batch_rule
ad.primitive_jvps[marked_p] = jvp_rule
