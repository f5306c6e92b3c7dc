"""Batches that worker processes read: those of arrays, to the bit; what fails is one message; and no process survives."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from data_loader.base import Arrays, loaded
from data_loader.digits import draw
from data_loader.grain_source import Records, grain
from data_loader.loader import batches, collate, epoch_order, first_batches, split
from data_loader.records import numpy_example, write_records
from tests.processes import ROOT, marked
from training.checkpoint.storage import load
from training.run import TIMES
from utils import RunError, UserError

X, Y = draw(0, 600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """500 training digits in three files, 100 test digits in one."""
    folder = tmp_path_factory.mktemp("array_records")
    write_records(folder / "train", Arrays(X[:500], Y[:500]), shards=3)
    write_records(folder / "test", Arrays(X[500:], Y[500:]))
    return folder


def source(folder, **arguments):
    return grain(f"{folder}/train-*.array_record", **{"num_classes": 10} | arguments)


def workers():
    """The processes that this one has started with multiprocessing, but for the one that tidies shared memory."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            found += (
                [path.name]
                if parent == os.getpid() and b"spawn_main" in (path / "cmdline").read_bytes()
                else []
            )
    return found


def shared():
    return set(Path("/dev/shm").glob("psm_*"))


@pytest.fixture(autouse=True)
def nothing_is_left():
    gc.collect()
    before = shared()
    yield
    deadline = time.monotonic() + 10
    while (workers() or shared() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not workers() and not shared() - before


def test_sizes_and_shapes_are_known_without_reading_the_data(folder):
    data = source(
        folder,
        test=f"{folder}/test-*",
        val=f"{folder}/test-00000-of-00001.array_record",
        vocab_size=7,
    )
    assert data.sizes == {"train": 500, "val": 100, "test": 100} and (
        data.num_classes,
        data.vocab_size,
    ) == (10, 7)
    assert (
        data.example[0].shape == (28, 28, 1)
        and data.example[0].dtype == np.uint8
        and not data.example[0].any()
    )
    x, y = loaded(data)["test"][99]
    assert (x == X[599]).all() and y == Y[599]


@pytest.mark.parametrize(
    ("count", "start"), [(0, 0), (2, 1), pytest.param(3, 6, marks=pytest.mark.torture)], ids=str
)
def test_the_batches_are_those_of_arrays_for_any_number_of_workers_and_from_anywhere(
    folder, count, start
):
    order, _ = epoch_order(500, 64, seed=3, epoch=2, shuffle=True)
    found = batches(source(folder, workers=count).load()["train"], order, start=start)
    wanted = batches(Arrays(X[:500], Y[:500]), order, start=start)
    for (x, y), (wanted_x, wanted_y) in zip(found, wanted, strict=True):
        assert type(x) is np.ndarray  # of its own memory, not of a worker's
        np.testing.assert_array_equal(x, wanted_x, strict=True)
        np.testing.assert_array_equal(y, wanted_y, strict=True)


def with_rows_reversed(examples):
    x, y = collate(examples)
    return {"x": x[:, ::-1].swapaxes(1, 2), "y": y}


def test_parts_of_a_set_and_a_collate_fn_of_ones_own_go_to_the_workers(folder):
    def heads(dataset):
        return [
            (b["x"].tolist(), b["y"].tolist())
            for b in batches(dataset, np.arange(20).reshape(4, 5), with_rows_reversed)
        ]

    whole, arrays = source(folder).load()["train"], Arrays(X[:500], Y[:500])
    read = whole.read_batches
    asked = []
    whole.read_batches = lambda order, collate_fn: asked.append(order) or read(order, collate_fn)
    (_, val), (_, wanted) = split(whole, 0.1, seed=4), split(arrays, 0.1, seed=4)
    assert heads(first_batches(val, 4, 5)) == heads(wanted) and len(asked) == 1


def test_leaving_early_ends_the_workers(folder):
    for taken in (1, 6):
        found = batches(source(folder).load()["train"], np.arange(500).reshape(50, 10))
        for _ in range(taken):
            next(found)
        assert len(workers()) == 2
        found.close()
        assert not workers()


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(one)
        self.lock = signal


def fails_at_seven(record):
    x, y = numpy_example(record)
    if y == 7:
        raise Unpicklable("a seven", "!")
    return x, y


def killed_at_seven(record):
    x, y = numpy_example(record)
    if y == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return x, y


def platform(record):
    return numpy_example(record)[0], np.int32(os.environ.get("JAX_PLATFORMS") == "cpu")


def fails(examples):
    raise KeyError("no way")


@pytest.mark.parametrize("count", [0, 2])
def test_what_fails_in_a_worker_is_the_same_message_as_without_one(folder, count):
    dataset = Records(f"{folder}/train-*", fails_at_seven, count)
    seven = int(np.flatnonzero(Y == 7)[0])
    with pytest.raises(
        UserError,
        match=rf"train-00000.*record {seven}: parse fails: .*test_grain\.py, line \d+: Unp.*: a seven",
    ):
        list(batches(dataset, np.arange(500).reshape(50, 10)))
    with pytest.raises(
        UserError, match=r"loader\.collate_fn fails: .*test_grain\.py, line \d+: KeyError: 'no way'"
    ):
        list(
            batches(
                Records(f"{folder}/test-*", numpy_example, count), np.arange(4).reshape(2, 2), fails
            )
        )


def test_a_worker_that_is_killed_is_told_and_not_waited_for(folder):
    with pytest.raises(RunError, match=r"a worker process ended \(.*exit code -9.*fewer `workers`"):
        list(
            batches(
                Records(f"{folder}/train-*", killed_at_seven, 2), np.arange(500).reshape(50, 10)
            )
        )


def test_workers_leave_the_accelerators_alone(folder):
    ((_, platforms),) = batches(
        Records(f"{folder}/train-*", platform, 1), np.arange(4).reshape(1, 4)
    )
    assert platforms.tolist() == [1] * 4


def test_a_label_outside_the_classes_is_told_with_its_record(folder):
    nine = int(np.flatnonzero(Y == 9)[0])
    with pytest.raises(
        UserError, match=rf"record {nine}: its target: label 9 .* outside the 9 classes"
    ):
        source(folder, num_classes=9).load()["train"][nine]


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("grain", "which is not installed: run `pip install -r training/"),
        ("array_record", "needs array_rec"),
    ],
)
def test_a_missing_library_is_a_clear_error(folder, monkeypatch, module, said):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=said):
        source(folder)


