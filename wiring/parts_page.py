"""docs/parts.md, generated from signatures: every part, and every option, that a config can name;
and docs/layers.md: every layer that a model can use.

`python -m wiring.parts_page` writes the files.
"""

import dis
import importlib
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any

from training.kinds import KINDS, find, modules
from training.options import comments
from utils.forms import show
from wiring import parts
from wiring.keys import config, keys, sections
from wiring.tree import EXTRA_KEYS

INTRODUCTION = """\
# The parts and options of a config

`make schema` writes this page from the signatures of the code, so it is always complete.
`python train.py --list KIND` prints the parts of one kind, with your own.
[docs/configure.md](configure.md) explains the config, [docs/add_your_own.md](add_your_own.md) how
to write a part.

A part is named by a string, `"adamw"`, or by an object with its arguments,
`{"name": "adamw", "args": {"lr": 0.01}}`. In a table of parts, a bold name is a part, with a link
to its source, and the line that imports it in Python; the rows below it are its arguments.
`[an integer, ...]` is a list of any length.
"""
LAYERS = """\
# The layers

`make schema` writes this page from the signatures in `model/layers/`. A bold row is a file, the
rows below it are its functions. `<layer>_init(key, ...)` returns the params of a layer,
`<layer>(params, x)` applies it. Import them as in
`from model.layers.linear import linear, linear_init`;
[a layer of your own](add_your_own.md#a-layer) is added in the same way.
"""
HEADS = ("option", "type", "default", "meaning")
LOAD = "LOAD_GLOBAL"  # the instruction that reads a global
INSIDE = ("forms", "conv_forms", "op")  # files of model/layers/ that hold no layers
ROOT = Path(__file__).resolve().parents[1]


def text() -> str:
    """The content of docs/parts.md."""
    whole = "## The keys of a config\n\n" + fields_of(keys(), config)
    options = [section(key, each) for key, each in sections().items()]
    return "\n".join([INTRODUCTION, whole, *options, *map(part_list, KINDS)])


def layers_text() -> str:
    """The content of docs/layers.md."""
    rows = []
    for name in modules(("model.layers",)):
        if name.rpartition(".")[2] not in INSIDE:
            module = importlib.import_module(name)
            rows.append((f"**{home(name)}**", parts.summary(module)))
            rows += [(code(call_of(f)), parts.summary(f)) for f in layers_of(module)]
    return LAYERS + "\n" + table(("file and its functions", "what it computes"), rows)


def layers_of(module: ModuleType) -> list[Callable]:
    """The functions of a module that a model calls, without those that only other functions of the
    module call, such as JAX's rules for derivatives."""
    functions = {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__
    }
    used = {name for f in vars(module).values() for name in globals_of(inspect.unwrap(f))}
    return [
        function
        for name, function in functions.items()
        if hasattr(function, "__wrapped__") or name.endswith("_init") or name not in used
        if not name.startswith("_") and not name.endswith(("_fwd", "_bwd", "_jvp"))
    ]


def globals_of(function: Any) -> Iterator[str]:
    """The names of the globals that a function uses, also in the functions inside it."""
    codes = [getattr(function, "__code__", None)]
    while codes:
        if current := codes.pop():
            yield from (i.argval for i in dis.get_instructions(current) if i.opname == LOAD)
            codes += [constant for constant in current.co_consts if inspect.iscode(constant)]


def call_of(function: Callable) -> str:
    """The text of a call of a function; a default that is a function is shown by its name."""
    names = {id(value): name for name, value in inspect.unwrap(function).__globals__.items()}
    shown = []
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        default = names.get(id(p.default)) if callable(p.default) else repr(p.default)
        shown.append(p.name if p.default is p.empty else f"{p.name}={default}")
    return f"{function.__name__}({', '.join(shown)})"


