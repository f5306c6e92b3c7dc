"""A model's output on a fixed input, kept in a checkpoint to detect that its code has changed."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from model.base import Model
from training.base import key_data
from training.checkpoint.orbax_folder import HostArray
from training.objective import preprocessed
from utils import UserError, named_leaves

logger = logging.getLogger("main")

# With one example, its single output may be close to 0, where rounding errors look large.
EXAMPLES = 4
KEPT = 1024  # elements kept of a leaf
TOLERANCE = 1e-4  # of the largest element; other compilers and machines differ by up to 1e-5
TINY = 1e-7  # a rounding error of a sum that is 0


Arrays = dict[str, np.ndarray]  # {name: array}


def probe_input(
    batch: PyTree, preprocess: Sequence[Callable] = (), model: Model | None = None
) -> PyTree:
    """The shapes of a few preprocessed inputs, from the shapes of a batch (x, y); None if it is not
    a pair. A model may have its own `inputs`."""
    if own := getattr(model, "inputs", None):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((EXAMPLES, *a.shape), a.dtype), own())
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        return None
    few = jax.tree.map(lambda a: jax.ShapeDtypeStruct((EXAMPLES, *a.shape[1:]), a.dtype), batch[0])
    return jax.eval_shape(lambda x: preprocessed(preprocess, x), few)


class Probe:
    """probe(params, state) -> {"probe/input": ..., "probe/output": ...}, arrays of float32. Where
    the input or output is a tree, its leaves have longer names. The result is {} if the input is
    unknown (`spec` is None) or the model needs more than it. Any thread may call a probe.

    Where replicas differ in numbers (training.vary), `numbers` are those of each, and `model_with`
    returns the model with such numbers, which are inputs of the compiled program."""

    def __init__(
        self,
        model: Model,
        spec: PyTree,
        numbers: Sequence[dict[str, Any]] = (),
        model_with: Callable[[dict[str, Any]], Model] | None = None,
    ) -> None:
        self.model, self.spec, self.input = model, spec, None
        self.numbers, self.model_with = numbers, model_with
        self.lock, self.is_compiled = threading.Lock(), False
        self.program: Callable | None = None  # None also if the model needs more than the input

    def __call__(self, params: PyTree, state: PyTree, replica: int = 0) -> Arrays:
        """With params spread over the devices of several processes, all processes must call it."""
        # With jit disabled, a breakpoint() in the model must not stop the saving.
        if self.spec is None or jax.config.values["jax_disable_jit"]:
            return {}
        leaves = jax.tree.leaves(params)
        spread = any(isinstance(a, jax.Array) and not a.is_fully_addressable for a in leaves)
        weights, numbers = (params, state), self.numbers[replica] if self.numbers else {}
        if not spread:  # from host memory, so that the program is the same on any mesh
            weights = jax.device_get(jax.tree.map(key_data, weights))
        with self.lock:
            if not self.is_compiled:
                self.program = self.compile(weights, numbers, spread)
                self.is_compiled = True
        if self.program is None:
            return {}
        probe = {"input": self.input, "output": self.program(*weights, numbers, self.input)}
        return {name: thinned(leaf) for name, leaf in named_leaves({"probe": probe}).items()}

    def compile(
        self, weights: tuple[PyTree, PyTree], numbers: dict[str, Any], spread: bool
    ) -> Callable | None:
        """The program, or None for a model that needs more than (params, state, x)."""

        def output(params: PyTree, state: PyTree, numbers: dict[str, Any], x: PyTree) -> PyTree:
            model = self.model_with(numbers) if numbers and self.model_with else self.model
            return model.apply(params, state, x, train=False, key=None)[0]

        sharding, replicated = None, jax.sharding.PartitionSpec()
        if spread:
            sharding = jax.tree.leaves(weights)[0].sharding.update(spec=replicated)
        with nullcontext() if spread else jax.default_device(host()):
            try:
                self.input = seeded_inputs(self.spec)
                with jax.default_matmul_precision("highest"):
                    jitted = jax.jit(output, out_shardings=sharding)
                    lowered = jitted.lower(*weights, numbers, self.input)
            except Exception:
                return None
            # It compiles in a third of the time without optimization.
            options: dict[str, Any] = {"xla_backend_optimization_level": 0}
            return lowered.compile(options)


def host() -> Any:
    """The CPU's jax.Device, or None; a full accelerator has no memory for another copy of the
    params."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def seeded_inputs(spec: PyTree) -> PyTree:
    """Random arrays of these shapes and types, the same in every version."""
    leaves, structure = jax.tree.flatten(spec)
    return jax.tree.unflatten(structure, [draw(leaf, seed) for seed, leaf in enumerate(leaves)])


