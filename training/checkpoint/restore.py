"""What a checkpoint holds, put into the trees of a run: all of it, to go on exactly, or its weights, to start from."""

import logging
import operator
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from training.base import TrainState
from training.checkpoint.probe import difference, same_question
from training.checkpoint.storage import load
from utils import UserError, map_named, match_rules, named_leaves

logger = logging.getLogger("main")

# Top-level names in a checkpoint that are about the run, not about the model.
OF_THE_RUN = {*TrainState._fields, "logged", "probe"} - {"params", "state", "ema"}


def check_fits(path, arrays, like):
    """Refuse arrays that are not those of the tree `like`: every name and shape must agree, all differences are listed."""
    refuse(f"{path}: does not fit the model", differences(under(like, arrays), named_leaves(like), lambda *_: True))


def filled(path, arrays, like):
    """The tree `like` (of arrays, or of their shapes) with a checkpoint's arrays on the host; types must agree as well."""
    wanted = {name: as_stored(leaf) for name, leaf in named_leaves(like).items()}
    refuse(f"{path}: does not fit this run", differences(under(like, arrays), wanted, operator.eq, "run"))
    return map_named(lambda name, leaf: typed(np.asarray(arrays[name]), leaf), like)


def under(like, arrays):
    """Those arrays that lie under the top-level names of a tree."""
    return {name: array for name, array in arrays.items() if name.split("/")[0] in like}


def differences(found, wanted, same_type, whose="model", called=str):
    """A line for each leaf that is missing, not wanted, or not of the wanted form; `called(name)` tells its name in the file."""
    missing = [f"missing: {name} {leaf.shape}" for name, leaf in wanted.items() if name not in found]
    if wanted and len(missing) == len(wanted):
        return [f"it has none of the {whose}'s names; it has {some(map(called, found))}; the {whose} has {some(wanted)}"]
    extra = [f"unexpected: {called(name)} {array.shape}" for name, array in found.items() if name not in wanted]
    misfit = []
    for name, leaf in wanted.items():
        if name in found and not same_type(found[name].dtype, leaf.dtype):
            has, needs = (f"{a.dtype} {a.shape}" for a in (found[name], leaf))
            misfit.append(f"{called(name)}: the file has {has}, the {whose} has {needs}")
        elif name in found and found[name].shape != leaf.shape:
            misfit.append(f"{called(name)}: the file has {found[name].shape}, the {whose} has {leaf.shape}")
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


def pretrained_from(option):
    """What `training.pretrained` says: nothing, a path, or an object."""
    if option is None:
        return None
    return Pretrained(**option) if isinstance(option, dict) else Pretrained(option)


