"""What is read as data is a regular file and is read up to a limit: a pipe does not hang a command,
and a file that is huge, or claims to be, does not fill the memory."""

import gzip
import io
import os
import signal
import struct
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data_loader import cifar10, tokenize
from data_loader.arrays import arrays
from data_loader.base import loaded
from data_loader.cifar10 import cifar10 as cifar10_part
from data_loader.grain import RecordFiles
from data_loader.huggingface import huggingface
from data_loader.images import pixels
from data_loader.mnist import read_idx
from data_loader.table import csv, parquet
from data_loader.text import parts_of, text
from data_loader.tokenizers.saved import tokenizer_file
from data_loader.tokens import tokens
from data_loader.webdataset import webdataset
from inference.generate import prompt_of
from inference.predictor import read_arrays
from inference.verify import own_inputs
from utils import RunError, UserError

SECONDS, BYTES = 20, 2**30  # that a reader may take; most take milliseconds
HUGE = 2**40  # of a sparse file, which takes a few KiB on the disk


@pytest.fixture(autouse=True)
def limits(tmp_path, monkeypatch):
    """A reader that waits, or fills the memory, ends in an error."""
    if not sys.platform.startswith("linux"):
        pytest.skip("limits of Linux")
    import resource

    def late(*_):
        raise TimeoutError(f"it takes more than {SECONDS} s")

    status = Path("/proc/self/status").read_text().splitlines()
    held = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    before, handler = resource.getrlimit(resource.RLIMIT_DATA), signal.signal(signal.SIGALRM, late)
    monkeypatch.chdir(tmp_path)
    resource.setrlimit(resource.RLIMIT_DATA, (held + BYTES, before[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_DATA, before)


def sparse(path, size=HUGE, start=b"", end=b""):
    """A file of zeros with a beginning and an end."""
    with open(path, "wb") as file:
        file.write(start)
        file.truncate(size - len(end))
        file.seek(0, 2)
        file.write(end)


def beside(path):
    """A dataset of tokens whose description, or tokenizer, is at the path."""
    np.zeros(100, np.uint16).tofile("train.bin")
    return tokens("train.bin", length=4, tokenizer=None if path == "tokens.json" else path)


def from_huggingface(path):
    pytest.importorskip("datasets", reason="optional")
    huggingface(path.rpartition(".")[2], data_files={"train": path}, y="y")


def a_parquet(path):
    pytest.importorskip("pyarrow", reason="optional")
    parquet(path, "y")


def as_inputs(path):
    return own_inputs(path, SimpleNamespace(inputs=np.zeros(3)))


def as_arrays(path):
    return read_arrays(Path(path), "x", SimpleNamespace(inputs={"x": None}))


def as_prompt(path):
    return prompt_of(SimpleNamespace(prompt=None, prompt_file=path))


# {file: (how it is read, why a huge one of zeros is not)}
LARGE = r"it has 1024\.0 GiB, and at most"
KINDS = {
    "a.txt": (text, "1048576 MB of text are too many"),
    "a.jsonl": (text, "1048576 MB of text are too many"),
    "tokens.npy": (lambda path: tokens(path, vocab_size=9), "cannot be read as tokens"),
    "tokens.json": (beside, LARGE),
    "tokenizer.json": (tokenizer_file, LARGE),
    "beside.json": (beside, LARGE),
    "gpt2.tiktoken": (tokenizer_file, LARGE),
    "a.csv": (lambda path: csv(path, "y"), LARGE),
    "a.parquet": (a_parquet, LARGE),
    "hf.csv": (from_huggingface, "would need 6144.0 GiB"),
    "hf.json": (from_huggingface, "would need 6144.0 GiB"),
    "a.tar": (webdataset, "neither an ArrayRecord file nor"),
    "a.tfrecord": (RecordFiles, "neither an ArrayRecord file nor"),
    "a.npz": (lambda path: arrays(path), "x cannot be read"),
    "x.npy": (lambda path: arrays("."), "x cannot be read"),
    "a.png": (lambda path: pixels(path, None, "rgb"), LARGE),
    "in.npz": (as_arrays, "cannot be read"),
    "inputs.npz": (as_inputs, "cannot be read"),
    "inputs.npy": (as_inputs, "cannot be read"),
    "prompt.txt": (as_prompt, LARGE),
}


@pytest.mark.parametrize("name", [*KINDS, "tokens.bin", "tokenize.txt"])
def test_no_reader_waits_for_a_pipe(tmp_path, name):
    os.mkfifo(name)
    if name == "tokenize.txt":
        assert tokenize.main([name, "--out", "out"]) == 2
        return
    read_it, _ = KINDS.get(name, (lambda path: tokens(path, vocab_size=9), ""))
    with pytest.raises((UserError, RunError), match="it is a pipe or a device"):
        read_it(name)


@pytest.mark.parametrize("name", KINDS)
def test_no_reader_reads_a_huge_file_whole(name):
    read_it, why = KINDS[name]
    sparse(name)
    with pytest.raises((UserError, RunError), match=why):
        read_it(name)


def test_a_device_is_not_read(capsys):
    for read_it in (text, tokenizer_file, as_inputs, as_prompt, RecordFiles):
        with pytest.raises(UserError, match="it is a pipe or a device"):
            read_it("/dev/zero")
    assert tokenize.main(["/dev/zero", "--out", "out"]) == 2
    assert "/dev/zero: cannot be read: it is a pipe" in capsys.readouterr().err


def test_large_files_that_need_not_be_in_memory_work():
    sparse("train.bin")
    assert len(loaded(tokens("train.bin", length=2**20, vocab_size=9))["train"]) == 2**19
    start = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        start, {"descr": "<u2", "fortran_order": False, "shape": (2**39 - 2**6,)}
    )
    sparse("train.npy", start=start.getvalue())
    assert tokens("train.npy", length=2**20, vocab_size=9).sizes["train"] == 2**19


def test_the_parts_of_a_large_text_are_found_but_not_one_that_is_larger_than_the_memory(
    monkeypatch,
):
    monkeypatch.setattr("data_loader.text.SIZE", 2**16)
    for module in ("data_loader.text", "utils"):
        monkeypatch.setattr(f"{module}.main_memory", lambda: 2**20)
    Path("a.jsonl").write_text('{"text": "one line"}\n' * 200_000)
    parts = parts_of("a.jsonl")
    assert parts[-1].end == os.path.getsize("a.jsonl") and len(parts) == 65
    sparse("b.txt", 2**36)
    message = r"b\.txt: the document in line 1: would need 64\.0 GiB, and this machine has 1\.0 MiB"
    with pytest.raises(UserError, match=message):
        parts_of("b.txt")


def test_a_table_that_unpacks_to_more_than_the_memory_is_refused():
    pa = pytest.importorskip("pyarrow", reason="optional")
    from pyarrow import parquet as parquet_file

    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(10**6, np.int32)), ["a"])
    with parquet_file.ParquetWriter("a.parquet", pa.schema({"y": column.type})) as writer:
        table = pa.table({"y": column})
        for _ in range(10):
            writer.write_table(table)
    assert os.path.getsize("a.parquet") < 2**16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("utils.main_memory", lambda: 2**27)
        with pytest.raises(UserError, match=r"a\.parquet: would need 152\.6 MiB"):
            parquet("a.parquet", "y")


