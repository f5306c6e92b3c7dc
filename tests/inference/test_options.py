"""Every option of a layer or model that decides which weights there are, through both exporters.

The options are read from the signatures: a new one is tried without a line here. A layer has every
combination of them, a model every pair of values. All variants of one model are exported as one
function with several outputs, which is compiled once.
"""

import importlib
import inspect
import pkgutil
from itertools import combinations_with_replacement, product
from typing import Literal, get_args, get_origin

import jax
import numpy as np
import pytest

import model.layers
from inference.lowering.trace import named, trace
from inference.runtimes import open_model
from inference.to_onnx import write_onnx
from inference.to_tflite import write_tflite
from model.layers.attention import attention
from model.layers.conv import conv2d, conv_transpose2d
from model.layers.linear import linear
from model.layers.norm import layer_norm, rms_norm
from model.mlp import mlp
from tests.inference.made import learned
from tests.inference.models import example, images, with_weights
from training.kinds import find

WRITE = {"onnx": write_onnx, "tflite": write_tflite}
KERNEL = {"in_dim": 4, "out_dim": 6, "kernel": 3}
# {a layer: (the arguments of its init, the layer as a function of its params and of sequences)}
LAYERS = {
    "attention": ({"dim": 8}, lambda params, x: attention(params, x, heads=2)),
    "conv2d": (KERNEL, lambda params, x: conv2d(params, x.reshape(-1, 5, 2, 4))),
    "conv_transpose2d": (
        KERNEL,
        lambda params, x: conv_transpose2d(params, x.reshape(-1, 5, 2, 4), stride=2),
    ),
    "layer_norm": ({"dim": 8}, layer_norm),
    "linear": ({"in_dim": 8, "out_dim": 5}, linear),
    "rms_norm": ({"dim": 8}, rms_norm),
}
BLOCKS = {"dim": 8, "depth": 2}
# {a model: its arguments}. A tuple in MORE holds values of an option that are tried besides those
# that its annotation names; an option that may be None is tried with None, too.
MODELS = {
    "convnext": {"dims": (2, 4), "depths": (2, 1)},
    "gpt": {"vocab_size": 7, "heads": 2, **BLOCKS},
    "lora": {"base": mlp((6,), 3, (4,)), "leaves": ("hidden/.*/weight",), "rank": 1},
    "mixer": BLOCKS,
    "mobilenet": {"width": 0.1},
    "resnet": {"widths": (2, 4), "depth": 2},
    "rnn": {"dim": 4, "depth": 2},
    "unet": {"widths": (4, 8), "heads": 2, "groups": 2},
    "vit": {"heads": 2, **BLOCKS},
}
MORE = {
    "convnext": {"head_dim": (3,), "layer_scale": (0.5,)},
    "gpt": {"kv_heads": (1,), "hidden": (6,)},
    "lora": {"whole": ((), ("head/.*",))},
    "unet": {"num_classes": (0, 3), "attended": (0, 1, 2)},
}
INPUTS = {
    "gpt": np.array([[1, 6, 2, 2], [0, 3, 5, 1], [4, 4, 0, 2]], np.int32),
    "lora": images(6),
    "rnn": images(5, 3),
    "unet": {"image": images(8, 8, 1), "time": images(), "label": np.array([2, -1, 0], np.int32)},
}


def choices(parameter, more=()):
    """The values of an option; () of one that is left as it is."""
    annotation = parameter.annotation
    named = get_args(annotation) if get_origin(annotation) is Literal else ()
    flags = (False, True) if bool in (annotation, type(parameter.default)) else ()
    return (*named, *flags, *([None] if more and parameter.default is None else []), *more)


def options_of(function, more):
    """{option: its values}"""
    parameters = inspect.signature(function).parameters.values()
    values = {p.name: choices(p, more.get(p.name, ())) for p in parameters}
    return {name: each for name, each in values.items() if each}


def layers_with_options():
    """{layer: (its init, {option: its values})} of all in model/layers."""
    found = {}
    for module in pkgutil.iter_modules(model.layers.__path__):
        functions = vars(importlib.import_module(f"model.layers.{module.name}"))
        for name in functions.keys() & {f"{name}_init" for name in functions}:
            if options := options_of(functions[name], {}):
                found[name.removesuffix("_init")] = functions[name], options
    return found


def without_key(init):
    return lambda key, **args: init(**args)


def pairs(options):
    """Combinations of values that hold every pair of values of two options."""
    rows = [dict(zip(options, values, strict=True)) for values in product(*options.values())]
    chosen, seen = [], set()

    def new(row):
        return {*combinations_with_replacement(row.items(), 2)} - seen

    while fresh := new(best := max(rows, key=lambda row: len(new(row)))):
        chosen.append(best)
        seen |= fresh
    return chosen


def check(function, weights, x, tmp_path):
    """Both formats compute what JAX computes."""
    traced = trace(function, weights, example(x))
    quickly = {"xla_backend_optimization_level": 0}
    expected = named(jax.jit(function, compiler_options=quickly)(weights, x), "output")
    for format, write in WRITE.items():
        write(traced, tmp_path / f"a.{format}")
        outputs = open_model(tmp_path / f"a.{format}")(x if isinstance(x, dict) else {"input": x})
        for name, array in expected.items():
            tolerance = 2e-5 * np.abs(array).max()
            np.testing.assert_allclose(outputs[name], array, 0, tolerance, err_msg=name)


def test_layers_with_every_combination_of_their_options(tmp_path):
    found = layers_with_options()
    assert found.keys() == LAYERS.keys()
    weights, layers = {}, {}
    for name, (init, options) in found.items():
        args, layer = LAYERS[name]
        for values in product(*options.values()):
            variant = f"{name} {values}"
            chosen = args | dict(zip(options, values, strict=True))
            keyed = init if "key" in inspect.signature(init).parameters else without_key(init)
            weights[variant], layers[variant] = learned(keyed, **chosen), layer

    def function(weights, x):
        return {name: layer(weights[name], x) for name, layer in layers.items()}

    check(function, weights, images(5, 8), tmp_path)


def test_every_model_that_has_such_options_is_tried():
    functions, _ = find("model")
    assert MODELS.keys() == {
        name for name, function in functions.items() if options_of(function, MORE.get(name, {}))
    }


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.slow if name in ("convnext", "gpt") else pytest.mark.torture
        )
        for name in MODELS
    ],
)
def test_models_with_every_pair_of_options(name, tmp_path):
    factory, x = find("model")[0][name], INPUTS.get(name, images(8, 8, 1))
    shape = (x["image"] if isinstance(x, dict) else x).shape[1:]
    parameters = inspect.signature(factory).parameters
    facts = {"input_shape": shape, "num_classes": 3}
    args = {key: value for key, value in facts.items() if key in parameters} | MODELS[name]
    variants = pairs(options_of(factory, MORE.get(name, {})))
    built = {str(chosen): with_weights(factory(**args | chosen)) for chosen in variants}

    def function(weights, x):
        return {variant: apply(weights[variant], x) for variant, (apply, _) in built.items()}

    check(function, {variant: weights for variant, (_, weights) in built.items()}, x, tmp_path)
