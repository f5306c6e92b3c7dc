"""Runs of `fit` that are resumed, diverge or crash: the same bits as undisturbed, and what is saved
and reported."""

import errno
import logging
import os
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_loader.base import ExampleFailed
from data_loader.loader import epoch_order
from model.mlp import mlp
from model.resnet import resnet
from tests.runs import rows_of
from training.base import StepResult, Update
from training.checkpoint import storage
from training.checkpoint.divergence import Diverged
from training.checkpoint.keeper import Keeper
from training.fit import fit
from training.observers import CallbackFailed
from training.optimizers import adam, sgd
from training.options import CheckpointOptions
from training.run import TIMES
from training.schedules import linear
from training.update import gradient_update
from training.watching import metric_log
from training.watching.callbacks.early_stopping import early_stopping
from training.watching.callbacks.reduce_on_plateau import reduce_on_plateau
from utils import RunError, UserError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 6)).astype(np.float32)
Y = (X[:, 0] + X[:, 1] > 0).astype(np.int32) + (X[:, 2] > 1)
IMAGES = RNG.normal(size=(60, 8, 8, 1)).astype(np.float32)
MODEL = mlp((6,), 3, dims=(16,))
EPOCHS, STEPS = 3, 7  # 32 examples per step; the last batch is short


class Streamed:
    """The same examples, one at a time; `read` lists the indices that were read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        self.read.append(i)
        return X[i], Y[i]


class Batches:
    """A custom loader with a short last batch."""

    def __iter__(self):
        return self.start_from(0)

    def start_from(self, batch):
        for i in range(batch * 32, len(X), 32):
            yield X[i : i + 32], Y[i : i + 32]


class WithPosition(Batches):
    def start_at(self, epoch, batch):
        return self.start_from(batch)


def train(folder, data=(X, Y), model=MODEL, test=None, **settings):
    settings = {
        "optimizer": adam(lr=0.01),
        "epochs": EPOCHS,
        "batch_size": 32,
        "log": {"every_steps": 3},
        "seed": 5,
    } | settings
    test = test or (data if isinstance(data, tuple) else (X, Y))
    return fit(model, data, test, folder=folder, **settings)


@cache
def reference(streamed=False):
    """An undisturbed run, and its rows. XLA may round differently where the data is streamed."""
    folder = Path(mkdtemp())
    undisturbed = train(folder / "run", Streamed() if streamed else (X, Y))
    expected_rows = rows_of(folder / "run")
    rmtree(folder)
    return undisturbed, expected_rows


class Stop:
    """Sends a signal at the first log line after so many steps."""

    def __init__(self, after):
        self.after = after

    def on_steps(self, run):
        if run.step >= self.after and not run.signal:
            os.kill(os.getpid(), signal.SIGTERM)


def assert_same(run, other):
    """Compare the states."""
    for ts, expected in zip(run.states(), other.states(), strict=True):
        jax.tree.map(np.testing.assert_array_equal, ts, expected)


class Slower:
    """Lowers the learning rate at log lines, from a scale in its memory."""

    memory = None

    def on_start(self, run):
        self.memory = {"scale": 1.0}

    def on_steps(self, run):
        self.memory["scale"] *= 0.9
        return {"lr_scale": self.memory["scale"]}


FORMS = {
    "resident": {},
    "averaged, accumulated, scheduled": {
        "ema": 0.9,
        "accumulate": 2,
        "schedule": linear(total_steps=21),
    },
    "dropout": {"model": mlp((6,), 3, dims=(16,), dropout=0.2)},
    "replicas": {"replicas": 2},
    "streamed": {"data": Streamed()},
    "batches with a position": {"data": WithPosition()},
    "batches without one": {"data": Batches()},
    "orbax": {"checkpoint": CheckpointOptions(format="orbax"), "replicas": 2},
    "learning rate lowered by a callback": {"callbacks": [Slower()]},
    "learning rate lowered by two callbacks": {
        "callbacks": [Slower(), reduce_on_plateau("test_loss", patience=1, min_delta=10.0)],
    },
    "early stopping": {"callbacks": [early_stopping(patience=1, min_delta=10.0)]},
    "step by step": {
        "model": resnet((8, 8, 1), 3, widths=(4,), depth=1),
        "data": (IMAGES, Y[:60]),
        "batch_size": 10,
    },
}

USUAL = ("resident", "streamed", "averaged, accumulated, scheduled", "orbax")
USUAL += ("learning rate lowered by two callbacks",)
SLOW = [pytest.param(form, 10, marks=pytest.mark.slow) for form in USUAL[1:]]
SLOW += [pytest.param("resident", 14, marks=pytest.mark.slow)]
LONGER = [pytest.param(form, 10, marks=pytest.mark.torture) for form in FORMS if form not in USUAL]
LONGER += [pytest.param("streamed", 14, marks=pytest.mark.torture)]


@pytest.mark.parametrize(("form", "stop"), [("resident", 10), *SLOW, *LONGER])
def test_a_resumed_run_ends_with_the_same_bits_and_rows(tmp_path, form, stop):
    """Stopped within the second epoch, or after its last batch but before its evaluation."""
    settings = FORMS[form] | {"log": {"every_steps": 1 if stop == 14 else 3}}
    callbacks = settings.pop("callbacks", [])
    undisturbed = train(tmp_path / "whole", callbacks=callbacks, **settings)
    stopped = train(tmp_path / "cut", callbacks=[*callbacks, Stop(stop)], **settings)
    assert stop <= stopped.step <= stop + 2 and not stopped.finished
    resumed = train(tmp_path / "cut", resume=True, callbacks=[*callbacks, Stop(10**9)], **settings)
    assert_same(resumed, undisturbed)
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
    assert [r["epoch"] for r in resumed.history] == [r["epoch"] for r in undisturbed.history]


class Interrupting:
    """A test set. While it is evaluated for the `number`-th time, the process gets a signal."""

    def __init__(self, number=None, sent=signal.SIGTERM):
        self.number, self.sent, self.evaluations = number, sent, 0

    def __len__(self):
        return 60

    def __getitem__(self, i):
        self.evaluations += i == 30
        if i == 30 and self.evaluations == self.number:
            os.kill(os.getpid(), self.sent)
        return X[i], Y[i]


def train_with_evaluations_every_3_steps(folder, test, **settings):
    monitored = {"every_steps": 2, "monitor": "test_loss", "save_top_k": 2, "keep": 2}
    plateau = reduce_on_plateau("test_loss", patience=1, min_delta=10.0)
    return fit(
        mlp((6,), 3, dims=(16,), dropout=0.2), (X, Y), test, folder=folder, optimizer=adam(lr=0.01),
        epochs=EPOCHS, batch_size=32, eval_batch_size=10, eval_every={"steps": 3}, seed=5,
        log={"every_steps": 3}, checkpoint=CheckpointOptions(**monitored),
        callbacks=[plateau, early_stopping(patience=100)], **settings,
    )  # fmt: skip


KILLED = """
import signal, sys
from pathlib import Path
from tests.training.checkpoint.test_recovery import *
test = Interrupting(int(sys.argv[2]), signal.SIGKILL)
train_with_evaluations_every_3_steps(Path(sys.argv[1]), test)
"""


# The evaluations are at steps 3, 6, 9, ..., 21; an epoch has 7 steps, so that the last one is at
# the end of an epoch.
@pytest.mark.parametrize("number", [2, 5, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sent", ["SIGTERM", pytest.param("SIGKILL", marks=pytest.mark.slow)])
def test_a_run_interrupted_in_an_evaluation_within_an_epoch_ends_with_the_same_bits_and_rows(
    tmp_path, number, sent
):
    undisturbed = train_with_evaluations_every_3_steps(tmp_path / "whole", Interrupting())
    if sent == "SIGTERM":
        cut = train_with_evaluations_every_3_steps(tmp_path / "cut", Interrupting(number))
        assert cut.step == 3 * number and cut.cut_short and cut.signal == sent
    else:
        arguments = [sys.executable, "-c", KILLED, str(tmp_path / "cut"), str(number)]
        root = Path(__file__).resolve().parents[3]
        assert subprocess.run(arguments, cwd=root).returncode == -signal.SIGKILL
    resumed = train_with_evaluations_every_3_steps(tmp_path / "cut", Interrupting(), resume=True)
    assert_same(resumed, undisturbed)
    assert resumed.finished
    assert resumed.best.name == undisturbed.best.name
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
    evaluated = [row["step"] for row in rows_of(tmp_path / "cut") if "test_loss" in row]
    assert evaluated == [3, 6, 9, 12, 15, 18, 21]


@pytest.mark.slow
@pytest.mark.parametrize("number", [5, 7])
def test_a_run_whose_budget_ends_at_an_evaluation_resumes_that_before_it_ends(tmp_path, number):
    settings = {"max_steps": 3 * number}
    undisturbed = train_with_evaluations_every_3_steps(
        tmp_path / "whole", Interrupting(), **settings
    )
    for test in (Interrupting(number), Interrupting()):
        resumed = train_with_evaluations_every_3_steps(
            tmp_path / "cut", test, resume=True, **settings
        )
    assert_same(resumed, undisturbed)
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
    assert resumed.completed == undisturbed.completed
    assert resumed.best.name == undisturbed.best.name


@pytest.mark.slow
def test_a_run_continues_from_a_checkpoint_that_was_renamed(tmp_path):
    train(tmp_path, epochs=1)
    (path,) = tmp_path.glob("*.params")
    path.rename(path.with_name("checkpoint-mine.params"))
    assert train(tmp_path, resume="override", epochs=2).finished


class Uneven:
    """Lowers the learning rate now and then, to numbers that float32 does not have."""

    def on_start(self, run):
        self.memory = {"scale": 1.0}

    def on_steps(self, run):
        if run.step % 4:
            return None
        self.memory = {"scale": self.memory["scale"] * 0.937}
        return {"lr_scale": self.memory["scale"]}


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.torture)])
def test_every_number_that_a_run_logs_is_the_same_after_a_resume(tmp_path, replicas):
    """Resumed at several steps, with all that keeps numbers on the host between them: a schedule,
    two callbacks that scale the rate, early stopping, averaged weights, a rollback."""
    monitored = {"monitor": "test_loss", "min_delta": 10.0}
    callbacks = [Uneven(), early_stopping(patience=50, min_delta=0.1)]
    callbacks.append(reduce_on_plateau(factor=0.3, patience=1, cooldown=1, **monitored))
    many = {f"rate_{i}": 0.1 / (3 + i) for i in range(40)}  # for 1 in 10, float32 shows
    settings = {
        "callbacks": callbacks,
        "replicas": replicas,
        "ema": 0.9,
        "optimizer": adam(lr=0.0123),
        "schedule": linear(total_steps=60),
        "rates": {"learning_rate": lambda step: 0.0123 * (1 - step / 60)} | many,
        "log": {"every_steps": 1, "gradient_norm": True, "parameter_norm": True},
        "checkpoint": CheckpointOptions(every_steps=1, keep=None, monitor="test_loss"),
        "on_nonfinite": "rollback",
    }
    data, whole = Poison(bad_reads=1), tmp_path / "whole"
    undisturbed = train(whole, data, **settings)
    lines = (whole / "metrics.jsonl").read_text()
    scales = {row["rate_0"] for row in rows_of(whole) if "rate_0" in row}
    record = storage.newest(whole)[0].record
    assert len(scales) > 4 and record["memories"]["Divergence"] == {"rollbacks": 1}
    for step in (4, 9, 13, 20):
        cut = tmp_path / str(step)
        cut.mkdir()
        for path in whole.glob("*.params"):
            if storage.load(path)[1]["step"] <= step:
                (cut / path.name).write_bytes(path.read_bytes())
        (cut / "metrics.jsonl").write_text(lines)
        resumed = train(cut, data, resume=True, **settings)
        assert_same(resumed, undisturbed)
        assert rows_of(cut) == rows_of(whole), step
        assert timeless(resumed.history) == timeless(undisturbed.history)
        assert resumed.metrics == undisturbed.metrics
        newest = storage.newest(cut)[0].record, storage.newest(whole)[0].record
        assert newest[0]["memories"] == newest[1]["memories"]
        assert newest[0]["best"] == newest[1]["best"]


def timeless(history):
    return [{k: v for k, v in row.items() if k not in TIMES} for row in history]


@pytest.mark.slow
def test_resuming_within_an_epoch_does_not_read_its_data_again(tmp_path):
    data = Streamed()
    train(tmp_path, data, callbacks=[Stop(10)])
    data.read.clear()
    train(tmp_path, data, callbacks=[Stop(10**9)], resume=True)
    rest = (EPOCHS * STEPS - 10) * 32
    # Also read: the first batch for its shapes, what is prefetched with it, the fingerprint, and
    # the first example, which is checked.
    extra = 3 * 32 + 3
    assert rest <= len(data.read) <= rest + extra


@pytest.mark.slow
def test_another_seed_with_override_is_used_from_the_checkpoint_on(tmp_path):
    """Also in the next checkpoints, from which the run is then resumed without it."""
    settings = {"data": (X, Y), "resume": "override"}
    for name in ("same", "other", "cut"):
        train(tmp_path / name, epochs=1, **settings)
    same = train(tmp_path / "same", epochs=3, **settings)
    other = train(tmp_path / "other", seed=6, epochs=3, **settings)
    assert not np.array_equal(same.params["head"]["weight"], other.params["head"]["weight"])
    train(tmp_path / "cut", seed=6, epochs=2, **settings)
    assert_same(train(tmp_path / "cut", seed=6, epochs=3, data=(X, Y), resume=True), other)


@pytest.mark.slow
def test_a_loader_without_a_position_is_read_again_with_a_warning(tmp_path, caplog):
    message = "has no start_at(epoch, batch): reading 3 of its batches again to skip them"
    for loader, warned in ((Batches(), True), (WithPosition(), False)):
        folder = tmp_path / type(loader).__name__
        train(folder, loader, callbacks=[Stop(10)])
        caplog.clear()
        with caplog.at_level(logging.WARNING, "main"):
            again = train(folder, loader, callbacks=[Stop(10**9)], resume=True)
        assert (message in caplog.text) == warned
        assert_same(again, train(None, loader))


@pytest.mark.slow
def test_a_run_starts_over_if_it_was_killed_while_its_first_checkpoint_was_written(
    tmp_path, monkeypatch, caplog
):
    """What was logged until then is moved."""
    undisturbed, cut = train(tmp_path / "whole", replicas=2), tmp_path / "cut"

    def save(path, tree, record):
        raise RunError("killed")

    monkeypatch.setattr(storage, "save", save)
    checkpoint = CheckpointOptions(every_epochs=0)
    with pytest.raises(RunError, match="killed"):
        train(cut, replicas=2, callbacks=[Stop(3)], checkpoint=checkpoint)
    monkeypatch.undo()
    before = contents(cut)
    assert before.keys() == {"metrics.jsonl"}
    resumed = train(cut, replicas=2, callbacks=[Stop(10**9)], resume=True)
    assert_same(resumed, undisturbed)
    assert rows_of(cut) == rows_of(tmp_path / "whole")
    assert contents(cut / "former_1") == before
    assert f"What the run had logged before is in {cut}/former_1" in caplog.text


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("byte", "found"),
    [
        (-1, "step_3 was not the first one: there was checkpoint-step_2"),
        (0, "step_3.params: is not a valid safetensors file"),
    ],
)
def test_a_run_whose_checkpoints_were_lost_neither_starts_over_nor_changes_anything(
    tmp_path, byte, found
):
    """One was deleted, and one is damaged at this byte."""
    settings = {"replicas": 2, "log": {"every_steps": 1}}
    settings["checkpoint"] = CheckpointOptions(every_steps=1, keep=2)
    train(tmp_path, callbacks=[Stop(3)], **settings)
    (tmp_path / "checkpoint-step_2.params").unlink()
    damaged = tmp_path / "checkpoint-step_3.params"
    content = bytearray(damaged.read_bytes())
    content[byte] ^= 1
    damaged.write_bytes(content)
    before = contents(tmp_path)
    with pytest.raises(UserError, match="no checkpoint of this run can be resumed") as error:
        train(tmp_path, resume=True, **settings)
    assert found in str(error.value) and "Put back what is missing" in str(error.value)
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_a_finished_run_is_not_trained_again(tmp_path):
    first = train(tmp_path)
    again = train(tmp_path, resume=True)
    assert again.finished and again.step == first.step and len(again.history) == EPOCHS
    assert_same(again, first)
    more = train(tmp_path, resume=True, epochs=EPOCHS + 1)
    assert more.step == first.step + STEPS


@pytest.mark.slow
def test_a_new_run_refuses_the_folder_of_another_run(tmp_path):
    train(tmp_path)
    with pytest.raises(
        UserError, match=r"holds a run of 3 epochs .* \(resume=True\), name another"
    ):
        train(tmp_path)


@pytest.mark.slow
def test_other_options_or_data_are_refused_without_override(tmp_path):
    train(tmp_path, callbacks=[Stop(10)])
    with pytest.raises(UserError, match=r"loader\.batch_size: 32 -> 16"):
        train(tmp_path, resume=True, batch_size=16)
    with pytest.raises(UserError, match=r"fingerprint of the data\.train"):
        train(tmp_path, (X + 1, Y), resume=True)
    assert train(tmp_path, (X + 1, Y), resume="override").finished


@pytest.mark.slow
def test_the_memory_of_a_callback_is_in_every_checkpoint(tmp_path):
    class Counter:
        memory = None

        def on_start(self, run):
            self.memory = {"epochs": 0}

        def on_row(self, run, row):
            self.memory["epochs"] += 1

    train(tmp_path, callbacks=[Counter()])
    counter = Counter()
    train(tmp_path, callbacks=[counter], resume=True, epochs=EPOCHS + 2)
    assert counter.memory == {"epochs": EPOCHS + 2}
    records = {p.stem: storage.load(p)[1]["memories"] for p in tmp_path.glob("*.params")}
    epochs = {name: memory["Counter"]["epochs"] for name, memory in records.items()}
    assert epochs == {f"checkpoint-epoch_{n}": n for n in range(1, 6)}


@pytest.mark.slow
def test_the_checkpoint_format_may_change_on_resume(tmp_path):
    undisturbed, _ = reference()
    stop = Stop(10)
    for form in ("orbax", "safetensors", "orbax"):
        checkpoint = CheckpointOptions(format=form, keep=2)
        resumed = train(tmp_path / "cut", callbacks=[stop], resume=True, checkpoint=checkpoint)
        stop.after += 6
    assert_same(resumed, undisturbed)
    kept = ["checkpoint-epoch_3", "checkpoint-step_17"]
    assert sorted(storage.checkpoints(tmp_path / "cut")) == kept


class Signal:
    """Sends a signal in one method in one epoch, once; in `on_evaluated`, before the first set is
    evaluated."""

    def __init__(self, hook, epoch=0):
        self.epoch, self.sent = epoch, False
        setattr(self, hook, self.send)

    def send(self, run, *details):
        if run.epoch == self.epoch and not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_an_interrupted_initial_evaluation_is_repeated_on_resume(tmp_path):
    settings = {"eval_initial": True, "callbacks": [Signal("on_start", 10**9)]}
    train(tmp_path / "whole", **settings)
    cut = train(tmp_path / "cut", **settings | {"callbacks": [Signal("on_start", epoch=0)]})
    assert cut.signal and cut.step == 0
    train(tmp_path / "cut", resume=True, **settings)
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
    assert [row for row in rows_of(tmp_path / "cut") if row.get("initial")]


@pytest.mark.slow
@pytest.mark.parametrize(("epoch", "cut_short"), [(EPOCHS - 1, True), (EPOCHS, False)])
def test_a_signal_cuts_a_run_short_unless_it_is_complete(tmp_path, caplog, epoch, cut_short):
    with caplog.at_level(logging.INFO, "main"):
        run = train(tmp_path, callbacks=[Signal("on_row", epoch)])
    assert run.signal and run.cut_short == cut_short
    assert (f"Stopped by SIGTERM after step {STEPS * epoch}" in caplog.text) == cut_short
    assert ("Stopped by" in caplog.text) == cut_short


@pytest.mark.slow
def test_a_run_that_early_stopping_ended_stays_ended_on_resume(tmp_path, caplog):
    callbacks = [early_stopping(patience=2, min_delta=10.0)]
    first = train(tmp_path, callbacks=callbacks, epochs=9)
    assert first.completed == 3
    with caplog.at_level(logging.INFO, "main"):
        again = train(tmp_path, callbacks=callbacks, epochs=9, resume=True)
    assert again.completed == 3 and again.stopped and again.step == first.step
    assert f"Stopped by a callback after step {first.step}" in caplog.text


@pytest.mark.slow
def test_another_number_of_replicas_or_another_optimizer_is_refused(tmp_path):
    train(tmp_path)
    with pytest.raises(UserError, match="replicas: it holds 1, this run has 2"):
        train(tmp_path, resume="override", replicas=2, epochs=9)
    with pytest.raises(UserError, match=r"does not fit this run(.|\n)*unexpected: opt/m/head/bias"):
        train(tmp_path, resume=True, optimizer=sgd(lr=0.1), epochs=9)


@pytest.mark.slow
def test_a_changed_model_is_refused(tmp_path):
    train(tmp_path)

    def apply(params, state, x, *, train=False, key=None):
        out, state = MODEL.apply(params, state, x, train=train, key=key)
        return 1.01 * out, state

    with pytest.raises(UserError, match="has changed its meaning since this was written"):
        train(tmp_path, model=MODEL._replace(apply=apply), resume=True)


# --- divergence


class Poison:
    """Example 77 has a label that is no class, the first `bad_reads` times that it is read."""

    def __init__(self, bad_reads=10**9):
        self.reads, self.bad_reads = 0, bad_reads

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        if i == 77:
            self.reads += 1
        bad = i == 77 and self.reads <= self.bad_reads
        return X[i], np.int32(99) if bad else Y[i]


def bad_step(seed=5, epoch=1):
    """How many steps of an epoch come before the one with the poisoned example."""
    order, _ = epoch_order(len(X), 32, seed=seed, epoch=epoch, shuffle=True)
    return int(np.argwhere(order == 77)[0][0])


@pytest.mark.slow
def test_a_diverged_run_saves_the_state_before_the_bad_step_and_stops(tmp_path):
    with pytest.raises(Diverged) as error:
        train(tmp_path / "bad", Poison(), log={"every_steps": 100})
    step = bad_step()
    message = str(error.value)
    assert f"In step {step + 1} (epoch 1) the loss was NaN or infinite.\n" in message
    assert "Common causes: a label outside" in message
    assert message.endswith("set the option on_nonfinite to 'skip' or 'rollback'")
    assert "as detect_nans=true will show (in a config, training.detect_nans)" in message
    assert "pass --resume and --override, or resume='override' to fit" in message
    assert f"The last finite state is {tmp_path}/bad/checkpoint-step_{step}.params" in message
    stopped = train(tmp_path / "good", Streamed(), callbacks=[Stop(step)], log={"every_steps": 1})
    checkpoint, _ = storage.newest(tmp_path / "bad")
    expected, _ = storage.newest(tmp_path / "good")
    assert checkpoint.record["step"] == step == stopped.step
    for name, array in expected.arrays[0].items():
        if not name.startswith("sums/line/"):  # the good run logs more often
            np.testing.assert_array_equal(checkpoint.arrays[0][name], array, err_msg=name)


@pytest.mark.slow
def test_a_diverged_run_can_be_resumed_exactly_when_the_cause_is_gone(tmp_path):
    with pytest.raises(Diverged):
        train(tmp_path / "bad", Poison())
    resumed = train(tmp_path / "bad", Streamed(), resume=True)
    undisturbed, expected_rows = reference()
    assert_same(resumed, undisturbed)
    assert rows_of(tmp_path / "bad") == expected_rows


@pytest.mark.slow
def test_a_run_that_skips_every_step_is_an_error(tmp_path):
    message = "no step of epoch 1 was finite.* set the option on_nonfinite to 'rollback'$"
    with pytest.raises(RunError, match=message):
        train(tmp_path, (X, Y * 0 + 99), on_nonfinite="skip")


@pytest.mark.slow
def test_a_run_continues_after_skipped_steps(tmp_path, caplog):
    run = train(tmp_path, Poison(), on_nonfinite="skip")
    assert run.finished and run.step == EPOCHS * STEPS
    assert "skipped 1 steps" in caplog.text


@pytest.mark.slow
def test_a_rollback_continues_from_the_last_checkpoint_with_another_seed(tmp_path, caplog):
    """The example is bad only at its first reading: one rollback, to the start, is enough."""
    run = train(tmp_path, Poison(bad_reads=1), on_nonfinite="rollback", log={"every_steps": 1})
    assert run.finished and run.step == EPOCHS * STEPS
    assert re.search(r"Back to checkpoint-step_0 with seed \d+ \(1 of 3\)", caplog.text)
    assert int(run.states()[0].seed) != 5
    steps = [row["step"] for row in rows_of(tmp_path) if "end_of_epoch" not in row]
    assert steps == list(range(1, EPOCHS * STEPS + 1))
    assert storage.newest(tmp_path)[0].record["memories"]["Divergence"] == {"rollbacks": 1}


@pytest.mark.slow
def test_rows_that_a_full_disk_delayed_are_written_later(tmp_path, monkeypatch):
    left, append = [4], metric_log.append

    def append_later(path, text):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(path, text)

    monkeypatch.setattr(metric_log, "append", append_later)
    checkpoint = CheckpointOptions(on_write_error="go_on")
    train(tmp_path, log={"every_steps": 1}, checkpoint=checkpoint)
    steps = [row["step"] for row in rows_of(tmp_path) if "end_of_epoch" not in row]
    assert steps == list(range(1, EPOCHS * STEPS + 1))


@pytest.mark.slow
def test_the_number_of_rollbacks_is_limited(tmp_path, caplog):
    message = "The run went back 2 times already.* set the option on_nonfinite to 'skip'$"
    with pytest.raises(Diverged, match=message):
        train(tmp_path, Poison(), on_nonfinite="rollback", rollbacks=2)
    seeds = re.findall(r"with seed (\d+)", caplog.text)
    assert len(set(seeds)) == 2


@pytest.mark.slow
def test_a_rolled_back_run_can_be_resumed_to_the_same_bits(tmp_path):
    settings = {
        "on_nonfinite": "rollback",
        "checkpoint": CheckpointOptions(every_steps=2),
        "log": {"every_steps": 1},
    }
    undisturbed = train(tmp_path / "whole", Poison(bad_reads=1), **settings)
    train(tmp_path / "cut", Poison(bad_reads=1), callbacks=[Stop(12)], **settings)
    resumed = train(tmp_path / "cut", Streamed(), resume=True, callbacks=[Stop(10**9)], **settings)
    assert_same(resumed, undisturbed)
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")


def test_a_rollback_needs_a_folder():
    with pytest.raises(UserError, match="to roll back, there must be checkpoints"):
        train(None, on_nonfinite="rollback")


@pytest.mark.slow
def test_a_state_that_overflows_is_named(tmp_path):
    """The losses are finite, but the optimizer's state overflows at the third step."""

    def overflowing(objective, optimizer) -> Update:
        usual = gradient_update(objective, optimizer)

        def init(params):
            return {"scale": jnp.float32(1e30), "usual": usual.init(params)[0]}, None

        def step(ts, batch, valid):
            new = ts._replace(opt=ts.opt | {"scale": ts.opt["scale"] * 1e3})
            losses, _, metrics = objective(ts.params, ts.state, batch, jax.random.key(0), True)
            return StepResult(new, [], losses, metrics)

        return Update(init, step)

    message = r"At step \d+ \(epoch 1\) opt/scale is NaN or infinite, though all losses and grad"
    with pytest.raises(Diverged, match=message):
        train(tmp_path, update=overflowing)


