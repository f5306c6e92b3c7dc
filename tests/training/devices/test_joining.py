"""How a process finds the other processes in its environment, and how it waits for them."""

import socket
import subprocess
import sys

import pytest

from tests.processes import ROOT
from training.devices import joining
from utils import UserError

JAX = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
MPI_ARGUMENTS = {
    "coordinator_address": "a:1",
    "num_processes": 2,
    "process_id": 1,
    "local_device_ids": 0,
}
CLEARED = (
    *JAX,
    *SLURM,
    *MPI,
    "OMPI_MCA_orte_hnp_uri",
    "KUBERNETES_SERVICE_HOST",
    "JOB_COMPLETION_INDEX",
    "TPU_WORKER_HOSTNAMES",
)


@pytest.fixture
def environment(monkeypatch):
    """Set the variables of an environment in which nothing else names other processes."""

    def set_variables(variables):
        for name in CLEARED:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.mark.parametrize(
    ("variables", "arguments"),
    [
        ({}, None),
        (JAX, {"coordinator_address": "10.0.0.1:1234", "num_processes": 4, "process_id": 3}),
        (SLURM, {}),
        (SLURM | {"SLURM_NTASKS": "1"}, None),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # a batch script without srun
        (MPI | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}, {}),
        (MPI | {"JAX_COORDINATOR_ADDRESS": "a:1"}, MPI_ARGUMENTS),
        (MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a notebook in a cluster
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, {}),
        ({"TPU_WORKER_HOSTNAMES": "a"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, {}),
    ],
)
def test_other_processes_are_found_in_the_environment(environment, variables, arguments):
    environment(variables)
    assert joining.from_environment() == arguments


def test_open_mpi_5_needs_the_address_of_process_0(environment):
    environment(MPI)
    with pytest.raises(UserError, match=r"add `-x JAX_COORDINATOR_ADDRESS=HOST:PORT` to mpirun"):
        joining.from_environment()


def test_coordinator_none_trains_alone_in_any_environment(environment, monkeypatch):
    environment(SLURM)
    assert joining.from_environment() == {}
    monkeypatch.setattr("jax.distributed.initialize", None)
    joining.join({"coordinator": "none"})


def test_variables_that_are_not_numbers_are_refused(environment):
    environment(JAX | {"JAX_PROCESS_ID": "x"})
    with pytest.raises(UserError, match=r"JAX_PROCESS_ID: invalid literal .* 'x'; set all three"):
        joining.from_environment()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "localhost"}, "must be address:port"),
        ({"JAX_PROCESS_ID": "4"}, "must be below num_processes, 4"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(environment, change, message):
    environment(JAX | change)
    with pytest.raises(UserError, match=message):
        joining.from_environment()


def test_a_second_process_0_is_refused():
    with socket.socket(socket.AF_INET6) as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        message = f"distributed: port {port} is in use on this machine; another process may have"
        with pytest.raises(UserError, match=message):
            joining.join({"coordinator": f"127.0.0.1:{port}", "num_processes": 2, "process_id": 0})


WAITING = """
import signal
from training.devices import joining
from training.devices.signals import end_at_signals

end_at_signals()
joining.PATIENCE = 0.2
joining.join({"coordinator": "127.0.0.1:9", "num_processes": 2, "process_id": 1})
"""


@pytest.mark.slow
def test_waiting_for_others_is_announced_and_a_signal_ends_it():
    started = subprocess.Popen(
        [sys.executable, "-c", WAITING], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        line = started.stderr.readline()
        started.terminate()
        assert started.wait(timeout=20) == 75
    finally:
        started.kill()
    given = "coordinator_address 127.0.0.1:9, num_processes 2, process_id 1"
    assert line == f"Still waiting for the other processes ({given})\n"
