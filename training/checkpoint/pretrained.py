"""The weights that a run starts from: a checkpoint, or a safetensors file of another program."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from data_loader.loader import first_inputs
from model.base import Model
from training.base import (
    FROZEN,
    TrainState,
    evaluated_part,
    has_frozen,
    with_frozen,
    without_frozen,
)
from training.checkpoint import storage, trees
from training.checkpoint.orbax_folder import HostArray
from training.checkpoint.probe import check_meaning, probe_of
from training.checkpoint.rules import converted, read_rules, rule_file
from training.objective import preprocessed
from training.options import PretrainedOptions
from training.recipe import Recipe
from utils import UserError, map_named, match_rules, named_leaves
from utils.files import read_json
from utils.forms import local_path

# Top-level names in a checkpoint that belong to the run, not to the model.
RUN_NAMES = {*TrainState._fields, "sums", "probe"} - {"params", "state", "ema"}
OPTION = "training.pretrained"
LOST = (
    ". The frozen weights are in this file alone, not in the checkpoints of a run that uses them: "
    f"put it back, or name its new path, {OPTION}=PATH (with --resume, add --override; commands "
    "without overrides, as predict.py, take a copy of the config with the new path, -c CONFIG)"
)
INDEX = ".safetensors.index.json"
FITTED = 5_000  # how many examples a model may use to fit its first weights


def pretrained_from(
    option: str | PretrainedOptions | None, model: Model | None = None
) -> "Pretrained | None":
    """The Pretrained for the config's `training.pretrained`: None, a path, or an object."""
    if option is None:
        if is_merged(model):
            raise UserError(f"{OPTION}: is missing; it names the weights that the model freezes")
        return None
    option = option if isinstance(option, dict) else {"path": option}
    try:
        pretrained = Pretrained(**option, model=model)
    except UserError as error:
        if str(error).startswith(OPTION):  # the message names a part of it
            raise
        lost = is_merged(model) and not Path(option["path"]).expanduser().exists()
        raise UserError(f"{OPTION}: {error}{LOST if lost else ''}") from error
    if "frozen" in pretrained.record:
        fix = "write all weights: python -m inference.to_torch CHECKPOINT merged.safetensors"
        raise UserError(f"{pretrained.path}: holds only what its run has trained; {fix}")
    return pretrained


