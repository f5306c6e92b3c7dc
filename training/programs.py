"""The compiled programs of a run. Each is compiled once, at its first call; other shapes are then an error, not a second
compilation.

A step is step(const, carry, batch, valid) -> carry. In training the carry is the TrainState; in evaluation it is the sums,
with the weights as constants. A program returns (carry, report): the carry is donated to the next call, the report is a copy
of what the host wants to read.

Compiling takes threads, so that tracing one program, loading data and compiling others go on at once; what is traced is traced
where it is asked for, since JAX's settings belong to a thread.

Where jax.disable_jit is on, to debug, nothing is compiled and each step is a call of its own, so `print` and `breakpoint()` see
numbers. Within jax.grad, as in a model, they are wrapped: a print shows them, `x.primal` is the array. Within jax.vmap, as in a
loss of one example, `x.val` is what it is for the whole batch; `jax.debug.print` shows one example after the other. Only before
the first step, where shapes are found out, there are none.
"""

import inspect
import time
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakSet

import jax
import jax.numpy as jnp
import numpy as np

from training.devices.sharding import replicated, sharded
from utils import UserError, named_leaves

WORDS = {"const": "weights", "carry": "state"}  # what arguments of programs are called in messages
TITLES = {"train": "training step", "step": "step"}
COMPILING = ThreadPoolExecutor(2, "compile")
BEGUN = WeakSet()  # what they were given, as long as somebody waits for it or it is not done
# For what runs a few times: the sample's initial weights compile in a twelfth of the time.
QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


# The CPU's compiler drops the barriers of jax.checkpoint before it orders the operations, and would then recompute in vain.
BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
# For dense convolutions on the CPU, which are then Eigen's, and not YNNPACK's: a ResNet-8 takes 0.8 of the time. All else stays.
CONVOLUTIONS = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_REDUCE"
}


class Program:
    """A function compiled ahead of its first call, with its second argument, the carry, donated. `name` is the set it runs over,
    `arguments` are the names of its arguments where they are not to be read off the function, `options` are XLA's, `places` is
    where the carry lies: on every device of the mesh, unless it is said."""

    def __init__(self, function, mesh, name="step", arguments=(), options=None, places=None):
        self.function, self.name, self.options = function, name, options
        self.places = (
            replicated(mesh) if places is None else places,
            replicated(mesh),
        )  # of the carry, of the report
        self.arguments = arguments or [
            name.lstrip("_") for name in inspect.signature(function).parameters
        ]
        self.compiled = None
        self.forms, self.coming = (
            None,
            None,
        )  # of the arguments that it is being compiled for, and what comes of it
        self.seconds = 0.0  # that were spent on compiling, or waiting for it
        self.memory = None  # bytes of arguments, results and what is needed in between, where the backend tells

    def begin(self, *forms):
        """Compile in a thread for arguments of these forms; should they turn out to be others, this was in vain. Several
        processes must compile in one order."""
        if self.compiled is None and not jax.config.jax_disable_jit and jax.process_count() == 1:
            start = time.perf_counter()
            self.forms, self.coming = forms, in_a_thread(self.lowered(forms), self.options)
            self.seconds = time.perf_counter() - start

    def prepare(self, *arguments):
        """Compile for these arguments, without running."""
        if self.compiled is None and jax.config.jax_disable_jit:
            self.compiled = self.function
        elif self.compiled is None:
            start = time.perf_counter()
            begun = self.coming is not None and all_fit(self.forms, arguments)
            self.compiled = (
                self.coming.result() if begun else self.lowered(arguments).compile(self.options)
            )
            self.seconds += time.perf_counter() - start
            self.memory, self.coming = memory_of(self.compiled), None

    def lowered(self, arguments):
        """The program for these arguments, or for arguments of these forms, as XLA takes it."""
        return jax.jit(self.function, donate_argnums=1, out_shardings=self.places).lower(*arguments)

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
        now = self.leaves(
            arguments, [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments)]
        )
        for name in then | now:
            (a, place), (b, other) = then.get(name, (None, None)), now.get(name, (None, None))
            mend = "; every batch must have one shape and type" if name.startswith("batch") else ""
            if form(a) != form(b):
                return f"{name} {form(a)}, and was now given {form(b)}{mend}"
            if place and other and not place.is_equivalent_to(other, len(a.shape)):
                return (
                    f"{name} {form(a)} laid out as {place}, and was now given it as {other}{mend}"
                )
        return None

    def leaves(self, trees, places):
        """{name: (leaf, where it lies)} of all arguments."""
        named = zip([WORDS.get(name, name) for name in self.arguments], trees, strict=False)
        names = [
            (f"{word} {name}".strip(), leaf)
            for word, tree in named
            for name, leaf in leaves_of(tree)
        ]
        return {name: (leaf, place) for (name, leaf), place in zip(names, places, strict=False)}


