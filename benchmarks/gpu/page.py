"""The results of benchmarks.gpu as a section of Markdown."""

from benchmarks.results import markdown, short
from utils import format_bytes

ABOUT = {
    "airbench": "`configs/cifar10_94.json` from its first to its last step, on generated images",
    "gpt2": "`configs/gpt2_124m.json` on random tokens, medians of the later half of the steps",
    "resume": "A resnet that is killed with SIGKILL after a checkpoint and resumed, and the same "
    "run again, against one that was not killed: the final weights and statistics",
    "start": "From the start of the process to the first step of a resnet; warm: the programs are "
    "in the user's cache",
    "waiting": "A resnet whose data is on the device, or is brought batch by batch: the share of "
    "the time that the run waits for data",
    "tests": "The tests with the mark `gpu`",
    "speed": "Training on random data: medians of turns that alternate; MFU counts useful products "
    "of our forward pass three times, for all frameworks alike; first epoch: seconds from the "
    "start of the process, while the others started too",
}


def page(done):
    """All parts, in the order in which they ran."""
    blocks = [about_device(done["device"]["rows"][0])] if rows_of(done, "device") else []
    speeds = [row for part in done if part.startswith("speed") for row in rows_of(done, part)]
    speeds = list({(row["model"], row["precision"], row["peer"]): row for row in speeds}.values())
    others = [part for part in done if part != "device" and not part.startswith("speed")]
    for part in [*others, *(["speed"] if speeds else [])]:
        rows = speeds if part == "speed" else rows_of(done, part)
        if rows:
            shown = rows[-1:] if part == "tests" else rows
            failed = [row["failed"] for row in rows if part == "tests" and len(row) == 1]
            blocks += [f"{ABOUT[part]}.", table(shown)]
            blocks += ["Failed: " + ", ".join(failed)] if failed else []
    problems = [f"- {part}: {each['problem']}" for part, each in done.items() if each["problem"]]
    blocks += ["Not everything ran:\n\n" + "\n".join(problems)] if problems else []
    return "\n\n".join(blocks)


def rows_of(done, part):
    return done.get(part, {}).get("rows", [])


def about_device(row):
    versions = ", ".join(f"{name} {v}" for name, v in row["versions"].items() if v)
    memory = f" with {format_bytes(row['memory'])} for JAX" if row["memory"] else ""
    return f"{row['count']} x {row['device']}{memory}, {row['cores']} cores; {versions}."


def table(rows):
    """One column for each key of the rows."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[cell(key, row.get(key)) for key in keys] for row in rows]
    return markdown([key.replace("_", " ") for key in keys], cells)


def cell(key, value):
    if value is None:
        return "-"
    if key == "memory":
        return format_bytes(value)
    if key in ("mfu", "waiting"):
        return f"{value:.1%}"
    return short(value) if isinstance(value, float) else str(value)