def draw(leaf: jax.ShapeDtypeStruct, seed: int) -> np.ndarray:
    """Standard normal floats, any uint8, and 0 or 1 for other integers, which may be token ids."""
    # Raw bits, since a later NumPy may compute normal numbers differently.
    bits = np.random.Philox(key=seed).random_raw((2, *leaf.shape))
    if jnp.issubdtype(leaf.dtype, jnp.integer) or leaf.dtype == bool:
        return (bits[0] >> np.uint64(56 if leaf.dtype == np.uint8 else 63)).astype(leaf.dtype)
    radius, angle = ((bits >> np.uint64(11)) + 1) * 2.0**-53  # uniform in (0, 1]; for Box-Muller
    return (np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)).astype(leaf.dtype)


def probed_spec(probe: Arrays) -> jax.ShapeDtypeStruct | None:
    """The shape and type of one input of the model, from its probe in a checkpoint; None if the
    probe has several inputs, or only a part of a large one."""
    stored = [array for name, array in probe.items() if name.startswith("probe/input")]
    if len(stored) != 1 or stored[0].shape[:1] != (EXAMPLES,) or "probe/input" not in probe:
        return None
    [array] = stored
    whole = array.size and np.array_equal(array, np.floor(array))  # no such float was ever drawn
    integers = jnp.int32 if array.max(initial=0) <= 1 else jnp.uint8
    return jax.ShapeDtypeStruct(array.shape[1:], integers if whole else jnp.float32)


def thinned(leaf: PyTree) -> np.ndarray:
    """A leaf in float32; if it is large, KEPT evenly spaced elements from the first to the last."""
    leaf = np.asarray(leaf, np.float32)
    if leaf.size <= KEPT:
        return leaf
    return leaf.reshape(-1)[np.arange(KEPT) * (leaf.size - 1) // (KEPT - 1)]


def probe_of(arrays: Mapping[str, HostArray]) -> Arrays:
    """The probe among the arrays of a checkpoint."""
    probed = [name for name in arrays if name.startswith("probe/")]
    return {name: np.asarray(arrays[name]) for name in probed}


def check_meaning(path: str | Path, stored: Arrays, current: Arrays, fix: str) -> None:
    """Refuse a checkpoint if its probe shows that model/ now computes something else."""
    if not stored:
        return
    unchecked = "whether model/ has changed its meaning is not checked"
    inputs = {name: a for name, a in stored.items() if name.startswith("probe/input")}
    own_inputs = {name: a for name, a in current.items() if name.startswith("probe/input")}
    if not current:
        logger.info(
            "%s: has the output for a probe input, which the model of this run could not compute; "
            "%s", path, unchecked,
        )  # fmt: skip
    elif difference(inputs, own_inputs):
        logger.info("%s: was probed with a different input; %s", path, unchecked)
    elif gap := difference(stored, current):
        copy = Path(path).parent / "model"
        original = f"the original model is in {copy}; " if copy.is_dir() else ""
        raise UserError(
            f"{path}: model/, or model.args, has changed its meaning since this was written: on "
            f"the probe input its output differs by {gap}; {original}restore it, or {fix}"
        )


def difference(stored: Arrays, current: Arrays) -> str | None:
    """A text on how two probes differ, or None if they agree within rounding errors."""
    if stored.keys() != current.keys():
        return f"its parts, now {', '.join(current) or 'none'} instead of {', '.join(stored)}"
    for name, array in stored.items():
        now = current[name]
        if array.shape != now.shape:
            return f"its shape, now {now.shape} instead of {array.shape}"
        if not np.array_equal(np.isnan(array), np.isnan(now)):
            return "NaNs at different positions"
        with np.errstate(invalid="ignore"):  # infinity minus infinity
            gaps = np.where((array == now) | np.isnan(array), 0, np.abs(array - now))
        gap, largest = gaps.max(initial=0), np.abs(array[np.isfinite(array)]).max(initial=0)
        if gap > TOLERANCE * largest + TINY:
            return f"up to {gap:.2g}, where its largest number was {largest:.2g}"
    return None
