"""The JSON file of a config: how it is read, merged with the files that it extends, overridden, and
when it is refused."""

import argparse
import copy
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from utils import UserError, cut
from utils.files import DEEPEST, is_deep, parse_json, read_value
from utils.forms import local, show

# The parts of a config that names no others.
DEFAULT_PARTS = {"objective": "supervised", "schedule": "constant", "update": "gradient_update"}
LONGEST, MOST = 3000, 50  # characters of a problem, and problems, that are printed
LONGEST_NAME = 200  # bytes of the name of a folder; file systems take 255

MOST_FILES = 100
COMMAND_LINE = "command line"
# Options for which null is a value that differs from the default, so null does not delete them.
NULL_IS_A_VALUE = (("training", "epochs"), ("checkpoint", "keep"), ("checkpoint", "monitor"))


class Layer(NamedTuple):
    """What one file, or one override, says; a later layer wins."""

    source: str
    says: dict


def read(path: str | Path, overrides: Iterable[str] = (), trusted: bool = True) -> dict[str, Any]:
    """The config at `path` with `key.path=value` overrides; its parts are not checked yet.

    A config that is not `trusted` may not say which hosts are contacted; an override may.
    """
    return read_layers(path, overrides, trusted)[0]


def read_layers(
    path: str | Path, overrides: Iterable[str] = (), trusted: bool = True
) -> tuple[dict[str, Any], list[Layer]]:
    """(the config, the Layers that it is made of: the files that it extends, itself, overrides)."""
    path = Path(path).expanduser()
    if trusted:
        layers = layers_of(path)
    else:
        layers = [Layer(str(path), read_object(path))]
        refuse_untrusted(path, layers[0].says)
    config = layers[0].says
    for layer in layers[1:]:
        config = merged(config, layer.says)
    for text in overrides:
        config = override(config, text)
    return config, [*layers, *map(of_override, overrides)]


def refuse_untrusted(path: str | Path, config: dict[str, Any]) -> None:
    """Refuse a config of a run, which may come from anyone, if it names other files or hosts."""
    if config.get("distributed"):
        fix = "remove it, and pass it as an override, as in distributed.coordinator=none"
        why = "a config that is not known to be your own does not name hosts"
        raise UserError(f"{path}: distributed: {why}; {fix}, or pass --trust if you trust it")
    if "extends" in config:
        why = "a config that is not known to be your own does not name other files"
        fix = "remove it, name the config with -c, or pass --trust if you trust it"
        raise UserError(f"{path}: extends: {why}; {fix}")


def refuse_elsewhere(path: Path, config: dict[str, Any], layers: Sequence[Layer]) -> None:
    """Refuse the config.json of the working folder if its new runs would be outside of that folder,
    unless the `layers` of read_layers show that the user has overridden `checkpoint.dir`."""
    if source_of("checkpoint.dir", layers) == COMMAND_LINE:
        return
    section = config.get("checkpoint", {})
    folder = section.get("dir", "saved") if isinstance(section, dict) else None
    names = [folder, config.get("title", "run"), config.get("run_name") or ""]
    if not all(isinstance(name, str) and "\0" not in name for name in names):
        return  # the check of the config refuses them
    here = path.absolute().parent
    runs = here.joinpath(os.path.expanduser(str(folder)), names[1])
    # Links are followed, since one that lies in the folder may lead anywhere.
    real = [Path(os.path.realpath(place)) for place in (runs, runs / names[2])]
    if outside := [place for place in real if not place.is_relative_to(here.resolve())]:
        shown = cut(str(outside[0]), 200)
        why = f"its runs would be written to {shown}, outside of this config's folder"
        fix = "override it, as in checkpoint.dir=saved, name the config with -c, or pass --trust"
        raise UserError(f"{path}: checkpoint.dir: {why}; {fix} if you trust it")


