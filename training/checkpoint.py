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
    plain = jax.device_get(jax.tree.map(without_key_type, tree))
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in named_leaves(plain).items()}
    atomic_write(path, serialize(arrays, {"rawtree": json.dumps(metadata)}))


def without_key_type(leaf):
    """The numbers of a random key, as some optimizers hold one."""
    is_key = hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


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


def check_fits(path, arrays, like):
    """Refuse arrays that are not those of the tree `like`: every name and shape must agree, all differences are listed."""
    wanted = named_leaves(like)
    missing = [f"missing: {name} {leaf.shape}" for name, leaf in wanted.items() if name not in arrays]
    extra = [f"unexpected: {k} {a.shape}" for k, a in arrays.items() if k.split("/")[0] in like and k not in wanted]
    shapes = {k: (arrays[k].shape, leaf.shape) for k, leaf in wanted.items() if k in arrays}
    misfit = [f"{k}: the file has {has}, the model has {needs}" for k, (has, needs) in shapes.items() if has != needs]
    if len(missing) == len(wanted):
        some = [", ".join(list(names)[:4]) for names in (arrays, wanted)]
        missing = [f"it has none of the model's names; it has {some[0]}, ...; the model has {some[1]}, ..."]
    if missing or extra or misfit:
        raise UserError(f"{path}: does not fit the model\n  " + "\n  ".join(missing + extra + misfit))


class Pretrained:
    """The weights of a checkpoint to start from: its averaged ones, where it has them, since they are what was evaluated."""

    def __init__(self, path):
        self.path, self.arrays = path, load(path)[0]
        self.weights = "ema" if any(name.startswith("ema/") for name in self.arrays) else "params"

    def check(self, params, state):
        """Refuse what does not fit this model, of which shapes suffice."""
        check_fits(self.path, self.arrays, {self.weights: params, "state": state})

    def __call__(self, params, state):
        """(params, state) of the file, placed as the given ones are."""
        self.check(params, state)
        like = {self.weights: params, "state": state}
        tree = map_named(lambda name, leaf: jax.device_put(self.arrays[name].astype(leaf.dtype), leaf.sharding), like)
        return tree[self.weights], tree["state"]


class Checkpoints:
    """The callback that writes checkpoints into a run's folder: every few epochs, of which it keeps the last few, and at each
    epoch that is the best so far by `monitor`, of which it keeps the best."""

    def __init__(self, folder, options, metadata):
        self.folder, self.options, self.metadata = Path(folder), options, metadata
        self.regular, self.best = [], []  # the files of each checkpoint, the oldest first; those of the best
        self.best_value = None
        self.step = None  # of the last checkpoint

    def on_epoch_end(self, run):
        due = run.epoch % self.options.every_epochs == 0 or run.epoch == run.epochs
        better = self.is_better(run.metrics.get(self.options.monitor))
        if due or better:
            paths = self.write(run, f"checkpoint-epoch_{run.epoch}")
            self.retire(paths if due else None, paths if better else None)

    def on_training_end(self, run):
        if self.step != run.step:
            self.retire(self.write(run, f"checkpoint-step_{run.step}"), None)
        if self.best:
            logger.info("Best %s %.4f: %s", self.options.monitor, self.best_value, ", ".join(map(str, self.best)))

    def is_better(self, value):
        """Whether a value is the best so far, and if so remember it; what was not measured, or is not finite, is not."""
        if value is None or not np.isfinite(value):
            return False
        sign = 1 if self.options.mode == "min" else -1
        if self.best_value is not None and sign * value >= sign * self.best_value:
            return False
        self.best_value = value
        return True

    def write(self, run, name):
        """One file for each replica."""
        states, paths = run.states(), []
        for replica, ts in enumerate(states):
            suffix = f"-replica_{replica}" if len(states) > 1 else ""
            paths.append(self.folder / f"{name}{suffix}.params")
            save(paths[-1], ts._asdict(), {**self.metadata, "epoch": run.epoch, "metrics": run.metrics})
        logger.info("Saved %s", ", ".join(map(str, paths)))
        self.step = run.step
        return paths

    def retire(self, regular, best):
        """Take in the files just written, and delete what is neither among the last `keep` nor the best."""
        before = {path for paths in [*self.regular, self.best] for path in paths}
        self.regular = [*self.regular, *([regular] if regular else [])][-self.options.keep :]
        self.best = best or self.best
        for path in before - {path for paths in [*self.regular, self.best] for path in paths}:
            path.unlink(missing_ok=True)
