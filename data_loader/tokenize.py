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
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data_loader.base import Tokenizer, UntrainedTokenizer
from data_loader.text import FIELD, VERSION, Corpus, corpus_of, parts_of, text_files
from data_loader.tokenizers import bpe, plain
from data_loader.tokenizers.saved import tokenizer_file
from data_loader.tokens import ABOUT, TOKENIZER
from data_loader.workers import Workers
from utils import UserError, run_command
from utils.files import atomic_file, atomic_write, locked, read_json
from utils.forms import at_least, fraction, local_path

PARTS = ".parts-"  # begins the name of a folder of tokens of parts, which is deleted at the end


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m data_loader.tokenize", description=str(__doc__).split("\n\n")[0]
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
    add("--vocab-size", type=int, help=f"of a bpe (default: {bpe.SIZE})")
    add("--separator", help="what separates the documents of a file (default: <|endoftext|>)")
    add("--field", default=FIELD, help="key of the text in each line of a .jsonl (default: text)")
    add("--val-size", type=float, default=0.1, help="share of validation (default: 0.1)")
    add("--test-size", type=float, default=0.0, help="share of the test set (default: 0)")
    add("--seed", type=int, default=0, help="of the division into sets (default: 0)")
    add("--processes", type=int, default=os.cpu_count(), help="default: one for each core")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = parse(words)
    stopped = "Stopped; the same command continues where it was"
    return run_command(lambda: print(prepare(arguments)), stopped)


def prepare(arguments: argparse.Namespace) -> str:
    """Write the files; returns the last line to print."""
    check(arguments)
    tokenizer = chosen_tokenizer(arguments.tokenizer, arguments.vocab_size)
    out = local_path("--out", arguments.out)
    files = [file for name in arguments.inputs for file in files_of(name, out)]
    out.mkdir(parents=True, exist_ok=True)
    try:
        lock = locked(out)
    except BlockingIOError as error:
        raise UserError(f"{out}: another process writes there; wait until it has ended") from error
    try:
        # The same command finds the parts that are complete, another command has another folder.
        folder = out / (PARTS + settings_of(arguments, tokenizer, files))
        folder.mkdir(exist_ok=True)
        parts = [
            part for file in files for part in parts_of(file, arguments.separator, arguments.field)
        ]
        corpus = corpus_of(
            arguments.inputs[0],
            parts,
            {"val": arguments.val_size, "test": arguments.test_size},
            arguments.seed,
            arguments.separator,
            partial(mapped, arguments.processes, "look"),
        )
        tokenizer = trained(tokenizer, corpus, folder / TOKENIZER)
        each = {folder / f"{i}.npz": part for i, part in enumerate(corpus.by_part())}
        missing = [(path, part) for path, part in each.items() if not path.exists()]
        write = partial(write_part, tokenizer)
        for _ in mapped(arguments.processes, "tokenize", write, missing):
            pass
        counts = join(("train", *corpus.shares), each, tokenizer, out)
        for used in out.glob(f"{PARTS}*"):
            shutil.rmtree(used)
    finally:
        os.close(lock)
    written = ", ".join(f"{count} tokens in {out / name}.bin" for name, count in counts.items())
    return f"{written}; the vocabulary has {tokenizer.vocab_size}"


def check(arguments: argparse.Namespace) -> None:
    """Refuse numbers that must be mistakes."""
    try:
        fraction(**{"--val-size": arguments.val_size, "--test-size": arguments.test_size})
        at_least(1, **{"--processes": arguments.processes})
        at_least(0, **{"--seed": arguments.seed})
    except ValueError as error:
        raise UserError(str(error)) from error


