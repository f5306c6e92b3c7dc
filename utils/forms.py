"""What an argument accepts, read from its annotation.

`form(annotation)` is the only function that interprets annotations: the check of a call, that of a
config, the JSON schema and the pages of docs/ are all made from it. A range is declared once, in
an annotation such as `lr: Positive`.
"""

import functools
import inspect
import json
import math
import operator
import os
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from utils import UserError, did_you_mean


def show(value: Any) -> str:
    """A value as JSON text, cut to 60 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def require(arguments: dict[str, Any], is_valid: Callable[[Any], bool], requirement: str) -> None:
    """Raise for the first of the arguments that is not valid, and say what it must be."""
    for name, value in arguments.items():
        if not is_valid(value):
            raise ValueError(f"{name}: must be {requirement}, got {value}")


LIMITS = {
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "maximum": operator.le,
    "exclusiveMaximum": operator.lt,
}


class Range:
    """The numbers that an argument accepts: in words, and as keywords of JSON Schema.

    A call with arguments, as in `positive(rate=rate)`, raises a ValueError that starts with the
    name of the first one out of range.
    """

    def __init__(self, words: str, **keywords: Any) -> None:
        self.words, self.keywords = words, keywords

    def __call__(self, **arguments: Any) -> None:
        require(arguments, self.holds, self.words)

    def fault(self, value: Any, given: Any) -> str:
        """What is wrong with a value, which was `given` in JSON; "" if nothing."""
        return "" if self.holds(value) else f"must be {self.words}, got {show(given)}"

    def holds(self, x: Any) -> bool:
        """Whether this is a number, finite and in the range. An input of a compiled program is
        accepted, since its numbers were checked before (training.vary)."""
        if is_traced(x):
            return True
        try:
            inside = all(LIMITS[key](x, limit) for key, limit in self.keywords.items())
            return inside and x < math.inf
        except TypeError:
            return False


class LocalRange(Range):
    """The paths of this machine. A URL is refused, since it would be read, or made, as a folder
    such as `gs:`."""

    def holds(self, x: Any) -> bool:
        return re.match(self.keywords["pattern"], str(x)) is not None


def is_traced(x: Any) -> bool:
    """Whether this is an array that JAX is tracing, an input of a compiled program."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.core.Tracer)


class NeedsTrust:
    """Marks an argument by which a config reaches beyond its run, as by a file elsewhere or a
    server: training refuses values for which `reaches(value)` holds in a config that the user does
    not trust. `effect` says what such a value does."""

    def __init__(self, effect: str, reaches: Callable[[Any], bool]) -> None:
        self.effect, self.reaches = effect, reaches


def at_least(smallest: float, **arguments: Any) -> Range:
    """The range of numbers of `smallest` or more; arguments are checked at once."""
    limit = Range(f"at least {smallest}", minimum=smallest)
    limit(**arguments)
    return limit


def at_most(largest: float) -> Range:
    """The range of numbers up to `largest`."""
    return Range(f"at most {largest}", maximum=largest)


positive = Range("a finite number above 0", exclusiveMinimum=0)
nonnegative = Range("a finite number, 0 or more", minimum=0)
fraction = Range("at least 0 and below 1", minimum=0, exclusiveMaximum=1)
share = Range("at least 0 and at most 1", minimum=0, maximum=1)
positive_share = Range("above 0 and at most 1", exclusiveMinimum=0, maximum=1)
between_0_and_1 = Range("above 0 and below 1", exclusiveMinimum=0, exclusiveMaximum=1)
local = LocalRange(
    "a local path (mount a bucket, as with rclone, or copy it)",
    pattern="^(?![A-Za-z][A-Za-z0-9+.-]+:/).",  # C:/ is a drive; pathlib makes gs:/ of gs://
)

