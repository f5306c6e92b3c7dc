"""What the option `scan` of the models gains and costs, with and without it: the seconds from the
start of a process to the end of the first epoch, of which compiling takes most, and the time per
step. Each run of `fit` is a process of its own; the two of a model take turns.

python -m benchmarks.scan [--rounds 9] [--models gpt_4,vit,...]
"""

from benchmarks.harness import take_turns
from benchmarks.results import arguments, markdown, ratios, record, short, spread, target_cells
from benchmarks.training import Runner
from benchmarks.workloads import Workload

BATCH, STEPS, IMAGE = 8, 20, (16, 16, 3)  # steps of an epoch
DEEP = {
    f"gpt_{depth}": ("gpt", {"dim": 64, "depth": depth, "heads": 4}, (64,))
    for depth in (4, 12, 24, 48)
}
MODELS = DEEP | {
    "vit": ("vit", {"dim": 64, "depth": 6}, IMAGE),
    "convnext": (
        "convnext",
        {"dims": (32, 64), "depths": (3, 3), "patch": 2, "residual": True},
        IMAGE,
    ),
    "resnet": ("resnet", {"widths": (16, 32), "depth": 3}, IMAGE),
}
FORMS = {"one by one": False, "scan": True}
TARGET = 1.5  # the deepest gpt may take so many times as long to start as the least deep one
NOTE = f"""\
AdamW, float32, batches of {BATCH}: `gpt` of 4 to 48 blocks and width 64 on texts of 64 tokens, \
and models of 6 blocks on images of {"x".join(map(str, IMAGE))}. Times per step are medians \
(smallest - largest) over turns that alternate; ratios are computed turn by turn."""


def main():
    args, rows, starts = arguments("scan", __doc__, rounds=9, models=list(MODELS)), [], {}
    for name in args.models:
        model, sizes, shape = MODELS[name]
        data = {"examples": BATCH * STEPS, "classes": 65, "random": True}
        runners = {
            form: Runner(
                "ours",
                "",
                Workload(model, sizes | {"scan": scan}, shape, BATCH, 0.001, **data),
                timeout=900,
            )
            for form, scan in FORMS.items()
        }
        rates = take_turns({form: each.take_turn for form, each in runners.items()}, args.rounds)
        starts[name] = {form: each.first_epoch for form, each in runners.items()}
        for each in runners.values():
            each.worker.close()
        units = BATCH * (shape[0] if model == "gpt" else 1)
        times = {form: [1e3 * units / rate for rate in each] for form, each in rates.items()}
        ratio = ratios(times["scan"], times["one by one"])
        rows.append([name, *map(short, starts[name].values()), *map(spread, times.values())])
        rows[-1].append(spread(ratio))
    head = ["first epoch, s", "ms per step"]
    head = [f"{form}, {quantity}" for quantity in head for form in FORMS]
    blocks = [markdown(["model", *head, "scan x one by one"], rows)]
    first, *_, last = DEEP
    if starts.keys() >= {first, last}:
        growth = target_cells(starts[last]["scan"] / starts[first]["scan"], TARGET)
        blocks.append(f"{last} / {first}, first epoch with scan: {', '.join(growth)}.")
    record(args, "Equal blocks compiled as one", *blocks, NOTE)


if __name__ == "__main__":
    main()
