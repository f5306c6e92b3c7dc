"""Log a run to Trackio, whose dashboard runs on this machine: trackio show"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from jaxtyping import Shaped

from training.base import Tracker
from training.watching.publish import About
from training.watching.trackers.common import (
    counts_and_edges,
    flattened,
    needs,
    opened,
    preformatted,
)
from utils.forms import NeedsTrust

Space = Annotated[
    str | None,
    NeedsTrust("writes to Trackio's folder or sends the run away", lambda space: True),
]


def trackio(
    project: str | None = None,
    name: str | None = None,
    group: str | None = None,
    space: Space = None,
) -> Tracker:
    """Log to Trackio's own folder (TRACKIO_DIR), or to a Space at HuggingFace.

    The default of `project` is the title. A resumed run continues the run of its name.
    """
    needs("trackio", "pip install trackio", trackio="trackio", PIL="pillow")
    return Trackio(project, name, group, space)


@dataclass
class Trackio:
    """The name of a run in its project is the name of its folder."""

    project: str | None
    name: str | None
    group: str | None
    space: str | None

    def start(self, about: About) -> None:
        import trackio

        self.run = trackio.init(
            project=self.project or about.title,
            name=self.name or about.folder.name,
            group=self.group,
            space_id=self.space,
            config=flattened(about.config),
            resume="allow" if about.step else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.step = about.step

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self.step = step
        self.run.log(dict(values), step=step)

    def image(self, step: int, name: str, png: bytes) -> None:
        import trackio

        self.run.log({name: trackio.Image(opened(png))}, step=step)

    def histogram(self, step: int, name: str, values: Shaped[np.ndarray, "size"]) -> None:
        import trackio

        if (histogram := counts_and_edges(values)) is not None:
            self.run.log({name: trackio.Histogram(np_histogram=histogram)}, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        import trackio

        self.run.log({name: trackio.Html(preformatted(text))}, step=step)

    def back_to(self, step: int) -> None:
        self.run.log({"back_to": step}, step=step)

    def finish(self, metrics: dict[str, float]) -> None:
        self.run.log(dict(metrics), step=self.step)
        self.run.finish()
