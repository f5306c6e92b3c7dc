"""Checkpoints: what is written comes back bit by bit; which are kept; what does not fit is told."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from model.mlp import mlp
from training.checkpoint import Checkpoints, Pretrained, load, save
from training.fit import fit
from training.optimizers import adam
from training.options import CheckpointOptions
from utils import UserError

MODEL = mlp((4,), 3, dims=(5,))
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 4)).astype(np.float32), RNG.integers(0, 3, 60).astype(np.int32)


def test_what_is_saved_comes_back_bit_by_bit_also_through_the_stock_reader(tmp_path):
    tree = {
        "turned": jnp.arange(6.0).reshape(2, 3).T,
        "view": np.arange(20)[::3],
        "half": jnp.arange(4, dtype=jnp.bfloat16) / 3,
        "nested": [{"scalar": jnp.float32(2.5)}, {"empty": jnp.zeros((0, 3))}],
        "absent": None,
    }
    save(tmp_path / "a.params", tree, {"epoch": 3})
    arrays, metadata = load(tmp_path / "a.params")
    assert metadata == {"epoch": 3}
    assert arrays["nested/0/scalar"].shape == ()
    with safe_open(tmp_path / "a.params", framework="numpy") as file:
        for name in ("turned", "view", "half", "nested/0/scalar", "nested/1/empty"):
            leaf = tree["nested"][int(name[7])][name[9:]] if name.startswith("nested") else tree[name]
            np.testing.assert_array_equal(file.get_tensor(name), leaf)
            assert arrays[name].dtype == np.asarray(leaf).dtype


def test_a_run_goes_on_from_pretrained_weights_the_averaged_ones_where_there_are_such(tmp_path):
    options = {"optimizer": adam(lr=0.01), "batch_size": 20}
    run = fit(MODEL, (X, Y), epochs=2, ema=0.5, **options)
    save(tmp_path / "a.params", run.states()[0]._asdict(), {})
    fresh = [MODEL.init(jax.random.key(7)) for _ in range(2)]
    params, state = Pretrained(tmp_path / "a.params")(*fresh[0])
    jax.tree.map(np.testing.assert_array_equal, params, run.states()[0].ema)
    assert state == {}
    with pytest.raises(AssertionError):
        jax.tree.map(np.testing.assert_array_equal, params, run.states()[0].params)


def test_a_random_key_in_an_optimizers_state_is_saved_as_its_numbers(tmp_path):
    key = jax.random.key(3)
    save(tmp_path / "a.params", {"key": key}, {})
    np.testing.assert_array_equal(load(tmp_path / "a.params")[0]["key"], jax.random.key_data(key))


def test_every_difference_is_listed(tmp_path):
    params, _ = MODEL.init(jax.random.key(0))
    params["head"]["weight"] = jnp.zeros((9, 3))
    params["extra"] = jnp.zeros(2)
    del params["hidden"][0]["bias"]
    save(tmp_path / "a.params", {"params": params}, {})
    with pytest.raises(UserError) as told:
        Pretrained(tmp_path / "a.params")(*MODEL.init(jax.random.key(0)))
    for line in (
        "missing: params/hidden/0/bias (5,)",
        "unexpected: params/extra (2,)",
        "params/head/weight: the file has (9, 3), the model has (5, 3)",
    ):
        assert line in str(told.value)


def test_a_file_with_other_names_shows_some_of_both(tmp_path):
    save(tmp_path / "a.params", {"w": jnp.zeros(3)}, {})
    with pytest.raises(UserError, match=r"it has none of the model's names; it has w, \.\.\.; the model has params/head/bias"):
        Pretrained(tmp_path / "a.params")(*MODEL.init(jax.random.key(0)))


@pytest.mark.parametrize("content", [b"", b"\x80\x04pickle", b"\xff" * 8 + b"{}", None])
def test_what_is_no_checkpoint_is_refused(tmp_path, content):
    path = tmp_path / "a.params"
    if content is None:
        save(path, {"a": jnp.zeros(100)}, {})
        content = path.read_bytes()[:-7]
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.params: is not a whole safetensors file"):
        load(path)


def kept_after(tmp_path, losses, **options):
    """The epochs whose checkpoints are left after a run with these test losses (None: not evaluated)."""
    keeper = Checkpoints(tmp_path, CheckpointOptions(monitor="test_loss", **options), {})
    ts = fit(MODEL, (X, Y), optimizer=adam(), batch_size=60, epochs=1).states()[0]
    for epoch, loss in enumerate(losses, 1):
        metrics = {} if loss is None else {"test_loss": loss}
        run = SimpleNamespace(epoch=epoch, epochs=len(losses), step=epoch * 10, metrics=metrics, states=lambda: [ts])
        keeper.on_epoch_end(run)
    keeper.on_training_end(run)
    return sorted(int(p.stem.split("_")[1]) for p in tmp_path.glob("*.params"))


@pytest.mark.parametrize(
    ("losses", "options", "kept"),
    [
        ([3, 2, 1, 2, 2, 2], {"keep": 2}, [3, 5, 6]),
        ([3, 2, 1, 2, 2, 2], {"keep": 2, "mode": "max"}, [1, 5, 6]),
        ([6, 5, 4, 3, 2, 1], {"keep": 1}, [6]),
        ([float("nan"), 3, 1, 2, 2, 2], {"keep": 1}, [3, 6]),
        ([3, None, None, 1, None, None], {"keep": 1}, [4, 6]),  # the best is an evaluated one, though not the latest
        ([5, 1, 3, 4, 3, 6], {"keep": 2, "every_epochs": 3}, [2, 3, 6]),  # the best is kept though it was not due
        ([None] * 5, {"keep": 3, "every_epochs": 2}, [2, 4, 5]),
    ],
)
def test_the_last_and_the_best_are_kept(tmp_path, losses, options, kept):
    assert kept_after(tmp_path, losses, **options) == kept
