"""Preprocessing against NumPy, and the inputs that it refuses."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.mlp import mlp
from training.fit import fit
from training.loss import mse
from training.optimizers import sgd
from training.options import LoaderOptions
from training.preprocess import fitted, mean_and_std, normalize, standardize, to_unit
from utils import UserError

pytestmark = pytest.mark.contract

BYTES = np.arange(256, dtype="uint8").reshape(8, 16, 2)


def test_to_unit_maps_bytes_to_floats_from_0_to_1():
    units = jax.jit(to_unit)(BYTES)
    np.testing.assert_allclose(units, BYTES / 255, rtol=2e-7)  # XLA multiplies by 1 / 255
    assert units.dtype == jnp.float32 and units.min() == 0 and units.max() == 1
    with jax.enable_x64(True):
        assert to_unit(jnp.asarray(BYTES)).dtype == jnp.float64


def test_normalize_works_by_channel_and_keeps_the_dtype():
    x = np.random.default_rng(0).normal(size=(5, 8, 8, 3)).astype("float32")
    mean, std = x.mean((0, 1, 2)), x.std((0, 1, 2))
    y = jax.vmap(lambda image: normalize(image, mean=tuple(mean), std=tuple(std)))(x)
    np.testing.assert_allclose(y, (x - mean) / std, rtol=1e-6)
    low = jnp.ones((2, 2, 1), jnp.bfloat16)
    assert normalize(low, mean=(0.5,), std=(0.5,)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: to_unit(jnp.ones((2, 2, 1))), "uint8.*float32"),
        (
            lambda: normalize(jnp.asarray(BYTES), mean=(0.5, 0.5), std=(0.5, 0.5)),
            "uint8; put to_unit before",
        ),
        (
            lambda: normalize(jnp.ones((2, 2, 3)), mean=(0.5,), std=(0.5,) * 3),
            "^mean: .* the 3 channels, got 1",
        ),
        (
            lambda: normalize(jnp.ones((2, 2, 3)), mean=(0.5,) * 3, std=(0.5,) * 2),
            "^std: .* the 3 channels, got 2",
        ),
        (
            lambda: normalize(jnp.ones((2, 2, 2)), mean=(0.5, 0.5), std=(0.5, 0.0)),
            "^std.1: must be a finite number above 0",
        ),
        (
            lambda: normalize(jnp.ones((2, 2, 2)), mean=(0.5, np.nan), std=(0.5, 0.5)),
            r"^mean: must be finite numbers, got \(0.5, nan\)",
        ),
    ],
)
def test_wrong_inputs_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def uneven(x, sizes=(7, 1, 50)):
    return np.split(x[: sum(sizes)], np.cumsum(sizes)[:-1])


def test_mean_and_std_of_batches_are_those_of_the_whole():
    x = (1e4 + np.random.default_rng(0).normal(size=(58, 5, 3))).astype(np.float32)
    statistics = mean_and_std(uneven(x))
    flat = x.astype(np.float64).reshape(-1, 3)
    np.testing.assert_allclose(statistics["mean"], flat.mean(0), rtol=1e-8)
    np.testing.assert_allclose(statistics["std"], flat.std(0), rtol=1e-8)


def test_a_table_is_standardized_also_its_integers_and_constant_columns():
    table = np.random.default_rng(0).integers(0, 50, (90, 4))
    table[:, 2] = 7
    (fn,) = fitted([standardize], (table, np.zeros(90)))
    columns = np.asarray(jax.vmap(fn)(table))
    np.testing.assert_allclose(columns.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(columns.std(0), [1, 1, 0, 1], atol=1e-6)
    with pytest.raises(ValueError, match=r"standardize: works on a row of numbers, got \[2, 2\]"):
        standardize(np.zeros((2, 2)))


def test_statistics_are_of_what_the_functions_before_make_and_given_ones_stay():
    images = np.random.default_rng(0).integers(0, 256, (40, 4, 4, 3), np.uint8)
    given = partial(normalize, mean=(0.5, 0.5, 0.5))
    fns = fitted([to_unit, given], [(image, 0) for image in images])
    assert fns[0] is to_unit and fns[1].keywords["mean"] == (0.5, 0.5, 0.5)
    np.testing.assert_allclose(fns[1].keywords["std"], images.std((0, 1, 2)) / 255, rtol=1e-6)
    assert fitted(fns, None) == fns  # nothing is left to compute


@pytest.mark.slow
def test_integers_that_do_not_fit_into_32_bits_are_refused():
    """JAX would wrap them around without a word."""
    x = np.array([[1_700_000_000_000, 1], [1_700_000_000_001, 2]])
    message = "holds the integer 170000000000[01], and integers of devices have 32 bits"
    with pytest.raises(UserError, match=f"data: .*{message}"):
        fitted([standardize], (x, np.zeros(2)))
    settings = {"optimizer": sgd(0.1), "loss": mse, "epochs": 1, "batch_size": 2}
    for data in ((x, np.zeros((2, 3))), iter([(x, np.zeros((2, 3)))])):
        with pytest.raises(UserError, match=message):
            fit(mlp((2,), 3), data, preprocess=[lambda x: x / 1000.0], **settings)
    fit(mlp((2,), 3), (x % 2**31, np.zeros((2, 3))), preprocess=[lambda x: x / 1e9], **settings)


def test_statistics_of_large_examples_take_little_memory():
    sizes = []

    class Images:
        def __len__(self):
            return 5

        def __getitem__(self, i):
            return np.full((4096, 4096, 1), i, np.uint8), 0

    def collate_fn(examples):
        sizes.append(len(examples))
        return np.stack([x for x, _ in examples]), np.zeros(len(examples))

    (ready,) = fitted([normalize], Images(), LoaderOptions(collate_fn=collate_fn))
    assert set(sizes) == {1} and ready.keywords["mean"] == (2.0,)


def test_numbers_that_are_not_finite_are_named_by_their_column():
    table = np.ones((9, 3), np.float32)
    table[4, 1] = np.nan
    with pytest.raises(
        UserError, match=r"standardize: column 1 \(from 0\) of the training set holds NaN"
    ):
        fitted([standardize], (table, np.zeros(9)))
    with pytest.raises(ValueError, match="normalize: has no statistics yet; give `mean`"):
        normalize(jnp.ones((2, 2, 1)))
