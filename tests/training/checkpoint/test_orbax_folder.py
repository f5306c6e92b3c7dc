"""Orbax folders: from any number of devices, they are read back bit by bit, or refused."""

import errno
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.processes import finished, start_all
from training.checkpoint.orbax_folder import digests, read, read_record, write
from utils import Damaged, RunError, UserError

# If one array fails, TensorStore reports the others to an event loop that Orbax has closed by then.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

RECORD = {"epoch": 3, "text": 'a "quoted" \\ ключ', "nested": {"list": [1, 2.5, None, True]}}
LEAVES = {
    "params/blocks/0/norm/weight": jnp.arange(6.0).reshape(2, 3).T,
    "params/blocks/0": jnp.arange(7, dtype=jnp.bfloat16) / 3,  # also a prefix of another name
    "params.blocks/[0] naïve/ключ": np.array([True, False, True]),
    "zeros": jnp.zeros((3, 5)),  # TensorStore does not store chunks of zeros
    "step": jnp.int32(7),
    "scalar": np.array(0.1),
    "numpy scalar": np.uint8(3),
    "key": jax.random.key_data(jax.random.key(3)),
    "strided": np.arange(20, dtype=np.int64)[::-3],
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big-endian": np.arange(5, dtype=">f8"),
    "small": np.arange(8).astype(ml_dtypes.float8_e4m3fn),
    "empty": jnp.zeros((0, 3)),
    "empty half": np.zeros((2, 0), ml_dtypes.bfloat16),
}


def assert_same(arrays, leaves):
    assert list(arrays) == list(leaves)
    for name, leaf in leaves.items():
        leaf = np.asarray(leaf)
        leaf = leaf.astype(leaf.dtype.newbyteorder("="))
        array = arrays[name]
        assert type(array) is np.ndarray
        assert (array.dtype, array.shape) == (leaf.dtype, leaf.shape), name
        assert array.tobytes() == leaf.tobytes(), name


def small(epoch):
    return {
        "params/w": np.full((4, 3), epoch, np.float32),
        "n": np.int32(epoch),
        "none": np.zeros((0, 2)),
    }


def files(folder):
    return sorted(file for file in folder.rglob("*") if file.is_file())


@pytest.fixture
def ours(tmp_path):
    """A valid checkpoint, for a test to damage."""
    path = tmp_path / "a.orbax"
    write(path, small(3), {"epoch": 3})
    return path


def test_arrays_and_record_are_read_back_bit_by_bit(tmp_path):
    write(tmp_path / "a.orbax", LEAVES, RECORD)
    arrays, record = read(tmp_path / "a.orbax")
    assert record == RECORD == read_record(tmp_path / "a.orbax")
    assert_same(arrays, LEAVES)
    arrays["zeros"] += 1  # they are the caller's own
    assert os.listdir(tmp_path) == ["a.orbax"]


def test_a_new_checkpoint_replaces_the_former_one(ours):
    write(ours, {"w": np.ones(2)}, {"epoch": 4})
    arrays, record = read(ours)
    assert record == {"epoch": 4}
    assert_same(arrays, {"w": np.ones(2)})
    assert os.listdir(ours.parent) == [ours.name]


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="this machine has no sha256sum")
def test_sha256sum_accepts_the_digests(ours):
    subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"],
        cwd=ours,
        check=True,
        capture_output=True,
    )
    assert len((ours / "SHA256SUMS").read_text().splitlines()) == len(files(ours)) - 1


SHARDED = """
import sys
import jax, numpy as np
from jax.sharding import PartitionSpec as P
from training.checkpoint.orbax_folder import read, write
assert jax.device_count() == 4
mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
def put(array, *axes):
    return jax.device_put(array, jax.sharding.NamedSharding(mesh, P(*axes)))
whole = np.arange(96, dtype=np.float32).reshape(8, 12)
arrays = {"rows": put(whole, "a"), "both": put(whole, "a", "b")}
arrays |= {"one axis": put(whole, ("a", "b")), "all": put(whole)}
arrays["half"] = put(whole.astype("bfloat16"), None, "b")
write(sys.argv[1], arrays, {"devices": 4})
assert all((a == whole).all() for a in read(sys.argv[1])[0].values())
"""


@pytest.mark.slow
def test_one_device_reads_what_four_devices_wrote(tmp_path):
    finished(start_all(SHARDED, tmp_path / "a.orbax", processes=1, devices=4))
    arrays, record = read(tmp_path / "a.orbax")
    whole = np.arange(96, dtype=np.float32).reshape(8, 12)
    assert record == {"devices": 4}
    assert_same(
        arrays,
        dict.fromkeys(("rows", "both", "one axis", "all"), whole)
        | {"half": whole.astype(ml_dtypes.bfloat16)},
    )