def read_object(path: str | Path) -> dict[str, Any]:
    """The object in one file."""
    absent = "name a config with -c, as in: python train.py -c config.json"
    config = read_value(path, absent, object_pairs_hook=without_repeats)
    if not isinstance(config, dict):
        raise UserError(f"{path}: must contain an object {{...}}, found {show(config)}")
    return config


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; raises if it has a key twice."""
    result = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} occurs twice in one object; keep one of them")
        result[key] = value
    return result


def text_of_problems(
    problems: Sequence[str], source: str | None, layers: Sequence[Layer] = ()
) -> str:
    """The problems of a config, one per line, each starting with the name of the config, or of the
    file that it extends if the value is from there."""
    parents = [layer.source for layer in layers if layer.source != COMMAND_LINE][:-1]
    sources = [source_of(problem.partition(":")[0], layers) for problem in problems[:MOST]]
    named = [each if each in parents else source for each in sources]
    lines = [cut(f"{a}: {b}", LONGEST) for a, b in zip(named, problems, strict=False)]
    more = len(problems) - len(lines)
    return "\n".join([*lines, f"{source}: {more} more problems"] if more else lines)


def no_folder_name(value: Any) -> str:
    """Why a value cannot name a folder; "" if it can."""
    is_name = isinstance(value, str) and value.strip(". ") and value.isprintable()
    if not is_name or set(value) & set("/\\"):
        return f"found {show(value)}"
    size = len(value.encode())
    return "" if size <= LONGEST_NAME else f"which takes at most {LONGEST_NAME} bytes, found {size}"


def unusable(config: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """(path, why) of the values that no part of a config could use."""
    if is_deep(config):
        return [("config", f"is nested more than {DEEPEST} levels deep")]
    return unusable_values(config)


def unusable_values(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, why) of every text that cannot be printed or name a file, and of every number that is
    not finite."""
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list | tuple) else items
    for key, inner in items:
        yield from unusable_values(key, path)
        yield from unusable_values(inner, f"{path}.{key}".lstrip("."))
    if isinstance(value, str) and (bad := re.search("[\0\ud800-\udfff]", value)):
        yield path, f"must not contain the character {show(bad[0])}, found {show(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        yield path, f"must be a finite number, found {show(value)}"


