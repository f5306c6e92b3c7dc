"""The compiled programs of a run. Each is compiled once, at its first call; other shapes are then an error, not a second
compilation.

A step is step(const, carry, batch, valid) -> carry. In training the carry is the TrainState; in evaluation it is the sums,
with the weights as constants. A program returns (carry, report): the carry is donated to the next call, the report is a copy
of what the host wants to read.
"""

import jax

from training.sharding import replicated, sharded


class Program:
    """A function compiled ahead of its first call, with its second argument, the carry, donated."""

    def __init__(self, function, mesh):
        self.function, self.mesh, self.compiled = function, mesh, None

    def __call__(self, *arguments):
        if self.compiled is None:
            jitted = jax.jit(self.function, donate_argnums=1, out_shardings=replicated(self.mesh))
            self.compiled = jitted.lower(*arguments).compile()
        return self.compiled(*arguments)


def loops_are_slow(objective, params, state, batch):
    """Whether this objective must not run inside a compiled loop: XLA's CPU backend leaves its fast path for dense convolutions
    there (eight steps of a 3x3 convolution: 82 ms outside, 6,670 ms inside). It is then dispatched step by step."""
    if jax.default_backend() != "cpu":
        return False
    forward = jax.jit(lambda p, s, b: objective(p, s, b, jax.random.key(0), True))
    return "stablehlo.convolution" in forward.lower(params, state, batch).as_text()


def over_rows(step, report, mesh, looped):
    """Batches gathered on the device, by rows of indices: `count` of them from row `start` on in a loop, or just one."""

    def one(const, carry, data, order, valid, row):
        batch = jax.tree.map(lambda a: a[order[row]], data)
        batch = jax.lax.with_sharding_constraint(batch, sharded(mesh))
        return step(const, carry, batch, valid[row])

    def loop(const, carry, data, order, valid, start, count):
        carry = jax.lax.fori_loop(start, start + count, lambda i, c: one(const, c, data, order, valid, i), carry)
        return carry, report(carry)

    def single(const, carry, data, order, valid, start, _count):
        carry = one(const, carry, data, order, valid, start)
        return carry, report(carry)

    return loop if looped else single


def over_batch(step, report):
    """One batch that the host brings."""

    def single(const, carry, batch, valid):
        carry = step(const, carry, batch, valid)
        return carry, report(carry)

    return single


def compiled_start(fn, mesh, *arguments):
    """A function that runs a few times at the start, compiled without optimization: in a third of the time."""
    lowered = jax.jit(fn, out_shardings=replicated(mesh)).lower(*arguments)
    return lowered.compile({"xla_backend_optimization_level": 0})
