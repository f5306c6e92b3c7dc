"""The record of a checkpoint: what is in it, and whether one that was read is sound. Its digest does not tell who wrote it."""

from utils import Damaged

FORMAT = 2  # 1 had other sums, and no `lined`
RECORD = {
    "step": int,
    "epoch": int,
    "position": int,
    "replica": int,
    "replicas": int,
    "whole": bool,
    "elapsed": float,
}
RECORD |= {
    "config": dict,
    "facts": dict,
    "data": dict,
    "metrics": dict,
    "lengths": dict,
    "callbacks": list,
    "best": list,
}
RECORD |= {"regular": list, "rollbacks": int, "stopped": bool, "format": int, "lined": int}


def is_count(value):
    return type(value) is int and 0 <= value < 2**53


def is_pair(value, *kinds):
    """Whether this is [name, something of these kinds]."""
    return (
        type(value) is list
        and len(value) == 2
        and type(value[0]) is str
        and isinstance(value[1], kinds)
    )


INSIDE = dict.fromkeys(
    ("step", "epoch", "position", "replica", "replicas", "rollbacks", "lined"), is_count
) | {
    "lengths": lambda lengths: all(map(is_count, lengths.values())),
    "regular": lambda names: all(type(name) is str for name in names),
    "best": lambda best: all(is_pair(entry, int, float) for entry in best),
    "callbacks": lambda memories: all(is_pair(entry, object) for entry in memories),
}


def check_record(path, record):
    """Refuse a record that this version does not understand."""
    if record.get("format") == 1:
        raise Damaged(
            f"{path}: was written by an earlier version; training.pretrained can begin with its weights"
        )
    wrong = [key for key, kind in RECORD.items() if type(record.get(key)) is not kind]
    wrong = wrong or [key for key, sound in INSIDE.items() if not sound(record[key])]
    if wrong:
        raise Damaged(
            f"{path}: is no checkpoint of a run: its record has no sound {', '.join(wrong)}"
        )
    if record["format"] > FORMAT:
        raise Damaged(
            f"{path}: was written by a newer version (format {record['format']}; this one reads up to {FORMAT})"
        )
