"""A framework in a process of its own, which trains when it is told to.

python -m benchmarks.serving WORKLOAD PEER VARIANT [DATA]   (by hand: type `epoch`, `turn`, `learned` or `memory`)
"""

import json
import os
import subprocess
import sys
import threading
import time
from importlib import import_module

from benchmarks.workloads import WORKLOADS, data_for
from utils import first_line, peak_of_process

TURN = 0.5  # seconds that one framework trains, in whole epochs that count, before the next takes its turn
PATIENCE = 300  # seconds: a framework that answers later hangs
HUGE_PAGES = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"
}  # malloc asks for pages of 2 MB, so a step faults less


class Failed(Exception):
    """A framework that is not there, or cannot train the model."""


class Runner:
    """The side that asks; raises Failed where there is no answer."""

    def __init__(self, workload, peer, variant, data, huge_pages):
        command = [
            sys.executable,
            "-m",
            "benchmarks.serving",
            workload.name,
            peer,
            variant,
            *([data] if data else []),
        ]
        environment = {name: value for name, value in os.environ.items() if name not in HUGE_PAGES}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        environment |= HUGE_PAGES if huge_pages else {}
        self.question = (
            "memory" if huge_pages else "learned"
        )  # pages change nothing of what is learned
        began = time.perf_counter()
        self.process = subprocess.Popen(command, **pipes, text=True, bufsize=1, env=environment)
        self.parameters = self.answer()
        self.ask("epoch")
        self.first_epoch = time.perf_counter() - began  # from the start of the process
        self.rates = []  # examples a second in each turn
        self.multiples = []  # how many times as fast ours was in the turn right before

    def ask(self, question):
        self.process.stdin.write(f"{question}\n")
        return self.answer()

    def answer(self):
        alarm = threading.Timer(PATIENCE, self.process.kill)
        alarm.start()
        line = self.process.stdout.readline()
        alarm.cancel()
        answer = json.loads(line) if line else f"it ended with exit code {self.process.wait()}"
        if isinstance(answer, str):
            self.process.wait()
            raise Failed(answer)
        return answer

    def take_turn(self):
        """Examples a second."""
        self.rates.append(self.ask("turn"))
        return self.rates[-1]

    def end(self):
        self.learned = self.ask(self.question)
        self.process.stdin.close()
        self.process.wait()


class Server:
    """The side that trains."""

    def __init__(self, workload, peer, variant, data=None):
        self.workload = WORKLOADS[workload]
        self.data = data_for(self.workload, data)
        self.trainer = import_module(f"benchmarks.peers.{peer}").trainer(
            self.workload, self.data, variant
        )
        self.epochs = 0
        self.found = None

    def epoch(self):
        """The seconds of one epoch; after some of them it is looked at what was learned."""
        began = time.perf_counter()
        loss = self.trainer.epoch(self.epochs)
        seconds = time.perf_counter() - began
        self.epochs += 1
        if self.epochs == self.workload.learning:
            memory = peak_of_process()  # of training alone
            self.found = {"loss": loss, "accuracy": self.trainer.accuracy(), "memory": memory}
        return seconds

    def turn(self):
        """Examples a second, after an epoch that does not count: while others took theirs, caches and pages went cold."""
        self.epoch()
        seconds = [self.epoch()]
        while sum(seconds) < TURN:
            seconds.append(self.epoch())
        size = self.workload.batch_size
        return len(self.data["train"][0]) // size * size * len(seconds) / sum(seconds)

    def learned(self):
        """{"loss", "accuracy", "memory"} after `learning` epochs."""
        while self.found is None:
            self.epoch()
        return self.found

    def memory(self):
        """{"memory"} up to now, and the rest if it is known."""
        return self.found or {"memory": peak_of_process()}


def serve(arguments):
    """A JSON answer for each line that comes in, the first one unasked: the number of parameters. A string is an error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a framework prints is no answer
    try:
        server = Server(*arguments)
        answers.write(f"{server.trainer.parameters}\n")
        for line in sys.stdin:
            answers.write(f"{json.dumps(getattr(server, line.strip())())}\n")
    except Exception as error:  # the frameworks' own, of many kinds
        answers.write(f"{json.dumps(f'{type(error).__name__}: {first_line(error)}')}\n")
        raise


if __name__ == "__main__":
    serve(sys.argv[1:])
