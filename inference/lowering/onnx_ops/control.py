"""Loops and branches: jaxprs as subgraphs, which see the tensors around them."""

import numpy as np

from inference.lowering.value import Value


def cond(t, index, *operands, branches, **_):
    """Each `else` holds the branches that are left."""

    def results(number):
        if number == len(branches) - 1:
            return t.walk.jaxpr(branches[number], operands)
        with t.scope() as taken:
            returned(t, t.walk.jaxpr(branches[number], operands))
        with t.scope() as otherwise:
            returned(t, results(number + 1))
        chosen = t.Not(index) if index.dtype == bool else t.LessOrEqual(index, np.int32(number))
        return values(t.If(chosen, then_branch=taken, else_branch=otherwise, outputs=len(avals)), avals)

    avals = branches[0].out_avals
    return results(0)


def while_(t, *operands, cond_jaxpr, cond_nconsts, body_jaxpr, body_nconsts, **_):
    """Loop asks before the first round, and at the end of each."""
    asked, consts = operands[:cond_nconsts], operands[cond_nconsts : cond_nconsts + body_nconsts]
    start = operands[cond_nconsts + body_nconsts :]
    (goes_on,) = t.walk.jaxpr(cond_jaxpr, [*asked, *start])
    with t.scope() as scope:
        scope.inputs[t.name("round")] = ((), np.int64)
        scope.inputs[t.name("goes_on")] = ((), bool)
        carried = t.walk.jaxpr(body_jaxpr, [*consts, *(argument(t, scope, value) for value in start)])
        returned(t, [*t.walk.jaxpr(cond_jaxpr, [*asked, *carried]), *carried])
    return values(t.Loop(None, goes_on, *start, body=scope, outputs=len(start)), body_jaxpr.out_avals)


def scan(t, *operands, jaxpr, length, num_consts, num_carry, reverse, **_):
    """Scan slices the first axis of what it goes through, and stacks what each round gives."""
    consts, start = operands[:num_consts], operands[num_consts : num_consts + num_carry]
    rows = operands[num_consts + num_carry :]
    with t.scope() as scope:
        carried = [argument(t, scope, value) for value in start]
        taken = [argument(t, scope, aval) for aval in jaxpr.in_avals[num_consts + num_carry :]]
        if not rows:
            scope.inputs[t.name("round")] = ((), np.int64)
        returned(t, t.walk.jaxpr(jaxpr, [*consts, *carried, *taken]))
    through = rows or [t.table["iota"](t, dimension=0, shape=(length,), dtype=np.int64)]
    results = len(jaxpr.out_avals)
    about = {"num_scan_inputs": len(through), "scan_input_directions": [int(reverse)] * len(through)}
    about["scan_output_directions"] = [int(reverse)] * (results - num_carry) or None
    names = t.Scan(*start, *through, body=scope, outputs=results, **about)
    return [names] if results == 1 else list(names)


def argument(t, scope, like):
    """A new input of a subgraph."""
    name = t.name("argument")
    scope.inputs[name] = (like.shape, like.dtype)
    return Value(name, like.shape, like.dtype)


def returned(t, results):
    """Make these the outputs of the subgraph."""
    for value in results:
        t.result(value, t.name("result"))


def values(names, avals):
    names = [names] if isinstance(names, str) else names
    return [Value(name, aval.shape, aval.dtype) for name, aval in zip(names, avals, strict=True)]


TABLE = {"cond": cond, "while": while_, "scan": scan}
