"""Text from a decoder: it reads a prompt into its cache, then makes one token after the other.

for tokens in stream(model, params, [prompt], 200, Sampling(temperature=0.8, top_k=40)):
    print(tokenizer.decode(tokens[0]), end="")
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PyTree

from model.base import Model
from model.layers.blocks import unrolled
from model.sampling import (
    COLDEST,
    Sampling,
    check,
    check_amount,
    check_prompts,
    second_half,
    until,
)

CHUNK = 16  # tokens of one call: few enough to watch, enough to hide what a call costs
SHORTEST = 16  # prompts are padded to powers of 2 from here on, so that few lengths are compiled


def generate(
    model: Model,
    params: PyTree,
    prompts: Sequence[ArrayLike],
    tokens: int,
    sampling: Sampling | None = None,
    *,
    state: PyTree | None = None,
    seed: int = 0,
    stop: int | None = None,
) -> list[np.ndarray]:
    """The `tokens` tokens that follow each prompt; prompts and results are lists of arrays of ids.

    The prompts may have different lengths. A text ends before the token `stop`. When a text has
    filled the model's context, the model reads the second half of it again and continues from
    there. The same prompts and seed give the same texts.
    """
    options = {"state": state, "seed": seed, "stop": stop}
    pieces = list(stream(model, params, prompts, tokens, sampling, **options))
    texts = np.concatenate(pieces, axis=1)
    return [text[: until(stop, text)] for text in texts]


def stream(
    model: Model,
    params: PyTree,
    prompts: Sequence[Sequence[int] | ArrayLike],
    tokens: int,
    sampling: Sampling | None = None,
    *,
    state: PyTree | None = None,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[np.ndarray]:
    """`generate` in pieces: yields arrays (prompts, n) with the next n tokens of every text."""
    context, sampling = context_of(model), sampling or Sampling()
    check_amount(tokens, seed)
    check_prompts(prompts)
    texts = [np.asarray(prompt).reshape(-1) for prompt in prompts]
    check(texts, context, sampling, vocab_size_of(model))
    texts = [text.astype(np.int32) for text in texts]
    params = unrolled(params)  # a loop over blocks would copy the cache for every token
    programs, ended = compiled(model, sampling), np.zeros(len(texts), bool)
    cache, position, made = None, context, 0
    while made < tokens and not ended.all():
        if position == context:  # before the first token, and when the cache is full
            texts = [second_half(text, context) for text in texts]
            cache = read(model, programs, params, state or {}, texts)
            position = max(map(len, texts)) - 1
        count = min(CHUNK, tokens - made, context - position)
        last = np.array([text[-1] for text in texts])
        cache, new = programs.write(params, cache, last, jax.random.key(seed), made, count)
        new = np.asarray(new)[:, :count]
        texts = [np.concatenate([text, row]) for text, row in zip(texts, new, strict=True)]
        position, made = position + count, made + count
        ended |= (new == stop).any(1) if stop is not None else False
        yield new


def empty_state(model: Model, batch_size: int) -> PyTree:
    """A state with an empty cache for texts of this number."""
    cache = getattr(model, "cache", None)
    if cache is None:
        raise ValueError("the model cannot generate: it has no `cache` (see model/base.py)")
    return cache(batch_size)


def context_of(model: Model) -> int:
    """The number of tokens for which the model has room."""
    entries = jax.eval_shape(lambda: empty_state(model, 1)["cache"]["blocks"])
    return jax.tree.leaves(entries)[0].shape[-2]


@lru_cache(16)
def vocab_size_of(model: Model) -> int:
    """The number of tokens for which the model has logits."""

    def logits(key: Array, token: Int[Array, "batch time"]) -> Float[Array, "batch time vocab"]:
        params, state = model.init(key)
        return model.apply(params, state | empty_state(model, 1), token)[0]

    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(logits, jax.eval_shape(lambda: jax.random.key(0)), token).shape[-1]


class Programs(NamedTuple):
    prefill: Callable  # (params, state, tokens) -> state
    write: Callable  # (params, state, last tokens, key, tokens made, count) -> (state, new tokens)


@lru_cache(16)
def compiled(model: Model, sampling: Sampling) -> Programs:
    """The two programs of a model, to which the cache is donated."""

    def prefill(params: PyTree, state: PyTree, tokens: Int[Array, "batch time"]) -> PyTree:
        return model.apply(params, state, tokens)[1]  # XLA drops the computation of the logits

    def write(
        params: PyTree,
        state: PyTree,
        last: Int[Array, "batch"],
        key: Array,
        made: int | Array,
        count: int | Array,
    ) -> tuple[PyTree, Int[Array, "batch chunk"]]:
        def step(i: int | Array, carry: tuple[PyTree, Array, Array]) -> tuple[PyTree, Array, Array]:
            state, token, new = carry
            logits, state = model.apply(params, state, token[:, None])
            token = draw(jax.random.fold_in(key, made + i), logits[:, 0], sampling)
            return state, token, lax.dynamic_update_slice(new, token[:, None], (0, i))

        new = jnp.zeros((len(last), CHUNK), jnp.int32)
        state, _, new = lax.fori_loop(0, count, step, (state, last, new))
        return state, new

    return Programs(jax.jit(prefill, donate_argnums=1), jax.jit(write, donate_argnums=1))


def read(
    model: Model, programs: Programs, params: PyTree, state: PyTree, texts: list[np.ndarray]
) -> PyTree:
    """A state whose cache holds all tokens of the texts but the last ones, which come next."""
    lengths = np.array([len(text) - 1 for text in texts], np.int32)
    state = jax.tree.map(jnp.array, state) | empty_state(
        model, len(texts)
    )  # a copy, as it is donated
    if lengths.max():
        size = min(context_of(model), max(SHORTEST, 1 << int(lengths.max() - 1).bit_length()))
        rows = [np.pad(text[:-1], (0, size + 1 - len(text))) for text in texts]
        state = programs.prefill(params, state, np.stack(rows))
    # Tokens that were read after the end of a text are masked, and overwritten by new tokens.
    return state | {"cache": state["cache"] | {"position": jnp.asarray(lengths)}}


def draw(
    key: Array, logits: Float[Array, "batch vocab"], sampling: Sampling
) -> Int[Array, "batch"]:
    """One token for each row of logits, (B, V)."""
    temperature, top_k, top_p, vocab_size = sampling
    logits = logits[:, :vocab_size]
    if temperature < COLDEST:
        return logits.argmax(-1).astype(jnp.int32)
    logits = logits.astype(jnp.float32) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        lowest = lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < lowest, -jnp.inf, logits)
    if top_p is not None and top_p < 1:
        logits = jnp.where(in_nucleus(logits, top_p), logits, -jnp.inf)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def in_nucleus(logits: Float[Array, "batch vocab"], top_p: float) -> Bool[Array, "batch vocab"]:
    """Whether each token is among the fewest that together have the probability `top_p`."""
    ordered = jnp.sort(jax.nn.softmax(logits), axis=-1)[:, ::-1]
    before = ordered.cumsum(-1) - ordered
    lowest = jnp.where(before < top_p, ordered, 2).min(-1, keepdims=True)
    return jax.nn.softmax(logits) >= lowest
