"""The kinds of parts: where each is defined, what it must be, and how it is recognized.

Nothing is registered: a part is a public function in a home of its kind that is annotated to return
the kind.
"""

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple, TypeGuard

from utils import PACKAGE, UserError, where_and_why


class Kind(NamedTuple):
    """Where the parts of a kind are defined, and how they are recognized."""

    name: str
    homes: tuple[str, ...]  # modules, or packages of which every module counts
    marker: str  # module:name of the return annotation
    form: str  # the words for what a part must be
    example: str  # where docs/ has an example
    given: int = 0  # how many arguments are passed at run time; 0: the function is a factory
    attributes: tuple[str, ...] = ()  # attributes that the result of a factory must have
    some: tuple[str, ...] = ()  # attributes of which it must have one; "on_*" is any hook


OTHER = "other_libraries.md"
OWN, CALLBACKS = "add_your_own.md", "training.watching.callbacks"
KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "model",
            ("model",),
            "model.base:Model",
            "a function that returns Model(init, apply): init(key) -> (params, state), "
            "apply(params, state, x, *, train=False, key=None) -> (output, state)",
            f"{OWN}#a-model, one of another library in {OTHER}",
            attributes=("init", "apply"),
        ),
        Kind(
            "data",
            ("data_loader",),
            "data_loader.base:Data",
            "a function that returns Data(example, sizes, load)",
            f"{OWN}#a-dataset",
            attributes=("example", "sizes", "load"),
        ),
        Kind(
            "preprocess",
            ("training.preprocess",),
            "training.base:Preprocessed",
            "a function (x) -> x of one example",
            f"{OWN}#preprocessing-and-augmentation",
            given=1,
        ),
        Kind(
            "augment",
            ("training.augment",),
            "training.base:Augmented",
            "a function (key, x) -> x, or (key, x, target) -> (x, target), of one example",
            f"{OWN}#preprocessing-and-augmentation",
            given=2,
        ),
        Kind(
            "loss",
            ("training.loss",),
            "training.base:Loss",
            "a function (output, target) -> a number, of one example",
            f"{OWN}#a-loss",
            given=2,
        ),
        Kind(
            "metrics",
            ("training.metrics",),
            "training.base:Metric",
            "a function (output, target) -> a number, of one example",
            f"{OWN}#a-metric",
            given=2,
        ),
        Kind(
            "objective",
            ("training.objective", "training.objectives", "training.checkpoint.distillation"),
            "training.base:Objective",
            "a function (model, loss, metrics, preprocess, augment) -> Objective",
            f"{OWN}#an-objective",
            given=5,
        ),
        Kind(
            "optimizer",
            ("training.optimizers", "training.transforms"),
            "training.base:Optimizer",
            "a function that returns Optimizer(init, update), or Optax's GradientTransformation",
            f"{OWN}#an-optimizer",
            attributes=("init", "update"),
        ),
        Kind(
            "schedule",
            ("training.schedules",),
            "training.base:Schedule",
            "a function that returns a function: step -> multiplier of the learning rate",
            f"{OWN}#a-schedule",
            attributes=("__call__",),
        ),
        Kind(
            "update",
            ("training.update", "training.objectives"),
            "training.base:Update",
            "a function (objective, optimizer) -> Update",
            f"{OWN}#an-update",
            given=2,
        ),
        Kind(
            "callbacks",
            (CALLBACKS,),
            "training.base:Callback",
            "a function that returns an object with methods such as on_steps(run)",
            f"{OWN}#a-callback",
            some=("on_*", "metrics", "needs"),
        ),
        Kind(
            "trackers",
            ("training.watching.trackers",),
            "training.base:Tracker",
            "a function that returns an object with methods such as scalars(step, values)",
            f"{OWN}#a-tracker",
            some=("start", "scalars", "image", "histogram", "finish"),
        ),
        Kind(
            "collate_fn",
            ("data_loader.loader",),
            "data_loader.base:Batch",
            "a function: list of examples -> batch",
            "batches.md#batches",
            given=1,
        ),
        Kind(
            "tokenizer",
            ("data_loader.tokenizers",),
            "data_loader.base:Tokenizer",
            "a function that returns a Tokenizer: encode(text) -> tokens, decode(tokens) -> text",
            "language_models.md#tokenizers",
            some=("encode", "train"),
        ),
        Kind(
            "parse",
            ("data_loader.records",),
            "data_loader.base:Parsed",
            "a function: the bytes of a record -> example",
            "data.md#record-files",
            given=1,
        ),
    )
}

# {module of a class of another library: the adapter that makes it a model (model/adapters.py)}
ADAPTERS = {"flax.nnx": "nnx", "flax.linen": "linen", "equinox": "equinox", "haiku": "haiku"}

PLURAL = ("metrics", "callbacks", "trackers")  # kinds whose name is a plural


