"""Choices and loops."""

import jax
import numpy as np
import tensorflow as tf

from inference.lowering.tf_ops.pending import solid

UNROLLED = 16  # steps of a loop that are written out: a loop costs more than as many small ops


def cond(target, which, *operands, branches, **_):
    """One of several jaxprs; the number is of the nearest where there is none."""
    out = target.out

    def chosen(i):
        if i == len(branches) - 1:
            return tensors(target, target.walk.call(branches[i], *operands), out)
        here = tf.logical_not(which) if which.dtype.name == "bool" else which <= i
        return tf.cond(
            here,
            lambda: tensors(target, target.walk.call(branches[i], *operands), out),
            lambda: chosen(i + 1),
        )

    return chosen(0)


def tensors(target, results, avals):
    """Results as tensors of one type, which both sides of a choice must agree on."""
    avals = target.held(avals)
    return [
        tf.convert_to_tensor(solid(x), tf.as_dtype(aval.dtype))
        for x, aval in zip(results, avals, strict=True)
    ]


def while_(target, *operands, cond_jaxpr, body_jaxpr, cond_nconsts, body_nconsts, **_):
    """Under vmap each example has its own answer to whether it goes on: the loop does while one does, the others keep theirs."""
    asked, done = operands[:cond_nconsts], operands[cond_nconsts : cond_nconsts + body_nconsts]
    start = operands[cond_nconsts + body_nconsts :]
    out = target.out

    def each_goes_on(state):
        return tensors(target, target.walk.call(cond_jaxpr, *asked, *state), cond_jaxpr.out_avals)[
            0
        ]

    def goes_on(*state):
        return tf.reduce_any(each_goes_on(state)) if examples else each_goes_on(state)

    def body(*state):
        new = tensors(target, target.walk.call(body_jaxpr, *done, *state), out)
        if not examples:
            return new
        goes_on = each_goes_on(state)
        return [chosen(goes_on, x, old) for x, old in zip(new, state, strict=True)]

    examples = len(cond_jaxpr.out_avals[0].shape)  # axes of the answer
    return looped(goes_on, body, tensors(target, start, out), out)


def chosen(goes_on, new, old):
    """Of examples that go on what is new, of others what was there."""
    rest = (None,) * (len(new.shape) - len(goes_on.shape))
    return tf.where(goes_on[(..., *rest)] if rest else goes_on, new, old)


def looped(goes_on, body, start, avals):
    shapes = [
        tf.TensorShape([d if isinstance(d, int) else None for d in aval.shape]) for aval in avals
    ]
    return list(tf.while_loop(goes_on, body, start, shape_invariants=shapes))


def scan(target, *operands, jaxpr, length, reverse, num_consts, num_carry, **_):
    """Short ones written out; else a loop whose results are written into their place step by step."""
    consts, carry, rows = parted(operands, num_consts, num_carry)
    is_known, steps = isinstance(length, int), target.size(length)
    out = target.out

    def step(i, carry):
        found = target.walk.call(jaxpr, *consts, *carry, *(row(x, i) for x in rows))
        found = tensors(target, found, jaxpr.out_avals)
        return found[:num_carry], found[num_carry:]

    if is_known and length <= UNROLLED:
        return unrolled(
            target, step, carry, range(length)[:: -1 if reverse else 1], out[num_carry:]
        )
    carry = tensors(target, carry, out[:num_carry])
    kept = [tf.zeros(target.sizes(aval.shape), aval.dtype) for aval in out[num_carry:]]

    def body(i, *state):
        place = steps - 1 - i if reverse else i
        new, rows = step(place, state[:num_carry])
        here = [
            tf.reshape(tf.equal(tf.range(steps), place), [-1] + [1] * len(x.shape)) for x in rows
        ]
        written = [
            tf.where(h, x[None], old)
            for h, x, old in zip(here, rows, state[num_carry:], strict=True)
        ]
        return [i + 1, *new, *written]

    counter = jax.ShapeDtypeStruct((), np.int32)
    return looped(lambda i, *_: i < steps, body, [tf.constant(0), *carry, *kept], [counter, *out])[
        1:
    ]


def unrolled(target, step, carry, order, avals):
    """A loop written out; `order` are the numbers of its steps as they are taken."""
    rows = {}
    for i in order:
        carry, rows[i] = step(i, carry)
    if not rows:
        return [*carry, *(tf.zeros(target.sizes(aval.shape), aval.dtype) for aval in avals)]
    return [
        *carry,
        *(tf.stack(column) for column in zip(*(rows[i] for i in sorted(rows)), strict=True)),
    ]


def row(x, i):
    return x[i] if isinstance(i, int) else tf.gather(x, i)


def parted(operands, consts, carry):
    return operands[:consts], operands[consts : consts + carry], operands[consts + carry :]


PRIMITIVES = {"cond": cond, "while": while_, "scan": scan}
