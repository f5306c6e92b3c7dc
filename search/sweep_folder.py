"""A sweep on disk: saved/<title>/<sweep>/, the only state that its processes and hosts share.

`sweep.json` holds the spec and the config, and is only changed when a sweep begins or continues.
Beside it are the run folders of the trials, and for a trial that failed the reason. How far a trial
came, its scores and what runs next are read from there, so a sweep that was killed continues where
it was, and any number of processes can work on it.
"""

import json
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

from search.claims import create
from search.spec import Optuna, Spec, parse_spec, planned
from training.checkpoint.run_folder import FINISHED, flat
from training.report.read import Metrics, read_metrics
from utils import UserError, cut, first_line, printable, quoted
from utils.files import atomic_write, inside, read_file, read_json
from utils.forms import Count, check_options, show
from wiring.config import override, unusable

FILE = "sweep.json"
FREE = ("workers", "trials", "engine")  # what may differ when a sweep continues
TOGETHER = 64  # trials of a program, at most


@dataclass(frozen=True)
class Trial:
    """One trial, as its files show it."""

    number: int
    values: dict  # {path.to.key: value}
    run: str  # the name of its run, which may be that of a program
    replica: int | None = None  # its number in a program
    epochs: int = 0
    finished: bool = False
    failed: str | None = None  # why
    scores: tuple = ()  # (epoch, the best value of the metric until then)

    @property
    def name(self) -> str:
        return name_of(self.number)

    @property
    def over(self) -> bool:
        return self.finished or self.failed is not None

    def score(self, epochs: float | int = math.inf) -> float | None:
        """The best value up to a number of epochs, or None."""
        return next((value for at, value in reversed(self.scores) if at <= epochs), None)


class Group(NamedTuple):
    """The trials that differ only in their seed, which are compared by their mean."""

    trials: list

    @property
    def values(self) -> dict[str, Any]:
        return {key: value for key, value in self.trials[0].values.items() if key != "seed"}

    @property
    def failed(self) -> bool:
        return any(trial.failed is not None for trial in self.trials)

    def scores(self, epochs: float | int = math.inf) -> list[float]:
        """The scores of the trials that came so far before they failed."""
        there = [trial for trial in self.trials if trial.failed is None or trial.epochs >= epochs]
        return [score for trial in there if (score := trial.score(epochs)) is not None]

    def mean(self, epochs: float | int = math.inf) -> float:
        """The mean of the scores; NaN without any."""
        return fmean(self.scores(epochs) or [math.nan])

    def spread(self) -> float | None:
        """The standard deviation of the scores, or None of fewer than two."""
        scores = self.scores()
        return stdev(scores) if len(scores) > 1 else None


