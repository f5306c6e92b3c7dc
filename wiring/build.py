"""Build the parts of a run from a config; all problems are collected and raised at once."""

import re
from dataclasses import replace
from functools import partial
from inspect import Parameter
from types import SimpleNamespace

import numpy as np

from utils import UserError, named_leaves
from wiring import tree, vary
from wiring.config import text_of_problems, unusable
from wiring.own_modules import own_files
from wiring.tree import Bad, Scope, built

FROM_DATA = ("vocab_size", "bytes_per_token", "ignore_label", "columns")  # facts in a Data
SETTINGS = ("title", "run_name", "seed", "resume", "sharding")
SECTIONS = ("loader", "training", "checkpoint", "logging", "mesh", "distributed")
RESERVED = "the label {!r} is empty, reserved or has a '/'; give another: {{label: metric, ...}}"


def build(config, source, trusted=True, folders=(), layers=()):
    """The parts of a config, one field per key, with `facts` and the resolved `config`.

    All problems are raised as one UserError, in which `source` names the config. Dotted names of a
    config that is not `trusted` are not imported. `folders` hold the user's own modules; the field
    `own_files()` returns the imported ones. `layers` say from which file each value is.
    """
    parts, problems = attempted(config, source, trusted, folders)
    if problems:
        raise UserError(text_of_problems(problems, source, layers))
    return parts


def build_to_ship(config, source, facts, trusted=True, input_shape=None, folders=()):
    """(the parts of a config, the problems of its data as text); a model needs no data for export.

    `facts` are those in the checkpoint. An `input_shape` overrides the shape of the data.
    """
    # The weights have these shapes, even if the files of the data have changed.
    recorded = {name: facts[name] for name in (*FROM_DATA, "num_classes") if name in facts}
    recorded |= {"input_shape": tuple(input_shape)} if input_shape else {}
    parts, problems = attempted(config, source, trusted, folders, facts, recorded)
    text = text_of_problems(problems, source)
    if parts is None or not all(problem.startswith("data") for problem in problems):
        raise UserError(text)
    if problems:
        parts.data = parts.example = None
    return parts, text


def build_preprocess(config, source, trusted=True, folders=(), facts=()):
    """The preprocessing functions of a config."""
    problems, nodes = [], tree_of(config, Scope(trusted, folders)).args
    preprocess = built(nodes["preprocess"], dict(facts), problems)
    if problems:
        raise UserError(text_of_problems(tree.worth_reporting(problems), source))
    return preprocess


def facts_of_config(config, source, trusted, folders=()):
    """The facts of a config's data, whether or not its other parts can be built."""
    parts, problems = attempted(config, source, trusted, folders)
    if parts is None:
        raise UserError(text_of_problems(problems, source))
    return parts.facts


def tree_of(config, scope):
    """The tree of a config: the call of `config` (wiring/keys.py) with its values and defaults."""
    from wiring import keys

    accepted = keys.keys()
    defaults = {key: config.get(key, parameter.default) for key, parameter in accepted.items()}
    given = {key: value for key, value in defaults.items() if value is not Parameter.empty} | config
    return tree.read_call(keys.config, accepted, given, "", scope, None)


def attempted(config, source, trusted=True, folders=(), given=(), recorded=()):
    """(the parts of a config, as far as they can be built; the problems of the others). `given` are
    facts that are known before the data is built; those that are `recorded` replace what the data
    says."""
    if problems := [f"{path}: {why}" for path, why in unusable(config)]:
        return None, problems
    problems, recorded = [], dict(recorded)
    written = tree_of(config, Scope(trusted, folders))
    numbers = vary.numbers(written, config, problems)
    whole = tree.replaced(written, {path: values[0] for path, values in numbers.items()})
    problems += [node for key, node in whole.args.items() if key not in whole.accepted]

    facts = dict(given) | recorded
    parts = SimpleNamespace(**made(whole, (*SETTINGS, *SECTIONS, "data"), facts, problems))
    facts |= columns_of(parts.data) | recorded
    vars(parts).update(made(whole, ("preprocess", "callbacks"), facts, problems))
    parts.unfitted, parts.example = unfitted(parts.preprocess or ()), None
    check_sections(parts, problems)
    if parts.data and parts.loader:
        facts |= facts_of(parts, problems) | recorded
    vars(parts).update(compiled(whole, facts, problems))

    parts.source, parts.own_files = source, partial(own_files, folders)
    parts.facts, parts.vary = facts, numbers
    parts.rebuild = partial(rebuilt, written, facts)
    parts.config = tree.to_json(written.args, written.given, facts)
    del parts.config["distributed"]  # the processes may differ at every start
    lines = [] if trusted else tree.beyond(whole)
    parts.beyond = [f"{source}: {line}" for line in tree.explained_once([*lines])]
    return parts, tree.worth_reporting(problems)


