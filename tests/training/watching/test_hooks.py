"""Callbacks as the loop calls them: what they answer, what is refused, and what becomes of one that
fails."""

from types import SimpleNamespace

import pytest

from training.tally import tracked
from training.watching.callbacks.early_stopping import early_stopping
from training.watching.hooks import CallbackFailed, check_hooks, notify, steps_left
from utils import UserError

NOW = SimpleNamespace(epoch=3, step=17)


def test_one_stop_is_enough_whatever_the_others_answer():
    stop, go_on = (
        SimpleNamespace(on_epoch_end=lambda run, s=s: {"stop": s}) for s in (True, False)
    )
    assert notify([stop, go_on], "on_epoch_end", NOW)["stop"]
    assert notify([go_on, stop], "on_epoch_end", NOW)["stop"]
    assert not notify([go_on, go_on], "on_epoch_end", NOW)["stop"]


def test_answers_and_hooks_that_nobody_knows_are_refused():
    with pytest.raises(UserError, match=r"returned \['lr'\]"):
        notify([SimpleNamespace(on_epoch_end=lambda run: {"lr": 1})], "on_epoch_end", NOW)
    with pytest.raises(UserError, match="'on_epoch_ended', which is no hook"):
        check_hooks([SimpleNamespace(on_epoch_ended=print)])


@pytest.mark.parametrize(
    "answer",
    [
        {"lr_scale": float("nan")},
        {"lr_scale": -1},
        {"lr_scale": "half"},
        {"lr_scale": None},
        True,
        0.5,
    ],
)
def test_answers_that_make_no_sense_are_refused(answer):
    with pytest.raises(UserError, match=r"SimpleNamespace\.on_epoch_end returned"):
        notify([SimpleNamespace(on_epoch_end=lambda run: answer)], "on_epoch_end", NOW)


def test_a_callback_that_fails_is_named_with_its_hook_and_the_step():
    def on_step_end(run):
        return {}["missing"]

    with pytest.raises(
        CallbackFailed,
        match=r"SimpleNamespace.on_step_end failed in epoch 3 after step 17: .*test_hooks.py, line",
    ) as found:
        notify([SimpleNamespace(on_step_end=on_step_end)], "on_step_end", NOW)
    assert isinstance(found.value.__cause__, KeyError)
    with pytest.raises(
        UserError, match=r"^mine$"
    ):  # what a callback has to say to its user stays as it is
        notify(
            [SimpleNamespace(on_step_end=lambda run: (_ for _ in ()).throw(UserError("mine")))],
            "on_step_end",
            NOW,
        )


@pytest.mark.parametrize(
    ("hook", "epochs"),
    [("on_epoch_end", [2, 4]), ("on_test_end", [2, 4]), ("on_step_end", [1, 2, 3, 4, 5])],
)
def test_every_n_epochs_passes_over_the_others(hook, epochs):
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
        ({"every_n_epochs": 0}, "every_n_epochs must be a whole number from 1, got 0"),
    ],
)
def test_what_a_callback_asks_for_is_checked(attributes, message):
    with pytest.raises(UserError, match=message):
        check_hooks([SimpleNamespace(**attributes)])
    check_hooks(
        [
            SimpleNamespace(
                needs=("gradient_norm",), metrics={"mine": tracked(abs)}, every_n_epochs=3
            )
        ]
    )


@pytest.mark.parametrize("answer", [0, -1, None, 1.5])
def test_a_callback_asks_for_a_step_ahead(answer):
    with pytest.raises(UserError, match="must be a whole number from 1"):
        steps_left(SimpleNamespace(steps_left=lambda step: answer), 5)


@pytest.mark.parametrize("callback", ["early_stopping", early_stopping, SimpleNamespace(on=1)])
def test_what_is_no_callback(callback):
    with pytest.raises(UserError, match="has no hook; a callback is an object"):
        check_hooks([callback])
