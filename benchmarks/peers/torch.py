"""PyTorch, trained as in its quickstart; layers and blocks as in torchvision."""

from itertools import pairwise
from math import prod

import torch
from torch import nn
from torch.nn import functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda":
    torch.set_float32_matmul_precision("high")  # TF32, as in JAX
VARIANTS = ("eager", "channels_last", "compile", "compile channels_last")
BATCH = 500  # of the test set


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


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim, kernel, expansion, residual):
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(dim, dim, kernel, padding="same", groups=dim, bias=False),
            Permute(0, 2, 3, 1),
            nn.LayerNorm(dim, eps=1e-6),
            nn.Linear(dim, expansion * dim, bias=False),
            nn.GELU(),
            nn.Linear(expansion * dim, dim, bias=False),
            Permute(0, 3, 1, 2),
        )
        self.residual = residual

    def forward(self, x):
        y = self.block(x)
        return x + y if self.residual else y


def convnext(
    shape,
    dims=(8, 16, 32),
    kernel=7,
    expansion=2,
    head_dim=64,
    residual=False,
    patch=4,
    depths=None,
):
    stem = nn.Conv2d(shape[-1], dims[0], patch, patch, bias=False)
    layers = [stem, LayerNorm2d(dims[0], eps=1e-6)]
    for i, dim in enumerate(dims):
        if i > 0:
            layers.append(LayerNorm2d(dims[i - 1], eps=1e-6))
            layers.append(nn.Conv2d(dims[i - 1], dim, 2, 2, bias=False))
        for _ in range(depths[i] if depths else 1):
            layers.append(ConvNeXtBlock(dim, kernel, expansion, residual))
    head = [nn.Linear(dims[-1], head_dim), nn.Linear(head_dim, 10)]
    return nn.Sequential(*layers, Mean(), nn.LayerNorm(dims[-1], eps=1e-6), *head)


