"""Mutants of texts, tokens, tokenizers and tables: the files of each source, and its config."""

import base64
import functools
import io
import json
import tarfile

import numpy as np

from data_loader.digits import draw
from data_loader.stories import written
from data_loader.tokenizers.bpe import bpe
from data_loader.tokenizers.plain import CharacterTokenizer
from tests.fuzz.mutants import as_text, mutated, mutated_text, scalar

GPT = {"model": {"name": "gpt", "args": {"dim": 8, "depth": 1, "heads": 1}}, "preprocess": []}
TABLE = {"preprocess": ["tabular"]}
TOKENS = {"train": "tokens/train.bin", "length": 8, "documents": "apart"}
CELLS = {"city": ["Oslo", "Rome", "Bonn", "Rome"], "price": [3.5, None, 1e5, 2.0]}
CELLS |= {"rooms": [3, 4, 5, 1], "sold": ["yes", "no", "no", "yes"]}
COLUMNS = {name: cells * 6 for name, cells in CELLS.items()}


def of_text(**arguments):
    return GPT | {"data": {"name": "text", "args": {"length": 8, "val_size": 0.2, **arguments}}}


def of_file(name, **arguments):
    """The config of a file that is read by the package of HuggingFace."""
    kind = {"jsonl": "json"}.get(ending := name.rpartition(".")[2], ending)
    arguments = {"path": kind, "data_files": {"train": name}, "y": "sold", **arguments}
    return TABLE | {"data": {"name": "huggingface", "args": arguments}}


def of_bpe(file, **arguments):
    return of_text(train="a.txt", tokenizer={"name": "bpe", "args": {"file": file, **arguments}})


# {base: what its config says besides that of all sources}
SOURCES = {
    "text": of_text(train="a.txt"),
    "jsonl": of_text(train="a.jsonl", tokenizer="bytes"),
    "tokens": GPT | {"data": {"name": "tokens", "args": TOKENS}},
    "tokens_npy": GPT
    | {"data": {"name": "tokens", "args": {"train": "t.npy", "vocab_size": 99, "length": 8}}},
    "tokenizer": of_bpe("bpe.json"),
    "tiktoken": of_bpe("own.tiktoken", pattern=r"\w+|\W"),
    "csv": TABLE | {"data": {"name": "csv", "args": {"train": "a.csv", "target": "sold"}}},
    "parquet": TABLE
    | {"data": {"name": "parquet", "args": {"train": "a.parquet", "target": "sold"}}},
    "samples": {
        "data": {
            "name": "webdataset",
            "args": {"train": "s.tar", "x": "npy", "y": "json", "field": "a.b", "num_classes": 10},
        }
    },
    "hf_csv": of_file("a.csv"),
    "hf_json": of_file("a.jsonl"),
    "hf_parquet": of_file("a.parquet"),
    "hf_columns": of_file("a.parquet", x=["vector"]) | {"preprocess": []},
    "hf_disk": {"data": {"name": "huggingface", "args": {"path": "disk", "y": "label"}}},
}


def files(base, rng):
    """{name: bytes} of the files of a source. With `rng`, what one of them holds is changed, in its
    own form."""
    name = SOURCES[base]["data"]["args"].get("train", "")
    if base in ("text", "tokenizer", "tiktoken"):
        made = {"a.txt": text(rng if base == "text" else None)}
    elif base == "jsonl":
        made = {name: lines([{"text": each, "id": 7} for each in texts()], rng)}
    elif base == "tokens":
        made = of_tokenize(rng)
    elif base == "tokens_npy":
        made = {name: npy(np.arange(400, dtype=np.uint16) % 99)}
    elif base == "samples":
        made = {name: samples(rng)}
    elif base == "hf_disk":
        made = on_disk(rng)
    else:
        made = table_files(SOURCES[base]["data"]["args"], rng)
    if base == "tokenizer":
        made["bpe.json"] = as_json(json.loads(trained()), rng)
    elif base == "tiktoken":
        made["own.tiktoken"] = ranks(rng)
    return made


@functools.cache
def texts():
    """Some short documents."""
    return [document.text[:300] for document in written(0, 12)]


def text(rng):
    whole = "<|endoftext|>\n".join(texts())
    return mutated_text(whole, rng) if rng else whole.encode()


def as_json(value, rng):
    """JSON, of which `rng` changes a value."""
    return as_text(mutated(value, rng) if rng else value).encode("utf-8", "surrogatepass")


def lines(rows, rng):
    """JSON lines, of which `rng` changes one."""
    bad = rng and rng.randrange(len(rows))
    return b"".join(as_json(row, rng if i == bad else None) + b"\n" for i, row in enumerate(rows))


