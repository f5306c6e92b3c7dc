"""Tables of measurements, and RESULTS.md, which has one section for each of them, written by the
program that measured it."""

import argparse
import os
import platform
import re
import statistics
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")
HEADING = "# Measurements\n\nEach section is written by its program.\n"
# Options that the command in a section does not show.
UNSHOWN = ("data", "out", "rounds", "file", "dir", "checkpoint")


def arguments(program, description, **defaults):
    """The options of a benchmark: one for each default, and `--out` for the file of its section.
    The default of a list is all of it; a tuple has the choices of an option that is None."""
    parser = argparse.ArgumentParser(f"python -m benchmarks.{program}", description=description)
    for name, default in defaults.items():
        if isinstance(default, bool):
            parser.add_argument(f"--{name}", action="store_true")
        elif isinstance(default, list):
            parser.add_argument(f"--{name}", type=some_of(default), default=default)
        elif isinstance(default, tuple):
            parser.add_argument(f"--{name}", choices=default)
        else:
            parser.add_argument(f"--{name}", type=type(default or ""), default=default)
    parser.add_argument("--out", type=Path, default=RESULTS, help="instead of RESULTS.md")
    args = parser.parse_args()
    changed = {k: v for k, v in vars(args).items() if v != parser.get_default(k)}
    options = [
        f" --{name}" + ("" if value is True else f" {value}")
        for name, value in changed.items()
        if name not in UNSHOWN and not isinstance(value, list)
    ]
    args.command = f"python -m benchmarks.{program}" + "".join(options)
    return args


def some_of(choices):
    """The type of an option that takes some of these names, separated by commas."""

    def parse(text):
        if unknown := [name for name in text.split(",") if name not in choices]:
            raise argparse.ArgumentTypeError(
                f"no {', '.join(unknown)}; there are {', '.join(choices)}"
            )
        return [name for name in choices if name in text.split(",")]

    return parse


def short(value):
    """Three digits of a small number, all digits of a large one."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def spread(values, form=short):
    """median (smallest - largest)."""
    return f"{form(statistics.median(values))} ({form(min(values))} - {form(max(values))})"


def ratios(values, others):
    """One form's measurements as multiples of another's, round by round."""
    return [a / b for a, b in zip(values, others, strict=True)]


def markdown(head, rows):
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def target_cells(value, bound, at_most=True):
    """The cells of a target: its bound, the measurement or None, and whether it is reached."""
    words = f"at {'most' if at_most else 'least'} {short(bound)}"
    if value is None:
        return [words, "-", "not measured"]
    reached = value <= bound if at_most else value >= bound
    return [words, short(value), "yes" if reached else "**no**"]


def versions(*packages):
    """The installed ones of these packages, with their versions."""
    installed = []
    for package in packages:
        with suppress(PackageNotFoundError):
            installed.append(f"{package} {version(package)}")
    return ", ".join(installed)


def record(args, title, *blocks):
    """Print a section, and write it to RESULTS.md in place of the section with the same title."""
    section = section_of(args.command, title, *blocks)
    print(section)
    write(args.out, title, section)


def section_of(command, title, *blocks):
    """The text of a section, with the facts about the machine and the versions."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return (
        "\n\n".join([f"## {title}", f"`{command}` on {machine}, {versions('jax')}", *blocks]) + "\n"
    )


def write(path, title, section):
    """Replace the section with this title in a file, or append it."""
    text = path.read_text(encoding="utf-8") if path.exists() else HEADING
    former = rf"(?<=\n)## {re.escape(title)}\n.*?(?=\n## |\Z)"
    text, found = re.subn(former, lambda _: section, text, flags=re.DOTALL)
    text = text if found else f"{text.rstrip()}\n\n{section}"
    path.write_text(text, encoding="utf-8")
