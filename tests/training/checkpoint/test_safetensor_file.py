"""Safetensors files: what is written comes back bit by bit, what was damaged never; no file breaks the reader."""

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
    "one byte": np.array(
        [1], np.uint8
    ),  # an odd length in the midst: what follows must still be found
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
    """A file's bytes, from a header that need not make sense."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def changed(path, at, value):
    """Change one byte of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(bytes([value]))


@pytest.fixture
def ours(tmp_path):
    """A file of ours, to be damaged."""
    path = tmp_path / "a.params"
    write(
        path, {"w": TURNED, "b": jnp.arange(3, dtype=jnp.bfloat16), "n": np.uint8(3)}, {"epoch": 3}
    )
    return path


@pytest.fixture
def trapped(tmp_path):
    """Whether every way of reading such bytes ends in a Damaged that names the file, soon and without much memory."""

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


def test_all_comes_back_bit_by_bit_also_through_the_stock_reader(tmp_path):
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
def test_every_type_comes_back(tmp_path, code):
    bits = np.random.default_rng(0).integers(0, 256, 8 * 8, np.uint8)
    leaf = (bits & 1 if code == "BOOL" else bits).view(TYPES[code])[
        ::-1
    ]  # all kinds of NaN among them
    write(tmp_path / "a.params", {"x": leaf, "scalar": leaf[3], "none": leaf[:0]}, {})
    arrays, _ = read(tmp_path / "a.params")
    assert_same(arrays["x"], leaf)
    assert_same(arrays["scalar"], leaf[3])
    assert_same(arrays["none"], leaf[:0])
    with safe_open(tmp_path / "a.params", framework="numpy") as file:
        if code.startswith(
            "F8"
        ):  # the stock reader knows the type but not where it is, hence our own
            assert file.get_slice("x").get_dtype() == code
        else:
            assert_same(file.get_tensor("x"), leaf)


def test_nothing_but_a_record_and_metrics_that_are_not_finite(tmp_path):
    write(tmp_path / "a.params", {}, {"loss": float("inf")})
    assert read(tmp_path / "a.params") == ({}, {"loss": float("inf")})


@pytest.mark.parametrize(
    "leaf", [np.zeros(2, np.complex64), np.array(["a"]), np.array([None]), jnp.zeros(2, jnp.int4)]
)
def test_a_type_that_the_format_has_not_is_refused_by_the_name_of_its_leaf(tmp_path, leaf):
    with pytest.raises(
        UserError, match=rf"a\.params: cannot hold params/w, an array of {leaf.dtype}"
    ):
        write(tmp_path / "a.params", {"fine": np.zeros(2), "params/w": leaf}, {})
    assert list(tmp_path.iterdir()) == []


def test_the_digest_is_of_the_whole_file_and_at_a_fixed_place(tmp_path):
    for arrays, record in [
        (LEAVES, RECORD),
        ({}, {}),
        ({"0" * 64: np.zeros(9)}, {"sha256": "0" * 64}),
    ]:
        write(tmp_path / "a.params", arrays, record)
        data = (tmp_path / "a.params").read_bytes()
        assert data[8:].startswith(b'{"__metadata__":{"sha256":"') and data[35 + 64 :].startswith(
            b'","rawtree":"{'
        )
        assert (
            data[35 : 35 + 64].decode()
            == hashlib.sha256(data[:35] + b"0" * 64 + data[35 + 64 :]).hexdigest()
        )
        assert int.from_bytes(data[:8], "little") % 8 == 0


def test_each_array_lies_at_a_multiple_of_its_width(tmp_path):
    write(tmp_path / "a.params", LEAVES, RECORD)
    data = (tmp_path / "a.params").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert next(iter(header)) == "__metadata__"
    for name, leaf in LEAVES.items():
        assert header[name]["data_offsets"][0] % np.asarray(leaf).dtype.itemsize == 0


def test_no_flipped_bit_or_changed_byte_is_read(ours):
    data, rng = ours.read_bytes(), random.Random(0)
    header = 8 + int.from_bytes(data[:8], "little")
    assert 300 < header < 600
    flips = [(at, data[at] ^ 1 << bit) for at in range(header) for bit in range(8)]
    flips += [(at, data[at] ^ 1 << rng.randrange(8)) for at in range(header, len(data))]
    flips += [(rng.randrange(len(data)), rng.randrange(256)) for _ in range(1000)]
    for at, value in flips:
        if value != data[at]:
            changed(ours, at, value)
            with pytest.raises(
                Damaged, match=r"a\.params: is (damaged|not a whole safetensors file)"
            ):
                read(ours)
            changed(ours, at, data[at])
    assert_same(read(ours)[0]["w"], TURNED)


