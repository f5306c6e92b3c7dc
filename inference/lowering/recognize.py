"""Replaces what other libraries compute by the ops of the tables, so that any model exports small.

A model that calls `jax.nn.gelu`, or Flax's `LayerNorm`, is a jaxpr of their primitives. There are
many ways to write such a function, so their values are compared. From each equation, a part of the
jaxpr grows towards the inputs. Where a part reads one array, and otherwise only weights, which are
known before the model runs, it is a function of that array. It is evaluated on small arrays of
random numbers. If all results are those of a Formula, such as gelu or a layer norm with these
weights, its op takes the place of the part. The largest such part is replaced. A part stays as it
is if one of its numbers could be another one: then the small arrays do not show what it does, as
where a softmax is clipped at 1e-7.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import permutations, product
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jaxtyping import Array

from inference.lowering.equations import CALLS, called, is_identity, open_jaxpr
from inference.lowering.formulas import (
    ELEMENTWISE,
    GROUPS,
    REDUCING,
    Choice,
    Formula,
    softmax_along,
    weighted_mean,
)
from inference.lowering.small_arrays import (
    KNOWN,
    OPS,
    REDUCTIONS,
    SMALL,
    UNUSUAL,
    VIEWS,
    difference,
    evaluate,
    is_float,
    is_view,
    number,
    samples,
)
from inference.lowering.value import Atom, Shape, aval_of, is_key, is_one
from model.layers.op import marked_p
from utils import counts_of_scan, first_line

Labels: TypeAlias = Sequence[Any]
Labelled: TypeAlias = tuple[Atom, Labels]
# a function, and the variables that it reads
Replacement: TypeAlias = tuple[Callable[..., Array], list[Atom]]
# (equation, operands) -> results
Compute: TypeAlias = Callable[[JaxprEqn, Sequence[Any]], Sequence[Any]]

REACH = 64  # equations that a part has at most
TOLERANCE = 1e-6  # between two functions whose constants are rounded differently
INNER = {"marked", "cond", "scan", "while"}  # primitives with jaxprs of their own


def variables(eqn: JaxprEqn) -> list[Atom]:
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]


class Graph:
    """A jaxpr without calls; `fixed` says of each argument whether it is a weight."""

    def __init__(self, closed: ClosedJaxpr, fixed: Iterable[bool]) -> None:
        jaxpr = closed.jaxpr
        self.makers: dict[Atom, JaxprEqn] = {
            eqn.outvars[0]: eqn for eqn in jaxpr.eqns if len(eqn.outvars) == 1
        }
        self.index: dict[Atom, int] = {var: i for i, var in enumerate(self.makers)}
        # what is known before the model runs
        self.fixed: set[Atom] = {
            x for x, is_weight in zip(jaxpr.invars, fixed, strict=True) if is_weight
        }
        self.fixed.update(jaxpr.constvars)
        for eqn in jaxpr.eqns:
            if self.fixed.issuperset(variables(eqn)):
                self.fixed.update(eqn.outvars)

    def name(self, atom: Atom) -> str:
        """The primitive that computes a variable, "" for an argument or a constant."""
        is_computed = not isinstance(atom, Literal) and atom in self.makers
        return self.makers[atom].primitive.name if is_computed else ""

    def parts(self, root: Atom) -> Iterator[tuple[list[JaxprEqn], Atom, list[Atom]]]:
        """(equations, x, weights) for each part that ends with `root`, the smallest first."""
        inside, edge = set(), {root}  # variables that the part computes, and that it reads
        while len(inside) < REACH:
            open_ = {x for x in edge if self.can_enter(x, root)}
            data = edge - self.fixed
            if len(data - open_) > 1:
                return
            if inside and len(data) == 1 and open_ <= data:
                eqns = [self.makers[x] for x in sorted(inside, key=self.index.__getitem__)]
                (x,) = data
                yield eqns, x, list(edge - data)
            if not open_:
                return
            last = max(open_, key=lambda x: (x in self.fixed, self.index[x]))
            inside.add(last)
            edge = edge.union(variables(self.makers[last])) - inside

    def can_enter(self, x: Atom, root: Atom) -> bool:
        """Whether a part that ends with `root` can contain the equation that computes x."""
        name = self.name(x)
        if name not in KNOWN:
            return False
        if x in self.fixed:  # a weight is found behind its views, and numbers are computed
            return name in VIEWS or not aval_of(x).shape
        # rounding to fewer bits would not be seen in the values
        return not is_float(aval_of(x).dtype) or bits(x) >= bits(root)


def bits(var: Atom) -> int:
    return jnp.finfo(aval_of(var).dtype).nmant


class Found(NamedTuple):
    """A formula that a part of a jaxpr computes from x, with the axes of its result reordered."""

    formula: Formula
    x: Atom
    weights: tuple[Atom, ...]
    options: dict[str, Any]  # the other arguments
    order: tuple[int, ...]
    error: float  # the difference between the results

    def result(self, x: Array, *weights: Array) -> Array:
        named = dict(zip(self.formula.weights, map(jnp.ravel, weights), strict=True))
        return jnp.transpose(self.formula.op(x, **named, **self.options), self.order)


class Recognition:
    """One pass over a jaxpr and those within it."""

    def __init__(self) -> None:
        self.definitions = {}  # {(formula, choice, shape, dtype): its jaxpr}

    def jaxpr(self, closed: ClosedJaxpr, fixed: Sequence[bool]) -> ClosedJaxpr:
        """The jaxpr with ops; `fixed` says of each argument whether it is a weight."""
        closed = inlined(closed)
        graph = Graph(closed, fixed)
        needed = {x for x in closed.jaxpr.outvars if not isinstance(x, Literal)}
        kept, ops = [], {}
        for eqn in reversed(closed.jaxpr.eqns):
            if needed.isdisjoint(eqn.outvars):
                continue
            if replacement := self.replacement(eqn, graph):
                ops[eqn.outvars[0]], atoms = replacement
                eqn = eqn.replace(invars=atoms)
            kept.append(eqn)
            needed.update(variables(eqn))

        def equation(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
            if op := ops.get(eqn.outvars[0]):
                return [op(*operands)]
            return bind(eqn, operands, self.params(eqn, graph.fixed))

        return retraced(closed.replace(jaxpr=closed.jaxpr.replace(eqns=kept[::-1])), equation)

    def params(self, eqn: JaxprEqn, fixed: set[Atom]) -> dict[str, Any]:
        """The params of an equation, with ops in its own jaxprs."""
        params = eqn.params
        if eqn.primitive.name not in INNER:
            return params
        is_fixed = [isinstance(x, Literal) or x in fixed for x in eqn.invars]
        if eqn.primitive.name == "scan":
            first, count = counts_of_scan(params)
            is_fixed[first : first + count] = [False] * count  # it changes from step to step
        if eqn.primitive.name == "while":
            is_fixed = [False] * len(is_fixed)  # its two jaxprs read different operands

        def inside(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(inside, value))
            if isinstance(value, ClosedJaxpr):  # its arguments are the last operands
                return self.jaxpr(value, is_fixed[len(is_fixed) - len(value.in_avals) :])
            return value

        return {name: inside(value) for name, value in params.items()}

    def replacement(self, eqn: JaxprEqn, graph: Graph) -> Replacement | None:
        """(a function, the variables that it reads) in place of an equation, or None."""
        root = eqn.outvars[0]
        if len(eqn.outvars) > 1 or root in graph.fixed or not is_float(aval_of(root).dtype):
            return None
        try:
            if eqn.primitive.name in {*VIEWS, "dot_general"}:
                return attention(graph, root, self.found)
            found = self.found(graph, root)
            return found and (found.result, [found.x, *found.weights])
        except Exception as error:  # then the file is larger, but the export succeeds
            place = source_info_util.summarize(eqn.source_info)
            reason = f"{type(error).__name__}: {first_line(error)}"
            warnings.warn(f"formula not recognized: {place}: {reason}", stacklevel=2)
        return None

    def found(self, graph: Graph, root: Atom) -> Found | None:
        """The Found of the largest part that ends with `root` and computes a formula, or None."""
        largest = None
        if graph.name(root) not in OPS:
            return None
        for eqns, x, weights in graph.parts(root):
            with np.errstate(all="ignore"):
                found = self.formulas(root, eqns, x, weights)
            largest = min(found, key=lambda found: found.error, default=largest)
        return largest

    def formulas(
        self, root: Atom, eqns: list[JaxprEqn], x: Atom, weights: list[Atom]
    ) -> list[Found]:
        """The Founds of the formulas that equations compute, for all orders of axes and weights."""
        is_split = any(eqn.primitive.name == "reshape" and not is_view(eqn) for eqn in eqns)
        formulas = ELEMENTWISE
        if any(eqn.primitive.name in REDUCTIONS for eqn in eqns):
            formulas = GROUPS if is_split else REDUCING
        vectors = {math.prod(aval_of(weight).shape) for weight in weights} or {1}
        channels = vectors.pop()
        if vectors or aval_of(x).dtype != aval_of(root).dtype:
            return []
        split = channels if is_split else None
        numbers = constants(eqns)
        arrays = samples(x, weights, numbers, split)
        try:
            values = evaluate(eqns, arrays, split)
        except ValueError:  # a reshape that is impossible for small arrays
            return []
        value = values[root]
        if np.array_equal(value, arrays[x], equal_nan=True):
            return []
        found = []
        limit = max(TOLERANCE, float(jnp.finfo(aval_of(x).dtype).eps) / 2)
        for formula, choice in possible(formulas, x, eqns, weights, channels):
            definition = self.definition(formula, choice, aval_of(x), channels)
            (result,), shape = definition.jaxpr.outvars, definition.out_avals[0].shape
            options = [{formula.number: n} for n in numbers] if formula.number else [{}]
            for ordered, option in product(permutations(weights), options):
                vectors = [arrays[weight].reshape(-1, value.shape[-1]) for weight in ordered]
                operands = [arrays[x], *vectors, *map(number, option.values())]
                inputs = dict(zip(definition.jaxpr.invars, operands, strict=True))
                expected = evaluate(definition.jaxpr.eqns, inputs, split)[result]
                for order in orders(shape, aval_of(root).shape):
                    error = difference(value, expected.transpose(*order, len(order)))
                    if error < limit:
                        found.append(Found(formula, x, ordered, choice | option, order, error))
        if found:
            for other in with_a_number_doubled(eqns, values):
                if difference(evaluate(other, arrays, split)[root], value) < limit:
                    return []
        return found

    def definition(
        self, formula: Formula, choice: Choice, aval: ShapedArray, channels: int
    ) -> ClosedJaxpr:
        """The jaxpr of a formula for an x like `aval`."""
        key = (formula, *choice.items(), aval.shape, aval.dtype)
        if key not in self.definitions:
            shapes = [(channels,)] * len(formula.weights) + [()] * bool(formula.number)
            avals = [jax.ShapeDtypeStruct(shape, aval.dtype) for shape in shapes]
            names = [*formula.weights, formula.number]

            def function(x: Array, *arrays: Array) -> Array:
                named = dict(zip(names, arrays, strict=False))
                return (formula.definition or formula.op)(x, **named, **choice)

            traced = jax.make_jaxpr(function)(aval, *avals)
            self.definitions[key] = inlined(traced, with_marked=True)
        return self.definitions[key]


def possible(
    formulas: Iterable[Formula], x: Atom, eqns: list[JaxprEqn], weights: list[Atom], channels: int
) -> Iterator[tuple[Formula, Choice]]:
    """(formula, choice) for all with as many weights."""
    shape = aval_of(x).shape
    for formula in formulas:
        if len(formula.weights) == len(weights):
            for choice in formula.choices(aval_of(x), eqns):
                if not weights or (shape and shape[choice.get("axis", -1)] == channels):
                    yield formula, choice


def constants(eqns: list[JaxprEqn]) -> set[float]:
    """The numbers in equations, and those that are often left out."""
    atoms = [atom for eqn in eqns for atom in eqn.invars if isinstance(atom, Literal)]
    return {0.0, 1.0, *filter(np.isfinite, (float(atom.val) for atom in atoms))}


def with_a_number_doubled(
    eqns: list[JaxprEqn], values: dict[Atom, np.ndarray]
) -> Iterator[list[JaxprEqn]]:
    """The equations with another one of their numbers doubled, for each that is not 0.

    Where `values` are on both sides of a number, it may be a border between two ways to compute one
    function.
    """
    for i, eqn in enumerate(eqns):
        result = eqn.outvars[0]
        if aval_of(result).dtype == bool and np.unique(values[result][..., UNUSUAL:]).size == 2:
            continue
        for j, atom in enumerate(eqn.invars):
            if not isinstance(atom, Literal) or aval_of(atom).dtype == bool:
                continue
            if atom.val and np.isfinite(atom.val):
                doubled = Literal(2.0 * atom.val, atom.aval)
                invars = [*eqn.invars[:j], doubled, *eqn.invars[j + 1 :]]
                yield [*eqns[:i], eqn.replace(invars=invars), *eqns[i + 1 :]]


def orders(shape: Shape, wanted: Shape) -> Iterator[tuple[int, ...]]:
    """The ways to reorder the axes of a shape to get another one."""
    for order in permutations(range(len(shape))):
        if tuple(shape[axis] for axis in order) == wanted:
            yield order


def inlined(closed: ClosedJaxpr, with_marked: bool = False) -> ClosedJaxpr:
    """The jaxpr with its calls, and with `with_marked` its ops, replaced by their equations."""

    def equation(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
        if eqn.primitive.name in CALLS:
            return run(called(eqn), operands, equation)
        if with_marked and eqn.primitive is marked_p:
            return run(eqn.params["jaxpr"], operands, equation)
        return operands if is_identity(eqn) else bind(eqn, operands, eqn.params)

    return retraced(closed, equation)


def retraced(closed: ClosedJaxpr, equation: Compute) -> ClosedJaxpr:
    """The jaxpr with the results of `equation(eqn, operands)` in place of each equation's."""
    return jax.make_jaxpr(lambda *args: run(closed, args, equation))(*closed.in_avals)