# Annotations: a number with its range. A Fraction is a decay or momentum, a Share a probability.
SEEDS = 2**32  # how many there are
Seed = Annotated[int, Range(f"an integer from 0 to {SEEDS - 1}", minimum=0, maximum=SEEDS - 1)]
INT32 = at_most(2**31 - 1)  # the integers of devices have 32 bits
Count = Annotated[int, at_least(1), INT32]
CountOrZero = Annotated[int, at_least(0), INT32]
Positive = Annotated[float, positive]
NonNegative = Annotated[float, nonnegative]
Fraction = Annotated[float, fraction]
Share = Annotated[float, share]
PositiveShare = Annotated[float, positive_share]
LocalPath = Annotated[str, local]


# build(annotation, value, path): builds what names a part
BuildPart = Callable[[Any, Any, str], Any]
T = TypeVar("T", bound=Callable)


class Misfit(ValueError):
    """A value does not fit its annotation; `path` is its place."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path, self.message = path, message


class OutOfRange(Misfit):
    """A value of the right type is not in the range of its annotation, or lacks a key."""


class Form(NamedTuple):
    """What an annotation accepts."""

    words: str  # for a message, as in "must be an integer"
    shown: str  # for a page, with the range
    schema: dict  # the JSON schema
    # (value, path, part) -> the value as the code gets it; it raises Misfit. `part(annotation,
    # value, path)` builds what names a part; without it, values of parts are accepted unchanged.
    read: Callable
    marks: tuple = ()  # the NeedsTrust in the annotation
    parts: frozenset = frozenset()  # the kinds of parts in it


NAMES = {  # {type: (its words, its name in a JSON schema)}
    int: ("an integer", "integer"),
    float: ("a number", "number"),
    bool: ("true or false", "boolean"),
    str: ("a string", "string"),
    dict: ("an object", "object"),
    type(None): ("null", "null"),
}


def form(
    annotation: Any, part_form: Callable[[Any], "Form | None"] = lambda annotation: None
) -> Form:
    """The Form of an annotation. `part_form(annotation)` is that of a part, or None. An annotation
    that JSON cannot express accepts every value."""
    if own := part_form(annotation):
        return own
    origin, inner = get_origin(annotation), get_args(annotation)
    form_of = functools.partial(form, part_form=part_form)
    if origin is Annotated:
        return in_ranges(form_of(inner[0]), inner[1:])
    if origin in (typing.Required, typing.NotRequired):
        return form_of(inner[0])
    if origin in (Union, UnionType):
        return one_of([*map(form_of, inner)])
    if origin is Literal:
        return choice(inner)
    if annotation is tuple or origin is tuple:
        return sequence([*map(form_of, [kind for kind in inner if kind is not Ellipsis])], inner)
    if typing.is_typeddict(annotation):
        return keys_of(annotation, form_of)
    if origin is dict:
        return mapping(form_of(inner[1]))
    if (origin or annotation) in NAMES:
        return json_type(origin or annotation)
    name = getattr(annotation, "__name__", str(annotation))
    shown = {inspect.Parameter.empty: "any", list: "a list"}.get(annotation, name)
    return Form(shown, shown, {}, lambda value, path, part=None: with_tuples(value))


def json_type(kind: type) -> Form:
    """A number, a string, true or false, an object, or null. An integer is also a number, a truth
    value is not; NumPy's and JAX's numbers are numbers, too."""
    words, name = NAMES[kind]
    accepted = {int: "__index__", float: "__float__", str: "__fspath__"}.get(kind)

    def read(value: Any, path: str, part: BuildPart | None = None) -> Any:
        fits = isinstance(value, kind) or (accepted and hasattr(value, accepted))
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise Misfit(path, f"must be {words}, found {show(value)}")
        if kind is str and str(value).startswith(("~/", "~\\")):
            return os.path.expanduser(str(value))  # a path; no shell expands it in a file
        if kind is not float or type(value) is not int:
            return value
        try:
            return float(value)
        except OverflowError:
            raise Misfit(path, f"is too large for a number: {show(value)}") from None

    return Form(words, words, {"type": name}, read)


def choice(allowed: tuple) -> Form:
    """One of the values of a Literal."""

    def read(value: Any, path: str, part: BuildPart | None = None) -> Any:
        if not any(value == each and type(value) is type(each) for each in allowed):
            raise Misfit(path, f"found {show(value)}; allowed: {', '.join(map(show, allowed))}")
        return value

    words = " or ".join(map(show, allowed))
    shown = " or ".join(f"`{show(each)}`" for each in allowed)
    return Form(words, shown, {"enum": list(allowed)}, read)


def in_ranges(inner: Form, metadata: tuple) -> Form:
    """A value of the `inner` form that is in the ranges among the metadata of an annotation."""
    ranges = [each for each in metadata if isinstance(each, Range)]

    def read(value: Any, path: str, part: BuildPart | None = None) -> Any:
        converted = inner.read(value, path, part)
        for each in ranges:
            if fault := each.fault(converted, value):
                raise OutOfRange(path, fault)
        return converted

    words = [each.words.split(" (")[0] for each in ranges if each is not INT32]
    if not words or not words[0].startswith(("a ", "an ")):
        words = [inner.shown, *words]
    keywords = {key: value for each in ranges for key, value in each.keywords.items()}
    marks = tuple(each for each in metadata if isinstance(each, NeedsTrust))
    schema = inner.schema | keywords
    return Form(inner.words, ", ".join(words), schema, read, inner.marks + marks, inner.parts)


def one_of(choices: list[Form]) -> Form:
    """A value of one of several forms. Null is tried first, and a number last: an integer therefore
    stays an integer if both are accepted."""
    words = " or ".join(each.words for each in choices)
    order = {"null": 0, "a number": 2}
    in_order = sorted(choices, key=lambda each: order.get(each.words, 1))

    def read(value: Any, path: str, part: BuildPart | None = None) -> Any:
        for each in in_order:
            try:
                return each.read(value, path, part)
            except OutOfRange:
                raise
            except Misfit as misfit:
                if misfit.path != path:
                    raise  # the message says what is wrong inside the value
        raise Misfit(path, f"must be {words}, found {show(value)}")

    shown = [each.shown for each in choices]
    # The words of a range may name a value that is also a choice of its own: "or -1".
    named = {f"`{each.rsplit(', or ', 1)[-1]}`" for each in shown if ", or " in each}
    shown = [each for each in shown if each not in named]
    text = (", or " if any(", " in each for each in shown) else " or ").join(shown)
    return together(words, text, any_of([each.schema for each in choices]), read, choices)


def any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON schema of a value that one of several accepts."""
    first, last = schemas[0], schemas[-1]
    if len(schemas) == 2 and last == {"type": "null"} and isinstance(first.get("type"), str):
        return first | {"type": [first["type"], "null"]}
    return {"anyOf": schemas}


