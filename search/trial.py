"""One trial of a sweep, or several as one program, in a process of its own: a normal run."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search.claims import claimed
from search.sweep_folder import Sweep, Trial, propose, read_sweep
from training.checkpoint.divergence import advice, description_of_bad_step
from utils import DONE, STOPPED, RunError, UserError, cut
from utils.files import inside
from wiring.build import build
from wiring.own_modules import look_in

if TYPE_CHECKING:
    from training.observers import Bad
    from training.run import Run as TrainingRun


@dataclass
class Pause:
    """The observer that stops a run after an epoch, to be resumed later."""

    epoch: int

    def on_start(self, run: "TrainingRun") -> dict[str, Any] | None:
        # The epoch may have been reached before the sweep was killed.
        return self.on_row(run, {"end_of_epoch": True})

    def on_row(self, run: "TrainingRun", row: dict[str, Any]) -> dict[str, Any] | None:
        if "end_of_epoch" not in row or run.completed < self.epoch or run.finished:
            return None
        return {"pause": f"the sweep in epoch {run.completed}"}


@dataclass
class Failures:
    """The observer of a program that notes which of its trials have diverged."""

    sweep: Sweep
    trials: list[Trial | None]

    def on_bad(self, run: "TrainingRun", bad: "Bad") -> None:
        trial = self.trials[bad.replica]
        if trial and not bad.of_state:
            why = description_of_bad_step(bad.step + 1, run.epoch, bad.leaf)
            self.sweep.fail([trial], f"{why}.\n{advice('stop')}")
            self.trials[bad.replica] = None  # its first bad step is noted


def train_trial(root: Path, folder: str | Path, number: int, trusted: bool) -> int:
    """Begin or resume a trial, with all of its program, to its end or the next pause of successive
    halving, unless another process trains it; returns the exit code."""
    sweep = read_sweep(folder)
    while number >= len(sweep.trials) and sweep.may_propose():
        sweep = propose(sweep)
    if number >= len(sweep.trials):
        raise UserError(f"--trial {number}: the sweep has {len(sweep.trials)} trials, from 0")
    run = sweep.trials[number].run
    with claimed(sweep.folder, run) as is_mine:
        sweep = read_sweep(folder)
        due, until = sweep.due()
        if not is_mine or run not in due:
            why = "is not due" if is_mine else "is trained by another process"
            print(f"{run} {why}", flush=True)
            return DONE
        return train_run(root, sweep, run, until, trusted)


def train_run(root: Path, sweep: Sweep, run: str, until: int | None, trusted: bool) -> int:
    from training.commands.failure import failed
    from training.commands.start import train
    from training.devices.program_cache import keep_programs

    errors = inside(sweep.folder, f"{run}.stderr.txt")
    with open(errors, "wb") as file:
        os.dup2(file.fileno(), 2)
    folder, source, trials = inside(sweep.folder, run), Path(sweep.source), sweep.members(run)
    if folder.is_dir() and not (folder / "config.json").exists():
        shutil.rmtree(folder)  # the process was killed before the run began
    observers: list[object] = [Pause(until)] if until else []
    try:
        config = sweep.run_config(trials)
        if len(trials) > 1 and sweep.stops_at_nonfinite():
            observers.append(Failures(sweep, [*trials]))
        parts = build(config, source.name, trusted, look_in(source.parent))
        keep_programs()
        code = train(parts, root, "auto", observers=observers)
    except (Exception, SystemExit) as error:
        why = str(error) if isinstance(error, UserError | RunError) else ""
        sweep.fail(trials, cut(why or f"{type(error).__name__}: {error}", 1000))
        return failed(error)
    if code in (DONE, STOPPED):
        errors.unlink()
    return code
