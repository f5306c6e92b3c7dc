"""Each case of the TFLite table against JAX, in LiteRT."""

import jax
import numpy as np
import pytest

from inference.lowering.trace import trace
from inference.runtimes import open_model
from inference.to_tflite import tensor_name, write_tflite
from tests.inference.cases import BATCH, GROUPS, TFLITE_GAPS, jax_answers, together, without


@pytest.mark.parametrize("name", GROUPS)
def test_each_case_equals_jax_at_any_batch(name, tmp_path):
    group = without(GROUPS[name], TFLITE_GAPS)
    shapes = {key: jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for key, array in group.inputs.items()}
    write_tflite(trace(together(group), {}, shapes), tmp_path / "cases.tflite")
    model = open_model(tmp_path / "cases.tflite")
    for batch in (1, BATCH):
        found = model({key: array[:batch] for key, array in group.inputs.items() if key in model.inputs})
        wanted = {path: array for path, array in jax_answers(name, batch).items() if path.split("/")[0] in group.cases}
        assert set(found) == set(map(tensor_name, wanted))
        for path, array in wanted.items():
            compare(path, found[tensor_name(path)], array)


def compare(name, found, wanted):
    """Equal within 1e-5 of the largest finite number; of whole numbers to the last bit."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
    if wanted.dtype.kind == "f":
        scale = np.abs(wanted[np.isfinite(wanted)]).max(initial=1e-30)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * scale, err_msg=name)
    else:
        np.testing.assert_array_equal(found, wanted, err_msg=name)
