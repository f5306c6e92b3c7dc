"""How the processes that train one run find each other: by the config, or by the environment."""

import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from training.devices.options import DistributedOptions
from training.devices.signals import end_at_signals, leave_to_jax
from training.processes import several
from utils import STOPPED, RunError, UserError, first_line

HEARTBEAT = 20  # seconds of silence after which a process counts as lost; JAX waits 100
PATIENCE = 10  # seconds after which a message reports that this process waits for the others

# The variable with the number of processes, for each launcher that JAX detects by itself, and the
# other variables that the launcher sets.
DETECTED_BY_JAX = {
    "SLURM_NTASKS": ("SLURM_STEP_NODELIST", "SLURM_PROCID"),
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "JAX_NUM_PROCESSES": ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID"),
}


def join(distributed: dict | None = None) -> None:
    """Join the other processes, if the config's key `distributed` or the environment names any.
    This must happen before JAX looks at its devices. Mistakes in the key are reported later, when
    the config is built."""
    try:
        options = DistributedOptions(**distributed or {})
    except (TypeError, ValueError):
        return
    coordinator = options.coordinator
    numbers = {"num_processes": options.num_processes, "process_id": options.process_id}
    arguments: dict[str, Any] | None = {"coordinator_address": coordinator, **numbers}
    if coordinator == "auto":
        arguments = {}
    elif coordinator is None:
        arguments = from_environment()
    if arguments is None or coordinator == "none":
        return
    # With these, all processes end soon after one is lost; with jax_enable_recoverability the
    # others would wait for it forever.
    extra: dict[str, Any] = {
        "heartbeat_timeout_seconds": HEARTBEAT,
        "shutdown_timeout_seconds": 3 * HEARTBEAT,
    }
    address = arguments.get("coordinator_address")
    # Under SLURM, detection stays on, since it also gives JAX the device of this process.
    if address and "SLURM_LOCALID" not in os.environ:
        extra["cluster_detection_method"] = "deactivate"
    if address and arguments["process_id"] == 0:
        check_free(int(address.rpartition(":")[2]))
    try:
        with interruptible_wait(arguments):
            jax.distributed.initialize(**arguments, **extra)
    except (RuntimeError, ValueError) as error:
        why = f"the other processes cannot be found or joined: {first_line(error)}"
        raise RunError(f"distributed: {why}") from error
    if several():
        leave_to_jax()
    else:
        end_at_signals()


def check_free(port: int) -> None:
    """Raise if another process listens on the port, as a second one with process_id 0 would."""
    try:  # the kernel may have no IPv6, although Python has
        with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            fix = "another process may have process_id 0 too"
            why = f"port {port} is in use on this machine; {fix}"
            raise UserError(f"distributed: {why}") from error


@contextmanager
def interruptible_wait(arguments: dict[str, Any]) -> Iterator[None]:
    """Let signals end the process while JAX waits for the others, for up to five minutes. JAX waits
    in C++, where no signal handler written in Python would run, so a thread ends the process."""
    arrived, sender = socket.socketpair()
    sender.setblocking(False)
    before = signal.set_wakeup_fd(sender.fileno())

    def end_at_one() -> None:
        if arrived.recv(1):  # nothing, once the sender is closed
            os.write(2, b"Interrupted; nothing was saved\n")
            os._exit(STOPPED)

    threading.Thread(target=end_at_one, daemon=True).start()
    given = ", ".join(f"{name} {value}" for name, value in arguments.items())
    message = f"Still waiting for the other processes ({given or 'found in the environment'})"
    timer = threading.Timer(PATIENCE, print, [message], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.set_wakeup_fd(before)
        sender.close()


def from_environment() -> dict[str, Any] | None:
    """The arguments of jax.distributed.initialize from the environment. {} if JAX finds them by
    itself, None if there are no other processes."""
    environment = os.environ
    if "JAX_COORDINATOR_ADDRESS" in environment and "JAX_NUM_PROCESSES" in environment:
        address = environment["JAX_COORDINATOR_ADDRESS"]
        try:
            names = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
            numbers = {key: int(environment[name]) for key, name in names.items()}
            DistributedOptions(address, **numbers)
        except (KeyError, ValueError) as error:
            names = "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
            raise UserError(f"{names}: {error}; set all three, or none of them") from None
        return {"coordinator_address": address, **numbers}
    if "OMPI_COMM_WORLD_SIZE" in environment and "OMPI_MCA_orte_hnp_uri" not in environment:
        return from_open_mpi_5(environment)
    complete = [n for n, others in DETECTED_BY_JAX.items() if environment.keys() >= {n, *others}]
    launched = any(environment[name] not in ("", "1") for name in complete)
    in_job = "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment
    on_pod = "," in environment.get("TPU_WORKER_HOSTNAMES", "")
    return {} if launched or in_job or on_pod else None


def from_open_mpi_5(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """`from_environment` for Open MPI 5, which JAX does not detect: process 0's host is unknown."""
    if environment["OMPI_COMM_WORLD_SIZE"] == "1":
        return None
    names = {
        "num_processes": "OMPI_COMM_WORLD_SIZE",
        "process_id": "OMPI_COMM_WORLD_RANK",
        "local_device_ids": "OMPI_COMM_WORLD_LOCAL_RANK",
    }
    if not environment.keys() >= {*names.values()}:
        return None
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    if address is None:
        fix = "add `-x JAX_COORDINATOR_ADDRESS=HOST:PORT` to mpirun"
        raise UserError(f"Open MPI 5 does not say where process 0 is: {fix}")
    numbers = {key: int(environment[name]) for key, name in names.items()}
    return {"coordinator_address": address, **numbers}
