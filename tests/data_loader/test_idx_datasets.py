"""MNIST and Fashion-MNIST: read or downloaded, and replaced by a stand-in only if requested."""

import gzip
import hashlib
import os
import time

import numpy as np
import pytest

from data_loader import digits, mnist
from utils import RunError, UserError

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


@pytest.fixture
def serving(mirror, monkeypatch, idx_files):
    """Two mirrors of MNIST: one without files, and one with the small files."""
    files, _ = idx_files
    monkeypatch.setattr(mnist, "MIRRORS", (mirror.url + "empty/", mirror.url))
    monkeypatch.setattr(
        mnist, "DIGESTS", {file: hashlib.md5(data).hexdigest() for file, data in files.items()}
    )
    mirror.pages |= {f"/{file}.gz": gzip.compress(data) for file, data in files.items()}
    return mirror


@pytest.fixture
def offline(monkeypatch, mirror):
    """Mirrors without files, and a stand-in of a few images."""
    monkeypatch.setattr(mnist, "MIRRORS", (mirror.url + "a/", mirror.url + "b/"))
    monkeypatch.setattr(mnist, "digits", lambda: digits.digits(train_size=50, test_size=20))
    return mirror


def check(sets, arrays):
    files = {"train": (TRAIN_IMAGES, TRAIN_LABELS), "test": (TEST_IMAGES, TEST_LABELS)}
    for key, (images, labels) in files.items():
        x, y = sets[key].arrays
        assert x.dtype == np.uint8 and y.dtype == np.int32
        assert x.shape == (len(arrays[images]), 28, 28, 1)
        assert (x[..., 0] == arrays[images]).all() and (y == arrays[labels]).all()


@pytest.mark.parametrize("factory", [mnist.mnist, mnist.fashion_mnist])
def test_sizes_come_from_the_headers_of_local_files(factory, idx_folder, idx_files):
    data = factory(str(idx_folder))
    assert data.sizes == {"train": 30, "test": 20} and data.num_classes == 10
    x, y = data.example
    assert x.shape == (28, 28, 1) and x.dtype == np.uint8 and y.shape == () and y.dtype == np.int32
    check(data.load(), idx_files[1])


def test_files_in_the_subfolder_mnist_are_found(idx_folder, idx_files):
    idx_folder.rename(idx_folder.parent / "mnist")
    check(mnist.mnist(str(idx_folder.parent)).load(), idx_files[1])


def test_the_factory_downloads_nothing_and_load_downloads_once(serving, tmp_path, idx_files):
    data = mnist.mnist(tmp_path / "data")
    assert data.sizes == {"train": 60_000, "test": 10_000} and serving.requests == []
    check(data.load(), idx_files[1])
    assert len(serving.requests) == 8 and len(list((tmp_path / "data" / "mnist").iterdir())) == 4
    check(data.load(), idx_files[1])
    assert len(serving.requests) == 8


def test_the_error_when_offline_names_files_folders_and_mirrors(offline, tmp_path):
    data = mnist.mnist(str(tmp_path / "nothing"))
    start = time.monotonic()
    with pytest.raises(RunError) as caught:
        data.load()
    assert time.monotonic() - start < 15
    folder, mirrors = f"{tmp_path}/nothing/mnist", (offline.url + "a/", offline.url + "b/")
    for fragment in (TRAIN_IMAGES, folder, *mirrors, "404"):
        assert fragment in str(caught.value)
    assert not (tmp_path / "nothing").exists()


def test_the_stand_in_is_announced_by_a_warning_and_recorded(offline, tmp_path, warnings_seen):
    sets = mnist.mnist(str(tmp_path), offline="digits").load()
    assert {key: len(dataset) for key, dataset in sets.items()} == {"train": 50, "test": 20}
    for dataset in sets.values():
        assert dataset.source.startswith("digits (stand-in for mnist: no files in")
    (warning,) = warnings_seen
    assert "NOT MNIST" in warning and offline.url in warning and len(warning.splitlines()) > 4


def test_no_stand_in_if_the_files_exist(offline, idx_folder, idx_files, warnings_seen):
    sets = mnist.mnist(str(idx_folder), offline="digits").load()
    check(sets, idx_files[1])
    assert sets["train"].source == "mnist" and warnings_seen == []


def test_no_stand_in_if_a_mirror_returns_other_content(offline, tmp_path):
    offline.pages[f"/a/{TRAIN_IMAGES}.gz"] = gzip.compress(b"something else")
    with pytest.raises(RunError, match="md5"):
        mnist.mnist(str(tmp_path), offline="digits").load()


def images(n, height=28, width=28):
    """An IDX file of n black images."""
    shape = b"".join(k.to_bytes(4, "big") for k in (n, height, width))
    return b"\0\0\x08\x03" + shape + bytes(n * height * width)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (images(30)[:-1], r"has 23535 bytes, but its header \[30, 28, 28\] needs 23536"),
        (b"<html>not found</html>", "starts with 3c68746d"),
        (images(30, 14, 14), r"images of \(14, 14\), expected \(28, 28\)"),
        (images(29), "has 30 labels for the 29 images"),
        (gzip.compress(images(30))[:-9], "damaged gzip"),
        (b"\0\0\x08\x03" + b"\0\xff\xff\xff" * 3, "claims .* GiB by its header; at most 2.0 GiB"),
        (gzip.compress(images(30) + bytes(2**24)), r"has 23537 bytes or more, but its header"),
    ],
    ids=["short", "html", "dims", "count", "cut", "claim", "bomb"],
)
def test_a_damaged_local_file_is_a_user_error_and_never_replaced(
    offline, idx_folder, content, message
):
    (idx_folder / TRAIN_IMAGES).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        mnist.mnist(str(idx_folder), offline="digits").load()
    assert str(idx_folder) in str(caught.value) and "delete it" in str(caught.value)
    assert offline.requests == []


@pytest.mark.skipif("MNIST_DIR" not in os.environ, reason="real MNIST needs MNIST_DIR")
def test_real_mnist_has_the_expected_digests():
    folder = os.environ["MNIST_DIR"]
    sets = mnist.mnist(folder).load()
    assert len(sets["train"]) == 60_000 and len(sets["test"]) == 10_000
    for key, file in (("train", TRAIN_IMAGES), ("test", TEST_IMAGES)):
        x, y = sets[key].arrays
        head = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in x.shape[:3])
        assert hashlib.md5(head + x.tobytes()).hexdigest() == mnist.DIGESTS[file]
        assert np.bincount(y).min() > 800
    assert sets["train"].arrays[1][:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
