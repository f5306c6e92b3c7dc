import jax
import numpy as np

from model.resnet import resnet
from tests.model.compare import normal
from utils import named_leaves

MODEL = resnet((6, 6, 1), 3, widths=(4, 8), depth=1)


def test_the_running_statistics_follow_the_batches():
    params, state = MODEL.init(jax.random.key(0))
    x = 5 + 3 * normal(1, 16, 6, 6, 1)
    step = jax.jit(lambda state: MODEL.apply(params, state, x, train=True))
    out, new = step(state)
    assert all((a != b).any() for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True))
    for _ in range(100):
        _, new = step(new)
    np.testing.assert_allclose(MODEL.apply(params, new, x)[0], out, rtol=1e-2, atol=1e-2)


def test_twenty_layers_have_the_papers_number_of_parameters():
    params, state = jax.eval_shape(resnet((32, 32, 3), 10).init, jax.random.key(0))
    convolutions = [
        leaf for name, leaf in named_leaves(params).items() if name.endswith("conv/weight") and "shortcut" not in name
    ]
    assert len(convolutions) == 19
    size = sum(leaf.size for name, leaf in named_leaves(params).items() if "shortcut" not in name)
    assert round(size / 1e6, 2) == 0.27
    assert set(named_leaves(state)) == {
        name.replace("conv/weight", stat)
        for name in named_leaves(params)
        if name.endswith("conv/weight")
        for stat in ("mean", "var")
    }
