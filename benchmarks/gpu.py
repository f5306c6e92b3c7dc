"""Measures on a GPU what no CPU can show, in less than 8 minutes, without a network.

python -m benchmarks.gpu [--only airbench,gpt2,...] [--seconds 470] [--out DIR] [--tiny]
needs jax with a GPU, numpy, safetensors and tqdm; Flax with Optax, PyTorch and pytest take part
where they are installed. It writes gpu.json and a section of Markdown, by default to benchmarks/;
with --out only into that folder. --tiny proves on any machine that every part runs

Each part is a process of its own with a time limit, the most useful part first; the results are
written after every part, so that a part that fails or hangs does not affect the others.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from benchmarks import results
from benchmarks.harness import in_process
from benchmarks.results import markdown, short
from utils import format_bytes

LIMITS = {  # {part: the most seconds that it may take}, what is worth most first
    "device": 40,
    "airbench": 70,
    "gpt2": 100,
    "resume": 100,
    "speed resnet": 110,
    "speed gpt": 110,
    "speed convnext": 110,
    "speed vit": 110,
    "start": 60,
    "waiting": 50,
    "tests": 150,
}
LEAST = 15  # seconds that must be left to begin a part
# Several processes share the memory, each as much as it needs.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
ABOUT = {
    "device": "The device, the memory that JAX may use of it, and the versions",
    "airbench": "`configs/cifar10_94.json` from its first to its last step, on generated images",
    "gpt2": "`configs/gpt2_124m.json` on random tokens, medians of the later half of the steps",
    "resume": "A resnet that is killed with SIGKILL after a checkpoint and resumed, and the same "
    "run again, against one that was not killed: the final weights and statistics",
    "start": "From the start of the process to the first step of a resnet; warm: the programs are "
    "in the user's cache",
    "waiting": "A resnet whose data is on the device, or is brought batch by batch: the share of "
    "the time that the run waits for data",
    "tests": "The tests with the mark `gpu`",
    "speed": "Training on random data: medians of turns that alternate; MFU counts useful products "
    "of our forward pass three times, for all frameworks alike; first epoch: seconds from the "
    "start of the process, while the others started too",
}


def main():
    args = arguments()
    if not args.tiny and in_process("jax:default_backend") == "cpu":
        sys.exit("jax finds no GPU; --tiny --out FOLDER proves on any machine that every part runs")
    end, done = time.monotonic() + args.seconds, {}
    for part in args.only:
        left = end - time.monotonic()
        print(f"{part} ...", file=sys.stderr, flush=True)
        if left < LEAST:
            done[part] = {"rows": [], "seconds": 0, "problem": "no time was left"}
        else:
            done[part] = run(part, left if args.tiny else min(LIMITS[part], left), args.tiny)
        write(done, args.out)
    print(section(done))
    return int(any(part["problem"] for part in done.values()))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=results.some_of(list(LIMITS)), default=list(LIMITS))
    parser.add_argument("--seconds", type=float, default=470)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if (args.only != list(LIMITS) or args.tiny) and not args.out:
        parser.error("--only or --tiny would replace the results of all parts; add --out FOLDER")
    return args


def run(part, limit, tiny):
    """{"rows": what the part has printed, "seconds", "problem": why it did not end well, or None},
    of a process that is killed with its children after `limit` seconds."""
    command = [sys.executable, "-m", "benchmarks.gpu_parts", part, "tiny" if tiny else "large"]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        streams = {"stdout": out, "stderr": err, "stdin": subprocess.DEVNULL}
        environment = os.environ | ENVIRONMENT
        process = subprocess.Popen(command, **streams, start_new_session=True, env=environment)
        try:
            code, problem = process.wait(limit), None
        except subprocess.TimeoutExpired:
            code, problem = 0, f"it was ended after {limit:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # also what a crash has left running
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        rows, last = rows_in(out), lines_of(err)[-1:]
        if code:
            problem = f"exit code {code}: {last[0][:300] if last else 'it printed nothing'}"
    return {"rows": rows, "seconds": round(time.monotonic() - start, 1), "problem": problem}


def lines_of(file):
    file.seek(0)
    return [line.strip() for line in file.read().splitlines() if line.strip()]


def rows_in(file):
    """The rows that a part has printed, each a line of JSON; a kill may have cut the last one."""
    rows = []
    for line in lines_of(file):
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def title_of(done):
    rows = done.get("device", {}).get("rows")
    return f"GPU: {rows[0]['device'] if rows else 'unknown device'}"


def section(done):
    return results.section_of("python -m benchmarks.gpu", title_of(done), page(done))


def write(done, folder):
    """The results so far."""
    where = folder or results.RESULTS.parent
    where.mkdir(parents=True, exist_ok=True)
    (where / "gpu.json").write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
    if folder:
        (where / "gpu.md").write_text(section(done), encoding="utf-8")
    else:
        results.write(results.RESULTS, title_of(done), section(done))


def page(done):
    """All parts, in the order in which they ran; those of `speed` are one table."""
    tables, blocks = {}, []
    for part, result in done.items():
        tables.setdefault(part.split()[0], []).extend(result["rows"])
    for name, rows in tables.items():
        if name == "speed":  # the last row of each form counts
            rows = list(
                {(row["model"], row["precision"], row["peer"]): row for row in rows}.values()
            )
        failed = [row["failed"] for row in rows if name == "tests" and len(row) == 1]
        if rows:
            blocks += [f"{ABOUT[name]}.", table(rows[-1:] if name == "tests" else rows)]
        if failed:
            blocks.append("Failed: " + ", ".join(failed))
    problems = [f"- {part}: {each['problem']}" for part, each in done.items() if each["problem"]]
    if problems:
        blocks.append("Not everything ran:\n\n" + "\n".join(problems))
    return "\n\n".join(blocks)


def table(rows):
    """One column for each key of the rows."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[cell(key, row.get(key)) for key in keys] for row in rows]
    return markdown([key.replace("_", " ") for key in keys], cells)


def cell(key, value):
    if value is None:
        return "-"
    if key == "memory":
        return format_bytes(value)
    if key in ("mfu", "waiting"):
        return f"{value:.1%}"
    return short(value) if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
