"""A View with the documented fields, where a whole run would prove no more."""

from types import SimpleNamespace

import numpy as np


class Published:
    """What went to the trackers: [(step, name, picture)]."""

    def __init__(self):
        self.images = []

    def image(self, step, name, picture):
        self.images.append((step, name, picture))


def view(**fields):
    """What a callback sees after the 7th step, in the 2nd epoch, unless told otherwise."""
    usual = {
        "epoch": 2,
        "epochs": 5,
        "steps": 4,
        "position": 3,
        "step": 7,
        "metrics": {},
        "history": (),
        "folder": None,
    }
    usual |= {
        "config": {},
        "sets": {},
        "evaluated": (),
        "arrays": {},
        "per_step": {},
        "learning_rate": dict,
    }
    return SimpleNamespace(**usual | {"publish": Published()} | fields)


def steps(first, norms, losses=None):
    """The columns of some consecutive steps."""
    losses = np.ones(len(norms)) if losses is None else np.asarray(losses)
    return {
        "step": np.arange(first, first + len(norms)),
        "gradient_norm": np.asarray(norms, float),
        "loss": losses,
    }
