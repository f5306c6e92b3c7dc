"""Build the parts of a run from a config; all problems are collected and raised at once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from utils import UserError
from wiring import tree, vary
from wiring.config import Layer, text_of_problems, unusable
from wiring.own_modules import own_files
from wiring.tree import Bad, Part, Scope, built

if TYPE_CHECKING:
    from data_loader.base import Data
    from training.base import Parts
    from training.options import LoaderOptions, TrainingOptions

FROM_DATA = ("vocab_size", "bytes_per_token", "ignore_label", "columns")  # facts in a Data
SETTINGS = ("title", "run_name", "seed", "resume", "sharding")
SECTIONS = ("loader", "training", "checkpoint", "logging", "mesh", "distributed")


def build(
    config: dict[str, Any],
    source: str,
    trusted: bool = True,
    folders: Sequence[Path] = (),
    layers: Sequence[Layer] = (),
) -> "Parts":
    """The parts of a config, one field per key, with `facts` and the resolved `config`.

    All problems are raised as one UserError, in which `source` names the config. Dotted names of a
    config that is not `trusted` are not imported. `folders` hold the user's own modules; the field
    `own_files()` returns the imported ones. `layers` say from which file each value is.
    """
    parts, problems = parts_and_problems(config, source, trusted, folders)
    if parts is None or problems:
        raise UserError(text_of_problems(problems, source, layers))
    return parts


def build_to_ship(
    config: dict[str, Any],
    source: str,
    facts: dict[str, Any],
    trusted: bool = True,
    input_shape: Sequence[int] | None = None,
    folders: Sequence[Path] = (),
) -> "tuple[Parts, str]":
    """(the parts of a config, the problems of its data as text); a model needs no data for export.

    `facts` are those in the checkpoint. An `input_shape` overrides the shape of the data.
    """
    # The weights have these shapes, even if the files of the data have changed.
    recorded = {name: facts[name] for name in (*FROM_DATA, "num_classes") if name in facts}
    recorded |= {"input_shape": tuple(input_shape)} if input_shape else {}
    parts, problems = parts_and_problems(config, source, trusted, folders, facts, recorded)
    text = text_of_problems(problems, source)
    if parts is None or not all(problem.startswith("data") for problem in problems):
        raise UserError(text)
    return (replace(parts, data=None, example=None) if problems else parts), text


def build_preprocess(
    config: dict[str, Any],
    source: str,
    trusted: bool = True,
    folders: Sequence[Path] = (),
    facts: dict[str, Any] | None = None,
) -> tuple[Callable, ...]:
    """The preprocessing functions of a config."""
    problems, nodes = [], tree_of(config, Scope(trusted, folders)).args
    preprocess = built(nodes["preprocess"], facts or {}, problems)
    if problems:
        raise UserError(text_of_problems(tree.worth_reporting(problems), source))
    return preprocess


def facts_of_config(
    config: dict[str, Any], source: str, trusted: bool, folders: Sequence[Path] = ()
) -> dict[str, Any]:
    """The facts of a config's data, whether or not its other parts can be built."""
    parts, problems = parts_and_problems(config, source, trusted, folders)
    if parts is None:
        raise UserError(text_of_problems(problems, source))
    return parts.facts


def tree_of(config: dict[str, Any], scope: Scope) -> Part:
    """The tree of a config: the call of `config` (wiring/keys.py) with its values and defaults."""
    from wiring import keys

    accepted = keys.keys()
    defaults = {key: config.get(key, parameter.default) for key, parameter in accepted.items()}
    given = {key: value for key, value in defaults.items() if value is not Parameter.empty} | config
    return tree.read_call(keys.config, accepted, given, "", scope, None)


