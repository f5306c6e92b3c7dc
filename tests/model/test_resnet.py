"""The running statistics of resnet, and its size against the paper."""

import jax
import numpy as np
import pytest

from model.resnet import resnet
from tests.model.compare import normal, quick_jit
from utils import named_leaves

pytestmark = pytest.mark.contract

MODEL = resnet((6, 6, 1), 3, widths=(4, 8), depth=1)


@pytest.mark.slow
def test_the_running_statistics_approach_those_of_the_batches():
    params, state = quick_jit(MODEL.init)(jax.random.key(0))
    x = 5 + 3 * normal(1, 16, 6, 6, 1)
    step = quick_jit(lambda state: MODEL.apply(params, state, x, train=True))
    out, new = step(state)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).any(), new, state)))
    for _ in range(100):
        _, new = step(new)
    np.testing.assert_allclose(quick_jit(MODEL.apply)(params, new, x)[0], out, rtol=1e-2, atol=1e-2)


def test_resnet20_has_as_many_parameters_as_in_the_paper():
    params, _ = jax.eval_shape(resnet((32, 32, 3), 10).init, jax.random.key(0))
    # Without the convolutions of the shortcuts, since the paper's shortcuts have no parameters.
    leaves = {name: leaf for name, leaf in named_leaves(params).items() if "shortcut" not in name}
    assert sum(name.endswith("conv/weight") for name in leaves) == 19
    assert round(sum(leaf.size for leaf in leaves.values()) / 1e6, 2) == 0.27
