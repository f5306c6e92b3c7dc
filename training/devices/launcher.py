"""`train.py --processes N`: several processes on this machine that train together, to try it out.

Each is the same command with JAX's variables of who it is. What they say is told with their number before it. Where one ends
badly, all are ended: without it the others can only wait.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from utils import BAD_INPUT, DONE, FAILED, STOPPED, UserError

GRACE = 10.0  # seconds that the others have to tell what they know when one has failed
ENDING = 90.0  # seconds that they have to come to their end when one has come to its own
# What C++ says of each connection, and at length of the end of another process, whose cause is told here.
NOISE = (
    r"\[Gloo\] Rank|[WEF]\d{4} \S+ +\d+ (preemption_\w+|coordination_\w+|client|service)\.(cc|h):| +@ +0x|\*\*\* Check failure"
    r"|Additional GRPC error|:UNKNOWN:"
)
SCHEDULERS = ("SLURM_", "OMPI_", "PMIX_", "PMI_")  # what JAX would take for word of other processes


def launch(count):
    """Start the processes, tell what they say, and answer the exit code of all."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(SCHEDULERS)
    }
    environment |= {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": str(count),
    }
    environment |= {"PYTHONUNBUFFERED": "1"}
    started = [
        start(environment | {"JAX_PROCESS_ID": str(i)} | share_of_gpus(i, count))
        for i in range(count)
    ]
    complaints = {}  # a mistake is most often found by all
    said = [(i, p.stdout, sys.stdout, None) for i, p in enumerate(started)]
    said += [(i, p.stderr, sys.stderr, complaints) for i, p in enumerate(started)]
    tellers = [threading.Thread(target=tell, args=each) for each in said]
    for teller in tellers:
        teller.start()
    try:
        return watched(started, Interrupts(started))
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()
        for teller in tellers:
            teller.join()


def start(environment):
    """One process, in a session of its own, so that Ctrl-C comes from here alone."""
    command = [sys.executable, *sys.orig_argv[1:]]
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "errors": "replace",
    }
    return subprocess.Popen(
        command, env=environment, start_new_session=True, preexec_fn=end_with_parent, **pipes
    )


def end_with_parent():
    """Linux ends a process whose parent is gone, however that was ended."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def free_port():
    """A port that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def share_of_gpus(number, count, devices=Path("/dev")):
    """The variable that gives a process its share of the machine's GPUs, or of those that are visible; nothing without any."""
    there = sorted(path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*"))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(there)).split(",")
    if gpus == [""] or os.environ.get("JAX_PLATFORMS") == "cpu":
        return {}
    if len(gpus) < count:
        raise UserError(
            f"--processes {count}: there are {len(gpus)} GPUs; take so many at most, or set JAX_PLATFORMS=cpu"
        )
    each = len(gpus) // count
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[number * each : (number + 1) * each])}


def tell(number, stream, out, complaints):
    """Say what a process says, line by line; of `complaints`, {line: who had it first}, each is said once, where it is given."""
    for line in stream:
        again = complaints is not None and complaints.setdefault(line, number) != number
        if not (again or re.match(NOISE, line)):
            with suppress(
                OSError
            ):  # whoever reads us has seen enough; the process must not wait for it
                out.write(f"[{number}] {line}")
                out.flush()


class Interrupts:
    """A first SIGINT or SIGTERM asks the processes to stop and save, a second one ends them."""

    def __init__(self, processes):
        self.processes, self.count = processes, 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.note)

    def note(self, number, _frame):
        self.count += 1
        said = (
            "Stopping: all save and end; once more ends them at once"
            if self.count == 1
            else "Ended at once"
        )
        os.write(2, f"{said}\n".encode())
        for process in self.processes:
            process.send_signal(signal.SIGTERM if self.count == 1 else signal.SIGKILL)


def watched(processes, interrupts):
    """Wait for the processes: the exit code of the first that failed, else that of all."""
    failed, until = None, float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        codes = [process.poll() for process in processes]
        if bad := [i for i, code in enumerate(codes) if code not in (None, DONE, STOPPED)]:
            failed = min(bad, key=lambda i: rank(codes[i]))
            until = min(until, time.monotonic() + (0 if codes[failed] == BAD_INPUT else GRACE))
        elif any(code is not None for code in codes):
            until = min(until, time.monotonic() + ENDING)
        time.sleep(0.05)
    codes = [process.poll() for process in processes]
    if failed is None:  # all have ended in order, or some never did
        failed = next((i for i, code in enumerate(codes) if code not in (DONE, STOPPED)), None)
    if failed is None:
        return max(codes)
    if interrupts.count < 2:
        print(describe(failed, codes[failed]), file=sys.stderr)
    return codes[failed] if codes[failed] and codes[failed] > 0 else FAILED


def rank(code):
    """Which of several ends was the cause: one that was killed or found a mistake, one that failed, which may be since another
    did, one that JAX ended since another was lost."""
    return {-signal.SIGABRT: 2, BAD_INPUT: 0}.get(code, 0 if code < 0 else 1)


def describe(number, code):
    """What became of a process, and of the run."""
    if code is None:
        what = f"did not end within {ENDING:.0f} seconds of the others"
    elif code < 0:
        what = f"was ended by {signal.Signals(-code).name}"
    else:
        what = f"ended with exit code {code}"
    hint = (
        ""
        if code == BAD_INPUT
        else ". --resume auto goes on from the last checkpoint, if there is one"
    )
    return f"Process {number} {what}, so all are ended{hint}"
