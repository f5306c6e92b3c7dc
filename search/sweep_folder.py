"""A sweep on disk: saved/<title>/<sweep>/sweep.json, beside it the run folders of the trials.

The file holds the spec, the config and, for every trial, its values and what became of it. What
runs next is computed from that alone, so a sweep that was killed continues where it was.
"""

import json
import math
import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from search.samplers import planned, propose
from search.spec import Spec, as_json, parse_spec
from training.checkpoint.run_folder import flat
from training.report.read import read_run
from utils import UserError, printable, quoted
from utils.files import (
    atomic_write,
    check_links,
    inside,
    is_count,
    is_list,
    is_number,
    is_text,
    locked,
    read_json,
)
from wiring.config import override, show, unusable

FILE = "sweep.json"
FREE = ("workers", "trials")  # what may differ when a sweep continues
TOGETHER = 64  # trials of a program, at most
PATIENCE = 10.0  # seconds in which the processes of a killed sweep end


@dataclass
class Trial:
    """One trial. `scores` are [epochs, the best value of the metric until then], one for each pause
    and one for the end."""

    number: int
    values: dict  # {path.to.key: value}
    epochs: int = 0
    finished: bool = False
    failed: str | None = None  # why
    scores: list = field(default_factory=list)

    @property
    def name(self):
        return f"trial_{self.number:03d}"

    @property
    def over(self):
        return self.finished or self.failed is not None

    def score(self, epochs):
        """The best value up to a number of epochs, or None."""
        return next((value for at, value in reversed(self.scores) if at <= epochs), None)


