"""`train.py --processes N`: several processes on one machine that train together, to try this out.

Each process runs the same command, with the variables by which JAX's processes find each other.
Their output is printed with the process number in front. If one fails, all are ended, since the
others can only wait for it.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from types import FrameType
from typing import TextIO

from training.devices.signals import handled
from utils import BAD_INPUT, DONE, FAILED, STOPPED, WINDOWS, UserError

GRACE = 10.0  # seconds that the other processes have for their messages after one has failed
SCHEDULERS = ("SLURM_", "OMPI_", "PMIX_", "PMI_")  # with these, JAX would look for other processes


def launch(count: int) -> int:
    """Start `count` processes, print their output, and return the exit code of the whole run."""
    if WINDOWS:
        raise UserError("--processes: works on Linux and macOS; on Windows, use WSL")
    environment = {n: v for n, v in os.environ.items() if not n.startswith(SCHEDULERS)}
    environment["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{free_port()}"
    environment |= {"JAX_NUM_PROCESSES": str(count), "PYTHONUNBUFFERED": "1"}
    own = [{"JAX_PROCESS_ID": str(i)} | share_of_gpus(i, count) for i in range(count)]
    processes = [start(environment | variables) for variables in own]
    streams = [(i, p.stdout, sys.stdout) for i, p in enumerate(processes)]
    streams += [(i, p.stderr, sys.stderr) for i, p in enumerate(processes)]
    forwarders = [threading.Thread(target=forward, args=stream) for stream in streams]
    for forwarder in forwarders:
        forwarder.start()
    try:
        return wait_for(processes, Interrupts(processes))
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        for forwarder in forwarders:
            forwarder.join()


def start(environment: dict[str, str]) -> Popen[str]:
    """Start one process in its own session, so that Ctrl-C reaches it only through the launcher."""
    command = [sys.executable, *sys.orig_argv[1:]]
    return Popen(
        command,
        env=environment,
        stdout=PIPE,
        stderr=PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
        preexec_fn=end_with_parent,
    )


def end_with_parent() -> None:
    """Let Linux end this process when its parent has ended for any reason."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def free_port() -> int:
    """A port on which no process listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def share_of_gpus(
    number: int, count: int, devices: Path = Path("/dev"), option: str = "--processes"
) -> dict[str, str]:
    """The variable that gives a process its share of the visible GPUs; {} if there are none."""
    # CUDA numbers them from 0; in a container their files may have other numbers.
    all_gpus = map(str, range(len(list(devices.glob("nvidia[0-9]*")))))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(all_gpus)).split(",")
    if gpus[0] in ("", "-1") or os.environ.get("JAX_PLATFORMS") == "cpu":
        return {}
    if len(gpus) < count:
        fix = f"use at most {len(gpus)} processes, or set JAX_PLATFORMS=cpu"
        raise UserError(f"{option} {count}: there are only {len(gpus)} GPUs; {fix}")
    each = len(gpus) // count
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[number * each : (number + 1) * each])}


def forward(number: int, stream: TextIO, out: TextIO) -> None:
    """Print the lines of process `number` with its number in front."""
    for line in stream:
        if line.startswith("[Gloo] Rank"):  # C++ logs every connection
            continue
        # The launcher's output may be closed; its processes must still be able to write.
        with suppress(OSError):
            out.write(f"[{number}] {line}")
            out.flush()


class Interrupts:
    """At a first signal, sends SIGTERM to the processes, so that they save and stop; a second one
    kills them."""

    def __init__(self, processes: Sequence[Popen]) -> None:
        self.processes, self.count = processes, 0
        for number in handled():
            signal.signal(number, self.handle)

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        first = self.count == 1
        stopping = b"Stopping: all processes save and end; a second signal ends them at once\n"
        os.write(2, stopping if first else b"Ended at once\n")
        for process in self.processes:
            process.send_signal(signal.SIGTERM if first else signal.SIGKILL)


def wait_for(processes: Sequence[Popen], interrupts: Interrupts) -> int:
    """Wait for the processes. Return the exit code of the one that failed first, or the highest."""
    is_running, failed = True, []
    while is_running and not failed:
        time.sleep(0.05)
        is_running = None in [process.poll() for process in processes]
        failed = [p for p in processes if p.returncode not in (None, DONE, STOPPED)]
    if not failed:
        return max(process.returncode for process in processes)
    deadline = time.monotonic() + GRACE
    for process in processes:
        with suppress(TimeoutExpired):
            process.wait(max(0, deadline - time.monotonic()))
    # JAX aborts a process that has lost another one, whose end is the cause.
    first = min(failed, key=lambda process: process.returncode == -signal.SIGABRT)
    code = first.returncode
    if interrupts.count < 2:
        name = signal.Signals(-code).name if code < 0 else ""
        how = f"was ended by {name}" if name else f"ended with exit code {code}"
        hint = ". --resume auto continues from the last checkpoint, if there is one"
        ending = f"Process {processes.index(first)} {how}, so all are ended"
        print(ending if code == BAD_INPUT else ending + hint, file=sys.stderr)
    return code if code > 0 else STOPPED if interrupts.count else FAILED