TWO_PROCESSES = """
import sys, threading
from pathlib import Path
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from training.devices import joining
from training.checkpoint.orbax_folder import read, write
from training.devices.sharding import put_leaf
path = Path(sys.argv[1])
joining.join()
assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 4, 2)
mesh = Mesh(jax.devices(), ("data",))
whole = np.arange(96, dtype=np.float32).reshape(8, 12)
def put(array, *axes):
    sharding = NamedSharding(mesh, P(*axes))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
def save():
    for epoch in (1, 2, 3):  # each replaces the previous one
        arrays = {"rows": put(whole + epoch, "data"), "all": put(whole)}
        arrays |= {"host": np.arange(epoch), "none": put(whole[:0])}
        write(path, arrays, {"epoch": epoch})
        arrays, record = read(path)  # complete for both processes
        assert record == {"epoch": epoch}
        assert (arrays["rows"] == whole + epoch).all() and (arrays["all"] == whole).all()
    large = np.arange(2**16, dtype=np.float32).reshape(2**8, 2**8)
    key = np.asarray(jax.random.key_data(jax.random.key(3)))
    arrays = {"cut": put(large, "data"), "whole": put(large), "key": key}
    write(path.with_name("large.orbax"), arrays, {"epoch": 1})
    done.append(True)
done, total = [], jax.jit(lambda a: a * 0.5 + a.sum() * 0)
writing = threading.Thread(target=save)
writing.start()
array = put(whole, "data")
for _ in range(200):  # has collectives, which must not mix with those of a checkpoint
    array = jax.block_until_ready(total(array))
writing.join()
assert done
arrays, record = read(path.with_name("large.orbax"))
large = np.arange(2**16, dtype=np.float32).reshape(2**8, 2**8)
assert [type(a).__name__ for a in arrays.values()] == ["Stored", "Stored", "ndarray"]
assert (arrays["cut"].shape, arrays["cut"].dtype) == (large.shape, large.dtype)
assert (np.asarray(arrays["cut"]) == large).all()
for name in ("cut", "whole"):
    for axes in (("data",), (None, "data"), ()):
        array = put_leaf(arrays[name], NamedSharding(mesh, P(*axes)))
        assert array.sharding.spec == P(*axes) and len(array.addressable_shards) == 2
        for shard in array.addressable_shards:
            assert (np.asarray(shard.data) == large[shard.index]).all()
            assert shard.data.dtype == large.dtype
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux",
    reason="JAX has collectives between CPU processes (Gloo) only on Linux",
)
def test_two_processes_write_one_checkpoint_while_they_train(tmp_path):
    finished(start_all(TWO_PROCESSES, tmp_path / "a.orbax", processes=2, devices=2))
    assert sorted(os.listdir(tmp_path)) == ["a.orbax", "large.orbax"]
    arrays, record = read(tmp_path / "a.orbax")
    whole = np.arange(96, dtype=np.float32).reshape(8, 12)
    assert record == {"epoch": 3}
    assert_same(arrays, {"rows": whole + 3, "all": whole, "host": np.arange(3), "none": whole[:0]})


@pytest.mark.slow
def test_a_flipped_bit_is_refused(ours):
    rng = random.Random(0)
    assert len(files(ours)) > 8
    for file in files(ours):
        data = file.read_bytes()
        positions = range(len(data))
        if file.name not in ("rawtree.json", "SHA256SUMS"):
            positions = {0, len(data) - 1, *(rng.randrange(len(data)) for _ in range(20))}
        for at in positions:
            file.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
            with pytest.raises(Damaged, match=r"a\.orbax: is damaged: changed, missing or added: "):
                read(ours)
        file.write_bytes(data)
    assert_same(read(ours)[0], small(3))


def test_a_folder_with_truncated_missing_or_extra_files_is_refused(ours):
    for file in files(ours):
        data, name = file.read_bytes(), file.relative_to(ours).as_posix()
        for change in (data[:0], data[:-1], data[: len(data) // 2], data + b"\0", data * 2):
            file.write_bytes(change)
            with pytest.raises(Damaged, match=r"a\.orbax: is damaged: "):
                read(ours)
        file.unlink()
        message = f"is damaged: changed, missing or added: {name}$"
        if name == "SHA256SUMS":
            message = "is incomplete: it has no SHA256SUMS, which is written last"
        with pytest.raises(Damaged, match=message):
            read(ours)
        file.write_bytes(data)
    for name in (
        "more",
        "arrays/d/more",
        ".hidden",
        "arrays/checkpoint",
        "SHA256SUMS~",
        "\udcff",
        "a\nb",
    ):
        (ours / name).touch()
        with pytest.raises(Damaged, match=r"a\.orbax: "):
            read(ours)
        (ours / name).unlink()
    os.mkfifo(ours / "pipe")
    with pytest.raises(Damaged, match="pipe is not a regular file"):  # without waiting for data
        read(ours)


def test_a_huge_sparse_file_is_refused_before_it_is_read(ours):
    for name in ("arrays/d/more", "rawtree.json"):
        with open(ours / name, "ab") as file:
            file.truncate(2**40)
        begin = time.perf_counter()
        with pytest.raises(Damaged, match=r"its files have 1024\.0 GiB|missing or added: rawtree"):
            read(ours)
        assert time.perf_counter() - begin < 5


def test_a_folder_with_only_some_of_its_digests_is_refused(ours):
    lines = (ours / "SHA256SUMS").read_text().splitlines(keepends=True)
    for kept in range(len(lines)):
        (ours / "SHA256SUMS").write_text("".join(lines[:kept]))
        with pytest.raises(Damaged, match="is damaged: "):
            read(ours)


@pytest.mark.parametrize("reader", [read, read_record])
def test_a_path_without_a_checkpoint_is_an_error(tmp_path, reader):
    path = tmp_path / "a.orbax"
    with pytest.raises(UserError) as caught:
        reader(path)
    assert str(caught.value) == f"{path}: there is no such checkpoint"
    assert not isinstance(caught.value, Damaged)
    path.touch()
    with pytest.raises(Damaged, match=r"a\.orbax: "):
        reader(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(Damaged, match=r"a\.orbax: "):
        reader(path)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def resealed(folder):
    """Make the digests right again, as an attacker would."""
    (folder / "SHA256SUMS").write_bytes(digests(folder))


@pytest.mark.slow
def test_forged_files_are_refused_and_no_code_in_them_is_run(ours, monkeypatch):
    monkeypatch.chdir(ours.parent)
    for file in files(ours / "arrays"):
        data = file.read_bytes()
        for hostile in (
            pickle.dumps(Bomb()),
            b"",
            b"[]",
            b"{}",
            b"[" * 100_000,
            b'{"tree_metadata": {"os": {}}}',
        ):
            file.write_bytes(hostile)
            resealed(ours)
            try:
                assert_same(read(ours)[0], small(3))  # some of Orbax's files are not needed
            except Damaged as error:
                assert str(error).startswith(f"{ours}: ") and len(str(error)) < 2000
        file.write_bytes(data)
    (ours / "arrays" / "checkpoint").write_bytes(pickle.dumps(Bomb()))
    for name in ("_METADATA", "_CHECKPOINT_METADATA"):  # names of types and of handlers
        file = ours / "arrays" / name
        file.write_text(
            file.read_text()
            .replace("np.ndarray", "os.mkdir")
            .replace("orbax.checkpoint", "antigravity")
        )
    resealed(ours)
    with suppress(Damaged):
        read(ours)
    assert "antigravity" not in sys.modules and not Path("exploded").exists()


FORMS = [["float64", [4, 3]], ["no type", [4, 3]], ["float32", [0, 2**70]], ["O", [4, 3]]]
NOTES = [b"", b"{", b'{"record": {}}', b'{"record": 1, "arrays": {}}']
NOTES += [
    json.dumps({"record": {}, "arrays": {"params/w": form, "n": ["int32", []]}}).encode()
    for form in FORMS
]
NOTES.append(json.dumps({"record": {}, "arrays": {"params/w": ["float32", [4, 3]]}}).encode())


@pytest.mark.parametrize("note", NOTES, ids=range(len(NOTES)))
def test_a_note_that_does_not_fit_the_arrays_is_refused(ours, note):
    (ours / "rawtree.json").write_bytes(note)
    resealed(ours)
    with pytest.raises(Damaged, match=r"a\.orbax: "):
        read(ours)


KILLED = """
import os, sys
import numpy as np
import orbax.checkpoint  # once, for all processes forked below
from training.checkpoint.orbax_folder import write
folder, count = sys.argv[1], 0
def kill_at(stop):
    def hook(event, args):
        global count
        inside = event == "open" and str(args[0]).startswith(folder)
        writes = inside and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir"):
            count += 1
            if count == stop:
                os.kill(os.getpid(), 9)
    sys.addaudithook(hook)
