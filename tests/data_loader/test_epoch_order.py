"""Epoch order, split and fingerprint depend only on the dataset and on what a run records."""

import numpy as np
import pytest

from data_loader.base import Arrays, fingerprint
from data_loader.loader import epoch_order, split
from utils import UserError

pytestmark = pytest.mark.contract


class Squares:
    """A dataset that is not Arrays."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"x": np.float32(index), "y": index * index}


def numbers(n):
    return Arrays(np.arange(n, dtype=np.float32)[:, None], np.arange(n, dtype=np.int32), "numbers")


def test_shuffled_order_is_a_permutation_that_depends_only_on_seed_and_epoch():
    def rows(seed, epoch):
        order, valid = epoch_order(1000, 100, seed=seed, epoch=epoch, shuffle=True)
        assert sorted(order.ravel()) == list(range(1000)) and (valid == 100).all()
        return order.tobytes()

    assert rows(1, 0) == rows(1, 0)
    assert len({rows(1, 0), rows(1, 1), rows(2, 0), rows(0, 1), rows(-1, 0), rows(2**63, 0)}) == 6


def test_order_is_that_of_earlier_versions():
    """A NumPy that draws other numbers would break exact resume."""
    order, _ = epoch_order(8, 8, seed=42, epoch=3, shuffle=True)
    assert order.tolist() == [[4, 7, 1, 0, 2, 6, 5, 3]]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_short_last_batch_is_filled_with_the_epochs_first_examples(shuffle):
    order, valid = epoch_order(10, 4, seed=0, epoch=0, shuffle=shuffle)
    assert order.dtype == valid.dtype == np.int32
    assert valid.tolist() == [4, 4, 2]
    assert order[-1, 2:].tolist() == order[0, :2].tolist()
    assert sorted(order.ravel()[:10]) == list(range(10))


def test_without_shuffling_the_order_is_that_of_the_dataset():
    order, _ = epoch_order(6, 3, seed=9, epoch=9, shuffle=False)
    assert order.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_an_empty_dataset_or_batch_is_refused():
    with pytest.raises(UserError, match="empty"):
        epoch_order(0, 4, seed=0, epoch=0, shuffle=True)
    with pytest.raises(ValueError, match=r"^batch_size: must be at least 1, got 0"):
        epoch_order(4, 0, seed=0, epoch=0, shuffle=True)


@pytest.mark.parametrize(("val_size", "count"), [(3, 3), (0.25, 10), (39, 39)])
def test_split_is_disjoint_complete_and_reproducible(val_size, count):
    train, val = split(numbers(40), val_size, seed=5)
    assert isinstance(train, Arrays) and len(val) == count
    assert sorted([*train.arrays[1], *val.arrays[1]]) == list(range(40))
    assert (val.arrays[0][:, 0] == val.arrays[1]).all()  # x and y stay together
    assert val.arrays[1].tolist() == split(numbers(40), val_size, seed=5)[1].arrays[1].tolist()


@pytest.mark.parametrize("val_size", [-1, 10, 11, 1.0, 1.5, 0.01])
def test_split_refuses_a_size_that_leaves_either_side_empty(val_size):
    with pytest.raises(UserError, match=r"^val_size: .* of 10 examples"):
        split(numbers(10), val_size, seed=0)


def test_fingerprint_of_arrays_depends_on_every_byte_shape_and_type():
    x, y = np.zeros((4, 6), np.float32), np.zeros(4, np.int32)
    changed = x.copy()
    changed[2, 3] = 1
    different = [
        (x, y),
        (changed, y),
        (x.reshape(4, 3, 2), y),
        (x.view(np.int32), y),
        (x[:3], y[:3]),
    ]
    assert len({fingerprint(Arrays(*pair)) for pair in different}) == 5
    assert fingerprint(Arrays(np.asfortranarray(x), y, "elsewhere")) == fingerprint(Arrays(x, y))


def test_fingerprint_of_other_datasets_depends_on_length_and_first_and_last_example():
    class Other(Squares):
        def __getitem__(self, index):
            return {**super().__getitem__(index), "y": 7}

    class Longer(Squares):
        def __len__(self):
            return 11

    assert fingerprint(Squares()) == fingerprint(Squares())
    assert len({fingerprint(Squares()), fingerprint(Other()), fingerprint(Longer())}) == 3
