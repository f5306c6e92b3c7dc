"""Callbacks as the loop calls them: return values, invalid callbacks, and errors in a hook."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from training.runs.callback_checks import check_hooks
from training.watching.hooks import (
    CallbackFailed,
    Callbacks,
    memories,
    notify,
    remember,
    steps_left,
)

from training.base import tracked
from training.watching.callbacks.early_stopping import early_stopping
from utils import UserError

VIEW = SimpleNamespace(epoch=3, step=17)


def test_one_stop_is_enough_whatever_the_others_return():
    stop = SimpleNamespace(on_epoch_end=lambda run: {"stop": True})
    no_stop = SimpleNamespace(on_epoch_end=lambda run: {"stop": False})
    assert notify([stop, no_stop], "on_epoch_end", VIEW)["stop"]
    assert notify([no_stop, stop], "on_epoch_end", VIEW)["stop"]
    assert not notify([no_stop, no_stop], "on_epoch_end", VIEW)["stop"]


def test_unknown_keys_and_unknown_hooks_are_errors():
    with pytest.raises(UserError, match=r"returned \['lr'\]"):
        notify([SimpleNamespace(on_epoch_end=lambda run: {"lr": 1})], "on_epoch_end", VIEW)
    with pytest.raises(UserError, match="'on_epoch_ended', which is not a hook"):
        check_hooks([SimpleNamespace(on_epoch_ended=print)])


@pytest.mark.parametrize(
    "returned",
    [
        *({"lr_scale": scale} for scale in (float("nan"), -1, "half", None, 1e39, 10**400)),
        *({"values": values} for values in ({"test_x": "high"}, {"x": 1.0}, [1.0], {"test_x": 1})),
        *({"values": values} for values in (None, np.ones(2), {"test_x": None})),
        True,
        0.5,
    ],
)
def test_invalid_return_values_are_errors(returned):
    with pytest.raises(UserError, match=r"SimpleNamespace\.on_epoch_end returned"):
        notify([SimpleNamespace(on_epoch_end=lambda run: returned)], "on_epoch_end", VIEW)


@pytest.mark.parametrize("value", ["high", None, np.ones(2), 1j])
def test_values_that_are_no_numbers_are_errors(value):
    callback = SimpleNamespace(on_test_end=lambda view: {"values": {"test_x": value}})
    with pytest.raises(UserError, match=r"on_test_end returned values=.*\{\"test_x\": number\}"):
        notify([callback], "on_test_end", VIEW)


def test_the_message_about_values_names_the_hooks_that_may_return_them():
    callback = SimpleNamespace(on_epoch_end=lambda view: {"values": {"x": 1.0}})
    with pytest.raises(UserError, match="only on_validation_end and on_test_end may"):
        notify([callback], "on_epoch_end", VIEW)


def test_values_of_an_evaluation_are_merged():
    made = [
        SimpleNamespace(on_test_end=lambda run, i=i: {"values": {f"test_{i}": i}}) for i in (1, 2)
    ]
    assert notify(made, "on_test_end", VIEW)["values"] == {"test_1": 1, "test_2": 2}


@pytest.mark.parametrize("number", [np.float32(0.5), np.array(0.5), jnp.float32(0.5), np.int8(3)])
def test_numbers_of_numpy_and_jax_are_numbers(number):
    callback = SimpleNamespace(
        on_test_end=lambda view: {"values": {"test_x": number}}, memory={"best": [number]}
    )
    values = notify([callback], "on_test_end", VIEW)["values"]
    [[_, memory]] = memories([callback])
    assert repr(values["test_x"]) == repr(memory["best"][0]) == repr(number.item())
    remember([callback], [[type(callback).__name__, {"best": [0.25]}]], "run/a.params")
    assert callback.memory == {"best": [0.25]}


class Scale:
    """Scales the rate by the factor of each epoch, if there is one."""

    def __init__(self, **factors):
        self.factors = factors

    def on_epoch_end(self, view):
        factor = self.factors.get(f"epoch_{view.epoch}")
        return {} if factor is None else {"lr_scale": factor}


def scale_after(watcher, epoch):
    watcher.view.epoch = epoch
    return watcher.on_epoch_end(None).lr_scale


def test_the_rate_is_multiplied_by_the_product_of_the_latest_scale_of_each_callback():
    callbacks = [Scale(epoch_1=0.1, epoch_3=0.01, epoch_5=2), Scale(epoch_2=0.5, epoch_3=0.25)]
    watcher = Callbacks(callbacks, SimpleNamespace(epoch=0, step=0))
    scales = [scale_after(watcher, epoch) for epoch in range(1, 6)]
    assert scales == [0.1, 0.1 * 0.5, 0.01 * 0.25, None, 2 * 0.25]


def resumed(record, callbacks, lr_scale):
    """A watcher of callbacks that was resumed from a record."""
    watcher = Callbacks(callbacks, SimpleNamespace(epoch=0, step=0))
    states, checkpoint = [SimpleNamespace(lr_scale=lr_scale)], SimpleNamespace(paths=["a.params"])
    point = SimpleNamespace(record=record, checkpoint=checkpoint, states=states)
    watcher.on_resume(None, point)
    return watcher


def test_the_scales_of_the_callbacks_are_restored_from_a_checkpoint(caplog):
    callbacks = [Scale(epoch_1=0.3, epoch_5=0.2), Scale(epoch_2=0.7, epoch_4=0.6)]
    first = Callbacks(callbacks, SimpleNamespace(epoch=0, step=0))
    assert [scale_after(first, epoch) for epoch in (1, 2)] == [0.3, 0.3 * 0.7]
    record, rate = first.memory(), np.float32(0.3 * 0.7)
    again = resumed(json.loads(json.dumps(record)), callbacks, rate)
    assert [scale_after(again, epoch) for epoch in (4, 5)] == [0.3 * 0.6, 0.2 * 0.6]
    # An earlier version wrote no scales, and the next one replaced the rate's.
    former = resumed({"callbacks": record["callbacks"]}, callbacks, rate)
    assert scale_after(former, 4) == 0.6
    # Other callbacks begin from the rate that the run had, so it never rises by a resume.
    other = resumed(record, [*callbacks, Scale(epoch_1=0.5)], rate)
    assert scale_after(other, 1) == float(rate) * 0.3 * 0.5
    assert resumed(other.memory(), other.all, rate).scales == other.scales
    assert "their memory is reset" in caplog.text


def test_the_error_of_a_failing_callback_names_its_hook_and_the_step():
    def on_step_end(run):
        return {}["missing"]

    def raise_user_error(run):
        raise UserError("for the user")

    message = r"SimpleNamespace.on_step_end failed in epoch 3 after step 17: .*test_hooks.py, line"
    with pytest.raises(CallbackFailed, match=message) as error:
        notify([SimpleNamespace(on_step_end=on_step_end)], "on_step_end", VIEW)
    assert isinstance(error.value.__cause__, KeyError)
    with pytest.raises(UserError, match=r"^for the user$"):  # unchanged
        notify([SimpleNamespace(on_step_end=raise_user_error)], "on_step_end", VIEW)


@pytest.mark.parametrize(
    ("hook", "epochs"),
    [("on_epoch_end", [2, 4]), ("on_test_end", [2, 4]), ("on_step_end", [1, 2, 3, 4, 5])],
)
def test_every_n_epochs_skips_the_other_epochs(hook, epochs):
    seen = []
    callback = SimpleNamespace(every_n_epochs=2, **{hook: lambda run: seen.append(run.epoch)})
    for epoch in range(1, 6):
        notify([callback], hook, SimpleNamespace(epoch=epoch, step=0))
    assert seen == epochs


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"needs": ("gradients",)}, "needs 'gradients', which is not measured"),
        ({"metrics": {"mine": abs}}, r"metrics\['mine'\] must be tracked"),
        ({"reports": "val_auc"}, "reports must be names as .*, got 'val_auc'"),
        ({"reports": ("auc",), "on_test_end": repr}, "reports must be names as"),
        ({"reports": ("val_auc",)}, "'val_auc', and has no on_validation_end or on_test_end"),
        ({"every_n_epochs": 0}, "every_n_epochs must be a whole number from 1, got 0"),
    ],
)
def test_the_attributes_of_a_callback_are_checked(attributes, message):
    with pytest.raises(UserError, match=message):
        check_hooks([SimpleNamespace(**attributes)])
    valid = {"needs": ("gradient_norm",), "metrics": {"mine": tracked(abs)}, "every_n_epochs": 3}
    valid |= {"reports": ("val_auc",), "on_validation_end": repr}
    check_hooks([SimpleNamespace(**valid)])


@pytest.mark.parametrize("left", [0, -1, None, 1.5])
def test_steps_left_must_return_a_positive_whole_number(left):
    with pytest.raises(UserError, match="must be a whole number from 1"):
        steps_left(SimpleNamespace(steps_left=lambda step: left), 5)


@pytest.mark.parametrize("callback", ["early_stopping", early_stopping, SimpleNamespace(on=1)])
def test_an_object_without_hooks_is_not_a_callback(callback):
    with pytest.raises(UserError, match="has no hook; a callback is an object"):
        check_hooks([callback])


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


def test_a_memory_is_copied_exactly():
    memory = {"x": [0.1 + 0.2, 1e-320, -0.0, float("inf"), 2**80, None, True], "y": {"z": {}}}
    [[_, copy]] = memories([SimpleNamespace(memory=memory)])
    assert repr(copy) == repr(memory) and copy is not memory


@pytest.mark.parametrize(
    "memory",
    ["x", None, [], {"waited": 0}, {"best": 0.5, "waited": "2"}, {"best": 1, "waited": True}],
)
def test_a_memory_of_another_form_is_refused(memory):
    callback = early_stopping(patience=3)
    callback.on_training_start(VIEW)
    with pytest.raises(UserError, match=r"run/a.params: callbacks: .* is not a memory of"):
        remember([callback], [[type(callback).__name__, memory]], "run/a.params")
    remember([callback], [[type(callback).__name__, {"best": 0.5, "waited": 2}]], "run/a.params")
    assert callback.memory == {"best": 0.5, "waited": 2}
