"""What a run measures and when: its log lines, its rows, and what its callbacks receive."""

import time
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from inference.load import load
from model.base import Model
from model.mlp import mlp
from tests.runs import json_lines
from training.base import tracked
from training.checkpoint import storage
from training.engine import Trainer
from training.fit import evaluate, fit, recipe_of
from training.loss import cross_entropy
from training.metrics import accuracy, perplexity
from training.objective import supervised
from training.optimizers import adam, sgd
from training.run import TIMES
from training.schedules import linear
from training.watching.callbacks.early_stopping import early_stopping
from utils import UserError

RNG = np.random.default_rng(3)
X = RNG.normal(size=(100, 4)).astype(np.float32)
Y = ((X[:, 0] > 0) + (X[:, 1] > 0)).astype(np.int32)
TEST, VAL = (X[:37], Y[:37]), (X[40:61], Y[40:61])
MODEL = mlp((4,), 3, dims=(8,))


def run(folder=None, model=MODEL, test=TEST, val=None, **settings):
    defaults = {
        "optimizer": adam(lr=0.01),
        "epochs": 2,
        "batch_size": 16,
        "log": {"every_steps": 3},
    }
    return fit(model, (X, Y), test, val, folder=folder, **defaults | settings)


def rows(folder):
    return json_lines(folder / "metrics.jsonl")


def lines_of(folder):
    """The rows of log lines within epochs."""
    others = {"end_of_epoch", "each_step", "initial", "final"}
    return [row for row in rows(folder) if not others & row.keys()]


def losses_of(result, data):
    out, _ = MODEL.apply(result.params, result.state, data[0])
    return np.asarray(jax.vmap(cross_entropy)(out, data[1]))


def loss_value(output, label):
    return cross_entropy(output, label)


class Batches:
    """An iterable of batches without a length."""

    def __init__(self, pause=0.0):
        self.pause = pause

    def __iter__(self):
        for i in range(0, 100, 10):
            time.sleep(self.pause)
            yield X[i : i + 10], Y[i : i + 10]


def at_end(function):
    """An on_row that calls a function of the run at the end of each epoch."""
    return lambda run, row: function(run) if "end_of_epoch" in row else None


class Recorder:
    """A callback with the given attributes; its hooks append what they see to `seen`."""

    def __init__(self, **attributes):
        self.seen = []
        vars(self).update(attributes)


@pytest.mark.slow
def test_every_metric_mode_on_a_held_out_set(tmp_path):
    modes = ("MEAN", "SUM", "MAX", "MIN", "STD", "SINGLE")
    metrics = {m.lower(): tracked(loss_value, m, "EPOCH", "TEST") for m in modes}
    result = run(tmp_path, metrics=metrics)
    losses, last = losses_of(result, TEST), result.history[-1]
    expected = {name: getattr(losses, name)() for name in ("mean", "sum", "max", "min", "std")}
    expected["single"] = losses[32:].mean()  # the mean of the last batch
    for name, value in expected.items():
        assert last[f"test_{name}"] == pytest.approx(value, rel=1e-4), name
        assert f"train_{name}" not in last
    assert all(set(row) & {"train_mean", "train_max"} == set() for row in rows(tmp_path))


@pytest.mark.slow
def test_within_an_epoch_a_metric_covers_the_steps_since_the_last_line(tmp_path):
    metrics = {m.lower(): tracked(loss_value, m, "STEP") for m in ("SUM", "MAX", "MIN")}
    run(tmp_path, metrics=metrics, log={"every_steps": 3, "log_all": True})
    steps, lines = [row for row in rows(tmp_path) if row.get("each_step")], lines_of(tmp_path)
    # The last step of each epoch has no log line, but a row of its own.
    assert [row["step"] for row in steps] == list(range(1, 15))
    assert [row["step"] for row in lines] == [3, 6, 10, 13]
    for line in lines:
        own = [row for row in steps if line["step"] - 3 < row["step"] <= line["step"]]
        mean = np.mean([row["train_loss"] for row in own])
        assert line["train_loss"] == pytest.approx(mean, rel=1e-5)
        assert line["train_sum"] == pytest.approx(sum(row["train_sum"] for row in own), rel=1e-5)
        assert line["train_max"] == max(row["train_max"] for row in own)
        assert line["train_min"] == min(row["train_min"] for row in own)
    ends = [row for row in rows(tmp_path) if row.get("end_of_epoch")]
    assert not any("train_sum" in row or "test_sum" in row for row in ends)


