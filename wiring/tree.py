"""A config as a tree of calls: read from JSON, changed as data, and then called.

Neither reading nor calling stops at a mistake: what cannot be used is a Bad in the tree, and
calling the rest collects the problems of all.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Any, NamedTuple

from training import kinds
from training.kinds import KINDS
from utils import UnknownFact, UserError, did_you_mean
from utils.forms import Misfit, no_such_key, show
from wiring import parts
from wiring.own_modules import clash

SAME = {"lr": "learning_rate", "learning_rate": "lr"}  # {argument: its name in other libraries}
# A config that was named with -c is the user's own; all others are data.
UNTRUSTED = (
    "and this config was not named with -c, but comes from a run folder, a checkpoint or the "
    "working folder; pass --trust if you trust it (from Python: trust=True)"
)
# Keys that a node of a kind may have besides name and args.
EXTRA_KEYS = {"metrics": ("mode", "freq", "phase")}


class Bad(NamedTuple):
    """A value of a config that cannot be used."""

    path: str
    message: str
    # the data lacks a fact, maybe only because of another problem, which is then the one to report
    may_follow: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class Scope(NamedTuple):
    """Where the names of a config are looked up."""

    trusted: bool = True  # whether dotted names are imported
    folders: Sequence[Path] = ()  # the folders that hold the user's own modules


@dataclass(frozen=True)
class Part:
    """A call that a config describes: function(**args), or function(*args) for a chain."""

    path: str
    function: Any  # None for a metric that the objective returns by itself
    args: Any  # {name: argument}, converted, with Part and Bad inside; for a chain, a tuple
    given: Any  # the same arguments in JSON
    accepted: dict  # {name: Parameter} of all arguments
    kind: str | None = None
    name: str | None = None  # None for a section and a chain
    extra: dict[str, Any] = field(default_factory=dict)  # the keys besides name and args

    @property
    def args_path(self) -> str:
        return f"{self.path}.args" if self.name else self.path


# Reading.


def read_call(
    function: Callable,
    accepted: dict[str, Parameter],
    given: dict[str, Any],
    path: str,
    scope: Scope,
    name: str | None,
    **about: Any,
) -> Part:
    """The Part of a call with the arguments `given` in JSON, of those that the function accepts."""
    part = Part(path, function, {}, given, accepted, name=name, **about)
    called, signature = name or path, parts.signature(name or path, accepted)
    args = {}
    for key in given:
        if key not in accepted:
            place = f"{part.args_path}.{key}".lstrip(".")
            hint = did_you_mean(SAME.get(key, key), accepted)
            message = f"{called} has no such argument{hint}\n  {signature}"
            args[key] = Bad(place, message if called else no_such_key(key, accepted))
    for key, parameter in accepted.items():
        if key in given:
            place = f"{part.args_path}.{key}".lstrip(".")
            args[key] = read(parameter.annotation, given[key], place, scope)
        elif parameter.default is parameter.empty and key not in parts.FACTS:
            example = f'is missing; name one, as in "{key}": {{"name": ..., "args": {{}}}}'
            missing = Bad(part.args_path, f"{called} needs {key!r}\n  {signature}")
            args[key] = missing if called else Bad(key, example)
    return replace(part, args=args)


def read(annotation: Any, value: Any, path: str, scope: Scope) -> Any:
    """A value of a config as the code gets it, where each part is a Part."""
    try:
        return parts.form_of(annotation).read(value, path, partial(read_node, scope))
    except Misfit as misfit:
        return Bad(misfit.path, misfit.message)


def read_node(scope: Scope, annotation: Any, node: Any, path: str) -> Any:
    """A part, a section, or a function or class that is named."""
    try:
        if annotation is Callable:
            return named_function(node, path, scope)
        if is_dataclass(annotation) and isinstance(annotation, type):
            if not isinstance(node, dict):
                raise Misfit(path, f"must be an object, found {show(node)}")
            return read_call(annotation, parts.arguments(annotation), node, path, scope, None)
        kind = kinds.kind_of(annotation)
        if kind == "optimizer" and isinstance(node, list | tuple) and node:
            from wiring.rates import chained

            places = {str(i): None for i in range(len(node))}
            members = (read_node(scope, annotation, n, f"{path}.{i}") for i, n in enumerate(node))
            members = tuple(members)
            return Part(path, partial(chained, members), members, node, places, kind)
        assert kind
        return read_part(kind, node, path, scope)
    except Misfit as misfit:
        return Bad(misfit.path, misfit.message)


def read_part(kind: str, node: Any, path: str, scope: Scope) -> Part:
    """The Part of "name" or {"name": ..., "args": {...}}."""
    keys = EXTRA_KEYS.get(kind, ())
    if kind == "metrics" and isinstance(node, dict) and node and not node.keys() - {*keys}:
        return Part(path, None, {}, {}, {}, kind, None, node)
    full = {"name": node} if isinstance(node, str) else node
    if not isinstance(full, dict) or not isinstance(full.get("name"), str):
        form = '{"name": ..., "args": {...}}'
        raise Misfit(path, f"must be a name or {form}, found {show(node)}")
    name, args, allowed = full["name"], full.get("args", {}), ("name", "args", *keys)
    if unknown := [key for key in full if key not in allowed]:
        unknown, allowed = ", ".join(map(repr, unknown)), " and ".join(map(repr, allowed))
        raise Misfit(path, f"has {unknown} beside {allowed}; move it into 'args'")
    if not isinstance(args, dict):
        message = f"must be an object with the arguments of {name}, found {show(args)}"
        raise Misfit(f"{path}.args", message)
    if kind == "tokenizer" and name.endswith((".json", ".tiktoken")):
        fixed = json.dumps({"name": "bpe", "args": {"file": name}})
        raise Misfit(path, f"{name!r} is a file, not the name of a tokenizer; write {fixed}")
    name = parts.full_name(kind, name, scope.folders)
    function = function_of(kind, name, path, f"{path}.name" if full is node else path, scope)
    if reason := kinds.why_not(function, kind):
        raise Misfit(path, f"{name!r} {reason}")
    accepted = parts.config_arguments(kind, function)
    extra = {key: full[key] for key in keys if key in full}
    return read_call(function, accepted, args, path, scope, name, kind=kind, extra=extra)


def named_function(name: Any, path: str, scope: Scope) -> Callable:
    """The function or class that an argument names by a dotted name."""
    if not isinstance(name, str) or "." not in name.strip("."):
        form = "a dotted name, such as my_nets.Net for Net in my_nets.py"
        raise Misfit(path, f"must be {form}, found {show(name)}")
    return function_of(None, name, path, path, scope)


def function_of(kind: str | None, name: str, path: str, name_path: str, scope: Scope) -> Callable:
    """The function of a full name, unless that would import code that the user does not trust."""
    hidden = clash(name, scope.folders) if "." in name else ""
    if "." in name and not scope.trusted:
        raise Misfit(path, f"{name!r} would import code, {UNTRUSTED}")
    if hidden:
        raise Misfit(path, f"{name!r}: {hidden}")
    try:
        return parts.resolve(kind, name, scope.folders)
    except UserError as error:
        imported = getattr(error.__cause__, "name", None)  # what an import did not find
        hidden = clash(imported, scope.folders)
        raise Misfit(name_path, f"{error}; {hidden}" if hidden else str(error)) from error


# Changing.


def mapped(value: Any, change: Callable[[Part], Any]) -> Any:
    """A value with each of the outermost parts in it replaced by change(part)."""
    if isinstance(value, Part):
        return change(value)
    if type(value) is tuple:
        return tuple(mapped(each, change) for each in value)
    if type(value) is dict:
        return {key: mapped(each, change) for key, each in value.items()}
    return value


def nodes_in(value: Any) -> Iterator[Part | Bad]:
    """All Part and Bad in a value, each before those inside it."""
    if isinstance(value, Part | Bad):
        yield value
    inner = value.args if isinstance(value, Part) else value
    if type(inner) in (tuple, dict):
        for each in inner.values() if type(inner) is dict else inner:
            yield from nodes_in(each)


def calls_in(value: Any) -> Iterator[Part]:
    """All parts and sections in a value that have named arguments."""
    nodes = (node for node in nodes_in(value) if isinstance(node, Part))
    return (part for part in nodes if isinstance(part.args, dict))


def is_valid(value: Any) -> bool:
    """Whether a value can be used as far as its reading shows."""
    return not any(isinstance(node, Bad) for node in nodes_in(value))


def replaced(value: Any, numbers: Mapping[str, Any]) -> Any:
    """A tree with other numbers, {path: number}, which may be inputs of a compiled program."""

    def change(part: Part) -> Part:
        args = mapped(part.args, change)
        if isinstance(args, dict):
            places = {key: f"{part.args_path}.{key}" for key in part.accepted}
            args |= {key: numbers[place] for key, place in places.items() if place in numbers}
        return replace(part, args=args)

    return mapped(value, change)


# Calling.


def built(value: Any, facts: dict[str, Any], problems: list[Bad]) -> Any:
    """A value with its parts built. `facts` fill arguments that the config leaves out. A part that
    cannot be built is None, and `problems` says why."""
    if isinstance(value, Bad):
        problems.append(value)
        return None
    if isinstance(value, Part):
        return called(value, facts, problems)
    if type(value) is tuple:
        return tuple(built(each, facts, problems) for each in value)
    if type(value) is dict:
        return {key: built(each, facts, problems) for key, each in value.items()}
    return value


def called(part: Part, facts: dict[str, Any], problems: list[Bad]) -> Any:
    """What the function of a part returns. If the functions of its kind are called at run time, it
    is the function with these arguments."""
    before, args = len(problems), built(part.args, facts, problems)
    for key, parameter in part.accepted.items() if type(args) is dict else ():
        if key in args:
            continue
        if key in facts:
            args[key] = facts[key]
        elif parameter.default is parameter.empty:
            why = f"{part.name} needs {key!r}, which is unknown for this data; set it here"
            problems.append(Bad(part.args_path, why, may_follow=True))
    if len(problems) > before:
        return None
    if part.kind == "metrics":
        from training.base import tracked

        function = partial(part.function, **args) if args else part.function
        metric = replace(part, function=partial(tracked, function), name=None)
        return result(metric, part.extra, ("mode", "freq", "phase"), problems)
    if part.kind and KINDS[part.kind].given:
        return partial(part.function, **args) if args else part.function
    return result(part, args, part.accepted, problems)


def result(part: Part, args: Any, known: Collection[str], problems: list[Bad]) -> Any:
    """The result of the call of a part. Each line of a ValueError is a problem of the argument
    whose name it starts with."""
    function, path, kind = part.function, part.args_path, part.kind
    try:
        made = function(*args) if isinstance(args, tuple) else function(**args)
    except UserError as error:
        problems.append(Bad(path, str(error)))
    except ValueError as error:
        for line in str(error).splitlines() or [parts.failure(function, error)]:
            name, _, rest = line.partition(": ")
            is_fact = isinstance(error, UnknownFact)
            place = (f"{path}.{name}", rest) if name in known else (path, line)
            problems.append(Bad(*place, may_follow=is_fact))
    except (Exception, SystemExit) as error:  # a user's factory may fail in any way
        problems.append(Bad(path, parts.failure(function, error)))
    else:
        if kind is None or KINDS[kind].given or kinds.is_a(made, kind):
            return made
        message = f"{parts.name_of(function)} returned {type(made).__name__}, not a valid {kind}"
        problems.append(Bad(part.path, f"{message}; {kinds.requirement(kind)}"))
    return None


def worth_reporting(problems: list[Bad]) -> list[str]:
    """The problems without those that may follow from others, as texts; only the first that needs
    trust explains why."""
    alone = [problem for problem in problems if not problem.may_follow] or problems
    texts = list(dict.fromkeys(map(str, alone)))
    return explained_once(texts)


def explained_once(problems: list[str]) -> list[str]:
    """The problems of a config, of which only the first that needs trust explains why."""
    first = next((problem for problem in problems if UNTRUSTED in problem), None)
    return [p if p is first else p.replace(f", {UNTRUSTED}", ", too") for p in problems]


# What else the tree says.


def beyond(tree: Part) -> Iterator[str]:
    """One line for each argument by which an untrusted config would act outside of its run."""
    for part in calls_in(tree):
        for key, parameter in part.accepted.items():
            value = part.args.get(key, parameter.default)
            for mark in parts.form_of(parameter.annotation).marks:
                if mark.reaches(value):
                    place = f"{part.args_path}.{key}"
                    yield f"{place}: {show(value)} {mark.effect}, {UNTRUSTED}"


def to_json(value: Any, given: Any, facts: dict[str, Any]) -> Any:
    """The JSON of a value with all defaults of the parts in it, except facts, which the data
    provides; `given` is its JSON without them."""
    if isinstance(value, Part):
        if value.function is None:
            return value.extra
        args = to_json(value.args, value.given, facts)
        if isinstance(value.args, dict):
            args = defaults(value, facts) | args
        return {"name": value.name, "args": args, **value.extra} if value.name else args
    if isinstance(value, dict) and isinstance(given, dict):
        return {key: to_json(value.get(key), each, facts) for key, each in given.items()}
    if type(value) is tuple and isinstance(given, list | tuple):
        pairs = zip(value, given, strict=False)
        return [to_json(each, raw, facts) for each, raw in pairs]
    return list(given) if isinstance(given, tuple) else given


def defaults(part: Part, facts: dict[str, Any]) -> dict[str, Any]:
    """The defaults of a part's arguments that JSON can express."""
    values = {
        name: to_json(parameter.default, parameter.default, facts)
        for name, parameter in part.accepted.items()
        if name not in parts.FACTS
        and isinstance(parameter.default, str | int | float | bool | tuple | None)
    }
    new = part.accepted.keys() & facts.keys() & {*parts.NEW_DEFAULTS}
    return values | {name: facts[name] for name in new}