def parts_and_problems(
    config: dict[str, Any],
    source: str,
    trusted: bool = True,
    folders: Sequence[Path] = (),
    given: dict[str, Any] | None = None,
    recorded: dict[str, Any] | None = None,
) -> "tuple[Parts | None, list[str]]":
    """(the parts of a config, as far as they can be built; the problems of the others). `given` are
    facts that are known before the data is built; those that are `recorded` replace what the data
    says."""
    from training.base import Parts

    if problems := [f"{path}: {why}" for path, why in unusable(config)]:
        return None, problems
    problems, recorded = [], recorded or {}
    written = tree_of(config, Scope(trusted, folders))
    problems += [node for key, node in written.args.items() if key not in written.accepted]

    facts = (given or {}) | recorded
    values = values_of(written, (*SETTINGS, *SECTIONS, "data"), facts, problems)
    data, loader, training = values["data"], values["loader"], values["training"]
    del values["distributed"]  # the processes are connected already
    numbers = vary.numbers(written, training, problems)
    root = tree.replaced(written, {path: replicas[0] for path, replicas in numbers.items()})

    if columns := getattr(data, "columns", None):  # of a table, which preprocessing needs
        facts |= {"columns": columns} | recorded
    values |= values_of(root, ("preprocess", "callbacks"), facts, problems)
    preprocess = values["preprocess"] or ()
    if data and loader and (found := facts_of(data, loader, training, problems)):
        example = values["example"] = example_of(data, loader, problems)
        preprocess, shape = fitted_shape(preprocess, example, problems)
        facts |= found | shape | recorded
    values |= compiled(root, facts, problems)

    unfitted = missing_statistics(values["preprocess"] or ())
    values["preprocess"] = preprocess
    config = tree.to_json(written.args, written.given, facts)
    del config["distributed"]  # the processes may differ at every start
    lines = [] if trusted else tree.beyond(root)
    parts = Parts(
        **values,
        source=source,
        config=config,
        facts=facts,
        unfitted=unfitted,
        vary=numbers,
        rebuild=partial(rebuilt, written, facts),
        beyond=tuple(f"{source}: {line}" for line in tree.explained_once([*lines])),
        own_files=partial(own_files, folders),
    )
    return parts, tree.worth_reporting(problems)


def values_of(
    root: Part, keys: Sequence[str], facts: dict[str, Any], problems: list[Bad]
) -> dict[str, Any]:
    """{key: what its value in the tree of a config is}"""
    return {key: built(root.args[key], facts, problems) for key in keys}


def problem_in(line: str) -> Bad:
    """A line of an error, which begins with the place of the problem."""
    path, _, message = line.partition(": ")
    return Bad(path, message)


@contextmanager
def collected(problems: list[Bad]) -> Iterator[None]:
    """Add what a check refuses to the problems: each line begins with its place."""
    try:
        yield
    except (UserError, ValueError) as error:
        problems += [problem_in(line) for line in str(error).splitlines()]


def compiled(root: Part, facts: dict[str, Any], problems: list[Bad]) -> dict[str, Any]:
    """{key: part} of all that the compiled programs consist of, with the learning rates."""
    from training.base import labelled
    from wiring.rates import rates, with_schedule

    parts = values_of(root, ("augment", "metrics", "schedule"), facts, problems)
    with collected(problems):
        parts["metrics"] = labelled(without_none(parts["metrics"]))
    if schedule := parts.pop("schedule"):
        nodes = {key: root.args[key] for key in ("update", "optimizer")}
        scheduled = {k: with_schedule(v, schedule) for k, v in nodes.items() if tree.is_valid(v)}
        root = replace(root, args=root.args | scheduled)
    parts |= values_of(root, ("model", "loss", "objective", "update", "optimizer"), facts, problems)
    stepping = root.args["update"], root.args["optimizer"]
    parts["rates"] = {} if problems else rates(*stepping, facts)
    return parts


def rebuilt(
    written: Part, facts: dict[str, Any], parts: "Parts", numbers: Mapping[str, Any]
) -> "Parts":
    """`parts` with `numbers`, {path: number}, in place of those of training.vary: the numbers of
    one replica, or the inputs of a program that is being compiled. Nothing varies in them."""
    problems = []
    changed = compiled(tree.replaced(written, numbers), facts, problems)
    if problems:
        raise UserError(text_of_problems(tree.worth_reporting(problems), parts.source))
    return replace(parts, **changed, vary={})


def without_none(metrics: Any) -> Any:
    """The metrics that could be built, as a list or by their labels."""
    if isinstance(metrics, dict):
        return {label: metric for label, metric in metrics.items() if metric}
    return [metric for metric in metrics or () if metric]


def missing_statistics(preprocess: Sequence[Callable | None]) -> dict[int, list[str]]:
    """{index in preprocess: the arguments that have yet to be computed from the data}"""
    from training.preprocess import unfitted

    names = {i: unfitted(fn) for i, fn in enumerate(preprocess) if fn}
    return {i: arguments for i, arguments in names.items() if arguments}


