"""Samples in tar files: the batches of arrays, labels of every form, damaged files named."""

import io
import os
import tarfile

import numpy as np
import pytest
from PIL import Image

from data_loader.base import Arrays, loaded
from data_loader.digits import draw
from data_loader.loader import batches, epoch_order
from data_loader.webdataset import webdataset
from utils import UserError

pytestmark = pytest.mark.contract

X, Y = draw(0, 60)


def png(image):
    file = io.BytesIO()
    Image.fromarray(image[..., 0]).save(file, "PNG")
    return file.getvalue()


def write_tar(path, members, **options):
    """A tar file of (name, bytes)."""
    with tarfile.open(path, "w", **options) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def members(start, stop, **others):
    """The members of some digits; `others` are made of the label."""
    for i in range(start, stop):
        yield f"digits/{i:03}.png", png(X[i])
        for ending, of in (others or {"cls": str}).items():
            yield f"digits/{i:03}.{ending}", of(int(Y[i])).encode()


@pytest.fixture
def shards(tmp_path):
    for i in range(3):
        write_tar(tmp_path / f"train-{i:03}.tar", members(20 * i, 20 * i + 20))
    return str(tmp_path / "train-{000..002}.tar")


@pytest.mark.parametrize("memory_mb", [0, 1])
def test_batches_equal_those_of_arrays(shards, memory_mb):
    data = webdataset(shards, num_classes=10, color="gray", memory_mb=memory_mb)
    assert data.sizes == {"train": 60}
    dataset = loaded(data)["train"]
    assert (type(dataset) is Arrays) is (memory_mb == 1)
    order, _ = epoch_order(60, 16, seed=3, epoch=2, shuffle=True)
    read, expected = (batches(each, order, start=1) for each in (dataset, Arrays(X, Y)))
    for (x, y), (expected_x, expected_y) in zip(read, expected, strict=True):
        np.testing.assert_array_equal(x, expected_x, strict=True)
        np.testing.assert_array_equal(y, expected_y.astype(np.int32), strict=True)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_of_every_kind_and_other_members(tmp_path, format):
    long = "ä/" * 90 + "photo"
    with tarfile.open(tmp_path / "a.tar", "w", format=format) as archive:
        folder, link = tarfile.TarInfo("digits"), tarfile.TarInfo("digits/0.cls")
        folder.type, link.type, link.linkname = tarfile.DIRTYPE, tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(folder)
        archive.addfile(link)
        name = long if format != tarfile.USTAR_FORMAT else "digits/photo"
        samples = [(f"{name}.seg.png", b"?"), (f"{name}.JPG", png(X[0])), (f"{name}.cls", b"3\n")]
        for member, data in [("README", b"x"), ("digits/._a.cls", b"x"), *samples]:
            info = tarfile.TarInfo(member)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    data = webdataset(str(tmp_path / "a.tar"), x="jpg;JPG", num_classes=10, image_size=(14, 14))
    x, y = data.load()["train"][0]
    assert data.sizes == {"train": 1} and x.shape == (14, 14, 3) and y == 3


def test_labels_of_json_by_name_as_numbers_and_arrays_of_numbers(tmp_path):
    file = io.BytesIO()
    np.save(file, np.float32([1, 2, 3]))
    path = tmp_path / "a.tar"

    def read(text, **arguments):
        write_tar(path, [("a.npy", file.getvalue()), ("a.json", text.encode())])
        return loaded(webdataset(str(path), x="npy", y="json", **arguments))["train"][0]

    x, y = read('{"animal": {"name": "dog"}}', field="animal.name", classes=("cat", "dog"))
    np.testing.assert_array_equal(x, np.float32([1, 2, 3]))
    assert y == 1 and y.dtype == np.int32
    assert read("7", num_classes=8)[1] == 7
    _, y = read('{"size": 2.5}', field="size")
    assert y == 2.5 and y.dtype == np.float32
    for text, arguments, message in (
        ("{}", {"field": "animal"}, r"record 0 \(a\): its .json is not JSON with a key 'animal'"),
        ('{"a": 1}', {}, r"its .json holds .*'a': 1.*, which is not a label; set `field`"),
        ('{"a": "cow"}', {"field": "a"}, r"holds 'cow', which is not a label; set `classes`"),
        ('{"a": "cow"}', {"field": "a", "classes": ("cat",)}, r"not a label; allowed: cat"),
        ("9", {"num_classes": 3}, r"a\.tar: record 0 \(a\): .*label 9 .* the 3 classes"),
    ):
        with pytest.raises(UserError, match=message):
            read(text, **arguments)


