"""Convert JSON values to the types that annotations require, and annotations to JSON schemas."""

import os
import types
import typing

import numpy as np

from ranges import NeedsTrust
from utils import named_leaves
from wiring.config import show

# A config that was named with -c is the user's own; all others are data.
UNTRUSTED = (
    "and this config was not named with -c, but comes from a run folder, a checkpoint or the "
    "working folder; pass --trust if you trust it (from Python: trust=True)"
)
PLAIN = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "an object",
}
SCHEMA_TYPES = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "string",
    dict: "object",
    type(None): "null",
}


class Misfit(Exception):
    """A value does not fit its annotation."""

    def __init__(self, path, message):
        super().__init__(f"{path}: {message}")
        self.path, self.message = path, message


class OutOfRange(Misfit):
    """A number of the right type is not in the range of its annotation."""


def convert(value, annotation, path, build_part):
    """The value converted to its annotation; lists become tuples.

    `build_part(annotation, value, path)` returns a part, or NotImplemented if the annotation is not
    a kind of part. An annotation that JSON cannot express accepts every value.
    """
    part = build_part(annotation, value, path)
    if part is not NotImplemented:
        return part
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return in_range(convert(value, inner[0], path, build_part), inner[1:], path)
    if origin in (typing.Union, types.UnionType):
        return convert_union(value, inner, path, build_part)
    if origin is typing.Literal:
        if not any(value == allowed and type(value) is type(allowed) for allowed in inner):
            raise Misfit(path, f"found {show(value)}; allowed: {', '.join(map(show, inner))}")
        return value
    if tuple in (annotation, origin):
        return convert_tuple(value, inner, path, build_part)
    if annotation in PLAIN or origin is dict:
        return convert_plain(value, origin or annotation, path)
    return freeze(value)


def in_range(value, limits, path):
    """The value, which must be in all ranges of an annotation."""
    for limit in ranges(limits):
        if not limit.holds(value):
            raise OutOfRange(path, f"must be {limit.words}, got {show(value)}")
    return value


def ranges(metadata):
    """The ranges (ranges.Range) among the metadata of an annotation."""
    return [limit for limit in metadata if hasattr(limit, "keywords") and hasattr(limit, "holds")]


def beyond(values, accepted, path):
    """One line for each argument by which an untrusted config would act outside of its run."""
    for key, parameter in accepted.items():
        value = values.get(key, parameter.default)
        for mark in typing.get_args(parameter.annotation):
            if isinstance(mark, NeedsTrust) and mark.reaches(value):
                yield f"{path}.{key}: {show(value)} {mark.effect}, {UNTRUSTED}"


def explained_once(problems):
    """The problems of a config, of which only the first that needs trust explains why."""
    first = next((problem for problem in problems if UNTRUSTED in problem), None)
    return [p if p is first else p.replace(f", {UNTRUSTED}", ", too") for p in problems]


def without_range(annotation):
    """The type of a number that is annotated with a range; any other annotation unchanged."""
    is_annotated = typing.get_origin(annotation) is typing.Annotated
    return typing.get_args(annotation)[0] if is_annotated else annotation


def convert_plain(value, annotation, path):
    """A number, string, bool or object; an integer is also a number, a bool is not."""
    accepted = (int, float) if annotation is float else annotation
    if not isinstance(value, accepted) or (isinstance(value, bool) and annotation is not bool):
        raise Misfit(path, f"must be {PLAIN[annotation]}, found {show(value)}")
    if annotation is str and value.startswith(("~/", "~\\")):
        return os.path.expanduser(value)  # a path; no shell expands it in a file
    if annotation is not float:
        return value
    try:
        return float(value)
    except OverflowError:
        raise Misfit(path, f"is too large for a number: {show(value)}") from None