@cache
def marker(kind: str) -> Any:
    """The annotation object of a kind."""
    module, name = KINDS[kind].marker.split(":")
    return getattr(importlib.import_module(PACKAGE + module), name)


def kind_of(annotation: object) -> str | None:
    """The kind whose return annotation this is, or None."""
    return next((kind for kind in KINDS if marker(kind) is annotation), None)


@cache
def find(kind: str) -> tuple[dict[str, Callable], dict[str, str]]:
    """({name: function}, {module: import error}) of a kind; a broken module hides its own parts."""
    functions, broken = {}, {}
    for module_name in modules(KINDS[kind].homes):
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:  # a user's file may fail in any way
            broken[module_name] = where_and_why(error)
            continue
        for name, function in vars(module).items():
            if not is_part(function, name, module_name, kind):
                continue
            if name in functions:
                both = f"{functions[name].__module__} and in {module_name}"
                raise UserError(f"{kind} {name!r} is defined in {both}; rename one of them")
            functions[name] = function
    return functions, broken


def modules(homes: Iterable[str]) -> Iterator[str]:
    """The names of all modules in the homes of a kind."""
    for home in [PACKAGE + home for home in homes]:
        spec = importlib.util.find_spec(home)
        assert spec is not None
        folders = spec.submodule_search_locations
        if folders is None:
            yield home
        else:
            yield from (f"{home}.{m.name}" for m in pkgutil.iter_modules(folders) if not m.ispkg)


def is_part(function: object, name: str, module_name: str, kind: str) -> TypeGuard[FunctionType]:
    """Whether this is a public function of the module that is annotated to return the kind."""
    if not inspect.isfunction(function) or function.__module__ != module_name:
        return False
    return not name.startswith("_") and makes(function, kind)


def makes(function: object, kind: str) -> bool:
    """Whether a function is annotated to return the kind."""
    returned = getattr(function, "__annotations__", {}).get("return")
    return returned is marker(kind) or returned == marker(kind).__name__


def is_a(made: object, kind: str) -> bool:
    """Whether the result of a factory has what its kind requires."""
    if made is None or isinstance(made, type):
        return False
    return not lacking(kind, set(dir(made)))


def lacking(kind: str, present: Collection[str]) -> str:
    """The words for what a part of a kind with these attributes lacks; "" if nothing."""
    wanted, some = KINDS[kind].attributes, KINDS[kind].some
    missing = [name for name in wanted if name not in present]
    if "on_*" in some:
        some += tuple(name for name in present if name.startswith("on_"))
    has_some = any(name in present for name in some)
    return " and ".join(missing) if missing or has_some else " or ".join(some)


def requirement(kind: str) -> str:
    """The words that say what a part of a kind must be, and where an example is."""
    article = "an" if kind[0] in "aeiou" else "a"
    subject = f"an entry of {kind}" if kind in PLURAL else f"{article} {kind}"
    subject = kind if kind == "data" else subject
    return f"{subject} must be {KINDS[kind].form}; example: docs/{KINDS[kind].example}"


def why_not(function: Callable, kind: str) -> str:
    """Why a class, such as one of another library, cannot be a part; "" for a function, or if the
    class alone does not show that."""
    if not inspect.isclass(function):
        return ""
    if KINDS[kind].given:
        return "is a class; " + requirement(kind)
    if kind == "model" and (adapter := adapter_for(function)):
        args = f'{{"module": "{function.__module__}.{function.__qualname__}"}}'
        fix = f'{{"name": "{adapter}", "args": {args}}}'
        return f"is a class of {adapter}; name it as {fix}: docs/{OTHER}"
    present = {*dir(function), *annotations_of(function), *set_by_init(function)}
    if missing := lacking(kind, present):
        return f"is a class without {missing}; {requirement(kind)}"
    apply = getattr(function, "apply", None)  # an instance may get its own in __init__
    if kind == "model" and apply and not takes_params_and_state(apply):
        return f"is a class whose `apply` takes other arguments; {requirement(kind)}"
    return ""


def adapter_for(cls: type) -> str | None:
    """The adapter for the library whose module a class extends; None for other classes."""
    names = [f"{base.__module__}." for base in cls.__mro__]
    matches = (a for m, a in ADAPTERS.items() for name in names if name.startswith(f"{m}."))
    return next(matches, None)


def annotations_of(cls: type) -> set[str]:
    """The names of the annotated fields of a class and its bases."""
    found = (vars(base).get("__annotations__") for base in cls.__mro__)
    return {name for names in found if isinstance(names, dict) for name in names}


def set_by_init(cls: type) -> tuple[str, ...]:
    """The names that the __init__ of a class may set as attributes."""
    return getattr(getattr(cls.__init__, "__code__", None), "co_names", ())


def takes_params_and_state(apply: Callable) -> bool:
    """Whether a method takes at least self, params, state and x, by position."""
    try:
        parameters = inspect.signature(apply).parameters.values()
    except (TypeError, ValueError):
        return True
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) >= 4
