"""What several processes tell each other and put together."""

import json

import pytest

from tests.processes import finished, start_all
from training.devices import processes


def test_alone_nothing_is_exchanged():
    assert processes.agreed([3, 4.5]) == [3, 4.5]
    assert processes.from_first(lambda: [1]) == [1]
    with pytest.raises(KeyError), processes.together():
        raise KeyError
    assert processes.lost(RuntimeError("Gloo")) is None


PROGRAM = """
import json
import jax, numpy as np
from training.devices import joining, processes
from training.devices.options import MeshOptions
from training.devices.placing import fetched, put, put_rows, rows_of_process
from training.devices.mesh import make_mesh, replicated, sharded
from utils import UserError

joining.join()
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
    first, second = (
        json.loads(out.split("FOUND")[1])
        for out, _ in finished(start_all(PROGRAM, processes=2, devices=2))
    )
    assert first["agreed"] == second["agreed"] == [0, 0.5]
    assert first["told"] == second["told"] == {"by": 0}
    assert first["long"] == second["long"] == 10_000
    assert (
        first["alike"][0].startswith("OfOthers: process 1 failed")
        and first["alike"][1] is second["alike"][1] is None
    )
    assert second["alike"][0].startswith(
        "UserError: data: is 1 in process 1, and something else in process 0; processes that"
    )
    other = "OfOthers: process {} failed, and has told why; so this one ends as well"
    assert first["failed"] == [other.format(1), "UserError: no such run"]
    assert second["failed"] == ["UserError: a file is missing", other.format(0)]
    low, high, all_rows = list(range(4)), list(range(4, 8)), list(range(8))
    wanted = {
        "cut": (low, high),
        "both": (low, high),
        "shared": (low, high),
        "same": (all_rows, all_rows),
    }
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