def conv_norm(dim_in, dim, size, stride=1):
    return nn.Sequential(
        nn.Conv2d(dim_in, dim, size, stride, size // 2, bias=False), nn.BatchNorm2d(dim)
    )


class ResidualBlock(nn.Module):
    def __init__(self, dim_in, dim, stride):
        super().__init__()
        self.body = nn.Sequential(
            conv_norm(dim_in, dim, 3, stride), nn.ReLU(inplace=True), conv_norm(dim, dim, 3)
        )
        self.shortcut = conv_norm(dim_in, dim, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        return F.relu(self.shortcut(x) + self.body(x), inplace=True)


def resnet(shape, widths, depth):
    blocks = [ResidualBlock(widths[0], widths[0], 1) for _ in range(depth)]
    for a, b in pairwise(widths):
        blocks += [ResidualBlock(a, b, 2), *(ResidualBlock(b, b, 1) for _ in range(depth - 1))]
    stem = [conv_norm(shape[-1], widths[0], 3), nn.ReLU(inplace=True)]
    return nn.Sequential(*stem, *blocks, Mean(), nn.Linear(widths[-1], 10))


def mobilenet_v1(shape, plan):
    def unit(dim_in, dim, size, stride=1, groups=1):
        conv = nn.Conv2d(dim_in, dim, size, stride, size // 2, groups=groups, bias=False)
        nn.init.kaiming_normal_(conv.weight)  # as ours, so that both learn as fast
        return [conv, nn.BatchNorm2d(dim), nn.ReLU(inplace=True)]

    width = plan[0][0]
    layers = unit(shape[-1], width, 3)
    for out, stride in plan:
        layers += [*unit(width, width, 3, stride, width), *unit(width, out, 1)]
        width = out
    return nn.Sequential(*layers, Mean(), nn.Linear(width, 10))


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


class ViT(nn.Module):
    def __init__(self, shape, patch=4, dim=64, depth=4, heads=4):
        super().__init__()
        tokens = shape[0] // patch * (shape[1] // patch)
        self.patches = nn.Conv2d(shape[-1], dim, patch, patch)
        nn.init.trunc_normal_(self.patches.weight, std=(shape[-1] * patch**2) ** -0.5)
        nn.init.zeros_(self.patches.bias)
        self.positions = nn.Parameter(torch.empty(tokens, dim).normal_(std=0.02))
        self.blocks = nn.Sequential(*(TransformerBlock(dim, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


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

    def forward(self, x):
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.c_attn(self.norm1(x)).split(x.shape[2], dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
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


MODELS = {
    "convnext": convnext,
    "resnet": resnet,
    "vit": ViT,
    "mlp": mlp,
    "mobilenet_v1": mobilenet_v1,
}


def model_of(workload):
    if workload.is_text:
        return GPT(workload.shape, workload.classes, **workload.args)
    return MODELS[workload.model](workload.shape, **workload.args)


class Trainer:
    """A model and its optimizer over NCHW images."""

    def __init__(self, workload, data, variant):
        torch.manual_seed(0)
        formats = torch.channels_last, torch.contiguous_format
        layout = {"memory_format": formats[0 if "channels_last" in variant else 1]}
        self.data = {}
        for name, (x, y) in data.items():
            x, y = torch.from_numpy(x).to(DEVICE), torch.from_numpy(y).long().to(DEVICE)
            x = x.long() if workload.is_text else x.permute(0, 3, 1, 2).contiguous(**layout)
            self.data[name] = x, y
        self.batch_size, self.layout = workload.batch_size, layout
        self.model = model_of(workload).to(DEVICE, **layout)
        low = workload.precision != "float32"
        self.precision = {"dtype": torch.bfloat16, "enabled": low, "device_type": DEVICE}
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        if "compile" in variant:
            self.model = torch.compile(self.model)
        self.loss_fn = nn.CrossEntropyLoss(label_smoothing=workload.label_smoothing)
        steps = len(data["train"][0]) // workload.batch_size * workload.epochs
        self.optimizers = optimizers(self.model, workload)
        schedulers = [scheduler_of(optimizer, workload, steps) for optimizer in self.optimizers]
        self.schedulers = [scheduler for scheduler in schedulers if scheduler]

    def epoch(self, seed):
        x, y = self.data["train"]
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        order = order.to(DEVICE)
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
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for scheduler in self.schedulers:
                scheduler.step()
            loss_sum += loss.detach()
            correct += (logits.argmax(-1) == labels).sum()
        return (loss_sum / len(batches)).item()

    def device_memory(self):
        return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None

    def accuracy(self):
        x, y = self.data["test"]
        self.model.eval()
        with torch.no_grad():
            correct = [
                (self.model(x).argmax(-1) == y).sum()
                for x, y in zip(x.split(BATCH), y.split(BATCH), strict=True)
            ]
        return (sum(correct) / y.numel()).item()


def optimizers(model, workload):
    """AdamW; or Muon for all matrices except the last layer's, and AdamW for the rest, since Muon
    accepts only matrices."""
    parameters, decay = list(model.parameters()), workload.weight_decay
    if workload.optimizer == "adamw":
        return [torch.optim.AdamW(groups(parameters, decay), workload.lr, fused=True)]
    matrices = [p for p in parameters[:-2] if p.ndim == 2]
    rest = [p for p in parameters if not any(p is matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, workload.lr, weight_decay=decay)
    return [muon, torch.optim.AdamW(groups(rest, decay), workload.adamw_lr, fused=True)]


def groups(parameters, weight_decay):
    """Weights decay; biases and scales, which have one axis, do not."""
    weights, others = (
        [p for p in parameters if (p.ndim > 1) == decays] for decays in (True, False)
    )
    decays = {"params": weights, "weight_decay": weight_decay}
    return [decays, {"params": others, "weight_decay": 0.0}]


def scheduler_of(optimizer, workload, steps):
    """A scheduler to be called after every step; None if the learning rate is constant."""
    warmup = round(workload.warmup * steps)

    def one_cycle(step):
        return step / warmup if step < warmup else max(0.0, (steps - step) / (steps - warmup))

    multiplier = {"constant": None, "one_cycle": one_cycle}[workload.schedule]
    return multiplier and torch.optim.lr_scheduler.LambdaLR(optimizer, multiplier)


def trainer(workload, data, variant):
    return Trainer(workload, data, variant)
