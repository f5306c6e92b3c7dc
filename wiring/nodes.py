"""One node of a config, "name" or {"name", "args"}, made into the part that it names; problems are collected, not raised."""

import inspect
from functools import partial

from utils import UnknownFact, UserError, where_and_why
from wiring import parts
from wiring.config import show
from wiring.values import Misfit, convert

GIVEN_BY_TRAINING = (
    "accumulate",
    "ema",
    "unroll",
)  # arguments of an update that fit passes from the training section
BESIDE = {
    "metrics": ("mode", "freq", "phase")
}  # keys that a node of a kind may have beside name and args


class Unbuilt(Exception):
    """A part that cannot be built, for reasons that are already among the problems."""


class Nodes:
    """Builds nodes; `facts` fill arguments that the config leaves out, and `schedule` multiplies every learning rate."""

    def __init__(self, trusted=True):
        self.trusted, self.problems, self.facts, self.schedule = trusted, [], {}, None
        self.resolved = {}  # {path: the node with its defaults}
        self.stepping = (
            set()
        )  # paths of the optimizers that take a step of their own, by a learning rate
        self.rates = {}  # {path: learning rate}

    def problem(self, path, message):
        """Note what is wrong at a place of the config."""
        self.problems.append(f"{path}: {message}")

    def part(self, kind, node, path):
        """The part that a node names, wherever it stands but in a chain."""
        return self.optimizer(node, path) if kind == "optimizer" else self.named(kind, node, path)

    def named(self, kind, node, path):
        """What the function of this name makes of its arguments."""
        name, args, beside = self.name_and_args(node, path, BESIDE.get(kind, ()))
        if "." in name and not self.trusted:
            self.problem(
                path,
                f"{name!r} would import code, and this config was left by a run: say --trust if it is yours",
            )
            raise Unbuilt
        try:
            function = parts.resolve(kind, name)
        except UserError as error:
            self.problem(path if isinstance(node, str) else f"{path}.name", str(error))
            raise Unbuilt from error
        accepted = parts.arguments(function, parts.KINDS[kind].given)
        accepted = {
            k: p for k, p in accepted.items() if kind != "update" or k not in GIVEN_BY_TRAINING
        }
        values = self.values(name, args, accepted, f"{path}.args")
        self.resolved[path] = {"name": name, "args": with_defaults(args, accepted), **beside}
        if parts.KINDS[kind].given:
            function = partial(function, **values) if values else function
            return self.tracked(function, beside, path) if kind == "metrics" else function
        if kind == "optimizer":
            return self.rated(function, values, accepted, path)
        return self.call(function, values, f"{path}.args", kind)

    def tracked(self, metric, beside, path):
        """A metric with its mode, freq and phase."""
        from training.tally import tracked

        try:
            return tracked(metric, **beside)
        except ValueError as error:
            for line in str(error).splitlines():
                self.problem(*(f"{path}.{line}".split(": ", 1)))
            raise Unbuilt from error

    def each(self, kind, nodes, path):
        """The parts of a list, all of them tried."""
        built, failed = [], False
        for i, node in enumerate(nodes):
            try:
                built.append(self.named(kind, node, f"{path}.{i}"))
            except Unbuilt:
                failed = True
        if failed:
            raise Unbuilt
        return built

    def optimizer(self, node, path):
        """An optimizer, or a chain from a list. Where nothing in it takes the schedule, that multiplies what comes out."""
        from training.transforms import chain

        if isinstance(node, list) and node:
            whole = chain(*self.each("optimizer", node, path))
            stepping = any(f"{path}.{i}" in self.stepping for i in range(len(node)))
        else:
            whole = self.named("optimizer", node, path)
            stepping = path in self.stepping
        return whole if stepping else self.scheduled(whole)

    def rated(self, factory, values, accepted, path):
        """An optimizer under the schedule: a `learning_rate` that may be a function is multiplied inside, any other one last."""
        name = next((name for name in ("lr", "learning_rate") if name in accepted), None)
        rate = values.get(name, accepted[name].default) if name else None
        if any(parts.holds_kind(p.annotation, "optimizer") for p in accepted.values()):
            self.stepping.add(path)  # the optimizers inside have the schedule already
            return self.call(factory, values, f"{path}.args", "optimizer")
        if not isinstance(rate, int | float):
            return self.call(factory, values, f"{path}.args", "optimizer")
        self.stepping.add(path)
        self.rates[path] = rate
        if self.schedule and name == "learning_rate" and accepted[name].annotation is not float:
            return self.call(
                factory,
                values | {name: lambda step: rate * self.schedule(step)},
                f"{path}.args",
                "optimizer",
            )
        return self.scheduled(self.call(factory, values, f"{path}.args", "optimizer"))

    def scheduled(self, optimizer):
        """The optimizer with the schedule, if there is one, as its last multiplier."""
        from training.transforms import scheduled

        return scheduled(optimizer, self.schedule) if self.schedule else optimizer

    def name_and_args(self, node, path, beside=()):
        """A node's name and args, in either of its forms, and what it has of the keys that may stand beside them."""
        node = {"name": node} if isinstance(node, str) else node
        if not isinstance(node, dict) or not isinstance(node.get("name"), str):
            self.problem(
                path, f'must be a name or {{"name": ..., "args": {{...}}}}, found {show(node)}'
            )
        elif extra := [key for key in node if key not in ("name", "args", *beside)]:
            known = " and ".join(map(repr, ("name", "args", *beside)))
            self.problem(
                path, f"has {', '.join(map(repr, extra))} beside {known}; move it into 'args'"
            )
        elif not isinstance(node.get("args", {}), dict):
            self.problem(
                f"{path}.args",
                f"must be an object of the arguments of {node['name']}, found {show(node['args'])}",
            )
        else:
            return (
                node["name"],
                node.get("args", {}),
                {key: node[key] for key in beside if key in node},
            )
        raise Unbuilt

    def values(self, name, given, accepted, path):
        """The arguments of a call, converted; facts fill what the config leaves out."""
        signature, values = parts.signature(name, accepted), {}
        unknown = [key for key in given if key not in accepted]
        for key in unknown:
            hint = parts.did_you_mean(key, accepted)
            self.problem(f"{path}.{key}", f"{name} has no such argument{hint}\n  {signature}")
        failed = bool(unknown)
        for key, parameter in accepted.items():
            try:
                if key in given:
                    values[key] = convert(
                        given[key], parameter.annotation, f"{path}.{key}", self.nested
                    )
                elif key in self.facts:
                    values[key] = self.facts[key]
                elif parameter.default is parameter.empty:
                    self.missing(key, name, path, signature)
            except Misfit as misfit:
                self.problem(misfit.path, misfit.message)
                failed = True
            except Unbuilt:
                failed = True
        if failed:
            raise Unbuilt
        return values

    def missing(self, key, name, path, signature):
        """A required argument that the config does not give; a fact that only failing data lacks is not worth a line."""
        if key not in parts.FACTS:
            self.problem(path, f"{name} needs {key!r}\n  {signature}")
        elif not self.problems:
            self.problem(path, f"{name} needs {key!r}, which this data does not tell; give it here")
        raise Unbuilt

    def nested(self, annotation, value, path):
        """A part inside the arguments of another; NotImplemented for a plain value."""
        kind = parts.kind_of(annotation)
        return self.part(kind, value, path) if kind else NotImplemented

    def call(self, factory, values, path, kind=None):
        """What a factory makes; each line of a ValueError is a problem of the argument that it starts with."""
        try:
            made = factory(**values)
        except UserError as error:
            self.problem(path, str(error))
        except ValueError as error:
            told = (
                [] if isinstance(error, UnknownFact) and self.problems else str(error).splitlines()
            )
            for line in told:
                argument, _, message = line.partition(": ")
                known = argument in inspect.signature(factory).parameters
                self.problem(*(f"{path}.{argument}", message) if known else (path, line))
        except Exception as error:  # a user's factory may fail in any way
            self.problem(path, f"{factory.__name__} fails: {where_and_why(error)}")
        else:
            if kind is None or parts.is_a(made, kind):
                return made
            self.problem(
                path.removesuffix(".args"),
                f"{factory.__name__} answers {type(made).__name__}, which is no {kind}",
            )
        raise Unbuilt


def with_defaults(given, accepted):
    """The args as they would stand in a config that leaves nothing to defaults; facts stay out, since the data tells them."""
    shown = {
        k: p.default
        for k, p in accepted.items()
        if p.default is not p.empty and k not in parts.FACTS
    }
    return {
        k: v for k, v in shown.items() if isinstance(v, str | int | float | bool | tuple | None)
    } | given
