"""The parts of benchmarks.gpu: each prints its rows, one JSON object per line, as soon as it has
them.

python -m benchmarks.gpu_parts PART large|tiny
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks.harness import ROOT, Run, WorkerError
from benchmarks.results import versions
from benchmarks.training import Runner
from benchmarks.workloads import gpu_workload

# XLA chooses between algorithms by measuring them, and some of them add in any order.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
MARK = "pytest.mark.gpu"
QUIET = ["logging.report=false", "logging.progress_bar=false"]
EVERY_STEP = [*QUIET, "logging.every_steps=1"]
# Without the options of pyproject.toml, so that each test has a line.
SUITE = ["-o", "addopts=", "-v", "-m", "gpu and not torture", "-p", "no:cacheprovider"]
SUITE += ["--continue-on-collection-errors"]  # of tests whose references are not installed
ROUNDS = 3  # of `speed`
# Seconds without a response, of which PyTorch's compiler may take most.
TIMEOUTS = {"large": 60, "tiny": 300}
PRECISIONS = ("bfloat16", "float32")
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}


def emit(**row):
    print(json.dumps(row), flush=True)


def device(tiny):
    import jax

    first = jax.devices()[0]
    emit(
        device=first.device_kind,
        count=jax.device_count(),
        memory=(first.memory_stats() or {}).get("bytes_limit"),
        cores=os.cpu_count(),
        versions=versions("jax", "jaxlib", "flax", "torch", "numpy"),
    )


def medians(rows, *names):
    return {
        name: statistics.median(row[name] for row in rows)
        for name in names
        if all(row.get(name) is not None for row in rows)
    }


def airbench(tiny):
    with tempfile.TemporaryDirectory() as folder:
        made_cifar10(Path(folder))
        few = ["training.limit_batches=2", "training.max_steps=4", "loader.batch_size=16"]
        few += ["model.args.widths=[4,8,8]", "training.epochs=2", "schedule.args.warmup_epochs=1"]
        # The log of every step would be a part of the time.
        overrides = [*QUIET, "logging.every_steps=0", f"data.args.dir={folder}"]
        overrides += few if tiny else []
        run = Run(folder, "configs/cifar10_94.json", *overrides, cache=folder)
        process_seconds = run.finish()
        epochs = [row for row in run.rows("examples_per_second") if "seconds" in row]
        of_all = sum(row["seconds"] for row in epochs)
        names = ("seconds", "examples_per_second", "mfu", "waiting")
        later = medians(epochs[1:], *names)
        emit(epochs=len(epochs), seconds_of_all=of_all, process_seconds=process_seconds, **later)


def made_cifar10(folder):
    """Files as those of CIFAR-10, whose classes differ in brightness."""
    random = np.random.default_rng(0)
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    for name in names:
        labels = random.integers(0, 10, 10_000, np.uint8)
        pixels = random.integers(0, 128, (10_000, 3072), np.uint8) + 12 * labels[:, None]
        (folder / name).write_bytes(np.concatenate([labels[:, None], pixels], 1).tobytes())


def gpt2(tiny):
    """In smaller pieces of a batch where the memory of the device is small."""
    for accumulate in (2,) if tiny else (16, 64):
        try:
            return gpt2_in_pieces(tiny, accumulate)
        except RuntimeError as error:
            if accumulate == 64 or "RESOURCE_EXHAUSTED" not in str(error):
                raise


def gpt2_in_pieces(tiny, accumulate):
    with tempfile.TemporaryDirectory() as folder:
        batch, length, steps = (8, 16, 4) if tiny else (512, 1024, 12)
        paths = made_tokens(Path(folder), batch * length * (steps + 1) + 1)
        overrides = [f"data.args.{name}={path}" for name, path in paths.items()]
        overrides += [f"training.max_steps={steps}", "schedule.args.warmup_steps=2"]
        overrides += ["training.eval_every=0", "checkpoint.every_steps=0"]
        overrides += ["checkpoint.save_optimizer_state=false"]
        overrides += [f"training.accumulate={accumulate}"]
        if tiny:
            overrides += [f"model.args.{name}=2" for name in ("depth", "heads")]
            overrides += ["model.args.dim=8", f"data.args.length={length}"]
            overrides += [f"loader.batch_size={batch}", "loader.eval_batch_size=8"]
        run = Run(folder, "configs/gpt2_124m.json", *EVERY_STEP, *overrides, cache=folder)
        process_seconds = run.finish()
        rows = run.rows("tokens_per_second")
        later = medians(rows[len(rows) // 2 :], "tokens_per_second", "mfu", "waiting")
        emit(steps=steps, accumulate=accumulate, process_seconds=process_seconds, **later)


def made_tokens(folder, count):
    """{"train" and "val": a file as llm.c writes it}."""
    paths, random = {}, np.random.default_rng(0)
    for name, tokens in (("train", count), ("val", 40_000)):
        header = np.zeros(256, np.int32)
        header[:3] = 20240520, 1, tokens
        paths[name] = folder / f"{name}.bin"
        values = random.integers(0, 50_257, tokens).astype(np.uint16)
        paths[name].write_bytes(header.tobytes() + values.tobytes())
    return paths


def made_config(folder, tiny, **changes):
    """A config of a resnet on random images in the folder."""
    random, count = np.random.default_rng(0), 256 if tiny else 8192
    size = 8 if tiny else 32
    x = random.integers(0, 256, (count, size, size, 3), np.uint8)
    np.savez(folder / "train.npz", x=x, y=np.arange(count) % 10)
    config = {
        "title": "GPU",
        "model": {"name": "resnet", "args": {"widths": [4, 8] if tiny else [64, 128, 256]}},
        "data": {"name": "arrays", "args": {"train": str(folder / "train.npz")}},
        "loader": {"batch_size": 32 if tiny else 256},
        "preprocess": ["to_unit"],
        "loss": "cross_entropy",
        "optimizer": {"name": "adamw", "args": {"lr": 0.001}},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config | changes))
    return path


def resume(tiny):
    """Whether a run that is killed, and resumed, ends with the bits of one that is not; and
    whether two runs do."""
    for name, flags in (("no flags", ""), ("deterministic flags", DETERMINISTIC)):
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = {"every_epochs": 0, "every_steps": 5 if tiny else 20}
            training = {"epochs": 30 if tiny else 8}  # long enough to be killed in the middle
            config = made_config(Path(folder), tiny, checkpoint=checkpoints, training=training)
            # XLA takes a lone space for the name of a file.
            variables = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
            options = {"cache": f"{folder}/cache", "variables": variables}
            whole, again, killed = (
                Run(f"{folder}/{each}", config, *EVERY_STEP, **options)
                for each in ("whole", "again", "killed")
            )
            whole.finish()
            step = killed_after_checkpoint(killed)
            killed.finish("--resume", "auto")
            again.finish()
            expected = weights(whole)
            equal = {
                "resumed": same(expected, weights(killed)),
                "again": same(expected, weights(again)),
            }
            emit(flags=name, killed_at_step=step, **equal)


def weights(run):
    """{name: array} of the last checkpoint."""
    from safetensors.numpy import load_file

    leaves = load_file(run.checkpoint()).items()
    return {name: array for name, array in leaves if name.startswith(("params/", "state/"))}


def same(a, b):
    """ "equal bits", or the largest difference."""
    if a.keys() != b.keys():
        return "other names"
    if all(np.array_equal(a[name], b[name]) for name in a):
        return "equal bits"
    return max(float(np.abs(np.subtract(a[n], b[n], dtype=np.float64)).max()) for n in a)


def killed_after_checkpoint(run):
    """Kill a run with SIGKILL as soon as it has logged a step after its first checkpoint; that
    step."""
    with closing(run.lines()) as lines:
        for _, line in lines:
            found = re.search(r"Epoch (\d+) \[(\d+)/(\d+) ", line)
            if found and any(run.folder.rglob("checkpoint-*.params")):
                epoch, position, steps = map(int, found.groups())
                return (epoch - 1) * steps + position
    raise RuntimeError("the run ended before it could be killed")


def start(tiny):
    """With and without the programs that an earlier process compiled."""
    with tempfile.TemporaryDirectory() as folder:
        config = made_config(Path(folder), tiny)
        for name in ("cold", "warm"):
            run = Run(f"{folder}/{name}", config, *EVERY_STEP, cache=f"{folder}/cache")
            emit(start=name, seconds=run.seconds_to("Epoch 1 [1/"))


def waiting(tiny):
    for name, budget in (("on the device", 2048), ("streamed", 0)):
        with tempfile.TemporaryDirectory() as folder:
            config = made_config(Path(folder), tiny, training={"epochs": 3})
            overrides = [f"loader.device_budget_mb={budget}", "logging.every_steps=0"]
            run = Run(folder, config, *QUIET, *overrides, cache=folder)
            run.finish()
            row = [row for row in run.rows("waiting") if "seconds" in row][-1]
            emit(data=name, waiting=row["waiting"], images_per_second=row["examples_per_second"])


def tests(tiny):
    """Products in full float32, as their references'."""
    environment = os.environ | {"JAX_DEFAULT_MATMUL_PRECISION": "float32"}
    files = [str(path) for path in Path("tests").rglob("test_*.py") if MARK in path.read_text()]
    few = ["-k", "test_a_restored_snapshot or test_equals_pytorch"] if tiny else []
    command = [sys.executable, "-m", "pytest", *SUITE, *few, *sorted(files)]
    process = subprocess.Popen(command, env=environment, **PIPES)
    counts, last = {"passed": 0, "failed": 0, "skipped": 0}, ""
    for line in process.stdout:
        last = line.strip() or last
        if found := re.match(r"(tests/\S+::.+) (PASSED|FAILED|SKIPPED|ERROR)\b", line):
            word = {"ERROR": "failed"}.get(found[2], found[2].lower())
            counts[word] += 1
            if word == "failed":
                emit(failed=found[1])
            emit(**counts)  # the last row counts
    if process.wait() not in (0, 1) or not sum(counts.values()):
        raise RuntimeError(last)
    if counts["failed"]:
        raise RuntimeError(f"{counts['failed']} tests failed")


