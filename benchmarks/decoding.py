"""Latency of an exported decode step, beside PyTorch's step with a static cache.

python -m benchmarks.decoding [--rounds 15]
needs inference/requirements.txt, and torch and onnxscript of benchmarks/requirements.txt

Both files run in ONNX Runtime in one process and take turns; a turn writes a text, and hands each
step the cache that the step before returned. Ours takes any number of texts, PyTorch's only one.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.results import markdown, record, spread
from inference.runtimes import open_model

SIZES = (
    {"length": 128, "dim": 128, "depth": 4, "heads": 4},
    {"length": 256, "dim": 192, "depth": 6, "heads": 6},
)
VOCABULARY, TOKENS, THREADS = 65, 100, (1, 2)
OPSETS = (20, 23)  # of PyTorch's files: that of ours, and the first with an Attention node
WEIGHTS = "weights.safetensors"
TOLERANCE = 1e-5  # of the logits' scale


def make_ours(folder, size):
    """Write a model's weights, and its step as files."""
    import jax
    from safetensors.numpy import save_file

    from inference.decoding import TOKEN
    from inference.language import step_function
    from inference.lowering.trace import trace
    from inference.to_onnx import write_onnx
    from inference.to_tflite import write_tflite
    from model.gpt import gpt
    from utils import named_leaves

    model = gpt((size["length"],), VOCABULARY, **{k: v for k, v in size.items() if k != "length"})
    noise = np.random.default_rng(0)
    params = jax.tree.map(
        lambda a: np.asarray(a + 0.1 * noise.standard_normal(a.shape), np.float32),
        model.init(jax.random.key(0))[0],
    )
    cache = jax.eval_shape(lambda: model.cache(1)["cache"])
    inputs = OrderedDict({TOKEN: jax.ShapeDtypeStruct((), np.int32)})
    for name, leaf in named_leaves(cache).items():
        inputs[name] = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    function = partial(step_function, model, jax.tree.structure(cache), list(inputs)[1:])
    traced = trace(function, {"params": params, "state": {}}, inputs)
    write_onnx(traced, folder / "ours.onnx")
    write_tflite(traced, folder / "ours.tflite")
    save_file(named_leaves(params), folder / WEIGHTS)


def make_torch(folder, size):
    from safetensors.numpy import load_file

    from benchmarks.peers.torch_writer import export_step

    params = load_file(folder / WEIGHTS)
    for opset in OPSETS:
        file = str(folder / f"torch_{opset}.onnx")
        export_step(params, file, opset, VOCABULARY, **size)


MAKERS = {"ours": make_ours, "torch": make_torch}


class OnnxStep:
    """A file in ONNX Runtime: call(arrays) -> {output: array}."""

    def __init__(self, file, threads):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(
            file, options, providers=["CPUExecutionProvider"]
        )
        kinds = {"tensor(int32)": np.int32, "tensor(int64)": np.int64, "tensor(float)": np.float32}
        self.inputs = {x.name: (x.shape, kinds[x.type]) for x in self.session.get_inputs()}
        self.names = [x.name for x in self.session.get_outputs()]

    def __call__(self, arrays):
        return dict(zip(self.names, self.session.run(self.names, arrays), strict=True))


def write(step, tokens):
    """The logits after each token of a text."""
    arrays, logits = {}, []
    for name, (shape, dtype) in step.inputs.items():
        arrays[name] = np.zeros([n if isinstance(n, int) else 1 for n in shape], dtype)
    token, position = arrays["token"], arrays["position"]
    for i, t in enumerate(tokens):
        token[...], position[...] = t, i
        outputs = step(arrays)
        logits.append(outputs["logits"])
        arrays = {name: outputs.get(f"next/{name}", x) for name, x in arrays.items()}
        arrays |= {"token": token, "position": position}
    return np.concatenate(logits)


def compare(steps, tokens, rounds):
    """{name: microseconds per token in each round}"""
    times, expected = {name: [] for name in steps}, None
    for i in range(rounds + 1):
        for name in list(steps)[:: -1 if i % 2 else 1]:
            start = time.perf_counter()
            logits = write(steps[name], tokens)
            seconds = time.perf_counter() - start
            if i > 0:
                times[name].append(1e6 * seconds / len(tokens))
                continue
            expected = logits if expected is None else expected
            error = np.abs(logits - expected).max() / np.abs(expected).max()
            assert error < TOLERANCE, f"{name}: the logits differ by {error:.2g} of their scale"
    return times


def rows(folder, size, threads, rounds):
    files = {"Rawtree": "ours"} | {f"PyTorch, opset {opset}": f"torch_{opset}" for opset in OPSETS}
    steps = {name: OnnxStep(folder / f"{file}.onnx", threads) for name, file in files.items()}
    if threads == 1:
        steps["Rawtree, in LiteRT"] = open_model(folder / "ours.tflite")
    tokens = np.random.default_rng(1).integers(VOCABULARY, size=TOKENS)
    times = compare(steps, tokens, rounds)
    where = f"{size['depth']} x {size['dim']}, context {size['length']}"
    for name, each in times.items():
        ratios = [a / b for a, b in zip(times["Rawtree"], each, strict=True)]
        yield [where, str(threads), name, spread(each), spread(ratios)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--make", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        maker, folder, number = args.make
        return MAKERS[maker](Path(folder), SIZES[int(number)])
    table = []
    for number, size in enumerate(SIZES):
        with tempfile.TemporaryDirectory() as folder:
            for maker in MAKERS:
                command = [sys.executable, "-m", "benchmarks.decoding", "--make", maker, folder]
                subprocess.run([*command, str(number)], check=True, stderr=subprocess.DEVNULL)
            for threads in THREADS:
                table += rows(Path(folder), size, threads, args.rounds)
    head = ["gpt", "threads", "", "us per token", "ours / theirs"]
    about = f"A step of one text with its cache, in ONNX Runtime; texts of {TOKENS} tokens."
    title, command = "Exported decode step", "python -m benchmarks.decoding"
    record(title, command, f"{about}\n\n{markdown(head, table)}")


if __name__ == "__main__":
    main()
