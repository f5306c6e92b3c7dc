"""A run may be resumed on other devices with another sharding: started on four devices and resumed
on one and on two, it gives the numbers of a run on one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.runs import json_lines

pytestmark = pytest.mark.contract

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import jax, numpy as np
folder, name, stop, mesh = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
jax.config.update("jax_enable_x64", name != "vit")
from model.mlp import mlp
from model.resnet import resnet
from model.vit import vit
from training.fit import fit
from training.optimizers import adam
from training.preprocess import to_unit

class Stop:
    def on_steps(self, run):
        if run.step == stop:
            os.kill(os.getpid(), signal.SIGTERM)

rng = np.random.default_rng(0)
x = rng.integers(0, 256, (150, 8, 8, 1)).astype(np.uint8)
y = rng.integers(0, 3, 150).astype(np.int32)
models = {
    "mlp": mlp((8, 8, 1), 3, dims=(64,), dropout=0.1),
    "resnet": resnet((8, 8, 1), 3, widths=(16,), depth=1),
    "vit": vit((8, 8, 1), 3, dim=32, depth=1, heads=2, dropout=0.1),
}
settings = {"preprocess": [to_unit], "optimizer": adam(lr=0.001), "batch_size": 16, "epochs": 2}
settings |= {"log": {"every_steps": 1}, "callbacks": [Stop()]}
settings |= {"mesh": mesh, "folder": folder / name, "resume": True}
fit(models[name], (x, y), (x[:77], y[:77]), **settings)
"""


def train(folder, model, devices, stop, mesh):
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # most of the time is compilation
    command = [sys.executable, "-c", PROGRAM, str(folder), model, str(stop), json.dumps(mesh)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def losses(folder):
    """{model: the losses in each row of its metrics.jsonl}"""
    losses = {}
    for path in sorted(folder.glob("*/metrics.jsonl")):
        rows = json_lines(path)
        losses[path.parent.name] = [[v for k, v in row.items() if "loss" in k] for row in rows]
    return losses


@pytest.mark.torture  # tests/test_several_processes.py has one such case
@pytest.mark.parametrize(
    ("model", "tolerance"),
    [("mlp", 1e-9), ("resnet", 1e-9), ("vit", 1e-5)],  # vit is in float32
)
def test_a_run_started_on_four_devices_resumes_on_one_and_on_two(tmp_path, model, tolerance):
    train(tmp_path / "one", model, devices=1, stop=-1, mesh={})
    second = {"tensor": 2} if model == "vit" else {"fsdp": 2}
    for devices, stop, mesh in ((4, 7, {"fsdp": -1}), (1, 14, {}), (2, -1, second)):
        train(tmp_path / "several", model, devices, stop, mesh)
    one, several = losses(tmp_path / "one"), losses(tmp_path / "several")
    assert one.keys() == several.keys()
    for name, rows in one.items():
        assert [len(row) for row in rows] == [1] * 10 + [2] + [1] * 10 + [2]
        expected, actual = np.concatenate(rows), np.concatenate(several[name])
        np.testing.assert_allclose(actual, expected, rtol=tolerance, err_msg=name)
