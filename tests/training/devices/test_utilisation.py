"""Model FLOPs utilisation: the operations against closed forms and XLA's count, the peaks against
published figures, and both in the log lines of a run."""

import logging
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from data_loader.tokens import IGNORED, Stream, Windows
from model.base import Model
from model.gpt import gpt
from model.mlp import mlp
from tests.runs import json_lines
from training.base import Update
from training.devices import utilisation
from training.devices.utilisation import flops_of, peak_of
from training.fit import fit
from training.loss import cross_entropy
from training.optimizers import sgd
from training.update import gradient_update

LENGTH, VOCABULARY, DIM, DEPTH = 8, 11, 16, 3
LOSS = partial(cross_entropy, ignore_label=IGNORED)
FORMS = [{}, {"scan": True}, {"remat": ".*"}, {"scan": True, "remat": ".*"}]
FORMS += [{"kv_heads": 1, "positions": "rotary", "feed_forward": "swiglu", "tied": False}]


def count(function, *arguments):
    """The operations of a function as if it was a model of the arguments."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments]
    return flops_of(lambda params, state, batch, key, train: function(*batch), {}, {}, shapes)


@pytest.mark.parametrize("form", FORMS)
def test_a_decoder_has_two_operations_for_each_weight_and_token_and_those_of_attention(form):
    model = gpt((LENGTH,), VOCABULARY, dim=DIM, depth=DEPTH, heads=4, **form)
    params, state = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((5, LENGTH), jnp.int32)
    apply = lambda params, state, x, key, train: model.apply(params, state, x, train=train, key=key)  # noqa: E731
    in_blocks = sum(
        leaf.size for leaf in jax.tree.leaves(params["blocks"]) if is_weight(leaf, form)
    )
    weights = in_blocks + VOCABULARY * DIM  # of the head
    attention = DEPTH * 2 * LENGTH * DIM  # products with keys, and of values
    assert flops_of(apply, params, state, tokens) == 2 * (weights + attention) * 5 * LENGTH


def is_weight(leaf, form):
    return leaf.ndim == 2 + form.get("scan", False)


@pytest.mark.parametrize("groups", [1, 3])
def test_products_and_convolutions_are_counted_as_xla_counts_them(groups):
    def layers(image, kernel, weight):
        options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": groups}
        y = lax.conv_general_dilated(image, kernel, (2, 1), "VALID", **options)
        return y.reshape(len(y), -1) @ weight

    image, kernel = np.zeros((2, 9, 8, 6), "f"), np.zeros((3, 3, 6 // groups, 12), "f")
    weight = np.zeros((4 * 6 * 12, 10), "f")
    compiled = jax.jit(layers).lower(image, kernel, weight).compile()
    expected = compiled.cost_analysis()["flops"]
    assert count(layers, image, kernel, weight) == pytest.approx(expected, rel=0.01)


def test_loops_count_as_often_as_they_run_and_of_branches_the_largest():
    x = np.zeros((4, 4), "f")

    def function(x):
        x = lax.scan(lambda x, _: (x @ x, None), x, length=7)[0]
        return lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert count(function, x) == (7 + 2) * 2 * 4**3


def devices(kind, number=1):
    return [SimpleNamespace(device_kind=kind)] * number


@pytest.mark.parametrize(
    ("kind", "bfloat16", "float32"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12, 156e12),
        ("NVIDIA A100 80GB PCIe", 312e12, 156e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 494e12),
        ("NVIDIA H100 PCIe", 756e12, 378e12),
        ("NVIDIA H200", 989e12, 494e12),
        ("NVIDIA L4", 121e12, 60e12),
        ("NVIDIA L40S", 362e12, 183e12),
        ("Tesla T4", None, 8.1e12),
        ("Tesla V100-SXM2-16GB", None, 15.7e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12),
        ("TPU v5 lite", 197e12, 197e12),
        ("TPU v5", 459e12, 459e12),
        ("TPU v6 lite", 918e12, 918e12),
        ("cpu", None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("TPU v4 lite", None, None),
    ],
)
def test_the_peak_is_that_of_the_device_and_the_precision(kind, bfloat16, float32):
    assert peak_of(devices(kind), "bfloat16") == bfloat16
    assert peak_of(devices(kind), "float32") == float32
    assert peak_of(devices(kind, 8), "float32") == (float32 and 8 * float32)
    assert peak_of([*devices(kind), *devices("TPU v4")], "float32") is None


class Other:
    """An update of one's own, which does not say what it costs."""

    def __call__(self, objective, optimizer, **options) -> Update:
        return gradient_update(objective, optimizer)._replace(passes=None)


def run(folder, model, train, **options):
    defaults = {"optimizer": sgd(lr=0.01), "epochs": 1, "batch_size": 8}
    fit(model, train, folder=folder, log={"every_steps": 2}, **defaults | options)
    return json_lines(folder / "metrics.jsonl")


X, Y = np.zeros((32, 5), np.float32), np.zeros(32, np.int32)
OF_MLP = 3 * 2 * (5 * 7 + 7 * 3)  # of one example, forward and backward


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"replicas": 2, "accumulate": 2}])
def test_log_lines_have_the_share_of_the_peak(tmp_path, monkeypatch, caplog, options):
    caplog.set_level(logging.INFO, "main")
    monkeypatch.setitem(utilisation.PEAKS, "cpu", (1, 1e-6))
    rows = run(tmp_path, mlp((5,), 3, dims=(7,)), (X, Y), **options)
    assert len(rows) == 3
    for row in rows:
        expected = row["examples_per_second"] * OF_MLP / (1e6 * len(jax.devices()))
        assert row["mfu"] == pytest.approx(expected)
        assert "tokens_per_second" not in row
    lines = [r.getMessage() for r in caplog.records if "-- Loss:" in r.getMessage()]
    assert lines[0].endswith(f" -- MFU {rows[0]['mfu']:.1%}")


@pytest.mark.parametrize("options", [{}, {"update": Other()}])
def test_where_it_is_unknown_nothing_is_counted(tmp_path, monkeypatch, options):
    if options:
        monkeypatch.setitem(utilisation.PEAKS, "cpu", (1, 1))
    monkeypatch.setattr(utilisation, "flops_of", None)
    rows = run(tmp_path, mlp((5,), 3, dims=(7,)), (X, Y), **options)
    assert not any("mfu" in row for row in rows)


@pytest.mark.slow
def test_tokens_per_second_where_the_data_knows_the_tokens_of_an_example(tmp_path, caplog):
    caplog.set_level(logging.INFO, "main")
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 32 * LENGTH).astype(np.uint16)
    windows = Windows(Stream([("tokens", tokens)]), LENGTH, VOCABULARY)
    model = Model(
        lambda key: ({"table": jax.random.normal(key, (VOCABULARY, VOCABULARY))}, {}),
        lambda params, state, x, **_: (params["table"][x], state),
    )
    rows = run(tmp_path, model, windows, loss=LOSS, val_size=8)
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(LENGTH * row["examples_per_second"])
        assert "mfu" not in row
    lines = [r.getMessage() for r in caplog.records if "-- Loss:" in r.getMessage()]
    assert lines[0].endswith(f" -- {rows[0]['tokens_per_second']:,.0f} tokens/s")
