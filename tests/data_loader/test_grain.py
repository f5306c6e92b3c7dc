"""Batches read by worker processes: bit-identical, one message per error, no process left over."""

import gc
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from data_loader.base import Arrays, loaded
from data_loader.digits import draw
from data_loader.grain import RecordFiles, Records, grain
from data_loader.loader import batches, collate, epoch_order, first_batches, split
from data_loader.records import numpy_example, write_records
from tests.data_loader.conftest import wait_until
from utils import RunError, UserError

X, Y = draw(0, 600)


def source(folder, **arguments):
    return grain(f"{folder}/train-*.array_record", **{"num_classes": 10} | arguments)


def workers():
    """The ids of the worker processes that this process has started with multiprocessing."""
    ids = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"spawn_main" in (path / "cmdline").read_bytes():
                ids.append(path.name)
    return ids


@pytest.fixture(autouse=True)
def no_worker_left(no_shared_memory_left):
    gc.collect()
    yield
    gc.collect()  # an error and its frames refer to each other
    assert wait_until(lambda: not workers())


@pytest.mark.slow
def test_sizes_and_shapes_are_known_before_the_data_is_read(record_folder):
    test, val = f"{record_folder}/test-*", f"{record_folder}/test-00000-of-00001.array_record"
    data = source(record_folder, test=test, val=val, vocab_size=7)
    assert data.sizes == {"train": 500, "val": 100, "test": 100}
    assert data.num_classes == 10 and data.vocab_size == 7
    example, _ = data.example
    assert example.shape == (28, 28, 1) and example.dtype == np.uint8 and not example.any()
    x, y = loaded(data)["test"][99]
    assert (x == X[599]).all() and y == Y[599]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "start"), [(0, 0), (2, 1), pytest.param(3, 6, marks=pytest.mark.torture)], ids=str
)
def test_batches_equal_those_of_arrays_for_any_number_of_workers_and_any_start(
    record_folder, count, start
):
    order, _ = epoch_order(500, 64, seed=3, epoch=2, shuffle=True)
    read = batches(source(record_folder, workers=count).load()["train"], order, start=start)
    expected = batches(Arrays(X[:500], Y[:500]), order, start=start)
    for (x, y), (expected_x, expected_y) in zip(read, expected, strict=True):
        assert type(x) is np.ndarray  # a copy, not the shared memory of a worker
        np.testing.assert_array_equal(x, expected_x, strict=True)
        np.testing.assert_array_equal(y, expected_y, strict=True)


def with_rows_reversed(examples):
    x, y = collate(examples)
    return {"x": x[:, ::-1].swapaxes(1, 2), "y": y}


@pytest.mark.slow
def test_subsets_and_the_users_collate_fn_are_passed_to_the_workers(record_folder, monkeypatch):
    def first_four(dataset):
        order = np.arange(20).reshape(4, 5)
        read = batches(dataset, order, with_rows_reversed)
        return [(batch["x"].tolist(), batch["y"].tolist()) for batch in read]

    records, arrays = source(record_folder).load()["train"], Arrays(X[:500], Y[:500])
    read, calls = Records.read_batches, []
    monkeypatch.setattr(
        Records, "read_batches", lambda *args: calls.append(args[1:]) or read(*args)
    )
    (_, val), (_, expected) = split(records, 0.1, seed=4), split(arrays, 0.1, seed=4)
    assert first_four(first_batches(val, 4, 5)) == first_four(expected) and len(calls) == 1


class Unpicklable(Exception):
    def __init__(self, message, _):
        super().__init__(message)
        self.module = signal


def fails_at_seven(record):
    x, y = numpy_example(record)
    if y == 7:
        raise Unpicklable("a seven", None)
    return x, y


def killed_at_seven(record):
    x, y = numpy_example(record)
    if y == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return x, y


def label_is_1_on_the_cpu(record):
    return numpy_example(record)[0], np.int32(os.environ.get("JAX_PLATFORMS") == "cpu")


def fails(examples):
    raise KeyError("broken")


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 2])
def test_an_error_in_a_worker_is_the_same_message_as_without_workers(record_folder, count):
    dataset = Records(RecordFiles(f"{record_folder}/train-*"), fails_at_seven, count)
    seven = int(np.flatnonzero(Y == 7)[0])
    message = (
        rf"train-00000.*record {seven}: parse fails: "
        r".*test_grain\.py, line \d+: Unpicklable: a seven"
    )
    with pytest.raises(UserError, match=message):
        list(batches(dataset, np.arange(500).reshape(50, 10)))
    dataset = Records(RecordFiles(f"{record_folder}/test-*"), numpy_example, count)
    with pytest.raises(
        UserError, match=r"loader\.collate_fn fails: .*test_grain\.py, line \d+: KeyError: 'broken'"
    ):
        list(batches(dataset, np.arange(4).reshape(2, 2), fails))


@pytest.mark.slow
@pytest.mark.parametrize("leaf", ["0", "1"])
def test_a_record_of_another_kind_of_number_is_named(tmp_path, leaf):
    x, y = X[:9], Y[:9]
    odd = [x[4].astype(np.float32), y[4]] if leaf == "0" else [x[4], np.float64(y[4])]
    write_records(tmp_path / "train", [(x[i], y[i]) if i != 4 else odd for i in range(9)])
    dataset = Records(RecordFiles(f"{tmp_path}/train-*"), numpy_example, 0)
    kept, found = [(X.dtype, odd[0].dtype), (Y.dtype, odd[1].dtype)][int(leaf)]
    message = rf"record 4: {leaf} is {found}, but {kept} in .*record 0; write one type"
    for rows in ([[4, 5, 6]], [[4]], [[0, 1], [3, 4]]):
        with pytest.raises(UserError, match=message):
            list(batches(dataset, np.array(rows)))


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_iteration_with_an_error(record_folder):
    dataset = Records(RecordFiles(f"{record_folder}/train-*"), killed_at_seven, 2)
    with pytest.raises(RunError, match=r"a worker process ended \(.*abruptly.*fewer `workers`"):
        list(batches(dataset, np.arange(500).reshape(50, 10)))
    few = np.flatnonzero(Y[:500] != 7)[:4].reshape(2, 2)
    assert [y.tolist() for _, y in batches(dataset, few)] == Y[few].tolist()  # by other workers


@pytest.mark.slow
def test_a_function_that_cannot_be_sent_to_workers_is_an_error(record_folder):
    dataset = source(record_folder).load()["train"]
    with pytest.raises(UserError, match=r"workers: .*lambda.*; or set workers to 0"):
        list(batches(dataset, np.arange(4).reshape(2, 2), lambda examples: collate(examples)))


@pytest.mark.slow
def test_workers_use_no_accelerator(record_folder):
    dataset = Records(RecordFiles(f"{record_folder}/train-*"), label_is_1_on_the_cpu, 1)
    ((_, labels),) = batches(dataset, np.arange(4).reshape(1, 4))
    assert labels.tolist() == [1] * 4


@pytest.mark.slow
def test_a_missing_package_is_an_error_with_the_command_that_installs_it(
    record_folder, monkeypatch
):
    monkeypatch.setitem(sys.modules, "array_record", None)
    with pytest.raises(UserError, match=r"needs array_record.*run `pip install -r training/"):
        source(record_folder)
