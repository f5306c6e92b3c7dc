"""A View with the documented fields, for tests that do not need a whole run."""

from types import SimpleNamespace

import numpy as np

from data_loader.base import has_items


class Published:
    """What went to the trackers: [(step, name, picture)]."""

    def __init__(self):
        self.images = []

    def image(self, step, name, picture):
        self.images.append((step, name, picture))


def view(**fields):
    """What a callback sees after step 7, in epoch 2, with other values for some fields."""
    defaults = {
        "epoch": 2,
        "epochs": 5,
        "steps": 4,
        "position": 3,
        "step": 7,
        "metrics": {},
        "history": (),
        "folder": None,
        "config": {},
        "sets": {},
        "evaluated": (),
        "arrays": {},
        "per_step": {},
        "learning_rate": dict,
        "classes": None,
        "publish": Published(),
    }
    seen = SimpleNamespace(**defaults | fields)
    train = seen.sets.get("train")
    items = range(len(train)) if has_items(train) else None
    seen.first_examples = lambda count: items and [train[i] for i in items[:count]]
    return seen


def steps(first, norms, losses=None):
    """The columns of some consecutive steps."""
    return {
        "step": np.arange(first, first + len(norms)),
        "gradient_norm": np.asarray(norms, float),
        "loss": np.ones(len(norms)) if losses is None else np.asarray(losses),
    }
