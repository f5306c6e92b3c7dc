"""How arrays are sharded: rules and presets against results by hand, and the same run on eight
simulated devices with different shardings."""

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

from data_loader.base import Arrays
from model.convnext import convnext
from model.mlp import mlp
from model.resnet import resnet
from model.vit import vit
from training import optimizers
from training.devices.options import DistributedOptions, MeshOptions, check_sharding
from training.devices.sharding import AXES, Plan, make_mesh, mesh_shape, shard_bytes
from training.engine import Replicas, first_state
from training.feed import make_feeds
from training.options import LoaderOptions
from training.update import gradient_update
from utils import UserError, named_leaves

ROOT = Path(__file__).resolve().parents[3]


def shapes(model):
    return jax.eval_shape(model.init, jax.random.key(0))[0]


VIT = shapes(vit((8, 8, 1), 3, dim=64, depth=1, heads=4))


def specs(params, rules=None, data=1, fsdp=1, tensor=1):
    return Plan(AbstractMesh((data, fsdp, tensor), AXES), rules).cuts(params)


@pytest.mark.parametrize(
    ("sizes", "count", "shape"),
    [
        ((-1, 1, 1), 1, (1, 1, 1)),
        ((-1, 1, 1), 8, (8, 1, 1)),
        ((-1, 4, 1), 8, (2, 4, 1)),
        ((-1, -1, 1), 8, (1, 8, 1)),  # data's default of -1 gives way to fsdp's
        ((2, -1, 2), 8, (2, 2, 2)),
        ((-1, 1, -1), 8, (1, 1, 8)),
        ((2, 2, 1), 8, (2, 2, 1)),
        ((-1, 16, 1), 8, (1, 16, 1)),  # more devices than there are: make_mesh raises
    ],
)
def test_minus_one_is_what_the_other_axes_leave(sizes, count, shape):
    assert mesh_shape(MeshOptions(*sizes), count) == shape


def test_a_mesh_that_does_not_fit_the_machine_is_an_error():
    message = r"mesh: data 1 x fsdp 64 x tensor 1 is 64 devices, and there (is|are) \d+ of "
    with pytest.raises(UserError, match=message):
        make_mesh(MeshOptions(fsdp=64))
    message = r"mesh: 8 devices do not divide by data 1 x fsdp 3 x tensor 1, so there is no number"
    with pytest.raises(UserError, match=message):
        mesh_shape(MeshOptions(fsdp=3), 8)
    with pytest.raises(ValueError, match=r"fsdp: must be an integer of at least 1, or -1, got 0"):
        MeshOptions(fsdp=0)
    message = r"fsdp: is -1, and so is tensor; only one of them can be -1"
    with pytest.raises(ValueError, match=message):
        MeshOptions(fsdp=-1, tensor=-1)


def test_a_batch_divides_over_data_and_fsdp_alone():
    plan = Plan(AbstractMesh((2, 3, 4), AXES))
    plan.check_batch(12, "loader.batch_size")
    message = r"loader\.batch_size: 16 examples do not divide over 6 devices; .* such as 18"
    with pytest.raises(UserError, match=message):
        plan.check_batch(16, "loader.batch_size")


def test_the_error_of_a_batch_that_does_not_divide_names_what_gives_its_size():
    replicas = Replicas([0], Plan(AbstractMesh((2, 1, 1), AXES)))
    arrays = Arrays(np.zeros((9, 3)), np.zeros(9, int))

    def refused(where, options, dataset=arrays):
        with pytest.raises(UserError, match=f"^{where}: 3 examples do not divide over 2 devices"):
            make_feeds({"test": dataset}, options, replicas)

    for streamed in ({}, {"device_budget_mb": 0}):
        refused("loader.batch_size", LoaderOptions(3, **streamed))
        refused("loader.eval_batch_size", LoaderOptions(4, eval_batch_size=3, **streamed))
    refused("the batches of the data", LoaderOptions(4), [arrays[[0, 1, 2]]].__iter__())


def test_data_parallel_shards_no_leaf():
    assert not any(any(spec) for spec in specs(VIT, data=8).values())
    assert not any(any(spec) for spec in specs(VIT, "data_parallel", data=2, fsdp=4).values())


def test_fsdp_shards_the_largest_axis_that_divides():
    vit_specs = specs(VIT, fsdp=8)
    assert vit_specs["blocks/0/expand/weight"] == (None, "fsdp")  # 64 x 256
    assert vit_specs["blocks/0/project/weight"] == ("fsdp", None)
    assert vit_specs["blocks/0/norm1/scale"] == (None,)  # small
    for model in (
        convnext((32, 32, 3), 10, dims=(48, 96)),
        resnet((32, 32, 3), 10),
        mlp((784,), 10, dims=(100, 60)),
    ):
        params = shapes(model)
        for name, spec in specs(params, fsdp=4).items():
            shape = named_leaves(params)[name].shape
            divisible = [n for n in shape if n % 4 == 0]
            sharded = [n for n, axis in zip(shape, spec, strict=True) if axis]
            if np.prod(shape) > 1024 and divisible:
                assert sharded == [max(divisible)], name
            else:
                assert not sharded, name


