"""What an environment tells of other processes, and waiting for them."""

import signal
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
TOLD_MPI = {"coordinator": "a:1", "num_processes": 2, "process_id": 1, "local_device_ids": 0}
OTHERS = (
    *MPI,
    "OMPI_MCA_orte_hnp_uri",
    "KUBERNETES_SERVICE_HOST",
    "JOB_COMPLETION_INDEX",
    "TPU_WORKER_HOSTNAMES",
)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, None),
        (JAX, {"coordinator": "10.0.0.1:1234", "num_processes": 4, "process_id": 3}),
        (SLURM, {}),
        (SLURM | {"SLURM_NTASKS": "1"}, None),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # in a batch script, but not under srun
        (MPI | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}, {}),
        (MPI | {"JAX_COORDINATOR_ADDRESS": "a:1"}, TOLD_MPI),
        (MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a notebook in a cluster
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, {}),
        ({"TPU_WORKER_HOSTNAMES": "a"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, {}),
    ],
)
def test_the_environment_tells_whether_there_are_others(monkeypatch, variables, told):
    for name in (*JAX, *SLURM, *OTHERS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert joining.said_by_environment() == told


def test_open_mpi_5_needs_to_be_told_where_process_0_is(monkeypatch):
    for name in (*JAX, *SLURM, *OTHERS):
        monkeypatch.delenv(name, raising=False)
    for name, value in MPI.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"add `-x JAX_COORDINATOR_ADDRESS=HOST:PORT` to mpirun"):
        joining.said_by_environment()


def test_one_may_train_alone_whatever_the_environment_says(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert joining.said_by_environment() == {}
    monkeypatch.setattr("jax.distributed.initialize", None)
    joining.join({"coordinator": "none"})


def test_numbers_that_are_none_are_told(monkeypatch):
    for name, value in (JAX | {"JAX_PROCESS_ID": "x"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="JAX_PROCESS_ID must be numbers"):
        joining.said_by_environment()


def test_a_second_process_0_is_told():
    with socket.socket(socket.AF_INET6) as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            UserError,
            match=rf"distributed: port {port} is in use here; another process may have process_id 0",
        ):
            joining.join({"coordinator": f"127.0.0.1:{port}", "num_processes": 2, "process_id": 0})


WAITING = """
import signal
from training.devices import joining
from training.runs.signals import end_at_signals

end_at_signals()
joining.PATIENCE = 0.2
joining.join({"coordinator": "127.0.0.1:9", "num_processes": 2, "process_id": 1})
"""


def test_waiting_for_others_is_told_and_can_be_ended():
    started = subprocess.Popen(
        [sys.executable, "-c", WAITING], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        said = started.stderr.readline()
        started.terminate()
        assert started.wait(timeout=20) == -signal.SIGTERM
    finally:
        started.kill()
    assert (
        said
        == "Still waiting for the other processes (coordinator_address 127.0.0.1:9, num_processes 2, process_id 1)\n"
    )
