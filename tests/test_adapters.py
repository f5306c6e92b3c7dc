"""Models of Flax, Equinox and Haiku through model/adapters.py, against the libraries themselves.
Each net of tests/nets_of_others/ has a convolution, batch norm and dropout, as users write them."""

import importlib
import json
import sys
from functools import partial

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx

from inference import convert_tflite
from model import adapters
from tests.processes import ROOT, call, captured, run
from training.checkpoint.storage import load
from training.fit import fit
from training.optimizers import adamw
from utils import UserError, named_leaves
from wiring.build import build
from wiring.own_modules import look_in

X = np.random.default_rng(0).normal(size=(48, 9, 9, 1)).astype(np.float32)
Y = np.arange(48, dtype=np.int32) % 3
KEY, DROPOUT = jax.random.key(0), jax.random.key(1)
CONFIG = {
    "title": "Adapted",
    "data": {"name": "digits", "args": {"train_size": 64, "test_size": 32}},
    "loader": {"batch_size": 32},
    "preprocess": ["to_unit"],
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "optimizer": {"name": "adamw", "args": {"lr": 0.01}},
    "training": {"epochs": 2},
}


def net_of(library):
    pytest.importorskip("flax" if library in ("nnx", "linen") else library)
    return importlib.import_module(f"tests.nets_of_others.{library}_net").Net


def adapted(library, **arguments):
    facts = {"input_shape": (9, 9, 1), "num_classes": 3}
    return getattr(adapters, library)(net_of(library), {"width": 4, **arguments}, **facts)


OTHERS = [pytest.param(name, marks=pytest.mark.torture) for name in ("nnx", "equinox", "haiku")]


@pytest.fixture(params=["linen", *OTHERS])
def library(request):
    net_of(request.param)
    return request.param


# The libraries' own training step and evaluation: (logits, gradient, statistics, logits then).


def mean_loss(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, Y).mean()


def by_nnx(Net):
    net = Net(3, 4, rngs=nnx.Rngs(KEY))
    nnx.reseed(net, default=jax.random.split(DROPOUT, 1)[0])
    net.train()

    def loss(net):
        logits = net(X)
        return mean_loss(logits), logits

    (_, logits), grads = nnx.value_and_grad(loss, has_aux=True)(net)
    net.eval()
    return logits, nnx.to_pure_dict(grads), nnx.to_pure_dict(nnx.state(net, nnx.BatchStat)), net(X)


def by_linen(Net):
    net = Net(3, 4)
    variables = net.init(KEY, X[:1], False)

    def loss(params):
        both = {"params": params, "batch_stats": variables["batch_stats"]}
        logits, new = net.apply(both, X, True, rngs={"dropout": DROPOUT}, mutable=["batch_stats"])
        return mean_loss(logits), (logits, new)

    grads, (logits, new) = jax.grad(loss, has_aux=True)(variables["params"])
    return logits, grads, new, net.apply({"params": variables["params"], **new}, X, False)


def by_equinox(Net):
    import equinox as eqx

    net, state = eqx.nn.make_with_state(Net)(3, 4, key=KEY)

    def batched(net, state, keys):
        axes = {"in_axes": (0, None, 0), "out_axes": (0, None), "axis_name": "batch"}
        return jax.vmap(lambda x, state, key: net(x, state, key=key), **axes)(X, state, keys)

    def loss(net):
        logits, new = batched(net, state, jax.random.split(DROPOUT, len(X)))
        return mean_loss(logits), (logits, new)

    grads, (logits, new) = eqx.filter_grad(loss, has_aux=True)(net)
    running = named_leaves({"running": new})
    return logits, grads, running, batched(eqx.nn.inference_mode(net), new, None)[0]


