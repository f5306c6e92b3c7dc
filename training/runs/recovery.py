"""The state of a run, and weights to evaluate, from a checkpoint."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np

from training.base import evaluated_part, with_frozen
from training.checkpoint.pretrained import check_frozen
from training.checkpoint.restore import check_meaning, filled, probe_of
from training.checkpoint.retention import measured
from training.checkpoint.storage import files, read_all
from training.devices.processes import from_first, is_first, several, together
from training.observers import Point
from training.watching import metric_log
from utils import UserError

logger = logging.getLogger("main")


def point_of(checkpoint, trainer, folder):
    """The Point of a checkpoint in the folder of a run. Its seeds are those of the checkpoint,
    which a rollback may have changed, or new ones if the config has changed (--override)."""
    record = checkpoint.record
    now = jax.eval_shape(lambda ts: ts, trainer.replica_states()[0])
    trees = check_fits(checkpoint, now, len(trainer.replicas.seeds))
    for tree, ts in zip(trees, trainer.replica_states(), strict=True):
        tree |= {"halted": np.bool(False), "state": with_frozen(tree["state"], ts.state)}
    sums, line_continues = sums_so_far(checkpoint, trainer)
    if has_other_seeds(trainer.recipe, record["config"]):
        for tree, seed in zip(trees, trainer.recipe.seeds, strict=True):
            tree["seed"] = np.uint32(seed)
    if not line_continues:
        record = record | {"lined": record["position"]}
    completed = record["epoch"] - bool(record["position"])
    length = record["lengths"].get(metric_log.FILE, 0)
    with together():
        rows = metric_log.epoch_rows(folder, length) if is_first() else []
    history = [row for row in rows if row["epoch"] <= completed]
    fresh = not record["step"] and not length
    states = [now._replace(**tree) for tree in trees]
    return Point(states, record, history, checkpoint, fresh, sums)


def sums_so_far(checkpoint, trainer):
    """(the TrainingSums of an unfinished epoch in a checkpoint, whether its next log line can use
    them). What is now measured differently starts again."""
    sums = trainer.training_sums()
    if not checkpoint.record["position"]:
        return sums, True
    stored = [
        {name.removeprefix("sums/"): a for name, a in arrays.items() if name.startswith("sums/")}
        for arrays in checkpoint.arrays
    ]
    taken = [sums.take(replica, arrays) for replica, arrays in enumerate(stored)]
    of_epochs, of_lines = zip(*taken, strict=True)
    if not all(of_epochs):
        effect = "those of this epoch cover only the rest of it"
        logger.warning("The metrics have changed since the checkpoint: %s", effect)
    return sums, all(of_lines)


def has_other_seeds(recipe, config):
    """Whether a recipe has other seeds than the config of a checkpoint."""
    before, now = config.get("training", {}).get("vary") or {}, recipe.training.vary or {}
    same_list = list(before.get("seed", ())) == list(now.get("seed", ()))
    return config.get("seed", recipe.seed) != recipe.seed or not same_list


def check_fits(checkpoint, template, replicas):
    """The trees of each replica in a checkpoint, if it fits a TrainState of arrays or shapes."""
    if checkpoint is None:
        return []
    count = len(checkpoint.arrays)
    if count != replicas:
        raise UserError(f"{checkpoint.name}: replicas: it holds {count}, this run has {replicas}")
    like = {name: tree for name, tree in template._asdict().items() if name != "halted"}
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


@dataclass(frozen=True)
class Best:
    """The best checkpoint of a run by checkpoint.monitor."""

    name: str
    path: Path  # its file; of several replicas, that of the first one
    epoch: int
    step: int
    monitor: str
    value: float  # of `monitor`
    metrics: dict = field(repr=False)  # all that was measured of these weights
    # reads the (params, state) of each replica that are evaluated
    read: Callable = field(repr=False)

    @property
    def params(self):
        """The first replica's params, as in `run.params`; they are read from the file."""
        return self.read()[0][0]

    @property
    def state(self):
        """The running statistics that belong to `params`."""
        return self.read()[0][1]


def best_of(keeper, trainer):
    """The Best of a run, or None."""

    keeper.wait()

    def find():
        found = keeper.best()
        if found is None:
            return None
        name, value, file, record = found
        metrics = {k: float("nan") if v is None else v for k, v in measured(record).items()}
        facts = {"epoch": record["epoch"], "step": record["step"], "metrics": metrics}
        return {"name": name, "value": value, "path": str(file)} | facts

    found = from_first(find)
    if found is None:
        return None

    def read():
        paths = files(keeper.folder, found["name"])
        checkpoint = read_all(found["name"], paths, verified=not is_first())
        like = trainer.replica_states()[0].evaluated()
        return [trainer.put_weights(tree) for tree in weights_of(checkpoint, *like)]

    path = Path(found.pop("path"))
    return Best(path=path, monitor=keeper.options.monitor, read=read, **found)


def check_unchanged(trainer, probe, pretrained, checkpoint):
    """Refuse to start or resume from weights if model/ now computes something else with them."""
    ts = trainer.replica_states()[0]

    def outputs(*weights):  # weights sharded over processes may be too large for a single host
        return probe(*(trainer.put_weights(weights) if several() else weights))

    if pretrained:
        pretrained.check_probe(outputs, ts.params, ts.state)
    if checkpoint:
        check_frozen(checkpoint.record, ts.state, checkpoint.name, pretrained)
    if checkpoint and probe_of(checkpoint.arrays[0]):
        path, arrays = checkpoint.paths[0], checkpoint.arrays[0]
        now = outputs(*weights_of(checkpoint, *ts.evaluated())[0])
        fix = "add --override to continue with the model as it is now"
        check_meaning(path, probe_of(arrays), now, fix)
