"""Write docs/export_coverage.md from the tested cases: `python -m tests.inference.coverage`."""

from pathlib import Path

from tests.inference.cases import GROUPS, ONNX_GAPS, REMARKS, TFLITE_GAPS

FILE = Path(__file__).resolve().parents[2] / "docs" / "export_coverage.md"
HEAD = """# What exports

The tests convert each row to both formats with a free batch size, and compare it with JAX in
ONNX Runtime and LiteRT at batch sizes 1 and 3. A gap is exported by the other route, jax2tf, if
`--route` allows it. This page is written by `python -m tests.inference.coverage`.
"""


def page():
    return "\n".join([HEAD, *map(table, GROUPS)])


def table(name):
    """The cases of a group, one row per case."""
    head = [f"## {name}", "", "| | ONNX | TFLite | remarks |", "|---|---|---|---|"]
    return "\n".join([*head, *map(row, GROUPS[name].cases), ""])


def row(case):
    columns = {"ONNX": ONNX_GAPS, "TFLite": TFLITE_GAPS}
    remarks = [f"{target}: {gaps[case]}" for target, gaps in columns.items() if case in gaps]
    remarks += [REMARKS[case]] if case in REMARKS else []
    marks = ["no" if case in gaps else "yes" for gaps in columns.values()]
    return f"| {case} | {' | '.join(marks)} | {'; '.join(remarks)} |"


if __name__ == "__main__":
    FILE.write_text(page())
