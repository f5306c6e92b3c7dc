from flax import nnx


class Net(nnx.Module):
    def __init__(self, num_classes, width=16, *, rngs):
        self.conv = nnx.Conv(1, width, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(width, num_classes, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        return self.head(self.drop(x.mean((1, 2))))
