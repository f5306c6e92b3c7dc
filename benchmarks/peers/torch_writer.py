"""PyTorch generates text: the GPT of torch.py, step by step with a cache of keys and values."""

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
        model = self.model
        x = model.tokens(token) + model.positions(position)
        mask = (self.places <= position)[None, None, None]
        for i, block in enumerate(model.blocks):
            parts = block.c_attn(block.norm1(x)).split(x.shape[2], dim=2)
            q, k, v = (part.unflatten(2, (block.heads, -1)).transpose(1, 2) for part in parts)
            keys, values = getattr(self, f"keys{i}"), getattr(self, f"values{i}")
            keys.index_copy_(2, position, k)
            values.index_copy_(2, position, v)
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            x = x + block.out(y.transpose(1, 2).reshape(x.shape))
            x = x + block.mlp(block.norm2(x))
        return model.head(model.norm(x))[:, -1]


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
