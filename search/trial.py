"""One trial of a sweep, in a process of its own: a normal run, which may pause after an epoch."""

import json
import shutil
import sys
from pathlib import Path

from utils import RunError, UserError
from wiring.build import build
from wiring.own_modules import look_in

MARK = "The trial failed: "  # begins the line in which its process prints the reason


class Pause:
    """The observer that stops a run after an epoch, to be resumed later."""

    def __init__(self, epoch):
        self.epoch = epoch

    def on_start(self, run):  # the epoch may have been reached before the sweep was killed
        return self.on_row(run, {"end_of_epoch": True})

    def on_row(self, run, row):
        if "end_of_epoch" not in row or run.completed < self.epoch or run.finished:
            return None
        return {"pause": f"the sweep in epoch {run.completed}"}


def reported(run):
    """The exit code of `run()`, which trains; an error is reported to the process of the sweep."""
    try:
        return run()
    except (Exception, SystemExit) as error:
        from training.commands.failure import failed

        why = str(error) if isinstance(error, UserError | RunError) else ""
        print(MARK + json.dumps(why or f"{type(error).__name__}: {error}"), file=sys.stderr)
        return failed(error)


def train_trial(root, sweep, number, until, trusted):
    """Begin or resume a trial, to its end or until an epoch; returns the exit code."""
    from training.commands.start import train
    from training.devices.program_cache import keep_programs

    trial = sweep.trials[number]
    folder, source = sweep.run_dir(trial), Path(sweep.source)
    if folder.is_dir() and not (folder / "config.json").exists():
        shutil.rmtree(folder)  # the process was killed before the run began
    config = sweep.trial_config(trial)
    parts = build(config, source.name, trusted, look_in(source.parent))
    keep_programs()
    return train(parts, root, "auto", observers=[Pause(until)] if until else [])
