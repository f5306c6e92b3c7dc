"""Every schedule against the one of Optax, at many steps."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from training.base import Schedule
from training.schedules import (
    constant,
    cosine,
    exponential,
    join,
    late_decay,
    linear,
    piecewise,
    steps_or_epochs,
    warmup_cosine,
    warmup_linear,
)
from utils.forms import NonNegative, Positive

LR = 0.3
STEPS = np.arange(130)
WARM = optax.linear_schedule(0.0, LR, 10)


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (constant(), optax.constant_schedule(LR)),
        (constant(0.5), optax.constant_schedule(LR / 2)),
        (linear(total_steps=100), optax.linear_schedule(LR, 0.0, 100)),
        (
            linear(start=0.1, end=0.7, steps=50, total_steps=100),
            optax.linear_schedule(LR * 0.1, LR * 0.7, 50),
        ),
        (cosine(total_steps=100), optax.cosine_decay_schedule(LR, 100)),
        (
            cosine(end=0.1, epochs=2.5, steps_per_epoch=20),
            optax.cosine_decay_schedule(LR, 50, alpha=0.1),
        ),
        (exponential(0.01, total_steps=100), optax.exponential_decay(LR, 100, 0.01)),
        (
            exponential(0.9, epochs=1, steps_per_epoch=7, total_steps=100),
            optax.exponential_decay(LR, 7, 0.9),
        ),
        (
            piecewise([1, 0.1, 0.05], [30, 60]),
            optax.piecewise_constant_schedule(LR, {30: 0.1, 60: 0.5}),
        ),
        (
            piecewise([1, 0.5], boundary_epochs=[1.5], steps_per_epoch=20),
            optax.piecewise_constant_schedule(LR, {30: 0.5}),
        ),
        (warmup_cosine(10, total_steps=100), optax.warmup_cosine_decay_schedule(0.0, LR, 10, 100)),
        (
            warmup_cosine(
                warmup_epochs=0.5, end=0.2, epochs=4, steps_per_epoch=20, total_steps=100
            ),
            optax.warmup_cosine_decay_schedule(0.0, LR, 10, 80, end_value=LR * 0.2),
        ),
        (
            warmup_cosine(10, end=0.1, total_steps=100, init_value=0.25),
            optax.warmup_cosine_decay_schedule(LR / 4, LR, 10, 100, end_value=LR / 10),
        ),
        (
            warmup_linear(10, end=1.0, total_steps=100, init_value=0.5),
            optax.linear_schedule(LR / 2, LR, 10),
        ),
        (warmup_cosine(0, total_steps=100), optax.cosine_decay_schedule(LR, 100)),
        (
            warmup_linear(10, total_steps=100),
            optax.join_schedules([WARM, optax.linear_schedule(LR, 0.0, 90)], [10]),
        ),
        (warmup_linear(10, end=1.0, total_steps=100), WARM),
        (
            join([linear(0.0, 1.0, steps=10), constant(), cosine(steps=40)], [10, 50]),
            optax.join_schedules(
                [WARM, optax.constant_schedule(LR), optax.cosine_decay_schedule(LR, 40)], [10, 50]
            ),
        ),
        (
            join([cosine(steps=40), cosine(steps=80)], boundary_epochs=[2], steps_per_epoch=20),
            optax.sgdr_schedule(
                [
                    {"init_value": LR, "peak_value": LR, "warmup_steps": 0, "decay_steps": n}
                    for n in (40, 80)
                ]
            ),
        ),
    ],
)
def test_equals_optax(ours, theirs):
    expected = [theirs(step) for step in STEPS]
    traced = jax.jit(jax.vmap(lambda step: jnp.asarray(ours(step))))(jnp.asarray(STEPS, jnp.int32))
    np.testing.assert_allclose(LR * traced, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        [LR * ours(int(step)) for step in STEPS], expected, rtol=1e-5, atol=1e-7
    )
    assert ((traced >= 0) & (traced <= 1)).all()


def test_late_decay_is_optax_polynomial_from_its_end():
    theirs = optax.polynomial_schedule(0.2, 1.0, 3.0, 100)
    ours = late_decay(end=0.2, exponent=3.0, total_steps=100)
    expected = [theirs(max(0, 100 - step)) for step in STEPS]
    np.testing.assert_allclose([ours(int(step)) for step in STEPS], expected, atol=1e-6)


def test_a_config_sees_lengths_in_epochs_and_facts_in_the_signature():
    parameters = inspect.signature(warmup_cosine).parameters
    lengths = ["warmup_steps", "warmup_epochs", "end", "steps", "epochs"]
    assert list(parameters) == [*lengths, "init_value", "steps_per_epoch", "total_steps"]
    assert parameters["warmup_epochs"].annotation == NonNegative | None
    parameters = inspect.signature(piecewise).parameters
    assert list(parameters) == ["values", "boundary_steps", "boundary_epochs", "steps_per_epoch"]
    assert parameters["boundary_epochs"].annotation == tuple[Positive, ...] | None


def test_ends_are_exact():
    assert cosine(steps=7)(7) == 0 and linear(steps=7)(7) == 0 and warmup_cosine(3, steps=7)(3) == 1


def test_a_length_in_epochs_is_the_nearest_number_of_steps():
    schedule = linear(epochs=0.29, steps_per_epoch=100)  # 28.999999999999996 steps
    assert schedule(28) > 0 == schedule(29)


@pytest.mark.parametrize("given", [{"steps": 0}, {"total_steps": 0}])
def test_a_schedule_of_ones_own_without_a_range_gets_one_step_or_more(given):
    @steps_or_epochs
    def own(steps: int | None = None) -> Schedule:
        return lambda step: step / steps

    with pytest.raises(ValueError, match=r"^steps: must be at least 1, got 0"):
        own(**given)


@pytest.mark.parametrize(
    "factory, args, message",
    [
        (cosine, {}, "^steps: not given, and total_steps is unknown"),
        (
            cosine,
            {"steps": 5, "epochs": 1.0, "steps_per_epoch": 5},
            "^steps: is 5, but epochs is 1.0",
        ),
        (linear, {"epochs": 2.0, "total_steps": 100}, "^epochs: 2.0 needs steps_per_epoch"),
        (
            linear,
            {"epochs": 0.01, "steps_per_epoch": 10},
            "^epochs: 0.01 is 0 steps; must be at least 1",
        ),
        (linear, {"epochs": 1e9, "steps_per_epoch": 5}, "^epochs: .* is more than 2147483647 st"),
        (exponential, {"rate": 0.0, "steps": 3}, "^rate: must be above 0 .* got 0.0"),
        (warmup_cosine, {"total_steps": 100}, "^warmup_steps: not given"),
        (
            warmup_cosine,
            {"warmup_steps": 100, "total_steps": 100},
            "^warmup_steps: .* below the 100 steps in all, got 100",
        ),
        (
            warmup_linear,
            {"warmup_steps": 5, "warmup_epochs": 1.0, "total_steps": 100},
            "^warmup_steps: is 5, but warmup_epochs",
        ),
        (
            warmup_linear,
            {"warmup_epochs": 1.0, "total_steps": 100},
            "^warmup_epochs: 1.0 needs steps_per_epoch",
        ),
        (piecewise, {"values": [1.0, 0.1]}, "^boundary_steps: not given"),
        (
            piecewise,
            {"values": [1.0, 0.1], "boundary_steps": [3, 5]},
            r"^boundary_steps: must be 1 .* got \[3, 5\]",
        ),
        (
            join,
            {"schedules": [constant()] * 3, "boundary_steps": [5, 5]},
            r"^boundary_steps: must be 2 ascending .* got \[5, 5\]",
        ),
        (
            join,
            {"schedules": [constant()] * 2, "boundary_epochs": [2.0]},
            "boundary_epochs: .* needs steps_per_epoch",
        ),
        (join, {"schedules": [], "boundary_steps": []}, "^schedules: "),
        (piecewise, {"values": [], "boundary_steps": []}, "^values: must hold at least one"),
        (
            warmup_cosine,
            {"warmup_epochs": 2.5, "steps_per_epoch": 22, "total_steps": 44},
            "^warmup_epochs: 2.5 is 55 steps; must be at least 0 and below the 44 steps in all",
        ),
        (
            piecewise,
            {"values": (1, 0.5), "boundary_epochs": (2, 1), "steps_per_epoch": 4},
            r"^boundary_epochs: \[2, 1\] is \[8, 4\] steps; must be 1 ascending steps",
        ),
        (
            join,
            {
                "schedules": [constant()] * 2,
                "boundary_epochs": [0.01],
                "steps_per_epoch": 4,
            },
            r"^boundary_epochs: \[0.01\] is \[0\] steps; must be at least 1, got 0",
        ),
    ],
)
def test_wrong_arguments_are_refused(factory, args, message):
    with pytest.raises(ValueError, match=message):
        factory(**args)
