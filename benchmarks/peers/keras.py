"""Keras 3 on JAX, as in its MNIST and vision transformer examples: the functional API, `compile`
and `fit`."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # read once, by the import

import keras
from keras import layers, ops

from benchmarks.peers import TEST_BATCH


class Trainer:
    """A compiled model."""

    def __init__(self, workload, data, variant):
        self.data = {name: (x, keras.utils.to_categorical(y, 10)) for name, (x, y) in data.items()}
        self.batch_size = workload.batch_size
        self.steps = len(data["train"][0]) // workload.batch_size
        keras.utils.set_random_seed(0)
        inputs = keras.Input(workload.shape)
        self.model = keras.Model(inputs, MODELS[workload.model](inputs, **workload.args))
        loss = keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=workload.label_smoothing
        )
        self.model.compile(optimizer_of(workload, self.steps), loss, metrics=["accuracy"])
        self.parameters = sum(weight.numpy().size for weight in self.model.trainable_weights)

    def epoch(self, seed):
        keras.utils.set_random_seed(seed)
        x, y = (array[: self.steps * self.batch_size] for array in self.data["train"])
        return self.model.fit(x, y, self.batch_size, verbose=0).history["loss"][0]

    def accuracy(self):
        options = {"batch_size": TEST_BATCH, "verbose": 0, "return_dict": True}
        return self.model.evaluate(*self.data["test"], **options)["accuracy"]


trainer = Trainer


def optimizer_of(workload, steps):
    rate = OneCycle(workload, steps) if workload.schedule == "one_cycle" else workload.lr
    adamw = keras.optimizers.AdamW(rate, weight_decay=workload.weight_decay)
    adamw.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return adamw


class OneCycle(keras.optimizers.schedules.LearningRateSchedule):
    """Linearly up from 0, then linearly down to 0."""

    def __init__(self, workload, steps):
        self.rate, self.steps = workload.lr, steps * workload.epochs
        self.warmup = round(workload.warmup * self.steps)

    def __call__(self, step):
        step = ops.cast(step, "float32")
        rise = step / self.warmup if self.warmup else 1.0
        fall = (self.steps - step) / (self.steps - self.warmup)
        return self.rate * ops.clip(ops.minimum(rise, fall), 0, 1)


def convnext(x, dims, kernel=7, expansion=2, head_dim=64, residual=False, patch=4, depths=None):
    x = layer_norm(layers.Conv2D(dims[0], patch, strides=patch, use_bias=False)(x))
    for i, dim in enumerate(dims):
        if i > 0:
            x = layers.Conv2D(dim, 2, strides=2, use_bias=False)(layer_norm(x))
        for _ in range(depths[i] if depths else 1):
            y = layer_norm(layers.DepthwiseConv2D(kernel, padding="same", use_bias=False)(x))
            y = layers.Conv2D(expansion * dim, 1, activation="gelu", use_bias=False)(y)
            y = layers.Conv2D(dim, 1, use_bias=False)(y)
            x = layers.Add()([x, y]) if residual else y
    x = layer_norm(layers.GlobalAveragePooling2D()(x))
    return layers.Dense(10)(layers.Dense(head_dim)(x))


def mlp(x, dims):
    x = layers.Flatten()(x)
    for dim in dims:
        x = layers.Dense(dim, activation="relu")(x)
    return layers.Dense(10)(x)


def vit(x, patch=4, dim=64, depth=4, heads=4):
    x = layers.Conv2D(dim, patch, strides=patch)(x)
    x = Positions()(layers.Reshape((-1, dim))(x))
    for _ in range(depth):
        y = layer_norm(x)
        x = layers.Add()([x, layers.MultiHeadAttention(heads, dim // heads)(y, y)])
        y = layers.Dense(4 * dim, activation="gelu")(layer_norm(x))
        x = layers.Add()([x, layers.Dense(dim)(y)])
    return layers.Dense(10)(layers.GlobalAveragePooling1D()(layer_norm(x)))


class Positions(layers.Layer):
    """Adds a learned vector to each token."""

    def build(self, shape):
        small = keras.initializers.TruncatedNormal(stddev=0.02)
        self.positions = self.add_weight(shape[1:], initializer=small)

    def call(self, x):
        return x + self.positions


def resnet(x, widths, depth):
    def unit(x, width, kernel, stride=1):
        x = layers.Conv2D(width, kernel, strides=stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)

    x = layers.ReLU()(unit(x, widths[0], 3))
    for i, width in enumerate(widths):
        for j in range(depth):
            stride = 2 if i > 0 and j == 0 else 1
            y = unit(layers.ReLU()(unit(x, width, 3, stride)), width, 3)
            x = unit(x, width, 1, stride) if stride > 1 else x
            x = layers.ReLU()(layers.Add()([x, y]))
    return layers.Dense(10)(layers.GlobalAveragePooling2D()(x))


def layer_norm(x):
    return layers.LayerNormalization(epsilon=1e-6)(x)


MODELS = {f.__name__: f for f in (convnext, mlp, vit, resnet)}