def sequence(items: list[Form], inner: tuple) -> Form:
    """A list, which becomes a tuple: of any length if the annotation ends with `...`."""
    is_open = not inner or inner[-1] is Ellipsis

    def read(value: Any, path: str, part: BuildPart | None = None) -> Any:
        if isinstance(value, str | dict) or not hasattr(value, "__len__"):
            raise Misfit(path, f"must be a list, found {show(value)}")
        if not inner:
            return with_tuples(value)
        kinds = items * len(value) if is_open else items
        if len(kinds) != len(value):
            raise Misfit(path, f"must be a list of {len(kinds)} items, found {show(value)}")
        return tuple(
            kind.read(item, f"{path}.{i}", part)
            for i, (kind, item) in enumerate(zip(kinds, value, strict=True))
        )

    schema: dict[str, Any] = {"type": "array"}
    if inner and is_open:
        schema["items"] = items[0].schema
    elif inner:
        schema |= {"items": [each.schema for each in items]}
        schema |= {"minItems": len(items), "maxItems": len(items)}
    shown = "a list"
    if inner:
        shown = f"[{', '.join([each.shown for each in items] + ['...'] * is_open)}]"
    return together("a list", shown, schema, read, items)


def mapping(each: Form) -> Form:
    """An object with any keys, whose values have one form."""

    def read(value: Any, path: str, part: BuildPart | None = None) -> Any:
        if not isinstance(value, dict):
            raise Misfit(path, f"must be an object, found {show(value)}")
        return {key: each.read(item, f"{path}.{key}", part) for key, item in value.items()}

    schema = {"type": "object", "additionalProperties": each.schema}
    return together("an object", f"{{name: {each.shown}}}", schema, read, [each])


