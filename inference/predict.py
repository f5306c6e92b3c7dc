"""Print the predictions of a checkpoint or an exported file for images, arrays or a table; or the
text that an exported language model writes.

    python inference/predict.py MODEL INPUT...
    python inference/predict.py FOLDER --prompt "Once upon a time"

Inputs are raw, as in the config's data; the config's preprocessing is applied here, unless the
exported file contains it.
"""

import argparse
import csv
import io
import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from math import prod
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# The project's root must be on sys.path before the next import. Its folder inference/, which Python
# puts there for a script, must not be: exports are written there, under names of their configs.
if not __package__:
    sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p).resolve() not in (ROOT, HERE))]

from inference.generate import add_text_options, checked_text  # noqa: E402
from inference.progress import ended_by_interrupt  # noqa: E402
from utils import UserError, echo, open_closed_streams, printable, run_command  # noqa: E402
from utils.files import atomic_file  # noqa: E402

BROKEN_PIPE = 141  # the exit code that shells use for SIGPIPE
MAX_NUMBERS = 8  # printed per output
# Options that only count for inputs, and for a text.
OF_INPUTS = ("config", "trust", "best", "key", "prepared", "top", "batch", "csv")
OF_TEXT = ("tokens", "temperature", "top_k", "top_p", "seed", "tokenizer")
# One line to print per input, and the columns and rows of a table.
Lines = tuple[list[str], list[str], Iterable[Sequence[str]]]
FIRST_COLUMN = b"input,"  # the beginning of a table of predictions


def main(argv: list[str] | None = None) -> int:
    """Run the command line; a user's mistake ends in one message and an exit code."""

    def run() -> None:
        arguments = parse(argv)
        (write if is_text(arguments) else predict)(arguments)

    return run_command(run)


def is_text(arguments: Namespace) -> bool:
    """Whether the arguments pass a text for a language model to continue."""
    return arguments.prompt is not None or arguments.prompt_file is not None


