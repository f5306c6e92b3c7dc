"""Nested dicts, tuples and lists of arrays: what jax calls a tree, without importing jax."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from utils import UserError

Nest: TypeAlias = Any  # nested dicts, tuples and lists, whose leaves are arrays or numbers


def map_nest(fn: Callable[..., Any], nest: Nest, *rest: Nest) -> Nest:
    """Like jax.tree.map, for dicts, tuples and lists."""
    if isinstance(nest, dict):
        if any(r.keys() != nest.keys() for r in rest):
            raise ValueError(f"the keys {sorted(nest)} are not the same in all")
        return {key: map_nest(fn, nest[key], *(r[key] for r in rest)) for key in nest}
    if isinstance(nest, tuple | list):
        parts = [map_nest(fn, *parts) for parts in zip(nest, *rest, strict=True)]
        return type(nest)(*parts) if hasattr(nest, "_fields") else type(nest)(parts)
    return fn(nest, *rest)


def named_nest(nest: Nest, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, leaf) for every leaf of a nest; a name is its path, as in `0/image`."""
    if not isinstance(nest, dict | tuple | list):
        yield name, nest
        return
    for key, child in nest.items() if isinstance(nest, dict) else enumerate(nest):
        yield from named_nest(child, f"{name}/{key}" if name else str(key))


def check_readable(nest: Nest, place: str) -> None:
    """Refuse arrays that NumPy cannot read, or reads without their mask."""
    for name, leaf in named_nest(nest):
        if isinstance(leaf, np.ma.MaskedArray):
            raise UserError(f"{place}: {name} is a masked array; fill its gaps, as by .filled(0)")
        if getattr(leaf, "requires_grad", False) is True:
            raise UserError(
                f"{place}: {name} is a tensor that requires its gradient; pass .detach()"
            )


def check_type(what: str, dtype: np.dtype) -> None:
    """Refuse numbers in the byte order of other machines, or of more than 64 bits, which JAX cannot
    read."""
    own = dtype.newbyteorder("=") if dtype.itemsize <= 8 else np.dtype(np.float64)
    if dtype.kind in "fiu" and dtype != own:
        raise UserError(f"{what} holds {dtype}, which JAX cannot read; pass .astype('{own}')")


def check_integers(nest: Nest, bits: int = 32, place: str = "data") -> None:
    """Refuse integers that JAX would silently wrap around to `bits` bits."""
    for name, leaf in named_nest(nest):
        if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "iu":
            continue
        if leaf.dtype.itemsize * 8 <= bits or not leaf.size:
            continue
        limits = np.iinfo(f"{leaf.dtype.kind}{bits // 8}")
        for value in (leaf.min(), leaf.max()):
            if not limits.min <= value <= limits.max:
                raise UserError(
                    f"{place}: {name or 'an array'} holds the integer {value}, and integers of "
                    f"devices have {bits} bits; convert it to floats, or subtract an offset"
                )
