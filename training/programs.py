"""The compiled programs of a run. Each is compiled once, before or at its first call; a call with
other shapes is then an error, not a second compilation.

A step is step(const, carry, batch, valid) -> (carry, row). In training the carry is the TrainState,
and the constants are the numbers of training.vary; in evaluation the carry is the number of
examples so far, and the constants also hold the params and state. A program returns (carry, rows):
the carry is donated to the next call, and the host reads the rows, one for each step
(training/rows.py). The spec of an array is a jax.ShapeDtypeStruct: its shape, its type and, where
it matters, its sharding.

Programs compile in threads, several at the same time. They are traced in the calling thread, since
JAX's settings belong to a thread.

With jax.disable_jit on, for debugging, nothing is compiled and each step is a call of its own, so
that `print` and `breakpoint()` see numbers. Within jax.grad, as in a model, arrays are wrapped: a
print shows the numbers, `x.primal` is the array. Within jax.vmap, as in a loss of one example,
`x.val` is the array of the whole batch; `jax.debug.print` shows one example after the other. Before
the first step, where only shapes are traced, there are no numbers.
"""

import inspect
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from utils import UserError, named_leaves, shown_if_slow

WORDS = {"const": "weights", "carry": "state"}  # what messages call the arguments of programs
TITLES = {"train": "training step", "step": "step"}
# For programs that run a few times: the sample's initial params compile in a twelfth of the time.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
if jax.__version_info__ < (0, 11):  # a later XLA does not have this option
    QUICKLY["xla_cpu_use_fusion_emitters"] = False
# For the CPU.
CPU_OPTIONS = {
    # Without this, XLA drops the barriers of jax.checkpoint before it orders the operations, and
    # then recomputes without saving memory.
    "xla_disable_hlo_passes": "cse_barrier_expander",
    # Eigen computes convolutions and products, YNNPACK only sums: a ResNet-8 takes 0.8 of the time,
    # a small perceptron 0.8 to 0.9, and a large one 1.06.
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE",
}
# The errors of cuDNN's attention, which devices may share by whole heads only.
CUT_HEADS = (
    "Query, key and value should have same sharding",
    "Sharding on head dim is not allowed",
)


class Program:
    """A function that is compiled once, with its second argument, the carry, donated.

    `whole` is the sharding of its rows, and of the carry unless `shardings` are given; `name` is
    the set over which it runs; `arguments` are the names of its arguments if the function's
    signature does not show them; `options` are XLA's; `pool` is a ThreadPoolExecutor that compiles.
    """

    def __init__(
        self, function, whole, name="step", *, arguments=(), options=None, shardings=None, pool=None
    ):
        self.function, self.name, self.options, self.pool = function, name, options, pool
        self.shardings = (whole if shardings is None else shardings, whole)
        names = arguments or inspect.signature(function).parameters
        self.arguments = [name.lstrip("_") for name in names]
        self.compiled = None
        self.finish = None  # returns the compiled program, once it has been traced
        self.seconds = 0.0  # spent on tracing, and on compiling or waiting for it
        # Bytes of arguments, results and temporaries, if the backend reports them.
        self.memory = None

    @property
    def title(self):
        """Its name in messages."""
        return TITLES.get(self.name, f"evaluation of {self.name}")

    def begin(self, *arguments):
        """Trace it for these arguments, or for their specs, and start to compile it in a thread.
        Several processes must compile in the same order, so they compile when it is needed."""
        if self.compiled is not None or self.finish is not None:
            return
        if jax.config.jax_disable_jit:
            self.compiled = self.function
            return
        start = time.perf_counter()
        jitted = jax.jit(self.function, donate_argnums=1, out_shardings=self.shardings)
        compile_it = partial(compile_step, jitted.lower(*arguments), self.options)
        threaded = self.pool is not None and jax.process_count() == 1
        self.finish = self.pool.submit(compile_it).result if threaded else compile_it
        self.seconds += time.perf_counter() - start

    def prepare(self, *arguments):
        """Compile for these arguments, without running, or wait until it is compiled."""
        self.begin(*arguments)
        if self.compiled is None:
            start = time.perf_counter()
            with shown_if_slow(f"Compiling the {self.title}"):
                self.compiled = self.finish()
            self.seconds += time.perf_counter() - start
            self.memory = memory_of(self.compiled)

    def __call__(self, *arguments):
        if self.compiled is None:
            self.prepare(*arguments)
        try:
            return self.compiled(*arguments)
        except (TypeError, ValueError) as error:
            if change := self.change(arguments):
                raise UserError(f"{self.title}: it was compiled for {change}") from error
            raise

    def change(self, arguments):
        """A text that says how these arguments differ from the compiled ones; None if they do
        not."""
        if self.compiled is self.function:
            return None
        shardings = self.compiled.in_tree.flatten_up_to(self.compiled.input_shardings)
        before = self.leaves(self.compiled.args_info[0], shardings)
        shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments)]
        now = self.leaves(arguments, shardings)
        for name in before | now:
            (a, sharding), (b, other) = before.get(name, (None, None)), now.get(name, (None, None))
            fix = "; every batch must have one shape and type, so a collate_fn pads to one length"
            fix = fix if name.startswith("batch") else ""
            expected, given = type_and_shape(a), type_and_shape(b)
            if expected != given:
                return f"{name} {expected}, and was now given {given}{fix}"
            if sharding and other and not sharding.is_equivalent_to(other, len(a.shape)):
                layouts = f"laid out as {sharding}, and was now given it as {other}"
                return f"{name} {expected} {layouts}{fix}"
        return None

    def leaves(self, trees, shardings):
        """{name: (leaf, its sharding)} of all arguments."""
        named = zip([WORDS.get(name, name) for name in self.arguments], trees, strict=False)
        pairs = [
            (f"{word} {name}".strip(), leaf)
            for word, tree in named
            for name, leaf in leaves_of(tree)
        ]
        together = zip(pairs, shardings, strict=False)
        return {name: (leaf, sharding) for (name, leaf), sharding in together}


