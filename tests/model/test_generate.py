"""Generation: a cached step computes what the whole text computes, and sampling is what it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.generate import draw as draw_from_file
from model import generate as module
from model.generate import Sampling, draw, generate
from model.gpt import gpt
from tests.model.compare import quick_jit

VOCAB, CONTEXT = 11, 24
LLAMA = {"positions": "rotary", "norm": "rms", "feed_forward": "swiglu", "kv_heads": 2}
FORMS = {"gpt-2": {}, "llama": LLAMA | {"tied": False}, "scan": {"scan": True, "qk_norm": True}}
GREEDY = Sampling(temperature=0)


def made(form):
    model = gpt((CONTEXT,), VOCAB, dim=16, depth=2, **FORMS[form])
    params, _ = model.init(jax.random.key(0))
    # Larger weights, so that the likeliest token depends on the text.
    return model, jax.tree.map(lambda p: 5 * p if p.ndim > 1 else p, params)


@pytest.fixture(scope="module", params=FORMS)
def decoder(request):
    return made(request.param)


@pytest.fixture(scope="module")
def llama():
    return made("llama")


def text(seed, *shape):
    return np.random.default_rng(seed).integers(0, VOCAB, shape, np.int32)


@pytest.mark.slow
def test_cached_logits_equal_those_of_the_whole_text(decoder):
    model, params = decoder
    tokens, apply = text(0, 3, CONTEXT), quick_jit(model.apply)
    expected, _ = apply(params, {}, tokens)
    first, state = apply(params, model.cache(3), tokens[:, :7])
    found = [first]
    for t in range(7, CONTEXT):
        logits, state = apply(params, state, tokens[:, t : t + 1])
        found.append(logits)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(np.concatenate(found, 1) / scale, expected / scale, atol=1e-5)


def greedy(model, params, prompt, count):
    """The likeliest token again and again, by the model without a cache."""
    apply, tokens = quick_jit(model.apply), list(prompt)
    for _ in range(count):
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(tokens)] = tokens
        logits, _ = apply(params, {}, padded)
        tokens.append(int(logits[0, len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.slow
def test_greedy_texts_of_prompts_of_different_lengths_equal_those_without_a_cache(decoder):
    prompts = [text(1, 1), text(2, 9), text(3, 4)]
    texts = generate(*decoder, prompts, 15, GREEDY)
    for prompt, found in zip(prompts, texts, strict=True):
        np.testing.assert_array_equal(found, greedy(*decoder, prompt, 15))


@pytest.mark.slow
def test_a_text_continues_when_the_context_is_full(llama):
    """The prompt fills the context; every 12 tokens, the last 12 are read again."""
    model, params = llama
    prompt = text(4, CONTEXT)
    [found] = generate(model, params, [prompt], 20, GREEDY)
    expected = greedy(model, params, prompt, 1)
    while len(expected) < 20:
        recent = [*prompt, *expected][-(CONTEXT // 2) :]
        expected += greedy(model, params, recent, CONTEXT // 2 + 1)
    np.testing.assert_array_equal(found, expected[:20])


@pytest.mark.parametrize("temperature", [0.0, 1e-310, 1e-44, 1e-31, 1e-29])
def test_a_temperature_near_0_draws_the_likeliest_token(temperature):
    logits = np.array([[1.0, 2.0, -3.0, 5.0, 4.0]], np.float32)
    sampling = Sampling(temperature)
    assert draw(jax.random.key(0), jnp.asarray(logits), sampling).tolist() == [3]
    assert draw_from_file(np.random.default_rng(0), logits, sampling).tolist() == [3]


@pytest.mark.slow
def test_a_text_ends_before_the_stop_token(llama):
    prompts = [text(5, 3), text(6, 5)]
    texts = generate(*llama, prompts, 30, Sampling(), seed=1)
    stop = int(texts[0][4])
    for found, whole in zip(
        generate(*llama, prompts, 30, Sampling(), seed=1, stop=stop), texts, strict=True
    ):
        end = list(whole).index(stop) if stop in whole else 30
        np.testing.assert_array_equal(found, whole[:end])


@pytest.mark.slow
def test_the_seed_alone_decides_whatever_the_length_of_the_pieces(llama, monkeypatch):
    prompts = [text(7, 3)]
    expected = generate(*llama, prompts, 20, seed=3)
    monkeypatch.setattr(module, "CHUNK", 5)
    module.compiled.cache_clear()
    np.testing.assert_array_equal(generate(*llama, prompts, 20, seed=3), expected)
    module.compiled.cache_clear()
    assert not np.array_equal(generate(*llama, prompts, 20, seed=4), expected)


def share_of(logits, sampling, count=20_000):
    """How often each token is drawn."""
    rows = jnp.tile(jnp.asarray(logits), (count, 1))
    drawn = draw(jax.random.key(0), rows, sampling)
    return np.bincount(drawn, minlength=len(logits)) / count


@pytest.mark.slow
def test_tokens_are_drawn_with_their_probabilities():
    logits = np.array([2.0, 0.0, 1.0, -1.0, 1.5], np.float32)

    def probabilities(logits, kept):
        weights = np.where(kept, np.exp(logits), 0)
        return weights / weights.sum()

    everything = np.ones(5, bool)
    cases = [
        (Sampling(), probabilities(logits, everything)),
        (Sampling(temperature=0.5), probabilities(logits / 0.5, everything)),
        (Sampling(temperature=0), np.eye(5)[0]),
        (Sampling(top_k=2), probabilities(logits, [1, 0, 0, 0, 1])),
        # The probabilities are 0.46, 0.06, 0.17, 0.02, 0.28: the first two have 0.74.
        (Sampling(top_p=0.7), probabilities(logits, [1, 0, 0, 0, 1])),
        (Sampling(top_p=0.76), probabilities(logits, [1, 0, 1, 0, 1])),
        (Sampling(top_k=1, top_p=0.1), np.eye(5)[0]),
        (Sampling(vocab_size=4), probabilities(logits, [1, 1, 1, 1, 0])),
    ]
    for sampling, expected in cases:
        np.testing.assert_allclose(share_of(logits, sampling), expected, atol=0.015)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ([[]], Sampling(), "prompt 0: is empty"),
        ([[1], [1] * 25], Sampling(), "prompt 1: has 25 tokens, the model's context has 24"),
        ([[1], [3, -2]], Sampling(), "prompt 1: has the token -2, the model's are 0 to 10"),
        ([[1, 11]], Sampling(), "prompt 0: has the token 11, the model's are 0 to 10"),
        ([[1]], Sampling(temperature=-1), "temperature: must be 0 or more"),
        ([[1]], Sampling(top_k=0), "top_k: must be at least 1"),
        ([[1]], Sampling(top_p=1.5), "top_p: must be above 0"),
        ([[1]], Sampling(top_p="1"), "top_p: must be above 0 and at most 1, got '1'"),
        ([[1]], Sampling(top_k=2.5), "top_k: must be at least 1, and an integer, got 2.5"),
        ([[1]], Sampling(temperature="hot"), "temperature: must be 0 or more, got 'hot'"),
        (None, Sampling(), "prompts: must be a list of arrays of tokens, got NoneType"),
        (b"abc", Sampling(), "prompts: must be a list of arrays of tokens, got bytes"),
        ([None], Sampling(), "prompt 0: must be an array of tokens"),
        ([[1], [1.5, 2]], Sampling(), r"prompt 1: .* which are integers, got float64\[2\]"),
        ([1, 2], Sampling(), r"prompt 0: must be an array of tokens, .* got int64\[\]"),
        ([[2**32 + 1]], Sampling(), "prompt 0: has the token 4294967297, the model's are 0 to 10"),
    ],
)
def test_mistakes_are_named(llama, prompts, sampling, message):
    with pytest.raises(ValueError, match=message):
        generate(*llama, prompts, 3, sampling)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens: must be an integer of at least 1, got 0"),
        ({"tokens": -3}, "tokens: must be an integer of at least 1, got -3"),
        ({"tokens": 2.5}, "tokens: must be an integer of at least 1, got 2.5"),
        ({"seed": -1}, "seed: must be an integer from 0 to 4294967295, got -1"),
        ({"seed": 1.5}, "seed: must be an integer from 0 to 4294967295, got 1.5"),
        ({"seed": 2**32}, "seed: must be an integer from 0 to 4294967295, got 4294967296"),
    ],
)
def test_a_number_of_tokens_or_a_seed_out_of_range_is_named(llama, options, message):
    with pytest.raises(ValueError, match=message):
        generate(*llama, [[1]], **{"tokens": 3} | options)
