"""One device is a mesh of one: the same run on four simulated devices gives the same numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, sys
import jax, numpy as np
jax.config.update("jax_enable_x64", sys.argv[1] == "float64")
from model.convnext import convnext
from model.mlp import mlp
from model.resnet import resnet
from model.vit import vit
from training.fit import fit
from training.optimizers import adam
from training.preprocess import to_unit

rng = np.random.default_rng(0)
x, y = rng.integers(0, 256, (150, 8, 8, 1)).astype(np.uint8), rng.integers(0, 3, 150).astype(np.int32)
models = {
    "convnext": convnext((8, 8, 1), 3, dims=(4,)),
    "resnet": resnet((8, 8, 1), 3, widths=(4,), depth=1),
    "vit": vit((8, 8, 1), 3, dim=8, depth=1, heads=2, dropout=0.1),
}
def losses(model, **settings):
    settings |= {"preprocess": [to_unit], "optimizer": adam(lr=0.001), "batch_size": 16, "epochs": 2, "log": {"every_steps": 1}}
    run = fit(model, (x, y), (x[:77], y[:77]), **settings)
    program = run.runner.program.compiled.as_text()
    assert ("all-reduce" in program) == (jax.device_count() > 1), "batches are not sharded"
    return [value for row in run.history for name, value in row.items() if "loss" in name]
found = {name: losses(model) for name, model in models.items()}
if sys.argv[1] == "float64":
    small = mlp((8, 8, 1), 3, dims=(4,), dropout=0.1)
    found["streamed"] = losses(small, device_budget_mb=0)
    found["accumulated"] = losses(mlp((8, 8, 1), 3, dims=(4,)), accumulate=2)
    found["replicas"] = losses(small, replicas=2)
print("RESULT" + json.dumps({"devices": jax.device_count(), "losses": found}))
"""


def losses(devices, precision):
    flags = f"--xla_force_host_platform_device_count={devices}"
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, precision],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},  # most of the time is compilation
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.split("RESULT")[1])
    assert result["devices"] == devices
    return result["losses"]


@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-9), ("float32", 1e-5)])
def test_four_devices_give_the_losses_of_one(precision, tolerance):
    """Twenty steps of Adam: two epochs of ten."""
    one, four = losses(1, precision), losses(4, precision)
    for name in one:
        np.testing.assert_allclose(four[name], one[name], rtol=tolerance, err_msg=name)


def test_a_batch_that_does_not_divide_over_the_devices_is_told():
    program = PROGRAM.replace('"batch_size": 16', '"batch_size": 18')
    assert program != PROGRAM
    run = subprocess.run(
        [sys.executable, "-c", program, "float32"],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "18 examples do not divide over 4 devices; take a multiple, such as 20" in run.stderr
