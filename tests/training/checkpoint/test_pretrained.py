"""Starting from the weights of a checkpoint or a safetensors file, selected by rules."""

import logging
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from model.base import Model
from model.gpt import gpt
from model.layers.blocks import unrolled
from model.layers.linear import linear, linear_init
from model.mlp import mlp
from tests.model.compare import random_params
from tests.runs import assert_same
from training.checkpoint.pretrained import Pretrained, pretrained_from
from training.checkpoint.probe import Probe
from training.checkpoint.storage import save
from training.options import TrainingOptions
from utils import UserError, map_named, named_leaves

MODEL = mlp((4,), 3, dims=(5,))
FRESH = MODEL.init(jax.random.key(0))
STORED = MODEL.init(jax.random.key(7))[0]


def with_statistics():
    """A model with a layer, and a state that holds a mean and a count."""

    def init(key):
        return {"layers": [linear_init(key, 2, 3)]}, {
            "norm": {"mean": jnp.zeros(3), "count": jnp.int32(0)}
        }

    def apply(params, state, x, *, train=False, key=None):
        return linear(params["layers"][0], x) - state["norm"]["mean"], state

    return Model(init, apply)


def both(tree, other):
    return zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)


def test_weights_of_a_checkpoint_are_the_averaged_ones_if_there_are_any(tmp_path):
    averaged = jax.tree.map(lambda a: a + 1, STORED)
    rest = {
        "params": STORED,
        "opt": {"m": STORED},
        "step": jnp.int32(3),
        "lr_scale": jnp.float32(1),
        "state": {},
    }
    save(tmp_path / "plain.params", rest | {"ema": None}, {})
    save(tmp_path / "averaged.params", rest | {"ema": averaged}, {})
    for name, expected in (("plain", STORED), ("averaged", averaged)):
        params, state = Pretrained(tmp_path / f"{name}.params")(*FRESH)
        assert_same(params, expected)
        assert state == {}
        assert all(new.dtype == old.dtype for new, old in both(params, FRESH[0]))


def test_a_file_with_pytorchs_names_is_renamed_into_a_model(tmp_path):
    file = {
        "layers.0.weight": np.float16([[1, 2, 3], [4, 5, 6]]),
        "layers.0.bias": np.float64([0.5, 0, 0]),
        "bn.running_mean": np.float32([1, 1, 2]),
        "bn.num_batches_tracked": np.int64([9]),
    }
    save_file(file, tmp_path / "torch.safetensors")
    rename = [
        [r"layers\.(\d+)\.(\w+)", r"layers/\1/\2"],
        [r"bn\.running_(?P<what>\w+)", r"state/norm/\g<what>"],
        [r"bn\.num_batches_tracked", None],
        ["bn.*", "not used, since the first match wins"],
    ]
    pretrained = Pretrained(
        tmp_path / "torch.safetensors", fresh=["state/norm/count"], rename=rename
    )
    model = with_statistics()
    params, state = pretrained(*model.init(jax.random.key(0)))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    out, _ = model.apply(params, state, jnp.array([[1.0, 10.0]]))
    np.testing.assert_allclose(out, [[40.5, 51, 61]])  # computed by hand


def test_other_collections_of_a_file_are_not_ignored(tmp_path):
    path = tmp_path / "flax.safetensors"
    params = {
        f"params/{name}": np.asarray(leaf)
        for name, leaf in named_leaves({"layers": [linear_init(jax.random.key(1), 2, 3)]}).items()
    }
    save_file(params | {"batch_stats/mean": np.ones(3, np.float32)}, path)
    fresh, model = ["state/norm/count"], with_statistics().init(jax.random.key(0))
    with pytest.raises(UserError, match=r"unexpected: batch_stats/mean \(3,\)"):
        Pretrained(path, fresh=fresh)(*model)
    _, state = Pretrained(path, fresh=fresh, rename=[["batch_stats/(.*)", r"state/norm/\1"]])(
        *model
    )
    np.testing.assert_array_equal(state["norm"]["mean"], 1)


