"""Checkpoints: safetensors files that hold a whole TrainState, written atomically and read strictly. Nothing is unpickled."""

import json
import logging
from pathlib import Path

import jax
import numpy as np

from utils import UserError, atomic_write, map_named, named_leaves

logger = logging.getLogger("main")


def save(path, tree, metadata):
    """Write a tree of arrays under its names; metadata is JSON."""
    from safetensors.numpy import save as serialize

    # order="C": safetensors silently writes wrong data for arrays that are not contiguous.
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in named_leaves(jax.device_get(tree)).items()}
    atomic_write(path, serialize(arrays, {"rawtree": json.dumps(metadata)}))


def load(path):
    """({name: array}, metadata) of a safetensors file, ours or another's."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise UserError(f"{path}: there is no such checkpoint")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = json.loads((file.metadata() or {}).get("rawtree", "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118 (not a dict)
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{path}: is not a whole safetensors file: {error}") from error


def restore(path, arrays, like):
    """The arrays of a file in the form of the tree `like`; every name and shape must agree, all differences are listed."""
    wanted = named_leaves(like)
    missing = [f"missing: {name} {leaf.shape}" for name, leaf in wanted.items() if name not in arrays]
    extra = [f"unexpected: {k} {a.shape}" for k, a in arrays.items() if k.split("/")[0] in like and k not in wanted]
    shapes = {k: (arrays[k].shape, leaf.shape) for k, leaf in wanted.items() if k in arrays}
    misfit = [
        f"{name}: the file has {found}, the model has {needed}" for name, (found, needed) in shapes.items() if found != needed
    ]
    if len(missing) == len(wanted):
        missing = [
            f"none of the model's names is in it; it has {', '.join(list(arrays)[:5])}, ..., the model {', '.join(list(wanted)[:5])}, ..."
        ]
    if missing or extra or misfit:
        raise UserError(f"{path}: does not fit the model\n  " + "\n  ".join(missing + extra + misfit))
    return map_named(lambda name, leaf: jax.device_put(arrays[name].astype(leaf.dtype), leaf.sharding), like)


def pretrained(path):
    """The function that replaces (params, state) by those of a file; by its averaged weights, where it has them."""
    arrays, _ = load(path)
    weights = "ema" if any(name.startswith("ema/") for name in arrays) else "params"

    def replace(params, state):
        tree = restore(path, arrays, {weights: params, "state": state})
        return tree[weights], tree["state"]

    return replace


class Checkpoints:
    """The callback that writes checkpoints into a run's folder and keeps the last few, and the best by `monitor`."""

    def __init__(self, folder, options, metadata):
        self.folder, self.options, self.metadata = Path(folder), options, metadata
        self.written = []  # (value of the monitored metric or None, paths), the oldest first
        self.step = None  # of the last checkpoint

    def on_epoch_end(self, run):
        if run.epoch % self.options.every_epochs == 0 or run.epoch == run.epochs:
            self.write(run, f"checkpoint-epoch_{run.epoch}")

    def on_training_end(self, run):
        if self.step != run.step:
            self.write(run, f"checkpoint-step_{run.step}")

    def write(self, run, name):
        """One file for each replica; then delete what need not be kept."""
        states, paths = run.states(), []
        for replica, ts in enumerate(states):
            suffix = f"-replica_{replica}" if len(states) > 1 else ""
            paths.append(self.folder / f"{name}{suffix}.params")
            save(paths[-1], ts._asdict(), {**self.metadata, "epoch": run.epoch, "metrics": run.metrics})
        logger.info("Saved %s", ", ".join(map(str, paths)))
        self.step = run.step
        self.written.append((run.metrics.get(self.options.monitor), paths))  # None where this epoch was not evaluated
        self.retire()

    def retire(self):
        """Delete all but the last `keep` and the best."""
        judged = [entry for entry in self.written if entry[0] is not None and np.isfinite(entry[0])]
        best = (min if self.options.mode == "min" else max)(judged, key=lambda entry: entry[0], default=None)
        kept = [entry for i, entry in enumerate(self.written) if i >= len(self.written) - self.options.keep or entry is best]
        for _, paths in [entry for entry in self.written if entry not in kept]:
            for path in paths:
                path.unlink(missing_ok=True)
        self.written = kept
