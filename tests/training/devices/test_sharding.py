"""Where arrays live: rules and presets by hand, and the same run on eight simulated devices, however it is cut."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from model.convnext import convnext
from model.mlp import mlp
from model.resnet import resnet
from model.vit import vit
from training import optimizers
from training.devices.mesh import AXES, check_divides, make_mesh, mesh_shape
from training.devices.options import DistributedOptions, MeshOptions, check_sharding
from training.devices.sharding import Plan, shard_bytes
from training.trainer import first_state
from training.update import gradient_update
from utils import UserError, named_leaves

ROOT = Path(__file__).resolve().parents[3]


def shapes(model):
    return jax.eval_shape(model.init, jax.random.key(0))[0]


VIT = shapes(vit((8, 8, 1), 3, dim=64, depth=1, heads=4))


def cuts(params, rules=None, data=1, fsdp=1, tensor=1):
    return Plan(AbstractMesh((data, fsdp, tensor), AXES), rules).cuts(params)


@pytest.mark.parametrize(
    ("sizes", "count", "shape"),
    [
        ((-1, 1, 1), 1, (1, 1, 1)),
        ((-1, 1, 1), 8, (8, 1, 1)),
        ((-1, 4, 1), 8, (2, 4, 1)),
        ((-1, -1, 1), 8, (1, 8, 1)),  # one key is enough: the default of data gives way
        ((2, -1, 2), 8, (2, 2, 2)),
        ((-1, 1, -1), 8, (1, 1, 8)),
        ((2, 2, 1), 8, (2, 2, 1)),
        ((-1, 16, 1), 8, (1, 16, 1)),  # which the machine has not; make_mesh tells
    ],
)
def test_minus_one_is_what_the_other_axes_leave(sizes, count, shape):
    assert mesh_shape(MeshOptions(*sizes), count) == shape


def test_a_mesh_that_the_machine_cannot_have_is_told():
    with pytest.raises(
        UserError,
        match=r"mesh: data 1 x fsdp 64 x tensor 1 is 64 devices, and there (is|are) \d+ of ",
    ):
        make_mesh(MeshOptions(fsdp=64))
    with pytest.raises(
        UserError,
        match=r"mesh: 8 devices do not divide by data 1 x fsdp 3 x tensor 1, so there is no number",
    ):
        mesh_shape(MeshOptions(fsdp=3), 8)
    with pytest.raises(ValueError, match=r"fsdp: must be an integer of at least 1, or -1, got 0"):
        MeshOptions(fsdp=0)
    with pytest.raises(
        ValueError, match=r"fsdp: is -1, and so is tensor; only one of them can be -1"
    ):
        MeshOptions(fsdp=-1, tensor=-1)


def test_a_batch_divides_over_data_and_fsdp_alone():
    mesh = AbstractMesh((2, 3, 4), AXES)
    check_divides(12, mesh)
    with pytest.raises(
        UserError,
        match=r"loader\.batch_size: 16 examples do not divide over 6 devices; .* such as 18",
    ):
        check_divides(16, mesh)


def test_data_parallel_cuts_nothing():
    assert not any(any(cut) for cut in cuts(VIT, data=8).values())
    assert not any(any(cut) for cut in cuts(VIT, "data_parallel", data=2, fsdp=4).values())


def test_fsdp_cuts_the_largest_axis_that_divides():
    found = cuts(VIT, fsdp=8)
    assert found["blocks/0/expand/weight"] == (None, "fsdp")  # 64 x 256
    assert found["blocks/0/project/weight"] == ("fsdp", None)
    assert found["blocks/0/norm1/scale"] == (None,)  # small
    for model in (
        convnext((32, 32, 3), 10, dims=(48, 96)),
        resnet((32, 32, 3), 10),
        mlp((784,), 10, dims=(100, 60)),
    ):
        params = shapes(model)
        for name, cut in cuts(params, fsdp=4).items():
            shape = named_leaves(params)[name].shape
            able = [n for n in shape if n % 4 == 0]
            if np.prod(shape) > 1024 and able:
                assert [n for n, axis in zip(shape, cut, strict=True) if axis] == [max(able)], name
            else:
                assert not any(cut), name


def test_tensor_cuts_columns_then_rows():
    found = cuts(VIT, tensor=4)
    assert {name for name, cut in found.items() if any(cut)} == {
        *(
            f"blocks/0/attention/{part}/{leaf}"
            for part in ("query", "value")
            for leaf in ("weight", "bias")
        ),
        "blocks/0/attention/key/weight",
        "blocks/0/attention/out/weight",
        "blocks/0/expand/weight",
        "blocks/0/expand/bias",
        "blocks/0/project/weight",
    }
    assert (
        found["blocks/0/attention/query/weight"]
        == found["blocks/0/expand/weight"]
        == (None, "tensor")
    )
    assert (
        found["blocks/0/attention/out/weight"]
        == found["blocks/0/project/weight"]
        == ("tensor", None)
    )
    both = cuts(VIT, fsdp=2, tensor=4)
    assert both["blocks/0/expand/weight"] == ("fsdp", "tensor") and both[
        "blocks/0/project/weight"
    ] == ("tensor", "fsdp")
    layers = cuts(shapes(mlp((64,), 10, dims=(128, 64, 128))), tensor=2)
    assert [layers[f"hidden/{i}/weight"] for i in range(3)] == [
        (None, "tensor"),
        ("tensor", None),
        (None, "tensor"),
    ]
    assert cuts(shapes(convnext((8, 8, 1), 3, dims=(32,))), tensor=2)["blocks/0/expand/weight"] == (
        None,
        None,
        None,
        "tensor",
    )


def test_rules_come_before_the_preset_and_may_leave_a_leaf_whole():
    found = cuts(VIT, [["blocks/0/expand/weight", ["fsdp"]], [".*/project/.*", []], "fsdp"], fsdp=4)
    assert found["blocks/0/expand/weight"] == ("fsdp",)
    assert found["blocks/0/project/weight"] == ()
    assert found["blocks/0/attention/out/weight"] == ("fsdp", None)
    alone = cuts(VIT, [["head/weight", ["fsdp", None]]], fsdp=4)
    assert [name for name, cut in alone.items() if any(cut)] == ["head/weight"]


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        (
            [["hed/.*", ["fsdp"]]],
            r"sharding: the rule 'hed/\.\*' matches no name; there are: blocks/0/",
        ),
        (
            [["head/weight", ["fdsp"]]],
            r"sharding: head/weight \(64, 3\): the mesh has no axis 'fdsp'; did you mean 'fsdp'",
        ),
        (
            [["head/weight", [None, "fsdp"]]],
            r"sharding: head/weight \(64, 3\): its axis 1 of 3 does not divide over mesh.fsdp.* 4",
        ),
        (
            [["head/bias", [None, "fsdp"]]],
            r"sharding: head/bias \(3,\): the rule names 2 axes, .* and the leaf has 1",
        ),
        ([["blocks/0/expand/weight", ["fsdp", "fsdp"]]], r"cuts two axes over 'fsdp'"),
    ],
)
def test_a_rule_that_does_not_fit_names_the_leaf_and_the_sizes(rules, told):
    with pytest.raises(UserError, match=told):
        cuts(VIT, rules, fsdp=4)


def test_devices_that_would_all_do_the_same_are_told():
    with pytest.raises(
        UserError,
        match=r"mesh\.tensor: 2 devices would all do the same work, .* write rules into `sharding`",
    ):
        cuts(shapes(resnet((8, 8, 1), 3, widths=(4,), depth=1)), tensor=2)


@pytest.mark.parametrize(
    "given",
    ["fsp", 3, [["a"]], [["a", "fsdp"]], ["fsdp", ["a", [None]]], [["(", ["fsdp"]]], [[1, []]]],
)
def test_what_is_no_sharding_is_told(given):
    with pytest.raises(ValueError, match=r"^sharding"):
        check_sharding(given)


@pytest.mark.parametrize(
    "given",
    [
        {"coordinator": "a:1"},
        {"num_processes": 2, "process_id": 0},
        {"coordinator": "a", "num_processes": 2, "process_id": 0},
        {"coordinator": "a:1", "num_processes": 2, "process_id": 2},
        {"coordinator": "auto", "num_processes": 2, "process_id": 0},
    ],
)
def test_what_does_not_tell_the_other_processes_is_told(given):
    with pytest.raises(ValueError, match=r"go together|must be"):
        DistributedOptions(**given)


OPTIMIZERS = {
    "adamw": optimizers.adamw(),
    "lion": optimizers.lion(),
    "muon": optimizers.muon(),
    "optax": optax.chain(optax.clip(1.0), optax.adam(1e-3)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizers_state_and_the_averages_are_cut_as_their_weights(name):
    update = gradient_update(lambda *_: None, OPTIMIZERS[name], ema=0.9)
    seed = jax.ShapeDtypeStruct((), np.uint32)
    ts = jax.eval_shape(
        lambda params, seed: first_state(update, params, {"mean": params["head"]["bias"]}, seed),
        VIT,
        seed,
    )
    found = named_leaves(Plan(AbstractMesh((1, 8, 1), AXES)).of_state(ts))
    wanted, seen = cuts(VIT, fsdp=8), 0
    for leaf, place in found.items():
        owner = next((weight for weight in wanted if leaf.endswith(f"/{weight}")), None)
        assert place.spec == P(*wanted[owner] if owner and not leaf.startswith("state/") else ()), (
            leaf
        )
        seen += bool(leaf.startswith("opt/") and owner)
    assert seen >= len(wanted)  # muon has one number for a weight of a product, two for others
    leaves = named_leaves(ts)
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
    assert sum(shard_bytes(leaf, found[name]) for name, leaf in leaves.items()) < whole / 5


PROGRAM = """
import json, sys
import jax, numpy as np
jax.config.update("jax_enable_x64", True)
from model.convnext import convnext
from model.mlp import mlp
from model.resnet import resnet
from model.vit import vit
from training.fit import fit
from training.optimizers import adam
from training.preprocess import to_unit
from utils import named_leaves

