"""What a checkpoint holds, put into the trees of a run that goes on."""

import logging
import operator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from training.checkpoint.probe import difference, same_question
from utils import UserError, map_named, named_leaves

logger = logging.getLogger("main")


def filled(path, arrays, like):
    """The tree `like` (of arrays, or of their shapes) with a checkpoint's arrays on the host; types must agree as well."""
    wanted = {name: as_stored(leaf) for name, leaf in named_leaves(like).items()}
    refuse(
        f"{path}: does not fit this run",
        differences(under(like, arrays), wanted, operator.eq, "run"),
    )
    return map_named(lambda name, leaf: typed(arrays[name], leaf), like)


def sums_so_far(arrays, zeros):
    """(what an epoch has summed up in a checkpoint, whether its log line goes on from there). What is measured in another way now
    than then starts at `zeros`."""

    def group(name):
        part, _, rest = name.partition("/")
        return (part, rest.startswith(("steps", "extras"))) if part in ("epoch", "window") else part

    fits = {}
    for name, leaf in named_leaves(zeros).items():
        array = arrays.get(f"sums/{name}")
        same = array is not None and (array.shape, array.dtype) == (leaf.shape, leaf.dtype)
        fits[group(name)] = fits.get(group(name), True) and same
    if not fits["epoch", False]:
        logger.warning(
            "Other metrics are measured than at the checkpoint: those of this epoch are of its rest alone"
        )
    sums = map_named(
        lambda name, leaf: np.asarray(arrays[f"sums/{name}"]) if fits[group(name)] else leaf, zeros
    )
    line_goes_on = all(fit for key, fit in fits.items() if "window" in key or key == "ring")
    return sums | {
        "freeze": zeros["freeze"]
    }, line_goes_on  # whether a bad step freezes a state is for the config of now to say


def under(like, arrays):
    """Those arrays that lie under the top-level names of a tree."""
    return {name: array for name, array in arrays.items() if name.split("/")[0] in like}


def differences(found, wanted, same_type, whose="model", called=str):
    """A line for each leaf that is missing, not wanted, or not of the wanted form; `called(name)` tells its name in the file."""
    missing = [
        f"missing: {name} {leaf.shape}" for name, leaf in wanted.items() if name not in found
    ]
    if wanted and len(missing) == len(wanted):
        return [
            f"it has none of the {whose}'s names; it has {some(map(called, found))}; the {whose} has {some(wanted)}"
        ]
    extra = [
        f"unexpected: {called(name)} {array.shape}"
        for name, array in found.items()
        if name not in wanted
    ]
    misfit = []
    for name, leaf in wanted.items():
        if name in found and not same_type(found[name].dtype, leaf.dtype):
            has, needs = (f"{a.dtype} {a.shape}" for a in (found[name], leaf))
            misfit.append(f"{called(name)}: the file has {has}, the {whose} has {needs}")
        elif name in found and found[name].shape != leaf.shape:
            misfit.append(
                f"{called(name)}: the file has {found[name].shape}, the {whose} has {leaf.shape}"
            )
    return missing + extra + misfit


def refuse(what, lines):
    """One error of all the lines, if there are any."""
    if lines:
        raise UserError("\n  ".join([what, *lines]))


def some(names):
    """The first few of many names."""
    names = list(names)
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def is_key(leaf):
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def as_stored(leaf):
    """What a file holds for a leaf: of a typed key its numbers."""
    return jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf


def typed(array, leaf):
    """An array of a file, made a typed key again where the leaf is one."""
    if not is_key(leaf):
        return array
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(jnp.empty((), leaf.dtype)))


def probe_of(arrays):
    """What the model answered when a checkpoint was written."""
    return {name: array for name, array in arrays.items() if name.startswith("probe/")}


def check_meaning(path, stored, found, mend):
    """Refuse weights whose model/ has since changed its meaning, where their checkpoint can tell."""
    if not stored:
        return
    if not same_question(stored, found):
        logger.info(
            "%s: was probed with another input; whether model/ still means the same is not checked",
            path,
        )
    elif told := difference(stored, found):
        copy = Path(path).parent / "model"
        lies = f"the model as it was lies in {copy}; " if copy.is_dir() else ""
        raise UserError(
            f"{path}: model/, or model.args, has changed its meaning since this was written: on the probe input its "
            f"output differs by {told}; {lies}bring it back, or {mend}"
        )
