"""Write the weights of a checkpoint as another library names and stores them.

    python -m inference.to_torch saved/<title>/<run> --rules gpt2 out.safetensors

The rules are those of `training.pretrained`, applied backwards; the library's own model loads the
file with all names and shapes as it expects them.
"""

import argparse
import sys
from pathlib import Path

from utils import UserError, run_command


def main(argv=None):
    """Run the command line; a user's mistake ends in one message and an exit code."""
    parser = argparse.ArgumentParser(description="Write a checkpoint for another library.")
    add = parser.add_argument
    add("model", help="a run's folder, or one of its checkpoints")
    add("out", help="the safetensors file to write")
    add("--rules", required=True, help="a ready rule file, such as gpt2, or the path of one")
    add("--force", action="store_true", help="replace the file if it exists")
    return run_command(lambda: write(parser.parse_args(argv)))


def write(arguments):
    arrays = to_torch(arguments.model, arguments.out, arguments.rules, arguments.force)
    numbers = sum(array.size for array in arrays.values())
    print(f"Wrote {arguments.out}: {len(arrays)} arrays with {numbers:,} numbers")


def to_torch(model, out, rules, force=False):
    """Write the weights of a checkpoint, or of the newest one of a run, and return {name: array};
    of a run with averaged weights, those."""
    from safetensors.numpy import save

    from file_io import atomic_file
    from inference.load import checkpoint_at
    from training.checkpoint.pretrained import Pretrained
    from training.checkpoint.restore import restacked
    from training.checkpoint.rules import read_rules, written

    out = Path(out).expanduser()
    if out.suffix != ".safetensors":
        raise UserError(f"{out}: must end in .safetensors, the format that is written")
    if out.exists() and not force:
        raise UserError(f"{out}: exists; pass --force to replace it")
    checkpoint, rules = checkpoint_at(model), read_rules(rules, "--rules")
    leaves = restacked(Pretrained(checkpoint).arrays, {})  # blocks of `scan` one by one
    try:
        arrays = written(rules, leaves)
    except UserError as error:
        raise UserError(f"{checkpoint}: cannot be written: {error}") from error
    with atomic_file(out) as file:
        file.write(save(arrays, metadata={"format": "pt"}))  # transformers reads only such files
    return arrays


if __name__ == "__main__":
    sys.exit(main())