# --- crashes


class Broken:
    """A callback with an error in one method, from a certain step on."""

    def __init__(self, hook, at):
        self.at = at
        setattr(self, hook, self.fail)

    def fail(self, run, *details):
        if run.step >= self.at:
            raise KeyError("an error in a callback")


class BrokenData(Streamed):
    """In the second epoch, an image cannot be read."""

    def __getitem__(self, i):
        if len(self.read) > 300:
            raise OSError("cannot read image 7")
        return super().__getitem__(i)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"callbacks": [Broken("on_steps", 12)]}, CallbackFailed),
        *(
            pytest.param({"callbacks": [broken]}, CallbackFailed, marks=pytest.mark.torture)
            for broken in (Broken("on_evaluated", 7), Broken("on_row", 14))
        ),
        ({"callbacks": [Broken("on_end", 21)]}, CallbackFailed),
        ({"data": BrokenData()}, ExampleFailed),
    ],
)
def test_a_crashing_run_saves_its_state_and_can_be_resumed(tmp_path, settings, error):
    undisturbed, expected_rows = reference("data" in settings)
    with pytest.raises(error):
        train(tmp_path / "cut", checkpoint=CheckpointOptions(every_epochs=0), **settings)
    checkpoint, errors = storage.newest(tmp_path / "cut")
    assert not errors and checkpoint.record["step"] >= 7
    data = Streamed() if "data" in settings else (X, Y)
    resumed = train(tmp_path / "cut", data, resume=True, callbacks=[Broken("on_steps", 10**9)])
    assert resumed.finished
    assert_same(resumed, undisturbed)
    assert rows_of(tmp_path / "cut") == expected_rows


