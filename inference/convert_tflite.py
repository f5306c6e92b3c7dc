"""Export a checkpoint to TFLite, ONNX or StableHLO, and verify that it computes what JAX computes.

    python inference/convert_tflite.py -w saved/<title>/<run>/checkpoint-epoch_9.params --name mnist

writes inference/mnist/ in the working folder, with mnist.tflite and mnist.onnx.
"""

import argparse
import re
import signal
import sys
from argparse import Namespace
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# The project's root must be on sys.path before the next import. Its folder inference/, which Python
# puts there for a script, must not be: exports are written there, under names of their configs.
if not __package__:
    sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p).resolve() not in (ROOT, HERE))]

from inference.progress import ended_by_interrupt, interrupts  # noqa: E402
from utils import (  # noqa: E402
    DONE,
    FAILED,
    UserError,
    open_closed_streams,
    run_command,
)
from wiring.config import parse_words  # noqa: E402

FORMATS = ("tflite", "onnx", "stablehlo")
DEFAULT_FORMATS = ("tflite", "onnx")
STOPPED = "Stopped; nothing was written"
PRECISIONS = ("float16", "dynamic", "int8")
# exit codes when other files were written
FAILED_ALONE = {"tflite": 3, "onnx": 4, "demo": 5, "stablehlo": 6}
MANY: dict[str, Any] = {
    "nargs": "+",
    "action": "extend",
}  # given twice, such an option has the values of both
# Options of many values, to which argparse also adds the overrides that follow; [] by default.
MANY_VALUES = ("formats", "input", "batches", "exclude", "free", "input_names", "output_names")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; a user's mistake ends in one message and an exit code."""
    open_closed_streams()
    # Exit through the context managers, which remove half-written files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return run_command(lambda: run_export(argv), STOPPED)


def run_export(argv: list[str] | None) -> int:
    """Export as the command line specifies; returns the exit code."""
    with interrupts() as check:
        arguments = parse(argv)
        with ended_by_interrupt(STOPPED):
            from inference.export import export

        return exit_code(export(arguments, ROOT, check))


def exit_code(failed: dict[str, bool]) -> int:
    """The exit code for {output: whether it failed}."""
    if not any(failed.values()):
        return DONE
    if all(is_failed for name, is_failed in failed.items() if name in FORMATS):
        return FAILED
    return FAILED_ALONE[next(name for name, is_failed in failed.items() if is_failed)]


def parse(argv: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        description="Export a checkpoint to TFLite, ONNX or StableHLO, and verify it against JAX.",
        epilog="Exit codes: 0 done, 1 nothing was written, 2 bad input, "
        "3 TFLite failed, 4 ONNX failed, 5 the demo failed, 6 StableHLO failed; the rest is "
        "written. 130 stopped by Ctrl-C.",
    )
    add = parser.add_argument
    # Options that choose the model and the folder to write.
    add("-c", "--config", help="the config (default: the one stored in the checkpoint)")
    add("overrides", nargs="*", metavar="path.to.key=value", help="override a value of the config")
    add(
        "-w",
        "--weights",
        required=True,
        metavar="CHECKPOINT",
        help="the checkpoint, or the folder of its run, such as saved/<title>/<run>",
    )
    add("--best", action="store_true", help="of a run's folder, the best checkpoint")
    add("--name", help="the name of the files and of their folder (default: the config's title)")
    add(
        "--out",
        default="inference",
        metavar="DIR",
        help="where to create that folder (default: inference/ in the working folder)",
    )
    add("--force", action="store_true", help="replace an earlier export of this name")
    add(
        "--trust",
        action="store_true",
        help="allow a config stored in a checkpoint to import its dotted names",
    )

    # Options that choose the sizes and names of what the files take and return.
    add("--batch", type=int, help="fix the batch size (default: any)")
    add(
        "--free",
        **MANY,
        metavar="AXIS:NAME",
        help="other axes of any size, as 1:length; for one input in a range, or for multiples, as "
        "tokens:1:length:1-512 1:8*height (axis 0 is the batch)",
    )
    for side in ("input", "output"):
        add(
            f"--{side}-names",
            **MANY,
            metavar="NAME",
            help=f"the names of the {side}s, in their order",
        )
    add(
        "--input",
        nargs="+",
        metavar="N",
        help='an input shape, as 1 28 28 1 or "(1, 28, 28, 1)", in the layout of --input-layout '
        "(default: from the checkpoint)",
    )
    add(
        "--input-layout",
        metavar="LAYOUT",
        help="the image layout that callers pass, nhwc or nchw (default: that of --input, or nhwc)",
    )

    # Options that choose what the files contain.
    add(
        "--formats",
        **MANY,
        metavar="FORMAT",
        help=f"one or more of {', '.join(FORMATS)} (default: {' '.join(DEFAULT_FORMATS)})",
    )
    add(
        "--route",
        default="auto",
        help="native, jax2tf, or auto: native, and jax2tf if that fails (default: auto)",
    )
    add("--opset", type=int, default=20, help="the ONNX opset, 18 to 23 (default: 20)")
    add(
        "--with-preprocess",
        action="store_true",
        help="include the config's preprocessing, so that the file takes raw inputs",
    )
    add(
        "--with-softmax",
        action="store_true",
        help="add a softmax, so that the file returns probabilities",
    )
    # Options that choose on what, and how strictly, the files are compared with JAX.
    add(
        "--tolerance",
        type=float,
        help="the largest error, as a share of the largest output (default: by the precision)",
    )
    add("--real-only", action="store_true", help="verify on no random inputs")
    add(
        "--inputs",
        metavar="FILE",
        help="an npz of inputs, as the exported file takes them, to verify on these too",
    )
    add(
        "--batches",
        **MANY,
        metavar="N",
        help="the batch sizes to verify at (default: 1 3 64)",
    )
    # Options that choose the precision, and the page.
    add("--quantize", metavar="PRECISION", help=f"one of {', '.join(PRECISIONS)}")
    add(
        "--exclude",
        **MANY,
        metavar="REGEX",
        help="regexes of weights that --quantize leaves in float32",
    )
    add(
        "--samples",
        type=int,
        default=200,
        help="the number of training examples that calibrate int8 (default: 200)",
    )
    add(
        "--demo",
        action="store_true",
        help="write a web page beside the ONNX file that runs it in a browser",
    )
    return checked(parse_words(parser, argv))


