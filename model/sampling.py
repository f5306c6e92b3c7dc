"""How a decoder's next token is drawn, and checks of prompts; without JAX, since exported files are
used without it."""

from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

COLDEST = 1e-30  # below this temperature, as at 0, always the likeliest: float32 would overflow


class Sampling(NamedTuple):
    """How the next token is drawn from the logits."""

    temperature: float = 1.0  # below 1, likely tokens become more likely; 0: always the likeliest
    top_k: int | None = None  # only the k likeliest tokens
    top_p: float | None = None  # only the fewest tokens that together have this probability
    # Only the tokens below this number: a model may have more than its tokenizer, for speed.
    vocab_size: int | None = None


def is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_amount(tokens: int, seed: int) -> None:
    """Raise for a number of tokens, or a seed, that cannot be used."""
    if not is_integer(tokens) or tokens < 1:
        raise ValueError(f"tokens: must be an integer of at least 1, got {tokens!r}")
    if not is_integer(seed) or not 0 <= seed < 2**32:
        raise ValueError(f"seed: must be an integer from 0 to {2**32 - 1}, got {seed!r}")


def check_prompts(prompts: Sequence) -> None:
    """Raise for prompts that are not rows of integers, which a cast to integers would change."""
    if prompts is None or isinstance(prompts, str | bytes):
        found = type(prompts).__name__
        raise ValueError(f"prompts: must be a list of arrays of tokens, got {found}")
    for i, prompt in enumerate(prompts):
        array = np.asarray(prompt)
        if not array.ndim or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(
                f"prompt {i}: must be an array of tokens, which are integers, got "
                f"{array.dtype}{list(array.shape)}; encode a text with its tokenizer"
            )


def check(
    prompts: Sequence[Sequence[int] | np.ndarray],
    context: int,
    sampling: Sampling,
    vocab_size: int | None = None,
) -> None:
    """Raise for prompts and options that cannot be used; `vocab_size` is that of the model, if it
    is known."""
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {i}: is empty; begin with at least one token")
        if len(prompt) > context:
            raise ValueError(
                f"prompt {i}: has {len(prompt)} tokens, the model's context has {context}; "
                "shorten the prompt"
            )
        low, high = min(prompt), max(prompt)
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            known = "" if vocab_size is None else f" to {vocab_size - 1}"
            found = low if low < 0 else high
            raise ValueError(f"prompt {i}: has the token {found}, the model's are 0{known}")
    temperature, top_k, top_p, _ = sampling
    if not isinstance(temperature, Real) or not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: must be 0 or more, got {temperature!r}")
    if top_k is not None and (not is_integer(top_k) or top_k < 1):
        raise ValueError(f"top_k: must be at least 1, and an integer, got {top_k!r}")
    if top_p is not None and (not isinstance(top_p, Real) or not 0 < top_p <= 1):
        raise ValueError(f"top_p: must be above 0 and at most 1, got {top_p!r}")


def second_half(text: np.ndarray, context: int) -> np.ndarray:
    """The tokens of a text that the model reads again, once the text has filled its context."""
    return text[-(context // 2 or 1) :] if len(text) > context else text


def until(stop: int | None, text: np.ndarray) -> int:
    """The index of the first `stop` in a text, or the text's length."""
    found = np.flatnonzero(text == stop)
    return int(found[0]) if stop is not None and len(found) else len(text)
