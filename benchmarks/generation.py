"""Tokens per second of generated text, one text at a time, beside PyTorch with a cache.

python -m benchmarks.generation [--rounds 15]
needs training/requirements.txt, and torch of benchmarks/requirements.txt
"""

import time
from functools import partial
from importlib import import_module

from benchmarks.harness import Worker, take_turns
from benchmarks.results import arguments, markdown, ratios, record, spread
from benchmarks.training import OURS
from benchmarks.workloads import WORKLOADS

WORKLOAD = WORKLOADS["gpt"]._replace(shape=(256,))
PROMPT, TOKENS, TEMPERATURE, TOP_K = [1], 200, 0.8, 40
NAMES = {
    OURS: ("ours", ""),
    "PyTorch": ("torch", "eager"),
    "PyTorch, compiled": ("torch", "compile"),
    "PyTorch, one thread": ("torch", "eager one_thread"),
    "PyTorch, compiled, one thread": ("torch", "compile one_thread"),
}


class Writing:
    """A framework that writes texts, in a worker process. The first two compile."""

    def __init__(self, peer, variant):
        self.writer = import_module(f"benchmarks.peers.{peer}").writer(WORKLOAD, variant)
        for _ in range(2):
            self.rate()

    def rate(self):
        """Tokens per second of one text."""
        start = time.perf_counter()
        text = self.writer.write(PROMPT, TOKENS, TEMPERATURE, TOP_K)
        assert len(text) == TOKENS
        return TOKENS / (time.perf_counter() - start)


def main():
    args = arguments("generation", __doc__, rounds=15)
    workers = {name: Worker("benchmarks.generation:Writing", *form) for name, form in NAMES.items()}
    calls = {name: partial(worker.call, "rate") for name, worker in workers.items()}
    rates = take_turns(calls, args.rounds)
    for worker in workers.values():
        worker.close()
    rows = [
        [name, spread(values), spread(ratios(rates[OURS], values))]
        for name, values in rates.items()
    ]
    sizes = ", ".join(f"{key} {value}" for key, value in WORKLOAD.args.items())
    about = f"gpt of {sizes}, context {WORKLOAD.shape[0]}; {TOKENS} tokens, batch 1, top-k {TOP_K}."
    record(args, "Generated text", about, markdown(["", "tokens/s", "ours / theirs"], rows))


if __name__ == "__main__":
    main()
