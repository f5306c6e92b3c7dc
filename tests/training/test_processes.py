"""What several processes agree on, and the arrays that they put together."""

import json

import pytest

from tests.processes import finished, start_all
from training import processes


def test_one_process_alone_exchanges_nothing():
    assert processes.agreed([3, 4.5]) == [3, 4.5]
    assert processes.from_first(lambda: [1]) == [1]
    with pytest.raises(KeyError), processes.together():
        raise KeyError
    assert processes.lost(RuntimeError("Gloo")) is None


PROGRAM = """
import json
import jax, numpy as np
from training import processes
from training.devices import joining
from training.devices.options import MeshOptions
from training.devices.sharding import fetched
from training.devices.sharding import make_mesh
from training.devices.sharding import Plan
from utils import UserError

joining.join()
me, results = jax.process_index(), {}
results["agreed"] = processes.agreed([me, 0.5 + me])
results["wide"] = processes.agreed([2**33 + me, -1])
results["from_first"] = processes.from_first(lambda: {"by": me})
def attempt(do):
    try:
        do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
def fails(number):
    with processes.together():
        if me == number:
            raise UserError("a file is missing")
def refuses():
    raise UserError("no such run")
results["long"] = len(processes.from_first(lambda: "x" * 10_000))
values = ({"seed": 3, "data": me}, {"seed": 3})
results["alike"] = [attempt(lambda: processes.check_alike(value)) for value in values]
results["failed"] = [attempt(lambda: fails(1)), attempt(lambda: processes.from_first(refuses))]
whole = np.arange(48.0, dtype=np.float32).reshape(8, 6)
meshes = {"cut": (-1, 1, 1), "both": (2, 2, 1), "shared": (1, 2, 2), "same": (1, 1, 4)}
for name, sizes in meshes.items():
    plan = Plan(make_mesh(MeshOptions(*sizes)))
    rows, stacked = plan.rows(8), plan._replace(stacked=True)
    arrays = [plan.put(whole), plan.put(whole, plan.batch())]
    arrays += [plan.put_batch(whole[rows], 8), stacked.put_batch(whole.T[:, rows], 8).T]
    results[name] = [rows.tolist(), [bool((fetched(array) == whole).all()) for array in arrays]]
class Recorded:
    read = set()  # the indices of the examples that were read
    def __len__(self):
        return 36
    def __getitem__(self, i):
        self.read.add(i)
        return np.full(4, i / 36, np.float32), np.int32(i % 3)
from model.mlp import mlp
from training.fit import fit
from training.optimizers import adam
model, options = mlp((4,), 3, dims=(8,)), {"batch_size": 12, "epochs": 1, "eval_every": 0}
run = fit(model, Recorded(), optimizer=adam(), **options)
results["read"] = [sorted(Recorded.read), run.history[0]["train_loss"]]
print("RESULTS" + json.dumps(results))
"""


@pytest.mark.slow
def test_two_processes_agree_and_put_their_rows_together():
    outputs = finished(start_all(PROGRAM, processes=2, devices=2))
    first, second = (json.loads(out.split("RESULTS")[1]) for out, _ in outputs)
    assert first["wide"] == second["wide"] == [2**33, -1]
    assert first["agreed"] == second["agreed"] == [0, 0.5]
    assert first["from_first"] == second["from_first"] == {"by": 0}
    assert first["long"] == second["long"] == 10_000
    assert first["alike"][0].startswith("OtherProcessFailed: process 1 failed")
    assert first["alike"][1] is second["alike"][1] is None
    assert second["alike"][0].startswith(
        "UserError: data: is 1 in process 1, but different in process 0; processes that"
    )
    other = "OtherProcessFailed: process {} failed and has printed the reason; this one ends too"
    assert first["failed"] == [other.format(1), "UserError: no such run"]
    assert second["failed"] == ["UserError: a file is missing", other.format(0)]
    halves, everything = (list(range(4)), list(range(4, 8))), (list(range(8)), list(range(8)))
    rows = {"cut": halves, "both": halves, "shared": halves, "same": everything}
    for name, expected in rows.items():
        assert (first[name][0], second[name][0]) == expected, name
        assert first[name][1] == second[name][1] == [True] * 4, name
    (read_by_first, loss), (read_by_second, other_loss) = first["read"], second["read"]
    assert loss == other_loss
    # Both read the first and the last example for the fingerprint; the others are read only once.
    assert set(read_by_first) & set(read_by_second) <= {0, 35}
    assert set(read_by_first) | set(read_by_second) == set(range(36))
    assert abs(len(read_by_first) - len(read_by_second)) <= 2
