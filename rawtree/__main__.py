"""rawtree COMMAND ...: the programs of Rawtree under one name."""

import importlib
import io
import os
import sys

import rawtree

# name: (module, what it does)
COMMANDS = {
    "new": ("rawtree.new", "start a project of your own in a new folder"),
    "train": ("rawtree.train", "train, check, resume, evaluate and report what a config describes"),
    "sweep": ("rawtree.sweep", "train many trials of a config, and compare them"),
    "convert": (
        "rawtree.inference.convert_tflite",
        "export a checkpoint to TFLite and ONNX",
    ),
    "predict": ("rawtree.inference.predict", "print the predictions of a checkpoint or an export"),
    "generate": ("rawtree.inference.generate", "continue a text with a trained language model"),
    "tokenize": ("rawtree.data_loader.tokenize", "turn text into files of tokens, once"),
    "to_torch": ("rawtree.inference.to_torch", "write a checkpoint for another library"),
    "schema": ("rawtree.wiring.schema", "write config.schema.json, with your own parts"),
}


def main() -> None:
    """Run one command, and end with its exit code."""
    name, *words = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(overview())
        sys.exit(0)
    if name not in COMMANDS:
        from rawtree.utils import did_you_mean

        known = f"{did_you_mean(name, COMMANDS)} ({', '.join(COMMANDS)})"
        print(f"rawtree: no command {name!r}{known}", file=sys.stderr)
        sys.exit(2)
    if name in ("train", "sweep"):  # first of all: it may start Python again
        from rawtree.training.devices.huge_pages import start_again_with_them

        start_again_with_them()
    from rawtree.utils import open_closed_streams

    open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # names may have what no terminal can show
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.argv[0] = f"rawtree {name}"  # the name of the program in its help, and in records
    del sys.argv[1]
    module = importlib.import_module(COMMANDS[name][0])
    getattr(module, "leave", sys.exit)(module.main(words))


def overview() -> str:
    """The commands, one per line."""
    lines = [f"  {name:10}{about}" for name, (_, about) in COMMANDS.items()]
    usage = "usage: rawtree COMMAND ..., as in: rawtree train -c config.json"
    return "\n".join([usage, "", *lines, "", "rawtree COMMAND --help describes the rest"])


if __name__ == "__main__":  # python -m rawtree: the working folder may be a stranger's
    root = [str(rawtree.HERE.parent)] if rawtree.IS_CLONE else []
    sys.path[:] = root + [folder for folder in sys.path if folder not in ("", os.getcwd())]
    main()