@pytest.mark.slow
def test_rows_of_each_step_equal_log_lines_at_every_step(tmp_path):
    rarely = run(tmp_path / "a", log={"every_steps": 5, "log_all": True, "gradient_norm": True})
    always = run(tmp_path / "b", log={"every_steps": 1, "gradient_norm": True})
    each = [row for row in rows(tmp_path / "a") if row.pop("each_step", False)]
    lines = [{k: v for k, v in row.items() if k not in TIMES} for row in lines_of(tmp_path / "b")]
    assert each == lines and len(each) == 14
    assert jax.tree.all(jax.tree.map(np.array_equal, rarely.params, always.params))


class Machine:
    """Time that only passes where a run reads data (`host` seconds per step) or waits for its
    device (`device` seconds per step), which is at most `queue` steps behind."""

    def __init__(self, monkeypatch, host, device, queue):
        self.time, self.free, self.ends, self.chunks = 0.0, 0.0, {}, []
        train, read = Trainer.train, Trainer.read

        def train_in_time(trainer, count):
            steps, sums = train(trainer, count)
            for _ in range(steps):
                self.time = max(self.time + host, self.free - queue * device)
                self.free = max(self.free, self.time) + device
            self.ends[id(sums)] = self.free, sums  # kept, so that its id is not used again
            self.chunks += [steps] if steps else []
            return steps, sums

        def read_in_time(trainer, sums):
            self.time = max(self.time, self.ends.pop(id(sums), (self.free, None))[0])
            return read(trainer, sums)

        monkeypatch.setattr(Trainer, "train", train_in_time)
        monkeypatch.setattr(Trainer, "read", read_in_time)
        for module in ("training.run", "training.feed", "training.loop"):
            monkeypatch.setattr(f"{module}.time", SimpleNamespace(**self.clocks()))

    def clocks(self):
        return {"perf_counter": lambda: self.time, "monotonic": lambda: self.time}


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 50, 7])
@pytest.mark.parametrize(
    ("host", "device", "queue"),
    [(0.01, 0.001, 32), (0.001, 0.01, 10**6), (0.001, 0.01, 32), (1e-6, 1.5, 32)],
    ids=["waits for data", "waits for the device", "device with a short queue", "slow steps"],
)
def test_chunks_take_half_a_second_and_log_lines_have_the_true_speed(
    tmp_path, monkeypatch, host, device, queue, every
):
    machine = Machine(monkeypatch, host, device, queue)
    data = np.tile(X, (4, 1)), np.tile(Y, 4)
    settings = {"optimizer": sgd(lr=0.1), "epochs": 3, "batch_size": 1, "folder": tmp_path}
    fit(MODEL, data, log={"every_steps": every}, **settings)
    step = max(host, device)
    longest = max(1.1, step)  # the pace at most doubles, so one chunk may be twice as long
    assert max(machine.chunks) * step <= longest
    assert len(machine.chunks) <= 3 * (400 * step / 0.25 + 400 / (every or 400) + 10)
    lines = [row["steps_per_second"] for row in lines_of(tmp_path)]
    assert bool(lines) == bool(every)
    # With a short queue, the steps that it holds are charged to the chunks that come after them.
    slack = 0.7 if queue < 50 and device > host else 0.35
    assert np.allclose(lines[2:], 1 / step, rtol=slack)
    assert np.isclose(np.mean(1 / np.array(lines or [1 / step])), step, rtol=0.1)


@pytest.mark.slow
def test_log_lines_by_the_clock_do_not_change_the_params(tmp_path):
    logs = {"a": {"every_steps": 0, "every_seconds": 0.15}, "b": {"every_steps": 0}}
    settings = {"optimizer": adam(lr=0.01), "epochs": 1}
    runs = [
        fit(MODEL, Batches(0.06), folder=tmp_path / name, log=log, **settings)
        for name, log in logs.items()
    ]
    assert 1 <= len(lines_of(tmp_path / "a")) < 10 and lines_of(tmp_path / "b") == []
    assert jax.tree.all(jax.tree.map(np.array_equal, runs[0].params, runs[1].params))
    (row,) = runs[0].history
    assert 0.3 < row["waiting"] <= 1  # most of the time was spent waiting for data
    assert row["steps_per_second"] < 1 / 0.03
    assert row["examples_per_second"] == pytest.approx(10 * row["steps_per_second"])