def test_tensor_shards_columns_then_rows():
    columns, rows = (None, "tensor"), ("tensor", None)
    vit_specs = specs(VIT, tensor=4)
    attention = ("query/weight", "query/bias", "key/weight", "value/weight", "value/bias")
    assert {name for name, spec in vit_specs.items() if any(spec)} == {
        *(f"blocks/0/attention/{leaf}" for leaf in (*attention, "out/weight")),
        *(f"blocks/0/{leaf}" for leaf in ("expand/weight", "expand/bias", "project/weight")),
    }
    assert (
        vit_specs["blocks/0/attention/query/weight"]
        == vit_specs["blocks/0/expand/weight"]
        == columns
    )
    assert (
        vit_specs["blocks/0/attention/out/weight"] == vit_specs["blocks/0/project/weight"] == rows
    )
    both = specs(VIT, fsdp=2, tensor=4)
    assert both["blocks/0/expand/weight"] == ("fsdp", "tensor")
    assert both["blocks/0/project/weight"] == ("tensor", "fsdp")
    layers = specs(shapes(mlp((64,), 10, dims=(128, 64, 128))), tensor=2)
    assert [layers[f"hidden/{i}/weight"] for i in range(3)] == [columns, rows, columns]
    convolutions = specs(shapes(convnext((8, 8, 1), 3, dims=(32,))), tensor=2)
    assert convolutions["blocks/0/expand/weight"] == (None, None, None, "tensor")


@pytest.mark.parametrize("rules", [None, "fsdp", [[".*/expand/weight", ["fsdp"]], "tensor"]])
def test_the_axis_of_stacked_blocks_stays_whole(rules):
    sizes = {"fsdp": 2, "tensor": 1 if rules == "fsdp" else 2}
    one_by_one = specs(shapes(vit((8, 8, 1), 10, depth=4)), rules, **sizes)
    together = specs(shapes(vit((8, 8, 1), 10, depth=4, scan=True)), rules, **sizes)
    assert "blocks/0-3/expand/weight" in together
    for name, spec in together.items():
        single = name.replace("0-3", "2")
        is_cut = single != name and any(one_by_one[single])
        assert spec[-len(one_by_one[single]) :] == one_by_one[single], name
        assert not is_cut or spec[0] is None, name
    error = r"sharding: blocks/0-3/attention/out/bias \(64,\): the rule names 2 axes"
    with pytest.raises(UserError, match=error):
        specs(shapes(vit((8, 8, 1), 10, scan=True)), [["blocks/.*", [None, "fsdp"]]], **sizes)


def test_rules_come_before_the_preset_and_may_leave_a_leaf_unsharded():
    rules = [["blocks/0/expand/weight", ["fsdp"]], [".*/project/.*", []], "fsdp"]
    vit_specs = specs(VIT, rules, fsdp=4)
    assert vit_specs["blocks/0/expand/weight"] == ("fsdp",)
    assert vit_specs["blocks/0/project/weight"] == ()
    assert vit_specs["blocks/0/attention/out/weight"] == ("fsdp", None)
    without_preset = specs(VIT, [["head/weight", ["fsdp", None]]], fsdp=4)
    assert [name for name, spec in without_preset.items() if any(spec)] == ["head/weight"]


@pytest.mark.parametrize(
    ("rules", "message"),
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
        ([["blocks/0/expand/weight", ["fsdp", "fsdp"]]], r"shards two axes over 'fsdp'"),
    ],
)
def test_the_error_of_a_rule_that_does_not_fit_names_the_leaf_and_the_sizes(rules, message):
    with pytest.raises(UserError, match=message):
        specs(VIT, rules, fsdp=4)


def test_devices_that_would_repeat_the_same_work_are_an_error():
    params = shapes(resnet((8, 8, 1), 3, widths=(4,), depth=1))
    message = r"mesh\.tensor: 2 devices would all do the same work, .* write rules into `sharding`"
    with pytest.raises(UserError, match=message):
        specs(params, tensor=2)


@pytest.mark.parametrize(
    "given",
    ["fsp", 3, [["a"]], [["a", "fsdp"]], ["fsdp", ["a", [None]]], [["(", ["fsdp"]]], [[1, []]]],
)
def test_an_invalid_sharding_is_an_error(given):
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
def test_invalid_distributed_options_are_an_error(given):
    with pytest.raises(ValueError, match=r"go together|must be"):
        DistributedOptions(**given)


