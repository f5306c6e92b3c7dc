"""MNIST and Fashion-MNIST: read where the files are, downloaded where not, replaced only where the config says so."""

import gzip
import hashlib
import os
import time

import numpy as np
import pytest

from data_loader import digits, fashion_mnist, mnist
from utils import RunError, UserError

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


@pytest.fixture
def serving(mirror, monkeypatch, idx_files):
    """MNIST's mirrors: one that knows nothing, and one on the loopback with the small files."""
    files, _ = idx_files
    monkeypatch.setattr(mnist, "MIRRORS", (mirror.url + "empty/", mirror.url))
    monkeypatch.setattr(
        mnist, "DIGESTS", {file: hashlib.md5(data).hexdigest() for file, data in files.items()}
    )
    mirror.pages |= {f"/{file}.gz": gzip.compress(data) for file, data in files.items()}
    return mirror


@pytest.fixture
def offline(monkeypatch, mirror):
    """Mirrors that have nothing, and a stand-in of a few images."""
    monkeypatch.setattr(mnist, "MIRRORS", (mirror.url + "a/", mirror.url + "b/"))
    monkeypatch.setattr(mnist, "digits", lambda: digits.digits(train_size=50, test_size=20))
    return mirror


def check(sets, arrays):
    for key, images, labels in (
        ("train", TRAIN_IMAGES, TRAIN_LABELS),
        ("test", TEST_IMAGES, TEST_LABELS),
    ):
        x, y = sets[key].arrays
        assert x.dtype == np.uint8 and y.dtype == np.int32
        assert x.shape == (len(arrays[images]), 28, 28, 1)
        assert (x[..., 0] == arrays[images]).all() and (y == arrays[labels]).all()


@pytest.mark.parametrize("factory", [mnist.mnist, fashion_mnist.fashion_mnist])
def test_local_files_answer_with_their_headers_and_load(factory, idx_folder, idx_files):
    data = factory(str(idx_folder))
    assert data.sizes == {"train": 30, "test": 20} and data.num_classes == 10
    x, y = data.example
    assert x.shape == (28, 28, 1) and x.dtype == np.uint8 and y.shape == () and y.dtype == np.int32
    check(data.load(), idx_files[1])


def test_files_in_a_folder_called_mnist_are_found(idx_folder, idx_files):
    idx_folder.rename(idx_folder.parent / "mnist")
    check(mnist.mnist(str(idx_folder.parent)).load(), idx_files[1])


def test_a_file_in_the_named_folder_itself_comes_first(idx_folder, idx_files):
    (idx_folder / "mnist").mkdir()
    for file in idx_files[0]:
        (idx_folder / "mnist" / file).write_bytes(b"older, and damaged")
    check(mnist.mnist(str(idx_folder)).load(), idx_files[1])


def test_the_factory_downloads_nothing_and_load_does_once(serving, tmp_path, idx_files):
    data = mnist.mnist(str(tmp_path / "data"))
    assert data.sizes == {"train": 60_000, "test": 10_000} and serving.asked == []
    check(data.load(), idx_files[1])
    assert len(serving.asked) == 8 and len(list((tmp_path / "data" / "mnist").iterdir())) == 4
    check(data.load(), idx_files[1])
    assert len(serving.asked) == 8


def test_a_missing_file_alone_is_downloaded(serving, idx_folder, idx_files):
    (idx_folder / TRAIN_IMAGES).unlink()
    check(mnist.mnist(str(idx_folder)).load(), idx_files[1])
    assert serving.asked == [f"/empty/{TRAIN_IMAGES}.gz", f"/{TRAIN_IMAGES}.gz"]


def test_offline_error_names_files_places_and_mirrors(offline, tmp_path):
    data = mnist.mnist(str(tmp_path / "nothing"))
    start = time.monotonic()
    with pytest.raises(RunError) as caught:
        data.load()
    assert time.monotonic() - start < 15
    for part in (
        TRAIN_IMAGES,
        f"{tmp_path}/nothing/mnist",
        offline.url + "a/",
        offline.url + "b/",
        "404",
    ):
        assert part in str(caught.value)
    assert not (tmp_path / "nothing").exists()