def by_haiku(Net):
    import haiku as hk

    net = hk.transform_with_state(lambda x, is_training: Net(3, 4)(x, is_training))
    params, state = net.init(KEY, X[:1], True)

    def loss(params):
        logits, new = net.apply(params, state, DROPOUT, X, True)
        return mean_loss(logits), (logits, new)

    grads, (logits, new) = jax.grad(loss, has_aux=True)(params)
    return logits, grads, new, net.apply(params, new, None, X, False)[0]


def assert_same(ours, theirs):
    ours, theirs = named_leaves(ours), named_leaves(theirs)
    assert ours.keys() == theirs.keys()
    for name, leaf in ours.items():
        assert leaf.dtype == theirs[name].dtype, name
        np.testing.assert_allclose(leaf, theirs[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_step_and_an_evaluation_are_those_of_the_library(library):
    model = adapted(library)
    params, state = jax.jit(model.init)(KEY)

    def loss(params):
        logits, new = model.apply(params, state, X, train=True, key=DROPOUT)
        return mean_loss(logits), (logits, new)

    grads, (logits, new) = jax.jit(jax.grad(loss, has_aux=True))(params)
    evaluated, kept = jax.jit(model.apply)(params, new, X)
    assert_same(kept, new)
    assert all(
        np.abs(a - b).max() > 0 for a, b in zip(*map(jax.tree.leaves, (state, new)), strict=True)
    )
    theirs = jax.jit(partial(globals()[f"by_{library}"], net_of(library)))()
    assert_same((logits, grads, new, evaluated), theirs)


@pytest.mark.slow
def test_dropout_draws_from_the_key_in_training_alone(library):
    model = adapted(library)
    params, state = model.init(KEY)
    apply = jax.jit(model.apply, static_argnames="train")
    first, again, other = (
        apply(params, state, X, train=True, key=jax.random.key(seed))[0] for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1
    np.testing.assert_array_equal(
        apply(params, state, X)[0], apply(params, state, X, key=DROPOUT)[0]
    )


def trained(model, **settings):
    return fit(model, (X, Y), **{"optimizer": adamw(), "epochs": 2, "batch_size": 16, **settings})


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(library, tmp_path):
    for name, epochs in (("one", [2]), ("two", [1, 2])):
        for count in epochs:
            settings = {"folder": tmp_path / name, "epochs": count, "resume": "override"}
            trained(adapted(library), **settings)
    one, two = (load(tmp_path / n / "checkpoint-epoch_2.params")[0] for n in ("one", "two"))
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name], err_msg=name)


@pytest.mark.slow
def test_replicas_are_vmapped(library):
    model, keys = adapted(library), jax.random.split(KEY, 2)

    def outputs(key):
        return model.apply(*model.init(key), X, train=True, key=key)

    alone = [jax.jit(outputs)(key) for key in keys]
    assert_same(jax.jit(jax.vmap(outputs))(keys), jax.tree.map(lambda *a: np.stack(a), *alone))


@pytest.mark.slow
def test_bfloat16_keeps_weights_and_statistics_in_float32(library):
    run = trained(adapted(library), precision="bfloat16", epochs=1)
    leaves = jax.tree.leaves((run.params, run.state))
    assert {str(leaf.dtype) for leaf in leaves} <= {"float32", "int32"}
    assert np.isfinite(run.history[-1]["train_loss"])


@pytest.mark.slow
def test_a_config_trains_evaluates_and_exports_it(library, tmp_path):
    """With its weights divided over two devices by a rule, and from a user's file."""
    (tmp_path / "vast_nets.py").write_text(
        (ROOT / f"tests/nets_of_others/{library}_net.py").read_text()
    )
    args = {"module": "vast_nets.Net", "arguments": {"width": 4}}
    config = CONFIG | {"model": {"name": library, "args": args}}
    cut = ["tensor"] if library == "equinox" else [None, None, None, "tensor"]  # OIHW or HWIO
    config |= {"sharding": [[r".*[Cc]onv.*/(kernel|weight|w)", cut]], "mesh": {"tensor": 2}}
    (tmp_path / "mine.json").write_text(json.dumps(config))
    code, out, err = run(tmp_path, "-c", "mine.json", devices=2)
    assert code == 0, out + err
    (folder,) = (tmp_path / "saved" / "Adapted").iterdir()
    alone = ["mesh.tensor=1", "sharding=null"]  # this process has one device
    code, out, err = call(tmp_path, "--evaluate", folder, "--trust", *alone)
    assert code == 0, err
    assert "test_accuracy" in json.loads(out)["metrics"]
    assert "pass --trust if you trust it" in call(tmp_path, "--evaluate", folder)[2]
    checkpoint = folder / "checkpoint-epoch_2.params"
    command = ["-w", checkpoint, "--name", "net", "--out", "out", "--trust", "--route", "native"]
    code, out, err = captured(tmp_path, lambda: convert_tflite.main([*map(str, command)]))
    assert code == 0, out + err
    report = json.loads((tmp_path / "out" / "net" / "verification.json").read_text())
    assert {report["formats"][name]["route"] for name in ("onnx", "tflite")} == {"native"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"module": "Net"}, r"module: must be a dotted name, such as my_nets.Net.*'?Net"),
        ({"module": 3}, r"model.args.module: must be a dotted name.* found 3"),
        ({"module": "vast_nets.Nett"}, "module: vast_nets has no function 'Nett'; did you mean"),
        ({"module": "vast_netz.Net"}, "'vast_netz.Net' cannot be imported: No module named"),
        ({}, r"model.args: linen needs 'module'\n  linen\(module, "),
        (
            {"module": "vast_nets.Net", "arguments": {"widht": 4}},
            "arguments: Net: got an unexpected keyword argument 'widht'; it has num_classes, width",
        ),
        ({"module": "vast_nets.Net", "arguments": [4]}, "arguments: must be an object or null"),
        ({"module": "vast_nets.Net", "argument": {}}, "no such argument; did you mean 'arguments'"),
    ],
)
def test_mistakes_are_explained(tmp_path, args, message):
    (tmp_path / "vast_nets.py").write_text((ROOT / "tests/nets_of_others/linen_net.py").read_text())
    config = CONFIG | {"model": {"name": "linen", "args": args}}
    with pytest.raises(UserError, match=message):
        build(config, "c", folders=look_in(tmp_path))


