"""The record of a checkpoint: which values are valid, since it may come from an untrusted source,
and the text by which preprocessing is compared."""

from functools import partial
from hashlib import sha256

from utils import Damaged, UserError

FORMAT = 3


def is_count(value, below=2**53):
    return type(value) is int and 0 <= value < below


def is_number(value):
    """Whether this is a number that fits a float."""
    return type(value) in (int, float) and abs(value) < 2**1000


def is_scale(value):
    return is_number(value) and value >= 0


def is_object(value, is_valid):
    """Whether this is an object of valid values."""
    return type(value) is dict and all(map(is_valid, value.values()))


def are_facts(value):
    """Whether this is an object of counts, lists of counts, or null. `bytes_per_token` is an
    average, `ignore_label` may be negative, and each of a table's `columns` has a list of texts."""
    if type(value) is not dict:
        return False
    known = {name: fact for name, fact in value.items() if fact is not None}
    facts = {"bytes_per_token": 1.0, "ignore_label": 0} | known
    size, label = facts.pop("bytes_per_token"), facts.pop("ignore_label")
    if not is_object(facts.pop("columns", {}), partial(is_list, is_valid=is_text)):
        return False
    counts = all(is_count(fact) or is_list(fact, is_count) for fact in facts.values())
    return counts and is_number(size) and size > 0 and type(label) is int and abs(label) < 2**31


def is_text(value):
    return type(value) is str


def is_list(value, is_valid):
    """Whether this is a list of valid entries."""
    return type(value) is list and all(map(is_valid, value))


def is_pair(value, is_valid):
    """Whether this is [a string, a valid value]."""
    is_two = type(value) is list and len(value) == 2
    return is_two and type(value[0]) is str and is_valid(value[1])


def are_metrics(value):
    return is_object(value, lambda v: v is None or type(v) is float or is_number(v))


COUNTS = ("step", "epoch", "position", "lined")
RECORD = {  # {key: whether its value is valid}; a correct digest does not prove who wrote a file
    **dict.fromkeys(COUNTS, partial(is_count, below=2**31)),  # they have 32 bits on the device
    **dict.fromkeys(("replica", "replicas"), is_count),
    "config": lambda value: type(value) is dict,
    "facts": are_facts,
    "data": partial(is_object, is_valid=lambda digest: type(digest) is str),
    # A metric may be NaN or infinite.
    "metrics": are_metrics,
    # those of the weights, if they were evaluated; by which metric the best are ranked
    "evaluated": lambda value: value is None or are_metrics(value),
    "monitor": lambda value: value is None or (is_text(value) and value.isprintable()),
    **dict.fromkeys(("whole", "stopped"), lambda value: type(value) is bool),
    "elapsed": lambda value: type(value) is float and is_number(value) and value >= 0,
    "seconds": lambda value: is_number(value) and value >= 0,  # of the whole run
    # what is left to do at this step: whether to evaluate, and which kind of checkpoint to write
    "todo": lambda value: (
        type(value) is list
        and len(value) == 2
        and type(value[0]) is bool
        and value[1] in (None, "best", "last", "whole")
    ),
    "open": lambda value: value in (None, "steps", "epoch"),  # whether that is to be done
    "format": lambda value: type(value) is int,
    "lengths": partial(is_object, is_valid=is_count),
    "regular": lambda value: is_list(value, lambda name: type(name) is str),
    "best": lambda value: is_list(value, lambda entry: is_pair(entry, is_number)),
    "memories": lambda value: type(value) is dict,  # {observer: what it remembers}
    # the text of the functions, in runs of `fit`
    "preprocess": lambda value: value is None or is_list(value, lambda text: type(text) is str),
    # {observer: its factor of all updates}
    "lr_scales": partial(is_object, is_valid=is_scale),
}


def check_known(path, record):
    """Refuse a record, perhaps of an earlier version, in which a known key has an invalid value."""
    wrong = [key for key in RECORD if key in record and not RECORD[key](record[key])]
    if wrong:
        raise Damaged(f"{path}: its record has no valid {', '.join(wrong)}")


def consistent(record):
    """Whether the numbers of a record can belong to one run."""
    position, replica = record["position"], record["replica"]
    begun = record["epoch"] > 0 or position == 0
    ordered = record["lined"] <= position <= record["step"]
    return begun and ordered and replica < record["replicas"]


def check_record(path, record):
    """Return the record, but refuse one that this version does not understand."""
    if record.get("format") in (1, 2):
        fix = "training.pretrained can start a new run from its weights"
        raise Damaged(f"{path}: was written by an earlier version; {fix}")
    if wrong := [key for key, is_valid in RECORD.items() if not is_valid(record.get(key))]:
        keys = ", ".join(wrong)
        raise Damaged(f"{path}: is not a checkpoint of a run: its record has no valid {keys}")
    if not consistent(record):
        why = "its epoch, position, line or replica contradict each other"
        raise Damaged(f"{path}: is not a checkpoint of a run: {why}")
    if record["format"] > FORMAT:
        formats = f"format {record['format']}; this one reads up to {FORMAT}"
        raise Damaged(f"{path}: was written by a newer version ({formats})")
    return record


def described(preprocess):
    """The name of each function, with its functools.partial arguments, as text to compare."""
    return [text_of(function) for function in preprocess]


def text_of(value):
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


def check_described(path, trained, preprocess):
    """Refuse other preprocessing than that with which a run of `fit` was trained."""
    if trained is not None and trained != (given := described(preprocess)):
        text = f"preprocess=[{', '.join(trained)}], got [{', '.join(given)}]"
        raise UserError(f"{path}: was trained with {text}; pass the same functions")