def run(jaxpr: ClosedJaxpr | Jaxpr, args: Sequence[Any], equation: Compute) -> list[Any]:
    """The results of a jaxpr, open or closed, whose equations `equation` computes."""
    consts, jaxpr = map(as_number, getattr(jaxpr, "consts", ())), open_jaxpr(jaxpr)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Atom) -> Any:
        return as_number(atom.val) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        with located(eqn.source_info):
            results = equation(eqn, [read(atom) for atom in eqn.invars])
        env |= zip(eqn.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def as_number(constant: Any) -> Any:
    """A constant, as a NumPy scalar if it is a single number."""
    is_number = not np.shape(constant) and not is_key(getattr(constant, "dtype", None))
    return np.asarray(constant)[()] if is_number else constant


def located(source_info: source_info_util.SourceInfo) -> AbstractContextManager[None]:
    """Gives new equations this place; JAX's own code, which has none, keeps that of its caller."""
    if not source_info_util.summarize(source_info):
        return nullcontext()
    return source_info_util.user_context(source_info.traceback, name_stack=source_info.name_stack)


def bind(eqn: JaxprEqn, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """The results of an equation; those of constant numbers are numbers."""
    params = eqn.primitive.get_bind_params(params)
    avals = [aval_of(var) for var in eqn.outvars]
    is_number = bool(operands) and all(isinstance(x, np.generic) for x in operands)
    is_number &= all(not aval.shape and not is_key(aval.dtype) for aval in avals)
    with jax.ensure_compile_time_eval() if is_number and not eqn.effects else nullcontext():
        results = eqn.primitive.bind(*operands, **params)
    results = results if eqn.primitive.multiple_results else [results]
    if not is_number:
        return results
    return list(map(as_number, results))


# Attention: two products of arrays, with a softmax between them. Arrays have labels for their axes,
# which show the same axis in other arrays: None for an axis of size 1, "s" for positions of the
# keys, "d" for features of queries and keys, and otherwise the axis of the result.


def attention(
    graph: Graph, root: Atom, found: Callable[[Graph, Atom], Found | None]
) -> Replacement | None:
    """(a function, the variables that it reads) that computes `root` as attention, or None.

    `found(graph, variable)` is the formula that a variable is the result of, or None.
    """
    product = settled(graph, root, range(len(aval_of(root).shape)))
    for (weights, labels), v in permutations(factors(graph, *product, "s"), 2):
        softmax = found(graph, weights)
        if softmax and softmax.formula.op is softmax_along:
            labels = [labels[axis] for axis in np.argsort(softmax.order)]
            if labels[softmax.options["axis"]] == "s":
                return of_scores(graph, settled(graph, softmax.x, labels), v, root)
    return None


def of_scores(graph: Graph, scores: Labelled, v: Labelled, root: Atom) -> Replacement | None:
    """The same for the scores, of which the softmax is the weights of v."""
    mask = lowest = None
    if graph.name(scores[0]) == "select_n":
        mask, (low, _), scores = operands(graph, *scores)
        if not isinstance(low, Literal):
            return None
        lowest = float(low.val)
        if graph.name(mask[0]) == "and":  # perhaps with True
            computed = [x for x in operands(graph, *mask) if not isinstance(x[0], Literal)]
            mask = computed[0] if len(computed) == 1 else mask
    pairs = [(None, scores)]
    if graph.name(scores[0]) == "add":
        pairs = permutations(operands(graph, *scores))
    for bias, scores in pairs:
        pair, scale = scaled_factors(graph, *scores)
        for q, k in permutations(pair, 2):
            if "s" in k[1] and "s" not in q[1]:
                options = {"scale": scale, "lowest": lowest}
                return of_arrays(graph, [q, k, v], mask, bias, options, root)
    return None


def of_arrays(
    graph: Graph,
    arrays: list[Labelled],
    mask: Labelled | None,
    bias: Labelled | None,
    options: dict[str, Any],
    root: Atom,
) -> Replacement | None:
    """The same for [q, k, v], the mask and the bias, which may be None."""
    q, k, v = ({*labels} - {None, "s", "d"} for _, labels in arrays)
    shared = sorted(q & k & v)
    rows, features = q - {*shared}, v - {*shared}
    if not 1 <= len(shared) <= 2 or len(rows) > 1 or len(features) > 1:
        return None
    batch, head, *_ = *shared, None
    (row,), (feature,) = rows or {None}, features or {None}
    axes = [(batch, row, head, "d"), (batch, "s", head, "d"), (batch, "s", head, feature)]
    options["causal"] = mask is not None and mask[1] == (row, "s") and is_causal(graph, mask[0])
    extras = {"mask": None if options["causal"] else mask, "bias": bias}
    extras = {name: x for name, x in extras.items() if x is not None}
    arrays += extras.values()
    axes += [(batch, head, row, "s")] * len(extras)
    if any({*labels} - {None, *wanted} for (_, labels), wanted in zip(arrays, axes, strict=True)):
        return None

    def result(*values: Array) -> Array:
        q, k, v, *others = (
            arranged(value, labels, wanted)
            for value, (_, labels), wanted in zip(values, arrays, axes, strict=True)
        )
        y = weighted_mean(q, k, v, **dict(zip(extras, others, strict=True)), **options)
        labels = [None if is_one(n) else axis for axis, n in enumerate(aval_of(root).shape)]
        return arranged(y, (batch, row, head, feature), labels).astype(aval_of(root).dtype)

    return result, [atom for atom, _ in arrays]


def arranged(array: Array, labels: Labels, wanted: Labels) -> Array:
    """An array with its axes in the order that is wanted, with size 1 where it has none."""
    sizes = dict(zip(labels, array.shape, strict=True)) | {None: 1}
    order = [labels.index(label) for label in wanted if label in labels and label is not None]
    if order != sorted(order):
        array = array.transpose([*order, *(i for i, label in enumerate(labels) if label is None)])
    return array.reshape([sizes.get(label, 1) for label in wanted])


def settled(graph: Graph, atom: Atom, labels: Labels) -> Labelled:
    """(array, labels) behind views, and behind conversions from float to float."""
    while graph.name(atom) in {*VIEWS, "convert_element_type"}:
        eqn = graph.makers[atom]
        (source,) = eqn.invars
        before = labels_before(eqn, labels)
        if before is None:
            break
        atom, labels = source, before
    sizes = zip(aval_of(atom).shape, labels, strict=True)
    return atom, tuple(None if is_one(n) else label for n, label in sizes)


def labels_before(eqn: JaxprEqn, labels: Labels) -> Labels | None:
    """The labels of the operand of a view or a conversion; None where it does more than that."""
    name, params, x = eqn.primitive.name, eqn.params, aval_of(eqn.invars[0])
    if name == "convert_element_type":
        return labels if is_float(x.dtype) and is_float(params["new_dtype"]) else None
    if name == "broadcast_in_dim":
        return [labels[axis] for axis in params["broadcast_dimensions"]]
    if name == "transpose":
        return [labels[axis] for axis in np.argsort(params["permutation"])]
    if not is_view(eqn):
        return None
    sizes = zip(aval_of(eqn.outvars[0]).shape, labels, strict=True)
    left = iter([label for n, label in sizes if not is_one(n)])
    return [None if is_one(n) else next(left) for n in x.shape]


def operands(graph: Graph, atom: Atom, labels: Labels) -> list[Labelled]:
    """The operands of an elementwise equation, each as (array, labels)."""
    atoms = graph.makers[atom].invars
    return [settled(graph, x, labels if aval_of(x).shape else ()) for x in atoms]


def factors(graph: Graph, atom: Atom, labels: Labels, summed: str) -> list[Labelled]:
    """The operands of a product of arrays over the axis `summed`; [] if the array is none."""
    if graph.name(atom) != "dot_general":
        return []
    eqn = graph.makers[atom]
    sums, shared = eqn.params["dimension_numbers"]
    free, sides = iter(labels[len(shared[0]) :]), []
    for x, summed_axes, batch in zip(eqn.invars, sums, shared, strict=True):
        known = dict.fromkeys(summed_axes, summed) | dict(zip(batch, labels, strict=False))
        axes = range(len(aval_of(x).shape))
        inner = [known[axis] if axis in known else next(free) for axis in axes]
        sides.append(settled(graph, x, inner))
    return sides if len(sums[0]) == 1 else []


def scaled_factors(graph: Graph, atom: Atom, labels: Labels) -> tuple[list[Labelled], float]:
    """(the operands of a product of arrays, the number by which it is multiplied)."""
    name = graph.name(atom)
    if name in ("mul", "div"):
        x, by = operands(graph, atom, labels)
        if name == "mul" and isinstance(x[0], Literal):
            x, by = by, x
        if isinstance(by[0], Literal):
            scale = float(by[0].val)
            return factors(graph, *x, "d"), scale if name == "mul" else 1 / scale
    return factors(graph, atom, labels, "d"), 1.0


def is_causal(graph: Graph, mask: Atom) -> bool:
    """Whether a mask of (queries, keys) is true where a key is not after the query."""
    eqns, atoms = {}, [mask]
    for atom in atoms:
        if not isinstance(atom, Literal):
            if graph.name(atom) not in KNOWN:
                return False
            eqns[atom] = graph.makers[atom]
            atoms += eqns[atom].invars
        elif abs(atom.val) > 1:  # perhaps a distance, which is not seen in small arrays
            return False
    value = evaluate([eqns[x] for x in sorted(eqns, key=graph.index.__getitem__)], {})[mask]
    return np.array_equal(np.broadcast_to(value[..., 0], (SMALL, SMALL)), np.tri(SMALL))
