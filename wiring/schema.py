"""config.schema.json, generated from signatures, by which editors complete and check configs.

`python -m wiring.schema` writes the file; in a project, it includes the user's own parts.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter
from pathlib import Path
from typing import Any, get_type_hints

from training.kinds import KINDS, find, marker
from utils import run_command
from wiring import parts
from wiring.own_modules import own_parts
from wiring.tree import EXTRA_KEYS

REFERENCE = len('{"$ref": "#/$defs/shared_00"}')
DOTTED = {"type": "string", "pattern": r"^\w+(\.\w+)+$", "description": "a dotted name is imported"}


def make_schema(folders: Sequence[Path] = ()) -> dict[str, Any]:
    """The schema of a whole config; the folders may hold the user's own parts."""
    from wiring.keys import config, keys, sections

    accepted = keys()
    whole = call(accepted)
    described(whole["properties"], config)
    rule = {"type": "object", "properties": extra_keys("metrics"), "minProperties": 1}
    rule |= {"additionalProperties": False, "description": "how the objective's metric is measured"}
    labelled = whole["properties"]["metrics"]["anyOf"][1]
    labelled["additionalProperties"] = {"anyOf": [labelled["additionalProperties"], rule]}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Rawtree config",
        "type": "object",
        "properties": {"extends": extends(), **{key: {} for key in accepted}},
        "additionalProperties": False,
        "if": {"required": ["extends"]},
        "then": {"properties": {key: changed(key) for key in accepted}},
        "else": {"properties": whole["properties"], "required": whole["required"]},
        "$defs": {kind: part(kind, folders) for kind in KINDS}
        | {key: section(options) for key, options in sections().items()},
    }


def extends() -> dict[str, Any]:
    """The schema of `extends`: a file, or a list of files."""
    path = {"type": "string", "minLength": 1}
    about = "configs on which this one is based, relative to this file; later ones win"
    return {"anyOf": [path, {"type": "array", "items": path}], "description": about}


def changed(key: str) -> dict[str, Any]:
    """The schema of a key in a config that extends others: it may also be null, or an object that
    changes only some keys."""
    return {"anyOf": [{"$ref": f"#/else/properties/{key}"}, {"type": ["object", "null"]}]}


def section(options: type) -> dict[str, Any]:
    """The schema of a section that names no part."""
    schema: dict[str, Any] = {"type": "object", "description": parts.summary(options)}
    schema |= call(parts.arguments(options))
    described(schema["properties"], options)
    return schema


def described(properties: dict[str, Any], function: Callable) -> None:
    """Add the comment of each argument to its schema."""
    from training.options import comments  # imports JAX

    for name, comment in comments(function).items():
        properties[name if name in properties else f"${name}"]["description"] = comment


def part(kind: str, folders: Sequence[Path] = ()) -> dict[str, Any]:
    """The schema of a node: a name, or {"name": ..., "args": ...} with that name's arguments."""
    own, _ = own_parts(marker(kind).__name__, folders)
    own = {name: parts.imported(dotted, folders) for name, dotted in own.items()}
    functions = find(kind)[0] | own
    calls = {
        name: call(parts.config_arguments(kind, function)) | {"description": sentence(function)}
        for name, function in functions.items()
    }
    # A name alone is enough for a part without required arguments.
    others = [name for name, args in calls.items() if "required" in args]
    alone = {"anyOf": [{"enum": [name for name in calls if name not in others]}, DOTTED]}
    cases = [
        {
            "if": {"properties": {"name": {"const": name}}},
            "then": {"properties": {"args": args}}
            | ({"required": ["args"]} if "required" in args else {}),
        }
        for name, args in calls.items()
    ]
    name = {"anyOf": [{"$ref": f"#/$defs/{kind}/anyOf/0"}, {"enum": others}]}
    keys = {"name": name, "args": {"type": "object"}, **extra_keys(kind)}
    with_args = {"type": "object", "properties": keys, "required": ["name"], "allOf": cases}
    return {"anyOf": [alone, with_args | {"additionalProperties": False}]}


def sentence(function: Callable) -> str:
    """The first sentence of a docstring."""
    return re.split(r"(?<=\.)\s", parts.summary(function))[0]


def extra_keys(kind: str) -> dict[str, Any]:
    """The schemas of the keys that a node can have besides name and args."""
    from training.base import Tracked

    hints = get_type_hints(Tracked)
    return {key: parts.form_of(hints[key]).schema for key in EXTRA_KEYS.get(kind, ())}


def call(accepted: dict[str, Parameter]) -> dict[str, Any]:
    """The schema of the arguments of a function that a config can give, {name: Parameter}."""
    required = [k for k, p in accepted.items() if p.default is p.empty and k not in parts.FACTS]
    schema = {
        "properties": {name: argument(p) for name, p in accepted.items()},
        "additionalProperties": False,
    }
    return schema | {"required": required} if required else schema


def argument(parameter: Parameter) -> dict[str, Any]:
    """The schema of one argument, with its default."""
    schema = parts.form_of(parameter.annotation).schema
    plain = isinstance(parameter.default, str | int | float | bool | tuple)
    return schema | {"default": parameter.default} if plain else schema


def shared(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, in which what repeats is in $defs."""
    counts = Counter(json.dumps(each) for each in inner_schemas(schema))
    names = {}
    for text, count in counts.items():
        if (count - 1) * (len(text) - REFERENCE) > 100:
            names[text] = f"shared_{len(names)}"

    def by_name(value: Any) -> Any:
        if isinstance(value, list):
            return [each if type(each) is str else by_name(each) for each in value]
        if not isinstance(value, dict):
            return value
        name = names.get(json.dumps(value))
        return {"$ref": f"#/$defs/{name}"} if name else in_it(value)

    def in_it(value: dict[str, Any]) -> dict[str, Any]:
        return {key: by_name(each) for key, each in value.items()}

    schema = in_it(schema)
    schema["$defs"] |= {name: in_it(json.loads(text)) for text, name in names.items()}
    return schema


def inner_schemas(value: Any) -> Iterator[dict[str, Any]]:
    """All schemas in a schema that can be replaced by a reference."""
    if isinstance(value, dict) and {type(value.get(key)) for key in ("type", "anyOf")} & {
        str,
        list,
    }:
        yield value
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from inner_schemas(each)


def text(folders: Sequence[Path] = ()) -> str:
    """The content of config.schema.json."""
    return json.dumps(shared(make_schema(folders)), indent=1) + "\n"


def write(folder: str | Path) -> None:
    """Write config.schema.json into a folder, with the parts that its files define."""
    path = Path(folder) / "config.schema.json"
    path.write_text(text([path.resolve().parent]), encoding="utf-8", newline="\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, which has no options."""
    parser = argparse.ArgumentParser(description="Write config.schema.json into this folder.")
    parser.parse_args(argv)
    return run_command(lambda: write(Path.cwd()))


if __name__ == "__main__":
    sys.exit(main())
