"""Continue a text with a trained language model.

    python -m inference.generate saved/<title>/<run> --prompt "Once upon a time" --tokens 200

The text appears as it is written. From Python: `generate` of model/generate.py.
"""

import argparse
import sys
from itertools import chain
from pathlib import Path

from data_loader.tokenizers.saved import first_tokens
from utils import BAD_INPUT, DONE, FAILED, RunError, UserError

STOPPED = 130  # the exit code that shells use for Ctrl-C


def main(argv=None):
    """Run the command line; a user's mistake ends in one message and an exit code."""
    try:
        arguments = parse(argv)
        write(arguments)
        return DONE
    except UserError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except (RunError, OSError) as error:
        print(error, file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return STOPPED


def parse(argv):
    parser = argparse.ArgumentParser(description="Continue a text with a trained language model.")
    add = parser.add_argument
    add("model", help="a run's folder, or one of its checkpoints")
    add("--prompt", default="", help="the beginning of the text (default: a new document)")
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
    add("--samples", type=int, default=1, help="how many texts to write (default: 1)")
    add("--tokenizer", metavar="FILE", help="a tokenizer (default: the one that the run recorded)")
    add("-c", "--config", help="the config (default: the one stored in the checkpoint)")
    add("--trust", action="store_true", help="allow a stored config to import its dotted names")
    return parser.parse_args(argv)


def write(arguments):
    """Load the model and print the texts."""
    for name in ("tokens", "samples"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name}: must be at least 1, got {getattr(arguments, name)}")
    prompt = prompt_of(arguments)
    from inference.load import load
    from model.generate import Sampling

    loaded = load(arguments.model, config=arguments.config, trust=arguments.trust)
    tokenizer = None
    if arguments.tokenizer:
        from data_loader.tokenizers.saved import tokenizer_file

        tokenizer = tokenizer_file(arguments.tokenizer)
        check_tokenizer(tokenizer, loaded, arguments.tokenizer)
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    for sample in range(arguments.samples):
        if sample:
            print("\n---")
        seed = arguments.seed + sample
        for piece in text_pieces(loaded, prompt, arguments.tokens, sampling, seed, tokenizer):
            print(piece, end="", flush=True)
        print()


def prompt_of(arguments):
    if not arguments.prompt_file:
        return arguments.prompt
    if arguments.prompt:
        raise UserError("--prompt: leave it out, or --prompt-file; the text has one beginning")
    path = Path(arguments.prompt_file)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def text_pieces(loaded, prompt, tokens, sampling, seed=0, tokenizer=None):
    """The prompt and then the text that follows it, piece by piece, up to the end of the
    document."""
    from data_loader.tokenizers.saved import streamed
    from model.generate import check, context_of, stream, until

    tokenizer = tokenizer or tokenizer_of(loaded)
    start, stop = first_tokens(tokenizer, prompt), tokenizer.end_of_text
    options = {"state": loaded.state, "seed": seed, "stop": stop}
    try:
        check([start], context_of(loaded.model), sampling)  # before anything is shown
        pieces = stream(loaded.model, loaded.params, [start], tokens, sampling, **options)
        rows = (row[: until(stop, row)] for [row] in pieces)
        yield prompt
        yield from streamed(tokenizer, chain.from_iterable(rows))
    except ValueError as error:
        raise UserError(str(error).replace("prompt 0", "prompt")) from error


def check_tokenizer(tokenizer, loaded, file):
    """Refuse a tokenizer whose tokens mean something else to the model."""
    if loaded.tokenizer and loaded.tokenizer.to_json() != tokenizer.to_json():
        raise UserError(
            f"--tokenizer: {file} is another tokenizer than the one that {loaded.path} was trained "
            "with, which is recorded there; leave --tokenizer out"
        )
    known = loaded.record.get("facts", {}).get("vocab_size")
    if known and tokenizer.vocab_size > known:
        raise UserError(
            f"--tokenizer: {file} has {tokenizer.vocab_size} tokens, but {loaded.path} was trained "
            f"on {known}; name the tokenizer that made its tokens"
        )


def tokenizer_of(loaded):
    if loaded.tokenizer is None:
        raise UserError(
            f"{loaded.path}: the run has recorded no tokenizer; pass the one that made its tokens, "
            "as --tokenizer tokenizer.json"
        )
    return loaded.tokenizer


if __name__ == "__main__":
    sys.exit(main())