for stop in range(1, 1000):
    child = os.fork()
    if child == 0:
        kill_at(stop)
        arrays = {"params/w": np.full((4, 3), 4, np.float32)}
        write(f"{folder}/{stop}/a.orbax", arrays, {"epoch": 4})
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        print(stop)
        break
"""


@pytest.mark.slow
@pytest.mark.parametrize("former", [True, False])
def test_after_a_kill_at_any_point_the_former_or_the_new_one_is_read(tmp_path, former):
    limit = 120
    for stop in range(1, limit):
        (tmp_path / str(stop)).mkdir()
        if former and stop == 1:
            write(tmp_path / "1" / "a.orbax", small(3), {"epoch": 3})
        elif former:
            shutil.copytree(tmp_path / "1" / "a.orbax", tmp_path / str(stop) / "a.orbax")
    [(output, _)] = finished(start_all(KILLED, tmp_path, processes=1))
    survived, epochs = int(output), []
    assert 10 < survived < limit
    for stop in range(1, survived + 1):
        path = tmp_path / str(stop) / "a.orbax"
        try:
            arrays, record = read(path)
            assert record == read_record(path)
            assert_same(
                arrays,
                small(3) if record["epoch"] == 3 else {"params/w": np.full((4, 3), 4, np.float32)},
            )
            epochs.append(record["epoch"])
        except UserError as error:
            assert str(error) == f"{path}: there is no such checkpoint"
            epochs.append(None)
        assert all(
            name == "a.orbax" or name.startswith(".a.orbax.") for name in os.listdir(path.parent)
        )
        if stop % 5 == 0:  # the next write cleans up
            write(path, small(5), {"epoch": 5})
            assert read(path)[1] == {"epoch": 5}
            assert os.listdir(path.parent) == ["a.orbax"]
    before = 3 if former else None
    assert (epochs[0], epochs[-1], {*epochs}) == (before, 4, {before, 4})


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_full_disk_leaves_the_former_one(ours, monkeypatch, call):
    monkeypatch.setattr(os, call, full)
    with pytest.raises(RunError) as caught:
        write(ours, small(4), {"epoch": 4})
    assert str(caught.value) == f"{ours}: cannot be written: No space left on device"
    assert os.listdir(ours.parent) == [ours.name]
    assert read(ours)[1] == {"epoch": 3}


def test_an_interrupt_leaves_only_the_former_one(ours, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(ours, small(4), {"epoch": 4})
    assert read(ours)[1] == {"epoch": 3}
    assert os.listdir(ours.parent) == [ours.name]


def test_all_files_are_flushed_before_the_rename_and_the_parent_after(tmp_path, monkeypatch):
    path, calls, fsync, rename = tmp_path / "a.orbax", [], os.fsync, os.rename

    def note_fsync(descriptor):
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def note_rename(source, target, **options):
        if Path(target) == path:
            building = Path(source)
            assert {*calls} >= {building, *building.rglob("*")} and tmp_path not in calls
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    write(path, small(3), {})
    assert calls[-1] == tmp_path


@pytest.mark.slow
def test_threads_write_and_read_concurrently_and_leave_nothing_behind(tmp_path):
    leaves, errors = {f"params/{i}/w": jnp.full((8, 8), i) for i in range(10)}, []
    before = threading.enumerate()

    def work(number):
        try:
            for epoch in range(3):
                path = tmp_path / f"{number}.orbax"
                shifted = {name: leaf + number for name, leaf in leaves.items()}
                write(path, shifted, {"epoch": epoch})
                arrays, record = read(path)
                assert record == {"epoch": epoch}
                assert_same(arrays, shifted)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    step, array = jax.jit(lambda a: a @ a / 64), jnp.ones((64, 64))
    while any(thread.is_alive() for thread in threads):  # training continues
        array = step(array).block_until_ready()
    assert not errors
    assert (array == 1).all()
    assert threading.enumerate() == before
    assert sorted(os.listdir(tmp_path)) == ["0.orbax", "1.orbax", "2.orbax"]


def test_without_orbax_the_error_names_what_to_install(ours, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    for call in (lambda: read(ours), lambda: write(ours, small(4), {})):
        with pytest.raises(UserError, match=r"pip install -r training/optional\.txt"):
            call()
    assert read_record(ours) == {"epoch": 3}