def test_ranges_are_told_together(folder):
    with pytest.raises(
        ValueError,
        match=r"^workers: -1 is too small; at least 0\nnum_classes: 0 is too small; at least 1$",
    ):
        source(folder, workers=-1, num_classes=0)


CONFIG = {
    "title": "Records",
    "seed": 7,
    "model": {"name": "mlp", "args": {"dims": [16]}},
    "loader": {"batch_size": 64, "val_size": 50},
    "preprocess": ["to_unit"],
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "optimizer": {"name": "adamw", "args": {"lr": 0.01}},
    "training": {"epochs": 2, "eval_every": 2},
    "checkpoint": {"every_steps": 3},
    "logging": {"every_steps": 1, "report": False},
}
SLOW = """
import os, time
from data_loader.records import numpy_example
def slowly(record):
    time.sleep(0.002)
    return numpy_example(record)
def ends(record):
    x, y = numpy_example(record)
    if y == 3 and x.sum() == {sum}: raise ValueError("such a three")
    return x, y
"""


def records(folder, pattern="train-*.array_record", **arguments):
    return {
        "name": "grain",
        "args": {"train": str(folder / pattern), "num_classes": 10} | arguments,
    }


class Training:
    """train.py in a session of its own, whose processes all carry a mark."""

    def __init__(self, place, data, *arguments):
        (place / "config.json").write_text(json.dumps(CONFIG | {"data": data}))
        self.mark = uuid.uuid4().hex
        environment = os.environ | {"XDG_CACHE_HOME": str(place / "cache"), "MARK": self.mark}
        command = [sys.executable, str(ROOT / "train.py"), "-c", "config.json", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(
            command, cwd=place, env=environment, start_new_session=True, **pipes
        )

    def wait_for(self, text):
        for line in self.process.stdout:
            if text in line:
                return
        raise AssertionError(self.process.stderr.read())

    def ended(self):
        """(exit code, what it said); nothing that it started may live on."""
        out, err = self.process.communicate(timeout=60)
        deadline = time.monotonic() + 10
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not self.alive()
        assert "Traceback" not in out + err, out + err
        return self.process.returncode, out + err

    def alive(self):
        """The processes with the mark."""
        return marked(self.mark)


def run_folder(place):
    (folder,) = (place / "saved" / "Records").iterdir()
    return folder


def rows(place):
    lines = (run_folder(place) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def assert_same_run(place, wanted):
    assert rows(place) == rows(wanted)
    (found, _), (weights, _) = (
        load(run_folder(p) / "checkpoint-epoch_2.params") for p in (place, wanted)
    )
    for name, array in weights.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name, strict=True)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The same run over arrays in memory."""
    place = tmp_path_factory.mktemp("reference")
    np.savez(place / "train.npz", x=X[:500], y=Y[:500])
    data = {"name": "arrays", "args": {"train": "train.npz"}}
    code, said = Training(place, data, "loader.device_budget_mb=0").ended()
    assert code == 0, said
    assert len(rows(place)) > 15
    return place


def test_a_run_over_record_files_has_the_bits_of_one_in_memory(folder, reference, tmp_path):
    code, said = Training(tmp_path, records(folder)).ended()
    assert code == 0, said
    assert_same_run(tmp_path, reference)


@pytest.mark.torture
def test_a_run_over_files_of_tensorflow_has_them_too(tf_folder, reference, tmp_path):
    image = {"name": "tf_example", "args": {"color": "gray"}}
    code, said = Training(
        tmp_path, records(tf_folder, "train-*.tfrecord", workers=0, parse=image)
    ).ended()
    assert code == 0, said
    assert_same_run(tmp_path, reference)


@pytest.mark.torture
def test_killed_within_an_epoch_a_run_goes_on_to_the_same_bits_and_leaves_no_worker(
    folder, reference, tmp_path
):
    (tmp_path / "mine.py").write_text(SLOW)
    data = records(folder, parse="mine.slowly")
    training = Training(tmp_path, data)
    training.wait_for("checkpoint-step_3.params")
    assert len(training.alive()) >= 3
    training.process.kill()
    training.ended()
    code, said = Training(tmp_path, data, "--resume", "auto").ended()
    assert code == 0 and "Going on from checkpoint-step_" in said, said
    assert_same_run(tmp_path, reference)


def test_ctrl_c_reaches_the_workers_too_and_still_the_run_ends_in_order(folder, tmp_path):
    (tmp_path / "mine.py").write_text(SLOW)
    training = Training(tmp_path, records(folder, parse="mine.slowly"), "training.epochs=100")
    training.wait_for("Epoch 1 [3/8")
    others = [int(pid) for pid in training.alive() if int(pid) != training.process.pid]
    for pid in others:
        os.kill(pid, signal.SIGTERM)  # as a scheduler does, to all of a job
    os.killpg(training.process.pid, signal.SIGINT)  # as a terminal does
    code, said = training.ended()
    assert code == 75 and len(others) >= 3 and "KeyboardInterrupt" not in said, said
    assert list(run_folder(tmp_path).glob("checkpoint-step_*"))


@pytest.mark.torture
def test_a_record_that_fails_in_a_worker_ends_the_run_with_one_message(folder, tmp_path):
    three = np.flatnonzero(Y[:500] == 3)[-1]
    (tmp_path / "mine.py").write_text(SLOW.format(sum=X[three].sum()))
    code, said = Training(tmp_path, records(folder, parse="mine.ends")).ended()
    assert code == 2
    assert (
        said.splitlines()[-1].endswith("ValueError: such a three")
        and f"train-00002-of-00003.array_record: record {three - 334}" in said
    )
