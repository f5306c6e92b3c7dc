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
from benchmarks.gpu.page import page

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
COMMAND = "python -m benchmarks.gpu"


def main():
    args = arguments()
    end = time.monotonic() + args.seconds
    done = {}
    for part in args.only:
        left = end - time.monotonic()
        print(f"{part} ...", file=sys.stderr, flush=True)
        if left < LEAST:
            done[part] = {"rows": [], "seconds": 0, "problem": "no time was left"}
        else:
            limit = left if args.tiny else min(LIMITS[part], left)
            done[part] = run(part, limit, args.tiny)
        write(done, args)
    print(section(done))
    return int(any(part["problem"] for part in done.values()))


def arguments():
    def parts(text):
        if unknown := [part for part in text.split(",") if part not in LIMITS]:
            raise argparse.ArgumentTypeError(f"no part {unknown[0]!r}; {', '.join(LIMITS)}")
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=parts, default=list(LIMITS))
    parser.add_argument("--seconds", type=float, default=470)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.only != list(LIMITS) and not args.out:
        parser.error("--only would replace the results of all parts; name a folder with --out")
    if args.tiny and not args.out:
        parser.error("--tiny measures nothing that is worth keeping; name a folder with --out")
    return args


def run(part, limit, tiny):
    """{"rows": what the part has printed, "seconds", "problem": why it did not end well, or None},
    of a process that is killed with its children after `limit` seconds."""
    command = [sys.executable, "-m", "benchmarks.gpu.parts", part, "tiny" if tiny else "large"]
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
        rows, last = rows_of(out), lines_of(err)[-1:]
        if code:
            problem = f"exit code {code}: {last[0][:300] if last else 'it printed nothing'}"
    return {"rows": rows, "seconds": round(time.monotonic() - start, 1), "problem": problem}


def lines_of(file):
    file.seek(0)
    return [line.strip() for line in file.read().splitlines() if line.strip()]


def rows_of(file):
    """The rows that a part has printed, each a line of JSON; a kill may have cut the last one."""
    rows = []
    for line in lines_of(file):
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def section(done):
    return results.section_of(title_of(done), COMMAND, page(done))


def title_of(done):
    rows = done.get("device", {}).get("rows")
    return f"GPU: {rows[0]['device'] if rows else 'unknown device'}"


def write(done, args):
    """The results so far."""
    folder = args.out or Path(results.RESULTS).parent
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
    if args.out:
        (folder / "gpu.md").write_text(section(done), encoding="utf-8")
    else:
        results.write(title_of(done), section(done))


if __name__ == "__main__":
    sys.exit(main())
