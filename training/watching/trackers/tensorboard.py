"""Event files for TensorBoard, in the run's folder: tensorboard --logdir saved"""

import os
import socket
from struct import pack, unpack
from time import time

from training.base import Tracker
from training.watching.trackers.common import counts_and_edges, flattened, needs

COLOURS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}  # what TensorBoard calls a PNG file's colour types


def tensorboard() -> Tracker:
    """Write scalars, pictures, histograms and the config for TensorBoard; TensorFlow is not needed."""
    needs("tensorboard", tensorboardX="tensorboardX")
    return TensorBoard()


class TensorBoard:
    """Writes an event file of its own each time the run is gone on with, since the last may end in a torn record."""

    def start(self, about):
        from tensorboardX.summary import hparams

        name = f"events.out.tfevents.{time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.file = open(
            about.folder / name, "ab", buffering=0
        )  # so that what was written outlives the process  # noqa: SIM115
        self.last, self.step = {}, about.step
        self.write(0, file_version="brain.Event:2")
        self.void_from(about.step + 1 if about.step else 0)
        # No list of parameters and metrics: TensorBoard would take one run's for those of all.
        config = {
            name: value for name, value in flattened(about.config).items() if value is not None
        }
        _, self.begin, self.end = hparams(config, {})
        self.write(about.step, summary=self.begin)

    def scalars(self, step, values):
        self.last |= values
        self.step = step
        self.summary(
            step, *({"tag": name, "simple_value": value} for name, value in values.items())
        )

    def image(self, step, name, png):
        width, height, colours = *unpack(">II", png[16:24]), COLOURS[png[25]]
        picture = {
            "height": height,
            "width": width,
            "colorspace": colours,
            "encoded_image_string": png,
        }
        self.summary(step, {"tag": name, "image": picture})

    def histogram(self, step, name, values):
        if (histogram := counts_and_edges(values)) is not None:
            counts, edges = histogram
            self.summary(step, {"tag": name, "histo": described(values, counts, edges)})

    def back_to(self, step):
        self.last, self.step = {}, step
        self.void_from(step + 1)

    def finish(self, metrics):
        self.scalars(
            self.step,
            {name: value for name, value in metrics.items() if self.last.get(name) != value},
        )
        self.write(self.step, summary=self.end)
        self.file.close()

    def summary(self, step, *values):
        """Write values of a step."""
        from tensorboardX.proto.summary_pb2 import Summary

        self.write(step, summary=Summary(value=[Summary.Value(**value) for value in values]))

    def void_from(self, step):
        """Let readers forget what was written for this step and later ones."""
        from tensorboardX.proto.event_pb2 import SessionLog

        self.write(step, session_log=SessionLog(status=SessionLog.START))

    def write(self, step, **what):
        """Append a record: length, event, and a checksum of each."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import masked_crc32c

        event = Event(wall_time=time(), step=step, **what).SerializeToString()
        length = pack("<Q", len(event))
        self.file.write(
            b"".join(
                [length, pack("<I", masked_crc32c(length)), event, pack("<I", masked_crc32c(event))]
            )
        )


def described(values, counts, edges):
    """A histogram as TensorBoard has it; buckets are told by their upper edges."""
    import numpy as np

    finite = values[np.isfinite(values)].astype(np.float64)
    moments = {"num": finite.size, "sum": finite.sum(), "sum_squares": finite @ finite}
    return {
        "min": finite.min(),
        "max": finite.max(),
        **moments,
        "bucket_limit": edges[1:],
        "bucket": counts,
    }
