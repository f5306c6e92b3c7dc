"""Estimates how much device memory a step needs from its shapes: what is there when it begins, and
the most that it allocates.

The peak is at one of two moments. In the backward pass: all stored activations are in memory, and
each finished block turns its own into gradients. At the end: the gradients and the new parameters
and moments are in memory beside the old ones; a step that is not finite must leave everything
unchanged (training/update.py), so nothing is overwritten before all of it has been checked.
"""

from typing import NamedTuple


class Schedule(NamedTuple):
    """The compiler's decisions on which the memory depends."""

    # Weights sharded by `fsdp` are gathered for all blocks at the start, not one block ahead.
    gathers_first: bool
    # Gradients are reduced over devices all at once at the end, and stay unsharded until then.
    reduces_last: bool
    stores_finite: bool  # the check for finite values stores one byte per number


# XLA's CPU compiler, from the schedules that --xla_dump_to writes: jax 0.10.2.
CPU = Schedule(gathers_first=True, reduces_last=True, stores_finite=True)
# What the schedulers of accelerators are meant to do, so that communication overlaps with
# arithmetic block by block. Assumed, not measured.
ACCELERATOR = Schedule(gathers_first=False, reduces_last=False, stores_finite=False)


class Memory(NamedTuple):
    """Bytes on one device."""

    arguments: float  # parameters, moments, batch
    backward: float  # the peak of the backward pass, without the arguments
    update: float  # the peak of the update, without the arguments

    @property
    def temporaries(self):
        return max(self.backward, self.update)

    @property
    def total(self):
        return self.arguments + self.temporaries


def memory(layout, schedule=ACCELERATOR):
    step, numbers = layout.step, layout.numbers()
    examples = step.batch / layout.batch_shards
    pixels = examples * step.image[0] * step.image[1] * step.image[2]
    # The gradients, the new parameters and the two new moments.
    update = 4 * 4 * numbers + (4 * numbers if schedule.stores_finite else 0)
    patches = step.itemsize * pixels
    backward = backward_peak(layout, schedule) + patches
    return Memory(layout.state + 4 * (pixels + examples), backward, update)


def backward_peak(layout, schedule):
    """The larger of both ends: the memory grows or shrinks steadily from the last block to the
    first."""
    step, stored = layout.step, activations(layout)
    per_block = stored.stream if step.remat else stored.block
    weights = weight_copies(layout)
    cast = step.itemsize * layout.numbers() if step.itemsize < 4 else 0
    gradients = gradients_of_block(layout, schedule)

    def live(blocks_left):
        copies = weights.copies * (1 if step.remat else blocks_left)
        gathered = weights.gathered * gathered_blocks(step, schedule, blocks_left)
        finished = gradients * (step.depth - blocks_left)
        return per_block * (blocks_left - 1) + stored.inside + copies + gathered + finished

    return cast + max(live(step.depth), live(1))


def gathered_blocks(step, schedule, blocks_left):
    """The number of blocks whose gathered weights are in memory."""
    if not schedule.gathers_first:
        return min(blocks_left, 2)
    return 1 if step.remat else blocks_left  # with remat, a block gathers its weights again


class Activations(NamedTuple):
    """Bytes on one device."""

    stream: float  # the residual stream between two blocks
    block: float  # what the backward pass of a block needs from its forward pass
    inside: float  # the peak of a block during its backward pass


def activations(layout):
    """What JAX's derivatives of the layers store. `tensor` shards the values between the two
    products of attention and of the MLP; the residual stream and the norms are the same on all of
    its devices."""
    step, tensor, size = layout.step, layout.sizes["tensor"], layout.step.itemsize
    examples = step.batch / layout.batch_shards
    stream = examples * step.tokens * step.dim  # (B, T, D), numbers
    scores = examples * step.heads * step.tokens**2 / tensor  # (B, H, T, T)
    # Input, centred, standardized, result; the two in between are float32.
    norm = stream * (size + 4 + 4 + size)
    # Queries, keys, values, result; the softmax in float32, and its cast copy for the product.
    attention = 4 * size * stream / tensor + scores * (4 + (size if size < 4 else 0))
    mlp = 3 * step.expansion * size * stream / tensor  # the input, erf and result of gelu
    block = 2 * norm + attention + mlp
    # During the MLP's backward pass: gradients of the stream, twice, and of gelu's result.
    in_mlp = block + size * (2 * stream + step.expansion * stream / tensor)
    # During attention's backward pass, with the MLP's values freed: gradients of the stream, of
    # attention's result and of the scores.
    in_attention = block - mlp - norm + size * (stream + stream / tensor) + 4 * scores
    return Activations(size * stream, block, max(in_mlp, in_attention))


class WeightCopies(NamedTuple):
    """Bytes of a block's weights in other forms."""

    copies: float
    gathered: float


def weight_copies(layout):
    """Copies of a block's weights for its products: those for queries, keys and values are stacked,
    sharded ones are gathered."""
    block, size, gathered = layout.block(), layout.step.itemsize, gathered_of_block(layout)
    copies = sum(
        leaf.held for name, leaf in block.items() if is_stacked(name) and name not in gathered
    )
    return WeightCopies(size * copies, size * sum(block[name].gathered for name in gathered))


def gathered_of_block(layout):
    """The weights that `fsdp` shards and a product needs gathered: the partitioner gathers the
    smaller operand, so with few tokens the weights stay sharded."""
    columns = {
        name: leaf.shape[-1] * (3 if is_stacked(name) else 1)
        for name, leaf in layout.block().items()
        if "fsdp" in leaf.spec and len(leaf.shape) > 1
    }
    tokens = layout.step.batch * layout.step.tokens
    return [name for name, count in columns.items() if tokens >= count]


def is_stacked(name):
    return name.split("/")[-2] in ("query", "key", "value") and name.endswith("/weight")


def gradients_of_block(layout, schedule):
    """Bytes that a block leaves in memory after its backward pass: gradients that are not reduced
    over devices yet; for the others also the new parameters and moments, which can be computed
    immediately."""
    gathered = gathered_of_block(layout)

    def bytes_of(name, leaf):
        is_sharded = "fsdp" in leaf.spec and name not in gathered
        waits = schedule.reduces_last and layout.batch_shards > 1 and not is_sharded
        return 4 * leaf.gathered if waits else 4 * 4 * leaf.held

    return sum(bytes_of(name, leaf) for name, leaf in layout.block().items())
