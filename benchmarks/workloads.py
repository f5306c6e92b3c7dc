"""What is trained side by side: a model, its data and its recipe, told so that every framework can build the same."""

from typing import NamedTuple

import numpy as np

from data_loader.digits import digits
from data_loader.loader import random_stream
from data_loader.mnist import mnist

COLOURS = {"train": 0, "test": 1}  # the random stream of each set's colours


class Workload(NamedTuple):
    """A model of model/<model>.py with `args`, trained on images of `shape`, ten classes, in float32; by AdamW, or by Muon and,
    at a rate of its own, AdamW for what is no map between features, and for the last layer."""

    name: str
    model: str
    args: dict
    shape: tuple[int, int, int]  # (H, W, C)
    batch_size: int
    lr: float
    epochs: int = 10  # of a whole recipe: how long a schedule lasts
    schedule: str = "constant"  # or "one_cycle": up from 0 over the share `warmup` of the steps, then down to 0, both straight
    warmup: float = 0.0
    weight_decay: float = 0.01
    optimizer: str = "adamw"  # or "muon"
    adamw_lr: float = 0.0  # beside Muon's
    label_smoothing: float = 0.0
    examples: int | None = None  # of each set, the first ones; None: all
    learning: int = 1  # epochs after which the peers must have learned alike


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "convnext",
            "convnext",
            {"dims": (8, 16, 32)},
            (28, 28, 1),
            512,
            0.003,
            examples=5_120,
            learning=6,
        ),
        Workload(
            "resnet",
            "resnet",
            {"widths": (16, 32, 64), "depth": 1},
            (32, 32, 3),
            128,
            0.003,
            examples=1_024,
            learning=12,
        ),
        Workload(
            "vit",
            "vit",
            {"patch": 4, "dim": 64, "depth": 4, "heads": 4},
            (28, 28, 1),
            128,
            0.001,
            examples=1_024,
            learning=12,
        ),
        Workload(
            "mlp", "mlp", {"dims": (128, 128)}, (28, 28, 1), 128, 0.001, examples=28_672, learning=6
        ),
    )
}


def data_for(workload, dir=None):
    """{"train": (x, y), "test": (x, y)}: MNIST of the folder `dir`, else our drawn digits; x is float32 in [0, 1], NHWC."""
    sets = (mnist(dir) if dir else digits()).load()
    return {
        name: prepared(*sets[name][: workload.examples], workload.shape, stream)
        for name, stream in COLOURS.items()
    }


def prepared(x, y, shape, stream):
    """Grey images as floats of another shape: in the middle of a black frame, each in a colour of its own."""
    spaces = [wanted - size for wanted, size in zip(shape[:2], x.shape[1:3], strict=True)]
    x = np.pad(x, ((0, 0), *((space // 2, space - space // 2) for space in spaces), (0, 0)))
    x = x / np.float32(255)
    if shape[2] > 1:
        x = x * random_stream(0, stream).uniform(0.3, 1, (len(x), 1, 1, shape[2])).astype(
            np.float32
        )
    return x, y.astype(np.int32)