class Pretrained:
    """The weights of a checkpoint to start from: its averaged ones, where it has them, since they are what was evaluated. A
    safetensors file that others wrote will do as well.

    Rules use the names of the model's table, as `head/weight`; the leaves of its state are called `state/...`, and so they
    must be in the file of others. `fresh` are regexes of the leaves that keep their initial values; `rename` are pairs
    (regex, replacement) for the file's names, the first match counts, and None leaves a name out.
    """

    def __init__(self, path, fresh=(), rename=(), probe=True):
        check_regexes("fresh", fresh)
        check_regexes("rename", [regex for regex, _ in rename])
        arrays, _ = load(path)
        self.path, self.fresh = path, fresh
        found = weights(arrays)
        self.names = renamed(path, found, rename)  # {name in the model: name in the file}
        self.arrays = {name: found[old] for name, old in self.names.items()}
        compared = probe and not fresh  # a new head answers differently
        self.probe = {name: a for name, a in arrays.items() if compared and name.startswith("probe/")}

    def check(self, params, state):
        """Refuse what does not fit this model, of which shapes suffice."""
        wanted = {name: as_stored(leaf) for name, leaf in self.wanted(params, state).items()}
        found = {name: a for name, a in self.arrays.items() if not any(re.fullmatch(regex, name) for regex in self.fresh)}
        refuse(f"{self.path}: does not fit the model", differences(found, wanted, castable, called=self.called))

    def wanted(self, params, state):
        """{name: leaf} of what the file must have."""
        leaves = named_leaves(params) | named_leaves({"state": state})
        try:
            loaded = match_rules([(regex, False) for regex in self.fresh], leaves, default=True)
        except UserError as error:
            raise UserError(f"training.pretrained.fresh: {error}") from error
        return {name: leaf for name, leaf in leaves.items() if loaded[name]}

    def called(self, name):
        """A name, with the one before the rules where that is another."""
        return name if self.names[name] == name else f"{name} (in the file: {self.names[name]})"

    def __call__(self, params, state):
        """(params, state) with the file's numbers, placed as the given ones are."""
        merged = self.merged(params, state)
        return jax.tree.map(lambda a, leaf: jax.device_put(a, leaf.sharding), merged, (params, state))

    def merged(self, params, state):
        """(params, state) with the file's numbers on the host; fresh leaves are the given ones."""
        self.check(params, state)
        loaded = self.wanted(params, state)

        def merge(name, leaf):
            return typed(self.arrays[name].astype(as_stored(leaf).dtype), leaf) if name in loaded else leaf

        return map_named(merge, params), map_named(merge, {"state": state})["state"]

    def check_probe(self, probe, params, state):
        """Refuse weights whose model/ has since changed its meaning, where the file can tell; shapes suffice."""
        if not self.probe:
            return
        found = probe(*self.merged(params, state))
        if not same_question(self.probe, found):
            logger.info("%s: its probe is of another input; whether model/ still means the same is not checked", self.path)
        elif told := difference(self.probe, found):
            copy = Path(self.path).parent / "model"
            lies = f"the model as it was lies in {copy}; " if copy.is_dir() else ""
            raise UserError(
                f"{self.path}: model/, or model.args, has changed its meaning since this was written: on the probe input its "
                f"output differs by {told}; {lies}bring it back, or set training.pretrained.probe to false"
            )


def weights(arrays):
    """The weights to start from among the arrays of a file, under the names that rules use."""
    root = {name: name.split("/")[0] for name in arrays}
    if not {"params", "ema"} & set(root.values()):
        return arrays  # a file of others
    wanted, other = ("ema", "params") if "ema" in root.values() else ("params", "ema")
    left = {name: array for name, array in arrays.items() if root[name] not in {*OF_THE_RUN, other}}
    return {name[len(wanted) + 1 :] if root[name] == wanted else name: array for name, array in left.items()}


def renamed(path, names, rules):
    """{name after the rules: name in the file}"""
    for regex, _ in rules:
        if not any(re.fullmatch(regex, name) for name in names):
            raise UserError(f"training.pretrained.rename: {regex!r} matches no name in {path}, which has {some(names)}")
    found = {}
    for old in names:
        name = new_name(old, rules)
        if name in found:
            raise UserError(f"training.pretrained.rename: {found[name]} and {old} in {path} both become {name}")
        if name is not None:
            found[name] = old
    return found


def new_name(name, rules):
    """What the first rule that matches all of a name makes of it."""
    for regex, replacement in rules:
        if match := re.fullmatch(regex, name):
            try:
                return None if replacement is None else match.expand(replacement)
            except (re.error, IndexError) as error:
                raise UserError(f"training.pretrained.rename: [{regex!r}, {replacement!r}] cannot be applied: {error}") from error
    return name


def check_regexes(key, regexes):
    """Refuse what is not a regular expression."""
    for regex in regexes:
        try:
            re.compile(regex)
        except re.error as error:
            raise UserError(f"training.pretrained.{key}: {regex!r} is not a regular expression: {error}") from error


def castable(has, needs):
    """Floats of any width become the model's; nothing else changes its type."""
    return has == needs or all(jnp.issubdtype(dtype, jnp.floating) for dtype in (has, needs))
