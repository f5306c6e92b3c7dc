"""PyTorch: trained as in its quickstart, with layers and blocks as in torchvision and nanoGPT; and
a GPT that generates step by step with a cache of keys and values."""

from itertools import pairwise
from math import prod

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.peers import TEST_BATCH

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda":
    torch.set_float32_matmul_precision("high")  # TF32, as in JAX


class Permute(nn.Module):
    def __init__(self, *axes):
        super().__init__()
        self.axes = axes

    def forward(self, x):
        return x.permute(self.axes)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean((-2, -1))


class Residual(nn.Module):
    """Adds a block to its input, or to a projection of it."""

    def __init__(self, block, shortcut=None):
        super().__init__()
        self.block, self.shortcut = block, shortcut or nn.Identity()

    def forward(self, x):
        return self.shortcut(x) + self.block(x)


def convnext(
    shape,
    dims,
    kernel=7,
    expansion=2,
    head_dim=64,
    residual=False,
    patch=4,
    depths=None,
    pointwise="linear",
):
    """1x1 convolutions are linear layers between two permutations, or with `pointwise="conv"`
    convolutions."""

    def mixing(dim):
        sizes = (dim, expansion * dim), (expansion * dim, dim)
        if pointwise == "conv":
            expand, project = (nn.Conv2d(*size, 1, bias=False) for size in sizes)
            return [LayerNorm2d(dim, eps=1e-6), expand, nn.GELU(), project]
        expand, project = (nn.Linear(*size, bias=False) for size in sizes)
        perceptron = [nn.LayerNorm(dim, eps=1e-6), expand, nn.GELU(), project]
        return [Permute(0, 2, 3, 1), *perceptron, Permute(0, 3, 1, 2)]

    stem = nn.Conv2d(shape[-1], dims[0], patch, patch, bias=False)
    layers = [stem, LayerNorm2d(dims[0], eps=1e-6)]
    for i, dim in enumerate(dims):
        if i > 0:
            layers.append(LayerNorm2d(dims[i - 1], eps=1e-6))
            layers.append(nn.Conv2d(dims[i - 1], dim, 2, 2, bias=False))
        for _ in range(depths[i] if depths else 1):
            depthwise = nn.Conv2d(dim, dim, kernel, padding="same", groups=dim, bias=False)
            block = nn.Sequential(depthwise, *mixing(dim))
            layers.append(Residual(block) if residual else block)
    head = [nn.Linear(dims[-1], head_dim), nn.Linear(head_dim, 10)]
    return nn.Sequential(*layers, Mean(), nn.LayerNorm(dims[-1], eps=1e-6), *head)


def conv_norm(dim_in, dim, size, stride=1, groups=1):
    conv = nn.Conv2d(dim_in, dim, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(dim))


def resnet(shape, widths, depth):
    layers, dim_in = [conv_norm(shape[-1], widths[0], 3), nn.ReLU(inplace=True)], widths[0]
    for i, dim in enumerate(widths):
        for j in range(depth):
            stride = 2 if i > 0 and j == 0 else 1
            first, second = conv_norm(dim_in, dim, 3, stride), conv_norm(dim, dim, 3)
            shortcut = conv_norm(dim_in, dim, 1, stride) if stride > 1 else None
            body = nn.Sequential(first, nn.ReLU(inplace=True), second)
            layers += [Residual(body, shortcut), nn.ReLU(inplace=True)]
            dim_in = dim
    return nn.Sequential(*layers, Mean(), nn.Linear(dim_in, 10))


