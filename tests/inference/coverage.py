"""docs/export_coverage.md, from the cases that the tests convert: `python -m tests.inference.coverage` writes it."""

from pathlib import Path

from tests.inference.cases import GROUPS, ONNX_GAPS, REMARKS, TFLITE_GAPS

FILE = Path(__file__).resolve().parents[2] / "docs" / "export_coverage.md"
HEAD = """# What exports

Each row is converted by the tests to both formats with a free batch, and compared with JAX in ONNX Runtime and LiteRT at
batches of 1 and 3. A gap goes by the other route, jax2tf, where `--route` allows it.
This page is written by `python -m tests.inference.coverage`.
"""


def page():
    return "\n".join([HEAD, *map(table, GROUPS)])


def table(name):
    """The cases of a group, one a row."""
    head = [f"## {name}", "", "| | ONNX | TFLite | remarks |", "|---|---|---|---|"]
    return "\n".join([*head, *map(row, GROUPS[name].cases), ""])


def row(case):
    gaps = [
        f"{target}: {reasons[case]}" for target, reasons in columns().items() if case in reasons
    ]
    remarks = "; ".join([*gaps, *([REMARKS[case]] if case in REMARKS else [])])
    marks = ["no" if case in reasons else "yes" for reasons in columns().values()]
    return f"| {case} | {' | '.join(marks)} | {remarks} |"


def columns():
    return {"ONNX": ONNX_GAPS, "TFLite": TFLITE_GAPS}


if __name__ == "__main__":
    FILE.write_text(page())
