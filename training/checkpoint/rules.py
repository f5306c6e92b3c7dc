"""Rules that turn the arrays of another library into the leaves of a model, and back.

A rule is a list [regex, target] or [regex, target, form]. The regex matches the whole name of an
array in the file. The target is one of these:

- the name of a leaf, in which \\1 is the first group of the regex. The form, such as "OI->IO",
  names the axes of the array and of the leaf, one letter each; 1 is an axis of length one.
- a list of names: after the form is applied, the array is split along its last axis. null leaves
  out a part, which is written as zeros for the other library.
- null: the model has no such leaf, so the array is ignored. The form says what is written for the
  other library: "zeros like NAME", "copy of NAME", "zero for NAME" (a single integer, for each leaf
  of that name), or nothing.

If several rules match, the first one whose leaf the model has is used.
"""

import itertools
import json
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from training.checkpoint import trees
from training.checkpoint.orbax_folder import HostArray
from utils import UserError
from utils.files import read_json
from utils.forms import local_path

FOLDER = Path(__file__).with_name("rule_files")
STAND_INS = {
    "zeros like ": np.zeros_like,
    "copy of ": np.asarray,
    "zero for ": lambda leaf: np.zeros((), np.int64),
}
FORM = re.compile("[A-Z1]+->[A-Z1]+")
REFERENCE = re.compile(r"\\(\d)|\\g<(\w+)>")  # to a group, in a target
# The parts of a regex that can be applied backwards: plain text that a name may have or not, which
# is written; a group; an escaped character; a plain one.
PIECE = re.compile(
    r"\(\?:(?P<optional>(?:\\\W|[^\\()|*+?.\[])*)\)\?|\((?:\?P<\w+>)?(?P<group>[^()?][^()]*)\)"
    r"|\\(?P<escaped>\W)|(?P<plain>[^\\.^$*+?{}\[\]|()])"
)
SHAPE = 'a rule is [regex, name of a leaf or list of names or null], with a form such as "OI->IO"'


class Rule(NamedTuple):
    regex: str
    targets: tuple  # names of leaves, and None for parts that the model lacks
    form: str = ""  # "OI->IO", or what is written in place of an array that the model lacks
    text: str = ""  # the rule as it was written

    @property
    def stand_in(self) -> tuple[Callable[[np.ndarray], np.ndarray], str] | None:
        """(function, name of a leaf) that make an array that the model lacks; else None."""
        for start, function in STAND_INS.items():
            if self.form.startswith(start):
                return function, self.form.removeprefix(start)
        return None

    def names(self, match: re.Match[str]) -> list[str | None]:
        """The targets for the name that the regex matches."""
        try:
            return [target and match.expand(target) for target in self.targets]
        except (re.error, IndexError) as error:
            raise UserError(f"{self.text} cannot be applied: {error}") from error


# --- reading rules


def read_rules(value: str | Path | Sequence, key: str = "rules") -> list[Rule]:
    """The Rules of an option: a list of them, the name of a ready rule file, or a path."""
    if not isinstance(value, str | PathLike):
        return [rule_of(rule, key) for rule in value]
    content, name = rule_file(value, key)
    rules = [rule_of(rule, name) for rule in content["rules"]]
    return expanded(rules, content.get("where", {}), name)


def rule_file(value: str | Path, key: str = "rules") -> tuple[dict[str, Any], str]:
    """(the content of a rule file, given by its name or its path, what to call it in messages)."""
    path = FOLDER / f"{value}.json"
    if not re.fullmatch(r"\w+", str(value)) or not path.exists():
        path = local_path(key, value)
        if not path.exists():
            ready = f"there are {', '.join(ready_files())}, or give a path"
            raise UserError(f"{key}: no rule file {str(value)!r}; {ready}")
    content, name = read_json(path), str(path) if path.parent != FOLDER else f"rules {value}"
    if not {"rules"} <= set(content) <= {"about", "model", "where", "rules"}:
        keys = "rules, and may have about, model and where"
        raise UserError(f"{name}: must have the key {keys}; it has {', '.join(content)}")
    if not isinstance(content["rules"], list):
        raise UserError(f"{name}: rules must be a list, got {content['rules']!r}")
    return content, name


