"""config.schema.json, generated from signatures, by which editors complete and check configs.

`python -m wiring.schema` writes the file; in a project, it includes the user's own parts.
"""

import argparse
import inspect
import json
import re
import sys
from pathlib import Path
from typing import get_type_hints

from utils import run_command
from wiring import parts
from wiring.config import LARGEST_SEED, REQUIRED, SECTIONS, TOP_LEVEL
from wiring.nodes import EXTRA_KEYS
from wiring.own_modules import own_parts

SINGLE = ("model", "data", "loss", "objective", "update", "schedule")
LISTS = ("preprocess", "augment", "metrics", "callbacks")
DOTTED = {"type": "string", "pattern": r"^\w+(\.\w+)+$", "description": "a dotted name is imported"}


def make_schema(folders=()):
    """The schema of a whole config; the folders may hold the user's own parts."""
    properties = {
        "$schema": {"type": "string"},
        "title": {"type": "string"},
        "run_name": {"type": ["string", "null"], "default": None},
        "seed": {"type": "integer", "minimum": 0, "maximum": LARGEST_SEED},
        "resume": {"enum": [None, "auto"], "default": None},
        "sharding": sharding(),
    }
    properties |= {name: section(options) for name, options in SECTIONS.items()}
    properties |= {kind: reference(kind) for kind in SINGLE}
    properties |= {kind: {"type": "array", "items": reference(kind)} for kind in LISTS}
    rule = {"type": "object", "properties": extra_keys("metrics"), "minProperties": 1}
    rule |= {"additionalProperties": False, "description": "how the objective's metric is measured"}
    metric = {"anyOf": [reference("metrics"), rule]}
    labelled = {"type": "object", "additionalProperties": metric}
    properties["metrics"] = {"anyOf": [properties["metrics"], labelled]}
    properties["loss"] = {"anyOf": [reference("loss"), {"type": "null"}]}
    properties["schedule"] = {"anyOf": [reference("schedule"), {"type": "null"}]}
    properties["optimizer"] = parts.part_schema("optimizer")
    required = [key for key, default in TOP_LEVEL.items() if default is REQUIRED]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Rawtree config",
        "type": "object",
        "properties": {"extends": extends(), **{key: {} for key in TOP_LEVEL}},
        "additionalProperties": False,
        "if": {"required": ["extends"]},
        "then": {"properties": {key: changed(key) for key in TOP_LEVEL}},
        "else": {"properties": {key: properties[key] for key in TOP_LEVEL}, "required": required},
        "$defs": {kind: part(kind, folders) for kind in parts.KINDS},
    }


def extends():
    """The schema of `extends`: a file, or a list of files."""
    path = {"type": "string", "minLength": 1}
    about = "configs on which this one is based, relative to this file; later ones win"
    return {"anyOf": [path, {"type": "array", "items": path}], "description": about}


def changed(key):
    """The schema of a key in a config that extends others: it may also be null, or an object that
    changes only some keys."""
    return {"anyOf": [{"$ref": f"#/else/properties/{key}"}, {"type": ["object", "null"]}]}


def sharding():
    """The schema of `sharding`: the name of a preset, or a list of rules."""
    from training.devices.options import SHARDINGS

    axes = {"type": "array", "items": {"type": ["string", "null"]}}
    rule = {"type": "array", "items": [{"type": "string"}, axes], "minItems": 2, "maxItems": 2}
    presets = {"enum": list(SHARDINGS)}
    rules = {"type": "array", "items": {"anyOf": [rule, presets]}}
    return {"anyOf": [presets, rules, {"type": "null"}]}


def reference(kind):
    """A reference to the schema of a kind."""
    return {"$ref": f"#/$defs/{kind}"}


def section(options):
    """The schema of a section that names no part."""
    options = parts.section_options(options)
    schema = call(options, parts.arguments(options))
    for name, comment in comments(options).items():
        schema["properties"][name]["description"] = comment
    return schema


def comments(options):
    """{field: the comment above or beside it} of a dataclass or a TypedDict."""
    field = r"^((?:    # .*\n)*)    (\w+): .*?(?:  # (.*))?$"
    found = re.findall(field, inspect.getsource(options), re.MULTILINE)
    texts = {name: " ".join(re.findall("# (.*)", above)) or beside for above, name, beside in found}
    return {name: text for name, text in texts.items() if text}


def part(kind, folders=()):
    """The schema of a node: a name, or {"name": ..., "args": ...} with that name's arguments."""
    own, _ = own_parts(parts.marker(kind).__name__, folders)
    own = {name: parts.imported(dotted, folders) for name, dotted in own.items()}
    functions = parts.find(kind)[0] | own
    calls = {
        name: call(function, parts.config_arguments(kind, function))
        for name, function in functions.items()
    }
    name = {"anyOf": [{"enum": list(functions)}, DOTTED]}
    # A name alone is enough for a part without required arguments.
    alone = {"anyOf": [{"enum": [n for n in functions if not calls[n]["required"]]}, DOTTED]}
    cases = [
        {
            "if": {"properties": {"name": {"const": part_name}}},
            "then": {"properties": {"args": args}}
            | ({"required": ["args"]} if args["required"] else {}),
        }
        for part_name, args in calls.items()
    ]
    keys = {"name": name, "args": {"type": "object"}, **extra_keys(kind)}
    with_args = {"type": "object", "properties": keys, "required": ["name"], "allOf": cases}
    return {"anyOf": [alone, with_args | {"additionalProperties": False}]}


def extra_keys(kind):
    """The schemas of the keys that a node can have besides name and args."""
    from training.base import Tracked

    hints = get_type_hints(Tracked)
    return {key: parts.form_of(hints[key]).schema for key in EXTRA_KEYS.get(kind, ())}


def call(function, accepted):
    """The schema of the arguments of a function that a config can give, {name: Parameter}."""
    required = [k for k, p in accepted.items() if p.default is p.empty and k not in parts.FACTS]
    return {
        "type": "object",
        "description": parts.summary(function),
        "properties": {name: argument(p) for name, p in accepted.items()},
        "required": required,
        "additionalProperties": False,
    }


def argument(parameter):
    """The schema of one argument, with its default."""
    schema = parts.form_of(parameter.annotation).schema
    plain = isinstance(parameter.default, str | int | float | bool | tuple)
    return schema | {"default": parameter.default} if plain else schema


def text(folders=()):
    """The content of config.schema.json."""
    return json.dumps(make_schema(folders), indent=1) + "\n"


def write(folder):
    """Write config.schema.json into a folder, with the parts that its files define."""
    path = Path(folder) / "config.schema.json"
    path.write_text(text([path.resolve().parent]), encoding="utf-8", newline="\n")


def main(argv=None):
    """Run the command line, which has no options."""
    parser = argparse.ArgumentParser(description="Write config.schema.json into this folder.")
    parser.parse_args(argv)
    return run_command(lambda: write(Path.cwd()))


if __name__ == "__main__":
    sys.exit(main())