HEADER = b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1)


@pytest.mark.parametrize("name", ["x.npy", "tokens.npy", "inputs.npy", "in.npy"])
def test_a_header_of_numpy_is_read_up_to_a_limit(name):
    sparse(name, start=HEADER)
    read_it = KINDS[name if name != "in.npy" else "in.npz"][0]
    with pytest.raises(UserError, match=r"a header of 4\.0 GiB"):
        read_it(name)


@pytest.mark.parametrize("name", ["a.npz", "inputs.npz", "in.npz"])
def test_a_member_and_the_list_of_members_are_read_up_to_a_limit(name):
    with zipfile.ZipFile(name, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", HEADER + bytes(2**24))
    with pytest.raises(UserError, match=r"a header of 4\.0 GiB"):
        KINDS[name][0](name)
    size = 2**32 - 2
    end = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 1, 1, size, 0, 0)
    sparse(name, size + len(end), start=b"PK\x03\x04", end=end)
    with pytest.raises(UserError, match="cannot be read"):
        KINDS[name][0](name)


def test_gzip_data_ends_soon(monkeypatch):
    """Zeros behind gzip data are looked at one by one, and a few bytes may unpack to gigabytes."""
    data = gzip.compress(struct.pack(">II", 0x801, 3) + bytes(3))
    Path("labels.gz").write_bytes(data)
    assert read_idx("labels.gz", 1).tolist() == [0, 0, 0]
    sparse("labels.gz", start=data)
    with pytest.raises(RunError, match=LARGE):
        read_idx("labels.gz", 1)
    sparse(cifar10.ARCHIVE, start=data)
    with pytest.raises(RunError, match=LARGE):
        loaded(cifar10_part("."))
    monkeypatch.setattr(cifar10, "MOST_UNPACKED", 2**22)
    with tarfile.open(cifar10.ARCHIVE, "w:gz") as archive:
        member = tarfile.TarInfo("zeros")
        member.size = 2**24
        archive.addfile(member, io.BytesIO(bytes(2**24)))
    with pytest.raises(UserError, match="it unpacks to more than the archive"):
        loaded(cifar10_part("."))
