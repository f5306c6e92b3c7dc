"""Continue a text with a trained language model.

    python -m inference.generate saved/<title>/<run> --prompt "Once upon a time" --tokens 200

The text appears as it is written. From Python: `load(path).generate("Once upon a time")`.
"""

import argparse
import importlib.util
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from data_loader.base import Tokenizer
from data_loader.text import decoded
from data_loader.tokenizers.saved import first_tokens, streamed, tokenizer_file
from inference.folders import REPORT
from inference.runtimes import PACKAGES, Arrays, FileModel, Specs, open_model
from model.sampling import COLDEST, Sampling, check, check_amount, second_half, until
from utils import RunError, UserError, echo, first_line, run_command
from utils.files import parse_json, read_file

if TYPE_CHECKING:
    from inference.load import Loaded


TOKEN, LOGITS, POSITION, NEXT = "token", "logits", "position", "next/"  # names in the file
TOKENIZER = "tokenizer.json"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; a user's mistake ends in one message and an exit code."""
    return run_command(lambda: write(parse(argv)), interrupted="")


def parse(argv: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(description="Continue a text with a trained language model.")
    add = parser.add_argument
    add("model", help="a run's folder, or one of its checkpoints")
    add("--best", action="store_true", help="of a run's folder, the best checkpoint")
    add_text_options(add)
    add("--samples", type=int, default=1, help="how many texts to write (default: 1)")
    add("-c", "--config", help="the config (default: the one stored in the checkpoint)")
    add("--trust", action="store_true", help="allow a stored config to import its dotted names")
    return parser.parse_args(argv)


def add_text_options(add: Callable[..., argparse.Action]) -> None:
    """The options that choose what is written."""
    add("--prompt", help="the beginning of the text (default: a new document)")
    add("--prompt-file", metavar="FILE", help="a file with the beginning of the text, in UTF-8")
    add("--tokens", type=int, default=200, help="how many tokens to write (default: 200)")
    add(
        "--temperature",
        type=float,
        default=1.0,
        help="below 1, likely tokens become more likely; 0: always the likeliest (default: 1)",
    )
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens only")
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="draw from the fewest tokens that together have the probability P",
    )
    add("--seed", type=int, default=0, help="another seed, another text (default: 0)")
    add("--tokenizer", metavar="FILE", help="a tokenizer (default: the one that the run recorded)")


def write(arguments: Namespace) -> None:
    """Load the model and print the texts."""
    prompt, sampling = checked_text(arguments)
    if arguments.samples < 1:
        raise UserError(f"--samples: must be at least 1, got {arguments.samples}")
    from inference.load import load
    from training.checkpoint.storage import chosen_checkpoint

    checkpoint = chosen_checkpoint(arguments.model, arguments.best)
    loaded = load(checkpoint, config=arguments.config, trust=arguments.trust)
    tokenizer = None
    if arguments.tokenizer:
        tokenizer = tokenizer_file(arguments.tokenizer)
        vocab_size = loaded.record.get("facts", {}).get("vocab_size")
        check_tokenizer(tokenizer, loaded.tokenizer, vocab_size, arguments.tokenizer)
    for sample in range(arguments.samples):
        if sample:
            print("\n---")
        seed = arguments.seed + sample
        for piece in text_pieces(loaded, prompt, arguments.tokens, sampling, seed, tokenizer):
            echo(piece, end="", flush=True)
        print()


def checked_text(arguments: Namespace) -> tuple[str, Sampling]:
    """(the prompt, the Sampling) of the options of `add_text_options`."""
    if arguments.tokens < 1:
        raise UserError(f"--tokens: must be at least 1, got {arguments.tokens}")
    largest = 2**32 - getattr(arguments, "samples", 1)  # each sample has the next seed
    if not 0 <= arguments.seed <= largest:
        raise UserError(f"--seed: must be from 0 to {largest}, got {arguments.seed}")
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    return prompt_of(arguments), sampling


