"""Checkpoints evaluated outside of training: one that is named, or every checkpoint of a run as it
appears."""

import hashlib
import json
import logging
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from data_loader.base import fingerprints_of, loaded
from training.base import Parts
from training.checkpoint import storage
from training.checkpoint.keeper import Kept, protect
from training.checkpoint.pretrained import with_base
from training.checkpoint.probe import Probe, check_meaning, probe_input, probe_of
from training.checkpoint.resume import FREE, SILENT, run_folder_of
from training.checkpoint.run_folder import FINISHED, plain, write_json
from training.checkpoint.trees import weights_of
from training.devices.sharding import Plan
from training.engine import Trainer
from training.options import CheckpointOptions, monitor_for
from training.preprocess import with_recorded
from training.recipe import compose
from training.sets import split_sets
from training.watching.metric_log import json_safe
from utils import DONE, Damaged, UserError, echo
from utils.files import MOST_LINES, append, is_number, is_object, lines_of, parse_json, read_json

logger = logging.getLogger("main")

# The keys of a config that change no evaluation.
UNUSED = (*SILENT, *FREE, "title", "callbacks", "optimizer", "schedule", "update", "augment")
EVALUATIONS = "evaluations.jsonl"
PAUSE = 2.0  # seconds between two looks at a folder


def evaluate(parts: Parts, named: str, best: bool = False) -> int:
    """Evaluate one checkpoint on the held-out sets; print the metrics as JSON, and write them into
    the run's folder."""
    folder = run_folder_of(named, "--evaluate")
    name = storage.chosen_checkpoint(named, best).stem
    parts = with_statistics_of(folder, parts)
    config = json.loads(json.dumps(parts.config, default=plain))
    overrides = changed(read_json(folder / "config.json"), config)
    with closing(CheckpointEvaluation(parts)) as evaluation:
        row = evaluation.row(folder, name)
        row |= {"overrides": overrides, "data": fingerprints_of(evaluation.sets)}
    print(json.dumps(row, indent=2))
    digest = hashlib.sha256(json.dumps(overrides, sort_keys=True).encode()).hexdigest()
    path = folder / f"evaluation-{name}{f'-{digest[:8]}' if overrides else ''}.json"
    write_json(path, row)
    print(f"Written to {path}", file=sys.stderr)
    return DONE


def changed(config: Any, other: Any, path: str = "") -> dict[str, Any]:
    """{path: the value in the `other` config} of each value of a config that differs there, and
    that may change an evaluation. Lists are compared as a whole."""
    if path in UNUSED or config == other:
        return {}
    if not isinstance(config, dict) or not isinstance(other, dict):
        return {path: other}
    # A key that only the other config has is new in this version of the toolkit.
    pairs = [(f"{path}.{key}".lstrip("."), key) for key in config]
    return {k: v for at, key in pairs for k, v in changed(config[key], other.get(key), at).items()}


