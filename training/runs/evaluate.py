"""Checkpoints measured outside of training: one that is named, or those of a run as they appear."""

import gc
import json
import logging
import time
from contextlib import closing, suppress
from pathlib import Path

import jax

from data_loader.base import loaded
from training.checkpoint import storage
from training.checkpoint.probe import Probe, probe_input
from training.checkpoint.restore import check_meaning, filled, probe_of
from training.devices.placing import put
from training.devices.sharding import Plan, make_mesh, mesh_on_paper, replicated
from training.engine import make_feeds
from training.evaluator import Evaluator
from training.fit import compose, datasets
from training.lanes import Lanes
from training.measures import measures
from training.programs import loops_are_slow
from training.readings import Reader
from training.runs.folder import FINISHED, write_json
from training.runs.resume import run_folder_of
from training.watching.metric_log import append, sayable
from utils import DONE, Damaged, UserError

logger = logging.getLogger("main")

EVALUATIONS = "evaluations.jsonl"
PAUSE = 2.0  # seconds between two looks at a folder


def evaluate(parts, named):
    """Measure one checkpoint on the held-out sets; print the metrics as JSON, and write them into the run's folder."""
    folder = run_folder_of(named, "--evaluate")
    there = storage.checkpoints(folder)
    name = (
        Path(named).stem.split("-replica_")[0]
        if Path(named) != folder
        else next(reversed(there), None)
    )
    if name not in there:
        raise UserError(
            f"--evaluate {named}: is no checkpoint; {folder} has {', '.join(there) or 'none'}"
        )
    with closing(Measurer(parts)) as measurer:
        row = measurer.row(folder, name)
    print(json.dumps(row, indent=2))
    write_json(folder / f"evaluation-{name}.json", row)
    return DONE


def watch(parts, named):
    """Measure every checkpoint of a run as it appears, a line each in evaluations.jsonl, until the run has ended."""
    folder = run_folder_of(named, "--watch")
    seen = {row["checkpoint"] for row in rows(folder / EVALUATIONS)}
    with closing(Measurer(parts)) as measurer:
        while True:
            ended = (
                folder / FINISHED
            ).exists()  # looked at first: what it was saved before is seen then
            new = [name for name in storage.checkpoints(folder) if name not in seen]
            for name in new:
                seen.add(name)
                try:
                    row = measurer.row(folder, name)
                except Damaged as error:  # deleted meanwhile, or being replaced
                    logger.warning("%s: passed over: %s", name, error)
                    continue
                append(folder / EVALUATIONS, json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
            if ended and not new:
                return DONE
            if not new:
                time.sleep(PAUSE)


def rows(path):
    """The JSON lines of a file that may not be there; a torn last one is ended, and passed over."""
    text = path.read_text(errors="replace") if path.exists() else ""
    if text and not text.endswith("\n"):
        append(path, "\n")
    found = []
    for line in text.splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [row for row in found if isinstance(row, dict) and "checkpoint" in row]


class Measurer:
    """Measures checkpoints of one config on its held-out sets; everything is compiled once."""

    def __init__(self, parts):
        functions, watch = measures(parts.metrics, (), parts.logging)
        pieces = (parts.model, parts.loss, functions, parts.preprocess, parts.augment)
        objective = compose(parts.objective, *pieces, parts.training.precision)
        sets = loaded(parts.data)
        held_out = {
            name: dataset for name, dataset in sets.items() if name not in ("train", "test")
        }
        sets = datasets(sets["train"], held_out, sets.get("test"), parts.loader)
        sets = {name: dataset for name, dataset in sets.items() if name != "train"}
        if not sets:
            raise UserError(
                "data: has no held-out set to evaluate on; hold some examples out with loader.val_size"
            )
        self.parts, self.objective, self.watch, self.sets = parts, objective, watch, sets
        mesh, wrong = mesh_on_paper(
            parts.mesh
        )  # where the run had other devices, all that are here will do
        self.plan = Plan(make_mesh()) if wrong else Plan(mesh, parts.sharding)
        self.lanes = Lanes(range(parts.training.replicas), self.plan.mesh)
        self.feeds = make_feeds(sets, parts.loader, self.lanes, parts.training.limit_batches)
        key = jax.random.key(0)
        self.trees = jax.eval_shape(parts.model.init, key)
        batch = next(iter(self.feeds.values())).shapes
        looped = not loops_are_slow(objective, *self.trees, batch)
        self.evaluator = Evaluator(objective, self.feeds, self.lanes, self.trees, watch, looped)
        self.reader = Reader(getattr(objective, "finish", Reader().finish))
        self.probe = Probe(parts.model, probe_input(batch, parts.preprocess))
        gc.enable()  # which train.py has switched off while things are made

    def row(self, folder, name):
        """What a checkpoint of a run measures."""
        found = storage.read_all(name, storage.files(folder, name))
        if len(found.arrays) != len(self.lanes.seeds):
            raise UserError(
                f"{name}: replicas: it holds {len(found.arrays)}, the config says {len(self.lanes.seeds)}"
            )
        weights, metrics = self.weights(found), {}
        for each in self.sets:
            metrics |= self.reader.values(each, self.evaluator.measure(each, weights))
        return {
            "checkpoint": name,
            "epoch": found.record["epoch"],
            "step": found.record["step"],
            "metrics": sayable(metrics),
        }

    def weights(self, found):
        """(params, state) of each replica, once they are known to mean what they did."""
        params, state = self.trees
        which = "ema" if any(leaf.startswith("ema/") for leaf in found.arrays[0]) else "params"
        trees = []
        for path, arrays in zip(found.paths, found.arrays, strict=True):
            tree = filled(path, arrays, {which: params, "state": state})
            if probe_of(arrays):
                answer = self.probe(tree[which], tree["state"])
                check_meaning(
                    path,
                    probe_of(arrays),
                    answer,
                    "bring model/ back to what it was; the run has a copy",
                )
            places = self.plan.of_params(tree[which]), replicated(self.plan.mesh)
            trees.append((put(tree[which], places[0]), put(tree["state"], places[1])))
        return trees

    def close(self):
        """End the threads that read ahead."""
        self.evaluator.close()
