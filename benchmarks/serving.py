"""A framework in a process of its own, which trains on request.

python -m benchmarks.serving WORKLOAD PEER VARIANT [DATA]
by hand: type `epoch`, `turn`, `learned`, `memory` or `device_memory`
"""

import json
import os
import subprocess
import sys
import threading
import time
from importlib import import_module

from benchmarks.workloads import GPU_WORKLOADS, WORKLOADS, data_for
from utils import first_line, peak_of_process

TURN = 0.5  # seconds of measured training per turn, in whole epochs
TIMEOUT = 300  # seconds without a response, after which a framework counts as hanging
# malloc requests pages of 2 MB, so a step has fewer page faults.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class PeerError(Exception):
    """A framework is not installed, or cannot train the model."""


class Client:
    """Starts a server process and sends it requests; raises PeerError when one fails."""

    def __init__(self, workload, peer, variant, data, huge_pages, timeout=TIMEOUT):
        self.timeout = timeout
        command = [sys.executable, "-m", "benchmarks.serving", workload.name, peer, variant]
        command += [data] if data else []
        environment = {name: value for name, value in os.environ.items() if name not in HUGE_PAGES}
        environment |= HUGE_PAGES if huge_pages else {}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        # Huge pages do not change what is learned, so only the memory is measured with them.
        self.last_request = "memory" if huge_pages else "learned"
        start = time.perf_counter()
        self.process = subprocess.Popen(command, **pipes, text=True, bufsize=1, env=environment)
        self.parameters = self.response()
        self.request("epoch")
        self.first_epoch = time.perf_counter() - start  # from the start of the process
        self.rates = []  # images or tokens per second in each turn
        self.multiples = []  # our speed in the turn right before, as a multiple of this one's

    def request(self, name):
        self.process.stdin.write(f"{name}\n")
        return self.response()

    def response(self):
        alarm = threading.Timer(self.timeout, self.process.kill)
        alarm.start()
        line = self.process.stdout.readline()
        alarm.cancel()
        response = json.loads(line) if line else f"it ended with exit code {self.process.wait()}"
        if isinstance(response, str):
            self.process.wait()
            raise PeerError(response)
        return response

    def take_turn(self):
        """Images or tokens per second."""
        self.rates.append(self.request("turn"))
        return self.rates[-1]

    def end(self):
        self.learned = self.request(self.last_request)
        self.process.stdin.close()
        self.process.wait()


class Server:
    """Trains; each of its methods without arguments is a request."""

    def __init__(self, workload, peer, variant, data=None):
        self.workload = (WORKLOADS | GPU_WORKLOADS)[workload]
        self.data = data_for(self.workload, data)
        module = import_module(f"benchmarks.peers.{peer}")
        self.trainer = module.trainer(self.workload, self.data, variant)
        self.epochs = 0
        self.results = None  # of `learned`

    def epoch(self):
        """The seconds of one epoch; after `learning` epochs the results are recorded."""
        start = time.perf_counter()
        loss = self.trainer.epoch(self.epochs)
        seconds = time.perf_counter() - start
        self.epochs += 1
        if self.epochs == self.workload.learning:
            memory = peak_of_process()  # before the evaluation, so that it counts training alone
            self.results = {"loss": loss, "accuracy": self.trainer.accuracy(), "memory": memory}
        return seconds

    def turn(self):
        """Images or tokens per second, after one unmeasured epoch: while the others ran, the
        caches and pages of this process went cold."""
        self.epoch()
        seconds = [self.epoch()]
        while sum(seconds) < TURN:
            seconds.append(self.epoch())
        size = self.workload.batch_size
        examples = len(self.data["train"][0]) // size * size
        return self.workload.units * examples * len(seconds) / sum(seconds)

    def learned(self):
        """{"loss", "accuracy", "memory"} after `learning` epochs."""
        while self.results is None:
            self.epoch()
        return self.results

    def device_memory(self):
        """The peak memory of the device, in bytes; None if that is the host's."""
        return self.trainer.device_memory()

    def memory(self):
        """{"memory"} up to now, with the other results if they are already recorded."""
        return self.results or {"memory": peak_of_process()}


def serve(arguments):
    """Write the number of parameters, then one JSON response per request; a string is an error."""
    responses = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a framework prints must not mix with the responses
    try:
        server = Server(*arguments)
        responses.write(f"{server.trainer.parameters}\n")
        for line in sys.stdin:
            responses.write(f"{json.dumps(getattr(server, line.strip())())}\n")
    except Exception as error:  # each framework raises errors of its own
        responses.write(f"{json.dumps(f'{type(error).__name__}: {first_line(error)}')}\n")
        raise


if __name__ == "__main__":
    serve(sys.argv[1:])