def in_a_thread(lowered, options):
    """What compiling a program will come to."""
    coming = COMPILING.submit(lowered.compile, options)
    BEGUN.add(coming)
    return coming


def still_compiling():
    """Whether programs are still being compiled: Python would not end before they are."""
    return not all(coming.done() for coming in BEGUN)


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


def options_for(looped):
    """XLA's options for a program: the CPU takes steps one by one only where they hold dense convolutions."""
    if jax.default_backend() != "cpu":
        return None
    return BARRIERS if looped else BARRIERS | CONVOLUTIONS


def over_rows(step, report, mesh, looped):
    """Batches gathered on the device, by rows of indices: `count` of them from row `start` on in a loop, or just one."""

    def one(const, carry, data, order, valid, row):
        batch = jax.tree.map(lambda a: a[order[row]], data)
        batch = jax.lax.with_sharding_constraint(batch, sharded(mesh))
        return step(const, carry, batch, valid[row])

    def loop(const, carry, data, order, valid, start, count):
        carry = jax.lax.fori_loop(
            start, start + count, lambda i, c: one(const, c, data, order, valid, i), carry
        )
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


class Start:
    """A function that runs a few times at the start, compiled in a thread for arguments of these forms, without optimization;
    `places` is where its results lie."""

    def __init__(self, function, places, *forms):
        self.function, self.forms, self.coming = function, forms, None
        self.jitted = jax.jit(function, out_shardings=places)
        if not jax.config.jax_disable_jit and jax.process_count() == 1:
            self.coming = in_a_thread(self.jitted.lower(*forms), QUICKLY)

    def __call__(self, *arguments):
        if jax.config.jax_disable_jit:
            return self.function(*arguments)
        return (
            self.coming.result() if self.coming and all_fit(self.forms, arguments) else self.jitted
        )(*arguments)


def placed(tree, places):
    """The forms of arrays from their shapes and from where they lie, which is one place or a tree of them."""

    def form(leaf, place):
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place, weak_type=weak)

    return (
        jax.tree.map(lambda leaf: form(leaf, places), tree)
        if hasattr(places, "spec")
        else jax.tree.map(form, tree, places)
    )


def all_fit(forms, arguments):
    """Whether a program compiled for such forms takes these arguments."""
    same_tree = jax.tree.structure(forms) == jax.tree.structure(arguments)
    return same_tree and all(map(fits, jax.tree.leaves(forms), jax.tree.leaves(arguments)))


def fits(form, leaf):
    """Whether an array is of a form: shape, type, and where it lies."""
    told = [
        (a.shape, a.dtype, getattr(a, "weak_type", False)) if hasattr(a, "dtype") else None
        for a in (form, leaf)
    ]
    if None in told or told[0] != told[1]:
        return False
    place, own = getattr(form, "sharding", None), getattr(leaf, "sharding", None)
    return place is None or (own is not None and own.is_equivalent_to(place, len(form.shape)))
