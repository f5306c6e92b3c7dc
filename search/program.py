"""Trials as one program: a run whose replicas are the trials (training.vary), in a process of its
own, and then a folder for each trial, like that of a single run."""

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from search.sweep_folder import with_values
from training.checkpoint import storage
from training.checkpoint.divergence import advice, description_of_bad_step
from training.checkpoint.keeper import EVALUATOR, Kept, protect
from training.checkpoint.run_folder import FINISHED, plain, write_json
from training.watching.metric_log import FILE, MOST_BYTES, line_of
from utils import DONE
from utils.files import lines_of, parse_json, read_json
from wiring.build import build
from wiring.own_modules import look_in

OUTCOME = "outcome.json"  # {number of a trial: why it failed, or null}, once all have folders
NOT_COPIED = ("checkpoint-*", "former_*", ".*", "config.json", OUTCOME, EVALUATOR, FINISHED, FILE)
OF_ALL = ("examples_per_second", "tokens_per_second")  # of all trials together


class EachTrial:
    """The observer of a program for what concerns single trials: a checkpoint is written and kept
    if it is among the best of any trial, by `options`; and a trial with a step that is not finite
    has failed, if such a step stops it (`may_fail`)."""

    def __init__(self, folder, options, count, may_fail):
        self.folder, self.options, self.count, self.may_fail = folder, options, count, may_fail
        self.failed = {}  # {index of a trial: (the steps before the bad one, why)}

    @property
    def memory(self):
        return {"failed": [[index, *how] for index, how in self.failed.items()]}

    @memory.setter
    def memory(self, stored):
        self.failed = {index: (step, why) for index, step, why in stored["failed"]}

    def on_bad(self, run, bad):
        if self.may_fail and not bad.of_state and bad.replica not in self.failed:
            why = description_of_bad_step(bad.step + 1, run.epoch, bad.leaf)
            self.failed[bad.replica] = bad.step, why

    def on_row(self, run, row):
        if not row.get("end_of_epoch"):
            return None
        best = [entry for index in range(self.count) for entry in self.best(index, run.history)]
        protect(self.folder, best)
        return {"save": "best"} if checkpoint_after(run.epoch) in dict(best) else None

    def best(self, index, history):
        """[name, value] of a trial's best checkpoints among those at the ends of its epochs."""
        kept = Kept()
        for row in history if index not in self.failed else ():
            value = row.get(f"{self.options.monitor}/{index}")
            kept = kept.add(checkpoint_after(row["epoch"]), value, self.options)
        return kept.best


def checkpoint_after(epoch):
    return f"checkpoint-epoch_{epoch}"


def failed_in(record):
    """{index of a trial: (the steps before the bad one, why)} in the record of a checkpoint."""
    memory = record["memories"].get(EachTrial.__name__, {"failed": ()})
    return {index: (step, why) for index, step, why in memory["failed"]}


def train_program(root, sweep, number, trusted):
    """Train a program, then write the folders of its trials; returns the exit code."""
    from training.commands.start import train
    from training.devices.program_cache import keep_programs

    trials, folder, source = sweep.trials_of(number), sweep.program_dir(number), Path(sweep.source)
    if folder.is_dir() and not (folder / "config.json").exists():
        shutil.rmtree(folder)  # the process was killed before the run began
    folders = look_in(source.parent)
    config = sweep.program_config(trials) | {"run_name": folder.name}
    parts = build(config, source.name, trusted, folders)
    first = build(sweep.trial_config(trials[0]), source.name, trusted, folders)
    first.checkpoint = replace(first.checkpoint, monitor=sweep.monitor)
    may_fail = first.training.on_nonfinite == "stop"
    observer = EachTrial(folder, first.checkpoint, len(trials), may_fail)
    keep_programs()
    code = train(parts, root, "auto", observers=[observer])
    if code == DONE:
        write_trials(sweep, folder, trials, first)
    return code