@dataclass(frozen=True)
class Sweep:
    """A sweep, and what has become of its trials."""

    folder: Path
    spec: Spec
    config: dict  # without the values of a trial
    source: str  # the config file
    monitor: str
    sign: Literal[1, -1]  # 1 if the monitored metric should be low, -1 if it should be high
    epochs: Count | None  # of a trial; with halving it is the same for all
    form: Literal["processes", "program"] = "processes"
    why: str = ""  # why it has this form
    trials: tuple = ()

    def save(self) -> None:
        content = asdict(replace(self, trials=()))
        del content["folder"], content["trials"]
        atomic_write(self.folder / FILE, (json.dumps(content, indent=1) + "\n").encode())

    def label(self, trial: Trial) -> str:
        return self.spec.label(trial.values)

    def run_dir(self, trial: Trial) -> Path:
        return inside(self.folder, trial.run)

    def members(self, run: str) -> tuple[Trial, ...]:
        """The trials of a run, those with the numbers in its name."""
        first, *last = map(int, re.findall(r"\d+", run))
        return self.trials[first : (last or [first])[0] + 1]

    def stops_at_nonfinite(self) -> bool:
        """Whether a step that is not finite ends a trial."""
        return self.config.get("training", {}).get("on_nonfinite", "stop") == "stop"

    def run_config(self, trials: Sequence[Trial]) -> dict[str, Any]:
        """The config of the run of a trial, or of a program whose replicas are these trials: one
        that diverges does not end the others."""
        config = with_values(self.config, self.spec.overrides(trials[0].values))
        own = {"title": self.folder.name, "run_name": trials[0].run, "resume": None}
        own["checkpoint.dir"] = str(self.folder.parent)
        if len(trials) > 1:
            own["training.vary"] = {key: [t.values[key] for t in trials] for key in self.spec.keys}
            own["training.replicas"] = len(trials)
            if self.stops_at_nonfinite():
                own["training.on_nonfinite"] = "skip"
        return with_values(config, own)

    def form_text(self) -> str:
        if self.form == "program":
            return "The trials run together, as one program"
        return f"Each trial runs in a process of its own{self.why and f' ({self.why})'}"

    # What runs next.

    def groups(self) -> list[Group]:
        """The Groups of trials, in the order of their first one."""
        groups = {}
        for trial in self.trials:
            groups.setdefault(json.dumps(Group([trial]).values), []).append(trial)
        return [Group(trials) for trials in groups.values()]

    def due(self) -> tuple[dict[str, None], int | None]:
        """({name of a run: None} of all that run next, the epoch until which they run, or None: to
        their end)"""
        groups, until = self.continuing()
        trials = [t for group in groups for t in group.trials if not t.over]
        return dict.fromkeys(t.run for t in trials if until is None or t.epochs < until), until

    def continuing(self) -> tuple[list[Group], int | None]:
        """(the Groups that halving has not stopped, the epoch until which they run now, or None: to
        their end). All of them reach a pause before the better ones continue."""
        groups = self.groups()
        for epochs in self.spec.pauses(self.epochs):
            trials = [trial for group in groups for trial in group.trials]
            if self.may_propose() or any(not t.over and t.epochs < epochs for t in trials):
                return groups, epochs
            scored = [group for group in groups if group.scores(epochs)]
            scored.sort(key=lambda group: self.sign * group.mean(epochs))
            assert self.spec.halving  # or there would be no pause
            groups = scored[: math.ceil(len(scored) / self.spec.halving["factor"])]
        return groups, None

    def may_propose(self) -> bool:
        """Whether Optuna has trials left to propose."""
        return self.spec.how == "optuna" and len(self.trials) < (self.spec.trials or 0)

    def ranked(self) -> list[Group]:
        """All Groups, the best first; those in which a trial failed, or without a value, come last.
        A value is the best of all epochs, so a trial that halving stopped is behind those that
        continued."""

        def place(group: Group) -> tuple[bool, float]:
            bad = not group.scores() or group.failed
            return bad, 0.0 if bad else self.sign * group.mean()

        return sorted(self.groups(), key=place)

    def state(self, trial: Trial) -> str:
        """The state of a trial in one word."""
        if trial.over:
            return "failed" if trial.failed is not None else "finished"
        groups, _ = self.continuing()
        if not any(trial in group.trials for group in groups):
            return "stopped"
        return "paused" if trial.epochs else "waiting"

    # What happened.

    def fail(self, trials: Sequence[Trial], why: str) -> None:
        """Note why the run of these trials failed. Instead of a program, unless the spec demands
        one, each trial then runs in a process of its own."""
        if len(trials) > 1 and self.spec.form == "auto":
            run = trials[0].run
            shutil.rmtree(inside(self.folder, run), ignore_errors=True)
            replace(self, form="processes", why=f"{run} failed: {first_line(why)}").save()
            return
        for trial in trials:
            if trial.failed is None:
                atomic_write(failure_file(self.folder, trial.name), why.encode())

    def retry(self) -> None:
        """Let the failed trials run again: alone, if the program that they were in is finished."""
        for trial in self.trials:
            if trial.failed is not None:
                failure_file(self.folder, trial.name).unlink()
                if trial.finished:
                    inside(self.folder, trial.name).mkdir()


def name_of(number: int) -> str:
    return f"trial_{number:03d}"


def failure_file(folder: Path, name: str) -> Path:
    return inside(folder, f"{name}.failed.txt")


