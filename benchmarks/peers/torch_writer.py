"""PyTorch generates text: the GPT of torch.py, step by step with a cache of keys and values."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.peers.torch import GPT

VARIANTS = ("eager", "compile", "eager one_thread", "compile one_thread")


class Step(nn.Module):
    """Logits of the next token from one token, (1, 1), at a position, (1,); it writes the cache."""

    def __init__(self, model, length, dim, heads):
        super().__init__()
        self.model = model
        for i in range(len(model.blocks)):
            for name in ("keys", "values"):
                self.register_buffer(f"{name}{i}", torch.zeros(1, heads, length, dim // heads))
        self.register_buffer("places", torch.arange(length))

    def forward(self, token, position):
        def write(i, k, v):
            keys, values = getattr(self, f"keys{i}"), getattr(self, f"values{i}")
            return keys.index_copy_(2, position, k), values.index_copy_(2, position, v)

        return next_logits(self.model, token, position, self.places, write)


class ExportedStep(nn.Module):
    """A Step with the cache as inputs and outputs: (logits, *cache), as an exported file has."""

    def __init__(self, model, length):
        super().__init__()
        self.model = model
        self.register_buffer("places", torch.arange(length))

    def forward(self, token, position, cache):
        new = []

        def write(i, k, v):
            old = cache[2 * i : 2 * i + 2]
            pair = [a.index_copy(2, position, b) for a, b in zip(old, (k, v), strict=True)]
            new.extend(pair)
            return pair

        return next_logits(self.model, token, position, self.places, write), *new


def next_logits(model, token, position, places, write):
    """The logits after a token; `write(i, k, v)` returns all keys and values of block i."""
    x = model.tokens(token) + model.positions(position)
    mask = (places <= position)[None, None, None]
    for i, block in enumerate(model.blocks):
        parts = block.c_attn(block.norm1(x)).split(x.shape[2], dim=2)
        q, k, v = (part.unflatten(2, (block.heads, -1)).transpose(1, 2) for part in parts)
        keys, values = write(i, k, v)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        x = x + block.out(y.transpose(1, 2).reshape(x.shape))
        x = x + block.mlp(block.norm2(x))
    return model.head(model.norm(x))[:, -1]


def export_step(params, file, opset, vocab_size, length, dim, depth, heads):
    """Write the step of a GPT with the weights of ours as an ONNX file."""
    model = GPT((length,), vocab_size, dim, depth, heads).eval()
    weights = {name: torch.tensor(array) for name, array in renamed(params, depth)}
    model.load_state_dict(weights | {"head.weight": weights["tokens.weight"]})
    cache = [torch.zeros(1, heads, length, dim // heads) for _ in range(2 * depth)]
    names = [f"{name}{i}" for i in range(depth) for name in ("keys", "values")]
    example = torch.tensor([[0]]), torch.tensor([0]), cache
    torch.onnx.export(
        ExportedStep(model, length).eval(),
        example,
        file,
        input_names=["token", "position", *names],
        output_names=["logits", *(f"next/{name}" for name in names)],
        opset_version=opset,
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def renamed(params, depth):
    """Our weights, {name: array}, under the names and in the layouts of PyTorch's."""
    yield "tokens.weight", params["tokens/weight"]
    yield "positions.weight", params["positions/weight"]
    blocks = [(f"blocks.{i}.", f"blocks/{i}/") for i in range(depth)]
    norms = [(at + name, ours + name) for at, ours in blocks for name in ("norm1", "norm2")]
    for name, ours in [("norm", "norm"), *norms]:
        yield f"{name}.weight", params[f"{ours}/scale"]
        yield f"{name}.bias", params[f"{ours}/bias"]
    for at, ours in blocks:
        names = [f"{ours}attention/{name}" for name in ("query", "key", "value")]
        weights = [params[f"{name}/weight"] for name in names]
        zeros = np.zeros(weights[1].shape[1], np.float32)  # our keys have no bias
        yield f"{at}c_attn.weight", np.concatenate(weights, axis=1).T
        biases = [params.get(f"{name}/bias", zeros) for name in names]
        yield f"{at}c_attn.bias", np.concatenate(biases)
        layers = {
            "out": "attention/out",
            "mlp.0": "perceptron/expand",
            "mlp.2": "perceptron/project",
        }
        for theirs, name in layers.items():
            yield f"{at}{theirs}.weight", params[f"{ours}{name}/weight"].T
            yield f"{at}{theirs}.bias", params[f"{ours}{name}/bias"]


class Writer:
    def __init__(self, workload, variant):
        torch.manual_seed(0)
        if "one_thread" in variant:  # two threads may wait for each other longer than they work
            torch.set_num_threads(1)
        args = workload.args
        model = GPT(workload.shape, workload.classes, **args).eval()
        self.step = Step(model, workload.shape[0], args["dim"], args["heads"])
        if "compile" in variant:
            self.step = torch.compile(self.step)

    @torch.inference_mode()
    def write(self, prompt, count, temperature, top_k):
        """`count` tokens; the prompt is read token by token, as it has only one."""
        tokens = list(prompt)
        for position in range(len(prompt) + count - 1):
            token = torch.tensor([[tokens[position]]])
            logits = self.step(token, torch.tensor([position]))
            if position + 1 < len(tokens):
                continue
            logits, ids = (logits / temperature).topk(top_k)
            chosen = torch.multinomial(F.softmax(logits, dim=-1), 1)
            tokens.append(ids[0, chosen[0, 0]].item())
        return tokens[len(prompt) :]


def writer(workload, variant):
    return Writer(workload, variant)