def keys_of(annotation: Any, form_of: Callable[[Any], Form]) -> Form:
    """An object with the keys of a TypedDict."""
    hints = get_type_hints(annotation, include_extras=True)
    forms = {key: form_of(hint) for key, hint in hints.items()}
    required = sorted(annotation.__required_keys__)

    def read(value: Any, path: str, part: BuildPart | None = None) -> Any:
        if not isinstance(value, dict):
            raise Misfit(path, f"must be an object, found {show(value)}")
        for key in value:
            if key not in forms:
                raise Misfit(f"{path}.{key}", no_such_key(key, forms))
        if missing := [key for key in required if key not in value]:
            raise OutOfRange(path, f"needs {missing[0]!r}")
        return {key: forms[key].read(item, f"{path}.{key}", part) for key, item in value.items()}

    schema = {
        "type": "object",
        "properties": {key: each.schema for key, each in forms.items()},
        "required": required,
        "additionalProperties": False,
    }
    return together("an object", f"`{annotation.__name__}`", schema, read, forms.values())


def no_such_key(key: str, known: Iterable[str]) -> str:
    return f"no such key{did_you_mean(key, known)} ({', '.join(known)})"


def together(
    words: str, shown: str, schema: dict[str, Any], read: Callable, forms: Collection[Form]
) -> Form:
    """A Form made of others."""
    marks = tuple(mark for each in forms for mark in each.marks)
    parts = frozenset().union(*(each.parts for each in forms))
    return Form(words, shown, schema, read, marks, parts)


def with_tuples(value: Any) -> Any:
    """The value with all lists in it as tuples."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return tuple(map(with_tuples, value))
    return {k: with_tuples(v) for k, v in value.items()} if type(value) is dict else value


def misfits(forms: dict[str, Form], values: dict[str, Any]) -> Iterator[str]:
    """What is wrong with {name: value} by {name: Form}, one message each."""
    for name, value in values.items():
        if name in forms:
            try:
                forms[name].read(value, name)
            except Misfit as misfit:
                yield str(misfit)


def checked(function: T) -> T:
    """Check the arguments of every call of a function by its annotations."""
    names = list(inspect.signature(function).parameters)

    @functools.cache  # at the first call, when all names in the annotations are known
    def forms() -> dict[str, Form]:
        hints = get_type_hints(function, include_extras=True)
        return {name: form(hint) for name, hint in hints.items()}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        given = {name: given[name] for name in names if name in given}
        if problems := [*misfits(forms(), given)]:
            raise ValueError("\n".join(problems))
        return function(*args, **kwargs)

    return call  # pyright: ignore[reportReturnType]  # it is called as the function is


def check_options(options: Any) -> None:
    """Check every field of a dataclass by its annotation; raise all problems in one ValueError, one
    per line."""
    hints = get_type_hints(type(options), include_extras=True)
    forms = {name: form(hint) for name, hint in hints.items()}
    if problems := [*misfits(forms, vars(options))]:
        raise ValueError("\n".join(problems))


def local_path(name: str, path: str | os.PathLike[str]) -> Path:
    """A path that a user has named, with `~` expanded; `name` is its argument, for the error."""
    if not local.holds(path):
        raise UserError(f"{name}: must be {local.words}, got {path}")
    return Path(path).expanduser()


def check_takes(
    what: str, function: Callable, names: Collection[str], keywords: Collection[str] = ()
) -> None:
    """Refuse a function that cannot be called with as many arguments as there are names, and with
    these keywords."""
    with suppress(ValueError):  # it has no signature
        try:
            inspect.signature(function).bind(*names, **dict.fromkeys(keywords))
        except TypeError as error:
            own = getattr(function, "__name__", type(function).__name__)
            needed = f"must take ({', '.join(names)})"
            raise UserError(f"{what}: {own}{inspect.signature(function)} {needed}") from error


def regex(**arguments: str) -> None:
    """Require valid regular expressions."""
    for name, value in arguments.items():
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{name}: {value!r} is not a regular expression: {error}") from error
