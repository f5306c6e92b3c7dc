"""The loss, of one example; the toolkit maps it over the batch."""

import jax
import jax.numpy as jnp
from rawtree.training.base import Loss


def focal(logits, label, *, gamma: float = 2.0) -> Loss:
    """Cross entropy that gives less weight to examples that are classified well."""
    log_probability = jax.nn.log_softmax(logits)[label]
    return -((1 - jnp.exp(log_probability)) ** gamma) * log_probability
