"""Finds attention in a jaxpr: two products of arrays, with a softmax between them.

Arrays have labels for their axes, which show the same axis in other arrays: None for an axis of
size 1, "s" for positions of the keys, "d" for features of queries and keys, and otherwise the axis
of the result.
"""

from itertools import permutations

import numpy as np
from jax.extend.core import Literal

from inference.lowering.formulas import softmax_along, weighted_mean
from inference.lowering.small_arrays import KNOWN, SMALL, VIEWS, evaluate, is_float, is_one, is_view


def attention(graph, root, found):
    """(a function, the variables that it reads) that computes `root` as attention, or None.

    `found(graph, variable)` is the formula that a variable is the result of, or None.
    """
    product = settled(graph, root, range(len(root.aval.shape)))
    for (weights, labels), v in permutations(factors(graph, *product, "s"), 2):
        softmax = found(graph, weights)
        if softmax and softmax.formula.op is softmax_along:
            labels = [labels[axis] for axis in np.argsort(softmax.order)]
            if labels[softmax.options["axis"]] == "s":
                return of_scores(graph, settled(graph, softmax.x, labels), v, root)
    return None


def of_scores(graph, scores, v, root):
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


def of_arrays(graph, arrays, mask, bias, options, root):
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

    def result(*values):
        q, k, v, *others = (
            arranged(value, labels, wanted)
            for value, (_, labels), wanted in zip(values, arrays, axes, strict=True)
        )
        y = weighted_mean(q, k, v, **dict(zip(extras, others, strict=True)), **options)
        labels = [None if is_one(n) else axis for axis, n in enumerate(root.aval.shape)]
        return arranged(y, (batch, row, head, feature), labels).astype(root.aval.dtype)

    return result, [atom for atom, _ in arrays]


def arranged(array, labels, wanted):
    """An array with its axes in the order that is wanted, with size 1 where it has none."""
    sizes = dict(zip(labels, array.shape, strict=True)) | {None: 1}
    order = [labels.index(label) for label in wanted if label in labels and label is not None]
    if order != sorted(order):
        array = array.transpose([*order, *(i for i, label in enumerate(labels) if label is None)])
    return array.reshape([sizes.get(label, 1) for label in wanted])


def settled(graph, atom, labels):
    """(array, labels) behind views, and behind conversions from float to float."""
    while graph.name(atom) in {*VIEWS, "convert_element_type"}:
        eqn = graph.makers[atom]
        (source,) = eqn.invars
        before = labels_before(eqn, labels)
        if before is None:
            break
        atom, labels = source, before
    sizes = zip(atom.aval.shape, labels, strict=True)
    return atom, tuple(None if is_one(n) else label for n, label in sizes)


def labels_before(eqn, labels):
    """The labels of the operand of a view or a conversion; None where it does more than that."""
    name, params, x = eqn.primitive.name, eqn.params, eqn.invars[0].aval
    if name == "convert_element_type":
        return labels if is_float(x.dtype) and is_float(params["new_dtype"]) else None
    if name == "broadcast_in_dim":
        return [labels[axis] for axis in params["broadcast_dimensions"]]
    if name == "transpose":
        return [labels[axis] for axis in np.argsort(params["permutation"])]
    if not is_view(eqn):
        return None
    sizes = zip(eqn.outvars[0].aval.shape, labels, strict=True)
    left = iter([label for n, label in sizes if not is_one(n)])
    return [None if is_one(n) else next(left) for n in x.shape]


def operands(graph, atom, labels):
    """The operands of an elementwise equation, each as (array, labels)."""
    atoms = graph.makers[atom].invars
    return [settled(graph, x, labels if x.aval.shape else ()) for x in atoms]


def factors(graph, atom, labels, summed):
    """The operands of a product of arrays over the axis `summed`; [] if the array is none."""
    if graph.name(atom) != "dot_general":
        return []
    eqn = graph.makers[atom]
    sums, shared = eqn.params["dimension_numbers"]
    free, sides = iter(labels[len(shared[0]) :]), []
    for x, summed_axes, batch in zip(eqn.invars, sums, shared, strict=True):
        known = dict.fromkeys(summed_axes, summed) | dict(zip(batch, labels, strict=False))
        axes = range(len(x.aval.shape))
        inner = [known[axis] if axis in known else next(free) for axis in axes]
        sides.append(settled(graph, x, inner))
    return sides if len(summed_axes) == 1 else []


def scaled_factors(graph, atom, labels):
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


def is_causal(graph, mask):
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
    value = evaluate([eqns[x] for x in sorted(eqns, key=graph.index.get)], {})[mask]
    return np.array_equal(np.broadcast_to(value[..., 0], (SMALL, SMALL)), np.tri(SMALL))
