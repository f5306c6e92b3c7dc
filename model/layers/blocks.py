"""Blocks that follow each other: each separately, or equal ones as one block in a loop.

The params of separate blocks are a list with one tree for each block. With `scan` they are a dict:
equal blocks in a row, such as 0 to 11, are one tree with the name "0-11", whose leaves have the
block as their first axis, and one block is compiled for all of them; the name of any other block is
its number. Such a name shows code that treats a leaf as one matrix, such as an optimizer, that the
leaf is a stack of matrices.

Blocks whose names match the regex `remat` are recomputed in the backward pass, instead of keeping
their values.
"""

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

# one tree for each block, or {name: tree} with `scan`
Blocks = PyTree
NAME = r"(\d+)(?:-(\d+))?"  # the name of one block, or of equal ones in a row


def equal_runs(plan: Sequence[tuple]) -> list[tuple[range, Any]]:
    """[(the numbers of equal blocks in a row, their entry in the plan)]. A plan has an entry for
    each block; blocks with the same entry are equal."""
    runs, first = [], 0
    for entry, equal in groupby(plan):
        runs.append((range(first, first + len(list(equal))), entry))
        first = runs[-1][0].stop
    return runs


def check_blocks(remat: str | None, plan: Sequence[tuple], scan: bool) -> None:
    """Raise for a regex `remat` that does not fit the blocks."""
    if remat is None:
        return
    check_remat(remat, [f"blocks/{i}" for i in range(len(plan))])
    for numbers, _ in equal_runs(plan) if scan else ():
        matching = [i for i in numbers if re.fullmatch(remat, f"blocks/{i}")]
        if 0 < len(matching) < len(numbers):
            name = run_name(numbers)
            raise ValueError(
                f"remat: {remat!r} matches only some of the blocks {name}, which are compiled as "
                "one with scan; match all or none of them"
            )


def check_remat(pattern: str, names: list[str]) -> None:
    """Raise for a pattern that is not a regular expression or that matches no block."""
    try:
        matches = [re.fullmatch(pattern, name) for name in names]
    except re.error as error:
        raise ValueError(f"remat: {pattern!r} is not a regular expression: {error}") from error
    if not any(matches):
        raise ValueError(f"remat: {pattern!r} matches none of the blocks: {', '.join(names)}")


def run_name(numbers: range) -> str:
    """The name of equal blocks with these numbers."""
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def blocks_init(
    keys: Sequence[Array] | Array,
    plan: Sequence[tuple],
    block_init: Callable[..., PyTree],
    scan: bool,
) -> Blocks:
    """block_init(key, *entry of the plan) of all blocks, as a list or, with `scan`, as a dict."""
    if not scan:
        return [block_init(key, *entry) for key, entry in zip(keys, plan, strict=True)]
    blocks = {}
    for numbers, entry in equal_runs(plan):
        init = lambda key, entry=entry: block_init(key, *entry)  # noqa: E731
        own = [keys[i] for i in numbers]
        blocks[run_name(numbers)] = init(*own) if len(own) == 1 else jax.vmap(init)(jnp.stack(own))
    return blocks


def apply_blocks(
    block: Callable,
    numbers: range,
    blocks: Blocks,
    x: PyTree,
    *extras: Blocks | None,
    remat: str | None = None,
) -> tuple[PyTree, Blocks]:
    """(x after the blocks with these numbers, which are equal; the second results of each).

    block(params, x, *own) -> (x, result). Each of `extras` has one tree for each block, in the
    form of the blocks or as a list, or is None. The results have the form of the blocks.
    """
    is_dict, name = isinstance(blocks, dict), run_name(numbers)
    if is_dict and len(numbers) > 1:
        stacks = [stacked(tree, numbers) for tree in extras]
        x, result = scanned(block, numbers, blocks[name], x, stacks, remat)
        return x, {name: result}
    results = []
    for i in numbers:
        params, *own = (of_block(tree, i) for tree in (blocks, *extras))
        x, result = recomputed(remat, f"blocks/{i}", block)(params, x, *own)
        results.append(result)
    return x, {name: results[0]} if is_dict else results


def scanned(
    block: Callable,
    numbers: range,
    params: PyTree,
    x: PyTree,
    extras: list[PyTree],
    remat: str | None,
) -> tuple[PyTree, PyTree]:
    """Apply equal blocks in one loop over their stacked params."""
    if remat is not None and re.fullmatch(remat, f"blocks/{numbers[0]}"):
        block = jax.checkpoint(block, prevent_cse=False)
    return lax.scan(lambda x, each: block(each[0], x, *each[1:]), x, (params, *extras))


def recomputed(pattern: str | None, name: str, block: Callable) -> Callable:
    """The block, recomputed in the backward pass if the regex matches its name; None: never."""
    return jax.checkpoint(block) if pattern is not None and re.fullmatch(pattern, name) else block


def of_block(trees: Blocks | None, i: int) -> PyTree:
    """The tree of one block."""
    return trees[str(i)] if isinstance(trees, dict) else None if trees is None else trees[i]


def stacked(trees: Blocks | None, numbers: range) -> PyTree:
    """The trees of equal blocks as one tree whose leaves have a first axis."""
    if isinstance(trees, dict):
        return trees[run_name(numbers)]
    own = [] if trees is None else [trees[i] for i in numbers]
    if all(tree is None for tree in own):
        return None
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *own)


def joined(results: list[Blocks]) -> Blocks:
    """The results of all blocks, from the results of each run of equal blocks."""
    if isinstance(results[0], dict):
        return {name: result for run in results for name, result in run.items()}
    return [result for run in results for result in run]


def unrolled(tree: PyTree) -> PyTree:
    """The tree with lists of blocks in place of stacked ones; a model takes both."""
    if isinstance(tree, list):
        return [unrolled(value) for value in tree]
    if not isinstance(tree, dict):
        return tree
    are_blocks = all(re.fullmatch(NAME, str(name)) for name in tree)
    if not are_blocks or not any("-" in str(name) for name in tree):
        return {name: unrolled(value) for name, value in tree.items()}
    blocks = {}
    for name, value in tree.items():
        first, _, last = name.partition("-")
        for i in range(int(first), int(last or first) + 1):
            leaf_of_block = lambda leaf, i=i - int(first): leaf[i]  # noqa: E731
            blocks[i] = jax.tree.map(leaf_of_block, value) if last else value
    return [blocks[i] for i in sorted(blocks)]
