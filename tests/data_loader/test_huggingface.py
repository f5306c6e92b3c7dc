"""Datasets of HuggingFace, from local files: images, arrays, tables, classes, and clear errors."""

import sys

import numpy as np
import pytest

from data_loader.base import Arrays, loaded
from data_loader.digits import draw
from data_loader.huggingface import huggingface
from data_loader.loader import batches, epoch_order
from utils import UserError

X, Y = draw(0, 24)


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """The package, which makes its caches in a folder of the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def folder(hf, tmp_path_factory):
    """Digits, saved to the disk: 20 for training, 4 for testing."""
    names = [f"digit {i}" for i in range(10)]
    features = hf.Features({"img": hf.Image(), "label": hf.ClassLabel(names=names)})
    columns = {"img": list(X[..., 0]), "label": Y.tolist()}
    rows = hf.Dataset.from_dict(columns, features=features)
    path = tmp_path_factory.mktemp("data") / "digits"
    sets = {"train": rows.select(range(20)), "test": rows.select(range(20, 24))}
    hf.DatasetDict(sets).save_to_disk(path)
    sets["train"].to_parquet(path / "train.parquet")
    return path


@pytest.mark.parametrize("memory_mb", [0, 1])
def test_images_give_the_same_batches_as_arrays(folder, memory_mb):
    data = huggingface(str(folder), test="test", color="gray", memory_mb=memory_mb)
    assert data.sizes == {"train": 20, "test": 4}
    assert data.classes == tuple(f"digit {i}" for i in range(10)) and data.num_classes == 10
    sets = loaded(data)
    assert (type(sets["train"]) is Arrays) is (memory_mb == 1)
    order, _ = epoch_order(20, 8, seed=3, epoch=2, shuffle=True)
    expected = batches(Arrays(X[:20], Y[:20]), order, start=1)
    for (x, y), (wanted, labels) in zip(
        batches(sets["train"], order, start=1), expected, strict=True
    ):
        np.testing.assert_array_equal(x, wanted, strict=True)
        np.testing.assert_array_equal(y, labels.astype(np.int32), strict=True)
    np.testing.assert_array_equal(sets["test"][1][0], X[21])


def test_files_of_a_type_and_images_of_another_size(folder):
    files = {"train": str(folder / "train.parquet")}
    data = huggingface("parquet", data_files=files, image_size=(14, 7))
    x, y = data.load()["train"][0]
    assert x.shape == (14, 7, 3) and y == Y[0] and data.num_classes == 10


def saved(hf, path, columns, features=None):
    rows = hf.Dataset.from_dict(columns, features=features and hf.Features(features))
    rows.save_to_disk(path)
    return str(path)


def test_images_of_several_sizes_are_streamed(hf, tmp_path):
    sizes = [np.zeros((4, 4), np.uint8), np.zeros((5, 4), np.uint8)]
    path = saved(
        hf,
        tmp_path / "a",
        {"i": sizes, "label": [0, 1]},
        {"i": hf.Image(), "label": hf.Value("int8")},
    )
    data = huggingface(path)
    assert type(data.load()["train"]) is not Arrays and data.num_classes == 2


def test_columns_of_numbers_classes_and_texts_are_a_table(hf, tmp_path):
    columns = {
        "age": [31.5, None, 45.0],
        "rooms": [2, 3, 3],
        "city": ["Oslo", None, "Rome"],
        "pool": [True, False, True],
        "sold": [0, 1, 0],
        "label": [0.5, 1.5, 2.5],
    }
    sold = hf.ClassLabel(names=["yes", "no"])
    features = hf.Dataset.from_dict(columns).features | {"sold": sold}
    path = saved(hf, tmp_path / "a", columns, features)
    data = huggingface(path, x=("age", "rooms", "city"), y="sold")
    assert data.columns == {"age": (), "rooms": (), "city": ("Oslo", "Rome")}
    assert data.classes == ("yes", "no")  # not sorted, since their order is known
    x, y = loaded(data)["train"].arrays
    np.testing.assert_array_equal(x, np.float32([[31.5, 2, 1], [np.nan, 3, 0], [45, 3, 2]]))
    assert y.tolist() == [0, 1, 0]
    data = huggingface(path)
    assert data.columns["sold"] == ("no", "yes") and data.columns["pool"] == ("False", "True")
    assert data.num_classes is None and data.load()["train"].arrays[1].tolist() == [0.5, 1.5, 2.5]


def test_a_column_of_arrays_and_targets_of_every_kind(hf, tmp_path):
    columns = {"v": [[1.0, 2], [3, 4], [5, 6]], "text": ["b", "a", "b"], "whole": [4, 0, 2]}
    path = saved(hf, tmp_path / "a", columns | {"vector": [[0.5, 1]] * 3})
    data = huggingface(path, x=("v",), y="text")
    assert data.classes == ("a", "b")
    x, y = loaded(data)["train"].arrays
    np.testing.assert_array_equal(x, np.float32([[1, 2], [3, 4], [5, 6]]), strict=True)
    assert y.tolist() == [1, 0, 1]
    assert huggingface(path, x=("v",), y="whole").num_classes == 5
    data = huggingface(path, x=("v",), y="vector")
    assert data.num_classes is None and loaded(data)["train"].arrays[1].shape == (3, 2)


def test_mistakes_are_errors_that_say_what_there_is(hf, folder, tmp_path, monkeypatch):
    columns = {"v": [[1.0], [2.0]], "label": [0, -1], "none": [None, 1]}
    path = saved(hf, tmp_path / "a", columns)
    for arguments, message in (
        ((str(folder), "validation"), r"no split 'validation' \(train, test\)"),
        ({"path": str(folder), "x": ("image",)}, r"no column 'image' \(img, label\)"),
        ({"path": str(folder), "y": "cls"}, r"digits, train: has no column 'cls' \(img, label\)"),
        ({"path": "parquet"}, r"^data_files: name the files of type parquet"),
        ({"path": str(tmp_path / "none")}, r"none cannot be loaded: "),
        (
            {"path": path, "x": ("v", "label"), "y": "none"},
            "'v' is not one number or text",
        ),
    ):
        with pytest.raises(UserError, match=message):
            huggingface(**arguments) if isinstance(arguments, dict) else huggingface(*arguments)
    with pytest.raises(UserError, match=r"a, train: row 1: .*label -1 .* outside the 2 classes"):
        huggingface(path, x=("v",)).load()
    with pytest.raises(UserError, match=r"a, train: row 0: column 'none': is missing"):
        huggingface(path, x=("v",), y="none")
    broken = hf.Features({"img": {"bytes": hf.Value("binary"), "path": hf.Value("string")}})
    rows = hf.Dataset.from_dict({"img": [{"bytes": b"GIF87", "path": None}]}, features=broken)
    rows = rows.add_column("label", [0]).cast_column("img", hf.Image())
    rows.save_to_disk(tmp_path / "b")
    with pytest.raises(UserError, match=r"b, train: row 0: column 'img': is not a readable image"):
        huggingface(str(tmp_path / "b"))
    monkeypatch.setattr(hf, "__version__", "3.6.0")
    with pytest.raises(UserError, match=r"needs datasets 4 or newer"):
        huggingface(path)


def test_a_missing_package_is_an_error_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        huggingface("mnist")


def test_splits_that_number_their_classes_differently_are_refused(hf, tmp_path):
    def split(names):
        features = hf.Features(
            {"v": hf.Sequence(hf.Value("float32")), "y": hf.ClassLabel(names=names)}
        )
        return hf.Dataset.from_dict({"v": [[0.5]] * len(names), "y": names}, features=features)

    sets = {"train": split(["cat", "dog", "fox"]), "test": split(["dog", "fox"])}
    hf.DatasetDict(sets).save_to_disk(tmp_path / "a")
    with pytest.raises(
        UserError, match=r"test: column 'y' numbers its classes as \('dog', 'fox'\)"
    ):
        huggingface(str(tmp_path / "a"), x=("v",), y="y", test="test")
