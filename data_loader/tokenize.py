"""Turn text into files of tokens, once: python -m data_loader.tokenize INPUT... --out FOLDER

It writes train.bin and val.bin for the dataset `tokens`, tokenizer.json and tokens.json. Parts of
the text are prepared in parallel; a command that was killed continues where it was.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
from functools import cache, partial
from pathlib import Path

import numpy as np

from data_loader.documents import (
    FIELD,
    VERSION,
    chosen_of,
    encoded,
    parts_of,
    separator_of,
    split_indices,
)
from data_loader.processes import mapped, progress
from data_loader.text_files import PARTS, PLAN, text_files
from data_loader.tokenizers import bpe, plain
from data_loader.tokenizers.saved import MOST_BYTES, from_json, tokenizer_file
from data_loader.tokens import ABOUT, TOKENIZER
from utils import BAD_INPUT, DONE, FAILED, RunError, UserError
from utils.files import atomic_file, atomic_write, locked, open_file, read_file, read_json
from utils.forms import local_path

FINISHED = ".tokenized_parts"  # the folder PARTS when everything is done; it is deleted
MOST_PLAN = 2**28  # bytes; it names every file of the text


def parse(words=None):
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m data_loader.tokenize", description=__doc__.split("\n\n")[0]
    )
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="text files in UTF-8, folders or patterns")
    add("--out", required=True, metavar="FOLDER", help="where the files of tokens are written")
    add(
        "--tokenizer",
        default="bytes",
        help="bytes (the default), characters or bpe, which are trained on the text, or a file: a "
        "tokenizer.json or .tiktoken",
    )
    add("--vocab-size", type=int, default=argparse.SUPPRESS, help=f"of a bpe (default: {bpe.SIZE})")
    add("--separator", help="what separates the documents of a file (default: <|endoftext|>)")
    add("--field", default=FIELD, help="key of the text in each line of a .jsonl (default: text)")
    add("--val-size", type=float, default=0.1, help="share of validation (default: 0.1)")
    add("--test-size", type=float, default=0.0, help="share of the test set (default: 0)")
    add("--seed", type=int, default=0, help="of the division into sets (default: 0)")
    add("--processes", type=int, default=os.cpu_count(), help="default: one for each core")
    return parser.parse_args(words)


def main(words=None):
    """Run the command; returns its exit code."""
    arguments = parse(words)
    try:
        print(prepare(arguments))
    except UserError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except RunError as error:
        print(error, file=sys.stderr)
        return FAILED
    except OSError as error:
        print(f"{arguments.out}: {error.strerror or error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("Stopped; the same command continues where it was", file=sys.stderr)
        return 130
    return DONE


def prepare(arguments):
    """Write the files; returns the last line to print."""
    check(arguments)
    out = local_path("--out", arguments.out)
    files = [file for name in arguments.inputs for file in files_of(name, out)]
    out.mkdir(parents=True, exist_ok=True)
    try:
        lock = locked(out)
    except BlockingIOError as error:
        raise UserError(f"{out}: another process writes there; wait until it has ended") from error
    folder = out / PARTS
    try:
        shutil.rmtree(out / FINISHED, ignore_errors=True)  # left by a process that was killed
        begin_plan(arguments, files, folder)
        try:
            tokenizer, counts = prepared(arguments, files, folder, out)
        except UserError:
            if not finished_parts(folder):
                shutil.rmtree(folder)
            raise
        # A folder that is only half deleted must not be taken for the parts of another command.
        os.replace(folder, out / FINISHED)
        shutil.rmtree(out / FINISHED)
    finally:
        os.close(lock)
    written = ", ".join(f"{count} tokens in {out / name}.bin" for name, count in counts.items())
    return f"{written}; the vocabulary has {tokenizer.vocab_size}"


def prepared(arguments, files, folder, out):
    """Write the files of tokens; returns (the tokenizer, {set: number of tokens})."""
    each = (parts_of(file, arguments.separator, arguments.field) for file in files)
    parts = [part for some in each for part in some]
    sets = sets_of(arguments, parts)
    tokenizer = made_tokenizer(arguments, parts, sets, folder)
    in_processes(arguments, parts, sets, tokenizer, folder)
    return tokenizer, joined(len(parts), list(sets), tokenizer, folder, out)


def files_of(name, out):
    """The text files of an input. It must not be a folder around the results, which would be read
    as text the next time."""
    if Path(name).is_dir() and Path(out).resolve().is_relative_to(Path(name).resolve()):
        raise UserError(
            f"--out: {out} is in {name}, whose files are all read as text; name a folder outside "
            "of it"
        )
    return text_files(name)


def check(arguments):
    """Refuse numbers that must be mistakes."""
    if hasattr(arguments, "vocab_size") and arguments.tokenizer != "bpe":
        raise UserError("--vocab-size: is the size of a bpe to train; leave it out")
    name = arguments.tokenizer
    if name not in ("bytes", "characters", "bpe") and not Path(name).exists():
        fix = "name bytes, characters, bpe, or a file: a tokenizer.json or .tiktoken"
        raise UserError(f"--tokenizer: {name}: no such file; {fix}")
    for name in ("val_size", "test_size"):
        if not 0 <= getattr(arguments, name) < 1:
            option = name.replace("_", "-")
            raise UserError(
                f"--{option}: must be at least 0 and below 1, got {getattr(arguments, name)}"
            )
    for name, least in {"processes": 1, "seed": 0}.items():
        if getattr(arguments, name) < least:
            found = getattr(arguments, name)
            raise UserError(f"--{name}: must be at least {least}, got {found}")


def begin_plan(arguments, files, parts):
    """Write the plan of this preparation; raises if the folder holds parts of another one."""
    settings = {k: v for k, v in vars(arguments).items() if k not in ("inputs", "out", "processes")}
    if Path(arguments.tokenizer).is_file():
        content = read_file(arguments.tokenizer, MOST_BYTES)
        settings["tokenizer"] = hashlib.sha256(content).hexdigest()
    settings["files"] = [[file, os.path.getsize(file), os.stat(file).st_mtime] for file in files]
    settings["version"] = VERSION
    plan, wanted = parts / PLAN, json.dumps(settings, indent=1).encode()
    if parts.exists() and not plan.exists() and any(p.suffix != ".tmp" for p in parts.iterdir()):
        raise UserError(f"{parts}: holds files not written by this command; name another --out")
    if plan.exists() and read_file(plan, MOST_PLAN) != wanted:
        if finished_parts(parts):
            raise UserError(
                f"{parts}: holds parts of another preparation, of other files or options; delete "
                "the folder, or choose another --out"
            )
        shutil.rmtree(parts)
    parts.mkdir(exist_ok=True)
    atomic_write(plan, wanted)


def finished_parts(parts):
    """The files that mark complete parts."""
    return [path for path in parts.glob("*.json") if path.stem.isdigit()]


def sets_of(arguments, parts):
    """{set: [for each part, the indices of its documents]}; None instead of the lists if there is
    only one document, which is cut."""
    look = partial(counted, separator=separator_of(arguments.separator))
    looks = list(mapped(look, parts, arguments.processes, "look"))
    if arguments.separator and not any(occurs for _, occurs in looks):
        given = f"--separator: {arguments.separator!r}"
        print(f"{given} is not in the text, so it divides no file into documents", file=sys.stderr)
    counts = [count for count, _ in looks]
    shares = shares_of(arguments)
    if sum(counts) == 1:
        return dict.fromkeys(("train", *shares))
    ends = np.cumsum(counts)
    sets = split_indices(int(ends[-1]), shares, arguments.seed, arguments.inputs[0])
    for name, rows in sets.items():
        pieces = np.split(rows, np.searchsorted(rows, ends[:-1]))
        begins = ends - counts
        sets[name] = [(piece - first).tolist() for piece, first in zip(pieces, begins, strict=True)]
    return sets


def shares_of(arguments):
    """{set: its share of the documents}, without the training set."""
    shares = {"val": arguments.val_size, "test": arguments.test_size}
    return {name: share for name, share in shares.items() if share}


def counted(part, separator):
    """(the number of documents in a part, whether the separator is in its text)"""
    text = part.text()
    return len(part.documents(separator, text)), separator in text


def made_tokenizer(arguments, parts, sets, folder):
    """The tokenizer that was chosen; a trained one is stored among the parts."""
    name, path = arguments.tokenizer, folder / TOKENIZER
    if path.exists():
        return tokenizer_file(path)
    if name == "bpe":
        try:
            tokenizer = bpe.bpe(vocab_size=getattr(arguments, "vocab_size", bpe.SIZE))
        except ValueError as error:
            raise UserError(f"--{error}".replace("vocab_size", "vocab-size")) from error
    elif name in ("bytes", "characters"):
        tokenizer = {"bytes": plain.bytes, "characters": plain.characters}[name]()
    else:
        tokenizer = tokenizer_file(name)
    if hasattr(tokenizer, "train"):
        # The characters of all sets are known.
        chosen = (sets["train"], shares_of(arguments)) if name == "bpe" else (None, None)
        tokenizer = tokenizer.train(texts_of(parts, arguments.separator, *chosen))
    atomic_write(path, tokenizer.to_json().encode())
    return tokenizer


def texts_of(parts, separator, rows, shares):
    """The texts of all documents; or of those that `rows` lists for each part; or, with `shares`,
    of the part for training of the only document."""
    for i, part in enumerate(progress(parts, "train", len(parts))):
        documents = part.documents(separator)
        if rows or (shares and documents):
            documents = chosen_of(documents, {"train": rows and rows[i]}, shares)["train"]
        yield from (document.text for document in documents)


def in_processes(arguments, parts, sets, tokenizer, folder):
    """Write the parts that are missing."""
    jobs = []
    for number, part in enumerate(parts):
        if not (folder / f"{number}.json").exists():
            own = {name: rows and rows[number] for name, rows in sets.items()}
            jobs.append((folder, number, part, own))
    settings = {"separator": arguments.separator, "shares": shares_of(arguments)}
    write = partial(write_part, tokenizer_json=tokenizer.to_json(), **settings)
    for _ in mapped(write, jobs, arguments.processes, "tokenize"):
        pass


def write_part(job, tokenizer_json, separator, shares):
    """Write the tokens of one part into one file for each set."""
    folder, number, part, own = job
    tokenizer, documents = tokenizer_of(tokenizer_json), part.documents(separator)
    several, size = None not in own.values(), 0
    for name, some in chosen_of(documents, own, shares).items():
        size += sum(len(document.text.encode()) for document in some)
        with atomic_file(folder / f"{number}-{name}.bin") as file:
            for document in some:
                file.write(encoded(tokenizer, [document], several).tobytes())
    atomic_write(folder / f"{number}.json", json.dumps({"bytes": size}).encode())  # it is complete


@cache  # a process makes it once
def tokenizer_of(text):
    return from_json(text)


def joined(count, sets, tokenizer, folder, out):
    """Put the parts together; returns {set: number of tokens}."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    files = [folder / f"{number}.json" for number in range(count)]
    size = sum(read_json(file)["bytes"] for file in files)
    counts = {}
    for name in sets:
        with atomic_file(out / f"{name}.bin") as whole:
            for number in range(count):
                with open_file(folder / f"{number}-{name}.bin") as part:
                    shutil.copyfileobj(part, whole, 2**22)
            counts[name] = whole.tell() // dtype.itemsize
    before = read_json(out / ABOUT).get("tokens", {}) if (out / ABOUT).exists() else {}
    for name in {"train", "val", "test"} & set(before) - set(counts):
        (out / f"{name}.bin").unlink(missing_ok=True)  # made by the tokenizer of that time
    atomic_write(out / TOKENIZER, tokenizer.to_json().encode())
    about = {"dtype": dtype.name, "vocab_size": tokenizer.vocab_size}
    about |= {"end_of_text": tokenizer.end_of_text, "tokens": counts}
    about |= {"bytes_per_token": size / max(1, sum(counts.values()))}
    atomic_write(out / ABOUT, (json.dumps(about, indent=2) + "\n").encode())
    return counts


if __name__ == "__main__":
    sys.exit(main())
