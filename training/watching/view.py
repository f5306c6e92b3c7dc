"""A run as callbacks see it: everything of it can be read, nothing can be set."""

from copy import deepcopy
from types import MappingProxyType

from training.watching.publish import Publisher

READ = (
    "epoch",
    "epochs",
    "steps",
    "position",
    "step",
    "params",
    "state",
    "states",
    "stopped",
    "signal",
    "finished",
)


class View:
    """
    epoch, epochs, position (batches taken of the epoch), steps (in an epoch, or None), step (batches taken in all)
    metrics        the values of the latest line: within an epoch, or at its end; means over the replicas
    history        a row for each epoch
    arrays         what CONCAT metrics and the callbacks' own came to, in the latest measuring of each set; of the first replica
    per_step       an array for each value of the steps of the latest line, and their numbers as "step"; where one needs it
    evaluated      the held-out sets that were measured in this epoch
    sets           {name: dataset}, raw
    folder         of the run, or None
    config         as resolved; {} in a notebook
    publish        shows images, figures and histograms on the trackers: publish.image(view.step, name, picture)
    params, state  a copy of the weights that are evaluated, and of the statistics that go with them
    states()       the TrainState of each replica; its arrays are gone with the next step
    learning_rate()  {name: value} at the latest step, where they are known
    """

    def __init__(self, run, learning_rate, *, sets=None, folder=None, config=None, publish=None):
        fixed = {
            "sets": MappingProxyType(sets or {}),
            "folder": folder,
            "publish": publish or Publisher(),
        }
        vars(self).update(fixed, learning_rate=learning_rate, _run=run, _config=config or {})

    def __getattr__(self, name):
        run = vars(self)["_run"]
        if name in ("metrics", "arrays", "per_step"):
            return MappingProxyType(dict(getattr(run, name)))
        if name == "history":
            return tuple(dict(row) for row in run.history)
        if name == "config":
            return deepcopy(vars(self)["_config"])
        if name == "evaluated":
            return tuple(run.evaluated)
        if name in READ:
            return getattr(run, name)
        raise AttributeError(
            f"a callback sees no {name!r} of a run; there are {', '.join((*READ, *SHOWN))}"
        )

    def __setattr__(self, name, value):
        raise AttributeError(
            f"a callback only reads the run, so {name!r} cannot be set; answer {{'stop': True}} or {{'lr_scale': x}}"
        )

    def __delattr__(self, name):
        raise AttributeError(f"a callback only reads the run: {name!r} cannot be deleted")


SHOWN = (
    "evaluated",
    "metrics",
    "arrays",
    "per_step",
    "history",
    "sets",
    "folder",
    "config",
    "publish",
    "learning_rate()",
)
