"""Each case of the TFLite table against JAX, in LiteRT."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.lowering.trace import trace
from inference.lowering.walk import Missing
from inference.runtimes import open_model
from inference.to_tflite import write_tflite
from model.layers.activations import gelu
from tests.inference.cases import BATCH, GROUPS, TFLITE_GAPS, Group, jax_answers, together, without
from utils import named_leaves


@pytest.mark.parametrize("name", GROUPS)
def test_each_case_equals_jax_at_any_batch(name, tmp_path):
    group = without(GROUPS[name], TFLITE_GAPS)
    shapes = {key: jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for key, array in group.inputs.items()}
    write_tflite(trace(together(group), {}, shapes), tmp_path / "cases.tflite")
    model = open_model(tmp_path / "cases.tflite")
    for batch in (1, BATCH):
        found = model({key: array[:batch] for key, array in group.inputs.items() if key in model.inputs})
        wanted = {path: array for path, array in jax_answers(name, batch).items() if path.split("/")[0] in group.cases}
        assert set(found) == set(wanted)
        for path, array in wanted.items():
            compare(path, found[path], array)


@pytest.mark.parametrize("case", TFLITE_GAPS)
def test_a_gap_is_told_as_one(case, tmp_path):
    group = next(group for group in GROUPS.values() if case in group.cases)
    shapes = {key: jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for key, array in group.inputs.items()}
    with pytest.raises(Missing, match=r"\(.*cases\.py:"):
        write_tflite(trace(together(group._replace(cases={case: group.cases[case]})), {}, shapes), tmp_path / "gap.tflite")


TRAPS = {
    "products at places that differ": lambda x, i: jnp.nan_to_num(x).at[:, ::2].multiply(2.0).at[:, 1].max(0.5),
    "inf is equal to inf": lambda x, i: (x == jnp.inf, x != jnp.inf, -x == -jnp.inf, jnp.nan_to_num(x)),
    "a largest number among nan": lambda x, i: (x.max(-1), jnp.maximum(x, x[:, ::-1]), jnp.minimum(x, 0.5), jnp.argmax(x, -1)),
    "whole numbers from 0 to 6": lambda x, i: jnp.clip(i, 0, 6),
    "half of the x of a gelu": lambda x, i: (gelu(x), 0.5 * x),
    "a constant on the left": lambda x, i: jnp.einsum("ij,bjk->ibk", jnp.ones((2, 4)), jnp.nan_to_num(x)[:, :4, None]),
    "bits of a narrow type": lambda x, i: (i.astype(jnp.uint8) >> 1, i.astype(jnp.int8) * jnp.int8(50)),
    "a long scan": lambda x, i: jax.lax.scan(lambda c, row: (c + row, c * row), i[:, 0], jnp.tile(i.T, (4, 1))),
    "half of two batches": lambda x, i: (jnp.concatenate([i, i + 1])[: i.shape[0]], jnp.concatenate([i, i + 1])[i.shape[0] :]),
    "a row of each example": lambda x, i: i[jnp.arange(i.shape[0]), jnp.clip(i[:, 0], 0, 4)],
}


def test_what_the_converter_or_its_ops_would_get_wrong(tmp_path):
    x = np.array([[1, np.inf, -np.inf, 0, 2], [np.nan, 1, 2, 3, 9], [3, 2, np.nan, np.inf, 1]], np.float32)
    group = Group({"x": x, "i": np.arange(-5, 10, dtype=np.int32).reshape(3, 5)}, TRAPS)
    shapes = {key: jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for key, array in group.inputs.items()}
    write_tflite(trace(together(group), {}, shapes), tmp_path / "traps.tflite")
    found = open_model(tmp_path / "traps.tflite")(group.inputs)
    for path, leaf in named_leaves(together(group)(None, group.inputs)).items():
        compare(path, found[path], np.asarray(leaf))


def compare(name, found, wanted):
    """Equal within 1e-5 of the largest finite number; of whole numbers to the last bit."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
    if wanted.dtype.kind == "f":
        scale = np.abs(wanted[np.isfinite(wanted)]).max(initial=1e-30)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * scale, err_msg=name)
    else:
        np.testing.assert_array_equal(found, wanted, err_msg=name)
