"""The workloads of the benchmarks: a model, its data and its recipe, as plain values from which
every framework can build the same."""

from typing import NamedTuple

import numpy as np

from data_loader.digits import digits
from data_loader.loader import random_stream
from data_loader.mnist import mnist
from data_loader.stories import written

STREAMS = {"train": 0, "test": 1}  # the random stream of each set


class Conv(NamedTuple):
    """A layer of a `net`: a convolution, a norm and relu. "up" is a transposed convolution whose
    kernel is its stride."""

    kind: str  # "conv" or "up"
    width: int
    kernel: int
    stride: int = 1
    groups: int = 1
    norm: str = "batch"  # or "group", of 8 groups, "layer", over the channels, or "none"


class Workload(NamedTuple):
    """A model with `args`, trained on images of `shape`, on texts of that length, or on sequences
    of that length and number of features."""

    model: str
    args: dict
    shape: tuple[int, ...]  # (H, W, C), (T,) or (T, F)
    batch_size: int
    lr: float
    epochs: int = 10  # of the whole recipe: the length of the schedule
    # Or "one_cycle": linearly from 0 over the first `warmup` of the steps, then linearly to 0.
    schedule: str = "constant"
    warmup: float = 0.0  # a fraction of all steps
    weight_decay: float = 0.01
    label_smoothing: float = 0.0
    mean: float = 0.0  # by which images in [0, 1] are normalized
    std: float = 1.0
    examples: int | None = None  # the first ones of each set; None: all
    learning: int = 1  # the number of epochs after which all peers must have learned alike
    classes: int = 10  # or the size of the vocabulary
    peers: tuple[str, ...] = ("flax", "equinox", "haiku", "keras", "torch")
    precision: str = "float32"  # or "bfloat16", which only ours, Flax and PyTorch read
    random: bool = False  # whether the data is random numbers, for speed alone

    @property
    def is_text(self):
        return len(self.shape) == 1

    @property
    def unit(self):
        return "tokens" if self.is_text else "images" if len(self.shape) == 3 else "sequences"

    @property
    def units(self):
        """Units in an example."""
        return self.shape[0] if self.is_text else 1


IMAGE, COLOURED = (28, 28, 1), (32, 32, 3)
RESNET = {"widths": (16, 32, 64), "depth": 1}
VIT = {"patch": 4, "dim": 64, "depth": 4, "heads": 4}
MOBILENET = {
    "layers": (
        Conv("conv", 32, 3),
        *(Conv("conv", 32, 3, groups=32), Conv("conv", 32, 1)),
        *(Conv("conv", 32, 3, 2, groups=32), Conv("conv", 64, 1)),
        *(Conv("conv", 64, 3, groups=64), Conv("conv", 64, 1)),
        *(Conv("conv", 64, 3, 2, groups=64), Conv("conv", 128, 1)),
        *(Conv("conv", 128, 3, groups=128), Conv("conv", 128, 1)),
    )
}
GPT = {"dim": 128, "depth": 4, "heads": 4}  # that of nanoGPT's example for a CPU
SHORT = {"examples": 1_024, "learning": 12}
FEW, TEXT = {"peers": ("flax", "torch")}, {"peers": ("flax", "torch"), "classes": 65, "learning": 5}
WORKLOADS = {
    "convnext": Workload(
        "convnext", {"dims": (8, 16, 32)}, IMAGE, 512, 0.003, examples=5_120, learning=6
    ),
    "resnet": Workload("resnet", RESNET, COLOURED, 128, 0.003, **SHORT),
    "vit": Workload("vit", VIT, IMAGE, 128, 0.001, **SHORT),
    "mlp": Workload("mlp", {"dims": (128, 128)}, IMAGE, 128, 0.001, examples=28_672, learning=6),
    "mobilenet_v1": Workload("net", MOBILENET, COLOURED, 128, 0.003, **SHORT, **FEW),
    "gpt": Workload("gpt", GPT, (128,), 32, 0.001, examples=32 * 8, **TEXT),
    "gpt_short": Workload("gpt", GPT, (64,), 12, 0.001, examples=12 * 40, **TEXT),
}

