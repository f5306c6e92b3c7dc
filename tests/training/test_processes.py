"""What an environment tells of other processes, and what is said where one is lost."""

import json
import signal
import subprocess
import sys

import pytest

from tests.processes import ROOT, finished, start_all
from training import processes
from training.launcher import describe, share_of_gpus
from utils import UserError

JAX = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
SLURM = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
TOLD_MPI = {"coordinator": "a:1", "num_processes": 2, "process_id": 1, "local_device_ids": 0}
OTHERS = (*MPI, "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "TPU_WORKER_HOSTNAMES")


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
    assert processes.said_by_environment() == told


def test_open_mpi_5_needs_to_be_told_where_process_0_is(monkeypatch):
    for name in (*JAX, *SLURM, *OTHERS):
        monkeypatch.delenv(name, raising=False)
    for name, value in MPI.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"add `-x JAX_COORDINATOR_ADDRESS=HOST:PORT` to mpirun"):
        processes.said_by_environment()


def test_one_may_train_alone_whatever_the_environment_says(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert processes.said_by_environment() == {}
    monkeypatch.setattr("jax.distributed.initialize", None)
    processes.join({"coordinator": "none"})


def test_numbers_that_are_none_are_told(monkeypatch):
    for name, value in (JAX | {"JAX_PROCESS_ID": "x"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="JAX_PROCESS_ID must be numbers"):
        processes.said_by_environment()


WAITING = """
import signal
from training import processes
from training.stop import end_at_signals

end_at_signals()
processes.PATIENCE = 0.2
processes.join({"coordinator": "127.0.0.1:9", "num_processes": 2, "process_id": 1})
"""


def test_waiting_for_others_is_told_and_can_be_ended():
    started = subprocess.Popen([sys.executable, "-c", WAITING], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        said = started.stderr.readline()
        started.terminate()
        assert started.wait(timeout=20) == -signal.SIGTERM
    finally:
        started.kill()
    assert said == "Still waiting for the other processes (coordinator_address 127.0.0.1:9, num_processes 2, process_id 1)\n"


def test_alone_nothing_is_exchanged():
    assert processes.agreed([3, 4.5]) == [3, 4.5]
    assert processes.from_first(lambda: [1]) == [1]
    with pytest.raises(KeyError), processes.together():
        raise KeyError
    assert processes.lost(RuntimeError("Gloo")) is None


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (-9, "Process 1 was ended by SIGKILL, so all are ended. --resume auto goes on from the last checkpoint, if there is one"),
        (2, "Process 1 ended with exit code 2, so all are ended"),
        (None, "Process 1 did not end within 90 seconds of the others, so all are ended. --resume auto goes on"),
    ],
)
def test_the_launcher_says_what_became_of_a_process(code, told):
    assert describe(1, code).startswith(told)


def test_the_gpus_of_a_machine_are_shared_out(monkeypatch, tmp_path):
    for i in range(4):
        (tmp_path / f"nvidia{i}").touch()
    (tmp_path / "nvidiactl").touch()
    for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    assert [share_of_gpus(i, 2, tmp_path)["CUDA_VISIBLE_DEVICES"] for i in range(2)] == ["0,1", "2,3"]
    with pytest.raises(UserError, match=r"--processes 8: there are 4 GPUs; take so many at most, or set JAX_PLATFORMS=cpu"):
        share_of_gpus(0, 8, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [share_of_gpus(i, 2, tmp_path)["CUDA_VISIBLE_DEVICES"] for i in range(2)] == ["5", "7"]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert share_of_gpus(0, 8, tmp_path) == {}


PROGRAM = """
import json
import jax, numpy as np
from training import processes
from training.device_options import MeshOptions
from training.placing import fetched, put, put_rows, rows_of_process
from training.sharding import make_mesh, replicated, sharded
from utils import UserError

processes.join()
me, found = jax.process_index(), {}
found["agreed"] = processes.agreed([me, 0.5 + me])
found["told"] = processes.from_first(lambda: {"by": me})
def attempt(do):
    try:
        do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
def fails(who):
    with processes.together():
        if me == who:
            raise UserError("a file is missing")
def refuses():
    raise UserError("no such run")
found["long"] = len(processes.from_first(lambda: "x" * 10_000))
found["alike"] = [attempt(lambda: processes.check_alike(what)) for what in ({"seed": 3, "data": me}, {"seed": 3})]
found["failed"] = [attempt(lambda: fails(1)), attempt(lambda: processes.from_first(refuses))]
whole = np.arange(48.0, dtype=np.float32).reshape(8, 6)
for name, sizes in {"cut": (-1, 1, 1), "both": (2, 2, 1), "shared": (1, 2, 2), "same": (1, 1, 4)}.items():
    mesh = make_mesh(MeshOptions(*sizes))
    rows = rows_of_process(mesh, 8)
    arrays = [put(whole, replicated(mesh)), put(whole, sharded(mesh)), put_rows(whole[rows], mesh, 8)]
    arrays.append(put_rows(whole.T[:, rows], mesh, 8, axis=1).T)
    found[name] = [rows.tolist(), [bool((fetched(array) == whole).all()) for array in arrays]]
class Noted:
    seen = set()
    def __len__(self):
        return 36
    def __getitem__(self, i):
        self.seen.add(i)
        return np.full(4, i / 36, np.float32), np.int32(i % 3)
from model.mlp import mlp
from training.fit import fit
from training.optimizers import adam
run = fit(mlp((4,), 3, dims=(8,)), Noted(), optimizer=adam(), batch_size=12, epochs=1, eval_every=0)
found["read"] = [sorted(Noted.seen), run.history[0]["train_loss"]]
print("FOUND" + json.dumps(found))
"""


def test_two_processes_agree_and_put_their_rows_together():
    first, second = (json.loads(out.split("FOUND")[1]) for out, _ in finished(start_all(PROGRAM, processes=2, devices=2)))
    assert first["agreed"] == second["agreed"] == [0, 0.5]
    assert first["told"] == second["told"] == {"by": 0}
    assert first["long"] == second["long"] == 10_000
    assert first["alike"][0].startswith("OfOthers: process 1 failed") and first["alike"][1] is second["alike"][1] is None
    assert second["alike"][0].startswith("UserError: data: is 1 in process 1, and something else in process 0; processes that")
    other = "OfOthers: process {} failed, and has told why; so this one ends as well"
    assert first["failed"] == [other.format(1), "UserError: no such run"]
    assert second["failed"] == ["UserError: a file is missing", other.format(0)]
    low, high, all_rows = list(range(4)), list(range(4, 8)), list(range(8))
    wanted = {"cut": (low, high), "both": (low, high), "shared": (low, high), "same": (all_rows, all_rows)}
    for name, (mine, theirs) in wanted.items():
        assert (first[name][0], second[name][0]) == (mine, theirs), name
        assert first[name][1] == second[name][1] == [True] * 4, name
    (mine, loss), (theirs, same) = first["read"], second["read"]
    assert loss == same
    assert set(mine) & set(theirs) <= {
        0,
        35,
    }  # which tell data from other data; else each its own
    assert set(mine) | set(theirs) == set(range(36))
    assert abs(len(mine) - len(theirs)) <= 2
