"""Mutants of data files: of their bytes, and of what they hold under a correct checksum."""

import io
import json
import random
import sys
import tarfile
import zipfile

import numpy as np
from PIL import Image

import train
from data_loader import cifar10, grain
from data_loader.base import loaded
from data_loader.digits import draw
from data_loader.records import numpy_record
from inference import predict
from tests.fuzz import texts
from tests.fuzz.bench import Command, of_train
from tests.fuzz.configs import idx
from tests.fuzz.mutants import mutated_bytes
from tests.processes import captured
from utils import RunError, UserError
from wiring.build import build

CONFIG = {
    "title": "Fuzzed",
    "model": {"name": "mlp", "args": {"dims": [4]}},
    "loader": {"batch_size": 8, "device_budget_mb": 0},
    "loss": "cross_entropy",
    "preprocess": ["to_unit"],
    "optimizer": {"name": "adamw", "args": {"lr": 0.01}},
    "logging": {"report": False},
    "checkpoint": {"monitor": None},
}
TF = {"name": "tf_example", "args": {"shape": [28, 28, 1]}}
ENCODED = {"name": "tf_example", "args": {"image_size": [28, 28], "color": "gray"}}
FEW_CLASSES = {"num_classes": 10, "workers": 0}
SOURCES = {
    "idx": {"name": "mnist", "args": {"dir": "idx"}},
    "npz": {"name": "arrays", "args": {"train": "a.npz", "num_classes": 10}},
    "npy": {"name": "arrays", "args": {"train": "npy"}},
    "folder": {"name": "folder", "args": {"dir": "images", "image_size": [8, 8]}},
    "tfrecord": {"name": "grain", "args": FEW_CLASSES | {"train": "a.tfrecord", "parse": TF}},
    "images": {"name": "grain", "args": FEW_CLASSES | {"train": "i.tfrecord", "parse": ENCODED}},
    "array_record": {"name": "grain", "args": FEW_CLASSES | {"train": "a.array_record"}},
    "shard": {"name": "webdataset", "args": {"train": "a.tar", "num_classes": 10, "color": "gray"}},
    "cifar": {"name": "cifar10", "args": {"dir": "cifar"}},
    "tar": {"name": "cifar10", "args": {"dir": "tar"}},
}
BASES = (*SOURCES, *texts.SOURCES)
FORMATS = ("png", "jpeg", "gif", "bmp", "webp", "tiff", "ppm")
FEW = 4  # records of a file of CIFAR-10, in place of 10,000


def prepare(folder, work):
    """Nothing is needed but what each mutant writes."""


def examples():
    x, y = draw(0, 16)
    return x, y


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def image(array, form):
    file = io.BytesIO()
    Image.fromarray(array[..., 0]).convert("RGB").save(file, form)
    return file.getvalue()


def encoded(number):
    """A number as a protocol buffer has it: seven bits per byte, the lowest first."""
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + encoded(rest) if rest else bytes([low])


def field(number, data):
    """A field of bytes of a protocol buffer."""
    return bytes([number << 3 | 2]) + encoded(len(data)) + data


def tf_record(features, rng=None):
    """A record of a TFRecord file, with correct checksums; with `rng`, of a mutant."""
    pairs = (field(1, field(1, name.encode()) + field(2, value)) for name, value in features)
    data = field(1, b"".join(pairs))
    data = mutated_bytes(data, rng) if rng else data
    head = len(data).to_bytes(8, "little")
    return head + grain._checksum(head) + data + grain._checksum(data)


def tf_records(values, labels, rng):
    """The bytes of a TFRecord file, of which `rng` damages one record."""
    bad = rng and rng.randrange(len(values))
    return b"".join(
        tf_record(
            [("image", field(1, field(1, value))), ("label", field(3, field(1, encoded(int(y)))))],
            rng if i == bad else None,
        )
        for i, (value, y) in enumerate(zip(values, labels, strict=True))
    )


def zipped(members, rng):
    """A .npz file, of which `rng` damages one member."""
    file, bad = io.BytesIO(), rng and rng.choice(list(members))
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, mutated_bytes(data, rng) if name == bad else data)
    return file.getvalue()


def write_array_records(path, records, rng):
    from array_record.python.array_record_module import ArrayRecordWriter

    bad = rng and rng.randrange(len(records))
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for i, record in enumerate(records):
        writer.write(mutated_bytes(record, rng) if i == bad else record)
    writer.close()