# For GPUs: {model: (args, shape, batch size, classes)}, and the same models at the size of a test.
GPU_SIZES = {
    "large": {
        "resnet": ({"widths": (64, 128, 256), "depth": 3}, COLOURED, 512, 10),
        "convnext": ({"dims": (96, 192, 384), "depths": (3, 3, 9)}, (64, 64, 3), 256, 10),
        "vit": ({"patch": 4, "dim": 384, "depth": 12, "heads": 6}, COLOURED, 512, 10),
        "gpt": ({"dim": 512, "depth": 8, "heads": 8}, (512,), 32, 8192),
    },
    "tiny": {
        "resnet": ({"widths": (4, 8), "depth": 1}, (8, 8, 3), 8, 10),
        "convnext": ({"dims": (4, 8), "depths": (1, 1)}, (8, 8, 3), 8, 10),
        "vit": ({"patch": 4, "dim": 8, "depth": 1, "heads": 2}, (8, 8, 3), 8, 10),
        "gpt": ({"dim": 8, "depth": 1, "heads": 2}, (8,), 8, 16),
    },
}


def from_json(value):
    """A Workload from the JSON of its fields, in which tuples are lists."""

    def as_tuples(value):
        if isinstance(value, dict):
            return {name: as_tuples(each) for name, each in value.items()}
        return tuple(map(as_tuples, value)) if isinstance(value, list) else value

    workload = Workload(**as_tuples(value))
    if workload.model == "net":
        layers = tuple(Conv(*layer) for layer in workload.args["layers"])
        workload = workload._replace(args=workload.args | {"layers": layers})
    return workload


def gpu_workload(size, model, precision):
    args, shape, batch, classes = GPU_SIZES[size][model]
    random = {"random": True, "examples": 20 * batch}
    return Workload(
        model, args, shape, batch, 0.001, classes=classes, precision=precision, **random, **FEW
    )


def data_of(workload, folder=None):
    """{"train": (x, y), "test": (x, y)}: MNIST of a folder, or our drawn digits without it; x is
    float32, NHWC. For texts: windows of stories that we write, and the characters that follow."""
    if workload.random:
        return {name: random_data(workload, stream) for name, stream in STREAMS.items()}
    if workload.is_text:
        return {name: windows(workload, stream) for name, stream in STREAMS.items()}
    sets = (mnist(folder) if folder else digits()).load()
    return {
        name: prepared(workload, *sets[name][: workload.examples], stream)
        for name, stream in STREAMS.items()
    }


def random_data(workload, seed):
    random = np.random.default_rng(seed)
    shape = workload.examples, *workload.shape
    if workload.is_text:
        x, y = random.integers(0, workload.classes, (2, *shape), np.int32)
        return x, y
    labels = random.integers(0, workload.classes, workload.examples, np.int32)
    x = random.random(shape, np.float32)
    if workload.args.get("lengths"):  # padded with zeros to one length
        lengths = random.integers(shape[1] // 4, shape[1], workload.examples, endpoint=True)
        x *= (np.arange(shape[1]) < lengths[:, None])[..., None]
    return x, labels


def windows(workload, seed):
    text = "".join(document.text for document in written(seed, workload.examples))
    tokens = np.unique(list(text), return_inverse=True)[1].astype(np.int32)
    length = workload.shape[0]
    starts = length * np.arange(workload.examples)[:, None]
    rows = tokens[starts + np.arange(length + 1)]
    return rows[:, :-1], rows[:, 1:]


def prepared(workload, x, y, stream):
    """Grey images as normalized floats of the workload's shape: centred in a black frame, and each
    multiplied by a random colour."""
    shape = workload.shape
    margins = [new - old for new, old in zip(shape[:2], x.shape[1:3], strict=True)]
    x = np.pad(x, ((0, 0), *((margin // 2, margin - margin // 2) for margin in margins), (0, 0)))
    x = x / np.float32(255)
    if shape[2] > 1:
        colours = random_stream(0, stream).uniform(0.3, 1, (len(x), 1, 1, shape[2]))
        x = x * colours.astype(np.float32)
    return (x - np.float32(workload.mean)) / np.float32(workload.std), y.astype(np.int32)