def checked(arguments: Namespace) -> Namespace:
    """The validated arguments, with the parsed `shape` of `input`."""
    separate_overrides(arguments)
    formats = arguments.formats or DEFAULT_FORMATS
    arguments.formats = list(
        dict.fromkeys(name for text in formats for name in text.lower().split(","))
    )
    check_choices("--formats", arguments.formats, FORMATS)
    check_choices("--route", [arguments.route], ("auto", "native", "jax2tf"))
    check_choices("--quantize", [arguments.quantize] if arguments.quantize else [], PRECISIONS)
    check_exclude(arguments)
    layout = [arguments.input_layout] if arguments.input_layout else []
    check_choices("--input-layout", layout, ("nhwc", "nchw"))
    check_numbers(arguments)
    if arguments.name is not None and not re.fullmatch(r"[\w][\w .-]*", arguments.name):
        raise UserError(
            f"--name: {arguments.name!r} is not a valid folder name; "
            "use letters, digits, '-', '_', '.' and spaces"
        )
    if arguments.quantize and "stablehlo" in arguments.formats:
        raise UserError("--quantize: does not apply to stablehlo; leave one of them out")
    if arguments.demo and "onnx" not in arguments.formats:
        raise UserError("--demo: runs the ONNX file; add onnx to --formats")
    if arguments.demo and arguments.batch not in (None, 1):
        raise UserError(f"--demo: runs one example at a time; remove --batch {arguments.batch}")
    arguments.shape = parse_shape(arguments.input) if arguments.input else None
    return arguments


def separate_overrides(arguments: Namespace) -> None:
    """Move the overrides among the values of MANY_VALUES to `overrides`."""
    for option in MANY_VALUES:
        values = getattr(arguments, option) or []
        arguments.overrides += [text for text in values if "=" in text]
        setattr(arguments, option, [text for text in values if "=" not in text])
        if values and not getattr(arguments, option):
            name = option.replace("_", "-")
            raise UserError(f"--{name}: has no value; put overrides of the config before it")


def check_numbers(arguments: Namespace) -> None:
    """Validate the options that are numbers, and make `batches` a list of them."""
    if not 18 <= arguments.opset <= 23:
        raise UserError(f"--opset: must be 18 to 23, got {arguments.opset}")
    for name in ("batch", "samples"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise UserError(f"--{name}: must be at least 1, got {value}")
    if any(not text.isdecimal() or int(text) == 0 for text in arguments.batches):
        raise UserError(f"--batches: must be numbers from 1, got {' '.join(arguments.batches)}")
    if arguments.batches and arguments.batch:
        raise UserError(f"--batches: the batch is fixed by --batch {arguments.batch}; remove one")
    arguments.batches = list(dict.fromkeys(map(int, arguments.batches)))
    if (tolerance := arguments.tolerance) is not None and not 0 < tolerance < float("inf"):
        raise UserError(f"--tolerance: must be more than 0, got {tolerance:g}")


def check_exclude(arguments: Namespace) -> None:
    for pattern in arguments.exclude:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(f"--exclude: {pattern!r} is not a regex: {error}") from error
    if arguments.exclude and not arguments.quantize:
        raise UserError("--exclude: names what --quantize leaves in float32; add --quantize")
    if arguments.exclude and arguments.route == "jax2tf" and "tflite" in arguments.formats:
        from inference.quantize_onnx import NO_NAMES  # imports NumPy

        raise UserError(NO_NAMES)


def check_choices(option: str, values: Iterable[str], allowed: Collection[str]) -> None:
    for value in values:
        if value not in allowed:
            raise UserError(f"{option}: unknown value {value!r}; choose from {', '.join(allowed)}")


def parse_shape(texts: Sequence[str]) -> tuple[int, ...]:
    """The shape of one input, without the batch size that comes first."""
    text = " ".join(texts)
    numbers = re.findall(r"\d+", text)
    if not re.fullmatch(r"[\s\d,()\[\]]*", text) or len(numbers) < 2 or "0" in numbers:
        raise UserError(
            f"--input: {text!r} is not a shape; write it with the batch size first, "
            'as 1 28 28 1 or "(1, 28, 28, 1)"'
        )
    batch, *shape = map(int, numbers)
    if batch != 1:
        raise UserError(
            f"--input: {text!r}: a shape must begin with the batch size 1; "
            f"write --input 1 {' '.join(numbers)} if it is missing, or "
            f"--input 1 {' '.join(numbers[1:])} --batch {batch} to fix another batch size"
        )
    return tuple(shape)


if __name__ == "__main__":
    sys.exit(main())
