"""The weights that a run starts from: a checkpoint, or a safetensors file of another program."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from training.base import TrainState, evaluated_part
from training.checkpoint import restore
from training.checkpoint.storage import checkpoints, load
from utils import UserError, map_named, match_rules, named_leaves

# Top-level names in a checkpoint that belong to the run, not to the model.
RUN_NAMES = {*TrainState._fields, "logged", "probe"} - {"params", "state", "ema"}
RENAME = "training.pretrained.rename"


def pretrained_from(option):
    """The Pretrained for the config's `training.pretrained`: None, a path, or an object."""
    if option is None:
        return None
    return Pretrained(**option) if isinstance(option, dict) else Pretrained(option)


class Pretrained:
    """The weights to start from; of a checkpoint, the averaged ones if there are any, since they
    were evaluated. Names are those of the model's table, such as `head/weight`; the leaves of its
    state are called `state/...`, also in the safetensors file of another program. `fresh` lists
    regexes of the leaves that keep their initial values. `rename` lists pairs (regex, replacement)
    for the names in the file; the first match wins, and None as replacement ignores the array."""

    def __init__(self, path, fresh=(), rename=(), probe=True):
        path = Path(path).expanduser()
        check_regexes("fresh", fresh)
        check_regexes("rename", [regex for regex, _ in rename])
        if (Path(path) / "config.json").exists():
            names = ", ".join(checkpoints(path))
            raise UserError(f"{path}: is a run's folder; name one of its checkpoints ({names})")
        arrays, self.record = load(path)  # the record is empty in a file of another program
        self.path, self.fresh = path, fresh
        arrays_by_old_name = weights(arrays)
        self.names = renamed(path, arrays_by_old_name, rename)  # {name in the model: in the file}
        self.arrays = {name: arrays_by_old_name[old] for name, old in self.names.items()}
        # With fresh leaves, such as a new head, the output differs anyway.
        self.probe = restore.probe_of(arrays) if probe and not fresh else {}

    def __str__(self):
        fresh = f", except {', '.join(self.fresh)}" if self.fresh else ""
        return f"the weights of {self.path}{fresh}"

    def check(self, params, state):
        """The arrays by the names of the model's leaves. Refuse a file that does not fit these
        params and state, which may be shapes."""
        leaves = self.wanted(params, state)
        wanted = {name: restore.as_stored(leaf) for name, leaf in leaves.items()}
        fresh = {n for n in self.arrays if any(re.fullmatch(regex, n) for regex in self.fresh)}
        stored = {name: array for name, array in self.arrays.items() if name not in fresh}
        stored = restore.restacked(stored, wanted)
        lines = restore.differences(stored, wanted, castable, called=self.called)
        if any(line.startswith(("missing", "unexpected", "it has none")) for line in lines):
            lines.append(
                "`rename` gives arrays the model's names, `fresh` lists the leaves that keep their "
                "initial values (docs/configure.md#start-from-pretrained-weights)"
            )
        restore.refuse(f"{self.path}: does not fit the model", lines)
        return stored

    def wanted(self, params, state):
        """{name: leaf} of what the file must have."""
        leaves = named_leaves(params) | named_leaves({"state": state})
        try:
            loaded = match_rules([(regex, False) for regex in self.fresh], leaves, default=True)
        except UserError as error:
            raise UserError(f"training.pretrained.fresh: {error}") from error
        return {name: leaf for name, leaf in leaves.items() if loaded[name]}

    def called(self, name):
        """A name in the model, with its name in the file if that is different."""
        old = self.names.get(name, name)  # arrays that were stacked here have no name in the file
        return name if old == name else f"{name} (in the file: {old})"

    def __call__(self, params, state):
        """(params, state) with the arrays of the file, on the host; fresh leaves are unchanged."""
        stored = self.check(params, state)
        loaded = self.wanted(params, state)

        def merge(name, leaf):
            if name not in loaded:
                return leaf
            array = np.asarray(stored[name], restore.as_stored(leaf).dtype)
            return restore.typed(array, leaf)

        return map_named(merge, params), map_named(merge, {"state": state})["state"]

    def check_probe(self, probe, params, state):
        """Refuse the weights if model/ now computes something else; params may be shapes."""
        if self.probe:
            current, fix = probe(*self(params, state)), "set training.pretrained.probe to false"
            restore.check_meaning(self.path, self.probe, current, fix)


def weights(arrays):
    """The weights among the arrays of a file, under the names that rules use."""
    root = {name: name.split("/")[0] for name in arrays}
    if not {"params", "ema"} & set(root.values()):
        return arrays  # a file of another program
    chosen = evaluated_part(arrays)
    [other] = {"params", "ema"} - {chosen}
    return {
        name[len(chosen) + 1 :] if root[name] == chosen else name: array
        for name, array in arrays.items()
        if root[name] not in {*RUN_NAMES, other}
    }


def renamed(path, names, rules):
    """{name after the rules: name in the file}"""
    for regex, _ in rules:
        if not any(re.fullmatch(regex, name) for name in names):
            has = restore.some(names)
            raise UserError(f"{RENAME}: {regex!r} matches no name in {path}, which has {has}")
    old_names = {}
    for old in names:
        name = new_name(old, rules)
        if name in old_names:
            raise UserError(f"{RENAME}: {old_names[name]} and {old} in {path} both become {name}")
        if name is not None:
            old_names[name] = old
    return old_names


def new_name(name, rules):
    """A name after the first rule that matches all of it; None if that rule ignores the array."""
    for regex, replacement in rules:
        if match := re.fullmatch(regex, name):
            try:
                return None if replacement is None else match.expand(replacement)
            except (re.error, IndexError) as error:
                rule = f"[{regex!r}, {replacement!r}]"
                raise UserError(f"{RENAME}: {rule} cannot be applied: {error}") from error
    return name


def check_regexes(key, regexes):
    """Refuse what is not a regular expression."""
    for regex in regexes:
        try:
            re.compile(regex)
        except re.error as error:
            why = f"{regex!r} is not a regular expression: {error}"
            raise UserError(f"training.pretrained.{key}: {why}") from error


def castable(stored, wanted):
    """Whether a type may become the model's: a float of any width may, others must be equal."""
    return stored == wanted or all(jnp.issubdtype(d, jnp.floating) for d in (stored, wanted))
