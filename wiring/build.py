"""A config made into the parts of a run; every problem is collected, and all are told at once."""

import re
from types import SimpleNamespace

from utils import UserError
from wiring import parts
from wiring.config import REQUIRED, SECTIONS, TOP_LEVEL, show
from wiring.nodes import Nodes, Unbuilt, with_defaults


def build(config, source, trusted=True):
    """The parts of a config, a field for each key, with `facts` and the resolved `config`; or one UserError with all problems.

    A config that is not `trusted` imports nothing: it must do with the names that the toolkit has.
    """
    builder = Builder(config, trusted)
    built = builder.build()
    built.source = source
    if builder.nodes.problems:
        raise UserError("\n".join(f"{source}: {problem}" for problem in builder.nodes.problems))
    return built


class Builder:
    """Builds the parts in the order in which they need each other's facts; what cannot be built is None."""

    def __init__(self, config, trusted=True):
        self.config = {
            key: default for key, default in TOP_LEVEL.items() if default is not REQUIRED
        } | config
        self.nodes = Nodes(trusted)

    def build(self):
        """A namespace with a field for each key of a config."""
        self.check_keys()
        built = SimpleNamespace(
            title=self.title(), seed=self.seed(), resume=self.resume(), sharding=self.sharding()
        )
        for section, options in SECTIONS.items():
            setattr(built, section, self.section(section, options))
        for kind in ("preprocess", "augment", "callbacks"):
            setattr(built, kind, self.several(kind))
        built.metrics = self.metrics()
        built.data = self.top("data")
        self.check_together(built)
        if built.data and built.loader:
            self.learn_sizes(built)
            self.learn_input_shape(built)
        built.schedule = self.nodes.schedule = self.config["schedule"] and self.top("schedule")
        for kind in ("model", "loss", "objective", "update", "optimizer"):
            setattr(built, kind, self.top(kind))
        self.check_optimizer()
        built.rates = self.rates(built.schedule)
        built.facts, built.config = self.nodes.facts, self.resolved()
        return built

    def check_keys(self):
        """No key too many, none missing."""
        for key in [key for key in self.config if key not in TOP_LEVEL]:
            self.nodes.problem(
                key, f"no such key{parts.did_you_mean(key, TOP_LEVEL)} ({', '.join(TOP_LEVEL)})"
            )
        for key in [key for key in TOP_LEVEL if key not in self.config]:
            self.nodes.problem(
                key, f'is missing; name one, as in "{key}": {{"name": ..., "args": {{}}}}'
            )

    def title(self):
        """The title, which names a folder."""
        title = self.config["title"]
        if not isinstance(title, str) or not title.strip(". ") or set(title) & set("/\\\0"):
            self.nodes.problem(
                "title", f"must be a name that a folder can have, found {show(title)}"
            )
        return title

    def seed(self):
        """The seed, which must fit 32 bits."""
        seed = self.config["seed"]
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
            self.nodes.problem(
                "seed", f"must be an integer from 0 to {2**32 - 1}, found {show(seed)}"
            )
        return seed

    def resume(self):
        """Whether to go on with the latest unfinished run of this title."""
        if self.config["resume"] not in (None, "auto"):
            found = show(self.config["resume"])
            self.nodes.problem(
                "resume", f'must be null or "auto", found {found}; a run is named with --resume RUN'
            )
        return self.config["resume"]

    def sharding(self):
        """How the weights are cut over the mesh."""
        from training.devices.options import check_sharding

        try:
            check_sharding(self.config["sharding"])
        except ValueError as error:
            self.nodes.problem(*str(error).split(": ", 1))
        return self.config["sharding"]

    def section(self, name, options):
        """The options object of a section that names no part."""
        options = parts.section_options(options)
        given, accepted = self.config[name], parts.arguments(options)
        if not isinstance(given, dict):
            self.nodes.problem(name, f"must be an object, found {show(given)}")
            return None
        self.nodes.resolved[name] = with_defaults(given, accepted)
        try:
            return self.nodes.call(options, self.nodes.values(name, given, accepted, name), name)
        except Unbuilt:
            return None

    def top(self, kind, node=None, path=None):
        """The part that a top-level key names."""
        if node is None and kind not in self.config:
            return None
        try:
            return self.nodes.part(kind, self.config[kind] if node is None else node, path or kind)
        except Unbuilt:
            return None

    def check_optimizer(self):
        """Links that only change gradients take no step, or one uphill."""
        nodes = self.config.get("optimizer")
        if not isinstance(nodes, list) or self.nodes.stepping:
            return
        names = [
            self.nodes.resolved.get(f"optimizer.{i}", {}).get("name", ".")
            for i in range(len(nodes))
        ]
        if names and not any(
            "." in name for name in names
        ):  # another library's may well step without saying so
            self.nodes.problem(
                "optimizer",
                "no link of this chain takes a step; end it with an optimizer, such as sgd",
            )

    def rates(self, schedule):
        """{name: the learning rate at a step}"""
        found = self.nodes.rates.values()
        names = (
            ["learning_rate"]
            if len(found) == 1
            else [f"learning_rate_{i}" for i in range(len(found))]
        )
        scaled = (
            [lambda step, rate=rate: rate * schedule(step) for rate in found] if schedule else found
        )
        return dict(zip(names, scaled, strict=True))

    def several(self, kind):
        """The parts that a top-level list names."""
        nodes = self.config[kind]
        if not isinstance(nodes, list):
            self.nodes.problem(kind, f"must be a list, found {show(nodes)}")
            return None
        try:
            return self.nodes.each(kind, nodes, kind)
        except Unbuilt:
            return None

    def metrics(self):
        """{label: function}; in a list the functions' names are the labels, an object gives labels of its own."""
        nodes = self.config["metrics"]
        if isinstance(nodes, dict):
            built = {
                label: self.top("metrics", node, f"metrics.{label}")
                for label, node in nodes.items()
            }
            places = {label: f"metrics.{label}" for label in nodes}
        else:
            built, places = {}, {}
            for i, metric in enumerate(self.several("metrics") or []):
                label = self.nodes.resolved[f"metrics.{i}"]["name"].rpartition(".")[2]
                if label in built:
                    self.nodes.problem(
                        f"metrics.{i}",
                        f"{label!r} stands in the list twice; give labels: {{label: metric, ...}}",
                    )
                built[label], places[label] = metric, f"metrics.{i}"
        for label in [label for label in built if label == "loss" or "/" in label]:
            self.nodes.problem(
                places[label],
                f"the name {label!r} is taken, or has a '/'; give labels: {{label: metric, ...}}",
            )
        return built

    def check_together(self, built):
        """What is sound in each section, but not in both."""
        from training.options import check_together

        if built.loader and built.training and built.checkpoint:
            try:
                check_together(built.loader, built.training, built.checkpoint)
            except ValueError as error:
                for line in str(error).splitlines():
                    self.nodes.problem(*line.split(": ", 1))
        if built.data and built.loader and "val" in built.data.sizes and built.loader.val_size:
            self.nodes.problem(
                "loader.val_size", "the data brings its own validation set; leave val_size at 0"
            )

    def learn_sizes(self, built):
        """Facts about classes and steps."""
        from data_loader.loader import held_out

        data, loader, facts = built.data, built.loader, self.nodes.facts
        for name in [name for name in ("train", *data.sizes) if data.sizes.get(name, 0) < 1]:
            self.nodes.problem(
                "data",
                f"the {name} set is {'empty' if name in data.sizes else 'missing'}; sizes are {data.sizes}",
            )
            return
        for name in [name for name in data.sizes if not re.fullmatch(r"[a-z0-9-]+", name)]:
            self.nodes.problem(
                "data", f"names the set {name!r}; a name has small letters, digits and '-'"
            )
        told = {"num_classes": data.num_classes, "vocab_size": data.vocab_size}
        facts |= {name: value for name, value in told.items() if value is not None}
        try:
            left = data.sizes["train"] - held_out(data.sizes["train"], loader.val_size)
        except UserError as error:
            self.nodes.problem("loader.val_size", str(error).removeprefix("val_size: "))
            return
        facts["steps_per_epoch"] = -(-left // loader.batch_size)
        if built.training:
            limits = [
                limit
                for limit in (built.training.limit_batches, built.training.overfit_batches)
                if limit
            ]
            facts["steps_per_epoch"] = min([facts["steps_per_epoch"], *limits])
            facts["total_steps"] = facts["steps_per_epoch"] * built.training.epochs

    def learn_input_shape(self, built):
        """The shape of one input after preprocessing."""
        if built.preprocess is None:
            return
        import jax

        if not isinstance(built.data.example, tuple):
            return  # not (x, y): its objective knows what it is
        x = raw = built.data.example[0]
        try:
            for fn in built.preprocess:
                x = jax.eval_shape(fn, x)
        except Exception as error:
            self.nodes.problem(
                "preprocess",
                f"does not fit the data's examples, {raw.dtype}{list(raw.shape)}: {error}",
            )
            return
        if hasattr(x, "shape"):
            self.nodes.facts["input_shape"] = tuple(x.shape)

    def resolved(self):
        """The config with every default in it; feeding it back repeats the run. Who else trains is of the moment."""

        def fill(path, raw):
            raw = self.nodes.resolved.get(path, raw)
            if isinstance(raw, list | tuple):
                return [fill(f"{path}.{i}", item) for i, item in enumerate(raw)]
            return (
                {key: fill(f"{path}.{key}", value) for key, value in raw.items()}
                if isinstance(raw, dict)
                else raw
            )

        return {
            key: fill(key, self.config[key])
            for key in TOP_LEVEL
            if key in self.config and key != "distributed"
        }


def build_to_ship(config, source, facts, trusted=True, input_shape=None):
    """(the parts of a config, what is wrong with its data): a model is shipped without data, too, by the `facts` that its
    checkpoint knows. An `input_shape` counts for more than that of the data.
    """
    builder = Builder(config, trusted)
    builder.nodes.facts |= facts
    built = builder.build()
    built.source = source
    if input_shape:
        builder.nodes.facts["input_shape"] = tuple(input_shape)
        built.model = builder.top("model")
    of_data = [problem for problem in builder.nodes.problems if problem.startswith("data")]
    if of_data != builder.nodes.problems:
        raise UserError("\n".join(f"{source}: {problem}" for problem in builder.nodes.problems))
    if of_data:
        built.data = None
    return built, "\n".join(f"{source}: {problem}" for problem in of_data)


def build_preprocess(config, source, trusted=True):
    """The preprocessing of a config alone."""
    builder = Builder(config, trusted)
    built = builder.several("preprocess")
    if builder.nodes.problems:
        raise UserError("\n".join(f"{source}: {problem}" for problem in builder.nodes.problems))
    return built
