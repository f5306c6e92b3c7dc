"""Batches: stacked, gathered, prefetched in a thread, and padded if they are the user's own."""

import logging
import threading
import time
import traceback

import numpy as np
import pytest

from data_loader.base import Arrays, ExampleFailed
from data_loader.loader import Subset, batches, collate, first_batches, padded, prefetch, split
from training.commands.failure import failed
from utils import FAILED, UserError


class Examples:
    """A dataset that is not Arrays, from a list of examples."""

    def __init__(self, examples):
        self.examples = examples

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index]


def test_collate_stacks_any_nest():
    examples = [({"a": np.full((2, 3), i), "b": [i, float(i)]}, np.int32(i)) for i in range(4)]
    batch, label = collate(examples)
    assert batch["a"].shape == (4, 2, 3) and batch["a"][:, 1, 2].tolist() == [0, 1, 2, 3]
    assert batch["b"][0].tolist() == [0, 1, 2, 3] and batch["b"][1].dtype == np.float64
    assert label.dtype == np.int32 and label.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "examples",
    [
        [np.zeros(3), np.zeros(4)],
        [{"a": 1}, {"a": 1, "b": 2}],
        [(1, 2), (1, 2, 3)],
        [{"a": 1}, (1,)],
    ],
    ids=["shapes", "keys", "lengths", "kinds"],
)
def test_examples_that_do_not_stack_are_an_error_that_suggests_a_collate_fn(examples):
    with pytest.raises(UserError, match=r"do not stack.*collate_fn"):
        collate(examples)


def test_batches_gathered_from_arrays_equal_batches_stacked_from_examples():
    x, y = np.random.default_rng(0).normal(size=(7, 2)), np.arange(7)
    order = np.array([[6, 0, 3], [1, 1, 5], [2, 4, 6]])
    gathered = list(batches(Arrays(x, y), order))
    stacked = list(batches(Examples([(x[i], y[i]) for i in range(7)]), order))
    for row, (gx, gy), (sx, sy) in zip(order, gathered, stacked, strict=True):
        assert (gx == x[row]).all() and (gy == row).all()
        assert (sx == gx).all() and (sy == gy).all()


def test_batches_start_at_the_position_of_a_resumed_run():
    data = Arrays(np.arange(6), np.arange(6))
    order = np.arange(6).reshape(3, 2)
    assert [y.tolist() for _, y in batches(data, order, start=1)] == [[2, 3], [4, 5]]


@pytest.mark.parametrize(
    "dataset", [Arrays(np.arange(4), np.arange(4)), Examples([(i, i) for i in range(4)])]
)
def test_the_users_collate_fn_receives_a_list_of_examples(dataset):
    def total(examples):
        return np.full(len(examples), sum(int(x) for x, _ in examples))

    made = list(batches(dataset, np.array([[0, 1], [2, 3]]), total))
    assert np.array(made).tolist() == [[1, 1], [5, 5]]


@pytest.mark.parametrize(
    ("collate_fn", "message"),
    [
        (lambda examples: np.zeros(3), "from 2 examples it made arrays with these .* batch: 3"),
        (lambda examples: {"x": np.zeros(2), "n": 2}, "rows: x: 2, n: none"),
        (lambda examples: examples[0]["x"], r"collate_fn fails: .*test_batches\.py, line"),
    ],
)
def test_a_collate_fn_makes_one_row_per_example(collate_fn, message):
    with pytest.raises(UserError, match=message):
        list(batches(Examples([(i, i) for i in range(2)]), np.array([[0, 1]]), collate_fn))


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_prefetch_yields_the_same_items_and_leaves_no_thread():
    assert list(prefetch(iter(range(20)), depth=3)) == list(range(20))
    assert list(prefetch([])) == []
    assert prefetch_threads() == []


def test_prefetch_works_ahead_by_at_most_its_depth():
    made = []
    items = prefetch((made.append(i) or i for i in range(100)), depth=3)
    assert next(items) == 0
    deadline = time.monotonic() + 5
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    assert made == [0, 1, 2, 3]
    items.close()


