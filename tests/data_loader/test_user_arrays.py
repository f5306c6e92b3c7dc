"""The user's arrays: sizes from their headers, checked against each other, never unpickled."""

import pickle

import numpy as np
import pytest

from data_loader.arrays import arrays
from utils import UserError


def save(path, **members):
    """The arrays as a .npz file, or as a folder of .npy files."""
    if path.suffix == ".npz":
        np.savez(path, **members)
    else:
        path.mkdir()
        for name, array in members.items():
            np.save(path / f"{name}.npy", array)
    return str(path)


@pytest.fixture(params=["{}.npz", "{}"], ids=["npz", "folder"])
def path_of(request, tmp_path):
    return lambda name: tmp_path / request.param.format(name)


X, Y = np.arange(30, dtype=np.uint8).reshape(5, 3, 2), np.array([0, 2, 1, 2, 0])


def test_labelled_arrays(path_of):
    train = save(path_of("train"), x=X, y=Y)
    data = arrays(train, save(path_of("test"), x=X[:2], y=np.array([3, 0])))
    assert data.sizes == {"train": 5, "test": 2} and data.num_classes == 4
    assert data.example[0].shape == (3, 2) and data.example[0].dtype == np.uint8
    assert data.example[1].shape == () and data.example[1].dtype == np.int32
    sets = data.load()
    x, y = sets["train"].arrays
    assert (x == X).all() and (y == Y).all() and y.dtype == np.int32
    assert sets["test"].arrays[1].tolist() == [3, 0]


def test_other_names_fortran_order_and_a_given_number_of_classes(path_of):
    train = save(path_of("train"), image=np.asfortranarray(X), label=Y.astype(np.uint8))
    data = arrays(train, x="image", y="label", num_classes=7)
    assert data.sizes == {"train": 5} and data.num_classes == 7
    assert (data.load()["train"].arrays[0] == X).all()


def test_float_targets_have_no_classes(path_of):
    target = np.linspace(0, 1, 10).reshape(5, 2).astype(np.float32)
    data = arrays(save(path_of("train"), x=X, y=target))
    assert data.num_classes is None
    assert data.example[1].shape == (2,) and data.example[1].dtype == np.float32
    assert (data.load()["train"].arrays[1] == target).all()


def test_the_factory_reads_labels_but_not_the_inputs(tmp_path):
    train = tmp_path / "train"
    save(train, x=X, y=Y)
    whole = (train / "x.npy").read_bytes()
    (train / "x.npy").write_bytes(whole[:-1])
    data = arrays(str(train))
    assert data.sizes == {"train": 5} and data.num_classes == 3
    with pytest.raises(UserError, match="x cannot be read"):
        data.load()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"images": X, "y": Y}, r"no array 'x'; there are: images, y"),
        ({"x": X}, r"no array 'y'; there are: x"),
        ({"x": X, "y": Y[:4]}, "x has 5 examples and y has 4 examples"),
        ({"x": X, "y": np.array(3)}, r"y is int64 \[\]"),
        ({"x": X[:0], "y": Y[:0]}, r"x is uint8 \[0, 3, 2\]"),
        ({"x": X, "y": np.array(list("abcde"))}, "y is <U1"),
        ({"x": X, "y": Y - 1}, "label -1 of example 0"),
        ({"x": X, "y": np.array([None] * 5)}, "y is object"),
        ({"x": X.astype(">f4"), "y": Y}, r"x holds >f4, .* cannot read; pass .astype\('float32'\)"),
        ({"x": X, "y": Y.astype(np.longdouble)}, r"y holds float128, .*pass .astype\('float64'\)"),
    ],
    ids=[
        *["no x", "no y", "lengths", "scalar", "empty", "strings", "negative", "objects"],
        *["byte order", "longdouble"],
    ],
)
def test_unsuitable_arrays_are_named_with_what_was_found(path_of, members, message):
    train = save(path_of("train"), **members)
    with pytest.raises(UserError, match=message) as caught:
        arrays(train).load()
    assert str(caught.value).startswith(train)


def test_a_label_outside_the_given_classes_is_refused(path_of):
    with pytest.raises(UserError, match=r"label 2 of example 1 is outside the 2 classes"):
        arrays(save(path_of("train"), x=X, y=Y), num_classes=2).load()
    with pytest.raises(ValueError, match=r"^num_classes: must be at least 1, got 0"):
        arrays(str(path_of("train")), num_classes=0)


@pytest.mark.parametrize(
    "test",
    [{"x": X[:, :2], "y": Y}, {"x": X.astype(float), "y": Y}, {"x": X, "y": Y.astype(float)}],
    ids=["shape", "dtype", "kind"],
)
def test_training_and_test_set_must_have_the_same_shape_and_type(path_of, test):
    with pytest.raises(UserError, match="they must be the same"):
        arrays(save(path_of("train"), x=X, y=Y), save(path_of("test"), **test))


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-40], lambda b: b[:60], lambda b: b"", lambda b: b"PK nonsense"]
)
def test_a_damaged_npz_is_named(tmp_path, damage):
    path = tmp_path / "train.npz"
    np.savez(path, x=X, y=Y)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"train\.npz: x cannot be read .* write it again"):
        arrays(str(path))


def test_changed_bytes_in_a_npz_are_noticed(tmp_path):
    path = tmp_path / "train.npz"
    np.savez(path, x=X, y=Y)
    content = path.read_bytes()
    path.write_bytes(content.replace(X.tobytes(), X[::-1].tobytes()))
    with pytest.raises(UserError, match="x cannot be read"):
        arrays(str(path)).load()


def test_what_unpacks_to_more_than_the_memory_is_not_read(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((1000, 1000)), y=np.zeros(1000))
    data = arrays(str(tmp_path / "a.npz"))
    monkeypatch.setattr("utils.main_memory", lambda: 2**20)
    message = (
        r"a\.npz: x, float64\[1000, 1000\]: would need 7\.6 MiB, and this machine has 1\.0 MiB"
    )
    with pytest.raises(UserError, match=message):
        data.load()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.npz: no such file"):
        arrays(str(tmp_path / "nothing.npz"))


def test_nothing_is_ever_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return (pytest.exit, ("unpickled",))

    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "x.npy").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(UserError, match="x cannot be read"):
        arrays(str(tmp_path / "train"))
    np.savez(tmp_path / "train.npz", x=np.array([Trap()] * 5, dtype=object), y=Y)
    with pytest.raises(UserError, match="x is object"):
        arrays(str(tmp_path / "train.npz"))
