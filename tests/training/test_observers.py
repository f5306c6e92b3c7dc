"""Observers as the loop calls them: when, what they may return, and what they remember."""

import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from model.mlp import mlp
from training.fit import fit
from training.observers import (
    CallbackFailed,
    check_observers,
    memories,
    remember,
    reply_of,
)
from training.optimizers import sgd
from training.watching.callbacks.early_stopping import early_stopping
from utils import UserError

X = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
Y = np.arange(64) % 3
RUN = SimpleNamespace(epoch=3, step=17)


def run_with(*callbacks, folder=None, width=8, **options):
    settings = {"optimizer": sgd(lr=0.01), "epochs": 3, "batch_size": 16, "test": (X, Y)}
    model = mlp((256,), 3, dims=(width,))
    return fit(model, (X, Y), callbacks=list(callbacks), folder=folder, **settings | options)


def observer(**attributes):
    """An object with these attributes and methods, which do not need it."""
    each = {
        name: staticmethod(value) if callable(value) else value
        for name, value in attributes.items()
    }
    return type("Mine", (), each)()


class Steps:
    """The steps after which it was called, as often as `every` says."""

    def __init__(self, **attributes):
        self.seen, self.evaluated = [], []
        vars(self).update(attributes)

    def on_steps(self, run):
        self.seen.append(run.step)

    def on_evaluated(self, run, name, values):
        self.evaluated.append((run.step, name))


# When they are called: 4 steps in each of 3 epochs.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "steps"),
    [
        (None, [2, 4, 6, 8, 10, 12]),  # at log lines
        ({"steps": 3}, [3, 6, 9, 12]),
        ({"steps": 5}, [5, 10]),
        ({"batches": 3}, [3, 7, 11]),
        ({"epochs": 1}, [4, 8, 12]),
        ({"epochs": 2}, [8]),
        ({"at": 7}, [7]),
        ({"at": 99}, []),
        ({}, []),
        ({"steps": 5, "epochs": 2, "at": 7}, [5, 7, 8, 10]),
        ({"seconds": 1e-9}, None),  # after every chunk
        ({"seconds": 1e9}, []),
    ],
    ids=str,
)
@pytest.mark.parametrize("late", [False, True])
def test_an_observer_is_called_as_often_as_every_says(every, steps, late):
    seen = Steps(late=late) if every is None else Steps(every=every, late=late)
    run_with(seen, log={"every_steps": 2})
    if steps is None:
        assert seen.seen and seen.seen == sorted({*seen.seen}) and seen.seen[-1] == 12
    else:
        assert seen.seen == steps


@pytest.mark.slow
def test_an_observer_that_is_not_late_sees_the_state_after_the_step():
    steps = []
    run_with(
        observer(every={"steps": 1}, on_steps=lambda run: steps.append(int(run.states()[0].step)))
    )
    assert list(map(int, steps)) == list(range(1, 13))


@pytest.mark.slow
def test_evaluations_within_epochs():
    """Every 3 steps, and after every second epoch; at step 12 both at once."""
    seen = [Steps(), Steps(every={"steps": 6}), Steps(every={"epochs": 2})]
    rows = []
    recorder = observer(on_row=lambda run, row: rows.append((row["step"], row.get("evaluation"))))
    run = run_with(*seen, recorder, eval_every={"steps": 3, "epochs": 2})
    tested = [[step for step, name in each.evaluated if name == "test"] for each in seen]
    assert tested == [[3, 6, 8, 9, 12], [6, 12], [8]]
    assert rows == [(3, True), (4, None), (6, True), (8, None), (9, True), (12, None)]
    assert ["test_loss" in row for row in run.history] == [False, True, True]


@pytest.mark.slow
def test_fewer_batches_of_an_evaluation():
    options = {"epochs": 1, "eval_batch_size": 16}
    few = run_with(limit_eval_batches=1, **options).metrics["test_loss"]
    whole = run_with(**options)
    logits = mlp((256,), 3, dims=(8,)).apply(whole.params, {}, X[:16])[0]
    by_hand = np.log(np.exp(logits).sum(1)) - logits[np.arange(16), Y[:16]]
    assert few == pytest.approx(float(by_hand.mean()), rel=1e-5) != whole.metrics["test_loss"]


@pytest.mark.slow
def test_an_observer_of_batches_sees_each_one():
    """In the order of the epoch, raw, and the same if they are streamed."""

    class Streamed:
        def __len__(self):
            return len(X)

        def __getitem__(self, i):
            return X[i], Y[i]

    def seen_in(data):
        batches = []
        mine = observer(
            on_batch=lambda run, batch: batches.append((run.step, np.asarray(batch[0])))
        )
        model = mlp((256,), 3, dims=(8,))
        fit(model, data, optimizer=sgd(lr=0.01), epochs=2, batch_size=16, callbacks=[mine])
        return batches

    held, streamed = seen_in((X, Y)), seen_in(Streamed())
    assert [step for step, _ in held] == list(range(1, 9))
    for (_, a), (_, b) in zip(held, streamed, strict=True):
        np.testing.assert_array_equal(a, b)
    rows = np.concatenate([x for _, x in held[:4]])
    np.testing.assert_array_equal(np.sort(rows[:, 0]), np.sort(X[:, 0]))


