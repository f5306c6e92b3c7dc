"""The learning rates of the optimizers in a tree: how the schedule multiplies them, their names."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from utils.forms import is_traced
from wiring.parts import arguments, form_of
from wiring.tree import Part, built, mapped

if TYPE_CHECKING:
    from training.base import Optimizer

# Transformations of Optax that are for gradients, and not for updates.
OPTAX_GRADIENTS = ("optax.add_decayed_weights", "optax.clip", "optax.clip_by_global_norm")
# {part that multiplies the updates of another optimizer: the argument that it multiplies by}
MULTIPLIES = {"scaled": "rate", "scheduled": "schedule"}


class Scheduled(NamedTuple):
    """A learning rate that the schedule multiplies, for an optimizer that takes a function."""

    rate: Any
    schedule: Any

    def __call__(self, step: Any) -> Any:
        return self.rate * self.schedule(step)


def rate_of(part: Part) -> tuple[str, Any] | tuple[None, None]:
    """(the argument that is the optimizer's own learning rate, its value), or (None, None)."""
    name = next((name for name in ("lr", "learning_rate") if name in part.accepted), None)
    if name is None or part.kind != "optimizer" or holds_optimizers(part):
        return None, None
    rate = part.args.get(name, part.accepted[name].default)
    is_rate = isinstance(rate, int | float | Scheduled) or is_traced(rate)
    return (name, rate) if is_rate else (None, None)


def holds_optimizers(part: Part) -> bool:
    """Whether the updates of a part are made of those of others."""
    if is_chain(part):
        return True
    forms = (form_of(parameter.annotation) for parameter in part.accepted.values())
    return any("optimizer" in each.parts for each in forms)


def is_chain(part: Part) -> bool:
    return isinstance(part.args, tuple)


def takes_steps(part: Part) -> bool:
    """Whether a part has a learning rate, its own or that of an optimizer inside it."""
    return holds_optimizers(part) or rate_of(part)[0] is not None


def chained(members: Sequence[Part], *optimizers: "Optimizer") -> "Optimizer":
    """The chain of optimizers, refused if the order of these members must be a mistake."""
    from training.transforms import chain, kind_of, misplaced

    def kind(member: Part, optimizer: "Optimizer") -> str:
        if member.name in OPTAX_GRADIENTS:
            return "gradients"
        rate = "step" if f"{member.name}".startswith("optax.") else "rate"
        return kind_of(optimizer) or (rate if rate_of(member)[0] else "")

    kinds = list(map(kind, members, optimizers))
    if problem := misplaced(kinds, [str(member.name) for member in members]):
        raise ValueError(f"{problem[0]}: {problem[1]}")
    return chain(*optimizers)


def with_schedule(part: Part, schedule: Any) -> Part:
    """A part, of which the schedule multiplies all updates of its optimizers.

    Usually they are multiplied once, outside. In a part that uses the updates of other optimizers,
    as `lookahead` does, theirs are multiplied. An optimizer of Optax whose learning_rate may be a
    function gets a function of the step.
    """
    from training.transforms import scheduled

    def scheduled_inside(part: Part) -> Part:
        return with_schedule(part, schedule) if part.kind == "optimizer" else part

    name, rate = rate_of(part)
    if name and may_be_a_function(part, name):
        return replace(part, args=part.args | {name: Scheduled(rate, schedule)})
    if part.kind == "optimizer" and is_multiplied_outside(part):
        args = {"optimizer": part, "schedule": schedule}
        accepted = arguments(scheduled)
        return Part(part.path, scheduled, args, {}, accepted, "optimizer", "scheduled", {})
    if is_chain(part):
        members = (scheduled_inside(each) if takes_steps(each) else each for each in part.args)
        return replace(part, args=tuple(members))
    return replace(part, args=mapped(part.args, scheduled_inside))


def is_multiplied_outside(part: Part) -> bool:
    """Whether multiplying the updates of a part is the same as multiplying its learning rates."""
    name, _ = rate_of(part)
    if is_chain(part):
        *before, last = part.args
        return not any(map(takes_steps, before)) and is_multiplied_outside(last)
    if not holds_optimizers(part):
        return not (name and may_be_a_function(part, name))
    inside = []
    mapped(part.args, inside.append)
    return part.name == "groups" and all(map(is_multiplied_outside, inside))


def may_be_a_function(part: Part, name: str) -> bool:
    """Whether this argument accepts a function of the step, as the learning_rate of Optax does."""
    words = form_of(part.accepted[name].annotation).words
    return name == "learning_rate" and words != "a number"


def factors_of(part: Part, facts: dict[str, Any]) -> list[tuple[Part, list]]:
    """[(an optimizer, its learning rate: factors that are numbers or functions of the step)]"""
    found = []
    if is_chain(part):
        for member in part.args:
            if member.name == "optax.scale":
                multiply(found, member.args["step_size"])
            found += factors_of(member, facts)
        return found
    name, rate = rate_of(part)
    if name:
        return [(part, [rate])]
    mapped(part.args, lambda inner: found.extend(factors_of(inner, facts)))
    if part.kind == "optimizer" and part.name in MULTIPLIES:
        multiply(found, built(part.args[MULTIPLIES[part.name]], facts, []))
    return found


def multiply(found: list[tuple[Part, list]], factor: Any) -> None:
    for _, factors in found:
        factors.append(factor)


def rates(update: Part, optimizer: Part, facts: dict[str, Any]) -> dict[str, Any]:
    """{name: a learning rate, as a number or a function of the step}"""
    in_update, own = factors_of(update, facts), factors_of(optimizer, facts)
    stepped_by = next(iter(arguments(update.function, 1)), "optimizer")
    ends = [part.path.split(".")[2] for part, _ in in_update]
    ends += [stepped_by if stepped_by != "optimizer" else ""] * len(own)
    names = [f"learning_rate_{end}".rstrip("_") for end in ends]
    names = with_more(names, [f"{part.name}".rpartition(".")[2] for part, _ in in_update + own])
    names = with_more(names, [names[:i].count(name) for i, name in enumerate(names)])
    values = [product(factors) for _, factors in in_update + own]
    return dict(zip(names, values, strict=True))


def with_more(names: list[str], more: Sequence) -> list[str]:
    """The names, with an ending where two are the same."""
    pairs = zip(names, more, strict=True)
    return [f"{name}_{end}" if names.count(name) > 1 else name for name, end in pairs]


def product(factors: list[float | Callable[[Any], Any]]) -> Any:
    """The product of numbers and functions of the step: a number, or such a function."""
    numbers = [factor for factor in factors if not callable(factor)]
    if len(numbers) == len(factors):
        return math.prod(numbers)
    return lambda step: math.prod(f(step) if callable(f) else f for f in factors)
