"""The weights that a run starts from: those of a checkpoint, or of a safetensors file that others wrote."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from training.base import TrainState
from training.checkpoint.restore import (
    as_stored,
    check_meaning,
    differences,
    probe_of,
    refuse,
    some,
    typed,
)
from training.checkpoint.storage import checkpoints, load
from utils import UserError, map_named, match_rules, named_leaves

# Top-level names in a checkpoint that are about the run, not about the model.
OF_THE_RUN = {*TrainState._fields, "logged", "probe"} - {"params", "state", "ema"}


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
        if (Path(path) / "config.json").exists():
            raise UserError(
                f"{path}: is the folder of a run; name one of its checkpoints ({', '.join(checkpoints(path))})"
            )
        arrays, self.record = load(path)  # the record of others' files is empty
        self.path, self.fresh = path, fresh
        found = weights(arrays)
        self.names = renamed(path, found, rename)  # {name in the model: name in the file}
        self.arrays = {name: found[old] for name, old in self.names.items()}
        compared = probe and not fresh  # a new head answers differently
        self.probe = probe_of(arrays) if compared else {}

    def __str__(self):
        fresh = f", but for {', '.join(self.fresh)}" if self.fresh else ""
        return f"the weights of {self.path}{fresh}"

    def check(self, params, state):
        """Refuse what does not fit this model, of which shapes suffice."""
        wanted = {name: as_stored(leaf) for name, leaf in self.wanted(params, state).items()}
        found = {
            name: a
            for name, a in self.arrays.items()
            if not any(re.fullmatch(regex, name) for regex in self.fresh)
        }
        refuse(
            f"{self.path}: does not fit the model",
            differences(found, wanted, castable, called=self.called),
        )

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
        """(params, state) with the file's numbers, on the host; fresh leaves are the given ones."""
        self.check(params, state)
        loaded = self.wanted(params, state)

        def merge(name, leaf):
            return (
                typed(np.asarray(self.arrays[name], as_stored(leaf).dtype), leaf)
                if name in loaded
                else leaf
            )

        return map_named(merge, params), map_named(merge, {"state": state})["state"]

    def check_probe(self, probe, params, state):
        """Refuse weights whose model/ has since changed its meaning, where the file can tell; shapes suffice."""
        if self.probe:
            found = probe(*self(params, state))
            check_meaning(self.path, self.probe, found, "set training.pretrained.probe to false")


def weights(arrays):
    """The weights to start from among the arrays of a file, under the names that rules use."""
    root = {name: name.split("/")[0] for name in arrays}
    if not {"params", "ema"} & set(root.values()):
        return arrays  # a file of others
    wanted, other = ("ema", "params") if "ema" in root.values() else ("params", "ema")
    left = {name: array for name, array in arrays.items() if root[name] not in {*OF_THE_RUN, other}}
    return {
        name[len(wanted) + 1 :] if root[name] == wanted else name: array
        for name, array in left.items()
    }


def renamed(path, names, rules):
    """{name after the rules: name in the file}"""
    for regex, _ in rules:
        if not any(re.fullmatch(regex, name) for name in names):
            raise UserError(
                f"training.pretrained.rename: {regex!r} matches no name in {path}, which has {some(names)}"
            )
    found = {}
    for old in names:
        name = new_name(old, rules)
        if name in found:
            raise UserError(
                f"training.pretrained.rename: {found[name]} and {old} in {path} both become {name}"
            )
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
                raise UserError(
                    f"training.pretrained.rename: [{regex!r}, {replacement!r}] cannot be applied: {error}"
                ) from error
    return name


def check_regexes(key, regexes):
    """Refuse what is not a regular expression."""
    for regex in regexes:
        try:
            re.compile(regex)
        except re.error as error:
            raise UserError(
                f"training.pretrained.{key}: {regex!r} is not a regular expression: {error}"
            ) from error


def castable(has, needs):
    """Floats of any width become the model's; nothing else changes its type."""
    return has == needs or all(jnp.issubdtype(dtype, jnp.floating) for dtype in (has, needs))
