import equinox as eqx
import jax
import jax.numpy as jnp


class Net(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, num_classes, width=16, *, key):
        conv_key, head_key = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(1, width, 3, stride=2, key=conv_key)
        self.norm = eqx.nn.BatchNorm(width, "batch", mode="batch")
        self.drop = eqx.nn.Dropout(0.5)
        self.head = eqx.nn.Linear(width, num_classes, key=head_key)

    def __call__(self, x, state, *, key=None):
        x, state = self.norm(self.conv(jnp.moveaxis(x, -1, 0)), state)
        return self.head(self.drop(jax.nn.relu(x).mean((1, 2)), key=key)), state