def compile_step(lowered, options):
    """The lowered program, compiled with these options of XLA."""
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if any(text in str(error) for text in CUT_HEADS):
            raise UserError(
                "mesh.tensor: cuts a head of attention in two, which a GPU cannot compute in "
                "bfloat16; let mesh.tensor divide the heads, and the heads of keys, or leave "
                'attention whole, by the sharding [[".*attention/.*", []], "tensor"]'
            ) from error
        raise


def leaves_of(batch):
    """[(name, leaf)] of a batch, or another tree; the two parts of a pair are named x and y."""
    pair = isinstance(batch, tuple | list) and len(batch) == 2 and not hasattr(batch, "_fields")
    return list(named_leaves({"x": batch[0], "y": batch[1]} if pair else batch).items())


def type_and_shape(leaf):
    """The type and shape of an array or a spec as a text, such as float32[128,10]."""
    if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
        return "nothing" if leaf is None else f"a {type(leaf).__name__}"
    return f"{jnp.result_type(leaf)}[{','.join(map(str, np.shape(leaf)))}]"


def memory_of(compiled):
    """Bytes of a program's arguments, results and temporaries; None if the backend does not
    report."""
    stats = compiled.memory_analysis()
    names = ("temp_size_in_bytes", "argument_size_in_bytes", "output_size_in_bytes")
    return stats and {name: getattr(stats, name) for name in names}


def loops_are_slow(objective):
    """Whether this objective, which is traced, must not run inside a compiled loop, where XLA's CPU
    backend does not use its fast path for dense convolutions (eight steps of a 3x3 convolution: 82
    ms outside, 6,670 ms inside). Its steps are then dispatched one by one."""
    if jax.config.jax_disable_jit:
        return True  # for debugging, one step is one call
    if jax.default_backend() != "cpu":
        return False
    return "stablehlo.convolution" in objective.lower().as_text()


def quick(function, shardings=None):
    """The compiled form of a function that runs only a few times: it compiles without
    optimization."""
    return jax.jit(function, out_shardings=shardings, compiler_options=QUICKLY)


def platform_options():
    """XLA's options for a program on the default platform."""
    return CPU_OPTIONS if jax.default_backend() == "cpu" else None


def over_orders(step, sharding, fori_loop, capacity):
    """The function that takes a step on each of `count` batches, at most `capacity`, by a
    `fori_loop` that begins at the batch `start`, or on one batch if that is None. An order holds
    the indices of each batch, which is gathered on the device."""

    def one(const, carry, data, order, valid, i):
        batch = jax.tree.map(lambda a: a[order[i]], data)
        if sharding:
            batch = jax.lax.with_sharding_constraint(batch, sharding)
        return step(const, carry, batch, valid[i])

    def loop(const, carry, data, order, valid, start, count):
        _, like = jax.eval_shape(one, const, carry, data, order, valid, start)
        rows = jax.tree.map(lambda a: jnp.zeros((capacity, *a.shape), a.dtype), like)

        def take(i, both):
            carry, row = one(const, both[0], data, order, valid, i)
            put = lambda rows, new: rows.at[i - start].set(new)  # noqa: E731
            return carry, jax.tree.map(put, both[1], row)

        return fori_loop(start, start + count, take, (carry, rows))

    def single(const, carry, data, order, valid, start, _count):
        return as_rows(*one(const, carry, data, order, valid, start))

    return loop if fori_loop else single


def over_batch(step):
    """The function that takes a step on one batch from the host."""
    return lambda const, carry, batch, valid: as_rows(*step(const, carry, batch, valid))


def as_rows(carry, row):
    """The result of a program that takes one step: its row has a first axis of length 1."""
    return carry, jax.tree.map(lambda a: a[None], row)