OPTIMIZERS = {
    "adamw": optimizers.adamw(),
    "lion": optimizers.lion(),
    "muon": optimizers.muon(),
    "optax": optax.chain(optax.clip(1.0), optax.adam(1e-3)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_state_and_the_averages_are_sharded_as_their_weights(name):
    update = gradient_update(lambda *_: None, OPTIMIZERS[name], ema=0.9)
    seed = jax.ShapeDtypeStruct((), np.uint32)
    ts = jax.eval_shape(
        lambda params, seed: first_state(update, params, {"mean": params["head"]["bias"]}, seed),
        VIT,
        seed,
    )
    shardings = named_leaves(Plan(AbstractMesh((1, 8, 1), AXES)).of_state(ts))
    expected, checked = specs(VIT, fsdp=8), 0
    for leaf, sharding in shardings.items():
        owner = next((weight for weight in expected if leaf.endswith(f"/{weight}")), None)
        is_sharded = owner and not leaf.startswith("state/")
        assert sharding.spec == P(*expected[owner] if is_sharded else ()), leaf
        checked += bool(leaf.startswith("opt/") and owner)
    # Muon keeps one array for a weight that it updates, and two for each of the others.
    assert checked >= len(expected)
    leaves = named_leaves(ts)
    unsharded = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
    sharded = sum(shard_bytes(leaf, shardings[name]) for name, leaf in leaves.items())
    assert sharded < unsharded / 5


PROGRAM = """
import json, sys
import jax, numpy as np
jax.config.update("jax_enable_x64", True)
from data_loader.base import Arrays
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
x = rng.integers(0, 256, (150, 8, 8, 1)).astype(np.uint8)
y = rng.integers(0, 3, 150).astype(np.int32)

def losses(model, mesh, specs, **settings):
    settings |= {"preprocess": [to_unit], "optimizer": adam(lr=0.001)}
    settings |= {"batch_size": 16, "epochs": 2, "log": {"every_steps": 1}}
    run = fit(model, (x, y), (x[:77], y[:77]), mesh=mesh, ema=0.9, **settings)
    program = run.trainer.program.compiled.as_text()
    assert ("all-reduce" in program) == (run.trainer.plan.mesh.size > 1), "batches are not sharded"
    ts = run.states()[0]
    for name, spec in specs.items():
        for tree in (ts.params, ts.ema, ts.opt["m"]):
            sharding = named_leaves(tree)[name].sharding
            assert sharding.spec == jax.P(*spec), (name, sharding)
    return [value for row in run.history for name, value in row.items() if "loss" in name]

small = mlp((8, 8, 1), 3, dims=(4,), dropout=0.1)
rows = (None, None, "fsdp", None)
cube = {"data": 2, "fsdp": 2, "tensor": 2}
both, streamed = {"data": 4, "fsdp": 2}, {"device_budget_mb": 0}
transformer = vit((8, 8, 1), 3, dim=32, depth=1, heads=4, dropout=0.1)
residual = resnet((8, 8, 1), 3, widths=(16,), depth=1)
deep = vit((8, 8, 1), 3, dim=32, depth=2, heads=4, dropout=0.1, scan=True)
expand = {"blocks/0/expand/weight": ("fsdp", "tensor")}
stacked = {"blocks/0-1/expand/weight": (None, "fsdp", "tensor")}
project = {"blocks/0/project/weight": (None, None, "tensor", "fsdp")}
few = {
    "vit": (deep, cube, stacked, {}),
    "streamed": (mlp((8, 8, 1), 3, dims=(4,)), both, {}, streamed | {"accumulate": 2}),
}
more = {
    "vit": (transformer, cube, expand, {}),
    "resnet": (residual, {"fsdp": -1}, {"blocks/0/first/conv/weight": rows}, {}),
    "convnext": (convnext((8, 8, 1), 3, dims=(32,)), cube, project, {}),
    "dropout": (small, both, {}, streamed),
    "replicas": (small, {}, {}, {"replicas": 2}),
}
cases = {"few": few, "more": more}[sys.argv[1]]
results = {}
for name, (model, mesh, specs, more) in cases.items():
    results[name] = [losses(model, {"data": 1}, {}, **more), losses(model, mesh, specs, **more)]
print("RESULT" + json.dumps(results))
"""


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["few", pytest.param("more", marks=pytest.mark.torture)])
def test_eight_devices_give_the_losses_of_one_however_the_weights_are_sharded(cases):
    """Twenty steps of Adam in float64, and two evaluations with averaged weights."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    command = [sys.executable, "-c", PROGRAM, cases]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    for name, (one, eight) in json.loads(run.stdout.split("RESULT")[1]).items():
        np.testing.assert_allclose(eight, one, rtol=1e-9, err_msg=name)