class Copies:
    """Takes the Snapshot of every checkpoint, and compares it with the weights at that moment."""

    def __init__(self):
        self.seen = []

    def on_save(self, run, take, kind):
        snapshot = take()
        assert take() is snapshot
        now = np.array(run.params["head"]["weight"])
        np.testing.assert_array_equal(snapshot.states[0].params["head"]["weight"], now)
        self.seen.append(snapshot.record["step"])


@pytest.mark.slow
def test_every_observer_can_have_the_snapshot_that_is_written(tmp_path):
    copies = Copies()
    run_with(copies, folder=tmp_path / "run", width=4096)
    assert [*dict.fromkeys(copies.seen)] == [4, 8, 12]


@pytest.mark.parametrize(("result", "published"), [(None, True), (False, False)])
def test_a_run_says_whether_an_observer_was_stuck_when_it_was_closed(result, published):
    closing = observer(close=lambda run: result, on_end=lambda run: None)
    assert run_with(closing).published == published


# Replies.


@pytest.mark.slow
def test_one_stop_is_enough_whatever_the_others_return():
    stop = observer(every={"at": 5}, on_steps=lambda run: {"stop": True})
    others = [observer(every={"steps": 1}, on_steps=lambda run: {"stop": False})] * 2
    for each in ([stop, *others], [*others, stop]):
        run = run_with(*each)
        assert (run.step, run.stopped_by) == (5, "Mine 3" if each[-1] is stop else "Mine")
    reason = observer(every={"at": 6}, on_steps=lambda run: {"stop": "the loss is good enough"})
    assert run_with(reason).stopped_by == "the loss is good enough"


@pytest.mark.slow
def test_a_pause_can_be_resumed_and_the_most_complete_checkpoint_is_written():
    kinds = []
    replies = {"pause": "the sweep", "save": "best"}, {"pause": "another", "save": "whole"}
    each = [observer(on_row=lambda run, row, reply=reply: reply) for reply in replies]
    run = run_with(*each, observer(on_save=lambda run, take, kind: kinds.append(kind)))
    assert (run.completed, run.signal, kinds[0]) == (1, "the sweep", "whole")
    assert not run.for_good


@pytest.mark.slow
def test_an_observer_can_request_an_evaluation_and_a_checkpoint(tmp_path):
    asks = observer(every={"at": 6}, on_steps=lambda run: {"evaluate": True, "save": True})
    seen = Steps()
    run_with(asks, seen, folder=tmp_path, checkpoint={"every_epochs": 0})
    assert [step for step, name in seen.evaluated if name == "test"] == [4, 6, 8, 12]
    assert (tmp_path / "checkpoint-step_6.params").exists()


def test_values_of_an_evaluation_join_its_metrics():
    made = [
        observer(on_evaluated=lambda run, name, values, i=i: {"values": {f"test_{i}": i}})
        for i in (1, 2)
    ]
    last = run_with(*made).history[-1]
    assert (last["test_1"], last["test_2"]) == (1, 2)


class Scale:
    """Scales the rate by the factor of each epoch, if there is one."""

    def __init__(self, factors):
        self.factors, self.every = factors, {"epochs": 1}

    def on_steps(self, run):
        factor = self.factors.get(run.epoch)
        return None if factor is None else {"lr_scale": factor}


@pytest.mark.slow
def test_the_rate_is_multiplied_by_the_product_of_the_latest_scale_of_each(tmp_path):
    def scale_after(epochs, *factors, **options):
        each = [Scale(own) for own in factors]
        run = run_with(*each, epochs=epochs, **options)
        return pytest.approx(float(run.states()[0].lr_scale), rel=1e-6)

    factors = {1: 0.1, 3: 0.01, 5: 2}, {2: 0.5, 3: 0.25}
    scales = [scale_after(epochs, *factors) for epochs in range(1, 6)]
    assert scales == [0.1, 0.1 * 0.5, 0.01 * 0.25, 0.01 * 0.25, 2 * 0.25]
    scale_after(2, *factors, folder=tmp_path)
    # The factor of an observer that is gone stays, so the rate never rises by a resume.
    options = {"folder": tmp_path, "resume": "override"}
    assert scale_after(3, *factors, **options) == 0.01 * 0.25
    assert scale_after(4, {4: 0.3}, **options) == 0.3 * 0.25


@pytest.mark.parametrize(
    "returned",
    [
        *({"lr_scale": scale} for scale in (math.nan, -1, "half", None, 1e39, 10**400)),
        *({"values": values} for values in ({"test_x": "high"}, {"x": 1.0}, [1.0], {"test_x": 1})),
        *({"values": values} for values in (None, np.ones(2), {"test_x": None})),
        {"save": "lst"},
        {"back_to": 1},
        {"lr": 1},
        True,
        0.5,
    ],
)
def test_invalid_replies_are_errors(returned):
    with pytest.raises(UserError, match=r"callbacks: Mine\.on_steps returned"):
        reply_of(observer(on_steps=lambda run: returned), "on_steps", RUN)


