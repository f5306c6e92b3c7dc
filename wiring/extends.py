"""`extends` in a config: the files on which it is based, merged in order, and from which of them
each value is."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from utils import UserError

MOST_FILES = 100
COMMAND_LINE = "command line"
# Options for which null is a value that differs from the default, so null does not delete them.
NULL_IS_A_VALUE = (("training", "epochs"), ("checkpoint", "keep"), ("checkpoint", "monitor"))


class Layer(NamedTuple):
    """What one file, or one override, says; a later layer wins."""

    source: str
    says: dict


def layers_of(path: Path, read_object: Callable[[Path], dict[str, Any]]) -> list[Layer]:
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


def table_of_sources(
    config: dict[str, Any], layers: Sequence[Layer], show: Callable[[Any], str]
) -> str:
    """One line for each value of a config that is not a default, with the file it is from."""
    rows = [(f"{path} = {show(value)}", source_of(path, layers)) for path, value in leaves(config)]
    width = max(len(value) for value, _ in rows)
    return "\n".join(f"{value:<{width}}  {source}" for value, source in rows)
