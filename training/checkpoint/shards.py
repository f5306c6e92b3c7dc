"""The weights that another program wrote: one safetensors file, several with an index, or a folder
with either."""

from pathlib import Path

from file_io import read_json
from training.checkpoint import storage
from utils import UserError

INDEX = ".safetensors.index.json"
NAMES = ("model", "diffusion_pytorch_model")


def load_weights(path):
    """({name: array}, record) of a checkpoint or of another program's weights, whose record is
    empty."""
    path = weights_in(path)
    return (read_shards(path), {}) if path.name.endswith(INDEX) else storage.load(path)


def weights_in(path):
    """The file of the weights in a folder as HuggingFace's libraries write it; else the path."""
    if path.is_dir() and path.suffix != storage.SUFFIXES["orbax"]:
        for name in NAMES:
            for suffix in (INDEX, ".safetensors"):
                if (file := path / f"{name}{suffix}").exists():
                    return file
        if pickles := sorted(path.glob("pytorch_model*.bin")):
            return pickles[0]  # refused, with the way to convert it
        raise UserError(f"{path}: is a folder without model.safetensors; name a file")
    return path


def read_shards(path):
    """{name: array} of all the files that an index names, which lie beside it."""
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise UserError(f"{path}: must have a weight_map of {{name: file}}")
    arrays = {}
    for file in sorted(set(names.values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(f"{path}: {file!r} must be a safetensors file in the same folder")
        found, _ = storage.load(path.with_name(file))
        expected = [name for name, place in names.items() if place == file]
        if missing := [name for name in expected if name not in found]:
            raise UserError(f"{path}: says that {file} holds {missing[0]}, which it does not")
        arrays |= {name: found[name] for name in expected}
    return arrays
