"""Continue a text with a trained language model.

    python -m inference.generate saved/<title>/<run> --prompt "Once upon a time" --tokens 200

The text appears as it is written. From Python: `load(path).generate("Once upon a time")`.
"""

import argparse
import sys
from itertools import chain

from data_loader.documents import decoded
from data_loader.tokenizers.saved import first_tokens
from model.sampling import Sampling, check, check_amount, until
from utils import UserError, echo, run_command
from utils.files import read_file


def main(argv=None):
    """Run the command line; a user's mistake ends in one message and an exit code."""
    return run_command(lambda: write(parse(argv)), interrupted="")


def parse(argv):
    parser = argparse.ArgumentParser(description="Continue a text with a trained language model.")
    add = parser.add_argument
    add("model", help="a run's folder, or one of its checkpoints")
    add("--best", action="store_true", help="of a run's folder, the best checkpoint")
    add_text_options(add)
    add("--samples", type=int, default=1, help="how many texts to write (default: 1)")
    add("-c", "--config", help="the config (default: the one stored in the checkpoint)")
    add("--trust", action="store_true", help="allow a stored config to import its dotted names")
    return parser.parse_args(argv)


def add_text_options(add):
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


def write(arguments):
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
        from data_loader.tokenizers.saved import tokenizer_file

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


def checked_text(arguments):
    """(the prompt, the Sampling) of the options of `add_text_options`."""
    if arguments.tokens < 1:
        raise UserError(f"--tokens: must be at least 1, got {arguments.tokens}")
    largest = 2**32 - getattr(arguments, "samples", 1)  # each sample has the next seed
    if not 0 <= arguments.seed <= largest:
        raise UserError(f"--seed: must be from 0 to {largest}, got {arguments.seed}")
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    return prompt_of(arguments), sampling


def prompt_of(arguments):
    if not arguments.prompt_file:
        return checked_prompt(arguments.prompt or "")
    if arguments.prompt:
        raise UserError("--prompt: leave it out, or --prompt-file; the text has one beginning")
    path = arguments.prompt_file
    try:
        return decoded(path, read_file(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def checked_prompt(prompt):
    """A prompt that can be encoded: bytes that are not UTF-8 reach Python as lone surrogates."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        found = f"character {error.start} is {error.object[error.start]!a}"
        raise UserError(
            f"--prompt: is not UTF-8: {found}; pass a --prompt-file in UTF-8"
        ) from error
    return prompt


def text_pieces(loaded, prompt, tokens, sampling, seed=0, tokenizer=None):
    """The prompt and then the text that follows it, piece by piece, up to the end of the
    document."""
    from data_loader.tokenizers.saved import streamed
    from model.generate import context_of, stream

    tokenizer = tokenizer or tokenizer_of(loaded)
    start, stop = first_tokens(tokenizer, prompt), tokenizer.end_of_text
    options = {"state": loaded.state, "seed": seed, "stop": stop}
    sampling = sampling._replace(vocab_size=tokenizer.vocab_size)
    try:
        # Before anything is shown.
        check_amount(tokens, seed)
        check([start], context_of(loaded.model), sampling)
        pieces = stream(loaded.model, loaded.params, [start], tokens, sampling, **options)
        rows = (row[: until(stop, row)] for [row] in pieces)
        yield prompt
        yield from streamed(tokenizer, chain.from_iterable(rows))
    except ValueError as error:
        raise UserError(str(error).replace("prompt 0", "prompt")) from error


def tokenizer_of(loaded):
    if loaded.tokenizer is None:
        raise UserError(
            f"{loaded.path}: the run has recorded no tokenizer; pass the one that made its tokens, "
            "as --tokenizer tokenizer.json"
        )
    return loaded.tokenizer


def check_tokenizer(tokenizer, recorded, vocab_size, source):
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


if __name__ == "__main__":
    sys.exit(main())
