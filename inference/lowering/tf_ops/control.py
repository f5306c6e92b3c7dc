"""Branches and loops."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import tensorflow as tf
from jax.extend.core import ClosedJaxpr

from inference.lowering.tf_ops.elementwise import WIDER_TO_MOVE, Tensor, where
from inference.lowering.tf_ops.pending import resolved
from inference.lowering.value import Aval, Size
from utils import counts_of_scan

if TYPE_CHECKING:
    from inference.lowering.tf_ops.target import TfTarget


UNROLLED = 16  # steps up to which a loop is unrolled: a loop costs more than that many small ops


def cond(
    target: "TfTarget",
    index: Tensor,
    *operands: Tensor,
    branches: Sequence[ClosedJaxpr],
    **_: object,
) -> list[Tensor]:
    """Nested conditionals; an index out of range selects the nearest branch."""

    def branch(i: int) -> list[Tensor]:
        return tensors(target, target.walk.call(branches[i], *operands), target.out)

    def chosen(i: int) -> list[Tensor]:
        if i == len(branches) - 1:
            return branch(i)
        is_chosen = tf.logical_not(index) if index.dtype.name == "bool" else index <= i
        return tf.cond(is_chosen, lambda: branch(i), lambda: chosen(i + 1))

    return chosen(0)


def tensors(target: "TfTarget", results: Iterable[Tensor], avals: Sequence[Aval]) -> list[Tensor]:
    """Results as tensors of these dtypes, which all branches must agree on."""
    return [
        tf.convert_to_tensor(resolved(x), tf.as_dtype(aval.dtype))
        for x, aval in zip(results, target.stored(avals), strict=True)
    ]


def while_(
    target: "TfTarget",
    *operands: Tensor,
    cond_jaxpr: ClosedJaxpr,
    body_jaxpr: ClosedJaxpr,
    cond_nconsts: int,
    body_nconsts: int,
    **_: object,
) -> list[Tensor]:
    """A loop. Under vmap each example has its own condition: the loop runs until all are false.

    Examples that have finished keep their state.
    """
    cond_consts = operands[:cond_nconsts]
    body_consts = operands[cond_nconsts : cond_nconsts + body_nconsts]
    start = operands[cond_nconsts + body_nconsts :]
    per_example = len(cond_jaxpr.out_avals[0].shape) > 0

    def active(state: Sequence[Tensor]) -> Tensor:
        results = target.walk.call(cond_jaxpr, *cond_consts, *state)
        return tensors(target, results, cond_jaxpr.out_avals)[0]

    def condition(*state: Tensor) -> Tensor:
        return tf.reduce_any(active(state)) if per_example else active(state)

    def body(*state: Tensor) -> list[Tensor]:
        new = tensors(target, target.walk.call(body_jaxpr, *body_consts, *state), target.out)
        if not per_example:
            return new
        mask = active(state)
        return [where_active(mask, x, old) for x, old in zip(new, state, strict=True)]

    return loop(condition, body, tensors(target, start, target.out), target.out)


def where_active(active: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """The new state of the examples that are active, the old state of the others."""
    for _ in range(len(new.shape) - len(active.shape)):
        active = tf.expand_dims(active, -1)
    return where(active, new, old)


def loop(
    condition: Callable[..., Tensor],
    body: Callable[..., list[Tensor]],
    start: list[Tensor],
    avals: Sequence[Aval],
) -> list[Tensor]:
    shapes = [
        tf.TensorShape([d if isinstance(d, int) else None for d in aval.shape]) for aval in avals
    ]
    return list(tf.while_loop(condition, body, start, shape_invariants=shapes))


def scan(
    target: "TfTarget",
    *operands: Tensor,
    jaxpr: ClosedJaxpr,
    length: Size,
    reverse: bool,
    **params: Any,
) -> list[Tensor]:
    """A short scan unrolled; a longer one as a loop that writes one row of each output per step."""
    num_consts, num_carry = counts_of_scan(params)
    consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]
    inputs = operands[num_consts + num_carry :]
    steps, out = target.size(length), target.out

    def step(i: Tensor, carry: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        results = target.walk.call(jaxpr, *consts, *carry, *(row(x, i) for x in inputs))
        results = tensors(target, results, jaxpr.out_avals)
        return results[:num_carry], results[num_carry:]

    if isinstance(length, int) and length <= UNROLLED:
        order = range(length)[:: -1 if reverse else 1]
        return unrolled(target, step, carry, order, out[num_carry:])
    carry = tensors(target, carry, out[:num_carry])
    stacked = [tf.zeros(target.sizes(aval.shape), aval.dtype) for aval in out[num_carry:]]

    def body(count: Tensor, *state: Tensor) -> list[Tensor]:
        i = steps - 1 - count if reverse else count
        carry, rows = step(i, state[:num_carry])
        is_row = tf.equal(tf.range(steps), i)
        masks = [tf.reshape(is_row, [-1] + [1] * len(x.shape)) for x in rows]
        written = [
            where(mask, tf.expand_dims(x, 0), old)
            for mask, x, old in zip(masks, rows, state[num_carry:], strict=True)
        ]
        return [count + 1, *carry, *written]

    avals = [jax.ShapeDtypeStruct((), np.int32), *out]
    start = [tf.constant(0), *carry, *stacked]
    return loop(lambda count, *_: count < steps, body, start, avals)[1:]


def unrolled(
    target: "TfTarget",
    step: Callable[[int, Sequence[Tensor]], tuple[list[Tensor], list[Tensor]]],
    carry: Sequence[Tensor],
    order: Iterable[int],
    avals: Sequence[Aval],
) -> list[Tensor]:
    """An unrolled scan; `order` has the indices of its steps in the order of execution."""
    rows = {}
    for i in order:
        carry, rows[i] = step(i, carry)
    if not rows:
        return [*carry, *(tf.zeros(target.sizes(aval.shape), aval.dtype) for aval in avals)]
    outputs = zip(*(rows[i] for i in sorted(rows)), strict=True)
    return [*carry, *(tf.stack(output) for output in outputs)]


def row(x: Tensor, i: Tensor) -> Tensor:
    wider = tf.cast(x, WIDER_TO_MOVE.get(x.dtype.name, x.dtype))
    return tf.cast(wider[i] if isinstance(i, int) else tf.gather(wider, i), x.dtype)


PRIMITIVES = {"cond": cond, "while": while_, "scan": scan}
