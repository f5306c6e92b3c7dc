"""Checks the shapes in the annotations of the mathematics in every test that computes with it.

jaxtyping's import hook decorates each function of these modules; beartype compares what it gets and
returns with those of its annotations that state a shape.
"""

from types import FunctionType
from typing import get_args, get_origin

import jax
import jaxtyping
import numpy as np
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, config, install_import_hook

MODULES = [
    "model",
    "training.augment",
    "training.loss",
    "training.metrics",
    "training.objective",
    "training.objectives",
    "training.optimizers",
    "training.update",
]


def check_shapes_in_all_tests() -> None:
    jaxtyping.Array = jax.Array | np.ndarray  # JAX takes both, and weights from a file are NumPy's
    install_import_hook(MODULES, "tests.shapes.checked_shapes")


def checked_shapes(function: FunctionType) -> FunctionType:
    annotations = function.__annotations__
    function.__annotations__ = {name: a for name, a in annotations.items() if has_shape(a)}
    return beartype(conf=BeartypeConf(is_pep484_tower=True))(function)  # an int is a float, too


def has_shape(annotation: object) -> bool:
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return issubclass(annotation, AbstractArray)
    return any(has_shape(argument) for argument in get_args(annotation))


def set_checks(enabled: bool) -> None:
    config.update("jaxtyping_disable", not enabled)
