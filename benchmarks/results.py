"""RESULTS.md: one section for each benchmark, written by the program that measured it."""

import os
import platform
import re
import statistics
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")
HEADING = "# Measurements\n\nEach section is written by its program.\n"


def spread(values):
    """median (smallest - largest)."""
    return f"{short(statistics.median(values))} ({short(min(values))} - {short(max(values))})"


def short(value):
    """Three digits of a small number, all digits of a large one."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def markdown(head, rows):
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def record(title, command, table):
    """Print a section, and write it to RESULTS.md in place of the section with the same title."""
    section = section_of(title, command, table)
    print(section)
    write(title, section)


def section_of(title, command, table):
    versions = f"Python {platform.python_version()}, jax {version('jax')}"
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {versions}"
    return f"## {title}\n\n`{command}` on {machine}\n\n{table}\n"


def write(title, section):
    """Write a section to RESULTS.md in place of the section with the same title."""
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else HEADING
    former = rf"(?<=\n)## {re.escape(title)}\n.*?(?=\n## |\Z)"
    text, found = re.subn(former, lambda _: section, text, flags=re.DOTALL)
    text = text if found else f"{text.rstrip()}\n\n{section}"
    RESULTS.write_text(text, encoding="utf-8")
