"""Schedules: step -> multiplier of the learning rate, in [0, 1]; lengths in steps or in epochs."""

# pyright: reportOperatorIssue=false, reportArgumentType=false
# A schedule is called with numbers of steps: `steps_or_epochs` replaces those that are None.

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from training.base import Schedule
from utils import UnknownFact
from utils.forms import (
    Count,
    CountOrZero,
    NonNegative,
    Positive,
    PositiveShare,
    Share,
    at_least,
    checked,
)

IN_EPOCHS = {  # {annotation of a length in steps: annotation of the same length in epochs}
    int | None: float | None,
    tuple[int, ...] | None: tuple[float, ...] | None,
    Count | None: Positive | None,
    CountOrZero | None: NonNegative | None,
    tuple[Count, ...] | None: tuple[Positive, ...] | None,
}


def steps_or_epochs(factory: Callable[..., Schedule]) -> Callable[..., Schedule]:
    """Let every length of a schedule, an argument `<prefix>steps`, be given in epochs as well.
    The signature for a config also has `<prefix>epochs`, after each `<prefix>steps`, and the facts
    that convert one into the other. The decorated function always gets numbers of steps."""
    factory = checked(factory)
    own = inspect.signature(factory).parameters
    by_epochs = {n: n.removesuffix("steps") + "epochs" for n in own if n.endswith("steps")}
    public = []
    for name, parameter in own.items():
        public.append(parameter)
        if name in by_epochs:
            annotation = IN_EPOCHS[parameter.annotation]
            public.append(parameter.replace(name=by_epochs[name], annotation=annotation))
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    facts = ("steps_per_epoch", "total_steps") if "steps" in own else ("steps_per_epoch",)
    public += [inspect.Parameter(f, kind, default=None, annotation=int | None) for f in facts]
    signature = inspect.Signature(public, return_annotation=Schedule)

    @functools.wraps(factory)
    def schedule(*args: Any, **kwargs: Any) -> Schedule:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        steps = {name: in_steps(name, by_epochs[name], given.arguments) for name in by_epochs}
        try:
            return factory(**{name: given.arguments[name] for name in own} | steps)
        except ValueError as error:
            place, _, rest = str(error).partition(": ")
            name = place.partition(".")[0]
            epochs = given.arguments.get(by_epochs.get(name))
            if epochs is None:
                raise
            # The message names the argument that the user wrote.
            length = f"{show(epochs)} is {show(steps[name])} steps"
            raise ValueError(f"{by_epochs[name]}: {length}; {rest}") from error

    vars(schedule)["__signature__"] = signature
    return schedule


def show(length: float | Sequence[float]) -> str:
    """The text of a length, or of several lengths, as in a config."""
    return str(list(length)) if isinstance(length, tuple | list) else f"{length:g}"


@checked
def constant(value: Share = 1.0) -> Schedule:
    """The same multiplier at every step."""
    return lambda step: value


@steps_or_epochs
def linear(start: Share = 1.0, end: Share = 0.0, steps: Count | None = None) -> Schedule:
    """A straight line from `start` to `end`; it stays at `end` afterwards."""
    return lambda step: start + (end - start) * jnp.clip(step / steps, 0, 1)


@steps_or_epochs
def cosine(end: Share = 0.0, steps: Count | None = None) -> Schedule:
    """Half a period of a cosine, from 1 to `end`; it stays at `end` afterwards."""
    return lambda step: end + (1 - end) * (1 + jnp.cos(jnp.pi * jnp.clip(step / steps, 0, 1))) / 2


@steps_or_epochs
def late_decay(end: Share = 0.0, exponent: Positive = 3.0, steps: Count | None = None) -> Schedule:
    """From 1 to `end`, slowly at first, along 1 - (1 - end) * (step / steps) ** exponent; it stays
    at `end` afterwards."""
    return lambda step: 1 - (1 - end) * jnp.clip(step / steps, 0, 1) ** exponent


@steps_or_epochs
def exponential(rate: PositiveShare, steps: Count | None = None) -> Schedule:
    """Smooth decay without an end: multiplied by `rate` after every `steps` (or `epochs`)."""
    return lambda step: rate ** (step / steps)


