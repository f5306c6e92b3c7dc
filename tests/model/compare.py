"""Assert that two functions have the same values and gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

# Without optimization, because compiling is most of a test's time.
quick_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
DTYPES = [jnp.float32, jnp.bfloat16]
TOLERANCE = {jnp.float32: 2e-5, jnp.bfloat16: 3e-2}  # relative to the array's largest number


def normal(seed, *shape):
    # NumPy, because JAX would compile once per shape.
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def random_params(init, *args, **options):
    """Random values for all params of `init`: a bias of 0 or a scale of 1 could hide a mistake."""
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), *args, **options))
    leaves, tree = jax.tree.flatten(shapes)
    return tree.unflatten([normal(i, *leaf.shape) for i, leaf in enumerate(leaves)])


def assert_same(ours, theirs, *args, dtype=jnp.float32, jit=quick_jit):
    """Compare both functions' values, and their gradients for every argument."""
    args = jax.tree.map(lambda a: a.astype(dtype), args)
    ours = jax.tree.leaves(value_and_gradients(ours, args, jit))
    theirs = jax.tree.leaves(value_and_gradients(theirs, args, jit))
    for a, b in zip(ours, theirs, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE[dtype] * np.abs(b).max())


def value_and_gradients(fn, args, jit=quick_jit):
    """The value, and the gradients of its elements' sum under random weights."""

    def weighted(*args):
        y = fn(*args)
        return (y * normal(99, *y.shape)).sum(), y

    gradient = jax.value_and_grad(weighted, tuple(range(len(args))), has_aux=True)
    (_, value), grads = jit(gradient)(*args)
    return value, grads