@dataclass
class Sweep:
    """A sweep, and the file that it is stored in."""

    folder: Path
    spec: Spec
    config: dict  # without the values of a trial
    source: str  # the config file
    monitor: str
    sign: int  # 1 if the monitored metric should be low, -1 if it should be high
    epochs: int | None  # of a trial; with halving it is the same for all
    trials: list
    form: str = "processes"  # or "program"
    why: str = ""  # why it has this form
    programs: list = field(default_factory=list)  # the numbers of the trials of each

    def is_consistent(self):
        """Whether the trials have their numbers, and values of the keys that vary."""
        numbers = [trial.number for trial in self.trials] == list(range(len(self.trials)))
        keys = all(trial.values.keys() == self.spec.keys.keys() for trial in self.trials)
        members = [number for program in self.programs for number in program]
        return numbers and keys and max(members, default=-1) < len(self.trials)

    def save(self):
        content = asdict(self) | {"folder": None, "spec": as_json(self.spec)}
        atomic_write(self.folder / FILE, (json.dumps(content, indent=1) + "\n").encode())

    def run_dir(self, trial):
        return inside(self.folder, trial.name)

    def trial_config(self, trial):
        """The config of a trial: that of a run with its name, in the folder of the sweep."""
        config = with_values(self.config, trial.values)
        config |= {"title": self.folder.name, "run_name": trial.name, "resume": None}
        return with_values(config, {"checkpoint.dir": str(self.folder.parent)})

    def program_dir(self, number):
        return inside(self.folder, f"program_{number:03d}")

    def trials_of(self, number):
        """The trials of a program."""
        return [self.trials[trial] for trial in self.programs[number]]

    def program_config(self, trials):
        """The config of a run whose replicas are these trials; its folder has no name yet. A trial
        that diverges does not end the others, and no checkpoint is the best of all trials."""
        vary = {key: [each.values[key] for each in trials] for key in self.spec.keys}
        sections = {
            "training": {"replicas": len(trials), "vary": vary},
            "checkpoint": {"monitor": None, "save_top_k": 1},
            "logging": {"report": False},
        }
        config = self.trial_config(trials[0])
        for section, values in sections.items():
            config = with_values(config, {f"{section}.{key}": v for key, v in values.items()})
        if config["training"].get("on_nonfinite", "stop") == "stop":
            config["training"]["on_nonfinite"] = "skip"
        return config

    def next_program(self):
        """The number of the program to run next, which may be a new one, or None."""
        if self.form != "program":
            return None
        for number in range(len(self.programs)):
            if not all(trial.over for trial in self.trials_of(number)):
                return number
        known = {trial for program in self.programs for trial in program}
        new = [t.number for t in self.trials if not t.over and t.number not in known]
        if len(new) < 2:  # one trial is a process
            return None
        self.programs.append(new[:TOGETHER])
        self.save()
        return len(self.programs) - 1

    def use_processes(self, why):
        """Continue with one process for each trial, as a program has failed."""
        self.form, self.why, self.programs = "processes", why, []
        self.save()

    def form_text(self):
        if self.form == "program":
            return "The trials run together, as one program"
        return f"Each trial runs in a process of its own{self.why and f' ({self.why})'}"

    def retry(self):
        """Let the failed trials run again: outside of their program if its other trials did not
        fail."""
        failed = {trial.number for trial in self.trials if trial.failed is not None}
        self.programs = [
            members if failed.issuperset(members) else [t for t in members if t not in failed]
            for members in self.programs
        ]
        for number in failed:
            self.trials[number].failed = None

    def rungs(self):
        return self.spec.halving.rungs(self.epochs) if self.spec.halving else [self.epochs]

    def due(self):
        """(the trials to run next, the epoch until which they run, or None: to their end)"""
        group, until = self.continuing()
        waiting = [t for t in group if not t.over and (until is None or t.epochs < until)]
        return waiting, until

    def continuing(self):
        """(the trials that halving has not stopped, the epoch until which they run now, or None: to
        their end). All of them reach a pause before the better ones continue."""
        group = self.trials
        for epochs in self.rungs()[:-1]:
            waiting = any(not t.over and t.epochs < epochs for t in group)
            if waiting or self.may_propose():
                return group, epochs
            group = self.best_of(group, epochs)
        return group, None

    def best_of(self, group, epochs):
        """The best trials of a group that has paused, without those that failed before."""
        there = [trial for trial in group if trial.failed is None or trial.epochs >= epochs]
        scored = [trial for trial in there if trial.score(epochs) is not None]
        scored.sort(key=lambda trial: (self.sign * trial.score(epochs), trial.number))
        return scored[: math.ceil(len(scored) / self.spec.halving.factor)]

    def ranked(self):
        """All trials, the best first; those that failed, or have no value, come last. A value is
        the best of all epochs, so a trial that halving stopped is behind those that continued."""

        def place(trial):
            score = trial.score(math.inf)
            bad = score is None or trial.failed is not None
            return bad, 0.0 if bad else self.sign * score, trial.number

        return sorted(self.trials, key=place)

    def may_propose(self):
        """Whether Optuna has trials left to propose."""
        return self.spec.how == "optuna" and len(self.trials) < self.spec.trials

    def add_proposed(self):
        values = propose(self.spec, self.trials, self.sign)
        self.trials.append(Trial(len(self.trials), values))
        self.save()

    def record(self, trial, finished):
        """Store how far a trial came, and the best value of its metric until now."""
        metrics = read_run(self.run_dir(trial)).metrics
        trial.finished, trial.epochs = finished, max(metrics.epoch_at.values(), default=0)
        curve = metrics.epochs.get(self.monitor)
        # The last weights of a run that ended within an epoch have a value after those of epochs.
        values = [*(curve.values if curve else []), metrics.final.get(self.monitor, math.nan)]
        values = [float(value) for value in values if math.isfinite(value)]
        if values:
            trial.scores.append([trial.epochs, self.sign * min(self.sign * v for v in values)])
        self.save()

    def record_failure(self, trial, why):
        trial.failed = why
        self.save()

    def state(self, trial):
        """The state of a trial in one word."""
        if trial.over:
            return "failed" if trial.failed is not None else "finished"
        group, _ = self.continuing()
        if trial not in group:
            return "stopped"
        return "paused" if trial.epochs else "waiting"


def is_config(value):
    return is_text(value.get("title", "run")) and is_dict(value.get("checkpoint", {}))


def is_score(value):
    return is_list(value, is_number) and len(value) == 2


def is_dict(value):
    return type(value) is dict


TRIAL = {  # {key: whether its value is valid}; the file may be a stranger's
    "number": is_count,
    "values": is_dict,
    "epochs": is_count,
    "finished": lambda value: type(value) is bool,
    "failed": lambda value: value is None or is_text(value),
    "scores": partial(is_list, is_valid=is_score),
}


