"""The JSON file: read it with clear errors, override single values, and the keys it can have."""

import contextlib
import copy
import json
from pathlib import Path

from utils import UserError, read_file

REQUIRED = object()
LARGEST_SEED = 2**32 - 1

# Every top-level key with its default.
TOP_LEVEL = {
    "$schema": "config.schema.json",
    "title": "run",
    "run_name": None,
    "seed": 0,
    "resume": None,
    "model": REQUIRED,
    "data": REQUIRED,
    "loader": {},
    "preprocess": [],
    "augment": [],
    "loss": None,
    "metrics": [],
    "objective": "supervised",
    "optimizer": REQUIRED,
    "schedule": "constant",
    "update": "gradient_update",
    "training": {},
    "checkpoint": {},
    "logging": {},
    "callbacks": [],
    "mesh": {},
    "sharding": None,
    "distributed": {},
}

# The sections that name no part, and the dataclass of each.
SECTIONS = {
    "loader": "training.options:LoaderOptions",
    "training": "training.options:TrainingOptions",
    "checkpoint": "training.options:CheckpointOptions",
    "logging": "training.options:LoggingOptions",
    "mesh": "training.devices.options:MeshOptions",
    "distributed": "training.devices.options:DistributedOptions",
}


def read(path, overrides=(), trusted=True):
    """The config at `path` with `key.path=value` overrides; its parts are not checked yet.

    One that is not `trusted` may not say which hosts are contacted; an override may.
    """
    path = Path(path)
    try:
        text = read_file(path).decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(
            f"{path}: there is no such file; name a config with -c, as in: "
            "python train.py -c config.json"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    try:
        config = json.loads(text, object_pairs_hook=without_repeats)
    except json.JSONDecodeError as error:
        line = [*text.splitlines(), ""][error.lineno - 1].strip()
        message = (
            f"{path}: line {error.lineno}, column {error.colno}: not JSON: {error.msg}\n  {line}"
        )
        raise UserError(
            f"{message}\n  (JSON has no comments, and no comma before a closing bracket)"
        ) from error
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: must contain an object {{...}}, found {show(config)}")
    if not trusted and config.get("distributed"):
        fix = "remove it, and pass it as an override, as in distributed.coordinator=none"
        why = "the config of a run does not say which hosts are contacted"
        raise UserError(f"{path}: distributed: {why}; {fix}, or pass --trust if you trust it")
    for text in overrides:
        config = override(config, text)
    return config


def without_repeats(pairs):
    """A JSON object as a dict; raises if it has a key twice."""
    result = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} occurs twice in one object; keep one of them")
        result[key] = value
    return result


def override(config, text):
    """The config with one `path.to.key=value` applied; what is not JSON is a plain string."""
    key_path, equals, value = text.partition("=")
    if not equals or not key_path:
        raise UserError(
            f"{text!r}: an override has the form path.to.key=value, as in optimizer.args.lr=0.01"
        )
    with contextlib.suppress(json.JSONDecodeError):  # then it is a plain string
        value = json.loads(value)
    *keys, last = key_path.split(".")
    config = node = copy.deepcopy(config)
    for key in keys:
        node = descend(node, key, text)
    node[key_or_index(node, last, text)] = value
    return config


def descend(node, key, text):
    """The object or list under `key`, created if it is missing.

    A string there becomes {"name": string}, or {"path": string} for pretrained weights.
    """
    key = key_or_index(node, key, text)
    child = node[key] if isinstance(node, list) else node.get(key)
    if child is None:
        child = node[key] = {}
    elif isinstance(child, str):
        child = node[key] = {"path" if key == "pretrained" else "name": child}
    return child


def key_or_index(node, key, text):
    """The key of an object, or the index in a list as an int."""
    if isinstance(node, dict):
        return key
    if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
        return int(key)
    raise UserError(f"{text!r}: there is no key or index {key!r} in {show(node)}")


def show(value):
    """A value as JSON text, cut to 60 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