def test_weights_load_whether_blocks_are_stacked_or_not(tmp_path):
    """Under names of another program, too."""
    shapes = partial(
        random_params, lambda key, **sizes: gpt((4,), 5, heads=2, **sizes).init(key)[0]
    )
    together = shapes(dim=4, depth=3, scan=True)
    trees = [unrolled(together), together]
    for stored, wanted in (trees, trees[::-1]):
        save(tmp_path / "a.params", {"params": stored}, {})
        params, _ = Pretrained(tmp_path / "a.params")(wanted, {})
        assert_same(params, wanted)
    file = {f"h.{name}": np.asarray(leaf) for name, leaf in named_leaves(trees[0]).items()}
    save_file(file, tmp_path / "other.safetensors")
    rename = [[r"h\.(.*)", r"\1"]]
    params, _ = Pretrained(tmp_path / "other.safetensors", rename=rename)(trees[1], {})
    assert_same(params, trees[1])
    for stored, wanted, fresh in (
        (*trees[::-1], ["blocks/2/.*"]),
        (*trees, ["blocks/0-2/norm1/.*", "norm/.*"]),
    ):
        save(tmp_path / "a.params", {"params": stored}, {})
        other = jax.tree.map(lambda leaf: leaf + 1, wanted)
        params, _ = Pretrained(tmp_path / "a.params", fresh=fresh)(other, {})
        kept = {n for n in named_leaves(wanted) if any(re.fullmatch(regex, n) for regex in fresh)}
        assert kept
        assert_same(params, map_named(lambda n, a, b: b if n in kept else a, wanted, other))  # noqa: B023
    wide = shapes(dim=8, depth=3, scan=True)
    message = r"blocks/0-2/norm1/scale: the file has \(3, 4\), the model has \(3, 8\)"
    with pytest.raises(UserError, match=message):
        Pretrained(tmp_path / "other.safetensors", rename=rename).check(wide, {})


def test_fine_tuning_keeps_a_fresh_head_whatever_the_file_has_for_it(tmp_path):
    head = STORED["head"] | {"extra": jnp.zeros(2)}
    save(tmp_path / "a.params", {"params": STORED | {"head": head}}, {})
    wide = mlp((4,), 10, dims=(5,)).init(jax.random.key(1))
    with pytest.raises(
        UserError, match=r"head/weight: the file has \(5, 3\), the model has \(5, 10\)"
    ):
        Pretrained(tmp_path / "a.params")(*wide)
    params, _ = Pretrained(tmp_path / "a.params", fresh=["head/.*"])(*wide)
    assert_same(params["hidden"], STORED["hidden"])
    assert_same(params["head"], wide[0]["head"])


def test_every_difference_is_listed_under_the_models_names(tmp_path):
    params = {
        "head": {"weight": jnp.zeros((9, 3)), "bias": jnp.zeros(3, jnp.int32)},
        "extra": jnp.zeros(2),
        "hidden": [{"kernel": jnp.zeros((4, 6))}],
    }
    save(tmp_path / "a.params", {"params": params}, {})
    pretrained = Pretrained(tmp_path / "a.params", rename=[["(.*)/kernel", r"\1/weight"]])
    with pytest.raises(UserError) as caught:
        pretrained.check(*jax.eval_shape(lambda: FRESH))
    first, *lines, fix = str(caught.value).splitlines()
    assert first.endswith("a.params: does not fit the model")
    assert "`rules`" in fix and "`fresh`" in fix
    assert sorted(lines) == [
        "  head/bias: the file has int32 (3,), the model has float32 (3,)",
        "  head/weight: the file has (9, 3), the model has (5, 3)",
        "  hidden/0/weight (in the file: hidden/0/kernel): "
        "the file has (4, 6), the model has (4, 5)",
        "  missing: hidden/0/bias (5,)",
        "  unexpected: extra (2,)",
    ]


def test_a_float_is_not_accepted_for_an_integer(tmp_path):
    params, state = with_statistics().init(jax.random.key(0))
    state["norm"]["count"] = jnp.float32(3)
    save(tmp_path / "a.params", {"params": params, "state": state}, {})
    with pytest.raises(
        UserError, match=r"state/norm/count: the file has float32 \(\), the model has int32 \(\)"
    ):
        Pretrained(tmp_path / "a.params").check(*with_statistics().init(jax.random.key(0)))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"fresh": ["hed/.*"]},
            "training.pretrained.fresh: the rule 'hed/.*' matches no name; "
            "there are: head/bias, head/weight",
        ),
        (
            {"fresh": ["head/(.*"]},
            "training.pretrained.fresh: 'head/(.*' is not a regular expression: missing ),",
        ),
        (
            {"rename": [["head/(.*", "x"]]},
            "training.pretrained.rename: 'head/(.*' is not a regular expression: missing ),",
        ),
        (
            {"rename": [["hed/.*", None]]},
            "training.pretrained.rename: the rule 'hed/.*' matches no name; "
            "there are: head/bias, head/weight, hidden/0/bias, hidden/0/weight",
        ),
        (
            {"rename": [["head/(.*)", r"\2"]]},
            r'training.pretrained.rename: ["head/(.*)", "\\2"] cannot be applied: invalid group',
        ),
        (
            {"rename": [["head/(.*)", r"\g<a>"]]},
            r'training.pretrained.rename: ["head/(.*)", "\\g<a>"] cannot be applied: unknown',
        ),
        (
            {"rename": [["head/.*", "head/bias"]]},
            'pretrained.rename: ["head/.*", "head/bias"]: head/bias and head/weight in ',
        ),
        ({"rename": [["head/(.*)", r"hidden/0/\1"]]}, "both become hidden/0/"),
    ],
)
def test_invalid_rules_are_refused(tmp_path, rules, message):
    save(tmp_path / "a.params", {"params": STORED}, {})
    with pytest.raises(UserError, match=re.escape(message)):
        Pretrained(tmp_path / "a.params", **rules).check(*FRESH)


