"""From the arrays of a checkpoint, by name, to the trees of a run."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from training.base import FROZEN, TrainState, evaluated_part
from training.checkpoint.orbax_folder import HostArray
from training.checkpoint.storage import Checkpoint
from utils import UserError, is_stacked, map_named, named_leaves, single_names


def saved_part(ts: TrainState) -> dict[str, PyTree]:
    """The trees of a TrainState that are in a checkpoint. Its record has the seed."""
    return {name: tree for name, tree in ts._asdict().items() if name not in ("halted", "seed")}


def check_fits(checkpoint: Checkpoint, states: Sequence[TrainState]) -> list[TrainState]:
    """TrainStates like these, which may be shapes, with the arrays of a checkpoint that fits."""
    has, needs = len(checkpoint.arrays), len(states)
    if has != needs:
        raise UserError(f"{checkpoint.name}: replicas: it holds {has}, this run has {needs}")
    return [
        ts._replace(**filled(checkpoint.path, arrays, saved_part(ts)))
        for arrays, ts in zip(checkpoint.arrays, states, strict=True)
    ]


def weights_of(
    checkpoint: Checkpoint, params: PyTree, state: PyTree
) -> list[tuple[PyTree, PyTree]]:
    """[(params, state)] of a checkpoint that are evaluated, in trees like these."""
    trees = []
    for arrays in checkpoint.arrays:
        part = evaluated_part(arrays)
        tree = filled(checkpoint.path, arrays, {part: params, "state": state})
        trees.append((tree[part], tree["state"]))
    return trees


def filled(path: str | Path, arrays: Mapping[str, HostArray], like: PyTree) -> Any:
    """The tree `like` with a checkpoint's arrays, whose names, shapes and types must all agree. Its
    frozen weights stay, since no checkpoint holds them."""
    leaves = {n: leaf for n, leaf in named_leaves(like).items() if not n.startswith(FROZEN)}
    wanted = {name: as_stored(leaf) for name, leaf in leaves.items()}
    stored = {name: array for name, array in arrays.items() if name.split("/")[0] in like}
    stored = restacked(stored, wanted)
    refuse(f"{path}: does not fit this run", differences(stored, wanted, operator.eq, "run"))
    return map_named(lambda n, leaf: typed(stored[n], leaf) if n in wanted else leaf, like)


def restacked(arrays: Mapping[str, HostArray], wanted: Mapping[str, Any]) -> dict[str, HostArray]:
    """The arrays, where equal blocks are stacked or separate as in the `wanted` leaves, by the
    `scan` of the model."""
    arrays, others = dict(arrays), [name for name in arrays if name not in wanted]
    for name in filter(is_stacked, others):
        if names := single_names(name, arrays[name].shape):
            arrays |= zip(names, np.asarray(arrays.pop(name)), strict=True)
    for name, leaf in wanted.items():
        if name not in arrays and is_stacked(name):
            names = single_names(name, leaf.shape)
            parts = [arrays.get(single) for single in names]
            shapes = {array is not None and array.shape for array in parts}
            if len(shapes) == 1 and parts[0] is not None:
                arrays[name] = np.stack([arrays.pop(single) for single in names])
    return arrays


def of_single_blocks(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The shapes of the leaves by name, where stacked blocks are separate."""
    shapes = {}
    for name, leaf in leaves.items():
        names = single_names(name, leaf.shape) if is_stacked(name) else []
        single = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if names else leaf
        shapes |= dict.fromkeys(names or [name], single)
    return shapes


def differences(
    stored: Mapping[str, HostArray],
    wanted: Mapping[str, Any],
    same_type: Callable[[Any, Any], bool],
    whose: str = "model",
    called: Callable[[str], str] = str,
) -> list[str]:
    """One line for each leaf that is missing or unexpected, or has the wrong shape or type.
    `called(name)` is the name to print for a leaf of the file."""
    missing = [f"missing: {n} {leaf.shape}" for n, leaf in wanted.items() if n not in stored]
    if wanted and len(missing) == len(wanted):
        has, needs = some(map(called, stored)), some(wanted)
        return [f"it has none of the {whose}'s names; it has {has}; the {whose} has {needs}"]
    extra = [f"unexpected: {called(n)} {a.shape}" for n, a in stored.items() if n not in wanted]
    misfit = []
    for name, leaf in wanted.items():
        array = stored.get(name, leaf)
        has, needs = array.shape, leaf.shape
        if not same_type(array.dtype, leaf.dtype):
            has, needs = (f"{a.dtype} {a.shape}" for a in (array, leaf))
        if has != needs:
            swapped = isinstance(has, tuple) and sorted(has) == sorted(needs)
            fix = " (transpose it)" if swapped else ""
            misfit.append(f"{called(name)}: the file has {has}, the {whose} has {needs}{fix}")
    return missing + extra + misfit


def refuse(what: str, lines: Sequence[str]) -> None:
    """Raise one error that lists all the lines, if there are any."""
    if lines:
        raise UserError("\n  ".join([what, *lines]))


def some(names: Iterable[str]) -> str:
    """The first few of many names."""
    names = list(names)
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def as_stored(leaf: Any) -> Any:
    """A leaf as a file stores it: a typed random key as its integers."""
    return jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf


def typed(array: HostArray, leaf: Any) -> HostArray | jax.Array:
    """An array of a file, turned into a typed random key if the leaf is one."""
    if not is_key(leaf):
        return array
    return jax.random.wrap_key_data(
        jnp.asarray(array), impl=jax.random.key_impl(jnp.empty((), leaf.dtype))
    )