def parse(argv: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        description="Print a model's predictions for images or arrays."
    )
    add = parser.add_argument
    add(
        "model",
        help="a checkpoint, a .tflite, a .onnx or a .stablehlo; or the folder of a language model",
    )
    add(
        "inputs",
        nargs="*",
        metavar="INPUT",
        help="images, a folder of them, one .npz or .npy file, or a table (.csv, .parquet)",
    )
    add(
        "-c",
        "--config",
        help="the config (default: the one in the checkpoint or beside the exported file)",
    )
    add(
        "--trust",
        action="store_true",
        help="allow a config that a run has written to import its dotted names",
    )
    add("--best", action="store_true", help="of a run's folder, the best checkpoint")
    add("--key", default="x", help="the name of the array in an npz (default: x)")
    add("--prepared", action="store_true", help="the arrays are preprocessed already")
    add("--top", type=int, default=3, help="how many classes to print (default: 3)")
    add("--batch", type=int, default=64, help="the batch size (default: 64)")
    add("--csv", metavar="FILE", help="write all outputs to this file")
    add_text_options(parser.add_argument_group("text, for an exported language model").add_argument)
    arguments = parser.parse_intermixed_args(argv)
    for name in ("top", "batch"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: must be at least 1")
    unused, of = (OF_INPUTS, "inputs") if is_text(arguments) else (OF_TEXT, "--prompt")
    for name in unused:
        if getattr(arguments, name) != parser.get_default(name):
            raise UserError(f"--{name.replace('_', '-')}: goes with {of}; leave it out")
    return arguments


def write(arguments: Namespace) -> None:
    """Print a text that an exported language model continues, as it is written."""
    if arguments.inputs:
        raise UserError("--prompt: the model continues this text; leave out the inputs")
    prompt, sampling = checked_text(arguments)
    from inference.generate import open_writer

    writer = open_writer(arguments.model, arguments.tokenizer)
    for piece in writer.pieces(prompt, arguments.tokens, sampling, arguments.seed):
        print_now(piece, end="")
    print_now("")


def predict(arguments: Namespace) -> None:
    """Print the likeliest classes or the first numbers of each input; write all with --csv."""
    if not arguments.inputs:
        fix = "name images, arrays or a table, or pass the beginning of a text as --prompt"
        raise UserError(f"INPUT: is missing; {fix}")
    with ended_by_interrupt("interrupted"):
        from inference.predictor import open_predictor, predictions

    check_output(arguments)
    predictor = open_predictor(arguments)
    with atomic_file(arguments.csv) if arguments.csv else nullcontext() as file:
        needs_header = True
        for names, outputs in predictions(predictor, arguments):
            probabilities = class_probabilities(predictor.output_kind, outputs)
            if probabilities is None:
                lines, columns, rows = numbers(outputs)
            else:
                lines, columns, rows = likeliest(probabilities, predictor.classes, arguments.top)
            for name, line in zip(names, lines, strict=True):
                print_now(printable(f"{name}  {line}", keep=""))
            if file:
                rows = ([name, *row] for name, row in zip(names, rows, strict=True))
                file.write(as_csv([["input", *columns], *rows] if needs_header else rows))
                needs_header = False


def check_output(arguments: Namespace) -> None:
    """Refuse to replace what is read, or any file but a table that this program wrote."""
    path = Path(arguments.csv or os.devnull)
    if path.is_dir():
        raise UserError(f"--csv: {path} is a folder; name a file, as {path / 'predictions.csv'}")
    try:
        if not path.is_file():
            return
        read = [Path(name) for name in [arguments.model, *arguments.inputs]]
        if any(path.samefile(other) for other in read if other.exists()):
            raise UserError(f"--csv: {path} is one of the files that are read; choose another name")
        with open(path, "rb") as file:
            begin = file.read(len(FIRST_COLUMN))
    except OSError as error:
        raise UserError(f"--csv: {path}: cannot be read: {error.strerror or error}") from error
    if begin not in (b"", FIRST_COLUMN):
        fix = "choose another name, or remove it first"
        raise UserError(f"--csv: {path} exists and is not a table of predictions; {fix}")


def class_probabilities(output_kind: str, outputs: dict[str, np.ndarray]) -> np.ndarray | None:
    """The class probabilities of each input; None if the outputs are not classes."""
    values = next(iter(outputs.values()))
    if output_kind == "numbers" or len(outputs) > 1 or values.ndim != 2:
        return None
    values = values.astype(np.float32)
    if output_kind == "probabilities":
        return values
    shifted = np.exp(values - values.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def likeliest(probabilities: np.ndarray, classes: Sequence[str], top: int) -> Lines:
    """(one line of the likeliest classes per input, the columns of a table, its rows)"""
    count = probabilities.shape[1]
    labels = [classes[i] if i < len(classes) else str(i) for i in range(count)]
    order = np.argsort(-probabilities, kind="stable")
    lines = [
        "  ".join(f"{labels[i]}: {row[i]:.4f}" for i in best[:top])
        for row, best in zip(probabilities, order, strict=True)
    ]
    rows = (
        [labels[best[0]], *as_text(row)] for row, best in zip(probabilities, order, strict=True)
    )
    return lines, ["class", *(f"p_{label}" for label in labels)], rows


def numbers(outputs: dict[str, np.ndarray]) -> Lines:
    """(one line of the first numbers per input, the columns of a table, its rows)"""
    flat = {
        name: array.reshape(len(array), prod(array.shape[1:])) for name, array in outputs.items()
    }
    columns = [f"{name}_{i}" for name, array in flat.items() for i in range(array.shape[1])]
    cells = [
        [f"{name}: {first_numbers(row)}" if len(flat) > 1 else first_numbers(row) for row in array]
        for name, array in flat.items()
    ]
    rows = (
        [text for row in each for text in as_text(row)] for each in zip(*flat.values(), strict=True)
    )
    return list(map("  ".join, zip(*cells, strict=True))), columns, rows


def first_numbers(row: np.ndarray) -> str:
    """The first numbers, with six digits each."""
    ellipsis = ["..."] if len(row) > MAX_NUMBERS else []
    return " ".join([*as_text(row[:MAX_NUMBERS], 6), *ellipsis])


def as_text(row: np.ndarray, digits: int = 9) -> Iterator[str]:
    """Numbers as text; nine digits distinguish any two float32 numbers."""
    if row.dtype.kind in "biuc":
        return map(str, row)
    return (f"{float(value):.{digits}g}" for value in row)


def print_now(text: str, end: str = "\n") -> None:
    """Print without buffering; exit if the reader has closed the pipe, as `| head` does."""
    try:
        echo(text, end=end, flush=True)
    except BrokenPipeError:
        # Python flushes stdout at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(BROKEN_PIPE) from None


def as_csv(rows: Iterable[Sequence[str]]) -> bytes:
    """The lines of a table, as bytes; file names may contain bytes that are not text."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8", "surrogateescape")


if __name__ == "__main__":
    open_closed_streams()
    # File and class names may contain characters that the terminal cannot show.
    sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    sys.exit(main())
