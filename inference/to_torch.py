"""Write the weights of a checkpoint as another library names and stores them.

    python -m inference.to_torch saved/<title>/<run> --rules gpt2 out.safetensors

The rules are those of `training.pretrained`, applied backwards; the library's own model loads the
file with all names and shapes as it expects them. Without rules the names are those of this
project's model. The factors of `lora` are merged into the weights.
"""

import argparse
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils import UserError, named_leaves, run_command
from utils.forms import local_path

if TYPE_CHECKING:
    import numpy as np


def main(argv: list[str] | None = None) -> int:
    """Run the command line; a user's mistake ends in one message and an exit code."""
    parser = argparse.ArgumentParser(description="Write a checkpoint for another library.")
    add = parser.add_argument
    add("model", help="a run's folder, or one of its checkpoints")
    add("out", help="the safetensors file to write")
    add("--best", action="store_true", help="of a run's folder, the best checkpoint")
    add("--rules", help="a ready rule file, such as gpt2, or the path of one; none: our names")
    add("--force", action="store_true", help="replace the file if it exists")
    add("--trust", action="store_true", help="let the config of the run import its dotted names")
    return run_command(lambda: write(parser.parse_args(argv)))


def write(arguments: Namespace) -> None:
    from training.checkpoint.storage import chosen_checkpoint

    options = arguments.rules, arguments.force, arguments.trust
    checkpoint = chosen_checkpoint(arguments.model, arguments.best)
    arrays = to_torch(checkpoint, arguments.out, *options)
    numbers = sum(array.size for array in arrays.values())
    print(f"Wrote {arguments.out}: {len(arrays)} arrays with {numbers:,} numbers")


def plain_weights(checkpoint: Path, trust: bool) -> dict[str, Any]:
    """{name: array} of a checkpoint, with those that its run has frozen."""
    from inference.load import load
    from training.checkpoint.pretrained import Pretrained

    weights = Pretrained(checkpoint)
    if "frozen" not in weights.record:
        return weights.arrays
    loaded = load(checkpoint, trust=trust)
    return named_leaves(loaded.params) | named_leaves({"state": loaded.state})


def to_torch(
    model: str | Path,
    out: str | Path,
    rules: str | None = None,
    force: bool = False,
    trust: bool = False,
) -> "dict[str, np.ndarray]":
    """Write the weights of a checkpoint, or of the newest one of a run, and return {name: array};
    of a run with averaged weights, those."""
    from safetensors.numpy import save

    from training.checkpoint.rules import read_rules, written
    from training.checkpoint.storage import checkpoint_at
    from training.checkpoint.trees import restacked  # blocks of `scan` one by one
    from utils.files import atomic_file

    out = local_path("out", out)
    if out.suffix != ".safetensors":
        raise UserError(f"{out}: must end in .safetensors, the format that is written")
    if out.exists() and not force:
        raise UserError(f"{out}: exists; pass --force to replace it")
    checkpoint = checkpoint_at(model)
    renaming = read_rules(rules, "--rules") if rules else None
    arrays = plain_weights(checkpoint, trust)
    try:
        if renaming:
            arrays = written(renaming, restacked(arrays, {}))
    except UserError as error:
        raise UserError(f"{checkpoint}: cannot be written: {error}") from error
    with atomic_file(out) as file:
        file.write(save(arrays, metadata={"format": "pt"}))  # transformers reads only such files
    return arrays


if __name__ == "__main__":
    sys.exit(main())