def test_the_message_tells_that_the_digest_is_not_right(ours):
    data = ours.read_bytes()
    ours.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(Damaged) as caught:
        read(ours)
    assert str(caught.value) == f"{ours}: is damaged: its SHA-256 is not the one written into it"
    assert read_record(ours) == {"epoch": 3}  # which is not verified
    ours.write_bytes(data.replace(b'"sha256"', b'"sha255"'))
    with pytest.raises(Damaged, match="is damaged: it has no SHA-256 at its place"):
        read(ours)


def test_no_part_of_a_file_is_read_and_none_with_more_behind_it(ours):
    data, rng = ours.read_bytes(), random.Random(0)
    for length in [*range(12), len(data) - 1, *(rng.randrange(len(data)) for _ in range(50))]:
        ours.write_bytes(data[:length])
        with pytest.raises(Damaged, match="is not a whole safetensors file"):
            read(ours)
    for more in (b"\0", b" " * 8, data):
        ours.write_bytes(data + more)
        with pytest.raises(Damaged, match=r"its arrays take \d+ bytes, and it has \d+ of them"):
            read(ours)


def test_a_file_that_others_wrote_is_read_without_a_digest(tmp_path):
    path, arrays = (
        tmp_path / "b.safetensors",
        {"w": np.arange(6.0).reshape(2, 3), "n": np.int16(4), "e": np.zeros((0, 2))},
    )
    for metadata in (
        None,
        {"format": "np"},
        {"sha256": "0" * 64},
        {"a": "1", "sha256": "of something else"},
    ):
        save_file({k: np.asarray(v) for k, v in arrays.items()}, path, metadata)
        found, record = read(path)
        assert record == {} == read_record(path)
        assert found.keys() == arrays.keys()
        for name in arrays:
            assert_same(found[name], arrays[name])


def test_a_record_without_a_digest_is_not_believed(tmp_path):
    save_file({"w": np.zeros(2)}, tmp_path / "a.params", {"rawtree": "{}"})
    with pytest.raises(Damaged, match="it has no SHA-256 at its place"):
        read(tmp_path / "a.params")


