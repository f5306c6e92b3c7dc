"""Schedules: step -> multiplier in [0, 1] of the learning rate, with lengths in steps or in epochs."""

import jax.numpy as jnp
import numpy as np

from training.base import Schedule
from training.ranges import share
from utils import UnknownFact


def constant(value: float = 1.0) -> Schedule:
    """The same multiplier at every step."""
    share(value=value)
    return lambda step: value


def linear(
    start: float = 1.0,
    end: float = 0.0,
    steps: int | None = None,
    epochs: float | None = None,
    steps_per_epoch: int | None = None,
    total_steps: int | None = None,
) -> Schedule:
    """A straight line from start to end, then end."""
    share(start=start, end=end)
    steps = length(steps, epochs, steps_per_epoch, total_steps)
    return lambda step: start + (end - start) * jnp.clip(step / steps, 0, 1)


def cosine(
    end: float = 0.0,
    steps: int | None = None,
    epochs: float | None = None,
    steps_per_epoch: int | None = None,
    total_steps: int | None = None,
) -> Schedule:
    """Half a period of a cosine, from 1 to end, then end."""
    share(end=end)
    steps = length(steps, epochs, steps_per_epoch, total_steps)
    return lambda step: end + (1 - end) * (1 + jnp.cos(jnp.pi * jnp.clip(step / steps, 0, 1))) / 2


def exponential(
    rate: float,
    steps: int | None = None,
    epochs: float | None = None,
    steps_per_epoch: int | None = None,
    total_steps: int | None = None,
) -> Schedule:
    """Smooth decay without end: times rate in every `steps` (or `epochs`)."""
    share(rate=rate)
    steps = length(steps, epochs, steps_per_epoch, total_steps)
    return lambda step: rate ** (step / steps)


def piecewise(
    values: tuple[float, ...],
    boundary_steps: tuple[int, ...] | None = None,
    boundary_epochs: tuple[float, ...] | None = None,
    steps_per_epoch: int | None = None,
) -> Schedule:
    """The first value up to the first boundary, from there the second, and so on."""
    for value in values:
        share(values=value)
    return join(
        [constant(value) for value in values], boundary_steps, boundary_epochs, steps_per_epoch
    )


def warmup_linear(
    warmup_steps: int | None = None,
    warmup_epochs: float | None = None,
    end: float = 0.0,
    steps: int | None = None,
    epochs: float | None = None,
    steps_per_epoch: int | None = None,
    total_steps: int | None = None,
) -> Schedule:
    """A straight line up from 0 to 1, and one down to end after `steps` in all; end 1 is a warm-up alone."""
    steps = length(steps, epochs, steps_per_epoch, total_steps)
    warmup = warmup_length(warmup_steps, warmup_epochs, steps_per_epoch, steps)
    return warmed_up(warmup, linear(end=end, steps=steps - warmup))


def warmup_cosine(
    warmup_steps: int | None = None,
    warmup_epochs: float | None = None,
    end: float = 0.0,
    steps: int | None = None,
    epochs: float | None = None,
    steps_per_epoch: int | None = None,
    total_steps: int | None = None,
) -> Schedule:
    """A straight line up from 0 to 1, and half a period of a cosine down to end after `steps` in all."""
    steps = length(steps, epochs, steps_per_epoch, total_steps)
    warmup = warmup_length(warmup_steps, warmup_epochs, steps_per_epoch, steps)
    return warmed_up(warmup, cosine(end=end, steps=steps - warmup))


def join(
    schedules: tuple[Schedule, ...],
    boundary_steps: tuple[int, ...] | None = None,
    boundary_epochs: tuple[float, ...] | None = None,
    steps_per_epoch: int | None = None,
) -> Schedule:
    """One schedule after the other; each counts its steps from its own boundary, so give it its own length."""
    if not schedules:
        raise ValueError("schedules: must hold at least one, got none")
    starts = boundaries(len(schedules) - 1, boundary_steps, boundary_epochs, steps_per_epoch)

    def joined(step):
        value = schedules[0](step)
        for start, schedule in zip(starts, schedules[1:], strict=True):
            value = jnp.where(step < start, value, schedule(step - start))
        return value

    return joined


def warmed_up(warmup, schedule):
    """A line from 0 to 1 over the steps of the warm-up, then the schedule."""
    return lambda step: jnp.where(step < warmup, step / max(warmup, 1), schedule(step - warmup))


def in_steps(name, steps, epochs, steps_per_epoch):
    """What the config gives as `<name>steps` or `<name>epochs`, a number or several, in steps; None where it gives neither."""
    if epochs is None:
        return steps
    if steps is not None:
        raise ValueError(
            f"{name}steps: {steps}, yet {name}epochs is {epochs}; give only one of them"
        )
    if steps_per_epoch is None:
        raise UnknownFact(
            f"{name}epochs: {epochs} needs steps_per_epoch, which is unknown; give it, or {name}steps"
        )
    return np.rint(np.multiply(epochs, steps_per_epoch)).astype(int).tolist()


def length(steps, epochs, steps_per_epoch, total_steps):
    """The steps that a schedule lasts: the whole run, unless the config says otherwise."""
    found = in_steps("", steps, epochs, steps_per_epoch)
    found = total_steps if found is None else found
    if found is None:
        raise UnknownFact("steps: not given, and total_steps is unknown; give steps or epochs")
    if found < 1:
        given = (
            f"steps: must be at least 1, got {found}"
            if epochs is None
            else f"epochs: {epochs} is {found} steps; at least 1"
        )
        raise ValueError(given)
    return found


def warmup_length(warmup_steps, warmup_epochs, steps_per_epoch, total):
    """The steps of a warm-up, which must leave some of the total."""
    warmup = in_steps("warmup_", warmup_steps, warmup_epochs, steps_per_epoch)
    if warmup is None:
        raise ValueError("warmup_steps: not given; give warmup_steps or warmup_epochs")
    if not 0 <= warmup < total:
        raise ValueError(
            f"warmup_steps: must be at least 0 and below the {total} steps in all, got {warmup}"
        )
    return warmup


def boundaries(count, boundary_steps, boundary_epochs, steps_per_epoch):
    """The steps at which one schedule gives way to the next: `count` of them, ascending."""
    found = in_steps("boundary_", boundary_steps, boundary_epochs, steps_per_epoch)
    if found is None:
        raise ValueError("boundary_steps: not given; give boundary_steps or boundary_epochs")
    if len(found) != count or sorted({0, *found}) != [0, *found]:
        raise ValueError(
            f"boundary_steps: must be {count} ascending steps, one between each two parts, got {list(found)}"
        )
    return found
