"""Build the parts of a run from a config; all problems are collected and raised at once."""

import math
import re
from functools import partial
from types import SimpleNamespace

import numpy as np

from ranges import show
from utils import UserError, did_you_mean, named_leaves
from wiring import parts, vary
from wiring.config import (
    LARGEST_SEED,
    REQUIRED,
    SECTIONS,
    TOP_LEVEL,
    no_folder_name,
    text_of_problems,
    unusable,
)
from wiring.nodes import Nodes, attempt, explained_once
from wiring.own_modules import own_files

FROM_DATA = ("vocab_size", "bytes_per_token", "ignore_label", "columns")  # facts in a Data


def build(config, source, trusted=True, folders=(), layers=()):
    """The parts of a config, one field per key, with `facts` and the resolved `config`.

    All problems are raised as one UserError, in which `source` names the config. Dotted names of a
    config that is not `trusted` are not imported. `folders` hold the user's own modules; the field
    `own_files()` returns the imported ones. `layers` say from which file each value is.
    """
    builder = Builder(config, source, trusted, folders, layers)
    built = builder.build()
    builder.raise_problems()
    return built


def build_to_ship(config, source, facts, trusted=True, input_shape=None, folders=()):
    """(the parts of a config, the problems of its data as text); a model needs no data for export.

    `facts` are those in the checkpoint. An `input_shape` overrides the shape of the data.
    """
    # The weights have these shapes, even if the files of the data have changed.
    recorded = {name: facts[name] for name in (*FROM_DATA, "num_classes") if name in facts}
    builder = Builder(config, source, trusted, folders, facts=facts, recorded=recorded)
    built = builder.build()
    if input_shape:
        builder.nodes.facts["input_shape"] = tuple(input_shape)
        built.model = builder.part("model")
    if not all(problem.startswith("data") for problem in builder.nodes.problems):
        builder.raise_problems()
    if builder.nodes.problems:
        built.data = built.example = None
    return built, builder.problems_text()


def build_preprocess(config, source, trusted=True, folders=(), facts=()):
    """The preprocessing functions of a config."""
    builder = Builder(config, source, trusted, folders, facts=facts)
    preprocess = builder.parts_of_list("preprocess")
    builder.raise_problems()
    return preprocess