def net(shape, layers):
    parts, width = [], shape[-1]
    for layer in layers:
        size = (width, layer.width, layer.kernel, layer.stride)
        if layer.kind == "up":
            conv = nn.ConvTranspose2d(*size, bias=False)
        else:
            conv = nn.Conv2d(*size, layer.kernel // 2, groups=layer.groups, bias=False)
        nn.init.kaiming_normal_(conv.weight)  # as ours, so that both learn as fast
        width = layer.width
        parts += [conv, NORMS[layer.norm](width), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts, Mean(), nn.Linear(width, 10))


NORMS = {
    "batch": nn.BatchNorm2d,
    "group": lambda width: nn.GroupNorm(8, width),
    "layer": LayerNorm2d,
    "none": lambda width: nn.Identity(),
}


class RNN(nn.Module):
    """Reads sequences, of which `lengths` says whether they are padded with zeros."""

    def __init__(self, shape, cell, dim, depth=1, bidirectional=False, lengths=False):
        super().__init__()
        layers = {"lstm": nn.LSTM, "gru": nn.GRU}[cell]
        self.layers = layers(shape[-1], dim, depth, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(dim * (1 + bidirectional), 10)
        self.lengths, self.ends = lengths, 1 + bidirectional

    def forward(self, x):
        if self.lengths:
            lengths = (x != 0).any(-1).sum(-1).cpu()
            x = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        last = self.layers(x)[1]
        last = last[0] if isinstance(last, tuple) else last
        return self.head(torch.cat(list(last[-self.ends :]), -1))


class TransformerBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        for layer in (self.mlp[0], self.mlp[2]):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.normal_(layer.bias, std=1e-6)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Tokens(nn.Module):
    """Patches of an image, each with a learned position."""

    def __init__(self, shape, patch, dim):
        super().__init__()
        self.patches = nn.Conv2d(shape[-1], dim, patch, patch)
        nn.init.trunc_normal_(self.patches.weight, std=(shape[-1] * patch**2) ** -0.5)
        nn.init.zeros_(self.patches.bias)
        count = shape[0] // patch * (shape[1] // patch)
        self.positions = nn.Parameter(torch.empty(count, dim).normal_(std=0.02))

    def forward(self, x):
        return self.patches(x).flatten(2).transpose(1, 2) + self.positions


class MeanOfTokens(nn.Module):
    def forward(self, x):
        return x.mean(1)


def vit(shape, patch=4, dim=64, depth=4, heads=4):
    blocks = [TransformerBlock(dim, heads) for _ in range(depth)]
    head = [nn.LayerNorm(dim, eps=1e-6), MeanOfTokens(), nn.Linear(dim, 10)]
    return nn.Sequential(Tokens(shape, patch, dim), *blocks, *head)


def mlp(shape, dims):
    sizes = (prod(shape), *dims)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(sizes[-1], 10))


class DecoderBlock(nn.Module):
    """As nanoGPT's: one product for queries, keys and values, and PyTorch's fused attention."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.c_attn, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, write=lambda k, v: (k, v), **mask):
        """`write` puts new keys and values into a cache, and returns all of them."""
        parts = self.c_attn(self.norm1(x)).split(x.shape[2], dim=2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, *write(k, v), **mask or {"is_causal": True})
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, shape, vocab_size, dim, depth, heads):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, dim), nn.Embedding(shape[0], dim)
        self.blocks = nn.Sequential(*(DecoderBlock(dim, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(initialize)
        for block in self.blocks:  # what is added to x begins smaller, as in GPT-2
            for layer in (block.out, block.mlp[2]):
                nn.init.normal_(layer.weight, std=0.02 / (2 * depth) ** 0.5)

    def forward(self, x):
        steps = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions(steps))))


def initialize(module):
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


MODELS = {f.__name__: f for f in (convnext, resnet, vit, mlp, net)} | {"rnn": RNN}


class Trainer:
    """A model and its optimizer over NCHW images, or over tokens."""

    def __init__(self, workload, data, variant):
        torch.manual_seed(0)
        last = "channels_last" in variant
        layout = {"memory_format": torch.channels_last if last else torch.contiguous_format}
        self.data = {}
        for name, (x, y) in data.items():
            x, y = torch.from_numpy(x).to(DEVICE), torch.from_numpy(y).long().to(DEVICE)
            x = x.long() if workload.is_text else x
            x = x.permute(0, 3, 1, 2).contiguous(**layout) if x.ndim == 4 else x
            self.data[name] = x, y
        if workload.is_text:
            model = GPT(workload.shape, workload.classes, **workload.args)
        else:
            model = MODELS[workload.model](workload.shape, **workload.args)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        model = model.to(DEVICE, **layout)
        self.model = torch.compile(model) if "compile" in variant else model
        self.batch_size, self.layout = workload.batch_size, layout
        low = workload.precision != "float32"
        self.precision = {"dtype": torch.bfloat16, "enabled": low, "device_type": DEVICE}
        self.loss_fn = nn.CrossEntropyLoss(label_smoothing=workload.label_smoothing)
        steps = len(data["train"][0]) // workload.batch_size * workload.epochs
        self.optimizer = adamw(model, workload.lr, workload.weight_decay)
        self.scheduler = scheduler_of(self.optimizer, workload, steps)

    def epoch(self, seed):
        x, y = self.data["train"]
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        batches = order[: len(x) // self.batch_size * self.batch_size].split(self.batch_size)
        loss_sum = torch.zeros((), device=DEVICE)
        correct = torch.zeros((), dtype=torch.long, device=DEVICE)
        self.model.train()
        for rows in batches:
            inputs, labels = x[rows], y[rows]
            if inputs.ndim == 4:
                inputs = inputs.contiguous(**self.layout)
            with torch.autocast(**self.precision):
                logits = self.model(inputs).float()
            loss = self.loss_fn(logits.flatten(0, -2), labels.flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.scheduler:
                self.scheduler.step()
            loss_sum += loss.detach()
            correct += (logits.argmax(-1) == labels).sum()
        return (loss_sum / len(batches)).item()

    def device_memory(self):
        return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None

    @torch.no_grad()
    def accuracy(self):
        x, y = self.data["test"]
        self.model.eval()
        pairs = zip(x.split(TEST_BATCH), y.split(TEST_BATCH), strict=True)
        correct = [(self.model(x).argmax(-1) == y).sum() for x, y in pairs]
        return (sum(correct) / y.numel()).item()


trainer = Trainer


def adamw(model, lr, weight_decay):
    """Weights decay; biases and scales, which have one axis, do not."""
    parameters = list(model.parameters())
    weights = {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay}
    others = {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}
    return torch.optim.AdamW([weights, others], lr, fused=True)


def scheduler_of(optimizer, workload, steps):
    """A scheduler to be called after every step; None if the learning rate is constant."""
    warmup = round(workload.warmup * steps)

    def one_cycle(step):
        return step / warmup if step < warmup else max(0.0, (steps - step) / (steps - warmup))

    multiplier = {"constant": None, "one_cycle": one_cycle}[workload.schedule]
    return multiplier and torch.optim.lr_scheduler.LambdaLR(optimizer, multiplier)


# Generated text.


class Step(nn.Module):
    """Logits of the next token from one token, (1, 1), at a position, (1,); it writes the cache."""

    def __init__(self, model, length, dim, depth, heads):
        super().__init__()
        self.model = model
        self.register_buffer("places", torch.arange(length))
        self.register_buffer("cache", torch.zeros(depth, 2, 1, heads, length, dim // heads))

    def forward(self, token, position):
        model, mask = self.model, (self.places <= position)[None, None, None]
        x = model.tokens(token) + model.positions(position)
        for block, (keys, values) in zip(model.blocks, self.cache, strict=True):

            def write(k, v, keys=keys, values=values):
                return keys.index_copy_(2, position, k), values.index_copy_(2, position, v)

            x = block(x, write, attn_mask=mask)
        return model.head(model.norm(x))[:, -1]


class Writer:
    """Writes text, token by token."""

    def __init__(self, workload, variant):
        torch.manual_seed(0)
        if "one_thread" in variant:  # two threads may wait for each other longer than they work
            torch.set_num_threads(1)
        model = GPT(workload.shape, workload.classes, **workload.args).eval()
        self.step = Step(model, workload.shape[0], **workload.args)
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


writer = Writer