HOSTILE = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "no header": bytes(8),
    "a header of 2**60": assembled({"a": F32}, bytes(8), 2**60),
    "a header of 2**64 - 1": assembled({"a": F32}, bytes(8), 2**64 - 1),
    "a header into the arrays": assembled({"a": F32}, b" " * 8, len(json.dumps({"a": F32})) + 8),
    "text": b"epoch,loss\n1,0.5\n" * 100,
    "no object": assembled(b"[]"),
    "a number": assembled(b"1"),
    "a number of 5000 digits": assembled(b'{"a":' + b"9" * 5000 + b"}"),
    "half of an object": assembled(b'{"a":'),
    "invalid UTF-8": assembled(b'{"\xff\xfe":1}'),
    "UTF-16": assembled(json.dumps({"a": F32}).encode("utf-16"), bytes(8)),
    "a byte order mark": assembled(b"\xef\xbb\xbf" + json.dumps({"a": F32}).encode(), bytes(8)),
    "half a surrogate pair": assembled(json.dumps({"\ud800": F32}).encode(), bytes(8)),
    "nested lists": assembled(b'{"a":' + b"[" * 200_000),
    "nested objects": assembled(b'{"a":' * 200_000),
    "as deep as Python goes": assembled(b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"),
    "metadata that is a list": assembled({"__metadata__": [], "a": F32}, bytes(8)),
    "metadata that is a number": assembled({"__metadata__": 0, "a": F32}, bytes(8)),
    "metadata of numbers": assembled({"__metadata__": {"rawtree": 1}, "a": F32}, bytes(8)),
    "metadata of lists": assembled({"__metadata__": {"rawtree": ["{}"]}, "a": F32}, bytes(8)),
    "an array that is null": assembled({"a": None}),
    "an array that is a list": assembled({"a": ["F32", [2], [0, 8]]}, bytes(8)),
    "no offsets": assembled({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "three offsets": assembled({"a": {**F32, "data_offsets": [0, 8, 8]}}, bytes(8)),
    "no such type": assembled({"a": {**F32, "dtype": "F4"}}, bytes(1)),
    "a type that is a list": assembled({"a": {**F32, "dtype": ["F32"]}}, bytes(8)),
    "a long name": assembled({"a" * 100_000: {**F32, "dtype": "F4"}}),
    "NaN as a length": assembled({"a": {**F32, "shape": [float("nan")]}}, bytes(8)),
    "infinity as an offset": assembled({"a": {**F32, "data_offsets": [0, float("inf")]}}, bytes(8)),
    "a length of 2.0": assembled({"a": {**F32, "shape": [2.0]}}, bytes(8)),
    "a length of true": assembled({"a": {**F32, "shape": [True, 2]}}, bytes(8)),
    "a length of -2": assembled({"a": {**F32, "shape": [-2, -1]}}, bytes(8)),
    "an offset of -8": assembled({"a": {**F32, "data_offsets": [-8, 0]}}, bytes(8)),
    "offsets the wrong way round": assembled({"a": {**F32, "data_offsets": [8, 0]}}, bytes(8)),
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
    "a hundred thousand long lengths": assembled(
        {"a": {**F32, "shape": [2**62] * 100_000}}, bytes(8)
    ),
    "more axes than NumPy has": assembled(
        {"a": {**F32, "shape": [1] * 65, "data_offsets": [0, 4]}}, bytes(4)
    ),
    "empty, but longer than NumPy counts": assembled(
        {"a": {**F32, "shape": [0, 2**62], "data_offsets": [0, 0]}}
    ),
    "overlapping": assembled({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, bytes(12)),
    "the same bytes twice": assembled({"a": F32, "b": F32}, bytes(8)),
    "a gap": assembled({"a": F32, "b": {**F32, "data_offsets": [16, 24]}}, bytes(24)),
    "a gap in front": assembled({"a": {**F32, "data_offsets": [8, 16]}}, bytes(16)),
    "a name twice": assembled(
        json.dumps({"a": F32, "b": F32}).replace('"b"', '"\\u0061"').encode(), bytes(8)
    ),
    "metadata twice": assembled(
        b'{"__metadata__":{},"__metadata__":{},"a":' + json.dumps(F32).encode() + b"}", bytes(8)
    ),
}
PICKLES = {
    f"pickle {protocol}": pickle.dumps({"w": [1.0] * 100}, protocol) for protocol in range(2, 6)
}
PICKLES |= {"a short pickle": pickle.dumps(None)}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_soon_and_without_much_memory(trapped, data):
    path = trapped(data, "is not a whole safetensors file: ")
    with suppress(Damaged):  # where only the arrays are wrong, it finds nothing
        assert read_record(path) == {}


NO_RECORDS = [
    "[]",
    "1",
    "null",
    '"a"',
    "{",
    "",
    "[" * 100_000,
    '{"a":' * 100_000,
    '{"a":' + "9" * 5000 + "}",
]


@pytest.mark.parametrize("text", NO_RECORDS, ids=range(len(NO_RECORDS)))
def test_a_record_that_is_no_object_is_refused_even_where_the_digest_is_right(trapped, text):
    header = {"__metadata__": {"sha256": "0" * 64, "rawtree": text}, "a": F32}
    data = assembled(json.dumps(header, separators=(",", ":")).encode(), bytes(8))
    data = data.replace(b"0" * 64, hashlib.sha256(data).hexdigest().encode(), 1)
    path = trapped(data, "its record is no JSON")
    with pytest.raises(Damaged, match="its record is no JSON"):
        read_record(path)


def test_the_stock_reader_refuses_no_more_than_this_one(tmp_path):
    tensors = {
        "a": np.arange(4, dtype=np.float32),
        "b": np.zeros((0, 3), np.int8),
        "c": np.array(3, np.uint16),
    }
    data, rng, path, accepted = save(tensors, {"k": "v"}), random.Random(0), tmp_path / "a", 0
    header = 8 + int.from_bytes(data[:8], "little")
    for _ in range(2000):
        at, value = (
            rng.randrange(header),
            rng.choice(b'0123456789 ,:"[]{}abFIU') if rng.random() < 0.7 else rng.randrange(256),
        )
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


def test_a_pickle_and_a_zip_file_are_told_to_be_such(trapped, tmp_path):
    for data in PICKLES.values():
        trapped(
            data,
            "is a pickle; it is not read, since that could run code: save its arrays as safetensors",
        )
    with zipfile.ZipFile(tmp_path / "torch.pt", "w") as file:
        file.writestr("archive/data.pkl", PICKLES["pickle 2"])
    with zipfile.ZipFile(tmp_path / "empty.zip", "w"):
        pass
    for name in ("torch.pt", "empty.zip"):
        trapped(
            (tmp_path / name).read_bytes(),
            "is a zip file, .*could run code: save its arrays as safetensors",
        )
    trapped(pickle.dumps([1] * 10, 0))


@pytest.mark.parametrize("reader", [read, read_record])
def test_what_is_no_readable_file_is_told(tmp_path, monkeypatch, reader):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    path = tmp_path / "a.params"
    with pytest.raises(UserError) as caught:
        reader(path)
    assert str(caught.value) == f"{path}: there is no such checkpoint"
    with pytest.raises(Damaged, match="is a folder, not a safetensors file"):
        reader(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        Damaged, match="pipe: is no plain file"
    ):  # without waiting for one to write into it
        reader(tmp_path / "pipe")
    path.write_bytes(b"")
    monkeypatch.setattr("training.checkpoint.safetensor_file.open", refuse, raising=False)
    with pytest.raises(Damaged, match=r"a\.params: cannot be read: Permission denied"):
        reader(path)


def test_a_file_that_is_all_holes_is_refused_by_its_header(tmp_path):
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
        with pytest.raises(Damaged, match="is not a whole safetensors file"):
            read(path)
        assert time.perf_counter() - begin < 1


def test_arrays_for_which_there_is_no_memory_are_told(ours, monkeypatch):
    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr(np, "empty", refuse)
    with pytest.raises(
        UserError, match=r"a\.params: its arrays take \d+ B, for which there is no memory"
    ):
        read(ours)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_where_the_disk_is_full_the_earlier_file_stays(ours, monkeypatch, call):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = ours.read_bytes()
    monkeypatch.setattr(os, call, full)
    with pytest.raises(RunError) as caught:
        write(ours, LEAVES, RECORD)
    assert str(caught.value) == f"{ours}: cannot be written: No space left on device"
    assert ours.read_bytes() == before
    assert list(ours.parent.iterdir()) == [ours]


def test_an_interrupt_leaves_the_earlier_file_and_no_other(ours, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    before = ours.read_bytes()
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(ours, LEAVES, RECORD)
    assert ours.read_bytes() == before
    assert list(ours.parent.iterdir()) == [ours]


def test_a_folder_that_is_not_there_is_told(tmp_path):
    for path in (tmp_path / "none" / "a.params", tmp_path / "file" / "a.params"):
        (tmp_path / "file").touch()
        with pytest.raises(RunError, match=r"a\.params: cannot be written: "):
            write(path, LEAVES, RECORD)


def test_the_whole_file_is_on_disk_before_it_takes_its_name_and_the_name_after(
    tmp_path, monkeypatch
):
    path, calls, fsync, replace = tmp_path / "a.params", [], os.fsync, os.replace

    def note_fsync(descriptor):
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(("fsync", target))
        if target != tmp_path:
            assert read(target)[1] == RECORD  # digest and all
        fsync(descriptor)

    def note_replace(source, target):
        calls.append(("replace", Path(source)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    write(path, LEAVES, RECORD)
    temporary = tmp_path / f".a.params.{os.getpid()}.tmp"
    assert calls == [("fsync", temporary), ("replace", temporary), ("fsync", tmp_path)]


def test_writing_copies_nothing_and_reading_only_into_the_arrays(tmp_path):
    arrays = {f"w/{i}": np.full((5 * 2**18,), i, np.float64) for i in range(10)}  # 100 MiB
    path, size = tmp_path / "a.params", 100 * 2**20
    tracemalloc.start()
    try:
        write(path, arrays, {})
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.reset_peak()
        found, _ = read(path)
        assert size < tracemalloc.get_traced_memory()[1] < size + 2**20
        del found
        tracemalloc.reset_peak()
        write(path, {name: w.reshape(512, -1).T for name, w in arrays.items()}, {})
        assert (
            tracemalloc.get_traced_memory()[1] < 2.1 * size / 10
        )  # of those that are not plain, a copy at a time
    finally:
        tracemalloc.stop()


def test_a_header_that_would_not_be_read_is_not_written(tmp_path):
    with pytest.raises(
        UserError, match=r"a\.params: its names and record take 16\.0 MiB, of 16\.0 MiB at most"
    ):
        write(tmp_path / "a.params", {}, {"text": "a" * LONGEST_HEADER})
    write(tmp_path / "a.params", {}, {"text": "a" * (LONGEST_HEADER - 200)})
    assert len(read(tmp_path / "a.params")[1]["text"]) == LONGEST_HEADER - 200
