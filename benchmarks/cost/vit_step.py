"""A training step of the vision transformer as numbers: its sizes, its floating-point operations,
and how a mesh shards its weights."""

import math
from functools import lru_cache, partial
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh

from model.vit import vit
from training.base import TrainState
from training.devices.mesh import AXES
from training.devices.sharding import Plan, default_preset, shard_bytes
from training.engine import SEED, first_weights
from training.optimizers import adamw
from utils import named_leaves

BLOCK = "blocks/0/"
HEAD = 64  # features of an attention head, and the ratio of width to depth


class Vit(NamedTuple):
    """The arguments of the model, and the batch size over all devices."""

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
        """The number of tokens per image."""
        return (self.image[0] // self.patch) * (self.image[1] // self.patch)

    @property
    def itemsize(self):
        """Bytes of one number in the type that the model computes in."""
        return 2 if self.precision == "bfloat16" else 4

    def model(self):
        names = ("patch", "dim", "depth", "heads", "expansion")
        args = {name: getattr(self, name) for name in names}
        return vit(self.image, self.classes, **args, remat=".*" if self.remat else None)

    def shapes(self):
        """The shapes of the parameters, from the model itself."""
        return shapes_of(self._replace(batch=0, remat=False, precision=""))


@lru_cache(maxsize=64)
def shapes_of(step):
    return jax.eval_shape(partial(first_weights, step.model()), SEED)[0]


def sized(parameters, batch, **others):
    """A model of about this many parameters with the usual proportions: heads of 64 features, a
    width of 64 times the depth, 12 * dim**2 parameters per block. The width is a multiple of 128,
    or of 512 when it is large, and the depth then comes nearest to the number of parameters."""
    dim = (HEAD * parameters / 12) ** (1 / 3)
    unit = 512 if dim > 1024 else 128
    dim = max(round(dim / unit), 1) * unit
    return Vit(dim, max(round(parameters / (12 * dim**2)), 1), dim // HEAD, batch, **others)


class Layout(NamedTuple):
    """A step on a mesh, with the sizes of what one device holds."""

    step: Vit
    sizes: dict  # {axis of the mesh: size}
    state: int  # bytes of parameters and AdamW's moments
    leaves: dict  # {name: Leaf}

    @property
    def preset(self):
        return default_preset(self.sizes)

    @property
    def batch_shards(self):
        """The number of shards of a batch."""
        return self.sizes["data"] * self.sizes["fsdp"]

    def block(self):
        """The leaves of one block."""
        return {name: leaf for name, leaf in self.leaves.items() if name.startswith(BLOCK)}

    def numbers(self):
        """The number of parameters that a device holds."""
        return sum(leaf.times * leaf.held for leaf in self.leaves.values())


class Leaf(NamedTuple):
    shape: tuple
    held: int  # numbers on one device
    gathered: int  # numbers on one device once `fsdp` is gathered
    spec: tuple  # the mesh axes that shard its dimensions
    times: int  # the number of such leaves in the model


def laid_out(step, shape):
    """The Layout on a mesh of data x fsdp x tensor, without devices, sharded as a run would shard
    it. All blocks are alike, so only one is sharded."""
    state, leaves = sharded_sizes(step._replace(batch=0, remat=False, precision="", depth=1), shape)

    def times(name):
        return step.depth if BLOCK in name else 1

    held = sum(times(name) * size for name, size in state.items())
    leaves = {name: leaf._replace(times=times(name)) for name, leaf in leaves.items()}
    return Layout(step, dict(zip(AXES, shape, strict=True)), held, leaves)


@lru_cache(maxsize=4096)
def sharded_sizes(step, shape):
    """({name: bytes of a leaf of the TrainState}, {name: Leaf}), on one device."""
    plan, params = Plan(AbstractMesh(shape, AXES)), step.shapes()
    opt = jax.eval_shape(adamw().init, params)
    carry = TrainState(None, None, params, {}, opt, None, {}, None)
    state = named_leaves(jax.tree.map(shard_bytes, carry, plan.of_state(carry)))
    specs, fsdp = plan.cuts(params), shape[AXES.index("fsdp")]
    leaves = {}
    for name, leaf in named_leaves(params).items():
        held = shard_bytes(leaf, plan.sharding(specs[name])) // leaf.dtype.itemsize
        gathered = held * (fsdp if "fsdp" in specs[name] else 1)
        leaves[name] = Leaf(leaf.shape, held, gathered, specs[name], 1)
    return state, leaves


def count(step):
    """The model's number of parameters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(step.shapes()))


def flops(step):
    """(operations of the model, operations of the step as it is computed), for the whole batch: 2
    per weight and token in the forward pass, 4 in the backward pass. With `remat` the backward pass
    recomputes the blocks, except their last product, whose result it does not need."""
    sizes = {
        name: math.prod(leaf.shape)
        for name, leaf in named_leaves(step.shapes()).items()
        if name.endswith("weight")
    }
    tokens = step.batch * step.tokens
    products = sum(size for name, size in sizes.items() if name.startswith("blocks/"))
    scores = 2 * step.depth * step.tokens * step.dim  # query . key and scores . value, per token
    # The patches cost 4 per weight and token, since images need no gradient.
    ends = 4 * sizes["patches/weight"] * tokens + 6 * sizes["head/weight"] * step.batch
    model = 6 * (products + scores) * tokens + ends
    last = sum(size for name, size in sizes.items() if name.endswith("/project/weight"))
    return model, model + (2 * (products - last + scores) * tokens if step.remat else 0)
