"""The compiled programs of a run. Each is compiled once, at its first call; other shapes are then an error, not a second
compilation.

A step is step(const, carry, batch, valid) -> carry. In training the carry is the TrainState; in evaluation it is the sums,
with the weights as constants. A program returns (carry, report): the carry is donated to the next call, the report is a copy
of what the host wants to read.

Where jax.disable_jit is on, to debug, nothing is compiled and each step is a call of its own, so `print` and `breakpoint()` see
numbers. Within jax.grad, as in a model, they are wrapped: a print shows them, `x.primal` is the array. Within jax.vmap, as in a
loss of one example, `x.val` is what it is for the whole batch; `jax.debug.print` shows one example after the other. Only before
the first step, where shapes are found out, there are none.
"""

import inspect
import time

import jax
import jax.numpy as jnp
import numpy as np

from training.sharding import replicated, sharded
from utils import UserError, named_leaves

WORDS = {"const": "weights", "carry": "state"}  # what arguments of programs are called in messages
TITLES = {"train": "training step", "step": "step"}


class Program:
    """A function compiled ahead of its first call, with its second argument, the carry, donated. `name` is the set it runs over,
    `arguments` are the names of its arguments where they are not to be read off the function."""

    def __init__(self, function, mesh, name="step", arguments=()):
        self.function, self.mesh, self.name = function, mesh, name
        self.arguments = arguments or [name.lstrip("_") for name in inspect.signature(function).parameters]
        self.compiled = None
        self.seconds = 0.0  # that compiling took
        self.memory = None  # bytes of arguments, results and what is needed in between, where the backend tells

    def prepare(self, *arguments):
        """Compile for these arguments, without running."""
        if self.compiled is None and jax.config.jax_disable_jit:
            self.compiled = self.function
        elif self.compiled is None:
            start = time.perf_counter()
            jitted = jax.jit(self.function, donate_argnums=1, out_shardings=replicated(self.mesh))
            self.compiled = jitted.lower(*arguments).compile()
            self.seconds, self.memory = time.perf_counter() - start, memory_of(self.compiled)

    def __call__(self, *arguments):
        if self.compiled is None:
            self.prepare(*arguments)
        try:
            return self.compiled(*arguments)
        except (TypeError, ValueError) as error:
            if change := self.change(arguments):
                title = TITLES.get(self.name, f"evaluation of {self.name}")
                raise UserError(f"{title}: it was compiled for {change}") from error
            raise

    def change(self, arguments):
        """What is other in these arguments than in those it was compiled for, in words; None where nothing is."""
        if self.compiled is self.function:
            return None
        places = self.compiled.in_tree.flatten_up_to(self.compiled.input_shardings)
        then = self.leaves(self.compiled.args_info[0], places)
        now = self.leaves(arguments, [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments)])
        for name in then | now:
            (a, place), (b, other) = then.get(name, (None, None)), now.get(name, (None, None))
            mend = "; every batch must have one shape and type" if name.startswith("batch") else ""
            if form(a) != form(b):
                return f"{name} {form(a)}, and was now given {form(b)}{mend}"
            if place and other and not place.is_equivalent_to(other, len(a.shape)):
                return f"{name} {form(a)} laid out as {place}, and was now given it as {other}{mend}"
        return None

    def leaves(self, trees, places):
        """{name: (leaf, where it lies)} of all arguments."""
        named = zip([WORDS.get(name, name) for name in self.arguments], trees, strict=False)
        names = [(f"{word} {name}".strip(), leaf) for word, tree in named for name, leaf in leaves_of(tree)]
        return {name: (leaf, place) for (name, leaf), place in zip(names, places, strict=False)}


def leaves_of(batch):
    """[(name, leaf)] of a batch, or another tree; the two parts of a pair are called x and y."""
    pair = isinstance(batch, tuple | list) and len(batch) == 2 and not hasattr(batch, "_fields")
    return list(named_leaves({"x": batch[0], "y": batch[1]} if pair else batch).items())


def form(leaf):
    """Type and shape of an array or of what tells of one, as in float32[128,10]."""
    if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
        return "nothing" if leaf is None else f"a {type(leaf).__name__}"
    return f"{jnp.result_type(leaf)}[{','.join(map(str, np.shape(leaf)))}]"


def memory_of(compiled):
    """Bytes of the arguments and results of a program and of what it needs in between; None where the backend does not tell."""
    stats = compiled.memory_analysis()
    names = ("temp_size_in_bytes", "argument_size_in_bytes", "output_size_in_bytes")
    return stats and {name: getattr(stats, name) for name in names}


def loops_are_slow(objective, params, state, batch):
    """Whether this objective must not run inside a compiled loop: XLA's CPU backend leaves its fast path for dense convolutions
    there (eight steps of a 3x3 convolution: 82 ms outside, 6,670 ms inside). It is then dispatched step by step."""
    if jax.config.jax_disable_jit:
        return True  # to debug, one step is one call
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
    if jax.config.jax_disable_jit:
        return fn
    lowered = jax.jit(fn, out_shardings=replicated(mesh)).lower(*arguments)
    return lowered.compile({"xla_backend_optimization_level": 0})