class Builder:
    """Builds the parts in the order in which they need each other's facts. A part that cannot be
    built is None, and `nodes.problems` says why. `facts` are known before the data is built; those
    that are `recorded` replace what the data says. `inputs` replace numbers (training.vary)."""

    def __init__(
        self, config, source, trusted=True, folders=(), layers=(), facts=(), recorded=(), inputs=()
    ):
        defaults = {key: value for key, value in TOP_LEVEL.items() if value is not REQUIRED}
        self.config, self.source, self.layers = defaults | config, source, layers
        self.nodes = Nodes(trusted, folders, facts, inputs)
        self.recorded = dict(recorded)

    def problems_text(self):
        """All problems, one per line, each starting with the name of the config."""
        problems = explained_once(self.nodes.problems)
        return text_of_problems(problems, self.source, self.layers)

    def raise_problems(self):
        """Raise one UserError with all problems, if there are any."""
        if self.nodes.problems:
            raise UserError(self.problems_text())

    def build(self):
        """A namespace with one field per key of a config."""
        self.nodes.problems += [f"{path}: {why}" for path, why in unusable(self.config)]
        self.raise_problems()
        self.check_keys()
        self.check_values()
        keys = ("title", "run_name", "seed", "resume", "sharding")
        built = SimpleNamespace(source=self.source, **{key: self.config[key] for key in keys})
        built.own_files = partial(own_files, self.nodes.folders)
        for name, options in SECTIONS.items():
            setattr(built, name, self.section(name, options))
        self.nodes.vary = vary.numbers(self.nodes, built.training)
        built.data, built.example = self.part("data"), None
        if columns := getattr(built.data, "columns", None):  # that preprocessing needs
            self.nodes.facts |= {"columns": columns} | self.recorded
        for kind in ("preprocess", "augment", "callbacks"):
            setattr(built, kind, self.parts_of_list(kind))
        built.unfitted = self.unfitted(built.preprocess or [])
        self.check_sections(built)
        if built.data and built.loader:
            self.learn_sizes(built)
            built.example = self.example(built)
            self.learn_input_shape(built)
        built.metrics = self.metrics()  # some need facts of the data
        built.schedule = self.nodes.schedule = self.part("schedule")
        for kind in ("model", "loss", "objective", "update", "optimizer"):
            setattr(built, kind, self.part(kind))
        self.check_optimizer(built.optimizer)
        vary.check(self.nodes, built.training)
        built.vary, built.rebuild = self.nodes.varied, partial(vary.rebuild, self)
        built.rates, built.optimizer_rates = self.rates(built.schedule)
        built.facts, built.config = self.nodes.facts, self.resolved()
        built.beyond = [f"{self.source}: {line}" for line in explained_once(self.nodes.beyond)]
        return built

    def check_keys(self):
        """Record a problem for each unknown key, and for each required key that is missing."""
        for key in [key for key in self.config if key not in TOP_LEVEL]:
            hint = did_you_mean(key, TOP_LEVEL)
            self.nodes.problem(key, f"no such key{hint} ({', '.join(TOP_LEVEL)})")
        for key in [key for key in TOP_LEVEL if key not in self.config]:
            example = f'"{key}": {{"name": ..., "args": {{}}}}'
            self.nodes.problem(key, f"is missing; name one, as in {example}")

    def check_values(self):
        """Record problems of the title, run_name, seed, `resume` and `sharding`."""
        from training.devices.options import check_sharding

        keys = ("title", "run_name", "seed", "resume")
        title, name, seed, resume = (self.config[key] for key in keys)
        names = {"title": title} | ({"run_name": name} if name is not None else {})
        for key, value in names.items():
            if why := no_folder_name(value):
                self.nodes.problem(key, f"must be usable as a folder name, {why}")
        if isinstance(name, str) and name.startswith((".", "checkpoint-")):
            message = f"must not begin with '.' or 'checkpoint-', found {show(name)}"
            self.nodes.problem("run_name", message)
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= LARGEST_SEED:
            message = f"must be an integer from 0 to {LARGEST_SEED}, found {show(seed)}"
            self.nodes.problem("seed", message)
        if resume not in (None, "auto"):
            hint = "to resume one run, use --resume RUN"
            self.nodes.problem("resume", f'must be null or "auto", found {show(resume)}; {hint}')
        try:
            check_sharding(self.config["sharding"])
        except ValueError as error:
            self.nodes.problems.append(str(error))

    def section(self, name, options):
        """The options object of a section that names no part."""
        options = parts.section_options(options)
        given, accepted = self.config[name], parts.arguments(options)
        if not isinstance(given, dict):
            return self.nodes.problem(name, f"must be an object, found {show(given)}")
        self.nodes.resolved[name] = parts.with_defaults(given, accepted)
        nodes, given_to = self.nodes, (name, given, accepted, name)
        return attempt(lambda: nodes.call(options, nodes.values(*given_to), name))

    def part(self, kind):
        """The part that a top-level key names."""
        if kind not in self.config or (kind in ("loss", "schedule") and self.config[kind] is None):
            return None
        return attempt(self.nodes.part, kind, self.config[kind], kind)

    def parts_of_list(self, kind):
        """The parts that a top-level list names."""
        nodes = self.config[kind]
        if not isinstance(nodes, list):
            return self.nodes.problem(kind, f"must be a list, found {show(nodes)}")
        return attempt(self.nodes.parts_of_list, kind, nodes, kind)

    def unfitted(self, preprocess):
        """{index in preprocess: the arguments that have yet to be computed from the data}"""
        from training.preprocess import unfitted

        names = {i: unfitted(fn) for i, fn in enumerate(preprocess)}
        return {i: arguments for i, arguments in names.items() if arguments}

    def metrics(self):
        """{label: metric}; the labels of a list are the functions' names, an object names them."""
        nodes, built, paths = self.config["metrics"], {}, {}
        if isinstance(nodes, dict):
            paths = {label: f"metrics.{label}" for label in nodes}
            for label, node in nodes.items():
                built[label] = attempt(self.nodes.metric, node, paths[label])
        else:
            for i, metric in enumerate(self.parts_of_list("metrics") or []):
                path = f"metrics.{i}"
                label = self.nodes.resolved[path]["name"].rpartition(".")[2]
                if label in built:
                    message = f"{label!r} is in the list twice; give labels: {{label: metric, ...}}"
                    self.nodes.problem(path, message)
                built[label], paths[label] = metric, path
        for label in [label for label in built if label in ("", "loss") or "/" in label]:
            message = f"the label {label!r} is empty, reserved or has a '/'; give another: "
            self.nodes.problem(paths[label], message + "{label: metric, ...}")
        return built

    def check_sections(self, built):
        """Record problems of sections that contradict each other or the data."""
        from training.options import check_together

        if built.loader and built.training and built.checkpoint:
            try:
                check_together(built.loader, built.training, built.checkpoint)
            except ValueError as error:
                self.nodes.problems += str(error).splitlines()
        if built.data and built.loader and "val" in built.data.sizes and built.loader.val_size:
            why = "the data has its own validation set; leave val_size at 0"
            self.nodes.problem("loader.val_size", why)

    def learn_sizes(self, built):
        """Add the facts about classes, tokens and steps."""
        from data_loader.base import class_names
        from data_loader.loader import held_out

        data, sizes, facts = built.data, built.data.sizes, self.nodes.facts
        for name in ("train", *sizes):
            if sizes.get(name, 0) < 1:
                fault = "empty" if name in sizes else "missing"
                return self.nodes.problem("data", f"the {name} set is {fault}; sizes are {sizes}")
        for name in [name for name in sizes if not re.fullmatch(r"[a-z0-9-]+", name)]:
            form = "lowercase letters, digits and '-'"
            self.nodes.problem("data", f"the name of a set may contain only {form}, found {name!r}")
        count = outputs_of(data.example) if data.num_classes is None else data.num_classes
        if (names := class_names(data)) is not None and len(names) != count:
            message = f"`classes` has {len(names)} names, but num_classes is {count}"
            self.nodes.problem("data", f"{message}; name every class once")
        known = {name: getattr(data, name, None) for name in FROM_DATA} | {"num_classes": count}
        facts |= {name: value for name, value in known.items() if value is not None}
        facts |= self.recorded
        try:
            train_size = sizes["train"] - held_out(sizes["train"], built.loader.val_size)
        except UserError as error:
            return self.nodes.problems.append(f"loader.{error}")
        facts["steps_per_epoch"] = -(-train_size // built.loader.batch_size)
        if options := built.training:
            limits = filter(None, (options.limit_batches, options.overfit_batches))
            steps = facts["steps_per_epoch"] = min([facts["steps_per_epoch"], *limits])
            in_all = options.epochs and steps * options.epochs, options.max_steps
            if any(in_all):
                facts["total_steps"] = min(filter(None, in_all))

    def example(self, built):
        """One example as found in a batch of training; None if no batch can be made."""
        from data_loader.loader import batch_of_copies
        from data_loader.nest import map_nest

        size, collate_fn = built.loader.batch_size, built.loader.collate_fn
        try:
            batch = batch_of_copies(built.data.example, size, collate_fn)
        except UserError as error:
            return self.nodes.problems.append(f"{error} (for copies of the data's `example`)")
        return map_nest(lambda rows: rows[0], batch)

    def learn_input_shape(self, built):
        """Add the shape of one input after preprocessing, if an example is a pair (x, y)."""
        import jax

        from training.preprocess import fitted_to_zeros

        if built.preprocess is None or not isinstance(built.example, tuple | list):
            return
        x = raw = built.example[0]
        try:
            if built.unfitted:  # the statistics are computed when the data is loaded
                built.preprocess = fitted_to_zeros(built.preprocess, raw)
            for fn in built.preprocess:
                x = jax.eval_shape(fn, x)
        except (Exception, SystemExit) as error:  # preprocessing may be the user's own code
            why = str(error) or type(error).__name__
            fix = "; it gets the whole dict, or list, of an example" if is_nest(raw) else ""
            examples = f"the data's examples, {forms(raw)}"
            self.nodes.problem("preprocess", f"does not fit {examples}: {why}{fix}")
            return
        if isinstance(x, dict):  # that also holds segments, or a length
            x = x.get("tokens", x.get("sequence", x))
        if hasattr(x, "shape"):
            self.nodes.facts["input_shape"] = tuple(x.shape)

    def check_optimizer(self, optimizer):
        """Refuse optimizers that never take a descent step."""
        from training.transforms import NO_STEP, kind_of

        if kind_of(optimizer) == "gradients":
            self.nodes.problem("optimizer", NO_STEP)

    def rates(self, schedule):
        """({name: a learning rate, as a number or a function of the step}, the names of those in
        `optimizer`)."""
        names, rates = self.nodes.names_of_rates(), self.nodes.rates.values()
        scheduled = [schedule] if schedule else []
        rates = {k: product([*rate, *scheduled]) for k, rate in zip(names, rates, strict=True)}
        in_update = [path.startswith("update.") for path in self.nodes.rates]
        return rates, [name for name, own in zip(names, in_update, strict=True) if not own]

    def resolved(self):
        """The config with all defaults, from which the run can be repeated.

        `distributed` is left out, because the processes may differ at every start.
        """
        keys = [key for key in TOP_LEVEL if key in self.config and key != "distributed"]
        return {key: self.filled(key, self.config[key]) for key in keys}

    def filled(self, path, value):
        """A value of the config with all defaults of the parts that it names."""
        value = self.nodes.resolved.get(path, value)
        if isinstance(value, list | tuple):
            return [self.filled(f"{path}.{i}", item) for i, item in enumerate(value)]
        if isinstance(value, dict):
            return {key: self.filled(f"{path}.{key}", item) for key, item in value.items()}
        return value


def product(factors):
    """The product of numbers and functions of the step: a number, or such a function."""
    if not any(map(callable, factors)):
        return math.prod(factors)
    return lambda step: math.prod(f(step) if callable(f) else f for f in factors)


def outputs_of(example):
    """How many numbers a model of this data returns: in a regression, one for each float of the
    target; None if unknown."""
    if not isinstance(example, tuple) or len(example) != 2 or is_nest(example[1]):
        return None
    target = np.asarray(example[1])
    return target.size if target.dtype.kind == "f" and target.ndim <= 1 else None


def is_nest(value):
    return isinstance(value, dict | list | tuple)


def forms(tree):
    """The types and shapes of an example's inputs, as a text."""
    leaves = [(name, np.asarray(leaf)) for name, leaf in named_leaves(tree).items()]
    return ", ".join(f"{name} {leaf.dtype}{list(leaf.shape)}".strip() for name, leaf in leaves)