def made(whole, keys, facts, problems):
    """{key: what its value in the tree of a config is}"""
    return {key: built(whole.args[key], facts, problems) for key in keys}


def compiled(whole, facts, problems):
    """{key: part} of all that the compiled programs consist of, with the learning rates."""
    from training.transforms import NO_STEP, kind_of
    from wiring.rates import rates, with_schedule

    parts = made(whole, ("augment", "metrics", "schedule"), facts, problems)
    parts["metrics"] = labelled(whole.args["metrics"], parts["metrics"], problems)
    if schedule := parts["schedule"]:
        nodes = {key: whole.args[key] for key in ("update", "optimizer")}
        scheduled = {k: with_schedule(v, schedule) for k, v in nodes.items() if tree.is_whole(v)}
        whole = replace(whole, args=whole.args | scheduled)
    others = ("model", "loss", "objective", "update", "optimizer")
    parts |= made(whole, others, facts, problems)
    if kind_of(parts["optimizer"]) == "gradients":
        problems.append(Bad("optimizer", NO_STEP))
    stepping = whole.args["update"], whole.args["optimizer"]
    parts["rates"] = {} if problems else rates(*stepping, facts)
    return parts


def rebuilt(written, facts, parts, numbers):
    """`parts` with `numbers`, {path: number}, in place of those of training.vary: the numbers of
    one replica, or the inputs of a program that is being compiled. Nothing varies in them."""
    problems = []
    changed = compiled(tree.replaced(written, numbers), facts, problems)
    if problems:
        raise UserError(text_of_problems(tree.worth_reporting(problems), parts.source))
    return SimpleNamespace(**vars(parts) | changed | {"vary": {}})


def labelled(nodes, metrics, problems):
    """{label: metric}; the labels of a list are the functions' names, an object names them."""
    if type(nodes) is not tuple:
        pairs = {label: (f"metrics.{label}", each) for label, each in (metrics or {}).items()}
    else:
        pairs = {}
        for node, metric in zip(nodes, metrics, strict=True):
            if metric is None:
                continue  # it could not be built
            label = (getattr(node, "name", None) or "").rpartition(".")[2]
            if label in pairs:
                message = f"{label!r} is in the list twice; give labels: {{label: metric, ...}}"
                problems.append(Bad(node.path, message))
            pairs[label] = (node.path, metric)
    for label, (path, metric) in pairs.items():
        if metric is not None and (label in ("", "loss") or "/" in label):
            problems.append(Bad(path, RESERVED.format(label)))
    return {label: metric for label, (_, metric) in pairs.items()}


def unfitted(preprocess):
    """{index in preprocess: the arguments that have yet to be computed from the data}"""
    from training.preprocess import unfitted

    names = {i: unfitted(fn) for i, fn in enumerate(preprocess) if fn}
    return {i: arguments for i, arguments in names.items() if arguments}


def check_sections(parts, problems):
    """Add the problems of sections that contradict each other or the data."""
    from training.devices.options import check_sharding
    from training.options import check_together

    checks = [partial(check_sharding, parts.sharding)]
    if parts.loader and parts.training and parts.checkpoint:
        checks.append(partial(check_together, parts.loader, parts.training, parts.checkpoint))
    for check in checks:
        try:
            check()
        except ValueError as error:
            problems += [Bad(*line.split(": ", 1)) for line in str(error).splitlines()]
    if parts.data and parts.loader and "val" in parts.data.sizes and parts.loader.val_size:
        why = "the data has its own validation set; leave val_size at 0"
        problems.append(Bad("loader.val_size", why))


