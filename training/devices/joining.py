"""How the processes that train one run find each other: by the config, or by what the environment says of others."""

import errno
import os
import signal
import socket
import sys
import threading
from contextlib import contextmanager

import jax

from training.devices.options import DistributedOptions
from training.devices.processes import several
from training.runs.signals import end_at_signals, leave_to_jax
from utils import RunError, UserError, first_line

HEARTBEAT = 20  # seconds of silence after which a process counts as lost; JAX's own 100 are long to wait for nothing
PATIENCE = 10  # seconds after which it is told that the others are waited for

# What an environment says where it starts several processes, by those that JAX knows.
SIGNS = {
    "SLURM_NTASKS": ("SLURM_STEP_NODELIST", "SLURM_PROCID"),
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "JAX_NUM_PROCESSES": ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID"),
}


def join(keys=None):
    """Join the other processes, where the keys of the config or the environment tell of any, before JAX looks at its devices.
    What is wrong with the keys is told by who builds the config."""
    try:
        options = DistributedOptions(**keys or {})
    except (TypeError, ValueError):
        return
    told = said_by_environment() if options.coordinator is None else vars(options)
    if told is None or options.coordinator == "none":
        return
    told = (
        {}
        if told.get("coordinator") == "auto"
        else {k: v for k, v in told.items() if v is not None}
    )
    arguments = {"coordinator_address" if k == "coordinator" else k: v for k, v in told.items()}
    # The sanest of JAX's ways when one is lost: with jax_enable_recoverability the others would go on waiting for it.
    times = {"heartbeat_timeout_seconds": HEARTBEAT, "shutdown_timeout_seconds": 3 * HEARTBEAT}
    if (
        "coordinator" in told and "SLURM_LOCALID" not in os.environ
    ):  # which tells JAX the device of this process besides
        times["cluster_detection_method"] = "deactivate"
    if told.get("process_id") == 0 and "coordinator" in told:
        check_free(int(told["coordinator"].rpartition(":")[2]))
    try:
        with waiting_can_be_ended(arguments):
            jax.distributed.initialize(**arguments, **times)
    except (
        RuntimeError,
        ValueError,
    ) as error:  # nobody answers there, or nothing tells who is there
        raise RunError(
            f"distributed: the other processes could not be joined, or are nowhere told of: {first_line(error)}"
        ) from error
    if several():
        leave_to_jax()
    else:
        end_at_signals()


def check_free(port):
    """Refuse a port that another process listens at, as one would that was told to be process 0 as well."""
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as here:
        try:
            here.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            here.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(
                    f"distributed: port {port} is in use here; another process may have process_id 0 too"
                ) from error


@contextmanager
def waiting_can_be_ended(arguments):
    """JAX waits up to five minutes for the others, and in C++, where no handler of Python's would run; so signals end it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    who = (
        ", ".join(f"{name} {value}" for name, value in arguments.items())
        or "as the environment says"
    )
    told = threading.Timer(
        PATIENCE,
        print,
        [f"Still waiting for the other processes ({who})"],
        {"file": sys.stderr, "flush": True},
    )
    told.daemon = True
    told.start()
    try:
        yield
    finally:
        told.cancel()


def said_by_environment():
    """What the environment tells of the other processes: {} where JAX reads it by itself, None where there are none."""
    environment = os.environ
    if "JAX_COORDINATOR_ADDRESS" in environment and "JAX_NUM_PROCESSES" in environment:
        numbers = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
        try:
            found = {key: int(environment[name]) for key, name in numbers.items()}
        except (KeyError, ValueError):
            raise UserError(
                "JAX_NUM_PROCESSES and JAX_PROCESS_ID must be numbers, beside JAX_COORDINATOR_ADDRESS; set all three or none"
            ) from None
        return found | {"coordinator": environment["JAX_COORDINATOR_ADDRESS"]}
    if "OMPI_COMM_WORLD_SIZE" in environment and "OMPI_MCA_orte_hnp_uri" not in environment:
        return said_by_open_mpi(environment)
    there = {
        count: names for count, names in SIGNS.items() if all(name in environment for name in names)
    }
    counted = any(environment.get(count, "1") not in ("", "1") for count in there)
    in_job = "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment
    on_pod = "," in environment.get("TPU_WORKER_HOSTNAMES", "")
    return {} if counted or in_job or on_pod else None


def said_by_open_mpi(environment):
    """What Open MPI 5 tells, which is not where process 0 is, so that JAX finds nothing."""
    size, rank, local = (
        environment.get(f"OMPI_COMM_WORLD_{name}") for name in ("SIZE", "RANK", "LOCAL_RANK")
    )
    if size == "1" or None in (rank, local):
        return None
    if "JAX_COORDINATOR_ADDRESS" not in environment:
        raise UserError(
            "Open MPI 5 does not tell where process 0 is: add `-x JAX_COORDINATOR_ADDRESS=HOST:PORT` to mpirun"
        )
    where = environment["JAX_COORDINATOR_ADDRESS"]
    return {
        "coordinator": where,
        "num_processes": int(size),
        "process_id": int(rank),
        "local_device_ids": int(local),
    }