# Speed: one model in both precisions, ours beside Flax NNX and PyTorch.


def speed(model, size):
    """Rows for each framework, form and precision; the last one of each counts.

    The processes are started together, as many at once as there are cores, since starting and
    compiling take most of the time and need the CPU; then they take turns, one after the other."""
    forms = [(precision, *form) for precision in PRECISIONS for form in peers_of(model, size)]

    def started(form):
        """A Runner, or why there is none."""
        precision, peer, variant = form
        workload = gpu_workload(size, model, precision)
        try:
            return Runner(peer, variant, workload, timeout=TIMEOUTS[size])
        except WorkerError as error:
            return str(error)

    with ThreadPoolExecutor(min(len(forms), os.cpu_count())) as pool:
        runners = dict(zip(forms, pool.map(started, forms), strict=True))
    costs = {each: cost_of_unit(gpu_workload(size, model, each)) for each in PRECISIONS}
    rates = {form: [] for form in forms}
    for _ in range(1 if size == "tiny" else ROUNDS):
        for form, runner in runners.items():
            if isinstance(runner, Runner):
                try:
                    rates[form].append(runner.take_turn())
                except WorkerError as error:
                    runners[form] = str(error)
            # After every turn: if this part has to be ended, what was measured counts.
            emit(**row_of(model, form, runners[form], rates[form], costs[form[0]]))


