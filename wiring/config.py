"""The JSON file: reading it with clear errors, overriding single values, and the keys that it may have."""

import contextlib
import copy
import json
from pathlib import Path

from utils import UserError

REQUIRED = object()

# Every top-level key with its default.
TOP_LEVEL = {
    "$schema": "config.schema.json",
    "title": "run",
    "seed": 0,
    "resume": None,
    "model": REQUIRED,
    "data": REQUIRED,
    "loader": {},
    "preprocess": [],
    "augment": [],
    "loss": REQUIRED,
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


def read(path, overrides=()):
    """The config at `path` with `key.path=value` overrides applied; its parts are not looked at yet."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(
            f"{path}: there is no such file; name a config with -c, as in: python train.py -c config.json"
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
        raise UserError(f"{path}: must hold an object {{...}}, found {show(config)}")
    for text in overrides:
        config = override(config, text)
    return config


def without_repeats(pairs):
    """A JSON object, unless a key stands in it twice."""
    found = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands twice in one object; keep one of them")
        found[key] = value
    return found


def override(config, text):
    """The config with one `path.to.key=value`; the value is JSON, or else a plain string."""
    key_path, equals, value = text.partition("=")
    if not equals or not key_path:
        raise UserError(
            f"{text!r}: an override reads path.to.key=value, as in optimizer.args.lr=0.01"
        )
    with contextlib.suppress(json.JSONDecodeError):  # it stays a plain string
        value = json.loads(value)
    *way, last = key_path.split(".")
    config = node = copy.deepcopy(config)
    for key in way:
        node = descend(node, key, text)
    node[place(node, last, text)] = value
    return config


def descend(node, key, text):
    """The object or list under `key`: made where there is none; a name becomes {"name": name}, a path {"path": path}."""
    key = place(node, key, text)
    child = node[key] if isinstance(node, list) else node.get(key)
    if child is None or isinstance(child, str):
        child = node[key] = (
            {} if child is None else {"path" if key == "pretrained" else "name": child}
        )
    return child


def place(node, key, text):
    """The key of an object, or the index in a list."""
    if isinstance(node, dict):
        return key
    if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
        return int(key)
    raise UserError(f"{text!r}: there is no place {key!r} in {show(node)}")


def show(value):
    """A JSON value as it stands in the file, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
