"""Runs of `train.py` that take turns: a callback pauses each at the end of its epochs."""

import json
import os
import subprocess
import sys
import time

from benchmarks.harness import ROOT

FOREVER = 10**9  # epochs


class Paused:
    """A callback that writes a line to the file descriptor `replies` when a set has been evaluated
    and the process is idle, and continues after a line of `requests`."""

    def __init__(self, at: str, requests: int, replies: int):
        self.at, self.every = at, {"epochs": 1}
        self.requests, self.replies = os.fdopen(requests), os.fdopen(replies, "w", buffering=1)

    def on_evaluated(self, run, name, values):
        if name == self.at:
            wait_until_idle()
            self.replies.write("\n")
            if not self.requests.readline():  # the benchmark has ended
                return {"stop": True}


def wait_until_idle(pause=0.002, most_seconds=20):
    """Wait for what other threads still have to do, such as trackers, or the write of a file."""
    end, busy = time.perf_counter() + most_seconds, True
    while busy and time.perf_counter() < end:
        used = time.process_time()
        time.sleep(pause)
        busy = time.process_time() - used > pause / 4


class PausedRun:
    """The sample of config.json in a process, on the digits that the program draws; it pauses when
    the set `at` has been evaluated, or, with "train", after the training of an epoch."""

    def __init__(self, folder, overrides, callbacks, at="test"):
        requests, self.requests = os.pipe()
        self.replies, replies = os.pipe()
        pause = {"at": at, "requests": requests, "replies": replies}
        callbacks = [*callbacks, {"name": "benchmarks.pausing.Paused", "args": pause}]
        command = [sys.executable, "train.py", "-c", "config.json", "data=digits", *overrides]
        command += [f"training.epochs={FOREVER}", f"checkpoint.dir={folder}"]
        command += [f"callbacks={json.dumps(callbacks)}"]
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, **streams, cwd=ROOT, pass_fds=(requests, replies))
        os.close(requests)
        os.close(replies)
        self.reply()

    def reply(self):
        if not os.read(self.replies, 1):
            raise RuntimeError(f"train.py ended with exit code {self.process.wait()}")

    def seconds(self, epochs=1):
        """The seconds of so many epochs."""
        start = time.perf_counter()
        for _ in range(epochs):
            os.write(self.requests, b"\n")
            self.reply()
        return time.perf_counter() - start

    def end(self):
        os.close(self.requests)
        self.process.wait()
