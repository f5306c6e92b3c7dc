"""Event files for TensorBoard in the run's folder: tensorboard --logdir saved"""

import os
import re
import socket
from struct import pack, unpack
from time import time
from typing import Any

import numpy as np
from jaxtyping import Shaped

from training.base import Tracker
from training.watching.publish import About
from training.watching.trackers.common import counts_and_edges, flattened, needs

COLOUR_SPACES = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}  # {colour type of a PNG file: TensorBoard's number}


def tensorboard() -> Tracker:
    """Write scalars, pictures, histograms and the config for TensorBoard, without TensorFlow."""
    needs("tensorboard", tensorboardX="tensorboardX")
    return TensorBoard()


class TensorBoard:
    """Starts a new event file when a run resumes, since the last may end in half a record."""

    def start(self, about: About) -> None:
        from tensorboardX.summary import hparams

        name = f"events.out.tfevents.{time():.6f}.{socket.gethostname()}.{os.getpid()}"
        # Without a buffer, what was written outlives the process.
        self.file = open(about.folder / name, "xb", buffering=0)  # noqa: SIM115
        self.last, self.step = {}, about.step
        self.write(0, file_version="brain.Event:2")
        self.void_from(about.step + 1 if about.step else 0)
        flat = flattened(about.config)
        config = {name: value for name, value in flat.items() if value is not None}
        # The list of parameters and metrics is left out: TensorBoard would use one run's for all.
        _, self.begin, self.end = hparams(config, {})
        self.write(about.step, summary=self.begin)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self.last |= values
        self.step = step
        self.summary(step, *({"tag": name, "simple_value": v} for name, v in values.items()))

    def image(self, step: int, name: str, png: bytes) -> None:
        width, height = unpack(">II", png[16:24])
        picture = {"height": height, "width": width, "colorspace": COLOUR_SPACES[png[25]]}
        self.summary(step, {"tag": name, "image": picture | {"encoded_image_string": png}})

    def histogram(self, step: int, name: str, values: Shaped[np.ndarray, "size"]) -> None:
        if (histogram := counts_and_edges(values)) is None:
            return
        counts, edges = histogram
        finite = values[np.isfinite(values)].astype(np.float64)
        fields = {"min": finite.min(), "max": finite.max(), "num": finite.size}
        fields |= {"sum": finite.sum(), "sum_squares": finite @ finite}
        fields |= {"bucket": counts, "bucket_limit": edges[1:]}  # only the upper edges
        self.summary(step, {"tag": name, "histo": fields})

    def text(self, step: int, name: str, text: str) -> None:
        from tensorboardX.summary import text as text_summary

        # TensorBoard reads it as Markdown, in which an indented line is shown as it is.
        self.write(step, summary=text_summary(name, re.sub("^", "    ", text, flags=re.M)))

    def back_to(self, step: int) -> None:
        self.last, self.step = {}, step
        self.void_from(step + 1)

    def finish(self, metrics: dict[str, float]) -> None:
        new = {name: value for name, value in metrics.items() if self.last.get(name) != value}
        self.scalars(self.step, new)
        self.write(self.step, summary=self.end)
        self.file.close()

    def summary(self, step: int, *values: dict[str, Any]) -> None:
        """Write values of a step."""
        from tensorboardX.proto.summary_pb2 import (  # made by protobuf
            Summary,  # pyright: ignore[reportAttributeAccessIssue]
        )

        self.write(step, summary=Summary(value=[Summary.Value(**value) for value in values]))

    def void_from(self, step: int) -> None:
        """Make readers discard what was written for this step and later ones."""
        from tensorboardX.proto.event_pb2 import (  # made by protobuf
            SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
        )

        self.write(step, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, **content: Any) -> None:
        """Append a record: the length and the event, each followed by its checksum."""
        from tensorboardX.proto.event_pb2 import (  # made by protobuf
            Event,  # pyright: ignore[reportAttributeAccessIssue]
        )
        from tensorboardX.record_writer import masked_crc32c

        event = Event(wall_time=time(), step=step, **content).SerializeToString()
        parts = pack("<Q", len(event)), event
        self.file.write(b"".join(part + pack("<I", masked_crc32c(part)) for part in parts))
