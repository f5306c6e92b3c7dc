"""Flattens a jaxpr: calls are entered, and equations without an effect on the result are left out.

Libraries split the same formula into calls in different ways; a flat jaxpr shows only the formula.
"""

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Literal, Var

from inference.lowering.equations import CALLS, called, is_identity, open_jaxpr
from inference.lowering.value import is_key


def flattened(closed):
    """The jaxpr with its calls replaced by their equations."""
    jaxpr = closed.jaxpr
    flat = Flat(dict(zip(jaxpr.constvars, closed.consts, strict=True)))
    results = flat.enter(jaxpr, (), jaxpr.invars)
    new = jaxpr.replace(eqns=flat.eqns, constvars=list(flat.consts), outvars=results)
    return ClosedJaxpr(new, list(flat.consts.values()))


class Flat:
    """The equations of a flat jaxpr under construction, and its constants {variable: array}."""

    def __init__(self, consts=()):
        self.eqns, self.consts = [], dict(consts)
        self.converted = {}  # {(array, dtype): [the array in that dtype]}

    def enter(self, jaxpr, consts, operands, caller=None):
        """Adds the equations of a jaxpr, open or closed; returns its results in the flat jaxpr."""
        consts, jaxpr = [*consts, *getattr(jaxpr, "consts", ())], open_jaxpr(jaxpr)
        atoms = dict(zip(jaxpr.invars, operands, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=False):  # none at the outermost level
            atoms[var] = Var(var.aval)
            self.consts[atoms[var]] = const

        def read(atom):
            return atom if isinstance(atom, Literal) else atoms.get(atom, atom)

        for eqn in jaxpr.eqns:
            results = self.add(eqn, [read(atom) for atom in eqn.invars], caller)
            atoms |= zip(eqn.outvars, results, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def add(self, eqn, operands, caller=None):
        """Adds one equation; returns its results."""
        name = eqn.primitive.name
        if caller and not source_info_util.summarize(eqn.source_info):
            eqn = eqn.replace(source_info=caller.source_info)  # JAX's own code has its caller's
        if name in CALLS:
            return self.enter(called(eqn), (), operands, eqn)
        if is_identity(eqn):
            return operands
        if is_scalar(eqn, operands):
            return computed(eqn, operands)
        if name == "convert_element_type" and not isinstance(operands[0], Literal):
            key = (operands[0], eqn.params["new_dtype"])  # libraries convert an array twice
            if key in self.converted:
                return self.converted[key]
            self.converted[key] = results = [Var(eqn.outvars[0].aval)]
        else:
            results = [Var(var.aval) for var in eqn.outvars]
        self.eqns.append(eqn.replace(invars=operands, outvars=results))
        return results


def is_scalar(eqn, operands):
    """Whether an equation computes single numbers from constant numbers."""
    if not operands or eqn.effects or not all(isinstance(x, Literal) for x in operands):
        return False
    return all(not var.aval.shape and not is_key(var.aval.dtype) for var in eqn.outvars)


def computed(eqn, operands):
    """The results of an equation of constant numbers."""
    with jax.ensure_compile_time_eval():
        numbers = [np.asarray(x.val, x.aval.dtype) for x in operands]
        results = eqn.primitive.bind(*numbers, **eqn.params)
    results = results if eqn.primitive.multiple_results else [results]
    return [
        Literal(np.asarray(x)[()], var.aval) for x, var in zip(results, eqn.outvars, strict=True)
    ]
