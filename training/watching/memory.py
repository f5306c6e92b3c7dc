"""What callbacks remember in a checkpoint: JSON, which a resumed run gives back to them."""

import json
import logging

from jax.tree_util import tree_structure

from data_loader.nest import map_nest
from file_io import is_alike
from utils import UserError, cut

logger = logging.getLogger("main")


def callback_name(callback):
    """The name of a callback."""
    return type(callback).__name__


def as_number(value):
    """A number of NumPy or JAX, or an array that is one number, as a number of Python; anything
    else unchanged."""
    return value.item() if getattr(value, "shape", None) == () else value


def memories(callbacks):
    """What the callbacks remember, as plain JSON."""
    pairs = []
    for callback in callbacks:
        try:
            memory = map_nest(as_number, getattr(callback, "memory", None))
            copy = json.loads(json.dumps(memory))
            if tree_structure(copy) != tree_structure(memory):
                raise TypeError("it holds a tuple, or a key that is not text")
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"callbacks: the memory of {callback_name(callback)} is not JSON ({error}); "
                "keep plain numbers, lists and dicts"
            ) from error
        pairs.append([callback_name(callback), copy])
    return pairs


def remember(callbacks, pairs, path):
    """Give each callback its memory back. Return False if the callbacks are not those of the
    checkpoint, so that nothing is given back."""
    if [callback_name(callback) for callback in callbacks] != [name for name, _ in pairs]:
        logger.warning("The callbacks are not those of the checkpoint, so their memory is reset")
        return False
    for callback, (_, memory) in zip(callbacks, pairs, strict=True):
        if hasattr(callback, "memory"):
            if not is_alike(memory, map_nest(as_number, callback.memory)):
                found, name = cut(repr(memory), 200), callback_name(callback)
                why = f"{found} is not a memory of {name}, such as {callback.memory!r}"
                raise UserError(f"{path}: callbacks: {why}")
            callback.memory = memory
    return True