def chosen_tokenizer(name: str, vocab_size: int | None) -> Tokenizer | UntrainedTokenizer:
    """The tokenizer that was named, which may have to be trained."""
    if vocab_size is not None and name != "bpe":
        raise UserError("--vocab-size: is the size of a bpe to train; leave it out")
    if name in ("bytes", "characters"):
        return getattr(plain, name)()
    if name == "bpe":
        try:
            return bpe.bpe(vocab_size=bpe.SIZE if vocab_size is None else vocab_size)
        except ValueError as error:
            raise UserError(f"--{error}".replace("vocab_size", "vocab-size")) from error
    try:
        return tokenizer_file(name)
    except UserError as error:
        raise UserError(f"--tokenizer: {error}; or name bytes, characters or bpe") from error


def files_of(name: str, out: Path) -> list[str]:
    """The text files of an input. It must not be a folder around the results, which would be read
    as text the next time."""
    if Path(name).is_dir() and out.resolve().is_relative_to(Path(name).resolve()):
        raise UserError(
            f"--out: {out} is in {name}, whose files are all read as text; name a folder outside "
            "of it"
        )
    return text_files(name)


def settings_of(
    arguments: argparse.Namespace, tokenizer: Tokenizer | UntrainedTokenizer, files: list[str]
) -> str:
    """A text that differs for other files and other options."""
    settings = {k: v for k, v in vars(arguments).items() if k not in ("inputs", "out", "processes")}
    if not isinstance(tokenizer, UntrainedTokenizer):
        settings["tokenizer"] = tokenizer.to_json()
    settings["files"] = [[file, os.path.getsize(file), os.stat(file).st_mtime] for file in files]
    settings["version"] = VERSION
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def trained(tokenizer: Tokenizer | UntrainedTokenizer, corpus: Corpus, path: Path) -> Tokenizer:
    """The tokenizer, trained on the corpus if it is not yet; it is stored at the path."""
    if not isinstance(tokenizer, UntrainedTokenizer):
        return tokenizer
    if not path.exists():
        made = tokenizer.train(corpus.texts(tokenizer))
        atomic_write(path, made.to_json().encode())
    return tokenizer_file(path)


def mapped(
    processes: int, what: str, function: Callable[[Any], Any], items: Sequence[Any]
) -> Iterable[Any]:
    """function(item) of each item, in order, computed by several processes; a bar shows the
    progress if the output is a terminal."""
    from tqdm import tqdm

    count = min(processes, len(items))
    results = Workers(function, count).mapped(items) if count > 1 else map(function, items)
    quiet = not sys.stderr.isatty()
    return tqdm(results, desc=what, total=len(items), unit="part", disable=quiet)


def write_part(tokenizer: Tokenizer, job: tuple[Path, Corpus]) -> None:
    """Write the tokens of one part."""
    path, part = job
    tokens, size = part.tokens(tokenizer)
    with atomic_file(path) as file:
        contents: dict[str, Any] = {**tokens, "bytes": size}
        np.savez(file, **contents)


def join(
    sets: Sequence[str], files: Iterable[Path], tokenizer: Tokenizer, out: Path
) -> dict[str, int]:
    """Put the tokens of all parts together; returns {set: number of tokens}."""
    dtype, size, counts = plain.token_dtype(tokenizer.vocab_size), 0, dict.fromkeys(sets, 0)
    with ExitStack() as stack:
        whole = {name: stack.enter_context(atomic_file(out / f"{name}.bin")) for name in sets}
        for file in files:
            with np.load(file) as part:
                size += int(part["bytes"])
                for name in sets:
                    tokens = np.asarray(part.get(name, ()), dtype)
                    whole[name].write(tokens.data)
                    counts[name] += len(tokens)
    before = read_json(out / ABOUT).get("tokens", {}) if (out / ABOUT).exists() else {}
    for name in {"train", "val", "test"} & set(before) - set(counts):
        (out / f"{name}.bin").unlink(missing_ok=True)  # made by the tokenizer of that time
    atomic_write(out / TOKENIZER, tokenizer.to_json().encode())
    about = {
        "dtype": dtype.name,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "tokens": counts,
        "bytes_per_token": size / max(1, sum(counts.values())),
    }
    atomic_write(out / ABOUT, (json.dumps(about, indent=2) + "\n").encode())
    return counts


if __name__ == "__main__":
    sys.exit(main())
