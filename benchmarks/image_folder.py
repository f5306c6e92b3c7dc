"""How long training waits for an image folder: ours beside PyTorch's DataLoader with two workers.
Both train the ResNet of benchmarks/training.py on the same JPEG files; whole processes, in turns.

python -m benchmarks.image_folder [--images 5000] [--size 64] [--epochs 4] [--rounds 3] [--dir DIR]
DIR holds the JPEG files; by default they are made, and deleted
"""

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness import in_process, take_turns
from benchmarks.results import arguments, markdown, record, spread
from benchmarks.workloads import RESNET
from data_loader.folder import folder
from data_loader.loader import random_stream

OURS = "Rawtree"
SIDES = {
    OURS: ("train_ours",),
    "PyTorch, DataLoader": ("train_torch", False),
    "PyTorch, DataLoader, draft mode": ("train_torch", True),
}
AT_MOST = 0.3  # of our time may be waiting
SIDE, CLASSES, BATCH, WORKERS = (500, 375), 10, 128, 2  # SIDE: ImageNet's average
LR = 0.003


def main():
    args = arguments("image_folder", __doc__, images=5000, size=64, epochs=4, rounds=3, dir="")
    with tempfile.TemporaryDirectory() as made:
        if not args.dir:
            make_images(made, args.images)
        epochs = measured(args.dir or made, args.size, args.epochs, args.rounds)
    record(args, "Image folder", *blocks_of(epochs, args.size))


def measured(root, size, epochs, rounds):
    """{side: [the epochs of each round: [seconds, seconds of them waited, images], ...]}."""
    calls = {
        side: partial(
            in_process, f"benchmarks.image_folder:{train}", root, size, epochs, *draft, timeout=3600
        )
        for side, (train, *draft) in SIDES.items()
    }
    return take_turns(calls, rounds)


def blocks_of(epochs, size):
    """Images per second and the share of the time waited, in the first epoch and in the others."""
    rows = []
    for side, rounds in epochs.items():
        cells = []
        for part in (slice(1), slice(1, None)):
            sums = [np.sum(each[part], 0) for each in rounds if each[part]]
            cells.append(spread([images / seconds for seconds, _, images in sums]))
            cells.append(spread([100 * waited / seconds for seconds, waited, _ in sums]))
        rows.append([side, *cells])
    sums = [np.sum(each, 0) for each in epochs[OURS]]
    share = statistics.median(waited / seconds for seconds, waited, _ in sums)
    head = ["", "epoch 1: images/s", "waits, %", "later epochs: images/s", "waits, %"]
    reached = "reached" if share < AT_MOST else "**not reached**"
    result = (
        f"Over all epochs ours waits for data {100 * share:.1f} % of the time; target: under "
        f"{100 * AT_MOST:.0f} %, {reached}. JPEG files of {SIDE[0]} x {SIDE[1]} pixels, resized to "
        f"{size} x {size}; ResNet {RESNET}, batch {BATCH}; PyTorch channels last, {WORKERS} "
        "workers that are kept. Compiling is left out."
    )
    return markdown(head, rows), result


def make_images(root, count):
    """So many JPEG files with the detail of photographs, in a folder for each class."""
    from PIL import Image

    for i in range(count):
        random, label = random_stream(0, i), i % CLASSES
        blobs = random.integers(0, 256, (24, 32, 3), np.uint8)
        blobs[:, :, label % 3] //= 1 + label // 3
        image = np.asarray(Image.fromarray(blobs).resize(SIDE, Image.Resampling.BICUBIC), np.int16)
        noise = random.integers(-8, 9, image.shape, np.int16)
        path = Path(root) / "train" / f"class{label}" / f"{i:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image + noise).clip(0, 255).astype(np.uint8)).save(path, quality=85)


def train_ours(root, size, epochs):
    """[[seconds, seconds of them waited, images], ...] of each epoch, without compiling."""
    from model.resnet import resnet
    from training.fit import fit
    from training.optimizers import adamw
    from training.preprocess import to_unit

    data = folder(root, (size, size))
    run = fit(
        resnet((size, size, 3), CLASSES, **RESNET),
        data.load()["train"],
        optimizer=adamw(LR),
        preprocess=[to_unit],
        epochs=epochs,
        batch_size=BATCH,
        eval_every=0,
    )
    images = data.sizes["train"]
    seconds = [images / row["examples_per_second"] for row in run.history]
    return [[s, s * row["waiting"], images] for s, row in zip(seconds, run.history, strict=True)]


class Files:
    """The files as a dataset of PyTorch, decoded as torchvision's ImageFolder and Resize do;
    `draft` uses JPEG's smaller sizes, as ours does."""

    def __init__(self, root, size, draft):
        self.files = folder(root, (size, size), cache_mb=0).load()["train"].files
        self.size, self.draft = size, draft

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        import torch
        from PIL import Image

        path, label = self.files[index]
        with Image.open(path) as image:
            if self.draft:
                image.draft(None, (2 * self.size, 2 * self.size))
            image = image.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), label


def train_torch(root, size, epochs, draft):
    """As train_ours, with PyTorch."""
    import torch
    from torch.utils.data import DataLoader

    from benchmarks.peers.torch import resnet

    torch.manual_seed(0)
    model = resnet((size, size, 3), **RESNET).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), LR, fused=True)
    options = {"shuffle": True, "num_workers": WORKERS, "persistent_workers": True}
    loader, rows = DataLoader(Files(root, size, draft), BATCH, **options), []
    for _ in range(epochs):
        start, waited, batches = time.perf_counter(), 0.0, iter(loader)
        while True:
            before = time.perf_counter()
            x, y = next(batches, (None, None))
            waited += time.perf_counter() - before
            if x is None:
                break
            x = x.to(memory_format=torch.channels_last) / 255
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        rows.append([time.perf_counter() - start, waited, len(loader.dataset)])
    return rows


if __name__ == "__main__":
    main()
