"""python inference/predict.py MODEL INPUT...: what a checkpoint, a .tflite or a .onnx says of images or of arrays; all the same.

Inputs are raw, as the config's data has them; what the config says of preprocessing is done here, unless it is in the file.
"""

import argparse
import csv
import io
import os
import sys
from contextlib import nullcontext
from math import prod
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

# The project's root comes first.
from utils import BAD_INPUT, DONE, FAILED, RunError, UserError, atomic_file  # noqa: E402

INTERRUPTED, NOBODY_READS = 130, 141  # exit codes, as the shell has them for SIGINT and SIGPIPE
SHOWN = 8  # numbers of an output


def main(argv=None):
    """Run the command line; a mistake of the user's ends in one message and an exit code."""
    arguments = parse(argv)
    try:
        predict(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except (RunError, OSError) as error:
        print(error, file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return DONE


def parse(argv):
    parser = argparse.ArgumentParser(
        description="Ask a model, in whatever form, about images or arrays."
    )
    add = parser.add_argument
    add("model", help="a checkpoint, a .tflite or a .onnx")
    add(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="images, a folder of them, or one .npz or .npy file",
    )
    add(
        "-c",
        "--config",
        help="the config (default: what the checkpoint remembers, or lies beside the file)",
    )
    add(
        "--trust",
        action="store_true",
        help="let a config that was left by a run import what its dotted names say",
    )
    add("--key", default="x", help="the array of an npz (default: x)")
    add("--prepared", action="store_true", help="the arrays are preprocessed already")
    add("--top", type=int, default=3, help="how many classes to print (default: 3)")
    add("--batch", type=int, default=64, help="how many inputs at once (default: 64)")
    add("--csv", metavar="FILE", help="write every output there")
    arguments = parser.parse_args(argv)
    for name in ("top", "batch"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: must be at least 1")
    return arguments


def predict(arguments):
    """Print the likeliest classes, or the first numbers, of every input as they come; write all of them."""
    from inference.predictor import (
        answered,
        opened,
    )  # here, so that an interrupt of these long imports is caught, too

    predictor = opened(arguments)
    with atomic_file(arguments.csv) if arguments.csv else nullcontext() as file:
        header = True
        for names, outputs in answered(predictor, arguments):
            shares = shares_of(predictor.answers, outputs)
            told = (
                numbers(outputs)
                if shares is None
                else likeliest(shares, predictor.classes, arguments.top)
            )
            lines, columns, rows = told
            say("\n".join(f"{name}  {line}" for name, line in zip(names, lines, strict=True)))
            if file:
                rows = ([name, *row] for name, row in zip(names, rows, strict=True))
                file.write(as_csv([["input", *columns], *rows] if header else rows))
                header = False


def shares_of(answers, outputs):
    """The probability of each class, for each input; None where the outputs are no classes."""
    values = next(iter(outputs.values()))
    if answers == "numbers" or len(outputs) > 1 or values.ndim != 2:
        return None
    values = values.astype(np.float32)
    if answers == "probabilities":
        return values
    shifted = np.exp(values - values.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def likeliest(shares, classes, top):
    """(a line of the likeliest classes for each input, the columns of a table, its rows)"""
    labels = [classes[i] if i < len(classes) else str(i) for i in range(shares.shape[1])]
    order = np.argsort(-shares, kind="stable")
    lines = [
        "  ".join(f"{labels[i]}: {row[i]:.4f}" for i in best[:top])
        for row, best in zip(shares, order, strict=True)
    ]
    rows = ([labels[best[0]], *figures(row)] for row, best in zip(shares, order, strict=True))
    return lines, ["class", *(f"p_{label}" for label in labels)], rows


def numbers(outputs):
    """(a line of the first numbers for each input, the columns of a table, its rows)"""
    flat = {
        name: array.reshape(len(array), prod(array.shape[1:])) for name, array in outputs.items()
    }
    columns = [f"{name}_{i}" for name, array in flat.items() for i in range(array.shape[1])]
    told = [
        [f"{name}: {some(row)}" if len(flat) > 1 else some(row) for row in array]
        for name, array in flat.items()
    ]
    rows = (
        [text for row in each for text in figures(row)] for each in zip(*flat.values(), strict=True)
    )
    return list(map("  ".join, zip(*told, strict=True))), columns, rows


def some(row):
    """The first of the numbers, shortened."""
    return " ".join([*figures(row[:SHOWN], 6), *(["..."] if len(row) > SHOWN else [])])


def figures(row, digits=9):
    """Numbers as text; nine digits tell one float32 from any other."""
    if row.dtype.kind in "biuc":
        return map(str, row)
    return (f"{float(value):.{digits}g}" for value in row)


def say(text):
    """Print at once; where nobody reads any more, as after `| head`, there is no more to do."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # for what Python has still to write at its end
        raise SystemExit(NOBODY_READS) from None


def as_csv(rows):
    """Lines of a table; a file's name may hold bytes that are no text."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8", "surrogateescape")


if __name__ == "__main__":
    sys.stdout.reconfigure(
        errors="backslashreplace"
    )  # names of files and classes may hold what the terminal cannot show
    sys.exit(main())
