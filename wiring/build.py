"""A config made into the parts of a run; every problem is collected, and all are told at once."""

from functools import partial
from types import SimpleNamespace

from utils import UserError
from wiring import parts
from wiring.config import REQUIRED, SECTIONS, TOP_LEVEL, show
from wiring.values import Misfit, convert

GIVEN_BY_TRAINING = ("accumulate", "ema", "unroll")  # arguments of an update that fit passes from the training section


class Unbuilt(Exception):
    """A part that cannot be built, for reasons that are already among the problems."""


def build(config, source):
    """The parts of a config, a field for each key, with `facts` and the resolved `config`; or one UserError with all problems."""
    builder = Builder(config)
    built = builder.build()
    built.source = source
    if builder.problems:
        raise UserError("\n".join(f"{source}: {problem}" for problem in builder.problems))
    return built


class Builder:
    """Builds the parts in the order in which they need each other's facts."""

    def __init__(self, config):
        self.config = {key: default for key, default in TOP_LEVEL.items() if default is not REQUIRED} | config
        self.problems, self.facts, self.nodes = [], {}, {}
        self.schedule, self.schedule_taken = None, False

    def build(self):
        """All parts; one that cannot be built is None, and the problems say why."""
        self.check_keys()
        built = SimpleNamespace(title=self.title(), seed=self.seed())
        for section, options in SECTIONS.items():
            setattr(built, section, self.section(section, options))
        for kind in ("preprocess", "augment", "metrics", "callbacks"):
            setattr(built, kind, self.several(kind))
        built.data = self.top("data")
        self.check_together(built)
        self.learn_facts(built)
        built.schedule = self.schedule = self.top("schedule")
        for kind in ("model", "loss", "objective", "update", "optimizer"):
            setattr(built, kind, self.top(kind))
        if built.optimizer and built.schedule and not self.schedule_taken:
            built.optimizer = parts.imported("training.transforms.scheduled")(built.optimizer, built.schedule)
        built.facts, built.config = self.facts, self.resolved()
        return built

    def problem(self, path, message):
        self.problems.append(f"{path}: {message}")

    def check_keys(self):
        """No key too many, none missing."""
        for key in self.config.keys() - TOP_LEVEL.keys():
            self.problem(key, f"no such key{parts.did_you_mean(key, TOP_LEVEL)} ({', '.join(TOP_LEVEL)})")
        for key in [key for key in TOP_LEVEL if key not in self.config]:
            self.problem(key, f'is missing; name one, as in "{key}": {{"name": ..., "args": {{}}}}')

    def title(self):
        title = self.config["title"]
        if not isinstance(title, str) or not title.strip(". ") or set(title) & set("/\\\0"):
            self.problem("title", f"must be a name that a folder can have, found {show(title)}")
        return title

    def seed(self):
        seed = self.config["seed"]
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
            self.problem("seed", f"must be an integer from 0 to {2**32 - 1}, found {show(seed)}")
        return seed

    def section(self, name, options):
        """The options object of a section that names no part."""
        options = parts.imported(f"training.options.{options}")
        accepted = parts.arguments(options)
        try:
            given = self.config[name]
            if not isinstance(given, dict):
                raise Misfit(name, f"must be an object, found {show(given)}")
            values = self.values(given, accepted, name, parts.signature(name, accepted))
            made = self.call(options, values, name)
        except Misfit as misfit:
            self.problem(misfit.path, misfit.message)
        except Unbuilt:
            pass
        else:
            self.nodes[name] = self.with_defaults(given, accepted)
            return made

    def top(self, kind):
        """The part that a top-level key names, or None."""
        if kind not in self.config or (kind == "schedule" and self.config[kind] is None):
            return None
        try:
            return self.part(kind, self.config[kind], kind)
        except Unbuilt:
            return None

    def several(self, kind):
        """The parts that a top-level list names; metrics as {name: function}."""
        nodes, built = self.config[kind], []
        if not isinstance(nodes, list):
            self.problem(kind, f"must be a list, found {show(nodes)}")
            return None
        for i, node in enumerate(nodes):
            try:
                built.append(self.part(kind, node, f"{kind}.{i}"))
            except Unbuilt:
                built.append(None)
        names = [self.nodes.get(f"{kind}.{i}", {}).get("name") for i in range(len(nodes))]
        if kind == "metrics":
            for i in [i for i, name in enumerate(names) if name and name in names[:i]]:
                self.problem(f"{kind}.{i}", f"{names[i]!r} stands in the list twice")
            return dict(zip(names, built, strict=True)) if all(built) else None
        return built if all(built) else None

    def part(self, kind, node, path):
        """The part that a node names: "name" or {"name", "args"}; a list of optimizers is a chain."""
        if kind == "optimizer" and isinstance(node, list) and node:
            links = [self.part(kind, link, f"{path}.{i}") for i, link in enumerate(node)]
            return parts.imported("training.transforms.chain")(*links)
        name, args = self.name_and_args(kind, node, path)
        try:
            function = parts.resolve(kind, name)
        except UserError as error:
            self.problem(path if isinstance(node, str) else f"{path}.name", str(error))
            raise Unbuilt from error
        accepted = parts.arguments(function, parts.KINDS[kind].given)
        accepted = {k: p for k, p in accepted.items() if kind != "update" or k not in GIVEN_BY_TRAINING}
        values = self.values(args, accepted, f"{path}.args", parts.signature(name, accepted))
        self.nodes[path] = {"name": name, "args": self.with_defaults(args, accepted)}
        if kind == "optimizer":
            return self.optimizer(function, values, accepted, path)
        if parts.KINDS[kind].given:
            return partial(function, **values) if values else function
        return self.call(function, values, f"{path}.args")

    def name_and_args(self, kind, node, path):
        """A node's name and args, in either of its forms."""
        node = {"name": node} if isinstance(node, str) else node
        if not isinstance(node, dict) or not isinstance(node.get("name"), str):
            self.problem(path, f'must be a name or {{"name": ..., "args": {{...}}}}, found {show(node)}')
            raise Unbuilt
        if extra := node.keys() - {"name", "args"}:
            self.problem(path, f"has {', '.join(map(repr, sorted(extra)))} beside 'name' and 'args'; move it into 'args'")
            raise Unbuilt
        args = node.get("args", {})
        if not isinstance(args, dict):
            self.problem(f"{path}.args", f"must be an object of the arguments of {node['name']}, found {show(args)}")
            raise Unbuilt
        return node["name"], args

    def values(self, given, accepted, path, signature):
        """The arguments of a call, converted; facts fill what the config leaves out."""
        failed = False
        values = {}
        for name in given:
            if name not in accepted:
                what = signature.split("(")[0]
                self.problem(f"{path}.{name}", f"{what} has no such argument{parts.did_you_mean(name, accepted)}\n  {signature}")
                failed = True
                continue
            try:
                values[name] = convert(given[name], accepted[name].annotation, f"{path}.{name}", self.nested)
            except Misfit as misfit:
                self.problem(misfit.path, misfit.message)
                failed = True
            except Unbuilt:
                failed = True
        for name, parameter in accepted.items():
            if name not in given and name in self.facts:
                values[name] = self.facts[name]
            elif name not in given and parameter.default is parameter.empty:
                failed = True
                self.missing(name, path, signature)
        if failed:
            raise Unbuilt
        return values

    def missing(self, name, path, signature):
        """A required argument that the config does not give; one that failing data would have told is not worth a line."""
        if name not in parts.FACTS:
            self.problem(path, f"{signature.split('(')[0]} needs {name!r}\n  {signature}")
        elif "input_shape" in self.facts:
            self.problem(path, f"{signature.split('(')[0]} needs {name!r}, which this data does not tell; give it here")

    def nested(self, annotation, value, path):
        """A part inside the arguments of another; NotImplemented for a plain value."""
        kind = parts.kind_of(annotation)
        return self.part(kind, value, path) if kind else NotImplemented

    def call(self, factory, values, path):
        """What a factory makes; its ValueErrors are problems with its arguments, a line each; its UserErrors, with the rest."""
        try:
            return factory(**values)
        except UserError as error:
            self.problem(path, str(error))
            raise Unbuilt from error
        except ValueError as error:
            for line in str(error).splitlines():
                self.problem(path if ": " not in line else f"{path}.{line.split(': ')[0]}", line.split(": ", 1)[-1])
            raise Unbuilt from error

    def optimizer(self, factory, values, accepted, path):
        """An optimizer under the schedule: the multiplier comes last, or is part of a `learning_rate` that may be a function."""
        schedule, default = self.schedule, getattr(accepted.get("learning_rate"), "default", None)
        rate = values.get("learning_rate", default)
        if schedule and isinstance(rate, int | float):
            values = values | {"learning_rate": lambda step: rate * schedule(step)}
            self.schedule_taken = True
        made = self.call(factory, values, f"{path}.args")
        if schedule and "lr" in accepted:
            self.schedule_taken = True
            return parts.imported("training.transforms.scheduled")(made, schedule)
        return made

    def check_together(self, built):
        """What is sound in each section, but not in both."""
        if built.loader and built.training:
            try:
                parts.imported("training.options.check_together")(built.loader, built.training)
            except ValueError as error:
                self.problems.append(str(error))
        if built.data and built.loader and "val" in built.data.sizes and built.loader.val_size:
            self.problem("loader.val_size", "the data brings its own validation set; leave val_size at 0")

    def learn_facts(self, built):
        """What the data tells, where the keys that it depends on are sound."""
        if built.data is None or built.loader is None:
            return
        data, loader = built.data, built.loader
        told = {"num_classes": data.num_classes, "vocab_size": data.vocab_size}
        self.facts |= {name: value for name, value in told.items() if value is not None}
        held_out = parts.imported("data_loader.loader.held_out")
        try:
            steps = -(-(data.sizes["train"] - held_out(data.sizes["train"], loader.val_size)) // loader.batch_size)
        except UserError as error:
            self.problem("loader.val_size", str(error))
            return
        self.facts["steps_per_epoch"] = steps
        if built.training is not None:
            self.facts["total_steps"] = steps * built.training.epochs
        if built.preprocess is not None:
            self.learn_input_shape(built)

    def learn_input_shape(self, built):
        """The shape of one input after preprocessing."""
        import jax

        x = built.data.example[0]
        try:
            for fn in built.preprocess:
                x = jax.eval_shape(fn, x)
        except Exception as error:
            self.problem("preprocess", f"does not fit the data's examples of shape {built.data.example[0].shape}: {error}")
            return
        if hasattr(x, "shape"):
            self.facts["input_shape"] = tuple(x.shape)

    def with_defaults(self, given, accepted):
        """The args as they would stand in a config that leaves nothing to defaults; facts stay out, since the data tells them."""
        shown = {k: p.default for k, p in accepted.items() if p.default is not p.empty and k not in parts.FACTS}
        return {k: v for k, v in shown.items() if isinstance(v, str | int | float | bool | tuple | None)} | given

    def resolved(self):
        """The config with every default in it; feeding it back repeats the run."""

        def node(path, raw):
            if isinstance(raw, list):
                return [node(f"{path}.{i}", item) for i, item in enumerate(raw)]
            return self.nodes.get(path, raw)

        return {key: node(key, self.config[key]) for key in TOP_LEVEL if key in self.config}
