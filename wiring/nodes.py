"""Build the part that one node of a config names; problems are collected, not raised.

A node is "name" or {"name": ..., "args": {...}}.
"""

import json
from collections.abc import Callable
from functools import partial

from ranges import Misfit, is_traced, show
from utils import UnknownFact, UserError, did_you_mean
from wiring import kinds, parts
from wiring.own_modules import clash

SAME = {"lr": "learning_rate", "learning_rate": "lr"}  # {argument: its name in other libraries}
# Transformations of Optax that are for gradients, and not for updates.
OPTAX_GRADIENTS = ("optax.add_decayed_weights", "optax.clip", "optax.clip_by_global_norm")
# {part that multiplies the updates of another optimizer: the argument that it multiplies by}
MULTIPLIES = {"scaled": "rate", "scheduled": "schedule"}
# A config that was named with -c is the user's own; all others are data.
UNTRUSTED = (
    "and this config was not named with -c, but comes from a run folder, a checkpoint or the "
    "working folder; pass --trust if you trust it (from Python: trust=True)"
)
# Keys that a node of a kind may have besides name and args.
EXTRA_KEYS = {"metrics": ("mode", "freq", "phase")}


class Unbuilt(Exception):
    """A part cannot be built; the reason is already among the problems."""


def attempt(build, *args):
    """The result of `build`, or None if it raises Unbuilt."""
    try:
        return build(*args)
    except Unbuilt:
        return None