def with_values(config: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """A config with the values of a trial."""
    for key, value in values.items():
        config = override(config, f"{key}={json.dumps(value)}")
    return dict(config)


# Reading.


def read_sweep(folder: str | Path) -> Sweep:
    """The Sweep in a folder."""
    folder = Path(folder)
    folder = folder if folder.name.strip(".") else folder.resolve()  # its name is that of the sweep
    file = folder / FILE
    if not file.exists():
        above = [parent for parent in folder.parents if (parent / FILE).is_file()]
        others = above[:1] or sorted(path.parent for path in folder.glob(f"*/{FILE}"))
        hint = f"; did you mean {quoted(others[-1])}?" if others else ""
        raise UserError(f"{folder}: is not the folder of a sweep: it has no {FILE}{hint}")
    content = read_json(file)
    wrong = [path for path, _ in unusable(content)]
    if wrong or content.keys() != Sweep.__dataclass_fields__.keys() - {"folder", "trials"}:
        raise damaged(file, f"it has no valid {', '.join(wrong) or 'keys'}")
    spec = parse_spec(content.pop("spec"), f"{file}: spec", "")
    sweep = Sweep(folder, spec, **content)
    try:
        check_options(sweep)
    except ValueError as error:
        raise damaged(file, error) from None
    sections = [sweep.config.get(name, {}) for name in ("checkpoint", "training")]
    if not all(isinstance(section, dict) for section in sections):
        raise damaged(file, "config: its sections must be objects")
    if sweep.source != printable(sweep.source, keep=""):
        raise damaged(file, "source: must be the path of a file")
    return replace(sweep, trials=read_trials(sweep))


def damaged(file: Path, why: object) -> UserError:
    return UserError(f"{file}: is not what a sweep wrote: {why}; restore the file")


def read_trials(sweep: Sweep) -> tuple[Trial, ...]:
    """The Trials that are known, as their files show them."""
    all_values = planned(sweep.spec) or [*proposed(sweep)]
    programs = programs_of(sweep, len(all_values))
    trials = []
    for number, values in enumerate(all_values):
        trial = Trial(number, values, name_of(number))
        if number in programs and not inside(sweep.folder, trial.name).exists():
            run, replica = programs[number]
            trial = replace(trial, run=run, replica=replica)
        trials.append(measured(sweep, trial))
    return tuple(trials)


def measured(sweep: Sweep, trial: Trial) -> Trial:
    """The Trial with what its run has logged, and how it ended."""
    folder, column = sweep.run_dir(trial), sweep.monitor
    if trial.replica is not None:
        column = f"{column}/{trial.replica}"
    file, failure = inside(folder, "metrics.jsonl"), failure_file(sweep.folder, trial.name)
    trial = replace(
        trial,
        finished=inside(folder, FINISHED).exists(),
        failed=read_file(failure).decode(errors="replace") if failure.exists() else None,
    )
    if not file.exists():
        return trial
    metrics = logged(file, file.stat().st_mtime_ns)
    completed = max(metrics.epoch_at.values(), default=0)
    values = []
    if curve := metrics.epochs.get(column):
        epochs = [metrics.epoch_of[step] for step in curve.steps]
        values += zip(epochs, curve.values.tolist(), strict=True)
    # The last weights of a run that ended within an epoch have a value after those of epochs.
    values.append((completed, metrics.final.get(column, math.nan)))
    scores, best = [], math.inf
    for epoch, value in values:
        if math.isfinite(value):
            best = min(best, sweep.sign * value)
            scores.append((epoch, sweep.sign * best))
    return replace(trial, epochs=completed, scores=tuple(scores))


@cache
def logged(file: Path, _changed: int) -> Metrics:
    """The Metrics in a file, which is read again when it has changed."""
    return read_metrics(file)


def programs_of(sweep: Sweep, count: int) -> dict[int, tuple[str, int]]:
    """{number of a trial: (the name of its program, its number in it)}. Programs that have begun
    keep their trials."""
    names = [path.name for path in sweep.folder.glob("program_*-*")]
    bounds = [re.fullmatch(r"program_(\d{1,5})-(\d{1,5})", name) for name in sorted(names)]
    programs = [range(int(match[1]), int(match[2]) + 1) for match in bounds if match]
    first = max((program.stop for program in programs), default=0)
    if sweep.form == "program":
        starts = range(first, count - 1, TOGETHER)  # a single trial is no program
        programs += [range(start, min(start + TOGETHER, count)) for start in starts]
    return {
        number: (f"program_{program.start:03d}-{program.stop - 1:03d}", replica)
        for program in programs
        for replica, number in enumerate(program)
        if number < count
    }


# Changing.


def proposal_file(folder: Path, number: int) -> Path:
    return inside(folder, f"{name_of(number)}.json")


def proposed(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """The values of the trials that Optuna has proposed."""
    for number in range(sweep.spec.trials or 0):
        file = proposal_file(sweep.folder, number)
        if not file.exists():
            return
        values = read_json(file)
        if values.keys() != sweep.spec.domains.keys():
            raise damaged(file, "it has other keys than the spec")
        yield values


def propose(sweep: Sweep) -> Sweep:
    """The Sweep with one more trial of Optuna's, which another process may have proposed."""
    sampler, number = Optuna(sweep.spec), len(sweep.trials)
    pause = next(sweep.spec.pauses(sweep.epochs), math.inf)  # all trials are compared there
    for trial in sweep.trials:
        score = trial.score(pause) if trial.finished or trial.epochs >= pause else None
        loss = None if score is None else sweep.sign * score
        sampler.tell(trial.values, loss, failed=trial.failed is not None)
    create(proposal_file(sweep.folder, number), json.dumps(sampler.ask(number)))
    return read_sweep(sweep.folder)


def merged(new: Sweep, stored: Sweep) -> Sweep:
    """The new sweep in the form of the stored one; raises if its spec or config differ."""
    before, now = (flat({**asdict(each.spec), "config": each.config}) for each in (stored, new))
    old, own = ({key: json.dumps(v) for key, v in values.items()} for values in (before, now))
    pairs = {key: (old.get(key, "(absent)"), own.get(key, "(absent)")) for key in old | own}
    changed = [
        f"{key}: {cut(was, 60)} -> {cut(text, 60)}"
        for key, (was, text) in pairs.items()
        if was != text and key not in FREE
    ]
    if (new.spec.trials or 0) < (stored.spec.trials or 0):
        changed.append(f"trials: {stored.spec.trials} -> {show(new.spec.trials)}")
    if changed:
        lines = "\n  ".join(changed)
        fix = "begin another sweep with another name, or continue this one unchanged with --resume"
        raise UserError(
            f"{stored.folder}: was made with another spec or config\n  {lines}\n  "
            f"{fix} {quoted(stored.folder)}"
        )
    return replace(new, form=stored.form, why=stored.why)