def write_trials(sweep, program, trials, first):
    """Write the folder of each trial of a finished program, and the file of what became of them.
    `first` are the parts of the first trial as a single run."""
    from training.commands.start import write_report

    records = storage.records(program)
    last = list(records.values())[-1]
    failed, as_fitted = failed_in(last), {"preprocess": last["config"]["preprocess"]}
    folders = [sweep.run_dir(trial) for trial in trials]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed here
        ignored = shutil.ignore_patterns(*NOT_COPIED)
        shutil.copytree(program, folder, ignore=ignored, symlinks=True)
    lengths = write_rows(program, folders, failed, records)
    schema, own_records = read_json(program / "config.json")["$schema"], {}
    for index, (trial, folder) in enumerate(zip(trials, folders, strict=True)):
        config = with_values(first.config | as_fitted, trial.values) | {"run_name": trial.name}
        config = json.loads(json.dumps(config, default=plain))
        write_json(folder / "config.json", config | {"$schema": schema})
        if index not in failed:
            place = index, len(trials)
            how = config, lengths[index], first.checkpoint
            kept, own_records[index] = records_of(*place, records, *how)
            finished = read_json(program / FINISHED)
            metrics = own_values(finished["metrics"], *place)
            best = best_of(kept, records, first.checkpoint.monitor)
            write_json(folder / FINISHED, finished | {"metrics": metrics, "best": best})
    write_checkpoints(program, folders, records, own_records)
    for folder in folders if first.logging.report else ():
        write_report(folder)
    reasons = {index: f"{why}.\n{advice('stop')}" for index, (_, why) in failed.items()}
    write_json(program / OUTCOME, {t.number: reasons.get(r) for r, t in enumerate(trials)})


def own_values(row, index, count):
    """The values of one trial, under their usual names, from a row with those of all."""
    own = {}
    for name, value in row.items():
        base, _, end = name.rpartition("/")
        if base and end == str(index):
            own[base] = value
        elif name in OF_ALL:
            own[name] = value / count
        elif f"{name}/{index}" in row:
            own[name] = None  # the mean of all; it keeps its place
        elif not (base and end.isdecimal()):
            own[name] = value
    return own


def write_rows(program, folders, failed, records):
    """Write metrics.jsonl of each trial, without what it logged after it had failed. Returns for
    each trial {length of the program's file at a checkpoint: length of the trial's file}."""
    marks = {record["lengths"].get(FILE, 0) for record in records.values()}
    lengths, at = [{0: 0} for _ in folders], 0
    with ExitStack() as stack:
        files = [stack.enter_context(open(folder / FILE, "wb")) for folder in folders]
        for line in lines_of(program / FILE, MOST_BYTES):
            at, row = at + len(line), parse_json(line)
            for index, file in enumerate(files):
                if index not in failed or row["step"] <= failed[index][0]:
                    file.write(line_of(own_values(row, index, len(files))).encode())
                if at in marks:
                    lengths[index][at] = file.tell()
    return lengths


def records_of(index, count, records, config, lengths, options):
    """(the last and the best checkpoints of a trial, as its own run would have kept them; {name:
    what is different in their records})"""
    kept, own, last = Kept(), {}, list(records.values())[-1]
    of_trial = {"config": config, "monitor": options.monitor}
    for name, record in records.items():
        metrics = own_values(record["metrics"], index, count)
        evaluated = own_values(record["evaluated"] or {}, index, count)
        kept = kept.add(name, evaluated.get(options.monitor), options, name in last["regular"])
        at = record["lengths"]
        of_logs = {"lengths": at | {FILE: lengths[at.get(FILE, 0)]}, "metrics": metrics}
        own[name] = of_trial | of_logs | kept._asdict() | {"evaluated": evaluated}
    return kept, {name: own[name] for name in kept.names()}


def best_of(kept, records, monitor):
    """What finished.json says about the best checkpoint, or None."""
    if not kept.best:
        return None
    name, value = kept.best[0]
    where = {key: records[name][key] for key in ("epoch", "step")}
    return {"name": name, **where, "monitor": monitor, "value": value}


def write_checkpoints(program, folders, records, own_records):
    """Write the checkpoints of each trial, {index of a trial: {name: its own part of the record}},
    from those of the program, each of which is read once."""
    for name in records:
        keeping = [index for index, own in own_records.items() if name in own]
        if not keeping:
            continue
        checkpoint = storage.read(program, name)
        record = checkpoint.record
        memories = {k: m for k, m in record["memories"].items() if k != EachTrial.__name__}
        for index in keeping:
            own = {"memories": memories, "seeds": [record["seeds"][index]]}
            path = folders[index] / checkpoint.path.name
            storage.save(path, checkpoint.arrays[index], record | own | own_records[index][name])