@pytest.mark.parametrize("value", ["high", None, np.ones(2), 1j])
def test_values_that_are_no_numbers_are_errors(value):
    callback = observer(on_evaluated=lambda run, name, values: {"values": {"test_x": value}})
    with pytest.raises(UserError, match=r"on_evaluated returned values=.*\{\"test_x\": number\}"):
        reply_of(callback, "on_evaluated", RUN, "test", {})


def test_the_error_of_a_failing_observer_names_its_method_and_the_step():
    def on_steps(run):
        return {}["missing"]

    def raise_user_error(run):
        raise UserError("for the user")

    message = r"Mine.on_steps failed in epoch 3 after step 17: .*test_observers.py, line"
    with pytest.raises(CallbackFailed, match=message) as error:
        reply_of(observer(on_steps=on_steps), "on_steps", RUN)
    assert isinstance(error.value.__cause__, KeyError)
    with pytest.raises(UserError, match=r"^for the user$"):  # unchanged
        reply_of(observer(on_steps=raise_user_error), "on_steps", RUN)


# Checks.


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"on_epoch_end": repr}, "'on_epoch_end', which is not called"),
        (
            {"on_steps": lambda: None},
            r"on_steps must take its arguments: def on_steps\(self, run\)",
        ),
        ({"on_evaluated": repr}, r"def on_evaluated\(self, run, name, values\)"),
        ({"on_steps": repr, "needs": ("gradients",)}, "needs 'gradients', which is not measured"),
        ({"metrics": {"mine": abs}}, r"metrics\['mine'\] must be tracked"),
        ({"on_steps": repr, "reports": "val_auc"}, "reports must be names as .*, got 'val_auc'"),
        ({"on_steps": repr, "reports": ("val_auc",)}, "'val_auc', and has no on_evaluated"),
        (
            {"on_steps": repr, "every": 3},
            r"Mine\.every: must be an object or null, found 3; set",
        ),
        ({"on_steps": repr, "every": {"steps": 0}}, r"every\.steps: must be at least 1, got 0"),
        ({"on_steps": repr, "every": {"steps": 1.5}}, r"every\.steps: must be an integer, found 1"),
        ({"on_steps": repr, "every": {"epoch": 1}}, "every.epoch: no such key; did you mean 'epoc"),
        ({"on_steps": repr, "every": {"seconds": -1}}, r"every\.seconds: must be a finite number"),
    ],
)
def test_the_attributes_of_an_observer_are_checked(attributes, message):
    with pytest.raises(UserError, match=message):
        check_observers([observer(**attributes)])


@pytest.mark.parametrize("callback", ["early_stopping", early_stopping, SimpleNamespace(on=1)])
def test_an_object_without_methods_is_no_callback(callback):
    with pytest.raises(UserError, match="has no method that is called"):
        check_observers([callback])


def test_a_class_is_no_callback():
    with pytest.raises(UserError, match=r"Scale is a class; pass an object: Scale\(\.\.\.\)"):
        check_observers([Scale])


# Memory.


@pytest.mark.parametrize("number", [np.float32(0.5), np.array(0.5), jnp.float32(0.5), np.int8(3)])
def test_numbers_of_numpy_and_jax_are_numbers(number):
    callback = observer(on_evaluated=lambda run, name, values: {"values": {"test_x": number}})
    callback.memory = {"best": [number]}
    values = reply_of(callback, "on_evaluated", RUN, "test", {})["values"]
    memory = memories([callback])["Mine"]
    assert repr(values["test_x"]) == repr(memory["best"][0]) == repr(number.item())
    remember([callback], {"Mine": {"best": [0.25]}}, "run/a.params")
    assert callback.memory == {"best": [0.25]}


@pytest.mark.parametrize(
    ("memory", "why"),
    [
        ({"best": (1, 2)}, "a tuple"),
        ({"seen": [{3: "three"}]}, "a key that is not text"),
        ({1: 2, "a": 3}, ""),
        ({"seen": {1, 2}}, "set is not JSON serializable"),
    ],
)
def test_a_memory_that_a_checkpoint_would_change_is_refused(memory, why):
    with pytest.raises(UserError, match=f"the memory of SimpleNamespace is not JSON .*{why}"):
        memories([SimpleNamespace(memory=memory)])


def test_two_observers_of_a_type_remember_apart(caplog):
    first, second = (SimpleNamespace(memory={"n": n}) for n in (1, 2))
    stored = memories([first, SimpleNamespace(), second])
    first.memory = second.memory = {"n": 0}
    remember([first, SimpleNamespace(), second], stored, "run/a.params")
    assert (first.memory, second.memory) == ({"n": 1}, {"n": 2})
    third = SimpleNamespace(memory={"n": 3})
    first.memory = second.memory = {"n": 0}
    remember([first, SimpleNamespace(), second, third], stored, "run/a.params")
    assert [each.memory["n"] for each in (first, second, third)] == [0, 0, 3]
    assert "SimpleNamespace: 2 of the checkpoint, 3 of this run, so its memory" in caplog.text
