"""reduce_on_plateau against PyTorch's rule, written out, and against Optax."""

import json
import logging

import numpy as np
import pytest

from tests.training.watching.callbacks.fake import view
from training.watching.callbacks.reduce_on_plateau import reduce_on_plateau
from utils import UserError

pytestmark = pytest.mark.contract


def scales_of(values, resume_every=0, **options):
    """The multiplier after each evaluation.

    With `resume_every`, a new callback regularly continues with the memory of the last, as JSON.
    """
    callback, scale, scales = reduce_on_plateau(monitor="val_score", **options), 1.0, []
    callback.on_start(view())
    for i, value in enumerate(values):
        if resume_every and i % resume_every == 0:
            memory = json.dumps(callback.memory)
            callback = reduce_on_plateau(monitor="val_score", **options)
            callback.on_start(view())
            callback.memory = json.loads(memory)
        reply = callback.on_row(view(), {"end_of_epoch": True, "val_score": value}) or {}
        scale = reply.get("lr_scale", scale)
        scales.append(scale)
    return scales


def by_torch(values, mode, factor, patience, min_delta, cooldown, min_scale):
    """torch.optim.lr_scheduler.ReduceLROnPlateau with threshold_mode="abs".

    Its patience is the number of evaluations without an improvement that change nothing.
    """
    best = float("inf") if mode == "min" else -float("inf")
    bad, cooling, scale, scales = 0, 0, 1.0, []
    for value in values:
        if value < best - min_delta if mode == "min" else value > best + min_delta:
            best, bad = value, 0
        else:
            bad += 1
        if cooling > 0:
            cooling, bad = cooling - 1, 0
        if bad > patience - 1:
            scale, cooling, bad = max(scale * factor, min_scale), cooldown, 0
        scales.append(scale)
    return scales


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", ["min", "max"])
def test_it_reduces_where_pytorch_does(mode, seed):
    rng = np.random.default_rng(seed)
    trend = np.linspace(1, 0, 200) if mode == "min" else np.linspace(0, 1, 200)
    values = rng.integers(0, 40, 200) / 40 + trend
    values[rng.integers(0, 200, 5)] = np.nan
    options = {
        "factor": 0.5,
        "patience": 1 + seed % 4,
        "min_delta": 0.05 * (seed % 2),
        "cooldown": seed % 3,
        "min_scale": 1e-3,
    }
    values = values.tolist()
    scales = scales_of(values, mode=mode, **options)
    assert scales == by_torch(values, mode, **options)
    assert len(set(scales)) > 3
    assert scales_of(values, resume_every=7, mode=mode, **options) == scales


def test_epochs_that_were_not_evaluated_do_not_count():
    callback = reduce_on_plateau(patience=1)
    callback.on_start(view())
    callback.on_row(view(), {"end_of_epoch": True, "test_loss": 1.0})
    assert callback.on_row(view(), {"end_of_epoch": True, "train_loss": 1.0}) is None
    assert callback.on_row(view(), {"evaluation": True, "test_loss": 1.0}) == {"lr_scale": 0.1}


def test_only_reductions_that_change_the_scale_are_logged(caplog):
    caplog.set_level(logging.INFO, "main")
    callback = reduce_on_plateau(patience=2, factor=0.5, min_scale=0.5)
    callback.on_start(view())
    for _ in range(9):
        callback.on_row(view(epoch=6), {"end_of_epoch": True, "test_loss": 1.0})
    (line,) = [r.getMessage() for r in caplog.records]
    assert line == (
        "Epoch 6: test_loss has not improved in 2 evaluations: from now on "
        "reduce_on_plateau multiplies every update by 0.5 instead of 1"
    )


def test_a_metric_whose_better_direction_is_unknown_is_refused():
    with pytest.raises(UserError, match="reduce_on_plateau: mode: cannot tell"):
        reduce_on_plateau(monitor="val_score").sign()