def test_the_stand_in_is_announced_and_recorded(offline, tmp_path, warnings_seen):
    sets = mnist.mnist(str(tmp_path), offline="digits").load()
    assert {key: len(dataset) for key, dataset in sets.items()} == {"train": 50, "test": 20}
    for dataset in sets.values():
        assert dataset.source.startswith("digits (stand-in for mnist: no files in")
    (warning,) = warnings_seen
    assert "NOT MNIST" in warning and offline.url in warning and len(warning.splitlines()) > 4


def test_no_stand_in_and_no_warning_where_the_files_are(
    offline, idx_folder, idx_files, warnings_seen
):
    sets = mnist.mnist(str(idx_folder), offline="digits").load()
    check(sets, idx_files[1])
    assert sets["train"].source == "mnist" and warnings_seen == []


def test_no_stand_in_where_only_some_files_are(offline, idx_folder):
    (idx_folder / TRAIN_LABELS).with_suffix(".gz").unlink()
    with pytest.raises(RunError, match=TRAIN_LABELS):
        mnist.mnist(str(idx_folder), offline="digits").load()


def test_no_stand_in_for_mirrors_with_other_content(offline, tmp_path):
    offline.pages[f"/a/{TRAIN_IMAGES}.gz"] = gzip.compress(b"something else")
    with pytest.raises(RunError, match="md5"):
        mnist.mnist(str(tmp_path), offline="digits").load()


def images(n, height=28, width=28, magic=b"\0\0\x08\x03"):
    return (
        magic
        + b"".join(k.to_bytes(4, "big") for k in (n, height, width))
        + bytes(n * height * width)
    )


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (
            TRAIN_IMAGES,
            images(30)[:-1],
            r"has 23535 bytes, but its header \[30, 28, 28\] asks for 23536",
        ),
        (TRAIN_IMAGES, images(30) + b"x", "has 23537 bytes"),
        (TRAIN_IMAGES, images(30, magic=b"\0\0\x08\x01"), "starts with 00000801"),
        (TRAIN_IMAGES, b"<html>not found</html>", "starts with 3c68746d"),
        (TRAIN_IMAGES, b"", "starts with nothing"),
        (TRAIN_IMAGES, images(30)[:9], "starts with 00000803"),
        (TRAIN_IMAGES, images(30, 14, 14), r"images of \(14, 14\), expected \(28, 28\)"),
        (TRAIN_IMAGES, images(29), "has 30 labels for the 29 images"),
        (TRAIN_IMAGES, gzip.compress(images(30))[:-9], "damaged gzip"),
        (TRAIN_IMAGES, gzip.compress(images(30))[:20] + b"?" * 40, "damaged gzip"),
        (TRAIN_IMAGES, b"\x1f\x8bnot gzip at all", "damaged gzip"),
    ],
    ids=[
        "short",
        "long",
        "magic",
        "html",
        "empty",
        "header",
        "dims",
        "count",
        "cut gz",
        "bad gz",
        "no gz",
    ],
)
@pytest.mark.parametrize("offline_is", ["error", "digits"])
def test_a_corrupt_local_file_is_the_users_error_and_never_replaced(
    offline, idx_folder, file, content, said, offline_is
):
    (idx_folder / file).write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        mnist.mnist(str(idx_folder), offline=offline_is).load()
    assert str(idx_folder) in str(caught.value) and "delete it" in str(caught.value)
    assert offline.asked == []


def test_labels_beyond_the_classes_are_refused(idx_folder):
    labels = b"\0\0\x08\x01" + (20).to_bytes(4, "big") + bytes(19) + b"\x0a"
    (idx_folder / TEST_LABELS).with_suffix(".gz").write_bytes(labels)
    with pytest.raises(UserError, match="label 10 of example 19"):
        mnist.mnist(str(idx_folder)).load()


@pytest.mark.skipif(
    "MNIST_DIR" not in os.environ, reason="MNIST_DIR is not set: real MNIST is not here"
)
def test_real_mnist_is_what_the_digests_say():
    folder = os.environ["MNIST_DIR"]
    sets = mnist.mnist(folder).load()
    assert len(sets["train"]) == 60_000 and len(sets["test"]) == 10_000
    for key, file in (("train", TRAIN_IMAGES), ("test", TEST_IMAGES)):
        x, y = sets[key].arrays
        head = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in x.shape[:3])
        assert hashlib.md5(head + x.tobytes()).hexdigest() == mnist.DIGESTS[file]
        assert np.bincount(y).min() > 800
    assert sets["train"].arrays[1][:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