def watch(parts: Parts, named: str) -> int:
    """Evaluate every checkpoint of a run as it appears, one line each in evaluations.jsonl, until
    the run has ended; the best by checkpoint.monitor are kept."""
    folder = run_folder_of(named, "--watch")
    earlier, parts = rows(folder / EVALUATIONS), with_statistics_of(folder, parts)
    evaluated = {row["checkpoint"] for row in earlier}
    with closing(CheckpointEvaluation(parts)) as evaluation:
        monitor = monitor_for(parts.checkpoint.monitor, evaluation.sets, None)
        best = Best(folder, replace(parts.checkpoint, monitor=monitor), earlier)
        while True:
            # Checked first, so that every checkpoint saved before the end is found below.
            ended = (folder / FINISHED).exists()
            new = [name for name in storage.checkpoints(folder) if name not in evaluated]
            for name in new:
                evaluated.add(name)
                try:
                    with best.reading(name):
                        row = evaluation.row(folder, name)
                        row |= best.add(row)
                except Damaged as error:  # deleted meanwhile, or being replaced
                    logger.warning("%s: skipped: %s", name, error)
                    continue
                append(folder / EVALUATIONS, json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
            if ended and not new:
                best.report()
                return DONE
            if not new:
                time.sleep(PAUSE)


def with_statistics_of(folder: Path, parts: Parts) -> Parts:
    """The parts with the statistics that a run computed from its training set."""
    path = folder / "config.json"
    return with_recorded(parts, read_json(path), str(path)) if parts.unfitted else parts


class Best:
    """The best checkpoints by the metrics of this evaluator, which may measure more than the
    training process. That process does not delete them, nor the one that is being read."""

    def __init__(
        self, folder: Path, options: CheckpointOptions, earlier: Sequence[dict[str, Any]]
    ) -> None:
        self.folder, self.options, self.kept, self.warned = folder, options, Kept(), False
        options.sign()  # to fail now rather than at the first checkpoint
        for row in earlier:
            self.add(row)

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Within this block, a checkpoint is protected; after it, only if it is among the best."""
        protect(self.folder, self.kept.best, name)
        try:
            yield
        finally:
            protect(self.folder, self.kept.best)

    def add(self, row: dict[str, Any]) -> dict[str, bool]:
        """Rank a row of evaluations.jsonl; returns {"best": whether it is the best so far}."""
        monitor, name = self.options.monitor, row["checkpoint"]
        if monitor is None:
            return {}
        metrics = row.get("metrics") or {}
        if monitor not in metrics and not self.warned:
            self.warned, known = True, ", ".join(metrics) or "nothing"
            logger.warning("checkpoint.monitor: %s is not measured here (%s is)", monitor, known)
        # Without files, it was deleted before it was protected.
        elif monitor in metrics and name in storage.files(self.folder):
            self.kept = self.kept.add(name, metrics[monitor], self.options, regular=False)
        return {"best": bool(self.kept.best) and self.kept.best[0][0] == name}

    def report(self) -> None:
        """Print the best checkpoints."""
        for name, value in self.kept.best:
            monitor = self.options.monitor
            path = storage.file_of(self.folder, name)
            echo(f"Best by {monitor}: {path} ({value:.4f})", file=sys.stderr)


def rows(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file that may not exist; a torn last line is ended, and skipped."""
    values, line = [], b"\n"
    try:
        for line in lines_of(path, MOST_LINES) if path.exists() else ():
            with suppress(ValueError):
                values.append(parse_json(line))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if not line.endswith(b"\n"):
        append(path, "\n")
    return [row for row in values if is_row(row)]


def is_row(row: Any) -> bool:
    """Whether this is a line that `watch` writes: a checkpoint with its metrics. Its name becomes
    part of a pattern, so it must not contain one, or lead out of the folder."""
    name = row.get("checkpoint") if isinstance(row, dict) else None
    if not isinstance(name, str) or not re.fullmatch(r"checkpoint-[\w-]+", name):
        return False
    metrics = row.get("metrics")
    return is_object(metrics, lambda value: value is None or is_number(value))


class CheckpointEvaluation:
    """Evaluates checkpoints of one config on its held-out sets; everything is compiled once."""

    def __init__(self, parts: Parts) -> None:
        # The metrics of callbacks are not reported here.
        parts = replace(parts, callbacks=())
        plan = Plan.on_paper(parts.mesh, parts.sharding)
        if not plan.fits():  # the run had other devices, so use all devices of this machine
            plan = Plan.on_paper(type(parts.mesh)(), None)
        recipe = compose(parts, plan)
        sets = split_sets(loaded(parts.data, parts.loader), parts.loader)
        self.sets = {name: dataset for name, dataset in sets.items() if name != "train"}
        if not self.sets:
            raise UserError(
                "data: has no held-out set to evaluate; hold some examples out with loader.val_size"
            )
        self.trainer, self.reader = Trainer(recipe, self.sets), recipe.reader()
        batch = self.trainer.feeds[next(iter(self.sets))].shapes
        if parts.loader.eval_collate_fn:  # the probe has the shapes of a training batch
            batch = jax.eval_shape(
                lambda: jax.tree.map(lambda a: jnp.asarray(a)[None], parts.example)
            )
        spec = probe_input(batch, parts.preprocess, parts.model)
        numbers = self.trainer.numbers
        self.probe = Probe(parts.model, spec, numbers, lambda own: recipe.with_numbers(own).model)
        self.parts = parts

    def row(self, folder: Path, name: str) -> dict[str, Any]:
        """The metrics of a checkpoint of a run."""
        checkpoint = storage.read(folder, name)
        count, replicas = len(checkpoint.arrays), len(self.trainer.seeds)
        if count != replicas:
            raise UserError(f"{name}: replicas: it holds {count}, the config says {replicas}")
        params, state = self.trainer.weight_specs
        config, record = self.parts.config, checkpoint.record
        assert config is not None
        state = with_base(self.parts.model, params, state, config, record, name)
        trees = weights_of(checkpoint, params, state)
        for number, (arrays, tree) in enumerate(zip(checkpoint.arrays, trees, strict=True)):
            if probe_of(arrays):
                fix = "use the code with which it was trained"
                check_meaning(checkpoint.path, probe_of(arrays), self.probe(*tree, number), fix)
        weights = [self.trainer.put_weights(tree) for tree in trees]
        metrics = {}
        epoch, step = record["epoch"], record["step"]
        for each in self.sets:
            sums = self.trainer.evaluate(each, weights=weights, epoch=epoch, step=step)
            assert sums is not None  # nothing stops it early
            metrics |= self.reader.values(each, sums)
        where = {"checkpoint": name, "epoch": epoch, "step": step}
        return where | {"metrics": json_safe(metrics)}

    def close(self) -> None:
        """End the threads that read ahead."""
        self.trainer.close()