def test_an_error_in_the_prefetch_thread_is_raised_with_its_traceback():
    def reads_a_broken_file():
        yield 1
        raise KeyError("broken file")

    items = prefetch(reads_a_broken_file())
    assert next(items) == 1
    with pytest.raises(KeyError, match="broken file") as caught:
        next(items)
    assert "reads_a_broken_file" in [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert prefetch_threads() == []


def test_leaving_prefetch_early_ends_its_thread_and_closes_its_iterable():
    closed = threading.Event()

    def endless():
        try:
            while True:
                yield 0
        finally:
            closed.set()

    for _ in prefetch(endless()):
        break
    assert closed.wait(5)
    assert prefetch_threads() == []


def test_padded_fills_a_short_batch_with_its_own_examples():
    stream = [
        {"x": np.arange(4), "y": np.ones((4, 2))},
        {"x": np.array([7, 8, 9]), "y": np.zeros((3, 2))},
        {"x": np.array([5]), "y": np.array([[1.0, 2.0]])},
    ]
    (first, n), (second, m), (third, k) = padded(stream)
    assert (n, m, k) == (4, 3, 1)
    assert first["x"].tolist() == [0, 1, 2, 3]
    assert second["x"].tolist() == [7, 8, 9, 7]
    assert third["x"].tolist() == [5, 5, 5, 5] and third["y"].tolist() == [[1, 2]] * 4


def test_padded_converts_tensors_of_other_libraries_to_arrays():
    class Tensor:
        def __array__(self, dtype=None, copy=None):
            return np.arange(3, dtype=np.float32)

    ((x, _), valid) = next(padded([[Tensor(), np.arange(3)]]))
    assert isinstance(x, np.ndarray) and x.tolist() == [0, 1, 2] and valid == 3


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ((zeros(5, 2), zeros(5, dtype=int)), "batch 1: found 5 examples; allowed: 1 to 4"),
        ((zeros(0, 2), zeros(0, dtype=int)), "batch 1: found 0 examples"),
        ((zeros(3, 2), zeros(4, dtype=int)), "batch 1: every array needs the same first axis"),
        ((zeros(4, 2), np.int64(3)), "batch 1: every array needs the same first axis"),
        ((zeros(4, 2, dtype=float), zeros(4, dtype=int)), "batch 1: found 0 float64"),
        ((zeros(4, 3), zeros(4, dtype=int)), "batch 1: found 0 float32"),
        ((zeros(4, 2),), "the first had 0 float32"),
        ({"x": zeros(4, 2)}, "batch 1: found x float32"),
    ],
    ids=["larger", "empty", "sizes", "no axis", "dtype", "shape", "fewer leaves", "structure"],
)
def test_padded_refuses_a_batch_unlike_the_first(second, message):
    stream = padded([(zeros(4, 2), zeros(4, dtype=int)), second])
    next(stream)
    with pytest.raises(UserError, match=message):
        next(stream)


@pytest.mark.parametrize("kind", [Arrays, Subset])
def test_a_part_of_a_file_of_an_array_is_not_read_into_memory(tmp_path, kind):
    np.save(tmp_path / "x.npy", np.arange(6.0))
    data = Arrays(
        np.load(tmp_path / "x.npy", mmap_mode="r" if kind is Subset else None), np.ones(6)
    )
    for part in (*split(data, 2, seed=0), first_batches(data, 1, 4)):
        assert type(part) is kind
        assert (np.diff(part[np.arange(len(part))][0]) > 0).all()  # in the order of the data


class Damaged:
    """A dataset whose example 30 has another shape, and whose example 31 cannot be read."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 40

    def __getitem__(self, i):
        if i == 31:
            raise self.error
        return np.zeros(4 + (i == 30)), np.int32(0)


@pytest.mark.parametrize("error", [OSError, IndexError, SystemExit])
def test_an_example_that_cannot_be_read_is_named(error, tmp_path, capsys):
    some = Subset(Damaged(error("no image")), np.array([5, 31]))
    message = r"example 31 of Damaged failed: .*test_batches.py, line \d+: .*no image"
    with pytest.raises(ExampleFailed, match=message) as raised:
        next(batches(some, [[0, 1]]))
    log, logger = logging.FileHandler(tmp_path / "train.log"), logging.getLogger("main")
    logger.addHandler(log)
    assert failed(raised.value) == FAILED
    logger.removeHandler(log)
    assert capsys.readouterr().err.count("\n") == 1
    assert "Traceback" in (tmp_path / "train.log").read_text()


def test_an_error_for_the_user_is_raised_unchanged():
    with pytest.raises(UserError) as raised:
        next(batches(Damaged(UserError("a.png: is no image")), [[31]]))
    assert str(raised.value) == "a.png: is no image"