# Facts of the data.


def facts_of(
    data: "Data", loader: "LoaderOptions", training: "TrainingOptions | None", problems: list[Bad]
) -> dict[str, Any]:
    """The facts about classes, tokens and steps; {} if the data has no training set."""
    from data_loader.base import class_names
    from data_loader.loader import held_out
    from training.sets import check_sizes

    if "train" not in data.sizes:
        problems.append(Bad("data", f"the train set is missing; sizes are {data.sizes}"))
        return {}
    before = len(problems)
    with collected(problems):
        check_sizes(data.sizes, loader.val_size)
    if len(problems) > before:
        return {}
    count = outputs_of(data.example) if data.num_classes is None else data.num_classes
    if (names := class_names(data)) is not None and len(names) != count:
        message = f"`classes` has {len(names)} names, but num_classes is {count}"
        problems.append(Bad("data", f"{message}; name every class once"))
    known = {name: getattr(data, name, None) for name in FROM_DATA} | {"num_classes": count}
    facts = {name: value for name, value in known.items() if value is not None}
    try:
        train_size = data.sizes["train"] - held_out(data.sizes["train"], loader.val_size)
    except UserError as error:
        problems.append(problem_in(f"loader.{error}"))
        return facts
    steps = facts["steps_per_epoch"] = -(-train_size // loader.batch_size)
    return facts | (limited_steps(steps, training) if training else {})


def limited_steps(steps: int, training: "TrainingOptions") -> dict[str, int]:
    """The facts about the steps of an epoch and of the run, after all limits in the options."""
    limits = filter(None, (training.limit_batches, training.overfit_batches))
    steps = min([steps, *limits])
    in_all = [each for each in (steps * (training.epochs or 0), training.max_steps) if each]
    total = {"total_steps": min(in_all)} if in_all else {}
    return {"steps_per_epoch": steps} | total


def example_of(data: "Data", loader: "LoaderOptions", problems: list[Bad]) -> Any:
    """One example as found in a batch of training; None if no batch can be made."""
    from data_loader.loader import batch_of_copies
    from data_loader.nest import map_nest

    try:
        batch = batch_of_copies(data.example, loader.batch_size, loader.collate_fn)
    except UserError as error:
        place, colon, why = str(error).partition(": ")
        place, why = (place, why) if colon else ("loader.collate_fn", place)
        problems.append(Bad(place, f"{why} (for copies of the data's `example`)"))
        return None
    return map_nest(lambda rows: rows[0], batch)


def fitted_shape(
    preprocess: Sequence[Callable | None], example: Any, problems: list[Bad]
) -> tuple[Sequence[Callable | None], dict[str, Any]]:
    """(the preprocessing functions, where statistics that have yet to be computed are zeros; {the
    fact about the shape of one input after them, if an example is a pair (x, y)})"""
    import jax

    from training.contracts import named_shapes
    from training.preprocess import fitted_to_zeros

    functions = [fn for fn in preprocess if fn is not None]
    if len(functions) < len(preprocess) or not isinstance(example, tuple | list):
        return preprocess, {}
    x = example[0]
    try:
        if missing_statistics(functions):
            preprocess = functions = tuple(fitted_to_zeros(functions, x))
        for fn in functions:
            x = jax.eval_shape(fn, x)
    except (Exception, SystemExit) as error:  # preprocessing may be the user's own code
        why = str(error) or type(error).__name__
        fix = "; it gets the whole dict, or list, of an example" if is_nest(example[0]) else ""
        found = named_shapes(example[0])
        problems.append(Bad("preprocess", f"does not fit the data's examples, {found}: {why}{fix}"))
        return preprocess, {}
    if isinstance(x, dict):  # that also holds segments, or a length
        x = x.get("tokens", x.get("sequence", x))
    return preprocess, {"input_shape": tuple(x.shape)} if hasattr(x, "shape") else {}


def outputs_of(example: Any) -> int | None:
    """How many numbers a model of this data returns: in a regression, one for each float of the
    target; None if unknown."""
    if not isinstance(example, tuple) or len(example) != 2 or is_nest(example[1]):
        return None
    target = np.asarray(example[1])
    return target.size if target.dtype.kind == "f" and target.ndim <= 1 else None


def is_nest(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)
