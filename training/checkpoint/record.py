"""The record of a checkpoint: what it holds, the check of one that may come from an untrusted
source, and the text by which preprocessing is compared."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypedDict, cast, get_args, get_origin, get_type_hints

from utils import Damaged, UserError
from utils.forms import CountOrZero, Misfit, NonNegative, at_least, at_most, form

FORMAT = 4
Natural = Annotated[int, at_least(0)]
# A metric may be NaN or infinite; null is what earlier lines of JSON have for it.
Metrics = dict[str, float | None]


class Record(TypedDict):
    """What a checkpoint says about itself and its run. A correct digest does not prove who wrote a
    file, so the types and ranges of these keys are checked. Other keys, such as `tokenizer`, are
    checked where they are used."""

    format: Natural
    step: CountOrZero  # steps taken; the counts have 32 bits on the device
    epoch: CountOrZero  # the epoch in progress, or the last one
    position: CountOrZero  # batches taken of the epoch in progress
    lined: CountOrZero  # the position of the last log line
    seeds: tuple[Annotated[int, at_least(0), at_most(2**32 - 1)], ...]  # one for each replica
    config: dict
    facts: dict[str, float | tuple[CountOrZero, ...] | dict[str, tuple[str, ...]] | None]
    data: dict[str, str]  # {set: fingerprint}
    metrics: Metrics  # of the latest log line or epoch
    evaluated: Metrics | None  # of the weights in this checkpoint, if they were evaluated
    monitor: str | None  # the metric by which the best checkpoints are ranked
    regular: tuple[str, ...]  # the names of the last checkpoints
    best: tuple[tuple[str, float], ...]  # the names and values of the best ones, best first
    whole: bool  # whether a run can be resumed from it
    stopped: bool  # whether a callback has ended the run for good
    elapsed: NonNegative  # seconds of the epoch in progress
    seconds: NonNegative  # of the whole run
    # what is left to do at this step: whether to evaluate, and which kind of checkpoint to write
    todo: tuple[bool, Literal["best", "last", "whole"] | None]
    open: Literal["steps", "epoch", "evaluation"] | None  # where that is to be done
    lengths: dict[str, Natural]  # {log: its bytes}
    memories: dict  # {observer: what it remembers}
    lr_scales: dict[str, NonNegative]  # {observer: its factor of all updates}
    preprocess: tuple[str, ...] | None  # the text of the functions, in runs of `fit`


KINDS = get_type_hints(Record, include_extras=True)


def fits(value: Any, kind: Any) -> bool:
    """Whether a value of JSON has the type of an annotation."""
    if isinstance(kind, UnionType):
        return any(fits(value, choice) for choice in get_args(kind))
    if get_origin(kind) is dict:
        inner = get_args(kind)[1]
        return type(value) is dict and all(fits(item, inner) for item in value.values())
    try:
        form(kind).read(value, "")
    except Misfit:
        return False
    return True


def check_keys(path: str | Path, record: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Refuse a record in which one of these keys has no valid value."""
    if wrong := [key for key in KINDS if key in keys and not fits(record.get(key), KINDS[key])]:
        names = ", ".join(wrong)
        raise Damaged(f"{path}: is not a checkpoint of a run: its record has no valid {names}")


def check_record(path: str | Path, record: Mapping[str, Any]) -> Record:
    """Return the record, but refuse one from which a run cannot be resumed."""
    if type(number := record.get("format")) is int and number != FORMAT:
        raise Damaged(
            f"{path}: was written by another version, in format {number} instead of {FORMAT}; "
            "training.pretrained can start a new run from its weights"
        )
    check_keys(path, record, KINDS)
    epoch, position = record["epoch"], record["position"]
    in_order = record["lined"] <= position <= record["step"]
    if not in_order or (position and not epoch) or not record["seeds"]:
        raise Damaged(
            f"{path}: is not a checkpoint of a run: its epoch, position or line contradict each "
            "other, or it has no seed"
        )
    return cast(Record, record)


def described(preprocess: Iterable[Callable]) -> list[str]:
    """The name of each function, with its functools.partial arguments, as text to compare."""
    return [text_of(function) for function in preprocess]


def text_of(value: Any) -> str:
    """A function, or one of its arguments, as text; a long array by its digest."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple):
        text = f"[{', '.join(map(text_of, value))}]"
        return text if len(text) < 200 else f"[{sha256(text.encode()).hexdigest()[:8]}...]"
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is None or isinstance(value, int | str):
        return repr(value)
    if not isinstance(value, partial):
        return getattr(value, "__name__", type(value).__name__)
    named = [f"{name}={text_of(given)}" for name, given in sorted(value.keywords.items())]
    return f"{text_of(value.func)}({', '.join([*map(text_of, value.args), *named])})"


def check_described(
    path: str | Path, trained: list[str] | None, preprocess: Iterable[Callable]
) -> None:
    """Refuse other preprocessing than that with which a run of `fit` was trained."""
    if trained is not None and trained != (given := described(preprocess)):
        text = f"preprocess=[{', '.join(trained)}], got [{', '.join(given)}]"
        raise UserError(f"{path}: was trained with {text}; pass the same functions")
