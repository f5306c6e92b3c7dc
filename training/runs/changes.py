"""What has changed in config, data and tokenizer since a run's checkpoint, and what may change."""

import hashlib
import json

from training.checkpoint.restore import probe_of
from training.runs.folder import flat
from utils import UserError, cut

# Keys whose values may differ when a run is resumed.
FREE = ("training.epochs", "training.max_steps", "training.max_seconds", "training.on_nonfinite")
FREE += ("training.rollbacks", "training.detect_nans", "checkpoint", "logging", "mesh", "sharding")
FREE += ("model.args.scan", "data.args.threads", "data.args.cache_mb", "data.args.workers")
SILENT = ("title", "resume", "run_name", "$schema")  # keys that do not change what the run computes
COMPARED = {"objective": "fingerprint of the objective", "preprocess": "functions in preprocess"}
ABSENT = "(absent)"
TOKENIZER = "fingerprint of the tokenizer"


def changes(opened, record, override=False):
    """What changed in config, facts and data since a run's checkpoint, one line each. A change that
    is not allowed is refused unless `override` is True, which also continues a run that a callback
    has stopped."""
    checkpoint = opened.checkpoint
    if checkpoint is None:
        return ["There is no checkpoint yet, so the run starts over"]
    try:
        free, other = differences(checkpoint.record, record)
    except RecursionError as error:
        raise UserError(f"{checkpoint.paths[0]}: its config is nested too deeply") from error
    refuse_other_tokenizer(opened.folder, other)
    if other and not override:
        lines = "\n  ".join(line.removeprefix("Changed: ") for line in lines_of_changes(other))
        raise UserError(
            f"{opened.folder}: this is not the config, or not the data, of the run\n  {lines}\n"
            "Undo the change, begin a new run, or add --override "
            '(fit: resume="override") to continue with it; '
            f"{', '.join(FREE)} may always change"
        )
    if override:
        for each, arrays in zip(checkpoint.records, checkpoint.arrays, strict=True):
            each["stopped"] = False
            for name in probe_of(arrays):
                del arrays[name]
    return lines_of_changes(free | other)


def refuse_other_tokenizer(folder, other):
    """Raise if the run has recorded a tokenizer, and the data now has none or another one."""
    before, now = other.get(TOKENIZER, (ABSENT, ABSENT))
    if before is not ABSENT:
        found = "no" if now is ABSENT else "another"
        raise UserError(
            f"{folder}: the data has {found} tokenizer, not the run's ({TOKENIZER}: {before[:12]} "
            f"-> {now[:12]}), so its tokens mean something else to the model, also with "
            "--override; undo the change of the data or its tokenizer, or begin a new run"
        )


def differences(old, new):
    """({path: (old, new)} of the differences between two records that are allowed, the same of the
    differences that are not)."""

    def facts_of(record):
        extra = {"facts": record["facts"], "fingerprint of the data": record["data"]}
        if tokenizer := record.get("tokenizer"):
            extra[TOKENIZER] = hashlib.sha256(tokenizer.encode()).hexdigest()
        both = [key for key in COMPARED if key in old and key in new]  # older records lack them
        extra |= {COMPARED[key]: record[key] for key in both}
        return flat({**record["config"], **extra})

    old, new = facts_of(old), facts_of(new)
    free, other = {}, {}
    for path in {**old, **new}:
        pair = old.get(path, ABSENT), new.get(path, ABSENT)
        if pair[0] == pair[1] or path in SILENT:
            continue
        keys = (*FREE, "facts.total_steps")
        may_change = any(path == key or path.startswith(f"{key}.") for key in keys)
        (free if may_change else other)[path] = pair
    return free, other


def lines_of_changes(changed):
    """One line for each difference."""
    shown = {
        path: [value if value is ABSENT else cut(json.dumps(value), 200) for value in pair]
        for path, pair in changed.items()
    }
    return [f"Changed: {path}: {old} -> {new}" for path, (old, new) in shown.items()]