@pytest.mark.slow
def test_norms_of_the_gradients_and_the_params(tmp_path):
    log = {"every_steps": 1, "gradient_norm": True, "parameter_norm": True, "leaf_statistics": True}
    step = Recorder(on_steps=lambda view: step.seen.append((dict(view.metrics), view.params)))
    start = Recorder(on_start=lambda view: start.seen.append(view.params))
    settings = {"optimizer": sgd(lr=0.1), "batch_size": 100, "shuffle": False, "epochs": 1}
    run(callbacks=[step, start], log=log, **settings)
    before, (metrics, after) = start.seen[0], step.seen[0]

    def loss(params):
        return jax.vmap(cross_entropy)(MODEL.apply(params, {}, X)[0], Y).mean()

    grads = jax.grad(loss)(before)
    assert metrics["gradient_norm"] == pytest.approx(float(optax.global_norm(grads)), rel=1e-5)
    assert metrics["parameter_norm"] == pytest.approx(float(optax.global_norm(after)), rel=1e-5)
    head = float(jnp.linalg.norm(grads["head"]["weight"]))
    assert metrics["gradient_norm/head/weight"] == pytest.approx(head, rel=1e-5)
    bias = float(jnp.linalg.norm(after["head"]["bias"]))
    assert metrics["parameter_norm/head/bias"] == pytest.approx(bias, rel=1e-5)


@pytest.mark.slow
def test_the_logged_learning_rate_is_the_one_that_the_step_used(tmp_path):
    halve = Recorder(on_row=at_end(lambda view: {"lr_scale": 0.5}), needs=("learning_rate",))
    schedule = linear(total_steps=14)
    rates = {"learning_rate": lambda step: 0.01 * schedule(step)}
    run(tmp_path, callbacks=[halve], schedule=schedule, rates=rates)
    logged = {row["step"]: row["learning_rate"] for row in rows(tmp_path)}
    for step, rate in logged.items():
        scale = 1 if step <= 7 else 0.5
        assert rate == pytest.approx(0.01 * float(schedule(step - 1)) * scale, rel=1e-5), step