# Facts of the data.


def columns_of(data):
    """The columns of a table, which preprocessing needs."""
    columns = getattr(data, "columns", None)
    return {"columns": columns} if columns else {}


def facts_of(parts, problems):
    """The facts about classes, tokens, steps and inputs; sets `parts.example`, and statistics that
    preprocessing has yet to compute to zeros."""
    from data_loader.base import class_names
    from data_loader.loader import held_out

    data, sizes = parts.data, parts.data.sizes
    for name in ("train", *sizes):
        if sizes.get(name, 0) < 1:
            fault = "empty" if name in sizes else "missing"
            problems.append(Bad("data", f"the {name} set is {fault}; sizes are {sizes}"))
            return {}
    for name in [name for name in sizes if not re.fullmatch(r"[a-z0-9-]+", name)]:
        form = "lowercase letters, digits and '-'"
        message = f"the name of a set may contain only {form}, found {name!r}"
        problems.append(Bad("data", message))
    count = outputs_of(data.example) if data.num_classes is None else data.num_classes
    if (names := class_names(data)) is not None and len(names) != count:
        message = f"`classes` has {len(names)} names, but num_classes is {count}"
        problems.append(Bad("data", f"{message}; name every class once"))
    known = {name: getattr(data, name, None) for name in FROM_DATA} | {"num_classes": count}
    facts = {name: value for name, value in known.items() if value is not None}
    try:
        train_size = sizes["train"] - held_out(sizes["train"], parts.loader.val_size)
    except UserError as error:
        problems.append(Bad(*f"loader.{error}".split(": ", 1)))
    else:
        facts["steps_per_epoch"] = -(-train_size // parts.loader.batch_size)
        if options := parts.training:
            limits = filter(None, (options.limit_batches, options.overfit_batches))
            steps = facts["steps_per_epoch"] = min([facts["steps_per_epoch"], *limits])
            in_all = options.epochs and steps * options.epochs, options.max_steps
            if any(in_all):
                facts["total_steps"] = min(filter(None, in_all))
    parts.example = example_of(parts, problems)
    return facts | input_shape(parts, problems)


def example_of(parts, problems):
    """One example as found in a batch of training; None if no batch can be made."""
    from data_loader.loader import batch_of_copies
    from data_loader.nest import map_nest

    size, collate_fn = parts.loader.batch_size, parts.loader.collate_fn
    try:
        batch = batch_of_copies(parts.data.example, size, collate_fn)
    except UserError as error:
        place, colon, why = str(error).partition(": ")
        place, why = (place, why) if colon else ("loader.collate_fn", place)
        problems.append(Bad(place, f"{why} (for copies of the data's `example`)"))
        return None
    return map_nest(lambda rows: rows[0], batch)


def input_shape(parts, problems):
    """The shape of one input after preprocessing, if an example is a pair (x, y)."""
    import jax

    from training.preprocess import fitted_to_zeros

    if parts.preprocess is None or None in parts.preprocess:
        return {}
    if not isinstance(parts.example, tuple | list):
        return {}
    x = raw = parts.example[0]
    try:
        if parts.unfitted:  # the statistics are computed when the data is loaded
            parts.preprocess = fitted_to_zeros(parts.preprocess, raw)
        for fn in parts.preprocess:
            x = jax.eval_shape(fn, x)
    except (Exception, SystemExit) as error:  # preprocessing may be the user's own code
        why = str(error) or type(error).__name__
        fix = "; it gets the whole dict, or list, of an example" if is_nest(raw) else ""
        examples = f"the data's examples, {forms(raw)}"
        problems.append(Bad("preprocess", f"does not fit {examples}: {why}{fix}"))
        return {}
    if isinstance(x, dict):  # that also holds segments, or a length
        x = x.get("tokens", x.get("sequence", x))
    return {"input_shape": tuple(x.shape)} if hasattr(x, "shape") else {}


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
