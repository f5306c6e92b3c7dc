"""Safetensors files: they are read back bit by bit, or refused; no file breaks the reader."""

import errno
import hashlib
import json
import os
import pickle
import random
import time
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save, save_file

from training.checkpoint.safetensor_file import LONGEST_HEADER, TYPES, read, read_record, write
from utils import Damaged, RunError, UserError

TURNED = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)
LEAVES = {
    "params/turned": TURNED,
    "params/strided": np.arange(20, dtype=np.int64)[::-3],
    "params/fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "params/jax": jnp.arange(6.0).reshape(2, 3).T,
    "params/half": jnp.arange(7, dtype=jnp.bfloat16) / 3,
    "step": jnp.int32(7),
    "scalar": np.float64(0.1),
    "empty": jnp.zeros((0, 3)),
    "empty half": np.zeros((2, 0), ml_dtypes.bfloat16),
    "big-endian": np.arange(5, dtype=">f8")[::2],
    "big-endian scalar": np.array(258, ">i4"),
    # An odd length, after which the next array must still be found.
    "one byte": np.array([1], np.uint8),
    "key": jax.random.key_data(jax.random.key(3)),
    "naïve/ключ": np.array([True, False, True]),
}
RECORD = {
    "epoch": 3,
    "text": 'a "quoted" \\ ключ',
    "nested": {"list": [1, 2.5, None, True]},
    "0" * 64: "0" * 64,
}
F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def as_stored(leaf):
    leaf = np.asarray(leaf)
    return leaf.astype(leaf.dtype.newbyteorder("<"))


def assert_same(array, leaf):
    leaf = as_stored(leaf)
    assert (array.dtype, array.shape, array.tobytes()) == (leaf.dtype, leaf.shape, leaf.tobytes())


def assembled(header, data=b"", length=None):
    """The bytes of a file with this header, which may be invalid."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def changed(path, at, value):
    """Change one byte of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(bytes([value]))


@pytest.fixture
def ours(tmp_path):
    """A valid checkpoint, for a test to damage."""
    path = tmp_path / "a.params"
    write(
        path, {"w": TURNED, "b": jnp.arange(3, dtype=jnp.bfloat16), "n": np.uint8(3)}, {"epoch": 3}
    )
    return path


@pytest.fixture
def trapped(tmp_path):
    """check(data): reading it raises a Damaged that names the file, fast and in little memory."""

    def check(data, message="is "):
        path = tmp_path / "hostile.params"
        path.write_bytes(data)
        begin = time.perf_counter()
        tracemalloc.start()
        try:
            with pytest.raises(Damaged, match=message) as caught:
                read(path)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert str(caught.value).startswith(f"{path}: is ") and len(str(caught.value)) < 1000
        assert peak < 3e6 + 40 * len(data) and time.perf_counter() - begin < 2
        return path

    return check


def test_arrays_and_record_are_read_back_bit_by_bit_also_by_the_stock_reader(tmp_path):
    write(tmp_path / "a.params", LEAVES, RECORD)
    arrays, record = read(tmp_path / "a.params")
    assert record == RECORD == read_record(tmp_path / "a.params")
    assert arrays.keys() == LEAVES.keys()
    with safe_open(tmp_path / "a.params", framework="numpy") as file:
        assert json.loads(file.metadata()["rawtree"]) == RECORD
        assert set(file.keys()) == LEAVES.keys()
        for name, leaf in LEAVES.items():
            assert_same(arrays[name], leaf)
            assert_same(file.get_tensor(name), leaf)
    arrays["params/turned"] += 1  # they are the caller's own


@pytest.mark.parametrize("code", TYPES)
def test_every_type_is_read_back(tmp_path, code):
    bits = np.random.default_rng(0).integers(0, 256, 8 * 8, np.uint8)
    # All kinds of NaN are among them.
    leaf = (bits & 1 if code == "BOOL" else bits).view(TYPES[code])[::-1]
    write(tmp_path / "a.params", {"x": leaf, "scalar": leaf[3], "none": leaf[:0]}, {})
    arrays, _ = read(tmp_path / "a.params")
    assert_same(arrays["x"], leaf)
    assert_same(arrays["scalar"], leaf[3])
    assert_same(arrays["none"], leaf[:0])
    with safe_open(tmp_path / "a.params", framework="numpy") as file:
        if code.startswith("F8"):  # the stock reader cannot return these as NumPy arrays
            assert file.get_slice("x").get_dtype() == code
        else:
            assert_same(file.get_tensor("x"), leaf)


