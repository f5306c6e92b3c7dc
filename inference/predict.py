"""python inference/predict.py MODEL INPUT...: what a checkpoint, a .tflite or a .onnx says of images or of arrays; all the same.

Inputs are raw, as the config's data has them; what the config says of preprocessing is done here, unless it is in the file.
"""

import argparse
import csv
import io
import os
import sys
from contextlib import nullcontext
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
    parser = argparse.ArgumentParser(description="Ask a model, in whatever form, about images or arrays.")
    say = parser.add_argument
    say("model", help="a checkpoint, a .tflite or a .onnx")
    say("inputs", nargs="+", metavar="INPUT", help="images, a folder of them, or one .npz or .npy file")
    say("-c", "--config", help="the config (default: what the checkpoint remembers, or lies beside the file)")
    say("--trust", action="store_true", help="let a config that was left by a run import what its dotted names say")
    say("--key", default="x", help="the array of an npz (default: x)")
    say("--prepared", action="store_true", help="the arrays are preprocessed already")
    say("--top", type=int, default=3, help="how many classes to print (default: 3)")
    say("--batch", type=int, default=64, help="how many inputs at once (default: 64)")
    say("--csv", metavar="FILE", help="write every output there")
    arguments = parser.parse_args(argv)
    for name in ("top", "batch"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: must be at least 1")
    return arguments


def predict(arguments):
    """Print the likeliest classes, or the first numbers, of every input; write all of them."""
    from inference.predictor import answered, opened  # here, so that an interrupt of what they import is caught

    predictor = opened(arguments)
    with atomic_file(arguments.csv) if arguments.csv else nullcontext() as file:
        table = Table(file) if file else None
        for names, outputs in answered(predictor, arguments):
            values = next(iter(outputs.values()))
            if predictor.answers != "numbers" and len(outputs) == 1 and values.ndim == 2:
                shares = probabilities(values) if predictor.answers == "logits" else values
                labels = [*predictor.classes[: shares.shape[1]], *range(len(predictor.classes), shares.shape[1])]
                lines = [likeliest(row, labels, arguments.top) for row in shares]
                best = [[labels[i]] for i in shares.argmax(-1)]
                columns = ["class", *(f"p_{label}" for label in labels)]
            else:
                shares = np.concatenate([array.reshape(len(names), -1) for array in outputs.values()], axis=1)
                lines = [first_numbers(outputs, i) for i in range(len(names))]
                best = [[]] * len(names)
                columns = [f"{name}_{i}" for name, array in outputs.items() for i in range(array[0].size)]
            show(f"{name}  {line}" for name, line in zip(names, lines, strict=True))
            if table:
                table.write(columns, names, best, shares)
