"""python inference/convert_tflite.py -c config.json -w saved/<title>/<run>/checkpoint-epoch_10.params --name mnist

Ships a checkpoint: inference/<name>/ with <name>.tflite and <name>.onnx, each known to compute what JAX does.
"""

import argparse
import re
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

# The project's root comes first.
from utils import BAD_INPUT, DONE, FAILED, RunError, UserError  # noqa: E402

FORMATS = ("tflite", "onnx")
PRECISIONS = ("float16", "dynamic", "int8")
FAILED_ALONE = {"tflite": 3, "onnx": 4, "demo": 5}  # exit codes: that failed, a file was written
STOPPED = 130  # as shells say of Ctrl-C


def main(argv=None):
    """Run the command line; a mistake of the user's ends in one message and an exit code."""
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # what is half written is removed then
    try:
        arguments = parse(argv)
        from inference.export import export

        return code(export(arguments, ROOT))
    except UserError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except (RunError, OSError) as error:
        print(error, file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("Stopped; nothing was written", file=sys.stderr)
        return STOPPED


def code(failed):
    """The exit code, by {what was to be written: whether it failed}."""
    if not any(failed.values()):
        return DONE
    if all(wrong for name, wrong in failed.items() if name in FORMATS):
        return FAILED
    return FAILED_ALONE[next(name for name, wrong in failed.items() if wrong)]


def parse(argv):
    parser = argparse.ArgumentParser(
        description="Export a checkpoint to TFLite and ONNX, and verify both against JAX.",
        epilog="Exit codes: 0 done, 1 nothing was written, 2 bad input, 3 TFLite alone failed, 4 ONNX alone, 5 the demo.",
    )
    say = parser.add_argument
    say("-c", "--config", help="the config (default: what the checkpoint remembers)")
    say(
        "overrides",
        nargs="*",
        metavar="path.to.key=value",
        help="a value of the config to use instead",
    )
    say(
        "-w",
        "--weights",
        required=True,
        metavar="CHECKPOINT",
        help="the checkpoint, as saved/<title>/<run>/checkpoint-epoch_10.params",
    )
    say("--name", help="what the files and their folder are called (default: the config's title)")
    say(
        "--out",
        default=str(ROOT / "inference"),
        metavar="DIR",
        help="where that folder is made (default: inference/)",
    )
    say("--force", action="store_true", help="replace an earlier export of this name")
    say(
        "--trust",
        action="store_true",
        help="let a config out of a checkpoint import what its dotted names say",
    )
    say(
        "--formats",
        nargs="+",
        default=list(FORMATS),
        metavar="FORMAT",
        help=f"of {', '.join(FORMATS)} (default: both)",
    )
    say(
        "--route",
        default="auto",
        help="native, jax2tf, or auto: native, and jax2tf for what its tables lack (default)",
    )
    say("--opset", type=int, default=20, help="of ONNX, 18 to 23 (default: 20)")
    say("--batch", type=int, help="fix the size of the batch (default: any)")
    say(
        "--input",
        nargs="+",
        metavar="N",
        help='the shape of an input, as 1 28 28 1 or "(1, 28, 28, 1)" (default: the checkpoint\'s)',
    )
    say(
        "--input-layout",
        default="nhwc",
        metavar="LAYOUT",
        help="nhwc, or nchw for callers who feed that (default: nhwc)",
    )
    say(
        "--with-preprocess",
        action="store_true",
        help="put the config's preprocessing in front, so that raw inputs go in",
    )
    say(
        "--with-softmax",
        action="store_true",
        help="put a softmax at the end, so that probabilities come out",
    )
    say("--quantize", metavar="PRECISION", help=f"one of {', '.join(PRECISIONS)}")
    say(
        "--samples",
        type=int,
        default=200,
        help="how many training examples int8 takes its ranges from (default: 200)",
    )
    say(
        "--demo",
        action="store_true",
        help="write a page beside the ONNX file that runs it in a browser",
    )
    return checked(parser.parse_intermixed_args(argv))


def checked(arguments):
    """The arguments, once each is known to be one of those allowed, with `shape` in place of `input`."""
    for option in ("formats", "input"):  # which take what is behind them, an override too
        given = getattr(arguments, option) or []
        arguments.overrides += [text for text in given if "=" in text]
        setattr(arguments, option, [text for text in given if "=" not in text])
        if given and not getattr(arguments, option):
            raise UserError(f"--{option}: names none; overrides of the config stand before it")
    arguments.formats = list(
        dict.fromkeys(name for text in arguments.formats for name in text.lower().split(","))
    )
    choose("--formats", arguments.formats, FORMATS)
    choose("--route", [arguments.route], ("auto", "native", "jax2tf"))
    choose("--quantize", [arguments.quantize] if arguments.quantize else [], PRECISIONS)
    choose("--input-layout", [arguments.input_layout], ("nhwc", "nchw"))
    if not 18 <= arguments.opset <= 23:
        raise UserError(f"--opset: must be 18 to 23, got {arguments.opset}")
    for name in ("batch", "samples"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise UserError(f"--{name}: must be at least 1, got {value}")
    if arguments.name and not re.fullmatch(r"[\w][\w .-]*", arguments.name):
        raise UserError(
            f"--name: {arguments.name!r} is no name of a folder; letters, digits, '-', '_', '.' and spaces are"
        )
    if arguments.demo and "onnx" not in arguments.formats:
        raise UserError("--demo: runs the ONNX file; add onnx to --formats")
    if arguments.demo and arguments.batch not in (None, 1):
        raise UserError(f"--demo: gives one example at a time; leave out --batch {arguments.batch}")
    arguments.shape = shape_of(arguments.input) if arguments.input else None
    return arguments


def choose(option, found, allowed):
    """Refuse what is not allowed."""
    for value in found:
        if value not in allowed:
            raise UserError(f"{option}: no {value!r}; there are {', '.join(allowed)}")


def shape_of(texts):
    """The shape of one input: without its first number, the batch."""
    text = " ".join(texts)
    numbers = re.findall(r"\d+", text)
    if not re.fullmatch(r"[\s\d,()\[\]]*", text) or len(numbers) < 2 or "0" in numbers:
        raise UserError(
            f'--input: {text!r} is no shape; it reads 1 28 28 1, or "(1, 28, 28, 1)", with the batch first'
        )
    batch, *shape = map(int, numbers)
    if batch != 1:
        raise UserError(
            f"--input: {text!r}: a shape begins with the batch, 1; --batch N fixes it to another"
        )
    return tuple(shape)


if __name__ == "__main__":
    sys.exit(main())
