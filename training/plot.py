"""A picture of one or several runs: `python -m training.plot saved/<title>/<run> ...` writes curves.png into the first."""

import json
import sys
from pathlib import Path

from utils import UserError


def read_epochs(folder):
    """The rows of metrics.jsonl that close an epoch."""
    path = Path(folder) / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; name the folder of a run")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if row.get("end_of_epoch")]


def plot(folders, target):
    """One panel for each metric, with a line for each set and run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = {Path(folder).name: read_epochs(folder) for folder in folders}
    first = next(iter(runs.values()))[0]
    names = [name for name in first if name.split("_")[0] in ("train", "val", "test") and "/" not in name]
    metrics = list(dict.fromkeys(name.split("_", 1)[1] for name in names))
    figure, panels = pyplot.subplots(1, len(metrics), figsize=(4.5 * len(metrics), 3), squeeze=False, layout="constrained")
    for panel, metric in zip(panels[0], metrics, strict=True):
        for run, rows in runs.items():
            for name in [name for name in names if name.split("_", 1)[1] == metric]:
                points = [(row["epoch"], row[name]) for row in rows if name in row]
                label = name.split("_")[0] if len(runs) == 1 else f"{run} {name.split('_')[0]}"
                panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        panel.set(title=metric, xlabel="epoch")
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    try:
        plot(sys.argv[1:], Path(sys.argv[1]) / "curves.png")
    except IndexError:
        sys.exit("name the folder of a run, as in: python -m training.plot saved/MNIST_Sample/<run>")
    except ImportError:
        sys.exit("drawing needs matplotlib: pip install -r training/requirements.txt")
    except UserError as error:
        sys.exit(str(error))
