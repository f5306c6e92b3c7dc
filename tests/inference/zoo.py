"""Random small models, drawn from a grammar over jax.numpy, jax.lax and model/layers.

A model is the text of a Python function, so a failing one can be read and shortened. It is exported
to both formats; each file must compute what JAX computes, or the model is refused with its line.

`python -m tests.inference.zoo 17` shows the model of seed 17 and what became of it;
`python -m tests.inference.zoo 100 150` writes one line for each of the seeds 100 to 149.
"""

import math
import re
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from inference.lowering.trace import symbol, trace
from inference.lowering.walk import Missing
from inference.runtimes import open_model
from inference.to_onnx import write_onnx
from inference.to_tflite import write_tflite
from model.layers import activations
from model.layers.attention import attention
from model.layers.conv import conv2d, conv_transpose2d
from model.layers.embedding import embedding
from model.layers.linear import linear
from model.layers.norm import group_norm, layer_norm, rms_norm
from model.layers.pool import avg_pool, global_avg_pool, global_max_pool, max_pool
from tests.inference.models import example
from tests.inference.zoo_draw import Draw
from tests.inference.zoo_grammar import INNER, RULES
from tests.inference.zoo_rules import INPUTS
from utils import first_line

FORMATS = {"onnx": write_onnx, "tflite": write_tflite}
BATCHES = (3, 1)
HIGHEST = np.finfo(np.float32).max
TOLERANCE = 2e-5  # of the largest number of an output
NAMES = {
    **{"jax": jax, "jnp": jnp, "lax": lax, "math": math, "activations": activations},
    **{"linear": linear, "attention": attention, "embedding": embedding, "conv2d": conv2d},
    **{"conv_transpose2d": conv_transpose2d, "layer_norm": layer_norm, "rms_norm": rms_norm},
    **{"group_norm": group_norm, "max_pool": max_pool, "avg_pool": avg_pool},
    **{"global_avg_pool": global_avg_pool, "global_max_pool": global_max_pool},
}


class Model(NamedTuple):
    source: str
    function: object  # (weights, inputs) -> {name: array}
    weights: dict
    inputs: dict  # batches of 3


def model_of(seed):
    """The random model of a seed: 5 to 12 lines, whose last results are the outputs."""
    draw = Draw(seed, RULES, INNER)
    first, *others = INPUTS
    names = [first, *map(str, draw.random.choice(others, draw.number(1, 2), replace=False))]
    inputs = draw.add_inputs(INPUTS, names, symbol())
    wanted = draw.number(5, 12)
    for _ in range(30 * wanted):
        if len(draw.lines) < wanted:
            draw.add_line(lambda text: lambda w, values: eval(text, {**NAMES, **values, "w": w}))
    last = [name for name in draw.avals if name not in draw.read and name not in inputs][-3:]
    lines = [
        "def model(w, inputs):",
        f"    {', '.join(inputs)} = inputs.values()",
        *(f"    {line}" for line in draw.lines),
        "    return {" + ", ".join(f'"{name}": {name}' for name in last) + "}",
    ]
    return compiled(seed, "\n".join(lines), draw.weights, inputs)


def compiled(seed, source, weights, inputs):
    names = dict(NAMES)
    exec(compile(source, f"zoo_{seed}.py", "exec"), names)

    def function(w, x):
        return names["model"](w, {name: x[name] for name in inputs})  # in the order of the text

    return Model(source, function, weights, inputs)


def outcomes(model, seed):
    """{format: "equal", "refused: ..." with the line, or what is wrong}"""
    with tempfile.TemporaryDirectory() as folder:
        try:
            traced = trace(model.function, model.weights, example(model.inputs))
        except Exception as error:
            return {"trace": problem(error)}
        expected = {size: in_jax(model, size) for size in BATCHES}
        return {
            name: outcome(write, traced, Path(folder) / f"a.{name}", model, seed, expected)
            for name, write in FORMATS.items()
        }


def in_jax(model, size):
    options = {"xla_backend_optimization_level": 0}
    inputs = {name: array[:size] for name, array in model.inputs.items()}
    with jax.default_matmul_precision("highest"):
        outputs = jax.jit(model.function, compiler_options=options)(model.weights, inputs)
    return {name: np.asarray(array) for name, array in outputs.items()}


def outcome(write, traced, path, model, seed, expected):
    try:
        write(traced, path)
    except Missing as error:
        is_placed = re.search(rf"\(zoo_{seed}\.py:\d+", str(error))
        return f"refused: {error}" if is_placed else f"WRONG: refused without a line: {error}"
    except Exception as error:
        return problem(error)
    try:
        exported = open_model(path)
        for size, arrays in expected.items():
            inputs = {name: model.inputs[name][:size] for name in exported.inputs}
            if wrong := difference(exported(inputs), arrays):
                return f"WRONG: batch {size}: {wrong}"
    except Exception as error:
        return problem(error)
    return "equal"


def problem(error):
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return f"WRONG: {type(error).__name__}: {first_line(error)[:300]} ({place})"


def difference(found, expected):
    """What is wrong with the outputs; None where nothing is."""
    if set(found) != set(expected):
        return f"outputs {sorted(found)} instead of {sorted(expected)}"
    for name, want in expected.items():
        got = found[name]
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            return f"{name}: {got.dtype}{got.shape} instead of {want.dtype}{want.shape}"
        if want.dtype.kind != "f":
            bad = got != want
        else:
            # TensorFlow's converter writes the largest finite number for an infinite constant
            got, want = (np.clip(array, -HIGHEST, HIGHEST) for array in (got, want))
            scale = np.abs(want[np.abs(want) < HIGHEST]).max(initial=0.05)
            bad = ~np.isclose(got, want, rtol=0, atol=TOLERANCE * scale, equal_nan=True)
        if bad.any():
            return f"{name}: {bad.mean():.0%} is {got[bad][:3]} instead of {want[bad][:3]}"
    return None


def main(seeds):
    for seed in seeds:
        print(f"{seed} ...", end=" ", flush=True)
        model = model_of(seed)
        results = outcomes(model, seed)
        print("; ".join(f"{name} {result}" for name, result in results.items()), flush=True)
        if len(seeds) == 1:
            print(model.source)


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    main(numbers if len(numbers) == 1 else range(*numbers))