# --- in the config


def test_the_option_is_a_path_or_an_object(tmp_path):
    path = str(tmp_path / "a.params")
    save(path, {"params": STORED}, {})
    rules = {"fresh": ["head/bias"], "rename": [["head/bias", None]]}
    assert pretrained_from(TrainingOptions().pretrained) is None
    for option, expected in (
        (path, STORED["head"]["bias"]),
        ({"path": path, **rules}, FRESH[0]["head"]["bias"] + 0),
    ):
        params, _ = pretrained_from(TrainingOptions(pretrained=option).pretrained)(*FRESH)
        np.testing.assert_array_equal(params["head"]["bias"], expected)


@pytest.mark.parametrize(
    ("option", "line"),
    [
        (3, ": must be a string or an object or null, found 3"),
        ("", ": must be a local path (mount a bucket, as with rclone, or copy it), got "),
        ({"paht": "a"}, ".paht: no such key; did you mean 'path'? (path, fresh"),
        ({"fresh": []}, ": needs 'path'"),
        ({"path": "a", "fresh": "head/.*"}, '.fresh: must be a list, found "head/.*"'),
        ({"path": "a", "rename": ["ab"]}, '.rename.0: must be a list, found "ab"'),
        ({"path": "a", "probe": 1}, ".probe: must be true or false, found 1"),
    ],
)
def test_an_invalid_option_is_an_error_that_names_its_key(option, line):
    with pytest.raises(ValueError) as caught:
        TrainingOptions(pretrained=option)
    assert str(caught.value).startswith(f"pretrained{line}")


WEIGHTS = {"a tree": STORED, "a pair": FRESH, "a run": SimpleNamespace(params=STORED)}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_in_memory_are_passed_as_the_models(kind):
    with pytest.raises(
        ValueError, match=r"model._replace\(init=lambda key: \(run.params, run.state"
    ):
        TrainingOptions(pretrained=WEIGHTS[kind])


# --- the probe detects changed code


def probed(tmp_path, activation="gelu"):
    """The path of a checkpoint with a probe, and the probe of a model with another activation."""
    spec = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    path = tmp_path / "a.params"
    probe = Probe(mlp((4,), 3, dims=(5,), activation="gelu"), spec)
    save(path, {"params": STORED} | probe(STORED, {}), {})
    return path, Probe(mlp((4,), 3, dims=(5,), activation=activation), spec)


def test_weights_are_refused_if_the_model_now_computes_something_else(tmp_path):
    path, probe = probed(tmp_path, "relu")
    shapes = jax.eval_shape(lambda: FRESH)
    message = r"a\.params: model/.* has changed its meaning .* differs by up to .*; restore it, or"
    with pytest.raises(UserError, match=message):
        Pretrained(path).check_probe(probe, *shapes)
    (tmp_path / "model").mkdir()
    message = f"the original model is in {tmp_path}/model; restore it"
    with pytest.raises(UserError, match=re.escape(message)):
        Pretrained(path).check_probe(probe, *shapes)
    Pretrained(path, probe=False).check_probe(probe, *shapes)
    Pretrained(path, fresh=["head/.*"]).check_probe(probe, *FRESH)  # no comparison
    Pretrained(path).check_probe(probed(tmp_path)[1], *shapes)


def test_a_probe_with_a_different_input_is_logged_and_not_compared(tmp_path, caplog):
    path, _ = probed(tmp_path)
    pretrained = Pretrained(path)
    larger = Probe(MODEL, jax.ShapeDtypeStruct((2, 2, 2), jnp.float32))
    with caplog.at_level(logging.INFO, "main"):
        pretrained.check_probe(larger, *FRESH)
        pretrained.check_probe(Probe(MODEL, None), *FRESH)
    assert caplog.text.count("whether model/ has changed its meaning is not checked") == 2