class Nodes:
    """Builds nodes and collects their problems.

    `facts` fill arguments that the config leaves out; `schedule` multiplies every learning rate.
    """

    def __init__(self, trusted=True, folders=(), facts=(), inputs=()):
        self.folders = folders  # the folders that hold the user's own modules
        self.trusted, self.problems, self.facts, self.schedule = trusted, [], dict(facts), None
        self.beyond = []  # what an untrusted config would do outside of its run, one line each
        self.resolved = {}  # {path: the node with its defaults}
        self.stepping = set()  # paths of the optimizers that take steps, with a learning rate
        self.rates = {}  # {path: the factors of a learning rate: numbers, functions of the step}
        self.stepped_by = "optimizer"  # the argument of the update that gets `optimizer`
        self.vary = {}  # training.vary: {path of a number: its value in each replica}
        self.varied = {}  # the same values, converted to the types of their arguments
        self.inputs = dict(inputs)  # {path: the input of a compiled program that replaces a number}

    def problem(self, path, message):
        """Record a problem at a path of the config."""
        self.problems.append(f"{path}: {message}")

    def part(self, kind, node, path):
        """The part that a node names; the node of an optimizer may also be a list."""
        if kind == "optimizer":
            return self.optimizer(node, path)
        return self.named_part(kind, node, path)

    def parts_of_list(self, kind, nodes, path):
        """The parts of a list; all are tried, so that the problems of all are recorded."""
        built, complete = [], True
        for i, node in enumerate(nodes):
            try:
                built.append(self.named_part(kind, node, f"{path}.{i}"))
            except Unbuilt:
                complete = False
        if not complete:
            raise Unbuilt
        return built

    def named_part(self, kind, node, path):
        """The part that a node names: what its function returns for the arguments of the config.

        If the functions of a kind are called at run time, it is the function with these arguments.
        """
        name, args, extra = self.name_and_args(node, path, EXTRA_KEYS.get(kind, ()))
        name, function = self.function(kind, name, node, path)
        if reason := kinds.why_not(function, kind):
            self.problem(path, f"{name!r} {reason}")
            raise Unbuilt
        accepted = parts.config_arguments(kind, function)
        if kind == "update":
            self.stepped_by = [*parts.arguments(function, 1), "optimizer"][0]
        values = self.values(name, args, accepted, f"{path}.args")
        recorded = parts.with_defaults(args, accepted, self.facts)
        self.resolved[path] = {"name": name, "args": recorded, **extra}
        if parts.KINDS[kind].given:
            function = partial(function, **values) if values else function
            return self.tracked(function, extra, path) if kind == "metrics" else function
        if kind == "optimizer":
            return self.scheduled_optimizer(function, values, accepted, path)
        return self.call(function, values, f"{path}.args", kind)

    def function(self, kind, name, node, path):
        """(the full name, the function) that a node names."""
        if kind == "tokenizer" and isinstance(name, str) and name.endswith((".json", ".tiktoken")):
            node = json.dumps({"name": "bpe", "args": {"file": name}})
            self.problem(path, f"{name!r} is a file, not the name of a tokenizer; write {node}")
            raise Unbuilt
        name = parts.full_name(kind, name, self.folders) if kind else name
        hidden = clash(name, self.folders) if "." in name else ""
        if "." in name and (hidden or not self.trusted):
            why = f": {hidden}" if self.trusted else f" would import code, {UNTRUSTED}"
            self.problem(path, f"{name!r}{why}")
            raise Unbuilt
        try:
            return name, parts.resolve(kind, name, self.folders)
        except UserError as error:
            imported = getattr(error.__cause__, "name", None)  # what an import did not find
            hidden = clash(imported, self.folders)
            message = f"{error}; {hidden}" if hidden else str(error)
            self.problem(path if isinstance(node, str) else f"{path}.name", message)
            raise Unbuilt from error

    def own_function(self, name, path):
        """The function or class that an argument names by a dotted name."""
        if not isinstance(name, str) or "." not in name.strip("."):
            form = "a dotted name, such as my_nets.Net for Net in my_nets.py"
            raise Misfit(path, f"must be {form}, found {show(name)}")
        return self.function("", name, name, path)[1]

    def metric(self, node, path):
        """The metric of a node under a label; without a name, the objective returns it."""
        if isinstance(node, dict) and node and not node.keys() - {*EXTRA_KEYS["metrics"]}:
            return self.tracked(None, node, path)
        return self.part("metrics", node, path)

    def names_of_rates(self):
        """The name of each learning rate: `learning_rate`, the argument of the update to which its
        optimizer belongs (unless that is `optimizer`), and, if two names would be the same, the
        name of the optimizer or a number."""

        def with_more(names, more):
            pairs = zip(names, more, strict=True)
            return [f"{name}_{end}" if names.count(name) > 1 else name for name, end in pairs]

        own = [self.stepped_by] if self.stepped_by != "optimizer" else []
        in_update = [
            path.split(".")[2:3] if path.startswith("update.args.") else own for path in self.rates
        ]
        names = ["_".join(["learning_rate", *argument]) for argument in in_update]
        optimizers = [self.resolved[path]["name"].rpartition(".")[2] for path in self.rates]
        names = with_more(names, optimizers)
        return with_more(names, [names[:i].count(name) for i, name in enumerate(names)])

    def tracked(self, metric, extra, path):
        """A metric with its mode, freq and phase."""
        from training.base import tracked

        try:
            return tracked(metric, **extra)
        except ValueError as error:
            self.problems += [f"{path}.{line}" for line in str(error).splitlines()]
            raise Unbuilt from error

    def optimizer(self, node, path):
        """An optimizer, or the chain of a list.

        If none of them takes steps with a learning rate, the schedule multiplies the updates.
        """
        from training.transforms import chain

        if isinstance(node, list) and node:
            members = self.parts_of_list("optimizer", node, path)
            self.check_order(members, path)
            built = chain(*members)
            stepping = any(f"{path}.{i}" in self.stepping for i in range(len(node)))
            for i in range(len(node)):
                member = self.resolved[f"{path}.{i}"]
                if member["name"] == "optax.scale":
                    within = [f"{path}.{earlier}" for earlier in range(i)]
                    self.multiply_rates(member["args"]["step_size"], *within)
        else:
            built = self.named_part("optimizer", node, path)
            stepping = path in self.stepping
        return built if stepping else self.with_schedule(built)

    def check_order(self, members, path):
        """Refuse a chain whose order must be a mistake."""
        from training.transforms import kind_of, misplaced

        paths = [f"{path}.{i}" for i in range(len(members))]
        names = [self.resolved[each]["name"] for each in paths]

        def kind(member, name, path):
            if name in OPTAX_GRADIENTS:
                return "gradients"
            rate = "step" if name.startswith("optax.") else "rate"
            return kind_of(member) or (rate if path in self.rates else "")

        if problem := misplaced(list(map(kind, members, names, paths)), names):
            self.problem(paths[problem[0]], problem[1])
            raise Unbuilt

    def scheduled_optimizer(self, factory, values, accepted, path):
        """An optimizer whose learning rate the schedule multiplies.

        A `learning_rate` that may be a function is multiplied itself, otherwise the updates are.
        """
        make = partial(self.call, factory, path=f"{path}.args", kind="optimizer")
        if any("optimizer" in parts.form_of(p.annotation).parts for p in accepted.values()):
            self.stepping.add(path)  # the optimizers inside already have the schedule
            if factor := MULTIPLIES.get(self.resolved[path]["name"]):
                self.multiply_rates(values[factor], f"{path}.args")
            return make(values)
        name = next((name for name in ("lr", "learning_rate") if name in accepted), None)
        rate = values.get(name, accepted[name].default) if name else None
        if not isinstance(rate, int | float) and not is_traced(rate):
            return make(values)
        self.stepping.add(path)
        self.rates[path] = [rate]
        is_number = parts.form_of(accepted[name].annotation).words == "a number"
        may_vary = name == "learning_rate" and not is_number
        if self.schedule and may_vary:
            return make(values | {name: lambda step: rate * self.schedule(step)})
        return self.with_schedule(make(values))

    def multiply_rates(self, factor, *within):
        """Multiply the logged learning rates of the optimizers at or below these paths."""
        for path, factors in self.rates.items():
            if any(f"{path}.".startswith(f"{each}.") for each in within):
                factors.append(factor)

    def with_schedule(self, optimizer):
        """The optimizer with its updates multiplied by the schedule, if there is one."""
        from training.transforms import scheduled

        return scheduled(optimizer, self.schedule) if self.schedule else optimizer

    def name_and_args(self, node, path, extra_keys=()):
        """(name, args, {extra key: value}) of a node in either form."""
        node = {"name": node} if isinstance(node, str) else node
        if not isinstance(node, dict) or not isinstance(node.get("name"), str):
            form = '{"name": ..., "args": {...}}'
            self.problem(path, f"must be a name or {form}, found {show(node)}")
            raise Unbuilt
        name, args, allowed = node["name"], node.get("args", {}), ("name", "args", *extra_keys)
        if unknown := [key for key in node if key not in allowed]:
            unknown, allowed = ", ".join(map(repr, unknown)), " and ".join(map(repr, allowed))
            self.problem(path, f"has {unknown} beside {allowed}; move it into 'args'")
            raise Unbuilt
        if not isinstance(args, dict):
            message = f"must be an object with the arguments of {name}, found {show(args)}"
            self.problem(f"{path}.args", message)
            raise Unbuilt
        return name, args, {key: node[key] for key in extra_keys if key in node}

    def values(self, name, given, accepted, path):
        """The arguments of a call, converted; facts fill arguments that the config leaves out."""
        signature, values = parts.signature(name, accepted), {}
        unknown = [key for key in given if key not in accepted]
        for key in unknown:
            hint = did_you_mean(SAME.get(key, key), accepted)
            self.problem(f"{path}.{key}", f"{name} has no such argument{hint}\n  {signature}")
        complete = not unknown
        for key, parameter in accepted.items():
            try:
                if f"{path}.{key}" in self.vary:
                    values[key] = self.varying(f"{path}.{key}", parameter)
                elif key in given:
                    form = parts.form_of(parameter.annotation)
                    values[key] = form.read(given[key], f"{path}.{key}", self.nested)
                elif key in self.facts:
                    values[key] = self.facts[key]
                elif parameter.default is parameter.empty:
                    self.missing(key, name, path, signature)
            except Misfit as misfit:
                self.problem(misfit.path, misfit.message)
                complete = False
            except Unbuilt:
                complete = False
        if not complete:
            raise Unbuilt
        if not self.trusted:
            self.beyond += beyond(values, accepted, path)
        return values

    def varying(self, path, parameter):
        """A number that differs between replicas: the input of a compiled program, or the number of
        the first replica."""
        where, form = f"training.vary.{path}", parts.form_of(parameter.annotation)
        values = self.varied[path] = [
            form.read(value, f"{where}.{i}", self.nested) for i, value in enumerate(self.vary[path])
        ]
        if not all(type(value) in (int, float) for value in values):
            raise Misfit(where, f"must be a list of numbers, found {show(self.vary[path])}")
        return self.inputs.get(path, values[0])

    def missing(self, key, name, path, signature):
        """Record a required argument that is missing.

        A fact may be missing only because of another problem, which is then the one to report.
        """
        if key not in parts.FACTS:
            self.problem(path, f"{name} needs {key!r}\n  {signature}")
        elif not self.problems:
            self.problem(path, f"{name} needs {key!r}, which is unknown for this data; set it here")
        raise Unbuilt

    def nested(self, annotation, value, path):
        """The part that an argument of another part names, or for a Callable the function or
        class."""
        if annotation is Callable:
            return self.own_function(value, path)
        return self.part(parts.kind_of(annotation), value, path)

    def call(self, factory, values, path, kind=None):
        """The result of a factory, which must be of the kind.

        Each line of a ValueError is a problem of the argument whose name it starts with.
        """
        try:
            made = factory(**values)
        except UserError as error:
            self.problem(path, str(error))
        except ValueError as error:
            if not (isinstance(error, UnknownFact) and self.problems):
                parameters = parts.arguments(factory)
                for line in str(error).splitlines() or [parts.failure(factory, error)]:
                    known = line.partition(": ")[0] in parameters
                    self.problems.append(f"{path}.{line}" if known else f"{path}: {line}")
        except (Exception, SystemExit) as error:  # a user's factory may fail in any way
            self.problem(path, parts.failure(factory, error))
        else:
            if kind is None or kinds.is_a(made, kind):
                return made
            message = f"{parts.name_of(factory)} returned {type(made).__name__}, not a valid {kind}"
            self.problem(path.removesuffix(".args"), f"{message}; {kinds.requirement(kind)}")
        raise Unbuilt


def beyond(values, accepted, path):
    """One line for each argument by which an untrusted config would act outside of its run."""
    for key, parameter in accepted.items():
        value = values.get(key, parameter.default)
        for mark in parts.form_of(parameter.annotation).marks:
            if mark.reaches(value):
                yield f"{path}.{key}: {show(value)} {mark.effect}, {UNTRUSTED}"


def explained_once(problems):
    """The problems of a config, of which only the first that needs trust explains why."""
    first = next((problem for problem in problems if UNTRUSTED in problem), None)
    return [p if p is first else p.replace(f", {UNTRUSTED}", ", too") for p in problems]
