"""A stack of equal blocks: one after the other, or as one block in a loop over stacked params.

With `scan`, the params of all blocks are one tree whose leaves have the block as their first axis,
so that a single block is compiled, however many there are.
"""

import jax
import jax.numpy as jnp
from jax import lax

from model.layers.remat import recomputed


def blocks_init(keys, block_init, scan):
    """The params of a block for each key: a list of them, or one stacked tree."""
    if scan:
        return jax.vmap(block_init)(jnp.stack(list(keys)))
    return [block_init(key) for key in keys]


def apply_blocks(block, blocks, x, *extras, remat=None):
    """(x after all blocks, the second results of the blocks).

    block(params, x, *extra) -> (x, result). Each of `extras` is a list with one tree for each
    block, None for all, or, if the blocks are stacked, a stacked tree. The results have the form of
    the blocks.
    """
    if not isinstance(blocks, list):
        return scanned(block, blocks, x, extras, remat)
    results = []
    for i, params in enumerate(blocks):
        extra = [None if values is None else values[i] for values in extras]
        x, result = recomputed(remat, f"blocks/{i}", block)(params, x, *extra)
        results.append(result)
    return x, results


def scanned(block, blocks, x, extras, remat):
    """The same as a loop over stacked params."""
    block = block if remat is None else jax.checkpoint(block, prevent_cse=False)
    extras = [stack(values) if isinstance(values, list) else values for values in extras]

    def step(x, each):
        params, *extra = each
        return block(params, x, *extra)

    return lax.scan(step, x, (blocks, *extras))


def stack(trees):
    """One tree whose leaves have a first axis, from a list of trees of one form."""
    if all(tree is None for tree in trees):
        return None
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def unstack(tree):
    """A list of trees, from one whose leaves have a first axis."""
    count = len(jax.tree.leaves(tree)[0])
    return [jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(count)]
