"""Measuring side by side: calls that take turns, since the speed of a shared machine varies, worker
processes that wait between their turns, and runs of train.py.

python -m benchmarks.harness MODULE:FUNCTION ARGUMENTS     what a Worker starts
"""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from importlib import import_module
from pathlib import Path

from utils import first_line

ROOT = Path(__file__).parents[1]
# malloc requests pages of 2 MB, so a step has fewer page faults.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# The environment of a process with 8 simulated devices.
EIGHT_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


def take_turns(calls, rounds):
    """{name: [what its call returned in each round]}. Every second round goes in reverse. The first
    round, which compiles and warms up, is not counted."""
    results = {name: [] for name in calls}
    for i in range(rounds + 1):
        print_progress(f"round {i} of {rounds}")
        for name in list(calls)[:: -1 if i % 2 else 1]:
            value = calls[name]()
            if i > 0:
                results[name].append(value)
    return results


def seconds(call, *arguments):
    """The seconds that a call takes."""
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def print_progress(line):
    print(line, file=sys.stderr, flush=True)


def environment(huge_pages=False):
    """The environment of this process, with huge pages or without."""
    unwanted = (*HUGE_PAGES, "RAWTREE_HUGE_PAGES")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return kept | (HUGE_PAGES if huge_pages else {})


class WorkerError(Exception):
    """A worker failed, for instance because its framework is not installed, or did not respond."""


class Worker:
    """A process that calls `target(*arguments)`, and then on request the methods of the result.

    `target` is "module:function". Arguments and results are JSON; `made` is the result of the
    target, if it is JSON.
    """

    def __init__(self, target, *arguments, huge_pages=False, variables=(), timeout=300):
        self.timeout = timeout  # seconds without a response, after which it counts as hanging
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.harness", target, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env=environment(huge_pages) | dict(variables),
        )
        self.made = self.response()

    def call(self, method, *arguments):
        with suppress(BrokenPipeError):  # its response says why it ended
            self.process.stdin.write(f"{json.dumps([method, *arguments])}\n")
        return self.response()

    def response(self):
        alarm = threading.Timer(self.timeout, self.process.kill)
        alarm.start()
        line = self.process.stdout.readline()
        alarm.cancel()
        if not line:
            raise WorkerError(f"it ended with exit code {self.process.wait()}")
        response = json.loads(line)
        if "error" in response:
            self.process.wait()
            raise WorkerError(response["error"])
        return response["value"]

    def close(self):
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def in_process(target, *arguments, **options):
    """The result of a function, called in a process of its own."""
    worker = Worker(target, *arguments, **options)
    worker.close()
    return worker.made


class Run:
    """A run of train.py: its config and overrides, in a folder of its own. With `cache`, this is
    the folder of compiled programs and of data, instead of the user's."""

    def __init__(self, folder, config, *overrides, cache=None, variables=()):
        self.folder = Path(folder) / "saved"
        self.command = [sys.executable, "train.py", "-c", str(config), *overrides]
        self.command += [f"checkpoint.dir={self.folder}"]
        self.environment = environment() | {"PYTHONUNBUFFERED": "1"} | dict(variables)
        if cache:
            self.environment["XDG_CACHE_HOME"] = str(cache)

    def lines(self, *options):
        """Yield (seconds since the start of the process, line) for each line that it prints. The
        process is killed when no further line is requested."""
        start, printed = time.perf_counter(), []
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(
            [*self.command, *options], **streams, env=self.environment, cwd=ROOT
        )
        try:
            for line in process.stdout:
                printed.append(line)
                yield time.perf_counter() - start, line
            if code := process.wait():
                end = "".join(printed)[-2000:]
                raise RuntimeError(f"train.py ended with exit code {code}: {end}")
        finally:
            process.kill()
            process.wait()

    def finish(self, *options):
        """The seconds that the whole process takes."""
        return seconds(list, self.lines(*options))

    def seconds_to(self, text):
        """The seconds from the start of the process to the first line with this text."""
        with closing(self.lines()) as lines:
            for after, line in lines:
                if text in line:
                    return after
        raise RuntimeError(f"train.py printed no {text!r}")

    def rows(self, key):
        """The rows of metrics.jsonl with this key."""
        [file] = self.folder.rglob("metrics.jsonl")
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return [row for row in rows if key in row]

    def checkpoint(self):
        """The file of its last checkpoint."""
        return max(self.folder.rglob("checkpoint-*.params"), key=lambda file: file.stat().st_mtime)


def serve(target, arguments):
    """Call the target, then one of its result's methods for each line of stdin; respond in JSON."""
    responses = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a framework prints must not mix with the responses

    def respond(**response):
        responses.write(f"{json.dumps(response, default=lambda _: None)}\n")

    try:
        module, _, name = target.partition(":")
        made = getattr(import_module(module), name)(*json.loads(arguments))
        respond(value=made)
        for line in sys.stdin:
            method, *others = json.loads(line)
            respond(value=getattr(made, method)(*others))
    except Exception as error:  # each framework raises errors of its own
        respond(error=f"{type(error).__name__}: {first_line(error)}")
        raise


if __name__ == "__main__":
    serve(*sys.argv[1:])