@pytest.mark.parametrize(
    "leaf", [np.zeros(2, np.complex64), np.array(["a"]), np.array([None]), jnp.zeros(2, jnp.int4)]
)
def test_a_type_that_the_format_lacks_is_refused_by_the_name_of_its_leaf(tmp_path, leaf):
    message = rf"a\.params: cannot store params/w, an array of {leaf.dtype}"
    with pytest.raises(UserError, match=message):
        write(tmp_path / "a.params", {"fine": np.zeros(2), "params/w": leaf}, {})
    assert list(tmp_path.iterdir()) == []


def test_the_digest_covers_the_whole_file_and_has_a_fixed_position(tmp_path):
    for arrays, record in [
        (LEAVES, RECORD),
        ({}, {}),
        ({"0" * 64: np.zeros(9)}, {"sha256": "0" * 64}),
    ]:
        write(tmp_path / "a.params", arrays, record)
        data = (tmp_path / "a.params").read_bytes()
        before, digest, after = data[:35], data[35:99].decode(), data[99:]
        assert before[8:] == b'{"__metadata__":{"sha256":"' and after.startswith(b'","rawtree":"{')
        assert digest == hashlib.sha256(before + b"0" * 64 + after).hexdigest()
        assert int.from_bytes(data[:8], "little") % 8 == 0


def test_a_flipped_bit_or_a_changed_byte_is_refused(ours):
    data, rng = ours.read_bytes(), random.Random(0)
    header = 8 + int.from_bytes(data[:8], "little")
    assert 300 < header < 600
    flips = [(at, data[at] ^ 1 << bit) for at in range(header) for bit in range(8)]
    flips += [(at, data[at] ^ 1 << rng.randrange(8)) for at in range(header, len(data))]
    flips += [(rng.randrange(len(data)), rng.randrange(256)) for _ in range(1000)]
    for at, value in flips:
        if value != data[at]:
            changed(ours, at, value)
            with pytest.raises(Damaged, match=r"a\.params: is (damaged|not a valid safetensors)"):
                read(ours)
            changed(ours, at, data[at])
    assert_same(read(ours)[0]["w"], TURNED)


def test_a_truncated_file_and_one_with_trailing_bytes_are_refused(ours):
    data, rng = ours.read_bytes(), random.Random(0)
    for length in [*range(12), len(data) - 1, *(rng.randrange(len(data)) for _ in range(50))]:
        ours.write_bytes(data[:length])
        with pytest.raises(Damaged, match="is not a valid safetensors file"):
            read(ours)
    for more in (b"\0", b" " * 8, data):
        ours.write_bytes(data + more)
        with pytest.raises(Damaged, match=r"not a valid safetensors file: .*not fully covered"):
            read(ours)


def test_a_file_of_another_program_is_read_without_a_digest(tmp_path):
    path = tmp_path / "b.safetensors"
    arrays = {"w": np.arange(6.0).reshape(2, 3), "n": np.int16(4), "e": np.zeros((0, 2))}
    for metadata in (
        None,
        {"format": "np"},
        {"sha256": "0" * 64},
        {"a": "1", "sha256": "of something else"},
    ):
        save_file({k: np.asarray(v) for k, v in arrays.items()}, path, metadata)
        loaded, record = read(path)
        assert record == {} == read_record(path)
        assert loaded.keys() == arrays.keys()
        for name in arrays:
            assert_same(loaded[name], arrays[name])


def test_a_record_without_a_digest_is_refused(tmp_path):
    save_file({"w": np.zeros(2)}, tmp_path / "a.params", {"rawtree": "{}"})
    with pytest.raises(Damaged, match="its header does not begin with a SHA-256"):
        read(tmp_path / "a.params")


