"""What the option `scan` of the models gains and costs: compile time and size of the training step
as a model gets deeper, and the time per step, with and without it.

python -m benchmarks.scan [--rounds 9]
"""

import re
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import seconds, take_turns
from benchmarks.results import arguments, markdown, ratios, record, short, spread, target_cells
from model.convnext import convnext
from model.gpt import gpt
from model.resnet import resnet
from model.vit import vit
from training.loss import cross_entropy
from training.optimizers import adamw
from training.programs import platform_options

DEPTHS = (4, 12, 24, 48)
VOCABULARY, LENGTH, IMAGE, BATCH = 65, 64, (16, 16, 3), 8
COMPILED = 2  # times that each program with `scan` is compiled; those without take long: once
TIMED = 12  # the largest depth at which steps are timed
TARGET = 1.5  # the compile time at the largest depth must stay below this times the smallest
FORMS = {"one by one": False, "scan": True}
OTHERS = {
    "vit, 6 blocks": partial(vit, IMAGE, 10, dim=64, depth=6),
    "convnext, 6 blocks in 2 stages": partial(
        convnext, IMAGE, 10, dims=(32, 64), depths=(3, 3), patch=2, residual=True
    ),
    "resnet, 6 blocks in 2 widths": partial(resnet, IMAGE, 10, widths=(16, 32), depth=3),
}
HEAD = ["one by one, CPU s to compile", "scan, CPU s to compile"]
HEAD += ["one by one, instructions", "scan, instructions"]
STEP_HEAD = ["one by one, ms per step", "scan, ms per step", "scan x one by one"]
NOTE = f"""\
The training step with AdamW, float32. First table: a `gpt` of width 64 on {BATCH} texts of \
{LENGTH} tokens. Compiling includes tracing; median (smallest - largest) of {COMPILED} with \
`scan`, once without, in seconds of all cores together. Instructions are XLA's in the compiled \
program. The target is a compile time at depth {DEPTHS[-1]} of at most {TARGET} x that at depth \
{DEPTHS[0]}. Second table: the other models on {BATCH} images of {"x".join(map(str, IMAGE))}. \
Times per step are medians (smallest - largest) over turns that alternate; ratios are computed \
turn by turn."""


def main():
    args = arguments("scan", __doc__, rounds=9, depths=list(map(str, DEPTHS)))
    rows, growth = [], {}
    for depth in map(int, args.depths):
        programs, times = {}, {}
        for name, scan in FORMS.items():
            model = gpt((LENGTH,), VOCABULARY, dim=64, depth=depth, heads=4, scan=scan)
            times[name] = []
            for _ in range(COMPILED if scan else 1):
                start = time.process_time()
                programs[name] = compiled(model, (LENGTH,), tokens=True)
                times[name].append(time.process_time() - start)
            growth.setdefault(name, []).append(statistics.median(times[name]))
        sizes = [f"{instructions(program):,}" for program in programs.values()]
        steps = step_cells(programs, (LENGTH,), args.rounds, True) if depth <= TIMED else ["-"] * 3
        rows.append([depth, *map(spread, times.values()), *sizes, *steps])
    target = target_cells(growth["scan"][-1] / growth["scan"][0], TARGET)
    grown = [f"x {short(values[-1] / values[0])}" for values in growth.values()]
    rows.append([f"{args.depths[-1]} / {args.depths[0]}", *grown, *[""] * 5])
    others = []
    for name, make in OTHERS.items():
        programs = {form: compiled(make(scan=scan), IMAGE) for form, scan in FORMS.items()}
        others.append([name, *step_cells(programs, IMAGE, args.rounds)])
    blocks = markdown(["depth", *HEAD, *STEP_HEAD], rows), markdown(["model", *STEP_HEAD], others)
    reached = f"Compile time, {target[0]} x: {target[2]}."
    record(args, "Equal blocks compiled as one", blocks[0], reached, blocks[1], NOTE)


def compiled(model, shape, tokens=False):
    """The compiled training step (carry, x, y) -> (carry, loss) of a model."""
    optimizer = adamw()
    each_token = jax.vmap(cross_entropy) if tokens else cross_entropy

    def loss_fn(params, state, x, y):
        logits, state = model.apply(params, state, x, train=True)
        return jax.vmap(each_token)(logits, y).mean(), state

    def step(carry, x, y):
        params, state, opt = carry
        (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, state, x, y)
        updates, opt = optimizer.update(grads, opt, params)
        return (jax.tree.map(jnp.add, params, updates), state, opt), loss

    carry = jax.eval_shape(partial(first_carry, model))
    batch = jax.eval_shape(partial(first_batch, shape, tokens))
    return jax.jit(step, donate_argnums=0).lower(carry, *batch).compile(platform_options())


def first_carry(model):
    params, state = model.init(jax.random.key(0))
    return params, state, adamw().init(params)


def first_batch(shape, tokens):
    if tokens:
        x = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, *shape), np.int32)
        return jnp.asarray(x), jnp.asarray(x)
    return jnp.ones((BATCH, *shape)), jnp.zeros(BATCH, jnp.int32)


def instructions(program):
    """The number of XLA instructions in a compiled program: a figure without noise."""
    return len(re.findall(r"^ +(?:ROOT )?%\S+ = ", program.as_text(), re.MULTILINE))


def step_cells(programs, shape, rounds, tokens=False):
    """The cells of the times per step."""
    calls = {}
    for name, program in programs.items():
        carry = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), carry_of(program))
        calls[name] = partial(milliseconds, program, [carry], first_batch(shape, tokens))
    times = take_turns(calls, rounds)
    ratio = ratios(times["scan"], times["one by one"])
    return [*map(spread, times.values()), spread(ratio)]


def carry_of(program):
    return program.in_avals[0][0]


def milliseconds(program, carry, batch, steps=5):
    """Milliseconds per step; `carry` is a list of one, which is replaced."""

    def run():
        for _ in range(steps):
            carry[0], loss = program(carry[0], *batch)
        jax.block_until_ready(loss)

    return 1e3 * seconds(run) / steps


if __name__ == "__main__":
    main()
