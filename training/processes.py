"""Several processes that train one run, by JAX's own runtime: who is here, what all of them agree on, and how they stop.

Each runs the same program on the same numbers, so what it decides by its clock, its disk or its signals is decided by process 0
and told to the others; `agreed` is the one way to do so. With one process all of it is free.
"""

import hashlib
import json
import os
import signal
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np

from training.device_options import DistributedOptions
from training.stop import end_at_signals, leave_to_jax
from utils import RunError, UserError, first_line

HEARTBEAT = 20  # seconds of silence after which a process counts as lost; JAX's own 100 are long to wait for nothing
PATIENCE = 10  # seconds after which it is told that the others are waited for
LETTER = 4096  # bytes of what is told at once: few lengths, so that few programs are compiled

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
    told = {} if told.get("coordinator") == "auto" else {k: v for k, v in told.items() if v is not None}
    arguments = {"coordinator_address" if k == "coordinator" else k: v for k, v in told.items()}
    # The sanest of JAX's ways when one is lost: with jax_enable_recoverability the others would go on waiting for it.
    times = {"heartbeat_timeout_seconds": HEARTBEAT, "shutdown_timeout_seconds": 3 * HEARTBEAT}
    if "coordinator" in told and "SLURM_LOCALID" not in os.environ:  # which tells JAX the device of this process besides
        times["cluster_detection_method"] = "deactivate"
    try:
        with waiting_can_be_ended(arguments):
            jax.distributed.initialize(**arguments, **times)
    except (RuntimeError, ValueError) as error:  # nobody answers there, or nothing tells who is there
        raise RunError(f"distributed: the other processes could not be joined: {first_line(error)}") from error
    if several():
        leave_to_jax()
    else:
        end_at_signals()


@contextmanager
def waiting_can_be_ended(arguments):
    """JAX waits up to five minutes for the others, and in C++, where no handler of Python's would run; so signals end it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    who = ", ".join(f"{name} {value}" for name, value in arguments.items()) or "as the environment says"
    told = threading.Timer(
        PATIENCE, print, [f"Still waiting for the other processes ({who})"], {"file": sys.stderr, "flush": True}
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
    there = {count: names for count, names in SIGNS.items() if all(name in environment for name in names)}
    counted = any(environment.get(count, "1") not in ("", "1") for count in there)
    in_job = "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment
    on_pod = "," in environment.get("TPU_WORKER_HOSTNAMES", "")
    return {} if counted or in_job or on_pod else None


def said_by_open_mpi(environment):
    """What Open MPI 5 tells, which is not where process 0 is, so that JAX finds nothing."""
    size, rank, local = (environment.get(f"OMPI_COMM_WORLD_{name}") for name in ("SIZE", "RANK", "LOCAL_RANK"))
    if size == "1" or None in (rank, local):
        return None
    if "JAX_COORDINATOR_ADDRESS" not in environment:
        raise UserError("Open MPI 5 does not tell where process 0 is: add `-x JAX_COORDINATOR_ADDRESS=HOST:PORT` to mpirun")
    where = environment["JAX_COORDINATOR_ADDRESS"]
    return {"coordinator": where, "num_processes": int(size), "process_id": int(rank), "local_device_ids": int(local)}


def several():
    """Whether there are others."""
    return jax.process_count() > 1


def is_first():
    """Whether this process is the one that logs and writes."""
    return jax.process_index() == 0


def agreed(numbers):
    """A list of numbers as process 0 has them; all must call this at the same place."""
    if not several():
        return numbers
    from jax.experimental.multihost_utils import broadcast_one_to_all

    return broadcast_one_to_all(np.asarray(numbers)).tolist()


def from_first(make):
    """What `make` answers in process 0, as JSON has it, in every process; and so with its mistake."""
    if not several():
        return make()
    from jax.experimental.multihost_utils import broadcast_one_to_all

    written, failure = np.zeros(0, np.uint8), None
    if is_first():
        try:
            text = json.dumps({"answer": make()})
        except (UserError, RunError) as error:
            failure, text = error, json.dumps({type(error).__name__: first_line(error)})
        written = np.frombuffer(text.encode(), np.uint8)
    [length] = agreed([len(written)])
    letter = np.zeros(-(-length // LETTER) * LETTER, np.uint8)
    letter[: len(written)] = written
    told = json.loads(bytes(broadcast_one_to_all(letter)).rstrip(b"\0"))
    if "answer" not in told:
        raise failure or OfOthers(0)
    return told["answer"]


def check_alike(mine):
    """Refuse to train together with a process 0 that goes by something else; `mine` is {name: what JSON holds}."""
    if not several():
        return
    mine = {name: json.dumps(value, sort_keys=True, default=str) for name, value in mine.items()}
    digests = {name: hashlib.sha256(value.encode()).hexdigest()[:16] for name, value in mine.items()}
    first = from_first(lambda: digests)
    wrong = [name for name in {**first, **digests} if first.get(name) != digests.get(name)]
    with together():
        if wrong:
            found = mine.get(wrong[0], "nothing")[:200]
            raise UserError(
                f"{wrong[0]}: is {found} in process {jax.process_index()}, and something else in process 0; processes that train "
                "together need the same config, data and code (to train each by itself, say distributed.coordinator=none)"
            )


class OfOthers(RunError):
    """Another process failed, and has told why."""

    def __init__(self, number):
        super().__init__(f"process {number} failed, and has told why; so this one ends as well")


@contextmanager
def temporary_folder(prefix, base=None):
    """A folder that is gone afterwards, the same for all; `base` is where all of them can see it."""
    if not is_first():
        yield from_first(None)
        return
    if base:
        Path(base).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=base) as folder:
        yield from_first(lambda: folder)


@contextmanager
def together():
    """What each process does by itself, but none goes on from alone: where one fails, all do."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    if several():
        from jax.experimental.multihost_utils import process_allgather

        failed = np.flatnonzero(process_allgather(np.int32(failure is not None)))
        if failure is None and failed.size:
            raise OfOthers(failed[0])
    if failure is not None:
        raise failure


class Stopping:
    """Whether all processes are to stop now, once any has had a signal: JAX finds the next poll that all of them come to."""

    def __init__(self):
        self.polls = 0

    def due(self):
        """Whether this is the poll to stop at; all must call it equally often."""
        from jax.experimental.multihost_utils import reached_preemption_sync_point

        self.polls += 1  # it waits for this very number, so it must grow by one
        return reached_preemption_sync_point(self.polls)


def lost(error):
    """What to say of an error that tells of a lost process, else None."""
    kinds = ("Gloo", "UNAVAILABLE", "DEADLINE_EXCEEDED", "heartbeat", "coordination", "NCCL", "Barrier", "preempted")
    if not several() or isinstance(error, UserError) or not any(kind in str(error) for kind in kinds):
        return None
    return (
        f"Process {jax.process_index()} of {jax.process_count()} has lost another one, or the way to it: {first_line(error)}\n"
        "It cannot go on alone; start all of them anew with --resume auto, which goes on from the last checkpoint"
    )