assert jax.device_count() == 8
rng = np.random.default_rng(0)
x, y = rng.integers(0, 256, (150, 8, 8, 1)).astype(np.uint8), rng.integers(0, 3, 150).astype(np.int32)
def losses(model, mesh, cut, **settings):
    settings |= {"preprocess": [to_unit], "optimizer": adam(lr=0.001), "batch_size": 16, "epochs": 2, "log": {"every_steps": 1}}
    run = fit(model, (x, y), (x[:77], y[:77]), mesh=mesh, ema=0.9, **settings)
    program = run.trainer.program.compiled.as_text()
    assert ("all-reduce" in program) == (run.trainer.plan.mesh.size > 1), "batches are not sharded"
    ts = run.states()[0]
    for name, spec in cut.items():
        for tree in (ts.params, ts.ema, ts.opt["m"]):
            assert named_leaves(tree)[name].sharding.spec == jax.P(*spec), (name, named_leaves(tree)[name].sharding)
    return [value for row in run.history for name, value in row.items() if "loss" in name]

small = mlp((8, 8, 1), 3, dims=(4,), dropout=0.1)
rows = (None, None, "fsdp", None)
cube = {"data": 2, "fsdp": 2, "tensor": 2}
few = {
    "vit": (vit((8, 8, 1), 3, dim=32, depth=1, heads=4, dropout=0.1), cube, {"blocks/0/expand/weight": ("fsdp", "tensor")}, {}),
    "streamed": (mlp((8, 8, 1), 3, dims=(4,)), {"data": 4, "fsdp": 2}, {}, {"device_budget_mb": 0, "accumulate": 2}),
}
more = {
    "resnet": (resnet((8, 8, 1), 3, widths=(16,), depth=1), {"fsdp": -1}, {"blocks/0/first/conv/weight": rows}, {}),
    "convnext": (convnext((8, 8, 1), 3, dims=(32,)), cube, {"blocks/0/project/weight": (None, None, "tensor", "fsdp")}, {}),
    "dropout": (small, {"data": 4, "fsdp": 2}, {}, {"device_budget_mb": 0}),
    "replicas": (small, {}, {}, {"replicas": 2}),
}
cases = {"few": few, "more": more}[sys.argv[1]]
found = {}
for name, (model, mesh, cut, more) in cases.items():
    found[name] = [losses(model, {"data": 1}, {}, **more), losses(model, mesh, cut, **more)]
print("RESULT" + json.dumps(found))
"""


@pytest.mark.parametrize("cases", ["few", pytest.param("more", marks=pytest.mark.torture)])
def test_eight_devices_give_the_losses_of_one_however_the_weights_are_cut(cases):
    """Twenty steps of Adam in float64, and two measurings by averaged weights."""
    flags = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, cases],
        cwd=ROOT,
        env=os.environ | flags,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    for name, (one, eight) in json.loads(run.stdout.split("RESULT")[1]).items():
        np.testing.assert_allclose(eight, one, rtol=1e-9, err_msg=name)
