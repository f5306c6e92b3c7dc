"""Traces a jaxpr again: without calls, or with other equations in place of some.

Libraries split the same formula into calls in different ways; without calls, only the formula is
left.
"""

from contextlib import nullcontext

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Literal

from inference.lowering.equations import CALLS, called, is_identity, open_jaxpr
from inference.lowering.value import is_key
from model.layers.op import marked_p


def inlined(closed, with_marked=False):
    """The jaxpr with its calls, and with `with_marked` its ops, replaced by their equations."""

    def equation(eqn, operands):
        if eqn.primitive.name in CALLS:
            return run(called(eqn), operands, equation)
        if with_marked and eqn.primitive is marked_p:
            return run(eqn.params["jaxpr"], operands, equation)
        return operands if is_identity(eqn) else bind(eqn, operands, eqn.params)

    return retraced(closed, equation)


def retraced(closed, equation):
    """The jaxpr with the results of `equation(eqn, operands)` in place of each equation's."""
    return jax.make_jaxpr(lambda *args: run(closed, args, equation))(*closed.in_avals)


def run(jaxpr, args, equation):
    """The results of a jaxpr, open or closed, whose equations `equation` computes."""
    consts, jaxpr = map(as_number, getattr(jaxpr, "consts", ())), open_jaxpr(jaxpr)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom):
        return as_number(atom.val) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        with located(eqn.source_info):
            results = equation(eqn, [read(atom) for atom in eqn.invars])
        env |= zip(eqn.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def as_number(constant):
    """A constant, as a NumPy scalar if it is a single number."""
    is_number = not np.shape(constant) and not is_key(getattr(constant, "dtype", None))
    return np.asarray(constant)[()] if is_number else constant


def located(source_info):
    """Gives new equations this place; JAX's own code, which has none, keeps that of its caller."""
    if not source_info_util.summarize(source_info):
        return nullcontext()
    return source_info_util.user_context(source_info.traceback, name_stack=source_info.name_stack)


def bind(eqn, operands, params):
    """The results of an equation; those of constant numbers are numbers."""
    params = eqn.primitive.get_bind_params(params)
    avals = [var.aval for var in eqn.outvars]
    is_number = bool(operands) and all(isinstance(x, np.generic) for x in operands)
    is_number &= all(not aval.shape and not is_key(aval.dtype) for aval in avals)
    with jax.ensure_compile_time_eval() if is_number and not eqn.effects else nullcontext():
        results = eqn.primitive.bind(*operands, **params)
    results = results if eqn.primitive.multiple_results else [results]
    if not is_number:
        return results
    return list(map(as_number, results))