def prompt_of(arguments: Namespace) -> str:
    """The prompt of --prompt or --prompt-file. Bytes that are not UTF-8 reach Python as lone
    surrogates, which cannot be encoded."""
    prompt = arguments.prompt or ""
    path = arguments.prompt_file
    if not path:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            found = f"character {error.start} is {error.object[error.start]!a}"
            fix = "pass a --prompt-file in UTF-8"
            raise UserError(f"--prompt: is not UTF-8: {found}; {fix}") from error
        return prompt
    if prompt:
        raise UserError("--prompt: leave it out, or --prompt-file; the text has one beginning")
    try:
        return decoded(path, read_file(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def text_pieces(
    loaded: "Loaded",
    prompt: str,
    tokens: int,
    sampling: Sampling,
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
) -> Iterator[str]:
    """The prompt and then the text that follows it, piece by piece, up to the end of the
    document."""
    from model.generate import context_of
    from model.generate import stream as stream_of_model

    tokenizer = tokenizer or tokenizer_of(loaded)
    start, stop = first_tokens(tokenizer, prompt), tokenizer.end_of_text
    options = {"state": loaded.state, "seed": seed, "stop": stop}
    sampling = sampling._replace(vocab_size=tokenizer.vocab_size)
    try:
        # Before anything is shown.
        check_amount(tokens, seed)
        check([start], context_of(loaded.model), sampling)
        pieces = stream_of_model(loaded.model, loaded.params, [start], tokens, sampling, **options)
        rows = (row[: until(stop, row)] for [row] in pieces)
        yield prompt
        yield from streamed(tokenizer, chain.from_iterable(rows))
    except ValueError as error:
        raise UserError(str(error).replace("prompt 0", "prompt")) from error


def tokenizer_of(loaded: "Loaded") -> Tokenizer:
    if loaded.tokenizer is None:
        raise UserError(
            f"{loaded.path}: the run has recorded no tokenizer; pass the one that made its tokens, "
            "as --tokenizer tokenizer.json"
        )
    return loaded.tokenizer


def check_tokenizer(
    tokenizer: Tokenizer, recorded: Tokenizer | None, vocab_size: int | None, source: str | Path
) -> None:
    """Refuse a tokenizer with which the model was not trained; `recorded` is the one with which it
    was, None if that is unknown."""
    fix = "pass the tokenizer that the model was trained with"
    if recorded is not None and tokenizer.to_json() != recorded.to_json():
        raise UserError(
            f"--tokenizer: {source} is another tokenizer than the one that the run recorded; "
            f"{fix}, or none"
        )
    count = tokenizer.vocab_size
    if recorded is None and vocab_size is not None and count < vocab_size:
        rest = "the rest is never drawn; it must be the tokenizer that the model was trained with"
        print(
            f"--tokenizer: {source} has {count} tokens, the model knows {vocab_size}: {rest}",
            file=sys.stderr,
        )
    if vocab_size is not None and count > vocab_size:
        raise UserError(
            f"--tokenizer: {source} has {count} tokens, the model knows {vocab_size}; {fix}"
        )


class Decoder(NamedTuple):
    """A decode step: `call` maps {input: array} to {output: array}."""

    call: Callable[[Arrays], Arrays]
    inputs: Specs  # {name: (shape, dtype)}; a free size is None
    context: int  # the number of tokens for which the cache has room

    def empty(self, rows: int) -> Arrays:
        """The cache of texts before their first token is read."""
        specs: dict[str, Any] = {  # which has no free sizes
            name: spec for name, spec in self.inputs.items() if name != TOKEN
        }
        return {name: np.zeros((rows, *shape[1:]), dtype) for name, (shape, dtype) in specs.items()}

    def step(self, tokens: Sequence[int], cache: Arrays) -> tuple[np.ndarray, Arrays]:
        """(the logits after one more token of each text, the cache with it)"""
        outputs = self.call({TOKEN: np.asarray(tokens, np.int32), **cache})
        return outputs[LOGITS], {name: outputs[NEXT + name] for name in cache}

    def read(self, texts: Sequence[np.ndarray]) -> Arrays:
        """The cache with all tokens of the texts but the last ones, which come next."""
        lengths = np.array([len(text) - 1 for text in texts], np.int32)
        cache = self.empty(len(texts))
        for i in range(lengths.max()):
            _, cache = self.step([text[i] if i < len(text) else 0 for text in texts], cache)
        # Entries behind the end of a text are hidden, and overwritten by the following tokens.
        return cache | {POSITION: lengths}


def steps(
    decoder: Decoder, prompts: Sequence[Any], count: int, choose: Callable[[np.ndarray], np.ndarray]
) -> Iterator[np.ndarray]:
    """Up to `count` arrays with the next token of each text; choose(logits) draws them.

    When a text has filled the context, the second half of it is read again.
    """
    texts = [np.asarray(prompt, np.int32).reshape(-1) for prompt in prompts]
    context = decoder.context
    cache: Arrays = {}
    position = context
    for _ in range(count):
        if position == context:  # before the first token, and when the cache is full
            texts = [second_half(text, context) for text in texts]
            cache = decoder.read(texts)
            position = max(map(len, texts)) - 1
        logits, cache = decoder.step([text[-1] for text in texts], cache)
        new = choose(logits)
        texts = [np.append(text, token) for text, token in zip(texts, new, strict=True)]
        position += 1
        yield new


def stream(
    decoder: Decoder,
    prompt: Sequence[int] | np.ndarray,
    count: int,
    sampling: Sampling,
    *,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """Up to `count` tokens that follow a prompt, one by one; the text ends before `stop`."""
    random = np.random.default_rng(seed)
    (rows, *_), _ = decoder.inputs[TOKEN]
    prompts = [prompt] * (rows or 1)  # a file may take several texts only; the first one is read
    for token, *_ in steps(decoder, prompts, count, lambda x: draw(random, x, sampling)):
        if token == stop:
            return
        yield token


def draw(random: np.random.Generator, logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """One token for each row of logits, as in model/generate.py, but from other random numbers."""
    temperature, top_k, top_p, vocab_size = sampling
    logits = logits[:, :vocab_size]
    if temperature < COLDEST:
        return logits.argmax(-1)
    logits = logits.astype(np.float64) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        lowest = np.partition(logits, -top_k)[:, -top_k, None]
        logits = np.where(logits < lowest, -np.inf, logits)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    if top_p is not None and top_p < 1:  # the fewest tokens that together have this probability
        ordered = -np.sort(-weights)
        before = ordered.cumsum(-1) - ordered
        lowest = np.where(before < top_p, ordered, 2).min(-1, keepdims=True)
        weights = np.where(weights >= lowest, weights, 0)
    sums = weights.cumsum(-1)
    # Below 1, so that a token with the weight 0 is never drawn.
    return (sums > random.random((len(sums), 1)) * sums[:, -1:]).argmax(-1)


class Writer(NamedTuple):
    """An exported language model and its tokenizer."""

    decoder: Decoder
    tokenizer: Tokenizer
    source: Path  # the file

    def pieces(self, prompt: str, tokens: int, sampling: Sampling, seed: int = 0) -> Iterator[str]:
        """The prompt, then the text that follows it, piece by piece, up to the end of the
        document."""
        start, stop = first_tokens(self.tokenizer, prompt), self.tokenizer.end_of_text
        sampling = sampling._replace(vocab_size=self.tokenizer.vocab_size)
        try:
            check([start], self.decoder.context, sampling)  # before anything is shown
        except ValueError as error:
            raise UserError(str(error).replace("prompt 0", "prompt")) from error
        yield prompt
        try:
            written = stream(self.decoder, start, tokens, sampling, seed=seed, stop=stop)
            yield from streamed(self.tokenizer, written)
        except Exception as error:  # the runtimes raise many kinds
            raise RunError(f"{self.source}: fails: {first_line(error)}") from error


def open_writer(path: str | Path, tokenizer: str | None = None) -> Writer:
    """The writer of the folder of an export, or of one of its files."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    step = step_of(path, folder)
    file = folder / Path(step["file"]).name
    model = open_model(file, step.get("signature"))
    if missing := {TOKEN, POSITION} - {*model.inputs} or {LOGITS} - {*model.outputs}:
        raise UserError(f"{file}: is not a decode step: it has no {min(missing)}; export again")
    decoder = Decoder(model, model.inputs, step["context"])
    return Writer(decoder, exported_tokenizer(folder, tokenizer, model), file)


def step_of(path: Path, folder: Path) -> dict[str, Any]:
    """The entry of the decode step in the report of an export."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; name an export, or one of its files")
    if path.is_file() and path.suffix.lower() not in PACKAGES:
        raise UserError(
            f"{path}: is not an exported file; for a checkpoint, run "
            f"`python -m inference.generate {path} --prompt ...`"
        )
    report = folder / REPORT
    if not report.is_file():
        raise UserError(
            f"{folder}: is not an export: it has no {REPORT}; name the folder that "
            f"convert_tflite.py has written (for a run, `python -m inference.generate {folder} "
            "--prompt ...`)"
        )
    try:
        formats = parse_json(read_file(report))["formats"]
        steps = {f".{name}": each["decode"] for name, each in formats.items() if "decode" in each}
        suffixes = [path.suffix.lower()] if path.is_file() else list(steps)
        known = {suffix: steps[suffix] for suffix in suffixes if suffix in steps}
        known = {key: (step, step["file"], int(step["context"])) for key, step in known.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{report}: is not a report of an export ({error}); export again"
        ) from error
    if not known:
        raise UserError(f"{path}: has no decode step; name the export of a language model")
    runs = [step for key, (step, *_) in known.items() if importlib.util.find_spec(PACKAGES[key])]
    return runs[0] if runs else next(iter(known.values()))[0]


def exported_tokenizer(folder: Path, file: str | None, model: FileModel) -> Tokenizer:
    """The tokenizer of an export, or that of a file, which must be the same one."""
    stored = folder / TOKENIZER
    recorded = tokenizer_file(stored) if stored.is_file() else None
    tokenizer = tokenizer_file(file) if file else recorded
    if tokenizer is None:
        raise UserError(
            f"{folder}: has no {TOKENIZER}; pass the tokenizer that the model was trained with, as "
            "--tokenizer tokenizer.json"
        )
    shape, _ = model.outputs[LOGITS]
    check_tokenizer(tokenizer, recorded, shape[-1], file or stored)
    return tokenizer


if __name__ == "__main__":
    sys.exit(main())
