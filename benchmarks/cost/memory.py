"""How much memory of a device a step needs, from its shapes: what is there when it begins, and the most that is made in between.

Two moments can be the largest. In the backward pass all that the forward pass has kept is there, and every block that is done
turns it into gradients. At the end stand the gradients and, beside the old ones, the new parameters and moments: a step that is
not finite must leave everything as it was (training/update.py), so nothing is overwritten before all of it has been looked at.
"""

from typing import NamedTuple


class Schedule(NamedTuple):
    """What the memory depends on that a compiler decides."""

    gathers_first: bool  # weights that `fsdp` cuts are gathered for all blocks at the start, not one block ahead
    reduces_last: (
        bool  # gradients are added up over devices all at once, so that until then they are whole
    )
    marks: bool  # looking for what is not finite makes a byte for each number


# XLA's CPU compiler, as read off its schedules (--xla_dump_to): jax 0.10.2.
CPU = Schedule(gathers_first=True, reduces_last=True, marks=True)
# What schedulers of accelerators are meant to do, to overlap exchanges with arithmetic block by block. Assumed, not measured.
ACCELERATOR = Schedule(gathers_first=False, reduces_last=False, marks=False)


class Memory(NamedTuple):
    """Bytes of one device."""

    arguments: float  # parameters, moments, batch
    backward: float  # the most of the backward pass, beside them
    update: float  # the most of the update

    @property
    def temporaries(self):
        return max(self.backward, self.update)

    @property
    def total(self):
        return self.arguments + self.temporaries


def memory(layout, schedule=ACCELERATOR):
    step, numbers = layout.step, layout.numbers()
    examples = step.batch / layout.split
    pixels = examples * step.image[0] * step.image[1] * step.image[2]
    # Gradients, and new parameters and two moments.
    update = 4 * 4 * numbers + (4 * numbers if schedule.marks else 0)
    backward = (
        most_of_backward(layout, schedule) + step.itemsize * pixels
    )  # the patches, side by side
    return Memory(layout.state + 4 * (pixels + examples), backward, update)


def most_of_backward(layout, schedule):
    """It grows or shrinks steadily from the last block to the first, so it is the larger of the two ends."""
    step, kept = layout.step, activations(layout)
    between = kept.stream if step.remat else kept.block
    made, cast = (
        made_for_products(layout),
        step.itemsize * layout.numbers() if step.itemsize < 4 else 0,
    )
    grown = gradients_of_block(layout, schedule)

    def live(left):
        weights = made.copies * (1 if step.remat else left) + made.gathered * gathered_blocks(
            step, schedule, left
        )
        return between * (left - 1) + kept.inside + weights + grown * (step.depth - left)

    return cast + max(live(step.depth), live(1))


def gathered_blocks(step, schedule, left):
    """Of how many blocks, so many being left, gathered weights are there."""
    if not schedule.gathers_first:
        return min(left, 2)
    return 1 if step.remat else left  # computed again, a block gathers its weights again


class Activations(NamedTuple):
    """Bytes on one device."""

    stream: float  # what one block hands to the next
    block: float  # what the backward pass of a block needs of its forward pass
    inside: float  # the most there is of a block while its backward pass runs


def activations(layout):
    """What JAX's derivatives of the layers ask for. `tensor` cuts what lies between the two products of attention and of the
    perceptron; what is in the residual stream and in norms is the same on all of its devices."""
    step, tensor, size = layout.step, layout.sizes["tensor"], layout.step.itemsize
    examples = step.batch / layout.split
    stream = examples * step.tokens * step.dim  # (B, T, D), numbers
    scores = examples * step.heads * step.tokens**2 / tensor  # (B, H, T, T)
    norm = stream * (
        size + 4 + 4 + size
    )  # input, centred, standardized, result; in between in float32
    # Queries, keys, values, what they come to; the softmax in float32, and once more where it is cast for the product.
    attention = 4 * size * stream / tensor + scores * (4 + (size if size < 4 else 0))
    perceptron = 3 * step.expansion * size * stream / tensor  # gelu's input, its erf, its result
    block = 2 * norm + attention + perceptron
    # The perceptron's turn: the gradients of the stream, twice, and of gelu's result.
    first = block + size * (2 * stream + step.expansion * stream / tensor)
    # Attention's turn, when the perceptron's are gone: of the stream, of what attention came to, of the scores.
    second = block - perceptron - norm + size * (stream + stream / tensor) + 4 * scores
    return Activations(size * stream, block, max(first, second))


class Made(NamedTuple):
    """Bytes of a block's weights in another form."""

    copies: float
    gathered: float


def made_for_products(layout):
    """Weights for queries, keys and values are laid side by side; cut ones are gathered."""
    block, size, gathered = layout.block(), layout.step.itemsize, gathered_of_block(layout)
    copies = sum(
        leaf.held for name, leaf in block.items() if is_stacked(name) and name not in gathered
    )
    return Made(size * copies, size * sum(block[name].whole for name in gathered))


def gathered_of_block(layout):
    """The weights that `fsdp` cuts and a product asks for whole: the partitioner gathers the smaller side of it, so with few
    tokens the weights stay cut."""
    columns = {
        name: leaf.shape[-1] * (3 if is_stacked(name) else 1)
        for name, leaf in layout.block().items()
        if is_matrix(leaf)
    }
    tokens = layout.step.batch * layout.step.tokens
    return [
        name for name in columns if "fsdp" in layout.leaves[name].cut and tokens >= columns[name]
    ]


def is_matrix(leaf):
    return len(leaf.shape) > 1


def is_stacked(name):
    return name.split("/")[-2] in ("query", "key", "value") and name.endswith("/weight")


def gradients_of_block(layout, schedule):
    """What a block leaves behind when its backward pass is done: gradients that are still to be added up over devices; of others,
    the new parameters and moments too, which can be made at once."""
    gathered = gathered_of_block(layout)

    def left_by(name, leaf):
        is_cut = "fsdp" in leaf.cut and name not in gathered
        waits = schedule.reduces_last and layout.split > 1 and not is_cut
        return 4 * leaf.whole if waits else 4 * 4 * leaf.held

    return sum(left_by(name, leaf) for name, leaf in layout.block().items())
