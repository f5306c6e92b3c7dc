"""A model with a projection head, which is trained by comparing examples, as with `simclr`."""

import jax
import numpy as np
from jaxtyping import Array, Float, PyTree

from model.base import Model
from model.layers.activations import relu
from model.layers.linear import linear, linear_init
from utils.forms import Count, checked


@checked
def projected(
    input_shape: tuple[int, ...], encoder: Model, hidden: Count = 128, dim: Count = 64
) -> Model:
    """{"features": the output of the encoder, (B, features), "projection": the output of a
    perceptron over the features, (B, dim)}. The features are for other tasks, such as a linear
    probe; the objective compares the projections. The `num_classes` of the encoder is the number of
    features."""
    key, x = jax.random.key(0), jax.ShapeDtypeStruct((1, *input_shape), float)
    features = jax.eval_shape(lambda x: encoder.apply(*encoder.init(key), x)[0], x).shape[-1]

    def init(key: Array) -> tuple[PyTree, PyTree]:
        k1, k2, k3 = jax.random.split(key, 3)
        params, state = encoder.init(k1)
        head = {"hidden": linear_init(k2, features, hidden), "out": linear_init(k3, hidden, dim)}
        return {"encoder": params, "projection": head}, state

    def apply(
        params: PyTree, state: PyTree, x: PyTree, *, train: bool = False, key: Array | None = None
    ) -> tuple[dict[str, Float[Array, "batch _"]], PyTree]:
        y, state = encoder.apply(params["encoder"], state, x, train=train, key=key)
        head = params["projection"]
        z = linear(head["out"], relu(linear(head["hidden"], relu(y))))
        return {"features": y, "projection": z}, state

    def fit(params: PyTree, state: PyTree, x: np.ndarray) -> tuple[PyTree, PyTree]:
        assert encoder.fit
        own, state = encoder.fit(params["encoder"], state, x)
        return params | {"encoder": own}, state

    return Model(init, apply, fit=fit if encoder.fit else None, exact_inputs=encoder.exact_inputs)