def ready_files() -> list[str]:
    """The names of the rule files that are part of this project."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def rule_of(value: Any, where: str) -> Rule:
    """A rule, checked."""
    entries = list(value) if isinstance(value, list | tuple) else []
    regex, target, *form = entries if len(entries) > 1 else [None, []]
    targets = target if isinstance(target, list | tuple) else [target]
    text = f"{where}: {shown(value)}"
    if (
        not isinstance(regex, str)
        or not targets
        or not all(isinstance(target, str | None) for target in targets)
    ):
        raise UserError(f"{where}: {SHAPE}; got {shown(value)}")
    if len(form) > 1 or not all(isinstance(part, str) for part in form):
        raise UserError(f"{text}: the form must be one text such as 'OI->IO'")
    try:
        re.compile(regex)
    except re.error as error:
        raise UserError(f"{where}: {regex!r} is not a regular expression: {error}") from error
    rule = Rule(regex, tuple(targets), form[0] if form else "", text)
    if rule.form and rule.targets == (None,):
        if not rule.stand_in:
            forms = ", ".join(repr(f"{start}NAME") for start in STAND_INS)
            raise UserError(f"{text}: with null, the form must be one of {forms}")
    elif rule.form:
        theirs, _, ours = rule.form.replace("1", "").partition("->")
        same = sorted(theirs) == sorted(ours) == sorted(set(theirs))
        if not FORM.fullmatch(rule.form) or not same:
            raise UserError(
                f"{text}: the form must name the same axes on both sides, once each, as in "
                "'OIHW->HWIO'"
            )
    return rule


def shown(value: Any) -> str:
    return json.dumps(value, default=str)


def expanded(rules: list[Rule], tables: dict[str, dict[str, str]], name: str) -> list[Rule]:
    """The rules, with each word of `where` replaced by each of its pairs (in a regex, in a
    target)."""
    if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
        raise UserError(f"{name}: where must be an object of objects {{regex: target}}")
    for word in tables:
        if not any(word in rule.regex for rule in rules):
            raise UserError(f"{name}: where: no regex of a rule has the word {word!r}")
    result = []
    for rule in rules:
        words = [word for word in tables if word in rule.regex]
        for pairs in itertools.product(*(tables[word].items() for word in words)):
            regex, ours = rule.regex, [*rule.targets, rule.form]
            for word, (theirs, target) in zip(words, pairs, strict=True):
                regex = regex.replace(word, theirs)
                ours = [text and text.replace(word, target) for text in ours]
            *targets, form = ours
            result.append(rule._replace(regex=regex, targets=tuple(targets), form=form))
    return result


# --- into the model


def chosen(
    rules: Sequence[Rule], names: Iterable[str], leaves: Container[str]
) -> dict[str, tuple[Rule | None, list[str | None]]]:
    """{name in the file: (its rule, the names of the leaves)}, or (None, [name in the file]) if no
    rule matches."""
    result = {}
    for name in names:
        matches = [(rule, m) for rule in rules if (m := re.fullmatch(rule.regex, name))]
        options = [(rule, rule.names(match)) for rule, match in matches] or [(None, [name])]
        fits = (o for o in options if o[1] == [None] or any(t and t in leaves for t in o[1]))
        result[name] = next(fits, options[0])
    return result


def converted(
    path: str | Path,
    rules: Sequence[Rule],
    arrays: Mapping[str, HostArray],
    leaves: Mapping[str, Any],
) -> tuple[dict[str, HostArray], dict[str, tuple[str, Rule | None]]]:
    """({name of a leaf: array}, {name of a leaf: (name in the file, rule)}) of the arrays of a
    file."""
    leaf_arrays, origin, copies = {}, {}, []
    for name, (rule, targets) in chosen(rules, arrays, leaves).items():
        if rule and targets == [None]:
            copied = rule.stand_in if rule.form.startswith("copy of ") else None
            if copied and (match := re.fullmatch(rule.regex, name)):
                copies.append((name, match.expand(copied[1]), rule))
            continue
        array = arranged(path, name, arrays[name], rule)
        for target, part in split(array, targets, leaves).items():
            if target in origin:
                both = f"{origin[target][0]} and {name} in {path} both become {target}"
                raise UserError(f"{rule.text}: {both}" if rule else both)
            leaf_arrays[target], origin[target] = part, (name, rule)
    for name, leaf, rule in copies:
        if leaf in origin and not np.array_equal(arrays[name], arrays[origin[leaf][0]]):
            why = f"{name} must be a copy of {origin[leaf][0]}, and it is not"
            raise UserError(f"{path}: {why} ({rule.text}); the model needs a separate leaf for it")
    return leaf_arrays, origin


def arranged(path: str | Path, name: str, array: HostArray, rule: Rule | None) -> HostArray:
    """An array with the axes of the leaf."""
    if rule is None or not rule.form:
        return array
    theirs, ours = rule.form.split("->")
    array = np.asarray(array)
    if array.ndim != len(theirs) or any(
        n != 1 for n, axis in zip(array.shape, theirs, strict=True) if axis == "1"
    ):
        raise UserError(
            f"{path}: {name} has the shape {array.shape}, which does not fit {rule.text}"
        )
    return with_axes(array, theirs, ours)


def with_axes(array: np.ndarray, before: str, after: str) -> np.ndarray:
    """An array whose axes are called `before`, in the order `after`; 1 is an axis of length one."""
    array = array.reshape([n for n, axis in zip(array.shape, before, strict=True) if axis != "1"])
    before, kept = before.replace("1", ""), after.replace("1", "")
    array = array.transpose([before.index(axis) for axis in kept])
    places = [i for i, axis in enumerate(after) if axis == "1"]
    return np.expand_dims(array, places)


def split(
    array: HostArray, targets: Sequence[str | None], leaves: Mapping[str, Any]
) -> dict[str, HostArray]:
    """{name of a leaf: its part of the last axis}. The parts have the sizes of the leaves; parts
    that the model lacks share the rest equally."""
    known = [target for target in targets if target is not None]
    if len(targets) == 1:
        return dict.fromkeys(known, array)
    total = array.shape[-1] if array.shape else 0
    shapes = [leaves[target].shape if target and target in leaves else () for target in targets]
    sizes = [shape[-1] if shape else None for shape in shapes]
    left, open_ = total - sum(size or 0 for size in sizes), sizes.count(None)
    if left < 0 or left % max(open_, 1) or (left and not open_):
        return dict.fromkeys(known, array)  # reported with its shape
    ends = np.cumsum([left // open_ if size is None else size for size in sizes])
    parts = np.split(np.asarray(array), ends[:-1], axis=-1)
    named = zip(targets, parts, strict=True)
    return {target: part for target, part in named if target is not None}


# --- out of the model


def written(rules: Sequence[Rule], leaves: Mapping[str, HostArray]) -> dict[str, np.ndarray]:
    """{name: array} for the other library, from {name of a leaf: array}."""
    arrays, used = {}, set()
    for rule in rules:
        if not rule.stand_in and rule.targets == (None,):
            continue
        make, anchor = rule.stand_in or (None, next(filter(None, rule.targets)))
        try:
            items = pieces(rule.regex)
            pattern = leaf_pattern(anchor, rule.regex, items)
        except (ValueError, LookupError) as error:
            raise UserError(f"{rule.text}: cannot be applied backwards: {error}") from error
        for leaf in leaves:
            match = pattern.fullmatch(leaf)
            if not match or (leaf in used and not make):
                continue
            name = "".join(
                item if isinstance(item, str) else match[f"g{item[0]}"] for item in items
            )
            if make:
                arrays.setdefault(name, make(np.asarray(leaves[leaf])))
                continue
            if name in arrays:
                raise UserError(f"{rule.text}: {name} is already written by another rule")
            names = [target and name_of_leaf(target, rule.regex, match) for target in rule.targets]
            arrays[name] = joined(rule, names, leaves)
            used |= set(names)
    if rest := [leaf for leaf in leaves if leaf not in used]:
        some = trees.some(rest)
        raise UserError(f"no rule writes {len(rest)} of the {len(leaves)} leaves: {some}")
    return arrays


def pieces(regex: str) -> list[str | tuple[int, str]]:
    """A regex as a list of plain text and of groups (number, pattern); ValueError if it has other
    elements."""
    items, groups, end = [], 0, 0
    while end < len(regex):
        if not (match := PIECE.match(regex, end)):
            if regex[end] == "(":
                raise ValueError(f"{regex[end:]} is neither a group nor optional plain text")
            text = regex[end : end + 2] if regex[end] == "\\" else regex[end]
            raise ValueError(f"{text!r} stands outside of a group; put \\ before a plain character")
        if match["group"]:
            groups += 1
            items.append((groups, match["group"]))
        else:
            optional = re.sub(r"\\(\W)", r"\1", match["optional"] or "")
            items.append(optional or match["escaped"] or match["plain"] or "")
        end = match.end()
    return items


def leaf_pattern(target: str, regex: str, items: list[str | tuple[int, str]]) -> re.Pattern[str]:
    """The compiled regex that a name made from the target matches, with groups called g1 and so on;
    ValueError if such a name does not say what the groups of `regex`, in `items`, matched."""
    patterns = dict(item for item in items if isinstance(item, tuple))
    result, end, named = "", 0, set()
    for reference in REFERENCE.finditer(target):
        number = number_of(reference, regex)
        result += re.escape(target[end : reference.start()])
        end = reference.end()
        result += f"(?P=g{number})" if number in named else f"(?P<g{number}>{patterns[number]})"
        named.add(number)
    if lacking := patterns.keys() - named:
        raise ValueError(f"{target!r} does not contain group {min(lacking)} of the regex")
    return re.compile(result + re.escape(target[end:]))


def number_of(reference: re.Match[str], regex: str) -> int:
    """The number of the group that a reference such as \\1 or \\g<name> stands for."""
    key = reference[1] or reference[2]
    return int(key) if key.isdecimal() else re.compile(regex).groupindex[key]


def name_of_leaf(target: str, regex: str, match: re.Match[str]) -> str:
    """The name that a target makes, from a match of another target's `leaf_pattern`."""
    return REFERENCE.sub(lambda found: match[f"g{number_of(found, regex)}"], target)


def joined(rule: Rule, names: Sequence[str | None], leaves: Mapping[str, HostArray]) -> np.ndarray:
    """The array of the other library that these leaves make."""
    if missing := [name for name in names if name and name not in leaves]:
        raise UserError(f"{rule.text}: the model has no {', '.join(missing)}")
    known = [name for name in names if name]
    parts = [np.asarray(leaves[n]) if n else np.zeros_like(leaves[known[-1]]) for n in names]
    array = np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    if not rule.form:
        return array
    theirs, ours = rule.form.split("->")
    if array.ndim != len(ours):
        raise UserError(f"{rule.text}: {known[0]} has the shape {array.shape}, which does not fit")
    return np.ascontiguousarray(with_axes(array, ours, theirs))
