"""docs/parts.md, generated from signatures: every part, and every option, that a config can name;
and docs/layers.md: every layer that a model can use.

`python -m wiring.parts_page` writes the files.
"""

import dis
import importlib
import inspect
import re
import typing
from pathlib import Path

from ranges import show
from wiring import parts, schema
from wiring.config import REQUIRED, SECTIONS, TOP_LEVEL
from wiring.nodes import EXTRA_KEYS

INTRODUCTION = """\
# The parts and options of a config

`make schema` writes this page from the signatures of the code, so it is always complete.
`python train.py --list KIND` prints the parts of one kind, with your own.
[docs/configure.md](configure.md) explains the config, [docs/add_your_own.md](add_your_own.md) how
to write a part.

A part is named by a string, `"adamw"`, or by an object with its arguments,
`{"name": "adamw", "args": {"lr": 0.01}}`. `[an integer, ...]` is a list of any length.
"""
LAYERS = """\
# The layers

`make schema` writes this page from the signatures in `model/layers/`. `<layer>_init(key, ...)`
returns the params of a layer, `<layer>(params, x)` applies it. Import them as in
`from model.layers.linear import linear, linear_init`;
[a layer of your own](add_your_own.md#a-layer) is added in the same way.
"""
LOAD = "LOAD_GLOBAL"  # the instruction that reads a global
INSIDE = ("forms", "conv_forms", "op")  # files of model/layers/ that hold no layers
ROOT = Path(__file__).resolve().parents[1]

# What the top-level keys that are neither a kind nor a section hold.
PLAIN_KEYS = {
    "$schema": "the schema by which an editor checks the file",
    "title": "the name of the folder, in `checkpoint.dir`, that holds the runs of this config",
    "run_name": "the name of the run's folder, also its name and id at trackers; "
    "`null`: date and time",
    "seed": "the seed of everything random",
    "resume": '`null`, or `"auto"`: continue the latest unfinished run of this title',
    "sharding": "a preset or rules that say how weights are divided over devices: "
    "[docs/several_devices.md](several_devices.md)",
}


def text():
    """The content of docs/parts.md."""
    sections = [section(name, location) for name, location in SECTIONS.items()]
    kinds = [part_list(kind) for kind in parts.KINDS]
    return "\n".join([INTRODUCTION, top_level(), *sections, *kinds])


def layers_text():
    """The content of docs/layers.md."""
    sections = [LAYERS]
    for name in parts.modules(("model.layers",)):
        if name.rpartition(".")[2] not in INSIDE:
            module = importlib.import_module(name)
            rows = [(code(call_of(f)), parts.summary(f)) for f in layers_of(module)]
            heads = ("function", "what it computes")
            title = f"## {home(name)}"
            sections += [f"{title}\n\n{parts.summary(module)}\n\n{table(heads, rows)}"]
    return "\n".join(sections)


def layers_of(module):
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


def globals_of(function):
    """The names of the globals that a function uses, also in the functions inside it."""
    codes = [getattr(function, "__code__", None)]
    while codes:
        if current := codes.pop():
            yield from (i.argval for i in dis.get_instructions(current) if i.opname == LOAD)
            codes += [constant for constant in current.co_consts if inspect.iscode(constant)]


def call_of(function):
    """The text of a call of a function; a default that is a function is shown by its name."""
    names = {id(value): name for name, value in inspect.unwrap(function).__globals__.items()}
    shown = []
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        default = names.get(id(p.default)) if callable(p.default) else repr(p.default)
        shown.append(p.name if p.default is p.empty else f"{p.name}={default}")
    return f"{function.__name__}({', '.join(shown)})"