HOSTILE = {
    "empty": b"",
    "no header": bytes(8),
    "a header of 2**60": assembled({"a": F32}, bytes(8), 2**60),
    "text": b"epoch,loss\n1,0.5\n" * 100,
    "no object": assembled(b"[]"),
    "invalid UTF-8": assembled(b'{"\xff\xfe":1}'),
    "nested lists": assembled(b'{"a":' + b"[" * 200_000),
    "metadata that is a list": assembled({"__metadata__": [], "a": F32}, bytes(8)),
    "metadata of numbers": assembled({"__metadata__": {"rawtree": 1}, "a": F32}, bytes(8)),
    "no offsets": assembled({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "no such type": assembled({"a": {**F32, "dtype": "F4"}}, bytes(1)),
    "a long name": assembled({"a" * 100_000: {**F32, "dtype": "F4"}}),
    "infinity as an offset": assembled({"a": {**F32, "data_offsets": [0, float("inf")]}}, bytes(8)),
    "a length of 2.0": assembled({"a": {**F32, "shape": [2.0]}}, bytes(8)),
    "a length of -2": assembled({"a": {**F32, "shape": [-2, -1]}}, bytes(8)),
    "an offset of -8": assembled({"a": {**F32, "data_offsets": [-8, 0]}}, bytes(8)),
    "offsets out of the file": assembled(
        {"a": {**F32, "data_offsets": [2**40, 2**40 + 8]}}, bytes(8)
    ),
    "an array larger than the file": assembled(
        {"a": {**F32, "shape": [2**40], "data_offsets": [0, 2**42]}}, bytes(8)
    ),
    "lengths whose product wraps to 0": assembled(
        {"a": {**F32, "shape": [2**62, 4], "data_offsets": [0, 0]}}
    ),
    "a length past 64 bits": assembled({"a": {**F32, "shape": [2**70, 0], "data_offsets": [0, 0]}}),
    "more axes than NumPy has": assembled(
        {"a": {**F32, "shape": [1] * 65, "data_offsets": [0, 4]}}, bytes(4)
    ),
    "empty, but longer than NumPy counts": assembled(
        {"a": {**F32, "shape": [0, 2**62], "data_offsets": [0, 0]}}
    ),
    "overlapping": assembled({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, bytes(12)),
    "a gap": assembled({"a": F32, "b": {**F32, "data_offsets": [16, 24]}}, bytes(24)),
}
PICKLES = {
    f"pickle {protocol}": pickle.dumps({"w": [1.0] * 100}, protocol) for protocol in range(2, 6)
}
PICKLES |= {"a short pickle": pickle.dumps(None)}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_fast_and_in_little_memory(trapped, data):
    path = trapped(data, "is not a valid safetensors file: ")
    with suppress(Damaged):  # if only the arrays are wrong, there is an empty record
        assert read_record(path) == {}


NO_RECORDS = [
    "[]",
    "{",
    "",
    "[" * 100_000,
]


@pytest.mark.parametrize("text", NO_RECORDS, ids=range(len(NO_RECORDS)))
def test_a_record_that_is_not_an_object_is_refused_even_if_the_digest_is_right(trapped, text):
    header = {"__metadata__": {"sha256": "0" * 64, "rawtree": text}, "a": F32}
    data = assembled(json.dumps(header, separators=(",", ":")).encode(), bytes(8))
    data = data.replace(b"0" * 64, hashlib.sha256(data).hexdigest().encode(), 1)
    path = trapped(data, r"its record is not (a )?JSON")
    with pytest.raises(Damaged, match=r"its record is not (a )?JSON"):
        read_record(path)


@pytest.mark.slow
def test_the_stock_reader_accepts_every_file_that_this_one_accepts(tmp_path):
    tensors = {
        "a": np.arange(4, dtype=np.float32),
        "b": np.zeros((0, 3), np.int8),
        "c": np.array(3, np.uint16),
    }
    data, rng, path, accepted = save(tensors, {"k": "v"}), random.Random(0), tmp_path / "a", 0
    header = 8 + int.from_bytes(data[:8], "little")
    for _ in range(2000):
        at = rng.randrange(header)
        is_json = rng.random() < 0.7
        value = rng.choice(b'0123456789 ,:"[]{}abFIU') if is_json else rng.randrange(256)
        path.write_bytes(data[:at] + bytes([value]) + data[at + 1 :])
        try:
            arrays, _ = read(path)
        except Damaged:
            continue
        with safe_open(path, framework="numpy") as file:
            assert set(file.keys()) == arrays.keys()
            for name, array in arrays.items():
                assert_same(array, file.get_tensor(name))
        accepted += 1
    assert accepted > 100


def test_a_pickle_and_a_zip_file_are_recognized(trapped, tmp_path):
    advice = "could run code: save its arrays as safetensors"
    for data in PICKLES.values():
        trapped(data, f"is a pickle; it is not read, since that {advice}")
    with zipfile.ZipFile(tmp_path / "torch.pt", "w") as file:
        file.writestr("archive/data.pkl", PICKLES["pickle 2"])
    with zipfile.ZipFile(tmp_path / "empty.zip", "w"):
        pass
    for name in ("torch.pt", "empty.zip"):
        trapped((tmp_path / name).read_bytes(), f"is a zip file, .*{advice}")
    trapped(pickle.dumps([1] * 10, 0))


@pytest.mark.parametrize("reader", [read, read_record])
def test_a_path_without_a_readable_file_is_an_error(tmp_path, monkeypatch, reader):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    path = tmp_path / "a.params"
    with pytest.raises(UserError) as caught:
        reader(path)
    assert str(caught.value) == f"{path}: there is no such checkpoint"
    with pytest.raises(Damaged, match="cannot be read: Is a directory"):
        reader(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    # It does not wait for data from the pipe.
    with pytest.raises(Damaged, match="pipe: cannot be read: it is a pipe or a device"):
        reader(tmp_path / "pipe")
    path.write_bytes(b"")
    monkeypatch.setattr("training.checkpoint.safetensor_file.open_file", refuse)
    with pytest.raises(Damaged, match=r"a\.params: cannot be read: Permission denied"):
        reader(path)


def test_a_huge_sparse_file_is_refused_by_its_header(tmp_path):
    path = tmp_path / "a.params"
    for start in (
        assembled({"a": F32}),
        (LONGEST_HEADER + 8).to_bytes(8, "little"),
        bytes(8),
        (2**35).to_bytes(8, "little"),
    ):
        path.write_bytes(start)
        os.truncate(path, 2**36)
        begin = time.perf_counter()
        with pytest.raises(Damaged, match="is not a valid safetensors file"):
            read(path)
        assert time.perf_counter() - begin < 1


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_earlier_file(ours, monkeypatch, call):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = ours.read_bytes()
    monkeypatch.setattr(os, call, full)
    with pytest.raises(RunError) as caught:
        write(ours, LEAVES, RECORD)
    assert str(caught.value) == f"{ours}: cannot be written: No space left on device"
    assert ours.read_bytes() == before
    assert list(ours.parent.iterdir()) == [ours]


def test_an_interrupt_leaves_only_the_earlier_file(ours, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    before = ours.read_bytes()
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(ours, LEAVES, RECORD)
    assert ours.read_bytes() == before
    assert list(ours.parent.iterdir()) == [ours]


def test_the_file_is_flushed_before_its_rename_and_the_folder_after(tmp_path, monkeypatch):
    path, calls, fsync, replace = tmp_path / "a.params", [], os.fsync, os.replace

    def note_fsync(descriptor):
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(("fsync", target))
        if target != tmp_path:
            assert read(target)[1] == RECORD  # with a valid digest
        fsync(descriptor)

    def note_replace(source, target):
        calls.append(("replace", Path(source)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    write(path, LEAVES, RECORD)
    temporary = tmp_path / f".a.params.{os.getpid()}.tmp"
    assert calls == [("fsync", temporary), ("replace", temporary), ("fsync", tmp_path)]


@pytest.mark.slow
def test_writing_makes_no_copies_and_reading_allocates_only_the_arrays(tmp_path):
    arrays = {f"w/{i}": np.full((5 * 2**18,), i, np.float64) for i in range(10)}  # 100 MiB
    path, size = tmp_path / "a.params", 100 * 2**20
    tracemalloc.start()
    try:
        write(path, arrays, {})
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.reset_peak()
        loaded, _ = read(path)
        assert size < tracemalloc.get_traced_memory()[1] < size + 2**20
        del loaded
        tracemalloc.reset_peak()
        write(path, {name: w.reshape(512, -1).T for name, w in arrays.items()}, {})
        # Arrays that are not contiguous are copied one at a time.
        assert tracemalloc.get_traced_memory()[1] < 2.1 * size / 10
    finally:
        tracemalloc.stop()
