"""Generate text with an exported decoder: NumPy and the runtime of the file are enough.

The file's decode step takes a token for each text, and the cache; it returns the logits of the next
token, and the cache with this token. `model/generate.py` does the same in JAX.
"""

from typing import NamedTuple

import numpy as np

from model.sampling import COLDEST, second_half

TOKEN, LOGITS, POSITION, NEXT = "token", "logits", "position", "next/"  # names in the file


class Decoder(NamedTuple):
    """A decode step: `call` maps {input: array} to {output: array}."""

    call: object
    inputs: dict  # {name: (shape, dtype)}; a free size is None
    context: int  # the number of tokens for which the cache has room

    def empty(self, rows):
        """The cache of texts before their first token is read."""
        specs = {name: spec for name, spec in self.inputs.items() if name != TOKEN}
        return {name: np.zeros((rows, *shape[1:]), dtype) for name, (shape, dtype) in specs.items()}

    def step(self, tokens, cache):
        """(the logits after one more token of each text, the cache with it)"""
        outputs = self.call({TOKEN: np.asarray(tokens, np.int32), **cache})
        return outputs[LOGITS], {name: outputs[NEXT + name] for name in cache}

    def read(self, texts):
        """The cache with all tokens of the texts but the last ones, which come next."""
        lengths = np.array([len(text) - 1 for text in texts], np.int32)
        cache = self.empty(len(texts))
        for i in range(lengths.max()):
            _, cache = self.step([text[i] if i < len(text) else 0 for text in texts], cache)
        # Entries behind the end of a text are hidden, and overwritten by the following tokens.
        return cache | {POSITION: lengths}


def steps(decoder, prompts, count, choose):
    """Up to `count` arrays with the next token of each text; choose(logits) draws them.

    When a text has filled the context, the second half of it is read again.
    """
    texts = [np.asarray(prompt, np.int32).reshape(-1) for prompt in prompts]
    context, cache = decoder.context, None
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


def stream(decoder, prompt, count, sampling, *, seed=0, stop=None):
    """Up to `count` tokens that follow a prompt, one by one; the text ends before `stop`."""
    random = np.random.default_rng(seed)
    (rows, *_), _ = decoder.inputs[TOKEN]
    prompts = [prompt] * (rows or 1)  # a file may take several texts only; the first one is read
    for token, *_ in steps(decoder, prompts, count, lambda x: draw(random, x, sampling)):
        if token == stop:
            return
        yield token


def draw(random, logits, sampling):
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