def section(key: str, options: type) -> str:
    """The options of a section that names no part."""
    title, accepted = f"## Section: {key}", parts.arguments(options)
    lines = [title, "", parts.summary(options), "", fields_of(accepted, options)]
    hints = typing.get_type_hints(options).values()
    nested = [each for hint in hints for each in typing.get_args(hint)]
    for kind in filter(typing.is_typeddict, nested):
        about = f"`{kind.__name__}` is an object with these keys."
        lines += [about, "", keys_of(kind)]
    return "\n".join(lines)


def fields_of(accepted: dict[str, Parameter], options: Callable) -> str:
    """The table of arguments, with their comments in the source of `options`."""
    texts = comments(options)
    rows = [
        (code(name), *argument(p)[1:], texts.get(name.lstrip("$"), ""))
        for name, p in accepted.items()
    ]
    return table(HEADS, rows)


def keys_of(options: Any) -> str:
    """The table of the keys of a TypedDict."""
    texts, needed = comments(options), options.__required_keys__
    rows = [
        (
            code(key),
            parts.form_of(hint).shown,
            "required" if key in needed else "",
            texts.get(key, ""),
        )
        for key, hint in typing.get_type_hints(options, include_extras=True).items()
    ]
    return table(HEADS, rows)


def part_list(kind: str) -> str:
    """All parts of a kind."""
    functions, _ = find(kind)
    lines = [f"## Parts: {kind}"]
    if kind in EXTRA_KEYS:
        about = "Besides `name` and `args`, the object of a part may have"
        lines += ["", f"{about} [these keys](watch.md#metrics):", "", extra(kind)]
    rows = [row for name, function in functions.items() for row in part_rows(kind, name, function)]
    homes = " and ".join(map(home, KINDS[kind].homes))
    heads = (f"parts in {homes}, and arguments", "what it does; type of an argument", "default")
    return "\n".join(lines) + "\n\n" + table(heads, rows)


def part_rows(kind: str, name: str, function: Callable) -> list[tuple[str, ...]]:
    """The rows of a part: itself, then its arguments."""
    accepted = parts.config_arguments(kind, function)
    # The data need not fill an argument whose default is a number.
    unset = [name for name, p in accepted.items() if p.default in (p.empty, None)]
    facts = [name for name in unset if name in parts.FACTS]
    about = parts.summary(function)
    if facts:
        about += f" Taken from the data if left out: {', '.join(map(code, facts))}."
    link = f"**[{name}]({target(function.__module__)})**"
    rows = [(link, f"{about} {code(parts.import_of(function))}", "")]
    return rows + [argument(p) for name, p in accepted.items() if name not in facts]


def extra(kind: str) -> str:
    """The table of the keys that a node of a kind may have besides name and args."""
    from training.base import Tracked

    hints, defaults = typing.get_type_hints(Tracked), Tracked._field_defaults
    rows = [
        (code(key), parts.form_of(hints[key]).shown, code(show(defaults[key])))
        for key in EXTRA_KEYS[kind]
    ]
    return table(("key", "type", "default"), rows).rstrip()


def argument(parameter: Parameter) -> tuple[str, str, str]:
    """(name, type, default) of a parameter."""
    required = parameter.default is parameter.empty
    default = "required" if required else code(show(parameter.default))
    return code(parameter.name), parts.form_of(parameter.annotation).shown, default


def home(module: str) -> str:
    """A link to the file or the folder of a module, with its path as the text."""
    return f"[{target(module).removeprefix('../')}]({target(module)})"


def target(module: str) -> str:
    """The path of the file or the folder of a module, as a page of docs/ links to it."""
    path = module.replace(".", "/")
    return f"../{path}/" if (ROOT / path).is_dir() else f"../{path}.py"


def code(shown: str) -> str:
    return f"`{shown}`"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )


if __name__ == "__main__":
    for name, page in {"parts": text(), "layers": layers_text()}.items():
        path = ROOT / "docs" / f"{name}.md"
        path.write_text(page, encoding="utf-8", newline="\n")
