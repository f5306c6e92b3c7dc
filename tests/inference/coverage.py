"""Write docs/export_coverage.md from the tested cases: `python -m tests.inference.coverage`."""

import textwrap
from pathlib import Path

from tests.inference.cases import GROUPS, ONNX_GAPS, REMARKS, TFLITE_GAPS

FILE = Path(__file__).resolve().parents[2] / "docs" / "export_coverage.md"
HEAD = """# What exports

The tests convert each case to both formats with a free batch size, and compare it with JAX in
ONNX Runtime and LiteRT at batch sizes 1 and 3. Cases that both formats have are listed first; a
table has those with a gap or a remark. A gap is exported by the other route, jax2tf, if `--route`
allows it. This page is written by `python -m tests.inference.coverage`.
"""
COLUMNS = {"ONNX": ONNX_GAPS, "TFLite": TFLITE_GAPS}


def page():
    return "\n".join([HEAD, *map(section, GROUPS)])


def section(name):
    """The cases of a group: those that simply work as a list, the others as a table."""
    cases = GROUPS[name].cases
    plain = [case for case in cases if not remarks(case)]
    lines = [f"## {name}", "", textwrap.fill(" · ".join(plain), 100), ""]
    rows = [row(case) for case in cases if remarks(case)]
    if rows:
        lines += ["| | ONNX | TFLite | remarks |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def remarks(case):
    """What a reader must know of a case: why a format lacks it, or how it is written."""
    gaps = [f"{target}: {why[case]}" for target, why in COLUMNS.items() if case in why]
    return gaps + ([REMARKS[case]] if case in REMARKS else [])


def row(case):
    marks = ["no" if case in gaps else "yes" for gaps in COLUMNS.values()]
    return f"| {case} | {' | '.join(marks)} | {'; '.join(remarks(case))} |"


if __name__ == "__main__":
    FILE.write_text(page())
