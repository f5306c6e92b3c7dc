"""Replaces formulas of other libraries by the ops of the tables, so that any model exports small.

A model that calls `jax.nn.gelu`, or Flax's `LayerNorm`, is a jaxpr of their primitives. Each
Replacement of `formulas` is traced for the shapes at hand and compared with the equations before
each result; where they are equal, the `@op` function takes their place. For example, with

    y = 0.5 * x * (1 + erf(x / sqrt(2)))

the last multiplication is the result. The primitives before it include erf, which gelu `needs`; its
`candidates` say that x has the shape of the result. The formula of gelu, traced for that shape, is
a Pattern. If its outline (the operations down to a certain depth) occurs here, a Comparison binds
the formula's input to the model's x, and the number in a hole such as EPS to the model's number.
Then all of these equations become one call of gelu(x).
"""

import warnings

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Literal

from inference.lowering.flatten import Flat, flattened
from inference.lowering.formulas import ACTIVATIONS, HOLES, SOFTMAX
from inference.lowering.formulas_of_norms import ATTENTION, NORMS
from inference.lowering.steps import VIEWS, Graph, labels_of
from inference.lowering.unify import Comparison
from model.layers.op import marked_p
from utils import first_line

REPLACEMENTS = [*ATTENTION, *NORMS, *SOFTMAX, *ACTIVATIONS]
INNER = {"scan": ["jaxpr"], "while": ["cond_jaxpr", "body_jaxpr"], "cond": ["branches"]}
REACH = 80  # equations that a formula has at most
DEPTH = 6  # equations deep: outlines, compared before a formula is traced for its exact shapes
SIZES = {"axis", "groups"}  # choices that leave the outline of a formula the same
ALIKE = {"sqrt": "rsqrt", "pow": "rsqrt", "square": "mul", "integer_pow": "mul"}


class Pattern:
    """The formula of a Replacement, traced for certain shapes."""

    def __init__(self, formula, avals, choice):
        closed = flattened(jax.make_jaxpr(lambda *x: formula(*x, **choice))(*avals))
        self.graph, self.inputs = Graph(closed), closed.jaxpr.invars
        (self.result,) = closed.jaxpr.outvars
        root, _ = self.graph.settled(self.result, labels_of(self.result))
        self.ends_with_view = root is not self.result
        self.outline = self.graph.outline(root, set(self.inputs), DEPTH)


