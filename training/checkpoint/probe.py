"""What a model answers to one seeded question: kept in a checkpoint, it tells on code that has since changed its meaning."""

import threading

import jax
import jax.numpy as jnp
import numpy as np

from training.checkpoint.storage import without_key_type
from training.objective import inputs
from utils import named_leaves

EXAMPLES = (
    4  # the one number of a single example may happen to lie near 0, where rounding looks large
)
KEPT = 1024  # numbers of a leaf
TOLERANCE = 1e-4  # of the largest number; other compilers and machines round to within 1e-5
TINY = 1e-7  # what rounding leaves of a sum that is 0


def probe_input(batch, preprocess=()):
    """The shapes of a few preprocessed inputs, from those of a batch (x, y); None for a batch of another form."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        return None
    few = jax.tree.map(lambda a: jax.ShapeDtypeStruct((EXAMPLES, *a.shape[1:]), a.dtype), batch[0])
    return jax.eval_shape(lambda x: inputs(preprocess, (), None, x), few)


class Probe:
    """probe(params, state) -> {"probe/input": ..., "probe/output": ...}, in float32; trees have longer names.

    Nothing, where the input is unknown (`spec` None) or the model cannot be applied to it alone. Any thread may call it.
    """

    def __init__(self, model, spec):
        self.model, self.spec = model, spec
        self.lock, self.compiled, self.question = threading.Lock(), None, None
        self.shared = None  # the program over the devices of several processes

    def __call__(self, params, state):
        if (
            jax.config.jax_disable_jit
        ):  # a breakpoint() in the model must not stop the thread that saves, too
            return {}
        if any(
            isinstance(a, jax.Array) and not a.is_fully_addressable for a in jax.tree.leaves(params)
        ):
            return self.ask_all(params, state)
        # From numbers on the host, so that it is the same program on any mesh.
        weights = jax.device_get(jax.tree.map(without_key_type, (params, state)))
        with self.lock:
            if self.compiled is None and self.spec is not None:
                self.compile(weights)
        if self.compiled is None:
            return {}
        answer = {"input": self.question, "output": self.compiled(*weights, self.question)}
        return {name: thinned(leaf) for name, leaf in named_leaves({"probe": answer}).items()}

    def ask_all(self, params, state):
        """The same of weights that lie on the devices of several processes; all of them must ask."""
        whole = jax.tree.leaves(params)[0].sharding.update(spec=jax.sharding.PartitionSpec())
        if self.shared is None and self.spec is not None:
            self.shared = self.program((params, state), whole)
        if self.shared is None:
            return {}
        answer = {"input": self.question, "output": self.shared(params, state, self.question)}
        return {name: thinned(leaf) for name, leaf in named_leaves({"probe": answer}).items()}

    def compile(self, weights):
        """Make the program."""
        with jax.default_device(host()):
            self.compiled = self.program(weights)

    def program(self, weights, place=None):
        """The program, without optimization: in a third of the time. None for a model that needs more than (params, state, x)."""

        def output(params, state, x):
            return self.model.apply(params, state, x, train=False, key=None)[0]

        try:
            self.question = ask(self.spec)
            with jax.default_matmul_precision("highest"):
                lowered = jax.jit(output, out_shardings=place).lower(*weights, self.question)
        except Exception:
            self.spec = None
            return None
        return lowered.compile({"xla_backend_optimization_level": 0})


def host():
    """The CPU, since a full accelerator has no room for the weights a second time; None where JAX was told not to use it."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def ask(spec):
    """Numbers of these shapes and types, the same for ever."""
    leaves, structure = jax.tree.flatten(spec)
    return jax.tree.unflatten(structure, [draw(leaf, seed) for seed, leaf in enumerate(leaves)])


def draw(leaf, seed):
    """Standard normal floats, any bytes, and of other integers 0 or 1, since a token must be in the vocabulary."""
    bits = np.random.Philox(key=seed).random_raw(
        (2, *leaf.shape)
    )  # not its `normal`, which a later numpy may draw otherwise
    if jnp.issubdtype(leaf.dtype, jnp.integer) or leaf.dtype == bool:
        return (bits[0] >> np.uint64(56 if leaf.dtype == np.uint8 else 63)).astype(leaf.dtype)
    radius, angle = (
        (bits >> np.uint64(11)) + 1
    ) * 2.0**-53  # in (0, 1]; Box and Muller's way to normal numbers
    return (np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)).astype(leaf.dtype)


def thinned(leaf):
    """A leaf in float32; of a large one, KEPT numbers from its first to its last."""
    leaf = np.asarray(leaf, np.float32)
    return (
        leaf
        if leaf.size <= KEPT
        else leaf.reshape(-1)[np.arange(KEPT) * (leaf.size - 1) // (KEPT - 1)]
    )


def same_question(stored, found):
    """Whether two probes asked the same, so that their answers can be compared."""
    asked = [
        {name: a for name, a in probe.items() if name.startswith("probe/input")}
        for probe in (stored, found)
    ]
    return bool(asked[1]) and difference(*asked) is None


def difference(stored, found):
    """None where two probes agree within rounding, else by what they differ, in words."""
    if stored.keys() != found.keys():
        return f"its parts, now {', '.join(found) or 'none'} instead of {', '.join(stored)}"
    return next(filter(None, (leaf_difference(a, found[name]) for name, a in stored.items())), None)


def leaf_difference(stored, found):
    """The same for one leaf."""
    if stored.shape != found.shape:
        return f"its shape, now {found.shape} instead of {stored.shape}"
    if not np.array_equal(np.isnan(stored), np.isnan(found)):
        return "NaNs in other places"
    with np.errstate(invalid="ignore"):  # infinity less itself
        gap = np.where((stored == found) | np.isnan(stored), 0, np.abs(stored - found)).max(
            initial=0
        )
    largest = np.abs(stored[np.isfinite(stored)]).max(initial=0)
    return (
        None
        if gap <= TOLERANCE * largest + TINY
        else f"up to {gap:.2g}, where its largest number was {largest:.2g}"
    )
