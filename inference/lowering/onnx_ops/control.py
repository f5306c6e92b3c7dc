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
        return values(
            t.If(chosen, then_branch=taken, else_branch=otherwise, outputs=len(avals)), avals
        )

    avals = branches[0].out_avals
    return results(0)


def while_(t, *operands, cond_jaxpr, cond_nconsts, body_jaxpr, body_nconsts, **_):
    """Loop asks before the first round, and at the end of each.

    Under vmap each example asks for itself: the loop goes on while any of them does, and the others keep their state.
    """
    asked, consts = operands[:cond_nconsts], operands[cond_nconsts : cond_nconsts + body_nconsts]
    start = operands[cond_nconsts + body_nconsts :]
    goes_on = t.walk.jaxpr(cond_jaxpr, [*asked, *start])
    each = goes_on if cond_jaxpr.out_avals[0].shape else []
    with t.scope() as scope:
        scope.inputs[t.name("round")] = ((), np.int64)
        scope.inputs[t.name("goes_on")] = ((), bool)
        going, before = (
            [argument(t, scope, value) for value in each],
            [argument(t, scope, value) for value in start],
        )
        after = t.walk.jaxpr(body_jaxpr, [*consts, *before])
        carried = (
            [chosen(t, *going, *pair) for pair in zip(after, before, strict=True)]
            if each
            else after
        )
        asks = t.walk.jaxpr(cond_jaxpr, [*asked, *carried])
        returned(t, [any_of(t, *asks), *(asks if each else []), *carried])
    whole = [t.walk.whole(value) for value in each]
    made = t.Loop(
        None, any_of(t, *goes_on), *whole, *start, body=scope, outputs=len(each) + len(start)
    )
    return values(made, [*cond_jaxpr.out_avals[: len(each)], *body_jaxpr.out_avals])[len(each) :]


def any_of(t, value):
    """Whether any of these booleans is true."""
    if not value.shape:
        return value
    numbers = t.to(t.walk.whole(value), np.int32)
    return Value(t.to(t.ReduceMax(numbers, keepdims=0), bool), (), bool)


def chosen(t, going, after, before):
    """The new state of the examples that go on, the old one of others."""
    axes = np.arange(len(going.shape), len(after.shape), dtype=np.int64)
    which = t.Unsqueeze(going, axes) if len(axes) else going
    return Value(t.Where(which, t.walk.whole(after), before), after.shape, after.dtype)


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
    about = {
        "num_scan_inputs": len(through),
        "scan_input_directions": [int(reverse)] * len(through),
    }
    about["scan_output_directions"] = [int(reverse)] * (results - num_carry) or None
    names = t.Scan(*start, *through, body=scope, outputs=results, **about)
    return [names] if results == 1 else list(names)


def argument(t, scope, like):
    """A new input of a subgraph."""
    name = t.name("argument")
    scope.inputs[name] = (like.shape, t.checked(like.dtype))
    return Value(name, like.shape, like.dtype)


def returned(t, results):
    """Make these the outputs of the subgraph."""
    for value in results:
        t.result(value, t.name("result"))


def values(names, avals):
    names = [names] if isinstance(names, str) else names
    return [Value(name, aval.shape, aval.dtype) for name, aval in zip(names, avals, strict=True)]


PRIMITIVES = {"cond": cond, "while": while_, "scan": scan}
