"""Two functions give the same values and the same gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

quick_jit = partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)  # compiling is most of a test's time
DTYPES = [jnp.float32, jnp.bfloat16]
TOLERANCE = {jnp.float32: 2e-5, jnp.bfloat16: 3e-2}  # of the largest number of each array


def normal(seed, *shape):
    return (
        np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    )  # numpy: jax would compile for each shape


def random_params(init, *args, **options):
    """Parameters of the shapes that init gives, all random, so that no zero bias or unit scale hides a mistake."""
    leaves, tree = jax.tree.flatten(
        jax.eval_shape(lambda: init(jax.random.key(0), *args, **options))
    )
    return tree.unflatten([normal(i, *leaf.shape) for i, leaf in enumerate(leaves)])


def assert_same(ours, theirs, *args, dtype=jnp.float32):
    """Checks the value of each function and its gradient for every argument, under a random weighting of the output."""
    args = jax.tree.map(lambda a: a.astype(dtype), args)
    ours, theirs = jax.tree.leaves(outcome(ours, args)), jax.tree.leaves(outcome(theirs, args))
    for a, b in zip(ours, theirs, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE[dtype] * np.abs(b).max())


def outcome(fn, args):
    def weighted(*args):
        y = fn(*args)
        return (y * normal(99, *y.shape)).sum(), y

    gradient = jax.value_and_grad(weighted, tuple(range(len(args))), has_aux=True)
    (_, value), grads = quick_jit(gradient)(*args)
    return value, grads