def tar_members(rng):
    """[(TarInfo, bytes)] of the archive of CIFAR-10, odd ones with `rng`."""
    names = [name for files in cifar10.FILES.values() for name in files]
    for name in names:
        info, data = tarfile.TarInfo(f"{cifar10.FOLDER}/{name}"), bytes(FEW * cifar10.RECORD)
        if rng and rng.random() < 0.5:
            kinds = (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE)
            info.type = rng.choice((*kinds, tarfile.CHRTYPE, b"Z"))
            info.linkname = rng.choice((info.name, "../../etc/passwd", "/etc/passwd", "x"))
            data = b""
        info.size = len(data)
        yield info, data


def tar(rng):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for info, data in tar_members(rng):
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def shard(x, y):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for i, (each, label) in enumerate(zip(x, y, strict=True)):
            for ending, data in (("png", image(each, "png")), ("cls", str(label).encode())):
                info = tarfile.TarInfo(f"{i}.{ending}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def written(base, rng, work):
    """Write the files of a source, and return those whose bytes may be damaged. With `rng`, one is
    damaged within its checksums."""
    (x, y), files = examples(), {}
    if base in texts.SOURCES:
        files = texts.files(base, rng)
    elif base == "idx":
        for name, rows in (("train", slice(0, 12)), ("t10k", slice(12, 16))):
            files[f"idx/{name}-images-idx3-ubyte"] = idx(x[rows, ..., 0])
            files[f"idx/{name}-labels-idx1-ubyte"] = idx(y[rows])
    elif base == "npz":
        files["a.npz"] = zipped({"x.npy": npy(x), "y.npy": npy(y)}, rng)
    elif base == "npy":
        files |= {"npy/x.npy": npy(x), "npy/y.npy": npy(y)}
    elif base == "folder":
        for i, form in enumerate(FORMATS):
            files[f"images/{i % 2}/{i}.{form}"] = image(x[i], form)
    elif base == "tfrecord":
        files["a.tfrecord"] = tf_records([each.tobytes() for each in x], y, rng)
    elif base == "images":
        forms = [FORMATS[i % len(FORMATS)] for i in range(len(x))]
        values = [image(each, form) for each, form in zip(x, forms, strict=True)]
        files["i.tfrecord"] = tf_records(values, y, rng)
    elif base == "array_record":
        records = [numpy_record(pair) for pair in zip(x, y, strict=True)]
        write_array_records(work / "a.array_record", records, rng)
        files["a.array_record"] = (work / "a.array_record").read_bytes()
    elif base == "shard":
        files["a.tar"] = shard(x, y)
    elif base == "cifar":
        for name in [name for names in cifar10.FILES.values() for name in names]:
            files[f"cifar/{name}"] = bytes(FEW * cifar10.RECORD)
    else:
        files[f"tar/{cifar10.ARCHIVE}"] = tar(rng)
    for name, data in files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_bytes(data)
    return list(files)


def commands(base, seed, work):
    """Write a mutant of a data file, and yield the commands that read it."""
    rng, cifar10.PER_FILE = random.Random(f"{base} {seed}"), FEW
    within = rng.random() < 0.4
    names = written(base, rng if within else None, work)
    name = rng.choice(names)
    if not within or base in ("idx", "npy", "folder", "shard", "cifar", "tokens_npy"):
        (work / name).write_bytes(mutated_bytes((work / name).read_bytes(), rng))
    config = CONFIG | (texts.SOURCES.get(base) or {"data": SOURCES[base]})
    (work / "mutant.json").write_text(json.dumps(config))
    yield Command(f"read, {name} damaged", lambda: read(config), quick=True)
    if seed % 4 == 0:
        line = ["-c", "mutant.json", "--fast-dev-run"]
        yield of_train(f"--fast-dev-run, {name} damaged", line)
    if base in ("npz", "folder") and seed % 2 == 0:
        model = trained(work)
        inputs = ["a.npz"] if base == "npz" else [name]
        yield Command(f"predict, {name} damaged", lambda: predict.main([model, *inputs]))


def trained(work):
    """A checkpoint that takes the examples."""
    size = [28, 28] if (work / "a.npz").exists() else [8, 8]
    x = np.zeros((8, *size, 1 if size[0] == 28 else 3), np.uint8)
    np.savez(work / "good.npz", x=x, y=np.arange(8))
    config = CONFIG | {"data": {"name": "arrays", "args": {"train": "good.npz", "num_classes": 10}}}
    (work / "good.json").write_text(json.dumps(config | {"run_name": "good"}))
    captured(work, lambda: train.main(["-c", "good.json", "training.epochs=1"]))
    return "saved/Fuzzed/good/checkpoint-epoch_1.params"


def read(config):
    """Read every example, as a run does."""
    try:
        parts = build(config, "mutant.json")
        for dataset in loaded(parts.data, parts.loader).values():
            for i in range(len(dataset)):
                dataset[i]
    except (UserError, RunError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0
