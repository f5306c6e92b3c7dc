"""Log a run to Weights & Biases. Training never waits for it, and it never prompts for a login."""

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

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
from utils import RunError, UserError, quoted
from utils.files import atomic_write, read_file
from utils.forms import NeedsTrust

logger = logging.getLogger("main")

START_SECONDS = 30  # to reach the server
FINISH_SECONDS = 20  # to send the rest; data that is not sent stays on the disk
ID_FILE = "wandb_id"
ID = r"[\w.-]{1,64}"


def is_online(mode: str | None) -> bool:
    """Whether a mode contacts a server, which the folder of a run may name, with the user's key."""
    return (mode or os.environ.get("WANDB_MODE")) not in ("offline", "dryrun", "disabled")


Mode = Annotated[
    Literal["online", "offline", "disabled"] | None, NeedsTrust("sends the run away", is_online)
]


def wandb(
    project: str | None = None,
    name: str | None = None,
    group: str | None = None,
    entity: str | None = None,
    tags: tuple[str, ...] = (),
    id: str | None = None,
    resume: Literal["allow", "must", "never"] = "allow",
    mode: Mode = None,
) -> Tracker:
    """Log to Weights & Biases; mode "offline" writes to the run's folder, for `wandb sync`.

    The default of `mode` is WANDB_MODE; that of `project` is WANDB_PROJECT, or else the title. A
    run that resumes continues the same run at Weights & Biases, unless `resume` is "never".
    """
    needs("wandb", wandb="wandb", PIL="pillow")
    if id is not None and not re.fullmatch(ID, id):
        raise ValueError(f"id: must be up to 64 letters, digits, '_', '-' and '.', got {id!r}")
    if resume == "must" and id is None:
        raise ValueError('resume: "must" needs the run to resume; give its id')
    return Wandb(project, name, group, entity, tags, id, resume, mode)


@dataclass
class Wandb:
    """A small file in the run's folder holds the id that the run has at Weights & Biases."""

    project: str | None
    name: str | None
    group: str | None
    entity: str | None
    tags: tuple[str, ...]
    id: str | None
    resume: Literal["allow", "must", "never"]
    mode: Literal["online", "offline", "disabled"] | None

    def start(self, about: About) -> None:
        import wandb

        refuse_without_login(self.mode)
        self.run = wandb.init(
            name=self.name or about.folder.name,
            group=self.group,
            entity=self.entity,
            tags=self.tags or None,
            project=self.project or os.environ.get("WANDB_PROJECT") or about.title,
            config=flattened(about.config),
            id=self.id or self.saved_id(about.folder / ID_FILE) or id_of(about),
            resume=self.resume,
            mode=self.mode,
            dir=about.folder,
            reinit="create_new",  # leaves other uses of wandb in this process alone
            settings=wandb.Settings(
                silent=True,
                console="off",  # its copy of the output would block on the main thread
                allow_val_change=True,
                init_timeout=START_SECONDS,
                finish_timeout=FINISH_SECONDS,
                finish_timeout_raises=True,
            ),
        )
        if self.run.disabled:
            return
        atomic_write(about.folder / ID_FILE, f"{self.run.id}\n".encode())
        self.run.define_metric("*", step_metric="step")  # wandb's own steps cannot go back
        logger.info("wandb: %s", self.run.url or f"offline; send it with: {self.sync_command()}")

    def saved_id(self, file: Path) -> str | None:
        """The id that this run had before it was resumed, or None."""
        if self.resume == "never" or not file.exists():
            return None
        saved = read_file(file).decode(errors="replace").strip()
        return saved if re.fullmatch(ID, saved) else None

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values | {"step": step})

    def image(self, step: int, name: str, png: bytes) -> None:
        import wandb

        self.run.log({name: wandb.Image(opened(png)), "step": step})

    def histogram(self, step: int, name: str, values: Shaped[np.ndarray, "size"]) -> None:
        import wandb

        if (histogram := counts_and_edges(values)) is not None:
            self.run.log({name: wandb.Histogram(np_histogram=histogram), "step": step})

    def text(self, step: int, name: str, text: str) -> None:
        import wandb

        self.run.log({name: wandb.Html(preformatted(text), inject=False), "step": step})

    def back_to(self, step: int) -> None:
        self.run.log({"back_to": step, "step": step})

    def finish(self, metrics: dict[str, float]) -> None:
        self.run.summary.update(metrics)
        try:
            self.run.finish()
        except TimeoutError as error:
            problem = f"not everything was sent within {FINISH_SECONDS} s"
            raise RunError(f"{problem}; send it with: {self.sync_command()}") from error

    def sync_command(self) -> str:
        """The command that sends the data in the run's folder."""
        return f"wandb sync {quoted(os.path.dirname(self.run.dir))}"


def id_of(about: About) -> str | None:
    """The chosen name of the run, if it can be an id; without one, wandb draws an id."""
    name = about.config.get("run_name")
    return name if name and re.fullmatch(ID, name) else None


def refuse_without_login(mode: str | None) -> None:
    """Raise where wandb would prompt for a login, which it does even in a thread."""
    import wandb

    default = wandb.setup(wandb.Settings(silent=True)).settings.mode
    online = not {mode or default, default} & {"offline", "dryrun", "disabled"}
    if online and wandb.run is None and not wandb.login(prompt=False, verify=False):
        fix = "set mode to offline and send the run later with `wandb sync`"
        raise UserError(f"there is no login: run `wandb login`, or {fix}")