def fitted_to_data(
    recipe: Recipe, dataset: Any
) -> Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] | None:
    """The function from the drawn (params, state) to the ones that the model's `fit` makes from
    examples of the training set; None for a model without `fit`."""
    fit = getattr(recipe.model, "fit", None)
    if fit is None:
        return None
    prepare = jax.jit(lambda x: preprocessed(recipe.preprocess, x))
    raw = first_inputs(dataset, recipe.loader, -(-FITTED // recipe.loader.batch_size))
    x = np.concatenate([jax.device_get(prepare(x)) for x in raw])[:FITTED]
    return lambda params, state: fit(params, state, x)


def is_merged(model: Model | None) -> bool:
    """Whether a model adds to the frozen weights of another one, as `lora` does."""
    return getattr(model, "merge", None) is not None


def with_base(
    model: Model,
    params: PyTree,
    state: PyTree,
    config: dict[str, Any],
    record: Mapping[str, Any],
    source: str | Path,
) -> PyTree:
    """The state with the frozen weights of the run with this config, if there are any. Refuse them
    if the checkpoint with this record was trained with others. The trees may be shapes."""
    if not is_merged(model):
        return state
    pretrained = pretrained_from(config.get("training", {}).get("pretrained"), model)
    assert pretrained is not None, "the model has no frozen weights"
    state = with_frozen(state, pretrained(params, state)[1])
    pretrained.check_frozen(record, state, source)
    return state


def merged(model: Model, params: PyTree, state: PyTree) -> tuple[Model, PyTree, PyTree]:
    """(the plain model, params, state) on the host; other models are returned unchanged."""
    # A user's own model may have `init` and `apply` alone.
    base, merge = getattr(model, "base", None), getattr(model, "merge", None)
    if base is None or merge is None:
        return model, params, state
    return base, *jax.device_get(jax.jit(merge)(params, state))


def digest_of_frozen(state: PyTree) -> dict[str, str]:
    """{"frozen": SHA-256 of the frozen weights}, or {} if there are none."""
    return {"frozen": digest_of(state["frozen"])} if has_frozen(state) else {}


def digest_of(tree: PyTree) -> str:
    """The SHA-256 of a tree's names and arrays."""
    digest = hashlib.sha256()
    for name, leaf in named_leaves(tree).items():
        array = np.ascontiguousarray(leaf)
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def check_arguments(config: dict[str, Any]) -> None:
    """Refuse a config whose model arguments do not fit the weights that its rule file is for."""
    option, model = config["training"].get("pretrained"), config["model"]
    while isinstance(model, dict) and isinstance(model.get("args", {}).get("base"), dict):
        model = model["args"]["base"]
    rules = option.get("rules") if isinstance(option, dict) else None
    if not isinstance(rules, str) or not isinstance(model, dict):
        return
    content, name = rule_file(rules, f"{OPTION}.rules")
    needed = content.get("model", {})
    if model["name"] != needed.get("name"):
        return
    given, lines = model.get("args", {}), []
    for key, value in needed.get("args", {}).items():
        own = list(given[key]) if isinstance(given.get(key), tuple) else given.get(key)
        if key in given and own != value:
            values = f"{json.dumps(value)}, got {json.dumps(own)}"
            lines.append(f"model.args.{key}: the weights of {name} need {values}")
    if lines:
        raise UserError("\n".join(lines))


class Pretrained:
    """The weights to start from: those of a checkpoint that were evaluated, which are the averaged
    ones if there are any, or of another program's file. Names are the paths of the model's leaves,
    such as `head/weight`; the leaves of its state are called `state/...`, also in the safetensors
    file of another program. `fresh` lists regexes of the leaves that keep their initial values.
    `rules` turn the arrays of another program into leaves: a list, the name of a ready rule file,
    or a path; `rename` lists rules that are applied before them, each of which must match a name.
    `interpolate` lists regexes of the position embeddings of an image that are resized. If `model`
    adds to a frozen model, the names are those of the frozen model."""

    def __init__(
        self,
        path: str | Path,
        fresh: Sequence[str] = (),
        rename: Sequence = (),
        rules: str | Path | Sequence = (),
        interpolate: Sequence[str] = (),
        probe: bool = True,
        model: Model | None = None,
    ) -> None:
        path = local_path("path", path)
        renaming = read_rules(rename, f"{OPTION}.rename")
        self.rules = [*renaming, *read_rules(rules, f"{OPTION}.rules")]
        arrays, self.record = load_weights(path)  # the record is empty in another program's file
        self.path, self.fresh, self.interpolate = path, fresh, interpolate
        self.merge, self.start = (getattr(model, name, None) for name in ("merge", "start"))
        self.arrays = weights(arrays)
        self.matching("rename", [rule.regex for rule in renaming], self.arrays)
        # With fresh leaves, such as a new head, the output differs anyway.
        self.probe = probe_of(arrays) if probe and not fresh else {}

    def __str__(self) -> str:
        fresh = f", except {', '.join(self.fresh)}" if self.fresh else ""
        return f"the weights of {self.path}{fresh}"

    def check(self, params: PyTree, state: PyTree) -> None:
        """Refuse a file that does not fit these params and state, which may be shapes."""
        self.leaves(params, state)

    def leaves(self, params: PyTree, state: PyTree) -> dict[str, HostArray]:
        """{name: array} for the leaves of these params and state that are not fresh."""
        if (
            self.merge
        ):  # the names are those of the frozen model, whose fresh leaves must be trained
            frozen = state["frozen"].keys()
            params, state = jax.eval_shape(self.merge, params, state)
            fresh = self.matching("fresh", self.fresh, named_leaves(params))
            if untrained := sorted(frozen & {*fresh}):
                why = f"{untrained[0]} is frozen by the model, so it cannot keep its initial values"
                raise UserError(f"{OPTION}.fresh: {why}; train it (`whole` of lora)")
        shapes = named_leaves(params) | named_leaves({"state": without_frozen(state)})
        arrays, origin = converted(
            self.path, self.rules, self.arrays, trees.of_single_blocks(shapes)
        )
        every = {name: trees.as_stored(leaf) for name, leaf in shapes.items()}
        kept = self.matching("fresh", self.fresh, every)
        wanted = {name: leaf for name, leaf in every.items() if name not in kept}
        for name in self.matching("interpolate", self.interpolate, wanted):
            if name in arrays:
                arrays[name] = resized(np.asarray(arrays[name]), wanted[name].shape)
        arrays = trees.restacked(arrays, every)
        fresh = {name for name in arrays if any(re.fullmatch(regex, name) for regex in self.fresh)}
        stored = {name: array for name, array in arrays.items() if name not in fresh}

        def called(name: str) -> str:
            """A name in the model, with that of its array in the file and the rule that changed
            it. Arrays that were stacked here have no name in the file."""
            source, rule = origin.get(name, (name, None))
            if rule is None:
                return name
            changed = rule.form or rule.targets[1:]
            change = f" {self.arrays[source].shape}, by {rule.text}" if changed else ""
            return f"{name} (in the file: {source}{change})"

        lines = trees.differences(stored, wanted, castable, called=called)
        if any(line.startswith(("missing", "unexpected", "it has none")) for line in lines):
            lines.append(
                "`rules` turn arrays into the model's leaves, `fresh` lists the leaves that keep "
                "their initial values (docs/fine_tuning.md#start-from-pretrained-weights)"
            )
        if any(line.endswith("(transpose it)") for line in lines):
            lines.append('a rule with a form transposes: [regex, name of the leaf, "OI->IO"]')
        trees.refuse(f"{self.path}: does not fit the model", lines)
        return stored

    def matching(self, option: str, regexes: Iterable[str], names: Iterable[str]) -> list[str]:
        """The names that match the regexes of an option, each of which must match one."""
        try:
            matches = match_rules([(regex, True) for regex in regexes], names, default=False)
        except re.error as error:
            raise UserError(
                f"{OPTION}.{option}: {error.pattern!r} is not a regular expression: {error}"
            ) from error
        except UserError as error:
            raise UserError(f"{OPTION}.{option}: {error}") from error
        return [name for name, is_match in matches.items() if is_match]

    def __call__(self, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """(params, state) with the arrays of the file, on the host; fresh leaves are unchanged."""
        loaded = self.leaves(params, state)

        def merge(name: str, leaf: Any) -> Any:
            name = name.removeprefix(FROZEN)
            if name not in loaded:
                return leaf
            array = np.asarray(loaded[name], trees.as_stored(leaf).dtype)
            return trees.typed(array, leaf)

        params, state = map_named(merge, params), map_named(merge, {"state": state})["state"]
        return (self.start(params, state) if self.start else params), state

    def check_frozen(self, record: Mapping[str, Any], state: PyTree, source: str | Path) -> None:
        """Refuse frozen weights that are not those with which a checkpoint was trained."""
        if has_frozen(state) and digest_of_frozen(state) != {"frozen": record.get("frozen")}:
            why = f"its model was trained on frozen weights that {self.path} no longer holds"
            raise UserError(f"{source}: {why}; restore them")

    def check_probe(self, probe: Callable, params: PyTree, state: PyTree) -> None:
        """Refuse the weights if model/ now computes something else; params may be shapes."""
        if self.probe:
            current, fix = probe(*self(params, state)), "set training.pretrained.probe to false"
            check_meaning(self.path, self.probe, current, fix)


def load_weights(path: Path) -> tuple[dict[str, HostArray], dict[str, Any]]:
    """({name: array}, record) of a checkpoint, or of the weights that another program wrote, whose
    record is empty: one safetensors file, several with an index, or a folder with either."""
    if path.is_dir() and path.suffix != storage.SUFFIXES["orbax"]:
        path = weights_in(path)
    if not path.name.endswith(INDEX):
        return storage.load_one(path)
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not all(
        isinstance(file, str) and Path(file).name == file and file.endswith(".safetensors")
        for file in names.values()
    ):
        raise UserError(
            f"{path}: must have a weight_map of {{name: a safetensors file in the same folder}}"
        )
    arrays_of = {file: storage.load(path.with_name(file))[0] for file in {*names.values()}}
    if missing := [name for name, file in names.items() if name not in arrays_of[file]]:
        name = missing[0]
        raise UserError(f"{path}: says that {names[name]} holds {name}, which it does not")
    return {name: arrays_of[file][name] for name, file in names.items()}, {}


def weights_in(folder: Path) -> Path:
    """The file of the weights in a folder as HuggingFace's libraries write it."""
    if present := storage.checkpoints(folder):
        file = list(present.values())[-1]
        raise UserError(
            f"{folder}: is a run's folder; name one of its checkpoints, such as the newest, {file}"
        )
    for name in ("model", "diffusion_pytorch_model"):
        for suffix in (INDEX, ".safetensors"):
            if (file := folder / f"{name}{suffix}").exists():
                return file
    if pickles := sorted(folder.glob("pytorch_model*.bin")):
        return pickles[0]  # refused, with the way to convert it
    raise UserError(f"{folder}: is a folder without model.safetensors; name a file")


def weights(arrays: dict[str, HostArray]) -> dict[str, HostArray]:
    """The weights among the arrays of a file, under the names that rules use."""
    root = {name: name.split("/")[0] for name in arrays}
    if not {"params", "ema"} & set(root.values()):
        return arrays  # a file of another program
    chosen = evaluated_part(arrays)
    [other] = {"params", "ema"} - {chosen}
    return {
        name[len(chosen) + 1 :] if root[name] == chosen else name: array
        for name, array in arrays.items()
        if root[name] not in {*RUN_NAMES, other}
    }


def castable(stored: np.dtype, wanted: np.dtype) -> bool:
    """Whether a stored type can be cast to the model's: all floats can, others must be equal."""
    return stored == wanted or all(jnp.issubdtype(d, jnp.floating) for d in (stored, wanted))


# Position embeddings of an image, resized to another number of patches.


def resized(array: Float[np.ndarray, "..."], shape: tuple[int, ...]) -> Float[np.ndarray, "..."]:
    """An array of (places, features), whose places are the rows of a square grid of patches,
    perhaps after a class token, resized to another such grid like `torch`'s bicubic. Unchanged if
    that is impossible."""
    if array.ndim != 2 or len(shape) != 2 or array.shape == shape:
        return array
    for extra in (0, 1):  # a class token keeps its vector
        old, new = (math.isqrt(rows - extra) for rows in (array.shape[0], shape[0]))
        if (old * old + extra, new * new + extra) == (array.shape[0], shape[0]):
            weights = bicubic(old, new)
            grid = array[extra:].reshape(old, old, -1).astype(np.float64)
            grid = np.einsum("ih,jw,hwc->ijc", weights, weights, grid, optimize=True)
            grid = grid.reshape(new * new, -1).astype(array.dtype)
            return np.concatenate([array[:extra], grid])
    return array


def bicubic(old: int, new: int, a: float = -0.75) -> Float[np.ndarray, "{new} {old}"]:
    """The matrix (new, old) that resizes a line of points by cubic convolution (Keys, 1981)."""
    weights = np.zeros((new, old))
    for i in range(new):
        place = (i + 0.5) * old / new - 0.5
        for j in range(math.floor(place) - 1, math.floor(place) + 3):
            d = abs(place - j)
            near = ((a + 2) * d - (a + 3)) * d * d + 1
            far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
            weights[i, min(max(j, 0), old - 1)] += near if d <= 1 else far
    return weights