def peers_of(model, size):
    """[(peer, variant)] of what is installed; the fastest layout of PyTorch where there are
    convolutions."""
    layout = "channels_last" if model in ("resnet", "convnext") else ""
    found = [("ours", "")]
    if find_spec("flax") and find_spec("optax"):
        found.append(("flax", ""))
    if find_spec("torch"):
        found.append(("torch", layout or "eager"))
        # Its compiler needs a compiler of C++ and a minute.
        found += [("torch", f"compile {layout}".strip())] if size == "large" else []
    return found


def row_of(model, form, runner, rates, cost):
    """The measurements of a form so far; a later row of the same form replaces it."""
    precision, peer, variant = form
    row = {"model": model, "precision": precision, "peer": f"{peer} {variant}".strip()}
    if rates:
        rate = statistics.median(rates)
        useful = cost["flops"] * rate
        row |= {"rate": rate, "unit": cost["unit"], "turns": len(rates), "tflops": useful / 1e12}
        row["mfu"] = cost["peak"] and useful / cost["peak"]
    if isinstance(runner, str):
        return row | {"problem": runner}
    memory = runner.worker.call("device_memory")
    return row | {"first_epoch": runner.first_epoch, "memory": memory}


def cost_of_unit(workload):
    """{"flops": the useful operations of an image or a token, three times those of our forward
    pass, "unit", "peak": the FLOP/s of the first device, None if unknown}."""
    import jax

    from benchmarks.peers.ours import model_of
    from training.devices.utilisation import flops_of, peak_of

    model = model_of(workload)
    batch = jax.ShapeDtypeStruct((1, *workload.shape), "int32" if workload.is_text else "float32")

    def forward(params, state, x, key, train):
        return model.apply(params, state, x)

    flops = flops_of(forward, *jax.eval_shape(model.init, jax.random.key(0)), batch)
    peak = peak_of(jax.devices()[:1], workload.precision)
    return {"flops": 3 * flops / workload.units, "unit": workload.unit, "peak": peak}


PARTS = {f.__name__: f for f in (device, airbench, gpt2, resume, start, waiting, tests)}


def main(part, size):
    if part.startswith("speed "):
        speed(part.split()[1], size)
    else:
        PARTS[part](size == "tiny")


if __name__ == "__main__":
    main(*sys.argv[1:])