def top_level():
    """The table of the keys of a config."""
    rows = []
    for key, default in TOP_LEVEL.items():
        holds = PLAIN_KEYS.get(key)
        if key in SECTIONS:
            holds = f"a section: [its options](#{anchor(section_title(key))})"
        elif holds is None:
            what = "a list of parts" if key in schema.LISTS else "a part"
            what += ", or a list of them" if key == "optimizer" else ""
            holds = f"{what}: [names and arguments](#{anchor(kind_title(key))})"
        shown = "required" if default is REQUIRED else code(show(default))
        rows.append((code(key), shown, holds))
    return "## The keys of a config\n\n" + table(("key", "default", "holds"), rows)


def section(name, location):
    """The options of a section that names no part."""
    options = parts.section_options(location)
    lines = [f"## {section_title(name)}", "", parts.summary(options), "", fields_of(options)]
    for kind in nested_options(options):
        lines += [f"`{kind.__name__}` is an object with these keys.", "", fields_of(kind)]
    return "\n".join(lines)


def fields_of(options):
    """The table of the fields of a dataclass or a TypedDict."""
    comments = schema.comments(options)
    if typing.is_typeddict(options):
        hints = typing.get_type_hints(options, include_extras=True)
        needed = options.__required_keys__
        rows = [
            (
                code(key),
                parts.form_of(hint).shown,
                "required" if key in needed else "",
                comments.get(key, ""),
            )
            for key, hint in hints.items()
        ]
    else:
        rows = [
            (*argument(p), comments.get(name, "")) for name, p in parts.arguments(options).items()
        ]
    return table(("option", "type", "default", "meaning"), rows)


def nested_options(options):
    """The TypedDicts among the annotations of a section."""
    for annotation in typing.get_type_hints(options).values():
        yield from filter(typing.is_typeddict, typing.get_args(annotation))


def part_list(kind):
    """All parts of a kind."""
    functions, _ = parts.find(kind)
    lines = [
        f"## {kind_title(kind)}",
        "",
        f"In {' and '.join(map(home, parts.KINDS[kind].homes))}.",
    ]
    if kind in EXTRA_KEYS:
        about = "Besides `name` and `args`, the object of a part may have"
        lines += ["", f"{about} [these keys](watch.md#metrics):", "", extra(kind)]
    for name, function in functions.items():
        lines += ["", f"### {name}", "", parts.summary(function)]
        accepted = parts.config_arguments(kind, function)
        facts = [name for name, p in accepted.items() if is_from_data(name, p)]
        if facts:
            lines += ["", f"Taken from the data if left out: {', '.join(map(code, facts))}."]
        if rows := [argument(p) for name, p in accepted.items() if name not in facts]:
            lines += ["", table(("argument", "type", "default"), rows).rstrip()]
    return "\n".join(lines) + "\n"


def is_from_data(name, parameter):
    """Whether the data fills this argument; a number as the default means that it need not."""
    return name in parts.FACTS and parameter.default in (parameter.empty, None)


def extra(kind):
    """The table of the keys that a node of a kind may have besides name and args."""
    from training.base import Tracked

    hints, defaults = typing.get_type_hints(Tracked), Tracked._field_defaults
    rows = [
        (code(key), parts.form_of(hints[key]).shown, code(show(defaults[key])))
        for key in EXTRA_KEYS[kind]
    ]
    return table(("key", "type", "default"), rows).rstrip()


def argument(parameter):
    """(name, type, default) of a parameter."""
    required = parameter.default is parameter.empty
    default = "required" if required else code(show(parameter.default))
    return code(parameter.name), parts.form_of(parameter.annotation).shown, default


def home(module):
    """A link to the file or the folder of a module."""
    path = module.replace(".", "/")
    path = f"{path}/" if (ROOT / path).is_dir() else f"{path}.py"
    return f"[{path}](../{path})"


def section_title(name):
    return f"Section: {name}"


def kind_title(kind):
    return f"Parts: {kind}"


def anchor(title):
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def code(shown):
    return f"`{shown}`"


def table(heads, rows):
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )


if __name__ == "__main__":
    for name, page in {"parts": text(), "layers": layers_text()}.items():
        path = ROOT / "docs" / f"{name}.md"
        path.write_text(page, encoding="utf-8", newline="\n")