def convert_union(value, allowed, path, build_part):
    """The value converted to the first annotation that it fits; float is tried last.

    An integer therefore stays an integer if both int and float are allowed.
    """
    if value is None and type(None) in allowed:
        return None
    choices = [choice for choice in allowed if choice is not type(None)]
    for choice in sorted(choices, key=lambda choice: without_range(choice) is float):
        try:
            return convert(value, choice, path, build_part)
        except Misfit as misfit:
            last, plain = misfit, is_plain(choice)
            if isinstance(misfit, OutOfRange):
                break
    if isinstance(last, OutOfRange) or not plain:
        raise last  # its message says what is wrong inside the value
    expected = " or ".join(map(describe, allowed))
    raise Misfit(path, f"must be {expected}, found {show(value)}") from last


def is_plain(annotation):
    """Whether `describe` says all that a value must be."""
    is_literal = typing.get_origin(annotation) is typing.Literal
    return is_literal or without_range(annotation) in PLAIN


def convert_tuple(value, inner, path, build_part):
    """A list, converted item by item."""
    if not isinstance(value, list | tuple):
        raise Misfit(path, f"must be a list, found {show(value)}")
    if not inner:
        return freeze(value)
    kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
    if len(kinds) != len(value):
        raise Misfit(path, f"must be a list of {len(kinds)} items, found {show(value)}")
    return tuple(
        convert(item, kind, f"{path}.{i}", build_part)
        for i, (item, kind) in enumerate(zip(value, kinds, strict=True))
    )


def freeze(value):
    """The value with all lists in it as tuples."""
    if isinstance(value, list | tuple):
        return tuple(freeze(v) for v in value)
    return {k: freeze(v) for k, v in value.items()} if isinstance(value, dict) else value


def describe(annotation):
    """The words for an annotation in messages."""
    if annotation is type(None):
        return "null"
    if tuple in (annotation, typing.get_origin(annotation)):
        return "a list"
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(map(show, typing.get_args(annotation)))
    annotation = without_range(annotation)
    plain = PLAIN.get(typing.get_origin(annotation) or annotation)
    return plain or getattr(annotation, "__name__", str(annotation))


def part_schema(kind):
    """The JSON schema of a part; a list of optimizers is a chain."""
    part = {"$ref": f"#/$defs/{kind}"}
    chain = {"type": "array", "items": part, "minItems": 1}
    return {"anyOf": [part, chain]} if kind == "optimizer" else part


def schema(annotation, kind_of):
    """The JSON schema of an annotation; `kind_of(annotation)` is the kind of a part, or None."""
    if kind := kind_of(annotation):
        return part_schema(kind)
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        limits = {key: value for r in ranges(inner[1:]) for key, value in r.keywords.items()}
        return schema(inner[0], kind_of) | limits
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [schema(choice, kind_of) for choice in inner]}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if tuple in (annotation, origin):
        if not inner:
            return {"type": "array"}
        if inner[-1] is Ellipsis:
            return {"type": "array", "items": schema(inner[0], kind_of)}
        return {
            "type": "array",
            "items": [schema(i, kind_of) for i in inner],
            "minItems": len(inner),
            "maxItems": len(inner),
        }
    if typing.is_typeddict(annotation):
        hints = typing.get_type_hints(annotation)
        return {
            "type": "object",
            "properties": {key: schema(hint, kind_of) for key, hint in hints.items()},
            "required": sorted(annotation.__required_keys__),
            "additionalProperties": False,
        }
    plain = SCHEMA_TYPES.get(origin or annotation)
    return {"type": plain} if plain else {}


def outputs_of(example):
    """How many numbers a model of this data returns: in a regression, one for each float of the
    target; None if unknown."""
    if not isinstance(example, tuple) or len(example) != 2 or is_nest(example[1]):
        return None
    target = np.asarray(example[1])
    return target.size if target.dtype.kind == "f" and target.ndim <= 1 else None


def is_nest(value):
    return isinstance(value, dict | list | tuple)


def forms(tree):
    """The types and shapes of an example's inputs, as a text."""
    leaves = [(name, np.asarray(leaf)) for name, leaf in named_leaves(tree).items()]
    return ", ".join(f"{name} {leaf.dtype}{list(leaf.shape)}".strip() for name, leaf in leaves)
