"""Find the function that a name in a config means, and say which arguments it takes."""

import inspect
import re
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any

from training.kinds import KINDS, find, kind_of, marker, modules
from utils import UserError, did_you_mean, parameters_of, where_and_why
from utils.forms import BuildPart, Form, form
from wiring.own_modules import hidden_file, import_from, own_parts

# Facts that come from the data; they fill parameters of the same name that the config leaves out.
FACTS = ("input_shape", "num_classes", "vocab_size", "steps_per_epoch", "total_steps")
FACTS += ("bytes_per_token", "columns")
# Facts that, if the data has them, replace the default of a parameter of the same name.
NEW_DEFAULTS = ("ignore_label",)
# {kind: the arguments that training passes to its parts}
GIVEN = {"update": ("accumulate", "ema", "unroll"), "augment": ("target",)}
LINK = r"\[([^][]*)\]\(#[^)]*\)"  # to a section of docs/parts.md
# {module: its package} of libraries whose parts a config often names.
INSTALLED_AS = {"flax": "flax", "equinox": "equinox", "haiku": "dm-haiku", "optax": "optax"}


def form_of(annotation: Any) -> Form:
    """What an annotation accepts in a config, where parts are named."""
    return form(annotation, part_form)


def part_form(annotation: Any) -> Form | None:
    """The Form of a part, of a section, or of a function or class with a dotted name; None for
    other annotations."""

    def read(value: Any, path: str, part: BuildPart | None = None) -> Any:
        return part(annotation, value, path) if part else value

    if annotation is Callable:
        return Form("a dotted name", "Callable", {}, read)
    if is_dataclass(annotation) and isinstance(annotation, type):
        name = annotation.__name__.removesuffix("Options").lower()  # the key of the section
        shown = f"[a section](#section-{name})"
        return Form("an object", shown, {"$ref": f"#/$defs/{name}"}, read)
    if (kind := kind_of(annotation)) is None:
        return None
    shown = f"a part: [{kind}](#parts-{kind})"
    return Form(f"a part: {kind}", shown, part_schema(kind), read, parts=frozenset([kind]))


def part_schema(kind: str) -> dict[str, Any]:
    """The JSON schema of a part; a list of optimizers is a chain."""
    part = {"$ref": f"#/$defs/{kind}"}
    chain = {"type": "array", "items": part, "minItems": 1}
    return {"anyOf": [part, chain]} if kind == "optimizer" else part


def full_name(kind: str, name: str, folders: Sequence[Path]) -> str:
    """The dotted name for a plain name that a user's file in these folders defines; other names
    unchanged."""
    return own_parts(marker(kind).__name__, folders)[0].get(name, name)


def resolve(kind: str | None, name: str, folders: Sequence[Path] = ()) -> Callable:
    """The function of this name; the error for an unknown name suggests the nearest and all.

    A dotted name may be that of a module in one of the folders.
    """
    if "." in name:
        return imported(name, folders)
    assert kind
    functions, broken = find(kind)
    if name in functions:
        return functions[name]
    annotation = marker(kind).__name__
    own, others = own_parts(annotation, folders)
    known = sorted({*functions, *own})
    lines = [f"no {kind} {name!r}{did_you_mean(name, known)} ({', '.join(known)})"]
    if name in others:
        lines.append(f"{others[name]} has a function {name!r}, but without `-> {annotation}`")
    for module_name in modules(KINDS[kind].homes):
        function = getattr(sys.modules.get(module_name), name, None)
        if inspect.isfunction(function) and function.__module__ == module_name:
            lines.append(f"{module_name} has a function {name!r}, but without `-> {annotation}`")
    raise UserError("\n".join(lines + import_errors(broken)))


def import_errors(broken: dict[str, str]) -> list[str]:
    """One line for each module that cannot be imported."""
    return [f"{module} cannot be imported: {why}" for module, why in broken.items()]


def imported(dotted: str, folders: Sequence[Path] = ()) -> Callable:
    """The function or class of a dotted name, such as optax.lion."""
    module_name, _, name = dotted.rpartition(".")
    try:
        module = import_from(folders, module_name)
    except (Exception, SystemExit) as error:  # a user's file may fail in any way
        why = error if isinstance(error, ImportError) else where_and_why(error)
        raise UserError(f"{dotted!r} cannot be imported: {why}{to_install(error)}") from error
    if not callable(getattr(module, name, None)):
        hint = hidden_file(module, folders) or did_you_mean(name, dir(module))
        raise UserError(f"{module_name} has no function {name!r}{hint}")
    return getattr(module, name)


def failure(factory: Callable, error: BaseException) -> str:
    """The message for an error in a user's factory."""
    ends = "it ends the program" if isinstance(error, SystemExit) else where_and_why(error)
    return f"{name_of(factory)} fails: {ends}{to_install(error)}"


def name_of(factory: Callable) -> str:
    """The name of a function; other callable objects may have none."""
    return getattr(factory, "__name__", type(factory).__name__)


def to_install(error: BaseException) -> str:
    """How to install the library that an import did not find; "" for other errors and modules."""
    package = INSTALLED_AS.get(f"{error.name}") if isinstance(error, ModuleNotFoundError) else None
    return f"; pip install {package}" if package else ""


def config_arguments(kind: str, function: Callable) -> dict[str, Parameter]:
    """{name: Parameter} of the arguments that a config can give to a part of this kind."""
    accepted = arguments(function, KINDS[kind].given)
    return {name: p for name, p in accepted.items() if name not in GIVEN.get(kind, ())}


def arguments(function: Callable, given: int = 0) -> dict[str, Parameter]:
    """{name: Parameter} of the arguments that a config can give, with resolved annotations.

    The first `given` parameters are left out.
    """
    try:
        annotated = function.__init__ if inspect.isclass(function) else function
        hints = typing.get_type_hints(annotated, include_extras=True)
    except Exception:  # annotations of other libraries may not resolve
        hints = {}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = list(parameters_of(function).values())[given:]
    return {
        p.name: p.replace(annotation=hints.get(p.name, p.annotation))
        for p in parameters
        if p.kind not in variadic
    }


def signature(name: str, accepted: dict[str, Parameter]) -> str:
    """The text of a call of a function: name(arg=default, ...)."""
    shown = [
        p.name if p.default is p.empty else f"{p.name}={shown_default(p.default)}"
        for p in accepted.values()
    ]
    return f"{name}({', '.join(shown)})"


def shown_default(value: Any) -> str:
    """The text of a default: a function or class by its name, another object as dots."""
    text = getattr(value, "__name__", repr(value))
    return "..." if " object at 0x" in text else text


def listing(kind: str) -> str:
    """All parts of a kind, each with its signature, the summary of its docstring, its import and
    the types of its arguments."""
    functions, broken = find(kind)
    lines = [f"{kind}:"]
    for name, function in functions.items():
        lines.append(f"  {signature(name, arguments(function, KINDS[kind].given))}")
        lines.append(f"      {summary(function)}")
        lines.append(f"      {import_of(function)}")
        for key, parameter in config_arguments(kind, function).items():
            shown = re.sub(LINK, r"\1", form_of(parameter.annotation).shown).replace("`", "")
            lines.append(f"      {key}: {shown}")
    return "\n".join(lines + [f"  {line}" for line in import_errors(broken)])


def import_of(function: Callable) -> str:
    """The line that imports a part."""
    return f"from {function.__module__} import {function.__name__}"


def summary(function: Callable | ModuleType) -> str:
    """The first paragraph of a docstring as one line, '' without a docstring."""
    return " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