@steps_or_epochs
def piecewise(
    values: tuple[Share, ...], boundary_steps: tuple[Count, ...] | None = None
) -> Schedule:
    """The first value up to the first boundary, then the second value, and so on."""
    if not values:
        raise ValueError("values: must hold at least one, got none")
    return join([constant(value) for value in values], boundary_steps)


@steps_or_epochs
def warmup_linear(
    warmup_steps: CountOrZero | None = None,
    end: Share = 0.0,
    steps: Count | None = None,
    init_value: Share = 0.0,
) -> Schedule:
    """A straight line up from `init_value` to 1, then one down to `end`, reached after `steps`."""
    return warmed_up(warmup_steps, linear, end, steps, init_value)


@steps_or_epochs
def warmup_cosine(
    warmup_steps: CountOrZero | None = None,
    end: Share = 0.0,
    steps: Count | None = None,
    init_value: Share = 0.0,
) -> Schedule:
    """A straight line up from `init_value` to 1, then half a cosine down to `end`, reached after
    `steps`."""
    return warmed_up(warmup_steps, cosine, end, steps, init_value)


def warmed_up(
    warmup: int, decay: Callable[..., Schedule], end: float, steps: int, start: float
) -> Callable[[ArrayLike], Array]:
    """A line from `start` to 1 over `warmup` steps, then a decay to `end` over the rest of
    `steps`."""
    if not 0 <= warmup < steps:
        allowed = f"at least 0 and below the {steps} steps in all"
        raise ValueError(f"warmup_steps: must be {allowed}, got {warmup}")
    schedule = decay(end=end, steps=steps - warmup)

    def warmed(step: ArrayLike) -> Array:
        up = start + (1 - start) * step / max(warmup, 1)
        return jnp.where(step < warmup, up, schedule(step - warmup))

    return warmed


@steps_or_epochs
def join(
    schedules: tuple[Schedule, ...], boundary_steps: tuple[Count, ...] | None = None
) -> Schedule:
    """One schedule after another; each counts its steps from its start, so give each a length."""
    if not schedules:
        raise ValueError("schedules: must hold at least one, got none")
    starts = list(boundary_steps)
    if len(starts) != len(schedules) - 1 or sorted({0, *starts}) != [0, *starts]:
        needed = f"{len(schedules) - 1} ascending steps, one between each two schedules"
        raise ValueError(f"boundary_steps: must be {needed}, got {starts}")

    def joined(step: ArrayLike) -> ArrayLike:
        value = schedules[0](step)
        for start, schedule in zip(starts, schedules[1:], strict=True):
            value = jnp.where(step < start, value, schedule(step - start))
        return value

    return joined


def in_steps(name: str, name_in_epochs: str, given: Mapping[str, Any]) -> int | Sequence[int]:
    """The length `name`, or several lengths, in steps; the default of `steps` is the whole run."""
    steps, epochs = given[name], given[name_in_epochs]
    if steps is not None and epochs is not None:
        raise ValueError(f"{name}: is {steps}, but {name_in_epochs} is {epochs}; give only one")
    if epochs is not None:
        if given["steps_per_epoch"] is None:
            why = f"{epochs} needs steps_per_epoch, which is unknown; give it, or {name}"
            raise UnknownFact(f"{name_in_epochs}: {why}")
        steps = np.rint(np.multiply(np.asarray(epochs, float), given["steps_per_epoch"]))
        if not (np.abs(steps) < 2**31).all():
            raise ValueError(f"{name_in_epochs}: {epochs} is more than {2**31 - 1} steps")
        steps = steps.astype(int).tolist()
        if name == "steps" and steps < 1:
            raise ValueError(f"epochs: {epochs} is {steps} steps; must be at least 1 step")
    elif steps is None and name == "steps":
        steps = given["total_steps"]
        if steps is None:
            raise UnknownFact("steps: not given, and total_steps is unknown; give steps or epochs")
    elif steps is None:
        raise ValueError(f"{name}: not given; give {name} or {name_in_epochs}")
    if name == "steps":
        at_least(1, steps=steps)  # also if a user's own schedule declares no range
    return steps
