import haiku as hk
import jax


class Net(hk.Module):
    def __init__(self, num_classes, width=16):
        super().__init__()
        self.num_classes, self.width = num_classes, width

    def __call__(self, x, is_training):
        x = hk.BatchNorm(True, True, 0.9)(hk.Conv2D(self.width, 3, stride=2)(x), is_training)
        x = jax.nn.relu(x).mean((1, 2))
        x = hk.dropout(hk.next_rng_key(), 0.5, x) if is_training else x
        return hk.Linear(self.num_classes)(x)