def parse_words(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a command line that takes overrides, which are words without an option."""
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    for name, value in vars(arguments).items():
        texts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        if name != "overrides" and not all(map(local.holds, filter(None, texts))):
            parser.error(f"--{name}: must be {local.words}, got {' '.join(texts)}")
    if not unknown:
        return arguments
    words, fix = sys.argv[1:] if argv is None else list(argv), ""
    option, value = unknown[0].lstrip("-").partition("=")[::2]
    after = words[words.index(unknown[0]) + 1 :] if unknown[0] in words else []
    if "." in option:
        fix = f"; an override is no option, write {option}={value or (after or ['VALUE'])[0]}"
    elif after and "=" in after[0]:
        fix = f"; an override needs no option, write {after[0]} alone"
    return parser.error(f"unrecognized arguments: {' '.join(unknown)}{fix}")


def override(config: dict[str, Any], text: str) -> dict[str, Any]:
    """The config with one `path.to.key=value` applied; a value that is not JSON is a string."""
    key_path, equals, value = text.partition("=")
    if not equals or not all(key_path.split(".")):
        raise UserError(
            f"{text!r}: an override has the form path.to.key=value, as in optimizer.args.lr=0.01"
        )
    try:
        value = parse_json(value, object_pairs_hook=without_repeats)
    except json.JSONDecodeError:
        pass  # it is a string without quotes
    except ValueError as error:
        raise UserError(f"{cut(text, 100)!r}: {error}") from error
    *keys, last = key_path.split(".")
    config = node = copy.deepcopy(config)
    if keys and keys[0] in DEFAULT_PARTS:
        config.setdefault(keys[0], DEFAULT_PARTS[keys[0]])
    for key in keys:
        node = descend(node, key, text)
    node[key_or_index(node, last, text)] = value
    return config


def descend(node: Any, key: str, text: str) -> dict[str, Any] | list:
    """The object or list under `key`, created if it is missing.

    A string there becomes {"name": string}, or {"path": string} for pretrained weights.
    """
    place = key_or_index(node, key, text)
    child = node[place] if isinstance(node, list) else node.get(place)
    if child is None:
        child = node[place] = {}
    elif isinstance(child, str):
        child = node[place] = {"path" if key == "pretrained" else "name": child}
    return child


def key_or_index(node: Any, key: str, text: str) -> Any:
    """The key of an object, or the index in a list as an int."""
    if isinstance(node, dict):
        return key
    if isinstance(node, list) and key.isdecimal() and len(key) < 10 and int(key) < len(node):
        return int(key)
    raise UserError(f"{text!r}: there is no key or index {key!r} in {show(node)}")


# `extends`: the files on which a config is based, merged in order, and from which each value is.


def layers_of(path: Path) -> list[Layer]:
    """The layers of the config at `path`: its parents in order, and the file itself last. A file
    that is reached twice is taken once, where it comes first."""
    layers, done = [], set()

    def add(path: Path, above: list[Path]) -> None:
        file = path.resolve()
        if file in above:
            circle = " -> ".join(f.name for f in [*above[above.index(file) :], file])
            raise UserError(f"{above[-1]}: extends: {circle} is a circle; remove one of them")
        if file in done:
            return
        if len(done) + len(above) >= MOST_FILES:
            raise UserError(f"{path}: extends: a config can have at most {MOST_FILES} files")
        says = dict(read_object(path))
        for parent in parents_of(path, says):
            add(parent, [*above, file])
        done.add(file)
        layers.append(Layer(str(path), says))

    add(path, [])
    return layers


def parents_of(path: Path, says: dict[str, Any]) -> list[Path]:
    """The paths that `extends` names, relative to the file; removes `extends` from `says`."""
    named = says.pop("extends", [])
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"{path}: extends: must be a path or a list of paths, found {named!r:.60}")
    files = [Path(os.path.normpath(path.parent / Path(name).expanduser())) for name in names]
    for name, file in zip(names, files, strict=True):
        if "\0" in name or not file.exists():
            raise UserError(
                f"{path}: extends: {name!r}: there is no such file ({file}); "
                f"paths are relative to the file that names them"
            )
    return files


def merged(
    base: dict[str, Any], over: dict[str, Any], path: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The object `base` changed by `over`: objects are merged, null deletes a key, and any other
    value replaces the old one. A part with another name replaces the part and its args."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key, {} if isinstance(value, dict) else None)
        inner = object_under(key, old, value)
        if isinstance(value, dict) and inner is not None:
            result[key] = merged(inner, value, (*path, key))
        elif value is None and deletes((*path, key), key in result):
            result.pop(key, None)
        else:
            result[key] = value
    return result


def deletes(path: tuple[str, ...], is_there: bool) -> bool:
    """Whether null at a path deletes the value. If there is none in the args of a part, null is the
    argument's value."""
    return path not in NULL_IS_A_VALUE and (is_there or "args" not in path)


def object_under(key: str, old: Any, new: Any) -> dict[str, Any] | None:
    """The object into which a new one is merged, or None if the new one replaces it. A name alone
    is a part without args."""
    if isinstance(old, str) and isinstance(new, dict) and "name" not in new:
        return {"path" if key == "pretrained" else "name": old}
    if not isinstance(old, dict) or not isinstance(new, dict):
        return None
    names = old.get("name"), new.get("name")
    renamed = all(isinstance(name, str) for name in names) and names[0] != names[1]
    return None if renamed and key != "args" else old


def of_override(text: str) -> Layer:
    """The Layer of one `path.to.key=value`; which value it is does not matter."""
    says: Any = True
    for key in reversed(text.partition("=")[0].split(".")):
        says = {key: says}
    return Layer(COMMAND_LINE, says)


def source_of(path: str, layers: Sequence[Layer]) -> str | None:
    """The file, or the command line, that gave the value at a path; None for a default."""
    return next((source for source, says in reversed(layers) if says_at(says, path)), None)


def says_at(node: Any, path: str) -> bool:
    """Whether an object sets a path, or replaces an object that holds it."""
    if not isinstance(node, dict) or path in node:
        return True
    # A key may contain dots, such as the keys of training.vary.
    places = [i for i, character in enumerate(path) if character == "."]
    return any(path[:i] in node and says_at(node[path[:i]], path[i + 1 :]) for i in places)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of all values in nested objects; a list is one value."""
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for key, inner in value.items():
        yield from leaves(inner, f"{path}.{key}".lstrip("."))


def table_of_sources(config: dict[str, Any], layers: Sequence[Layer]) -> str:
    """One line for each value of a config that is not a default, with the file it is from."""
    rows = [(f"{path} = {show(value)}", source_of(path, layers)) for path, value in leaves(config)]
    width = max(len(value) for value, _ in rows)
    return "\n".join(f"{value:<{width}}  {source}" for value, source in rows)
