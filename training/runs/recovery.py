"""The state of a run, and weights to evaluate, from a checkpoint."""

import logging

import jax
import numpy as np

from training.base import evaluated_part, with_frozen
from training.checkpoint.pretrained import check_frozen
from training.checkpoint.restore import check_meaning, filled, probe_of, sums_so_far
from training.devices.processes import is_first, several
from training.watchers import Point
from training.watching import metric_log
from utils import UserError

logger = logging.getLogger("main")


def point_of(checkpoint, trainer, folder):
    """The Point of a checkpoint in the folder of a run. Its seeds are those of the checkpoint,
    which a rollback may have changed, or new ones if the config has changed (--override)."""
    record = checkpoint.record
    now = jax.eval_shape(lambda ts: ts, trainer.replica_states()[0])
    trees = check_fits(checkpoint, now, len(trainer.replicas.seeds))
    zeros, line_continues = trainer.zero_sums(), True
    for tree, arrays, ts in zip(trees, checkpoint.arrays, trainer.replica_states(), strict=True):
        tree |= {"sums": {}, "state": with_frozen(tree["state"], ts.state)}
        if record["position"]:
            tree["sums"], line_continues = sums_so_far(arrays, zeros)
    if has_other_seeds(trainer.recipe, record["config"]):
        for tree, seed in zip(trees, trainer.recipe.seeds, strict=True):
            tree["seed"] = np.uint32(seed)
    if not line_continues:
        record = record | {"lined": record["position"]}
    completed = record["epoch"] - bool(record["position"])
    rows = metric_log.epoch_rows(folder) if is_first() else []
    history = [row for row in rows if row["epoch"] <= completed]
    fresh = not record["step"] and not record["lengths"].get(metric_log.FILE)
    return Point([now._replace(**tree) for tree in trees], record, history, checkpoint, fresh)


def has_other_seeds(recipe, config):
    """Whether a recipe has other seeds than the config of a checkpoint."""
    before, now = config.get("training", {}).get("vary") or {}, recipe.training.vary or {}
    same_list = list(before.get("seed", ())) == list(now.get("seed", ()))
    return config.get("seed", recipe.seed) != recipe.seed or not same_list


def check_fits(checkpoint, template, replicas):
    """The trees of each replica in a checkpoint, without its sums, if it fits a TrainState of
    arrays or shapes."""
    if checkpoint is None:
        return []
    count = len(checkpoint.arrays)
    if count != replicas:
        raise UserError(f"{checkpoint.name}: replicas: it holds {count}, this run has {replicas}")
    like = {name: tree for name, tree in template._asdict().items() if name != "sums"}
    files = zip(checkpoint.paths, checkpoint.arrays, strict=True)
    return [filled(path, arrays, like) for path, arrays in files]


def weights_of(checkpoint, params, state):
    """[(params, state)] of each replica that are evaluated, in trees like these."""
    trees = []
    for path, arrays in zip(checkpoint.paths, checkpoint.arrays, strict=True):
        part = evaluated_part(arrays)
        tree = filled(path, arrays, {part: params, "state": state})
        trees.append((tree[part], tree["state"]))
    return trees


def best_weights(keeper, trainer):
    """(name, [(params, state) of each replica on the devices], step) of the best checkpoint, or
    None."""
    checkpoint = keeper.best()
    if checkpoint is None:
        return None
    params, state = trainer.replica_states()[0].evaluated()
    trees = weights_of(checkpoint, params, state)
    on_devices = [trainer.put_weights(tree) for tree in trees]
    return checkpoint.name, on_devices, checkpoint.record["step"]


def check_unchanged(trainer, probe, pretrained, checkpoint):
    """Refuse to start or resume from weights if model/ now computes something else with them."""
    ts = trainer.replica_states()[0]

    def outputs(*weights):  # weights sharded over processes may be too large for a single host
        return probe(*(trainer.put_weights(weights) if several() else weights))

    if pretrained:
        logger.info("%s %s", "With" if checkpoint else "Starting from", pretrained)
        pretrained.check_probe(outputs, ts.params, ts.state)
    if checkpoint:
        check_frozen(checkpoint.record, ts.state, checkpoint.name, pretrained)
    if checkpoint and probe_of(checkpoint.arrays[0]):
        path, arrays = checkpoint.paths[0], checkpoint.arrays[0]
        now = outputs(*weights_of(checkpoint, *ts.evaluated())[0])
        fix = "add --override to continue with the model as it is now"
        check_meaning(path, probe_of(arrays), now, fix)