def is_trial(value):
    known = is_dict(value) and value.keys() == TRIAL.keys()
    return known and all(is_valid(value[key]) for key, is_valid in TRIAL.items())


SWEEP = {
    "spec": is_dict,
    "config": lambda value: is_dict(value) and is_config(value),
    "source": lambda value: is_text(value) and value == printable(value, keep=""),
    "monitor": is_text,
    "sign": lambda value: value in (1, -1),
    "epochs": lambda value: is_count(value) and value > 0,
    "trials": partial(is_list, is_valid=is_trial),
    "form": lambda value: value in ("processes", "program"),
    "why": is_text,
    "programs": partial(is_list, is_valid=partial(is_list, is_valid=is_count)),
}
PLAIN = SWEEP.keys() - {"spec", "trials"}


def with_values(config, values):
    """A config with the values of a trial."""
    for key, value in values.items():
        config = override(config, f"{key}={json.dumps(value)}")
    return dict(config)


def read_sweep(folder):
    """The Sweep in a folder."""
    folder = Path(folder)
    folder = folder if folder.name.strip(".") else folder.resolve()  # its name is that of the sweep
    if not (folder / FILE).exists():
        above = [parent for parent in folder.parents if (parent / FILE).is_file()]
        others = above[:1] or sorted(path.parent for path in folder.glob(f"*/{FILE}"))
        hint = f"; did you mean {quoted(others[-1])}?" if others else ""
        raise UserError(f"{folder}: is not the folder of a sweep: it has no {FILE}{hint}")
    content = read_json(folder / FILE)
    wrong = [path for path, _ in unusable(content)]
    wrong = wrong or [key for key, is_valid in SWEEP.items() if not is_valid(content.get(key))]
    if not wrong:
        spec = parse_spec(content["spec"], f"{folder / FILE}: spec", "")
        trials = [Trial(**trial) for trial in content["trials"]]
        sweep = Sweep(folder, spec, trials=trials, **{key: content[key] for key in PLAIN})
        if sweep.is_consistent():
            return sweep
        wrong = ["trials"]
    raise UserError(
        f"{folder / FILE}: is not what a sweep wrote: it has no valid {', '.join(wrong)}; "
        "restore the file"
    )


def merged(new, resumed):
    """The new sweep with what the stored one has done; raises if its spec or config differ."""
    before, now = ({**as_json(s.spec), "config": s.config} for s in (resumed, new))
    pairs = {key: (before[key], now[key]) for key in now if key not in FREE}
    changed = {key: pair for key, pair in flat_pairs(pairs).items() if pair[0] != pair[1]}
    fewer = (new.spec.trials or 0) < (resumed.spec.trials or 0)
    if fewer:
        changed["trials"] = show(resumed.spec.trials), show(new.spec.trials)
    if changed:
        lines = [f"{key}: {old} -> {value}" for key, (old, value) in changed.items()]
        fix = "begin another sweep with another name, or continue this one unchanged with --resume"
        raise UserError(
            "\n  ".join(
                [
                    f"{resumed.folder}: was made with another spec or config",
                    *lines,
                    f"{fix} {quoted(resumed.folder)}",
                ]
            )
        )
    trials = resumed.trials + [
        Trial(number, values)
        for number, values in list(enumerate(planned(new.spec)))[len(resumed.trials) :]
    ]
    progress = {name: getattr(resumed, name) for name in ("form", "why", "programs")}
    return replace(new, trials=trials, **progress)


def flat_pairs(pairs):
    """{path.to.key: (old, new) as text} of {key: (old, new)}."""
    old, new = (flat({key: pair[i] for key, pair in pairs.items()}) for i in (0, 1))
    absent = "(absent)"
    return {
        path: tuple(show(side[path]) if path in side else absent for side in (old, new))
        for path in {**old, **new}
    }


def lock(folder):
    """Lock a sweep's folder; its trials inherit the lock, so it lasts until all have ended."""
    check_links(folder)
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return locked(folder)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{folder}: another process is running this sweep; wait for it, or stop it"
                ) from None
            time.sleep(0.1)
