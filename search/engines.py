"""What starts the processes of a sweep: this machine, Ray on any of its machines, or SLURM, as an
array whose indices are the trials."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.devices.launcher import share_of_gpus
from utils import FAILED, PACKAGE, WINDOWS, UserError
from utils.files import atomic_write, inside

if TYPE_CHECKING:
    from search.sweep_folder import Sweep

SCRIPT = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array={numbers}%{workers}
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
cd {here}
exec {command} --trial "$SLURM_ARRAY_TASK_ID" {folder}
"""


def command_of(script: str | Path, trusted: bool) -> list[str]:
    """The command of the processes of a sweep, without the trial and the folder."""
    # -P: Python imports nothing from the working folder.
    program = ["-P", "-m", "rawtree", "sweep"] if PACKAGE else [str(Path(script))]
    return [sys.executable, *program, *(["--trust"] if trusted else [])]


def with_parent() -> dict[str, str]:
    """The environment of a process that ends with this one (sweep.py)."""
    return os.environ | {"SWEEP_PROCESS": str(os.getpid())}


def start_here(command: list[str], slot: int, workers: int) -> subprocess.Popen[bytes]:
    """A process in a session of its own, so that Ctrl-C reaches it only through this one."""
    return subprocess.Popen(
        command,
        env=with_parent() | share_of_gpus(slot, workers, option="workers:"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=not WINDOWS,
    )


class OnRay:
    """A process on one of the machines of a Ray cluster, with the methods of a local one."""

    def __init__(self, command: list[str], _slot: int, workers: int) -> None:
        import ray

        gpus = ray.cluster_resources().get("GPU", 0) // workers
        actor: Any = ray.remote(Remote)  # Ray changes the methods of a class
        self.ray: Any = ray  # its modules are attributes only at run time
        self.remote = actor.options(num_cpus=1, num_gpus=gpus).remote(command, os.getcwd())
        self.reply, self.returncode = self.remote.poll.remote(), None

    def poll(self) -> int | None:
        """The exit code, or None while the process runs, or waits for a machine."""
        ready, _ = self.ray.wait([self.reply], timeout=0)
        if ready and self.returncode is None:
            try:
                self.returncode = self.ray.get(self.reply)
            except self.ray.exceptions.RayError:  # its machine is lost
                self.returncode = FAILED
            if self.returncode is None:
                self.reply = self.remote.poll.remote()
        return self.returncode

    def send_signal(self, number: int) -> None:
        self.remote.send_signal.remote(number)

    def kill(self) -> None:
        self.ray.kill(self.remote)

    def wait(self) -> None:
        """A process ends with the actor that started it."""


class Remote:
    """The actor that starts a process and asks after it."""

    def __init__(self, command: list[str], folder: str) -> None:
        self.process = subprocess.Popen(command, cwd=folder, env=with_parent())

    def poll(self) -> int | None:
        return self.process.poll()

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)


def started_ray() -> type[OnRay]:
    """OnRay, connected to the cluster of RAY_ADDRESS, or else to one of this machine alone."""
    try:
        import ray
    except ImportError:
        fix = 'install it (pip install ray), or use "engine": "local"'
        raise UserError(f"engine: ray is not installed; {fix}") from None
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    return OnRay


def write_array(sweep: "Sweep", command: list[str]) -> Path:
    """Write the job script of the trials that are left, and return its path."""
    runs, _ = sweep.due()
    due = [trial.number for trial in sweep.trials if trial.run in runs]
    due += range(len(sweep.trials), sweep.spec.trials or 0) if sweep.may_propose() else []
    text = SCRIPT.format(
        name=sweep.folder.name,
        numbers=",".join(map(str, due)),
        workers=sweep.spec.workers,
        here=shlex.quote(os.getcwd()),
        command=shlex.join(command),
        folder=shlex.quote(str(sweep.folder)),
    )
    path = inside(sweep.folder, "array.sh")
    atomic_write(path, text.encode())
    return path