@pytest.mark.slow
def test_an_error_while_writing_a_checkpoint_is_raised_in_the_run(tmp_path, monkeypatch):
    def fail(*_):
        raise RunError("no space")

    monkeypatch.setattr(Keeper, "write", fail)
    with pytest.raises(RunError, match="no space"):
        train(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"data": Streamed()},
        *(
            pytest.param(s, marks=pytest.mark.torture)
            for s in ({"replicas": 2}, {"accumulate": 2}, {"ema": 0.9})
        ),
    ],
)
def test_the_operation_that_made_the_first_nan_is_named(tmp_path, settings):
    plain = mlp((6,), 3, dims=(8,))

    def apply(params, state, x, *, train=False, key=None):
        out, state = plain.apply(params, state, x, train=train, key=key)
        return jnp.log(out + 0.5), state  # the argument becomes negative sooner or later

    model = plain._replace(apply=apply)
    with pytest.raises(Diverged) as error:
        train(tmp_path, **{"model": model, "detect_nans": True} | settings)
    message = str(error.value)
    assert "log made the first nan, in the forward pass" in message
    assert "in apply" in message and "after head/bias" in message


@pytest.mark.slow
def test_logging_options_may_change_within_an_epoch(tmp_path, caplog):
    """With another ring, and norms that were not measured before: each step after the resume has a
    row, and none has a value that was not measured."""
    undisturbed, _ = reference()
    stop = Stop(10)
    stop.every = {"at": 10}
    train(tmp_path, log={"every_steps": 50}, callbacks=[stop])
    log = {"every_steps": 3, "log_all": True, "gradient_norm": True}
    resumed = train(tmp_path, resume=True, log=log, callbacks=[Stop(10**9)])
    assert_same(resumed, undisturbed)
    each = [row for row in rows_of(tmp_path) if row.get("each_step")]
    assert [row["step"] for row in each] == list(range(11, EPOCHS * STEPS + 1))
    assert None not in [value for row in each for value in row.values()]
    ends = [row for row in rows_of(tmp_path) if row.get("end_of_epoch")]
    assert [row["train_loss"] for row in ends] == [row["train_loss"] for row in undisturbed.history]
    assert "cover only the rest of it" not in caplog.text  # the metrics are the same


