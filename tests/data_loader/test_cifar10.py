"""CIFAR-10 from its archive, its unpacked folder or a mirror; damaged files are named."""

import hashlib
import io
import tarfile

import numpy as np
import pytest

from data_loader import cifar10
from utils import RunError, UserError

NAMES = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]


@pytest.fixture(autouse=True)
def small_files(monkeypatch, mirror):
    monkeypatch.setattr(cifar10, "PER_FILE", 4)
    monkeypatch.setattr(cifar10, "MIRRORS", (mirror.url,))


@pytest.fixture
def records():
    """{file: records, each a label and a red, a green and a blue plane}."""
    random = np.random.default_rng(0)
    files = {name: random.integers(0, 256, (4, 3073), np.uint8) for name in NAMES}
    for i, rows in enumerate(files.values()):
        rows[:, 0] = (np.arange(4) + i) % 10
    return files


def archive(records):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, rows in records.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = rows.nbytes
            tar.addfile(info, io.BytesIO(rows.tobytes()))
    return buffer.getvalue()


def unpack(records, folder):
    folder.mkdir(parents=True)
    for name, rows in records.items():
        (folder / name).write_bytes(rows.tobytes())


def check(sets, records):
    x, y = sets["train"].arrays
    assert x.shape == (20, 32, 32, 3) and x.flags.c_contiguous
    assert x.dtype == np.uint8 and y.dtype == np.int32
    row = records["data_batch_3.bin"][2]  # the eleventh training image
    assert y[10] == row[0]
    assert x[10, 5, 7].tolist() == [row[1 + plane * 1024 + 5 * 32 + 7] for plane in range(3)]
    assert sets["test"].arrays[1].tolist() == records["test_batch.bin"][:, 0].tolist()


def test_sizes_are_known_without_any_file(tmp_path, monkeypatch, mirror):
    monkeypatch.setattr(cifar10, "PER_FILE", 10_000)
    data = cifar10.cifar10(str(tmp_path))
    assert data.sizes == {"train": 50_000, "test": 10_000} and data.num_classes == 10
    assert data.example[0].shape == (32, 32, 3) and mirror.requests == []


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-bin"])
def test_the_unpacked_folder_is_read(tmp_path, records, folder):
    unpack(records, tmp_path / "data" / folder)
    check(cifar10.cifar10(str(tmp_path / "data")).load(), records)


def test_the_archive_is_downloaded_once_and_never_unpacked_to_disk(
    tmp_path, records, monkeypatch, mirror
):
    packed = archive(records)
    mirror.pages["/cifar-10-binary.tar.gz"] = packed
    monkeypatch.setattr(cifar10, "DIGEST", hashlib.md5(packed).hexdigest())
    for _ in range(2):
        check(cifar10.cifar10(str(tmp_path / "data")).load(), records)
    assert len(mirror.requests) == 1
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["cifar-10-binary.tar.gz"]


def test_without_files_and_network_the_error_names_the_file_the_folder_and_the_mirror(
    tmp_path, mirror
):
    with pytest.raises(RunError, match=r"cifar-10-binary\.tar\.gz(.|\n)*404") as caught:
        cifar10.cifar10(str(tmp_path)).load()
    assert mirror.url in str(caught.value) and str(tmp_path) in str(caught.value)


def test_damaged_files_are_named(tmp_path, records):
    folder = tmp_path / "cifar-10-batches-bin"
    unpack(records, folder)
    (folder / "data_batch_2.bin").write_bytes(b"short")
    with pytest.raises(UserError, match=r"data_batch_2\.bin: has 5 bytes, expected 12292"):
        cifar10.cifar10(str(tmp_path)).load()
    (folder / "data_batch_2.bin").unlink()
    with pytest.raises(UserError, match=r"data_batch_2\.bin: is missing"):
        cifar10.cifar10(str(tmp_path)).load()


@pytest.mark.parametrize("damage", ["cut", "corrupt", "nonsense", "member missing"])
def test_a_damaged_archive_is_named(tmp_path, records, damage):
    whole = archive(records)
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(
        {
            "cut": whole[: len(whole) // 2],
            "corrupt": whole[:1000] + b"?" * 1000 + whole[2000:],
            "nonsense": b"<html>",
            "member missing": archive(
                {name: rows for name, rows in records.items() if name != "data_batch_4.bin"}
            ),
        }[damage]
    )
    with pytest.raises(
        UserError, match=r"cifar-10-binary\.tar\.gz: is not the complete archive.*delete it"
    ):
        cifar10.cifar10(str(tmp_path)).load()


def test_classes_are_named_as_in_its_batches_meta_txt():
    names = cifar10.cifar10().classes
    assert len(names) == 10 and (names[3], names[5], names[8]) == ("cat", "dog", "ship")
