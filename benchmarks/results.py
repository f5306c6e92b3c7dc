"""RESULTS.md: one section for each benchmark, written by the program that measured it."""

import os
import platform
import re
import statistics
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")


def spread(values):
    """median (smallest - largest)."""
    return f"{short(statistics.median(values))} ({short(min(values))} - {short(max(values))})"


def short(value):
    """Three digits of a small number, all of a large one."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def markdown(head, rows):
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def record(title, command, table):
    """Print a section and put it in place of the one of the same title."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, jax {version('jax')}"
    section = f"## {title}\n\n`{command}` on {machine}\n\n{table}\n"
    print(section)
    text = (
        RESULTS.read_text()
        if RESULTS.exists()
        else "# Measurements\n\nEach section is written by its program.\n"
    )
    text = re.sub(rf"\n## {re.escape(title)}\n.*?(?=\n## |\Z)", "", text, flags=re.DOTALL)
    RESULTS.write_text(text.rstrip() + "\n\n" + section)