class Recognition:
    """One pass over a jaxpr and those within it."""

    def __init__(self):
        self.patterns = {}  # {(number of the Replacement, choice, shapes): its Pattern}
        self.outlines = {}  # {(number, dtype, choice): (its outline, whether it ends with a view)}

    def jaxpr(self, closed):
        """The jaxpr with ops in place of formulas."""
        closed = flattened(closed)
        jaxpr, graph = closed.jaxpr, Graph(closed)
        needed = {x for x in jaxpr.outvars if not isinstance(x, Literal)}
        kept, consts = [], dict(graph.constants)
        for eqn in reversed(jaxpr.eqns):
            if needed.isdisjoint(eqn.outvars):
                continue
            for new in reversed(self.replaced(eqn, graph, consts) or [self.inside(eqn)]):
                kept.append(new)
                needed.update(x for x in new.invars if not isinstance(x, Literal))
        new = jaxpr.replace(eqns=kept[::-1], constvars=list(consts))
        return ClosedJaxpr(new, list(consts.values()))

    def inside(self, eqn):
        """The equation with ops in its own jaxprs: those of a loop or a branch."""
        names = ["jaxpr"] if eqn.primitive is marked_p else INNER.get(eqn.primitive.name, ())
        params = dict(eqn.params)
        for name in names:
            value = params[name]
            is_list = isinstance(value, tuple | list)
            params[name] = tuple(map(self.jaxpr, value)) if is_list else self.jaxpr(value)
        return eqn.replace(params=params) if names else eqn

    def replaced(self, eqn, graph, consts):
        """`replacement`, or None if it fails: then the file is larger, but the export succeeds."""
        try:
            return self.replacement(eqn, graph, consts)
        except Exception as error:  # pytest's filterwarnings raise it as an error
            place = source_info_util.summarize(eqn.source_info)
            reason = f"{type(error).__name__}: {first_line(error)}"
            warnings.warn(f"formula not recognized: {place}: {reason}", stacklevel=2)
            return None

    def replacement(self, eqn, graph, consts):
        """The equations of the op in place of the formula that ends here; None without one."""
        if len(eqn.outvars) != 1 or not hasattr(eqn.outvars[0].aval, "dtype"):
            return None
        result = eqn.outvars[0]
        root, _ = graph.settled(result, labels_of(result))
        if not graph.is_computed(root):
            return None
        part = before(graph, root)
        found = {x.primitive.name for x in part}
        found |= {ALIKE[name] for name in found & ALIKE.keys()}
        for number, entry in enumerate(REPLACEMENTS):
            for avals, choice in (
                entry.candidates(result.aval, part) if entry.needs <= found else ()
            ):
                if not self.is_possible(number, choice, avals, graph, eqn):
                    continue
                pattern = self.pattern(number, choice, avals)
                comparison = Comparison(pattern.graph, pattern.inputs, graph, HOLES)
                bound = comparison.match(pattern.result, result)
                if bound and all(x in bound for x in pattern.inputs):
                    return equations(entry, choice, pattern, bound, eqn, consts)
        return None

    def is_possible(self, number, choice, avals, graph, eqn):
        """Whether the equation can be the end of a formula, from its outline for any shapes."""
        dtype = str(avals[0].dtype)  # bfloat16 is converted on the way
        key = (number, dtype, *((k, v) for k, v in choice.items() if k not in SIZES))
        if key not in self.outlines:
            pattern = self.pattern(number, choice, avals)
            self.outlines[key] = pattern.outline, pattern.ends_with_view
        outline, ends_with_view = self.outlines[key]
        is_view = eqn.primitive.name in VIEWS
        return (ends_with_view or not is_view) and graph.has(outline, eqn.outvars[0])

    def pattern(self, number, choice, avals):
        shapes = tuple((tuple(aval.shape), str(aval.dtype)) for aval in avals)
        key = (number, *choice.items(), shapes)
        if key not in self.patterns:
            self.patterns[key] = Pattern(REPLACEMENTS[number].formula, avals, choice)
        return self.patterns[key]


def before(graph, root):
    """The equations before an array, the nearest first."""
    atoms, part = [root], {}
    for atom in atoms:
        eqn = graph.maker(atom)
        if eqn is not None and id(eqn) not in part and len(part) < REACH:
            part[id(eqn)] = eqn
            atoms += [x for x in eqn.invars if not isinstance(x, Literal)]
        elif atom is root and eqn is None:  # one over a root
            break
    return list(part.values())


def equations(entry, choice, pattern, bound, eqn, consts):
    """The op's equations for the formula's inputs, with their result in place of that of eqn."""
    numbers = {name: array for name, array in bound.items() if isinstance(name, str)}
    atoms = [bound[var][0] for var in pattern.inputs]

    def replacement(*arrays):
        arranged = []
        for i, (x, var) in enumerate(zip(arrays, pattern.inputs, strict=True)):
            x = in_order(x, bound[var][1], len(var.aval.shape))
            arranged.append(jnp.broadcast_to(x, var.aval.shape) if i < entry.whole else x)
        return entry.op(*arranged, **choice, **numbers)

    traced = jax.make_jaxpr(replacement)(*(x.aval for x in atoms))
    flat = Flat(consts)
    (result,) = flat.enter(traced, (), atoms, eqn)
    consts.update(flat.consts)
    made = [x.replace(source_info=eqn.source_info) for x in flat.eqns]
    last = next(i for i, x in enumerate(made) if result in x.outvars)
    made[last] = made[last].replace(outvars=eqn.outvars)
    return made


def in_order(x, axes, rank):
    """x with its axes where the formula has them, and with size 1 where x has none."""
    kept = [axis for axis in axes if axis is not None]
    if len(kept) < len(axes):
        x = x.reshape([n for n, axis in zip(x.shape, axes, strict=True) if axis is not None])
    x = x.transpose(sorted(range(len(kept)), key=kept.__getitem__))
    return jnp.expand_dims(x, [axis for axis in range(rank) if axis not in kept])