@pytest.mark.slow
def test_a_loss_of_several_terms_is_their_sum_and_each_term_is_logged():
    def terms(output, label):
        return {"fit": cross_entropy(output, label), "small": 0.1 * jnp.sum(output**2)}

    def summed(output, label):
        return sum(terms(output, label).values())

    both = run(loss=terms, metrics=[accuracy]), run(loss=summed, metrics=[accuracy])
    for leaf, expected in zip(*(jax.tree.leaves(result.params) for result in both), strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-5)
    last = both[0].history[-1]
    for loss in ("train_loss", "test_loss"):
        total = last[f"{loss}_fit"] + last[f"{loss}_small"]
        assert last[loss] == pytest.approx(total, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_concat_collects_all_examples_in_order(stream):
    metrics = {"logits": tracked(lambda output, label: {"out": output, "label": label}, "CONCAT")}
    recorder = Recorder(on_row=at_end(lambda view: recorder.seen.append(dict(view.arrays))))
    options = {"device_budget_mb": 0} if stream else {}
    result = run(metrics=metrics, callbacks=[recorder], shuffle=False, epochs=1, **options)
    arrays = recorder.seen[0]
    np.testing.assert_array_equal(arrays["test_logits"]["label"], TEST[1])
    logits, _ = MODEL.apply(result.params, {}, TEST[0])
    np.testing.assert_allclose(arrays["test_logits"]["out"], logits, rtol=2e-4, atol=1e-5)
    np.testing.assert_array_equal(arrays["train_logits"]["label"], Y)
    assert not any("logits" in name for name in result.history[0])


@pytest.mark.slow
def test_named_validation_sets_are_evaluated_before_the_test_set():
    recorder = Recorder()
    recorder.on_evaluated = lambda run, *evaluated: recorder.seen.append(evaluated)
    val = {"val": VAL, "odd-ones": (X[1::2], Y[1::2])}
    result = run(val=val, callbacks=[recorder], epochs=1, eval_initial=True)
    sets = ["val", "odd-ones", "test"]
    assert [name for name, _ in recorder.seen] == [*sets, "train", *sets]
    assert all(f"{name}_loss" in values for name, values in recorder.seen)
    assert {"val_loss", "odd-ones_accuracy", "test_loss"} <= result.history[0].keys()
    with pytest.raises(UserError, match="cannot be called 'my_val'"):
        run(val={"my_val": VAL})


@pytest.mark.slow
def test_the_initial_params_can_be_evaluated(tmp_path):
    start = Recorder(on_start=lambda view: start.seen.append(view.params))
    run(tmp_path, callbacks=[start], eval_initial=True, epochs=1)
    first = rows(tmp_path)[0]
    out, _ = MODEL.apply(start.seen[0], {}, TEST[0])
    assert (first["epoch"], first["step"], first["initial"]) == (0, 0, True)
    assert "test_loss" not in rows(tmp_path)[1]  # the first line within the epoch
    loss = float(jax.vmap(cross_entropy)(out, TEST[1]).mean())
    assert first["test_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
def test_the_test_set_can_be_evaluated_at_the_end_with_the_best_checkpoint(tmp_path, caplog):
    caplog.set_level("INFO", "main")
    checkpoint = {"monitor": "val_loss", "mode": "max", "keep": 1}  # an early epoch is best
    settings = {"val": VAL, "epochs": 4, "test_at": "end"}
    recorder = Recorder(every={"epochs": 3})

    def record(view, name, values):
        if name == "test":
            recorder.seen.append((dict(view.metrics), view.params))

    recorder.on_evaluated = record
    result = run(tmp_path, checkpoint=checkpoint, callbacks=[recorder], **settings)
    best = 1 + int(np.argmax([row["val_loss"] for row in result.history]))
    assert best < 4 and not any("test_loss" in row for row in result.history)
    final = rows(tmp_path)[-1]
    assert final["final"] == f"checkpoint-epoch_{best}"
    assert "val_loss" not in final and "train_loss" not in final  # which the epoch has logged
    assert f"Epoch {best} [test] avg Loss: {final['test_loss']:.4f}" in caplog.text
    arrays, _ = storage.load(tmp_path / f"checkpoint-epoch_{best}.params")
    params = {"hidden": [{}], "head": {}}
    for name, array in arrays.items():
        if name.startswith("params/"):
            *path, leaf = name.split("/")[1:]
            (params["head"] if path == ["head"] else params["hidden"][0])[leaf] = array
    loss = jax.vmap(cross_entropy)(MODEL.apply(params, {}, TEST[0])[0], TEST[1]).mean()
    assert final["test_loss"] == pytest.approx(float(loss), rel=1e-4)
    # It is called whatever its `every`, and sees the params that were tested.
    ((metrics, tested),) = recorder.seen
    assert metrics["test_loss"] == final["test_loss"] == result.metrics["test_loss"]
    assert np.array_equal(tested["head"]["bias"], params["head"]["bias"])
    # The run ends with these weights, and with the values that belong to them.
    assert losses_of(result, TEST).mean() == pytest.approx(final["test_loss"], rel=1e-4)
    assert result.metrics["val_loss"] == result.history[best - 1]["val_loss"] == result.best.value
    assert f"with the weights of checkpoint-epoch_{best}" in repr(result)
    assert (
        (final["epoch"], final["step"]) == (result.best.epoch, result.best.step) == (best, best * 7)
    )
    assert int(result.states()[0].step) == 4 * 7  # while the last state stays for a resume
    no_folder = run(**settings)  # no checkpoints, so the last params are tested
    loss = losses_of(no_folder, TEST).mean()
    assert no_folder.metrics["test_loss"] == pytest.approx(loss, rel=1e-4)


class StopAt:
    """Stops the run for good after so many steps, within an epoch."""

    def __init__(self, step):
        self.step = step

    def on_steps(self, view):
        return {"stop": view.step >= self.step}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(
    "end", [{"max_steps": 17}, {"callbacks": [StopAt(17)]}], ids=["max_steps", "callback"]
)
def test_the_last_weights_of_a_run_that_ends_within_an_epoch_may_be_the_best(tmp_path, mode, end):
    """The loss falls, so that they are the best by the smallest loss, and the first epoch is by the
    largest."""
    settings = {"val": VAL, "epochs": 4, "batch_size": 16}
    settings["checkpoint"] = {"monitor": "val_loss", "mode": mode, "keep": 1}
    settings["optimizer"] = sgd(lr=0.1)
    first = run(tmp_path, **settings, **end, log={"every_steps": 1})
    assert first.step == 17
    values = [row["val_loss"] for row in rows(tmp_path) if "val_loss" in row]
    assert len(values) == 3 and values == sorted(values, reverse=True)
    names = ["checkpoint-epoch_1", "checkpoint-epoch_2", "checkpoint-step_17"]
    best = names[-1 if mode == "min" else 0]
    assert (first.best.name, first.best.value) == (best, values[names.index(best)])
    assert sorted(tmp_path.glob("*.params")) == sorted(
        tmp_path / f"{name}.params" for name in {best, names[-1]}
    )
    loaded = load(tmp_path, MODEL, best=True)
    assert loaded.path == first.best.path
    loss = evaluate(MODEL, first.best.params, first.best.state, VAL)["loss"]
    assert loss == pytest.approx(first.best.value, rel=1e-5)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, first.best.params)
    # Resumed, it has the bits of a run that never ended, and still knows the best.
    whole = run(tmp_path / "whole", **settings)
    resumed = run(tmp_path, **settings, resume="override", log={"every_steps": 1})
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    assert resumed.best.name == ("checkpoint-epoch_4" if mode == "min" else best)


@pytest.mark.slow
def test_a_best_checkpoint_that_was_deleted_is_missed_and_ranked_again_by_a_resume(tmp_path):
    settings = {"val": VAL, "checkpoint": {"mode": "max", "keep": 2}, "optimizer": sgd(lr=0.1)}
    first = run(tmp_path, **settings, epochs=3)
    assert first.best.name == "checkpoint-epoch_1"
    first.best.path.unlink()
    with pytest.raises(UserError, match=r"checkpoint-epoch_1 \(val_loss .*\), is no longer there"):
        load(tmp_path, MODEL, best=True)
    with pytest.raises(UserError, match="has no checkpoint-epoch_1; it has checkpoint-epoch_2, "):
        first.best.params  # noqa: B018
    again = run(tmp_path, **settings, epochs=4, resume=True)
    assert again.best.name == "checkpoint-epoch_2"
    assert load(tmp_path, MODEL, best=True).path == again.best.path


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_early_stopping_restores_the_best_weights_with_their_values(tmp_path, replicas):
    """Whether it stopped the run or not. The largest loss, of the first epoch, is the best here."""
    stopping = early_stopping("val_loss", "max", patience=2, restore_best=True)
    settings = {"val": VAL, "checkpoint": {"mode": "max"}, "optimizer": sgd(lr=0.1)}
    settings |= {"callbacks": [stopping], "replicas": replicas}
    for epochs in (9, 2):
        done = run(tmp_path / str(epochs), **settings, epochs=epochs)
        assert done.completed == min(epochs, 3)
        assert done.best.epoch == 1 and done.metrics["test_loss"] == done.history[0]["test_loss"]
        own = done.metrics["test_loss" if replicas == 1 else "test_loss/0"]
        assert losses_of(done, TEST).mean() == pytest.approx(own, rel=1e-4)
    resumed = run(tmp_path / "2", **settings, epochs=3, resume=True)
    assert resumed.completed == 3 and resumed.best.epoch == 1


@pytest.mark.parametrize(
    ("folder", "settings", "message"),
    [
        (None, {}, "give fit a `folder`"),
        ("a", {"checkpoint": {"monitor": "val_accuracy"}}, "which is val_accuracy, and it watches"),
        ("a", {"checkpoint": {"mode": "max"}}, "with the same mode"),
        ("a", {"val": None}, "which is None, and it watches test_loss"),
    ],
)
def test_restoring_the_best_needs_a_checkpoint_that_is_the_best_of_both(
    tmp_path, folder, settings, message
):
    settings = {"val": VAL, "callbacks": [early_stopping(restore_best=True)]} | settings
    with pytest.raises(UserError, match=message):
        run(folder and tmp_path / folder, **settings)


@pytest.mark.slow
def test_a_run_may_evaluate_nothing():
    assert not any("test_loss" in row for row in run(eval_every=0).history)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_limit_batches_limits_training_and_evaluation(stream):
    options = {"device_budget_mb": 0} if stream else {}
    labels = Recorder(on_row=at_end(lambda view: labels.seen.append(view.arrays["test_label"])))
    labels.metrics = {"label": tracked(lambda output, label: label, "CONCAT", phase="TEST")}
    result = run(limit_batches=2, callbacks=[labels], **options)
    assert result.step == 4
    np.testing.assert_array_equal(labels.seen[0], TEST[1][:32])


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_overfitting_uses_only_the_first_batches(stream):
    labels = Recorder(on_row=at_end(lambda view: labels.seen.append(view.arrays["train_label"])))
    labels.metrics = {"label": tracked(lambda output, label: label, "CONCAT", phase="TRAIN")}
    run(overfit_batches=2, callbacks=[labels], device_budget_mb=0 if stream else 100)
    assert [sorted(epoch) for epoch in labels.seen] == [sorted(Y[:32])] * 2


@pytest.mark.slow
def test_an_iterable_of_batches_can_be_overfitted():
    assert fit(MODEL, Batches(), optimizer=adam(lr=0.01), epochs=3, overfit_batches=2).step == 6


@pytest.mark.slow
def test_an_error_in_the_evaluation_is_raised_before_the_first_step():
    def broken(output, label):
        return cross_entropy(output, label)

    broken.finish = lambda mean: 1 / 0
    started = Recorder(on_steps=lambda view: started.seen.append(1))
    with pytest.raises(UserError, match=r"the means cannot be finished: .*ZeroDivisionError"):
        run(metrics=[tracked(broken, phase="TEST")], callbacks=[started])
    assert started.seen == []


@pytest.mark.parametrize(
    "settings",
    [{"callbacks": [early_stopping("val_loss")]}, {"checkpoint": {"monitor": "val_loss"}}],
)
def test_a_monitored_metric_must_be_measured(tmp_path, settings):
    message = r"monitor: 'val_loss' is not measured; no epoch evaluates a set 'val' \(loader"
    with pytest.raises(UserError, match=message):
        run(tmp_path, **settings)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
def test_the_validation_set_is_monitored_unless_another_metric_is_named(tmp_path, caplog):
    caplog.set_level("INFO", "main")
    stopping = early_stopping(patience=2, min_delta=10.0)
    settings = {"val": {"odd": VAL, "rare": TEST}, "epochs": 9, "test_at": "end"}
    done = run(tmp_path / "a", callbacks=[stopping], optimizer=sgd(lr=0.01), **settings)
    losses = [row["odd_loss"] for row in done.history]
    assert len(losses) == 3 and stopping.memory["best"] == losses[0]
    best = 1 + int(np.argmin(losses))
    assert rows(tmp_path / "a")[-1]["final"] == f"checkpoint-epoch_{best}"
    assert "Best by odd_loss" in caplog.text and "last weights" not in caplog.text

    run(tmp_path / "b", checkpoint={"monitor": None, "keep": 1}, **settings | {"epochs": 1})
    assert "No checkpoint.monitor: the last weights will be tested" in caplog.text
    assert rows(tmp_path / "b")[-1]["final"] == "the last weights"

    stopping = early_stopping(patience=1, min_delta=10.0)  # without a validation set
    done = run(callbacks=[stopping], epochs=9)
    assert stopping.memory["best"] == done.history[0]["test_loss"]


@pytest.mark.slow
def test_a_callback_that_needs_per_step_sees_the_values_of_each_step():
    def record(view):
        recorder.seen.append({name: array.tolist() for name, array in view.per_step.items()})

    recorder = Recorder(needs=("per_step", "gradient_norm"))
    recorder.on_steps, recorder.on_row = record, at_end(record)
    run(callbacks=[recorder])
    assert [step for each in recorder.seen for step in each.get("step", [])] == list(range(1, 15))
    for each in filter(None, recorder.seen):
        assert len(each["loss"]) == len(each["step"]) == len(each["gradient_norm"])


def next_token(input_shape):
    """Logits of 5 tokens at every position, from a table."""

    def apply(params, state, x, *, train=False, key=None):
        return params["table"][x], state

    return Model(lambda key: ({"table": jax.random.normal(key, (5, 5))}, {}), apply)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_sequences_of_unequal_lengths_are_measured_by_their_tokens(tmp_path, stream):
    """Over batches, microbatches and replicas, in lines, epochs and held-out sets."""
    rng = np.random.default_rng(0)
    lengths = np.array([1, 9, 2, 9, 0, 3, 9, 1, 5, 4])
    x = rng.integers(0, 5, (10, 9)).astype(np.int32)
    y = np.where(np.arange(9) < lengths[:, None], (2 * x + 1) % 5, 7).astype(np.int32)
    done = fit(
        next_token((9,)),
        (x, y),
        (x[:7], y[:7]),
        loss=partial(cross_entropy, ignore_label=7),
        metrics={
            "accuracy": partial(accuracy, ignore_label=7),
            "perplexity": partial(perplexity, ignore_label=7),
        },
        optimizer=sgd(lr=0.5),
        epochs=2,
        batch_size=4,
        accumulate=2,
        replicas=2,
        device_budget_mb=0 if stream else 2048,
        log={"every_steps": 3, "gradient_norm": True},
        folder=tmp_path,
    )
    losses = []
    for replica, ts in enumerate(done.states()):
        logits = np.asarray(ts.params["table"])[x[:7]]
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        kept = y[:7] != 7
        mean = -np.take_along_axis(log_p, y[:7, :, None] % 5, -1)[..., 0][kept].mean()
        hits = (logits.argmax(-1) == y[:7])[kept].mean()
        row = done.history[-1]
        assert row[f"test_loss/{replica}"] == pytest.approx(mean, rel=1e-5)
        assert row[f"test_perplexity/{replica}"] == pytest.approx(np.exp(mean), rel=1e-5)
        assert row[f"test_accuracy/{replica}"] == pytest.approx(hits, rel=1e-6)
        losses.append(row[f"train_loss/{replica}"])
    # The only line of the epoch is over all of its steps, so it has the values of the epoch.
    line = lines_of(tmp_path)[-1]
    assert [line["train_loss/0"], line["train_loss/1"]] == pytest.approx(losses, rel=1e-6)


def test_a_metric_must_ignore_what_the_loss_ignores():
    settings = {"loss": partial(cross_entropy, ignore_label=7), "optimizer": sgd(lr=0.1)}
    with pytest.raises(UserError, match="metrics: perplexity counts the labels 7"):
        recipe_of(next_token((9,)), metrics=[perplexity], **settings)
    recipe = recipe_of(next_token((9,)), **settings)  # accuracy, by default
    assert recipe.metric_plan.rules["accuracy"].function.keywords == {"ignore_label": 7}


def drawing(model, loss, metrics, preprocess, augment):
    """An objective that is random in evaluation: a number for each batch."""
    plain = supervised(model, loss, metrics, preprocess, augment)

    def objective(params, state, batch, key, train):
        losses, state, _ = plain(params, state, batch, key, train)
        return losses, state, {"drawn": jax.random.uniform(key) + 0 * losses}

    return objective


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_evaluation_draws_other_numbers_for_each_batch_epoch_and_set(tmp_path, stream):
    seen = {}

    class Drawn(Recorder):
        def on_row(self, view, row):
            for name in ("val", "test"):
                seen[name, view.epoch] = view.arrays[f"{name}_drawn"].tolist()

    def drawn(folder, epochs, **settings):
        seen.clear()
        run(
            folder,
            val=TEST,
            objective=drawing,
            metrics={"drawn": tracked(None, mode="CONCAT", phase="EVAL")},
            callbacks=[Drawn()],
            epochs=epochs,
            device_budget_mb=0 if stream else 2048,
            **settings,
        )
        return dict(seen)

    whole = drawn(tmp_path / "a", 3)
    numbers = [number for values in whole.values() for number in sorted({*values})]
    assert len(numbers) == len({*numbers}) == 2 * 3 * 3  # sets, epochs, batches
    first = drawn(tmp_path / "b", 1)
    rest = drawn(tmp_path / "b", 3, resume=True)
    assert first | rest == whole
    assert drawn(None, 3, replicas=2) == whole


@pytest.mark.slow
def test_what_an_objective_returns_is_measured_as_its_rule_says():
    rule = tracked(None, mode="SUM", freq="EPOCH", phase="TEST")
    row = run(objective=drawing, metrics={"drawn": rule}, epochs=1).history[0]
    assert "train_drawn" not in row and 0 < row["test_drawn"] < len(TEST[1])
    assert row["test_drawn"] > 1  # a sum, not a mean
    message = "metrics: drwan is not measured, since the objective does not .*it returns: drawn"
    with pytest.raises(UserError, match=message):
        run(objective=drawing, metrics={"drwan": rule})
    with pytest.raises(UserError, match="metrics: accuracy is not measured"):
        run(objective=drawing, metrics=[accuracy])
    with pytest.raises(UserError, match="loss: is missing, and the objective needs one"):
        run(loss=None)
