"""Ready rule files, against the libraries whose weights they are for: with random weights, both
models compute the same, in both directions."""

import jax
import numpy as np
import pytest

from inference import to_torch
from model.gpt import gpt
from tests.model.compare import quick_jit, random_params
from training.checkpoint.pretrained import Pretrained
from training.checkpoint.storage import save

TOKENS = np.random.default_rng(0).integers(0, 96, (2, 12))


def gpt2():
    """(their model, ours)"""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 96, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    ours = gpt((16,), 96, dim=32, depth=2, heads=4, feed_forward="gelu_tanh")
    return GPT2LMHeadModel(GPT2Config(**sizes)), ours


def llama(tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    config = LlamaConfig(**sizes, rms_norm_eps=1e-5, tie_word_embeddings=tied)
    form = {"positions": "rotary", "norm": "rms", "feed_forward": "swiglu", "bias": False}
    ours = gpt((16,), 96, dim=32, depth=2, heads=4, kv_heads=2, hidden=88, tied=tied, **form)
    return LlamaForCausalLM(config), ours


def tied_llama():
    return llama(tied=True)


MODELS = {"gpt2": gpt2, "llama": llama, "tied llama": tied_llama}


def randomize(model):
    """Random values for all weights and statistics of a torch model: zeros could hide a mistake."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.normal_(0, 0.3, generator=generator)
            if name.endswith("var"):
                tensor.abs_().add_(0.5)
    return model.eval()


def their_logits(model, x):
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(x)).logits.numpy()


def assert_close(found, expected):
    scale = np.abs(expected).max()
    assert scale > 0.1
    np.testing.assert_allclose(found / scale, expected / scale, rtol=0, atol=1e-5)


@pytest.fixture(scope="module", params=MODELS)
def pair(request):
    """(the name of the rules, their model, ours)"""
    pytest.importorskip("transformers")
    theirs, ours = MODELS[request.param]()
    return request.param.split()[-1], randomize(theirs), ours


@pytest.mark.slow
def test_weights_of_the_library_compute_the_same_here(pair, tmp_path):
    rules, theirs, ours = pair
    theirs.save_pretrained(tmp_path)  # as its models are published
    params, state = Pretrained(tmp_path, rules=rules)(*ours.init(jax.random.key(0)))
    assert_close(quick_jit(ours.apply)(params, state, TOKENS)[0], their_logits(theirs, TOKENS))


@pytest.mark.slow
def test_our_weights_compute_the_same_in_the_library(pair, tmp_path):
    from safetensors.torch import load_file

    rules, theirs, ours = pair
    params = jax.tree.map(lambda a: 0.3 * a, random_params(lambda key: ours.init(key)[0]))
    save(tmp_path / "a.params", {"params": params}, {})
    out = tmp_path / "out.safetensors"
    assert to_torch.main([str(tmp_path / "a.params"), str(out), "--rules", rules]) == 0
    theirs.load_state_dict(load_file(out), strict=True)
    assert_close(their_logits(theirs, TOKENS), quick_jit(ours.apply)(params, {}, TOKENS)[0])