@pytest.mark.slow
def test_a_run_interrupted_in_its_final_test_is_tested_on_resume(tmp_path):
    class StopInTest:
        def on_end(self, run):
            os.kill(os.getpid(), signal.SIGTERM)

    settings = {
        "test_at": "end",
        "val": (X[:50], Y[:50]),
        "checkpoint": CheckpointOptions(monitor="val_loss"),
    }
    cut = train(tmp_path, callbacks=[StopInTest()], **settings)
    assert cut.finished and cut.untested
    resumed = train(tmp_path, resume=True, callbacks=[Stop(10**9)], **settings)
    assert (
        not resumed.untested and rows_of(tmp_path)[-1]["test_loss"] == resumed.metrics["test_loss"]
    )


class Failing(WithPosition):
    """Batches that end with an error, or with NaN before it."""

    def __init__(self, fails_at, bad_at=None, error=OSError):
        self.fails_at, self.bad_at, self.error = fails_at, bad_at, error

    def __len__(self):
        return STEPS

    def start_from(self, batch):
        for i, (x, y) in enumerate(super().start_from(batch), batch):
            if i == self.fails_at:
                raise self.error("the disk is gone")
            yield (x * np.nan if i == self.bad_at else x), y


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stop", "rollback"])
def test_a_bad_step_that_was_repaired_or_skipped_does_not_freeze_a_resumed_run(tmp_path, policy):
    with pytest.raises(OSError, match="gone"):  # both in one call, so the bad step is not read
        train(tmp_path / "read", Failing(5, 3), on_nonfinite=policy)
    run = train(tmp_path / "read", WithPosition(), on_nonfinite=policy, resume=True)
    assert run.step == EPOCHS * STEPS
    assert_same(run, train(None, WithPosition()))

    with pytest.raises(OSError, match="gone"):
        train(tmp_path / "skipped", Failing(5, 1), on_nonfinite="skip")
    run = train(tmp_path / "skipped", WithPosition(), on_nonfinite=policy, resume=True)
    assert run.completed == EPOCHS


@pytest.mark.slow
@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_the_steps_of_the_first_call_are_saved_if_the_data_fails_in_it(tmp_path, error):
    with pytest.raises(error, match="gone"):
        train(tmp_path / "run", Failing(5, error=error), log={"every_steps": 50})
    assert [path.name for path in (tmp_path / "run").glob("*.params")] == [
        "checkpoint-step_5.params"
    ]
    run = train(tmp_path / "run", WithPosition(), resume=True)
    assert_same(run, train(None, WithPosition()))
