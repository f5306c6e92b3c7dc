"""Draws the bar chart of benchmarks/training.py for the README."""

import statistics
from pathlib import Path

from benchmarks.targets import OURS

FILE = Path(__file__).parents[1] / "docs" / "speed.png"
# {whether it is ours: (colour of the bar, colour of what huge pages add)}
COLOURS = {True: ("#c2410c", "#fdba74"), False: ("#475569", "#cbd5e1")}


def draw(measured):
    """Draw the rates of {workload: {name: {huge pages: Client}}}, one panel per workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-len(measured) // 2)
    figure, panels = pyplot.subplots(rows, 2, figsize=(10, 3.1 * rows), layout="constrained")
    for panel in panels.flat[len(measured) :]:
        panel.axis("off")
    for panel, (workload, runners) in zip(panels.flat, measured.items(), strict=False):
        for name, pair in runners.items():
            rate, huge = (statistics.median(pair[pages].rates) for pages in (False, True))
            bar, added = COLOURS[name == OURS]
            panel.barh(name, huge, color=added)
            panel.barh(name, min(rate, huge), color=bar)
            panel.text(huge, name, f" {huge:,.0f}", va="center", fontsize=9)
        panel.invert_yaxis()
        panel.set_title(workload, fontsize=11, loc="left", fontweight="bold")
        panel.set_xlim(0, 1.18 * panel.dataLim.x1)
        panel.set_xticks([])
        panel.spines[["top", "right", "bottom"]].set_visible(False)
    figure.suptitle("Images or tokens per second on the CPU; the pale part is what huge pages add")
    figure.savefig(FILE, dpi=110)
