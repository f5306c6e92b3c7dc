"""Tokens outside the vocabulary of a language model, for which its outputs would be NaN."""

import numpy as np

from utils import UserError


def check_tokens(arrays, vocab_size, name_of):
    """Raise for the first token outside the vocabulary in the arrays {name: one row per input}.

    `name_of(row)` is the name of an input in messages. The tokens are the only array, or the one
    that is called so, as beside the numbers of documents. Without a `vocab_size`, nothing is known.
    """
    tokens = next(iter(arrays.values())) if len(arrays) == 1 else arrays.get("tokens")
    if type(vocab_size) is not int or tokens is None or tokens.dtype.kind not in "iu":
        return
    outside = (tokens < 0) | (tokens >= vocab_size)
    if outside.any():
        row, *place = map(int, np.argwhere(outside)[0])
        found = f"token {', '.join(map(str, place))} is {tokens[(row, *place)]}"
        raise UserError(
            f"{name_of(row)}: {found}, outside the vocabulary 0..{vocab_size - 1}; encode the text "
            "with the tokenizer of the run"
        )
