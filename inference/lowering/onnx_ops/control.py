"""Loops and branches: jaxprs as subgraphs, which can read the tensors around them."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr

from inference.lowering.onnx_ops.elementwise import where
from inference.lowering.onnx_ops.target import OnnxTarget, Scope, Tensor
from inference.lowering.value import Aval, Size, Value, aval_of, is_positive
from utils import counts_of_scan


def cond(
    t: OnnxTarget, index: Value, *operands: Value, branches: Sequence[ClosedJaxpr], **_: object
) -> list[Value]:
    """Nested Ifs: each `else` holds the remaining branches."""

    def results(number: int) -> list[Value]:
        if number == len(branches) - 1:
            return t.walk.jaxpr(branches[number], operands)
        with t.scope() as then_branch:
            add_outputs(t, t.walk.jaxpr(branches[number], operands))
        with t.scope() as else_branch:
            add_outputs(t, results(number + 1))
        chosen = t.Not(index) if index.dtype == bool else t.LessOrEqual(index, np.int32(number))
        branch = {"then_branch": then_branch, "else_branch": else_branch}
        return values(t.add_several("If", len(t.out), chosen, **branch), t.out)

    return results(0)


def while_(
    t: OnnxTarget,
    *operands: Value,
    cond_jaxpr: ClosedJaxpr,
    cond_nconsts: int,
    body_jaxpr: ClosedJaxpr,
    body_nconsts: int,
    **_: object,
) -> list[Value]:
    """A Loop, which checks its condition before the first iteration and at the end of each.

    Under vmap each example has its own condition: the loop runs until all of them are false, and
    examples that have finished keep their state.
    """
    cond_consts = operands[:cond_nconsts]
    body_consts = operands[cond_nconsts : cond_nconsts + body_nconsts]
    start = operands[cond_nconsts + body_nconsts :]
    (active,) = t.walk.jaxpr(cond_jaxpr, [*cond_consts, *start])
    per_example = [active] if active.shape else []
    with t.scope() as scope:
        scope.inputs[t.name("iteration")] = ((), np.int64)
        scope.inputs[t.name("condition")] = ((), bool)
        masks = [add_argument(t, scope, value) for value in per_example]
        old = [add_argument(t, scope, value) for value in start]
        new = t.walk.jaxpr(body_jaxpr, [*body_consts, *old])
        for mask in masks:
            new = [where_active(t, mask, *pair) for pair in zip(new, old, strict=True)]
        (still_active,) = t.walk.jaxpr(cond_jaxpr, [*cond_consts, *new])
        add_outputs(t, [any_of(t, still_active), *(still_active for _ in masks), *new])
    carried = [*(t.walk.whole(value) for value in per_example), *start]
    names = t.add_several("Loop", len(carried), None, any_of(t, active), *carried, body=scope)
    return values(names[len(per_example) :], t.out)


def any_of(t: OnnxTarget, value: Value) -> Value:
    """Whether any of these booleans is true."""
    if not value.shape:
        return value
    numbers = t.to(t.walk.whole(value), np.int32)
    return Value(t.to(t.ReduceMax(numbers, keepdims=0), bool), (), bool)


def where_active(t: OnnxTarget, active: Value, new: Value, old: Value) -> Value:
    """The new state of the examples that are active, the old state of the others."""
    axes = np.arange(len(active.shape), len(new.shape), dtype=np.int64)
    mask = t.Unsqueeze(active, axes) if len(axes) else active
    return Value(where(t, mask, t.walk.whole(new), old), new.shape, new.dtype)


def scan(t: OnnxTarget, *operands: Value, length: Size, **params: Any) -> Sequence[Tensor]:
    """A Scan, within an If where there may be no steps, of which ONNX Runtime's Scan fails."""
    if is_positive(length):
        return steps(t, *operands, length=length, **params)
    avals, (num_consts, num_carry) = t.out, counts_of_scan(params)
    start = operands[num_consts : num_consts + num_carry]
    with t.scope() as some:
        add_outputs(t, values(steps(t, *operands, length=length, **params), avals))
    with t.scope() as none:
        add_outputs(t, [*start, *map(no_rows, avals[num_carry:])])
    has_steps = t.Greater(t.scalar(length), np.int64(0))
    names = t.add_several("If", len(avals), has_steps, then_branch=some, else_branch=none)
    return values(names, avals)


def no_rows(aval: Aval) -> Value:
    """A stack of no results."""
    row = np.zeros((0, *[1] * (len(aval.shape) - 1)), aval.dtype)
    return Value(row, (0, *aval.shape[1:]), aval.dtype, data_shape=row.shape)


def steps(
    t: OnnxTarget, *operands: Value, jaxpr: ClosedJaxpr, length: Size, reverse: bool, **params: Any
) -> list[str]:
    """A Scan, which slices its inputs along the first axis and stacks the results of each step."""
    num_consts, num_carry = counts_of_scan(params)
    consts, start = operands[:num_consts], operands[num_consts : num_consts + num_carry]
    inputs = operands[num_consts + num_carry :]
    with t.scope() as scope:
        carry = [add_argument(t, scope, value) for value in start]
        rows = jaxpr.jaxpr.invars[num_consts + num_carry :]
        rows = [add_argument(t, scope, aval_of(var)) for var in rows]
        if not inputs:
            scope.inputs[t.name("iteration")] = ((), np.int64)
        add_outputs(t, t.walk.jaxpr(jaxpr, [*consts, *carry, *rows]))
    if not inputs:
        inputs = [t.table["iota"](t, dimension=0, shape=(length,), dtype=np.int64)]
    outputs = len(t.out)
    return t.add_several(
        "Scan",
        outputs,
        *start,
        *inputs,
        body=scope,
        num_scan_inputs=len(inputs),
        scan_input_directions=[int(reverse)] * len(inputs),
        scan_output_directions=[int(reverse)] * (outputs - num_carry) or None,
    )


def add_argument(t: OnnxTarget, scope: Scope, like: Value | Aval) -> Value:
    """A new input of a subgraph, with the shape and dtype of `like`."""
    name = t.name("argument")
    scope.inputs[name] = (like.shape, t.checked(like.dtype))
    return Value(name, like.shape, like.dtype)


def add_outputs(t: OnnxTarget, results: Iterable[Value]) -> None:
    """Make these the outputs of the current subgraph."""
    for value in results:
        t.result(value, t.name("result"))


def values(names: Iterable[str], avals: Iterable[Aval]) -> list[Value]:
    return [Value(name, aval.shape, aval.dtype) for name, aval in zip(names, avals, strict=True)]


PRIMITIVES = {"cond": cond, "while": while_, "scan": scan}
