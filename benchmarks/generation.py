"""Tokens per second of generated text, one text at a time, beside PyTorch with a cache.

python -m benchmarks.generation [--rounds 15]
needs training/requirements.txt, and torch of benchmarks/requirements.txt
"""

import argparse
import json
import subprocess
import sys
import time
from importlib import import_module

from benchmarks.results import markdown, record, spread
from benchmarks.workloads import WORKLOADS

WORKLOAD = WORKLOADS["gpt"]._replace(shape=(256,))
PROMPT, TOKENS, TEMPERATURE, TOP_K = [1], 200, 0.8, 40
NAMES = {
    ("ours", ""): "Rawtree",
    ("torch_writer", "eager"): "PyTorch",
    ("torch_writer", "compile"): "PyTorch, compiled",
    ("torch_writer", "eager one_thread"): "PyTorch, one thread",
    ("torch_writer", "compile one_thread"): "PyTorch, compiled, one thread",
}


class Client:
    """A process that writes on request."""

    def __init__(self, module, variant):
        command = [sys.executable, "-m", "benchmarks.generation", "--serve", module, variant]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, **pipes, text=True, bufsize=1)
        self.rates = []
        self.turn()
        self.rates.clear()

    def turn(self):
        """Measure the tokens per second of one text."""
        self.process.stdin.write("write\n")
        self.rates.append(json.loads(self.process.stdout.readline()))

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def serve(module, variant):
    """Write a text, and then its tokens per second, for each line of stdin; the first two texts
    are not measured, since they compile."""
    writer = import_module(f"benchmarks.peers.{module}").writer(WORKLOAD, variant)
    for _ in range(2):
        writer.write(PROMPT, TOKENS, TEMPERATURE, TOP_K)
    for _ in sys.stdin:
        start = time.perf_counter()
        text = writer.write(PROMPT, TOKENS, TEMPERATURE, TOP_K)
        assert len(text) == TOKENS
        print(json.dumps(TOKENS / (time.perf_counter() - start)), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(*args.serve)
    clients = {name: Client(*key) for key, name in NAMES.items()}
    for i in range(args.rounds):
        for client in list(clients.values())[:: -1 if i % 2 else 1]:
            client.turn()
    for client in clients.values():
        client.end()
    ours = clients["Rawtree"].rates
    rows = [
        [name, spread(c.rates), spread([a / b for a, b in zip(ours, c.rates, strict=True)])]
        for name, c in clients.items()
    ]
    sizes = ", ".join(f"{key} {value}" for key, value in WORKLOAD.args.items())
    about = f"gpt of {sizes}, context {WORKLOAD.shape[0]}; {TOKENS} tokens, batch 1, top-k {TOP_K}."
    table = markdown(["", "tokens/s", "ours / theirs"], rows)
    record("Generated text", "python -m benchmarks.generation", f"{about}\n\n{table}")


if __name__ == "__main__":
    main()
