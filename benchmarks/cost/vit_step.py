"""A training step of the vision transformer on paper: its sizes, its floating-point operations, how a mesh cuts its weights."""

import math
from functools import lru_cache, partial
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh

from model.vit import vit
from training.base import TrainState
from training.devices.mesh import AXES
from training.devices.sharding import Plan, default_preset, shard_bytes
from training.optimizers import adamw
from training.trainer import SEED, first_trees
from utils import named_leaves

BLOCK = "blocks/0/"
HEAD = 64  # features of a head of attention, and how much wider than deep a model is


class Vit(NamedTuple):
    """The arguments of the model, and the batch of all devices together."""

    dim: int
    depth: int
    heads: int
    batch: int
    image: tuple = (224, 224, 3)
    patch: int = 16
    classes: int = 1000
    expansion: int = 4
    remat: bool = False  # of all blocks
    precision: str = "bfloat16"

    @property
    def tokens(self):
        """Of an image."""
        return (self.image[0] // self.patch) * (self.image[1] // self.patch)

    @property
    def itemsize(self):
        """Bytes of a number that the model computes with."""
        return 2 if self.precision == "bfloat16" else 4

    def model(self):
        names = ("patch", "dim", "depth", "heads", "expansion")
        args = {name: getattr(self, name) for name in names} | {
            "remat": ".*" if self.remat else None
        }
        return vit(self.image, self.classes, **args)

    def shapes(self):
        """Those of the parameters, from the model itself."""
        return shapes_of(self._replace(batch=0, remat=False, precision=""))


@lru_cache(maxsize=64)
def shapes_of(step):
    return jax.eval_shape(partial(first_trees, step.model()), SEED)[0]


def sized(parameters, batch, **others):
    """The model of about so many parameters by the usual proportions: heads of 64 features, the width 64 times the depth, a block
    having 12 * dim**2; a width that divides well, by 512 where it is large, and as many blocks as then come nearest."""
    dim = (HEAD * parameters / 12) ** (1 / 3)
    unit = 512 if dim > 1024 else 128
    dim = max(round(dim / unit), 1) * unit
    return Vit(dim, max(round(parameters / (12 * dim**2)), 1), dim // HEAD, batch, **others)


class Layout(NamedTuple):
    """A step over a mesh; what is told of weights is what one device has."""

    step: Vit
    sizes: dict  # axis of the mesh: devices
    state: int  # bytes of parameters and AdamW's moments
    leaves: dict  # name: Leaf

    @property
    def preset(self):
        return default_preset(self.sizes)

    @property
    def split(self):
        """Parts of a batch."""
        return self.sizes["data"] * self.sizes["fsdp"]

    def block(self):
        """The leaves of one block."""
        return {name: leaf for name, leaf in self.leaves.items() if name.startswith(BLOCK)}

    def numbers(self):
        """Parameters that a device holds."""
        return sum(leaf.times * leaf.held for leaf in self.leaves.values())


class Leaf(NamedTuple):
    shape: tuple
    held: int  # numbers on one device
    whole: int  # and once `fsdp` is gathered
    cut: tuple
    times: int  # leaves like this one in the model


def laid_out(step, shape):
    """The Layout over a mesh of data x fsdp x tensor, without devices, cut as a run would cut it. All blocks are alike, so that
    one is cut for all."""
    state, leaves = cut_on_paper(step._replace(batch=0, remat=False, precision="", depth=1), shape)

    def times(name):
        return step.depth if BLOCK in name else 1

    held = sum(times(name) * size for name, size in state.items())
    leaves = {name: leaf._replace(times=times(name)) for name, leaf in leaves.items()}
    return Layout(step, dict(zip(AXES, shape, strict=True)), held, leaves)


@lru_cache(maxsize=4096)
def cut_on_paper(step, shape):
    """({name: bytes of a leaf of the TrainState}, {name: Leaf}), of one device."""
    plan, params = Plan(AbstractMesh(shape, AXES)), step.shapes()
    opt = jax.eval_shape(adamw().init, params)
    carry = TrainState(None, None, params, {}, opt, None, {}, None)
    state = named_leaves(jax.tree.map(shard_bytes, carry, plan.of_state(carry)))
    cuts, fsdp = plan.cuts(params), shape[AXES.index("fsdp")]
    leaves = {}
    for name, leaf in named_leaves(params).items():
        own = shard_bytes(leaf, plan.sharding(cuts[name])) // leaf.dtype.itemsize
        leaves[name] = Leaf(
            leaf.shape, own, own * (fsdp if "fsdp" in cuts[name] else 1), cuts[name], 1
        )
    return state, leaves


def count(step):
    """The model's parameters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(step.shapes()))


def flops(step):
    """(of the model, of the step as it is computed), for the whole batch: 2 for each weight and token in the forward pass, 4 in
    the backward pass. With `remat` that computes the blocks again, but for their last product, which nobody asks for."""
    leaves = {
        name: math.prod(leaf.shape)
        for name, leaf in named_leaves(step.shapes()).items()
        if name.endswith("weight")
    }
    tokens = step.batch * step.tokens
    products = sum(size for name, size in leaves.items() if name.startswith("blocks/"))
    scores = 2 * step.depth * step.tokens * step.dim  # query . key and scores . value, of a token
    ends = (
        4 * leaves["patches/weight"] * tokens + 6 * leaves["head/weight"] * step.batch
    )  # images have no gradient
    model = 6 * (products + scores) * tokens + ends
    last = sum(size for name, size in leaves.items() if name.endswith("/project/weight"))
    return model, model + (2 * (products - last + scores) * tokens if step.remat else 0)