def damaged(data):
    """{name: (the bytes of a damaged tar file, the error)}"""
    second = 512 * 6  # where the second sample begins, after 512 and 1536, 512 and 512 bytes
    return {
        "cut": (data[: second + 520], "not a whole tar file: after 3 members: unexpected end"),
        "header": (data[:second] + b"9" * 512 + data[second + 512 :], "after 2 members: a damaged"),
        "zipped": (b"\x1f\x8b" + data, "unpack it with gunzip"),
        "not": (b"x" * 600, "neither an ArrayRecord file nor a TFRecord file nor a tar file"),
    }


def test_damaged_and_unsuitable_files_are_errors_that_name_them(tmp_path):
    def write(name, *arguments, **options):
        write_tar(tmp_path / name, *arguments, **options)
        return (tmp_path / name).read_bytes()

    data = write("whole.tar", [("a.png", bytes(1500)), ("a.cls", b"1"), *members(0, 2)])
    for name, (content, message) in damaged(data).items():
        (tmp_path / f"{name}.tar").write_bytes(content)
        with pytest.raises(UserError, match=rf"{name}\.tar: .*{message}"):
            webdataset(str(tmp_path / f"{name}.tar"), num_classes=10)
    with pytest.raises(UserError, match=r"whole\.tar: record 0 \(a\): its .png is not a readable"):
        webdataset(str(tmp_path / "whole.tar"), num_classes=10)
    write("apart.tar", [(f"{i}.{e}", png(X[i])) for e in ("png", "cls") for i in range(2)])
    with pytest.raises(UserError, match=r"\(0\): has no member .cls; it has .png. .*--sort=name"):
        webdataset(str(tmp_path / "apart.tar"), num_classes=10)
    write("twice.tar", [("0.cls", b"1"), ("0.cls", b"1")])
    with pytest.raises(UserError, match=r"the sample '0' has two members .cls"):
        webdataset(str(tmp_path / "twice.tar"), num_classes=10)
    with pytest.raises(UserError, match=r"train-001\.tar: no such file"):
        (tmp_path / "train-000.tar").write_bytes(data)
        webdataset(str(tmp_path / "train-{000..001}.tar"), num_classes=10)
    with pytest.raises(UserError, match=r"is a folder; name the files in it, as .*/train-000\.tar"):
        webdataset(str(tmp_path))
    with pytest.raises(UserError, match=r"\{3..1\} is not a range of up to 100000 files"):
        webdataset("x-{3..1}.tar")
    # A header that claims to be huge is not read; the file has a hole.
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 2**40
    (tmp_path / "huge.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT))
    os.truncate(tmp_path / "huge.tar", 2**40)
    with pytest.raises(UserError, match=r"huge\.tar: .*after 0 members: a header of 1024.0 GiB"):
        webdataset(str(tmp_path / "huge.tar"))


@pytest.mark.slow
def test_a_run_resumes_to_the_same_bits(shards, tmp_path):
    import jax

    from model.mlp import mlp
    from training.fit import fit
    from training.optimizers import adamw
    from training.preprocess import to_unit

    train = webdataset(shards, num_classes=10, color="gray", memory_mb=0).load()["train"]
    options = {"preprocess": [to_unit], "optimizer": adamw(lr=0.01), "epochs": 3, "batch_size": 16}
    model = mlp((28, 28, 1), 10, dims=(8,))
    whole = fit(model, train, folder=tmp_path / "whole", **options)
    part = fit(model, train, folder=tmp_path / "part", max_steps=6, **options)
    assert (whole.step, part.step) == (12, 6)
    part = fit(model, train, folder=tmp_path / "part", resume=True, **options)
    assert part.step == 12
    for one, other in zip(*map(jax.tree.leaves, (whole.params, part.params)), strict=True):
        np.testing.assert_array_equal(one, other)
