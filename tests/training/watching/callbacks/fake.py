"""A View with the documented fields, for tests that do not need a whole run."""

from contextlib import suppress
from types import SimpleNamespace

import numpy as np

from data_loader.base import has_items
from training.watching.publish import PictureFiles


class Published:
    """What went to the trackers: [(step, name, picture)]. The picture files are one of them."""

    def __init__(self, folder=None):
        self.images, self.files = [], PictureFiles()
        if folder:
            self.files.start(SimpleNamespace(folder=folder))

    def image(self, step, name, picture):
        self.images.append((step, name, picture))
        if hasattr(self.files, "folder"):
            with suppress(OSError):  # a tracker that fails ends nothing
                self.files.image(step, name, picture)


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
        "params": {},
        "sets": {},
        "evaluated": (),
        "arrays": {},
        "per_step": {},
        "learning_rate": dict,
        "publish": Published(fields.get("folder")),
        "classes": None,
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
