"""The config of the best trial, to train with it."""

import math

from file_io import read_json
from utils import UserError


def best_config(sweep):
    """The resolved config of the best trial, as a run of its own."""
    trial = sweep.ranked()[0] if sweep.trials else None
    if trial is None or trial.failed is not None or trial.score(math.inf) is None:
        raise UserError(f"{sweep.folder}: no trial has a value of {sweep.monitor} yet")
    config = read_json(sweep.run_dir(trial) / "config.json")
    own = ("$schema", "title", "run_name")  # of a run that belongs to no sweep
    kept = {key: value for key, value in config.items() if key not in own}
    config = {key: sweep.config[key] for key in own if key in sweep.config} | kept
    base = sweep.config.get("checkpoint", {}).get("dir", "saved")
    return config | {"checkpoint": config["checkpoint"] | {"dir": base}}