def of_tokenize(rng):
    """The files that data_loader.tokenize writes, in short."""
    tokenizer = CharacterTokenizer("".join(sorted(set("".join(texts())))))
    about = {"dtype": "uint16", "vocab_size": tokenizer.vocab_size, "bytes_per_token": 1.1}
    about |= {"end_of_text": tokenizer.end_of_text, "tokens": {"train": 1}}
    end = [tokenizer.end_of_text]
    tokens = np.concatenate([np.r_[tokenizer.encode(each), end] for each in texts()])
    changed = rng and rng.choice(("tokens.json", "tokenizer.json"))
    return {
        "tokens/train.bin": tokens.astype("<u2").tobytes(),
        "tokens/tokens.json": as_json(about, rng if changed == "tokens.json" else None),
        "tokens/tokenizer.json": as_json(
            json.loads(tokenizer.to_json()), rng if changed == "tokenizer.json" else None
        ),
    }


@functools.cache
def trained():
    """The tokenizer.json of a byte-pair encoding of the documents."""
    return bpe(vocab_size=300).train(texts()).to_json()


def ranks(rng):
    """A .tiktoken file of all bytes and a few pairs."""
    known = [bytes([i]) for i in range(256)] + [b"th", b"the", b" a", b"an"]
    whole = "".join(f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(known))
    return mutated_text(whole, rng) if rng else whole.encode()


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def samples(rng):
    """A tar file of arrays with labels in JSON, of which `rng` changes one."""
    file, (x, y) = io.BytesIO(), draw(0, 16)
    bad = rng and rng.randrange(len(x))
    with tarfile.open(fileobj=file, mode="w") as archive:
        for i, (each, label) in enumerate(zip(x, y, strict=True)):
            about = as_json({"a": {"b": int(label)}}, rng if i == bad else None)
            for ending, data in (("npy", npy(each)), ("json", about)):
                info = tarfile.TarInfo(f"{i}.{ending}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def table_files(arguments, rng):
    """The file of a table."""
    name = arguments.get("train") or arguments["data_files"]["train"]
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]
    if name.endswith(".jsonl"):
        return {name: lines(rows, rng)}
    if name.endswith(".parquet"):
        return {name: as_parquet(rng, "x" in arguments)}
    whole = "\n".join(",".join("" if c is None else str(c) for c in row.values()) for row in rows)
    whole = f"{','.join(COLUMNS)}\n{whole}\n"
    return {name: mutated_text(whole, rng) if rng else whole.encode()}


def as_parquet(rng, has_vector):
    """A Parquet file; `rng` gives a column values of another type."""
    import pyarrow as pa
    from pyarrow import parquet

    columns = {name: pa.array(cells) for name, cells in COLUMNS.items()}
    count = len(COLUMNS["city"])
    columns |= {"vector": pa.array([[0.5, 1.5, 2.0]] * count)} if has_vector else {}
    if rng:
        name = rng.choice(list(columns))
        columns[rng.choice((name, name, name, f"{name}x", ""))] = rng.choice(
            (
                pa.nulls(count),
                pa.array([b"\xff\x00"] * count),
                pa.array([[1, 2], [], None, [3]] * (count // 4)),
                pa.array([{"a": 1, "b": "x"}] * count),
                pa.array([float("nan"), float("inf"), -1e300, 0.0] * (count // 4)),
                pa.array([2**63 - 1, -(2**63), 0, None] * (count // 4)),
                pa.array(np.arange(count).astype("datetime64[s]")),
                pa.array([True, False, None, True] * (count // 4)),
                pa.array(["x" * 10**5, "", " ", "\x1b[31m"] * (count // 4)),
                pa.array([str(scalar(rng)) for _ in range(count)]).cast(pa.large_string()),
                pa.array(np.arange(count, dtype=np.float16)),
                pa.array(["a", "b"] * (count // 2)).dictionary_encode(),
            )
        )
        if rng.random() < 0.2:
            columns = {name: column[:0] for name, column in columns.items()}
    file = io.BytesIO()
    parquet.write_table(pa.table(columns), file)
    return file.getvalue()


@functools.cache
def saved():
    """{name: bytes} of what `save_to_disk` writes for images with names of classes."""
    import tempfile
    from pathlib import Path

    import datasets

    x, y = draw(0, 16)
    features = {"img": datasets.Image(), "label": datasets.ClassLabel(10)}
    columns = {"img": list(x[..., 0]), "label": y.tolist()}
    rows = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    with tempfile.TemporaryDirectory() as folder:
        datasets.DatasetDict({"train": rows}).save_to_disk(f"{folder}/disk")
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def on_disk(rng):
    """A folder of `save_to_disk`; `rng` changes what one of its JSON files says."""
    made = dict(saved())
    if rng:
        name = rng.choice(sorted(name for name in made if name.endswith(".json")))
        made[name] = as_json(json.loads(made[name]), rng)
    return made
