"""JSON values against annotations: what fits is converted (lists become tuples), what does not is told with its place."""

import types
import typing

from wiring.config import show

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
    """A value that its annotation does not allow."""

    def __init__(self, path, message):
        super().__init__(f"{path}: {message}")
        self.path, self.message = path, message


def convert(value, annotation, path, build):
    """The value as the annotation wants it. `build(annotation, value, path)` answers the values that are parts themselves, and
    NotImplemented for all others; an annotation that JSON cannot express accepts anything."""
    part = build(annotation, value, path)
    if part is not NotImplemented:
        return part
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return convert_union(value, inner, path, build)
    if origin is typing.Literal:
        if not any(value == allowed and type(value) is type(allowed) for allowed in inner):
            raise Misfit(path, f"found {show(value)}; allowed: {', '.join(map(show, inner))}")
        return value
    if tuple in (annotation, origin):
        return convert_tuple(value, inner, path, build)
    if annotation in PLAIN or origin is dict:
        return convert_plain(value, origin or annotation, path)
    return freeze(value)


def convert_plain(value, annotation, path):
    """A number, string, bool or object; an integer is a number too, a bool is neither."""
    accepted = (int, float) if annotation is float else annotation
    if not isinstance(value, accepted) or (isinstance(value, bool) and annotation is not bool):
        raise Misfit(path, f"must be {PLAIN[annotation]}, found {show(value)}")
    return float(value) if annotation is float else value


def convert_union(value, choices, path, build):
    """The first of the annotations that fits; an integer stays one where both kinds of number are allowed."""
    if value is None and type(None) in choices:
        return None
    allowed = choices
    choices = sorted((c for c in choices if c is not type(None)), key=lambda c: c is float)
    for choice in choices[:-1]:
        try:
            return convert(value, choice, path, build)
        except Misfit:
            continue
    try:
        return convert(value, choices[-1], path, build)
    except Misfit as misfit:
        if choices[-1] not in PLAIN:  # what is wrong inside says more
            raise
        raise Misfit(
            path, f"must be {' or '.join(map(describe, allowed))}, found {show(value)}"
        ) from misfit


def convert_tuple(value, inner, path, build):
    """A list, item by item."""
    if not isinstance(value, list | tuple):
        raise Misfit(path, f"must be a list, found {show(value)}")
    if not inner:
        return freeze(value)
    kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
    if len(kinds) != len(value):
        raise Misfit(path, f"must be a list of {len(kinds)}, found {show(value)}")
    return tuple(
        convert(item, kind, f"{path}.{i}", build)
        for i, (item, kind) in enumerate(zip(value, kinds, strict=True))
    )


def freeze(value):
    """Lists become tuples, all the way down."""
    if isinstance(value, list | tuple):
        return tuple(freeze(v) for v in value)
    return {k: freeze(v) for k, v in value.items()} if isinstance(value, dict) else value


def describe(annotation):
    """An annotation in words."""
    if annotation is type(None):
        return "null"
    return PLAIN.get(
        annotation,
        "a list" if tuple in (annotation, typing.get_origin(annotation)) else str(annotation),
    )


def schema(annotation, kind_of):
    """The JSON schema of an annotation; `kind_of(annotation)` names the kind of a part, or None."""
    if kind := kind_of(annotation):
        return {"$ref": f"#/$defs/{kind}"}
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
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
        keys = {
            key: schema(inner, kind_of) for key, inner in typing.get_type_hints(annotation).items()
        }
        found = {
            "type": "object",
            "properties": keys,
            "required": sorted(annotation.__required_keys__),
        }
        return found | {"additionalProperties": False}
    plain = SCHEMA_TYPES.get(origin or annotation)
    return {"type": plain} if plain else {}