def test_a_config_that_is_not_trusted_imports_no_module():
    config = CONFIG | {"model": {"name": "linen", "args": {"module": "vast_nets.Net"}}}
    with pytest.raises(UserError, match=r"'vast_nets.Net' would import code.* pass --trust"):
        build(config, "c", trusted=False)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (linen.Dense(3), "module: pass the class Dense and `arguments`, not an object of it"),
        (nnx.Linear, "module: Linear is not a Module of flax.linen; is it of another adapter"),
        (lambda: nnx.relu, "module: what <lambda> returns is not a Module of flax.linen"),
        (lambda x, train: x, r"arguments: <lambda>: missing .* 'x'; it has x, train"),
    ],
)
def test_what_is_no_module_of_the_library_is_refused(module, message):
    with pytest.raises(ValueError, match=message):
        adapters.linen(module, input_shape=(9, 9, 1))


@pytest.mark.parametrize(
    ("module", "package"), [("haiku", "dm-haiku"), ("equinox", "equinox"), ("flax", "flax")]
)
def test_a_library_that_is_missing_is_named_with_its_package(
    tmp_path, monkeypatch, module, package
):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    (tmp_path / f"vast_no_{module}.py").write_text(f"import {module}\n")
    args = {"module": f"vast_no_{module}.Net"}
    config = CONFIG | {"model": {"name": "linen", "args": args}}
    with pytest.raises(
        UserError, match=f"cannot be imported: .*{module}.*; pip install {package}$"
    ):
        build(config, "c", folders=look_in(tmp_path))
