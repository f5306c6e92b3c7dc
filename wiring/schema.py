"""config.schema.json: what an editor needs to complete and check a config, generated from the signatures.

`python -m wiring.schema` writes it anew.
"""

import inspect
import json
import re
from pathlib import Path
from typing import get_type_hints

from wiring import parts, values
from wiring.config import REQUIRED, SECTIONS, TOP_LEVEL
from wiring.nodes import BESIDE

SINGLE = ("model", "data", "loss", "objective", "update", "schedule")
LISTS = ("preprocess", "augment", "metrics", "callbacks")
DOTTED = {"type": "string", "pattern": r"^\w+(\.\w+)+$", "description": "a dotted name is imported"}


def make_schema():
    """The schema of a whole config."""
    properties = {
        "$schema": {"type": "string"},
        "title": {"type": "string"},
        "seed": {"type": "integer", "minimum": 0},
    }
    properties["resume"] = {"enum": [None, "auto"], "default": None}
    properties |= {name: section(options) for name, options in SECTIONS.items()}
    properties |= {kind: reference(kind) for kind in SINGLE}
    properties |= {kind: {"type": "array", "items": reference(kind)} for kind in LISTS}
    labelled = {"type": "object", "additionalProperties": reference("metrics")}
    properties["metrics"] = {"anyOf": [properties["metrics"], labelled]}
    properties["sharding"] = sharding()
    properties["schedule"] = {"anyOf": [reference("schedule"), {"type": "null"}]}
    properties["optimizer"] = {
        "anyOf": [
            reference("optimizer"),
            {"type": "array", "items": reference("optimizer"), "minItems": 1},
        ]
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Rawtree config",
        "type": "object",
        "properties": {key: properties[key] for key in TOP_LEVEL},
        "required": [key for key, default in TOP_LEVEL.items() if default is REQUIRED],
        "additionalProperties": False,
        "$defs": {kind: part(kind) for kind in parts.KINDS},
    }


def sharding():
    """The schema of a preset's name, or of rules."""
    from training.devices.options import SHARDINGS

    axes = {"type": "array", "items": {"type": ["string", "null"]}}
    rule = {"type": "array", "items": [{"type": "string"}, axes], "minItems": 2, "maxItems": 2}
    presets = {"enum": list(SHARDINGS)}
    return {
        "anyOf": [presets, {"type": "array", "items": {"anyOf": [rule, presets]}}, {"type": "null"}]
    }


def reference(kind):
    return {"$ref": f"#/$defs/{kind}"}


def section(options):
    """The schema of a section that names no part; the comment of a field is its description."""
    function = parts.section_options(options)
    found = call(parts.arguments(function), inspect.getdoc(function))
    field = r"^(?:    # (.*)\n)?    (\w+): .*?(?:  # (.*))?$"
    for above, name, beside in re.findall(field, inspect.getsource(function), re.MULTILINE):
        if above or beside:
            found["properties"][name]["description"] = above or beside
    return found


def part(kind):
    """The schema of a node that names a part: a name, or {"name", "args"} with the arguments of that name."""
    found, _ = parts.find(kind)
    given = parts.KINDS[kind].given
    name = {"anyOf": [{"enum": list(found)}, DOTTED]}
    cases = [
        {
            "if": {"properties": {"name": {"const": part_name}}},
            "then": {
                "properties": {
                    "args": call(parts.arguments(function, given), inspect.getdoc(function))
                }
            },
        }
        for part_name, function in found.items()
    ]
    keys = {"name": name, "args": {"type": "object"}, **beside(kind)}
    spelled = {"type": "object", "properties": keys, "required": ["name"], "allOf": cases}
    return {"anyOf": [name, spelled | {"additionalProperties": False}]}


def beside(kind):
    """The schema of what may stand beside name and args."""
    from training.tally import Tracked

    hints = get_type_hints(Tracked)
    return {key: values.schema(hints[key], parts.kind_of) for key in BESIDE.get(kind, ())}


def call(accepted, doc):
    """The schema of the arguments of a function."""
    required = [k for k, p in accepted.items() if p.default is p.empty and k not in parts.FACTS]
    return {
        "type": "object",
        "description": (doc or "").split("\n")[0],
        "properties": {name: argument(p) for name, p in accepted.items()},
        "required": required,
        "additionalProperties": False,
    }


def argument(parameter):
    """The schema of one argument, with its default."""
    found = values.schema(parameter.annotation, parts.kind_of)
    plain = isinstance(parameter.default, str | int | float | bool | tuple)
    return found | {"default": parameter.default} if plain else found


def text():
    """The file's content."""
    return json.dumps(make_schema(), indent=1) + "\n"


if __name__ == "__main__":
    Path("config.schema.json").write_text(text())
