"""Finding parts by name: public functions in their kind's home whose return annotation is the kind; nothing is registered.

A kind with `given` > 0 has functions whose first arguments the toolkit passes at run time; the config's args are the others.
"""

import difflib
import importlib
import inspect
import pkgutil
import sys
import typing
from functools import cache
from typing import NamedTuple

from utils import UserError, where_and_why


class Kind(NamedTuple):
    """Where the parts of a kind live, what their return annotation is called, and what their factories must answer."""

    name: str
    homes: tuple[str, ...]  # modules, or packages whose modules all count
    marker: str  # module:name of the return annotation
    given: int = 0
    attributes: tuple[str, ...] = ()  # of what a factory makes


KINDS = {
    kind.name: kind
    for kind in (
        Kind("model", ("model",), "model.base:Model", attributes=("init", "apply")),
        Kind(
            "data",
            ("data_loader",),
            "data_loader.base:Data",
            attributes=("example", "sizes", "load"),
        ),
        Kind("preprocess", ("training.preprocess",), "training.base:Preprocessed", given=1),
        Kind("augment", ("training.augment",), "training.base:Augmented", given=2),
        Kind("loss", ("training.loss",), "training.base:Loss", given=2),
        Kind("metrics", ("training.metrics",), "training.base:Metric", given=2),
        Kind("objective", ("training.objective",), "training.base:Objective", given=5),
        Kind(
            "optimizer",
            ("training.optimizers", "training.transforms"),
            "training.base:Optimizer",
            attributes=("init", "update"),
        ),
        Kind(
            "schedule", ("training.schedules",), "training.base:Schedule", attributes=("__call__",)
        ),
        Kind("update", ("training.update",), "training.base:Update", given=2),
        Kind("callbacks", ("training.watching.callbacks",), "training.base:Callback"),
        Kind("trackers", ("training.watching.trackers",), "training.base:Tracker"),
        Kind("collate_fn", ("data_loader.loader",), "data_loader.base:Batch", given=1),
        Kind("parse", ("data_loader.records",), "data_loader.base:Parsed", given=1),
    )
}

# Facts that only the data knows; they fill parameters of the same name that the config leaves out.
FACTS = ("input_shape", "num_classes", "vocab_size", "steps_per_epoch", "total_steps")


@cache
def marker(kind):
    """The annotation object of a kind."""
    module, name = KINDS[kind].marker.split(":")
    return getattr(importlib.import_module(module), name)


def kind_of(annotation):
    """The kind whose marker this annotation is, or None."""
    return next((kind for kind in KINDS if marker(kind) is annotation), None)


@cache
def find(kind):
    """({name: function}, {module: why it cannot be imported}) of a kind; a broken file hides only its own parts."""
    found, broken = {}, {}
    for module_name in modules(KINDS[kind].homes):
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:  # a user's file may fail in any way
            broken[module_name] = where_and_why(error)
            continue
        for name, function in vars(module).items():
            if is_part(function, name, module_name, kind):
                if name in found:
                    raise UserError(
                        f"{kind} {name!r} stands in {found[name].__module__} and in {module_name}; rename one of them"
                    )
                found[name] = function
    return found, broken


def modules(homes):
    """The names of the modules of some homes."""
    for home in homes:
        spec = importlib.util.find_spec(home)
        if spec.submodule_search_locations is None:
            yield home
        else:
            yield from (
                f"{home}.{m.name}"
                for m in pkgutil.iter_modules(spec.submodule_search_locations)
                if not m.ispkg
            )


def is_part(function, name, module_name, kind):
    """Whether this is a public function, defined there, that returns the kind."""
    if (
        not inspect.isfunction(function)
        or name.startswith("_")
        or function.__module__ != module_name
    ):
        return False
    returned = function.__annotations__.get("return")
    return returned is marker(kind) or returned == marker(kind).__name__


def resolve(kind, name):
    """The function of this name; an unknown name is answered with the nearest and with all."""
    if "." in name:
        return imported(name)
    found, broken = find(kind)
    if name in found:
        return found[name]
    message = f"no {kind} {name!r}{did_you_mean(name, found)} ({', '.join(sorted(found))})"
    unmarked = [
        f"{home} has a function {name!r}, but without `-> {marker(kind).__name__}`"
        for home in defining(kind, name)
    ]
    raise UserError(
        "\n".join(
            [
                message,
                *unmarked,
                *(f"{module} cannot be imported: {why}" for module, why in broken.items()),
            ]
        )
    )


def defining(kind, name):
    """The modules of a kind that define a function of this name, as a part or not."""
    loaded = [sys.modules[home] for home in modules(KINDS[kind].homes) if home in sys.modules]
    return [
        module.__name__
        for module in loaded
        if inspect.isfunction(vars(module).get(name))
        and vars(module)[name].__module__ == module.__name__
    ]


def imported(dotted):
    """The object of a dotted name, as in optax.lion."""
    module_name, _, name = dotted.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{dotted!r} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:  # a user's file may fail in any way
        raise UserError(f"{dotted!r} cannot be imported: {where_and_why(error)}") from error
    if not callable(getattr(module, name, None)):
        raise UserError(f"{module_name} has no function {name!r}{did_you_mean(name, dir(module))}")
    return getattr(module, name)


def is_a(made, kind):
    """Whether a factory made what its kind promises."""
    return (
        made is not None
        and not isinstance(made, type)
        and all(hasattr(made, a) for a in KINDS[kind].attributes)
    )


def holds_kind(annotation, kind):
    """Whether an annotation is a kind's, or holds it, as in tuple[tuple[str, Optimizer], ...]."""
    return kind_of(annotation) == kind or any(
        holds_kind(inner, kind) for inner in typing.get_args(annotation)
    )


def section_options(place):
    """The dataclass of a section."""
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def did_you_mean(name, names):
    """'; did you mean ...?' where a name is near."""
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def arguments(function, given=0):
    """{name: Parameter with its annotation resolved} of what a config may give; the `given` first ones are the toolkit's."""
    try:
        hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except Exception:  # annotations of other libraries may not resolve
        hints = {}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = list(inspect.signature(function).parameters.values())[given:]
    return {
        p.name: p.replace(annotation=hints.get(p.name, p.annotation))
        for p in parameters
        if p.kind not in variadic
    }


def signature(name, accepted):
    """A part as one would call it: name(arg=default, ...)."""
    shown = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in accepted.values()
    ]
    return f"{name}({', '.join(shown)})"


def listing(kind):
    """The names of a kind, each with its signature and its first line of documentation."""
    found, broken = find(kind)
    lines = [f"{kind}:"]
    for name, function in found.items():
        lines.append(f"  {signature(name, arguments(function, KINDS[kind].given))}")
        lines.append(f"      {(inspect.getdoc(function) or '').split(chr(10))[0]}")
    return "\n".join(
        lines + [f"  {module} cannot be imported: {why}" for module, why in broken.items()]
    )
