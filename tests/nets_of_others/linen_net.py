from flax import linen as nn


class Net(nn.Module):
    num_classes: int
    width: int = 16

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Conv(self.width, (3, 3), strides=2)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.Dropout(0.5, deterministic=not train)(x.mean((1, 2)))
        return nn.Dense(self.num_classes)(x)
