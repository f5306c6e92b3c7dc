"""Objectives: what a model is trained for. A config names a factory, which receives the model, the
loss, the metrics, preprocess and augment, and returns an Objective, or only the function

objective(params, state, batch, key, train) -> (loss per example, state, {metric: value per
example})

If it declares a keyword `step`, it gets the number of steps trained before, as for a term that
grows during training; if it declares `mask`, it gets which examples of the batch are genuine.

A loss may return a dict of terms: their sum is minimized, and each is reported as `loss_<term>`. A
loss or a metric may be Weighted, for example by the number of tokens in a sequence.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jax.stages import Traced
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, PyTree

from model.base import Model
from training.base import (
    Augmented,
    Functions,
    LossFunction,
    Measured,
    Metric,
    Metrics,
    Objective,
    Weighted,
    check_value,
    is_weighted,
)
from utils import UserError, parameters_of
from utils.forms import NonNegative, Positive, checked

OF_PART = "in the "  # the beginning of a note that names a loss or a metric


def supervised(
    model: Model,
    loss: LossFunction,
    metrics: Metrics,
    preprocess: Functions,
    augment: Functions,
    views: Literal["one", "flipped", "flipped_and_shifted"] = "one",
) -> Objective:
    """Compare the model's output with the target of a batch (x, target). An evaluation takes the
    mean output over `views` of each image: the image and its mirror image; `flipped_and_shifted`
    gives half of the weight to these two after shifts by one pixel along a diagonal."""

    def objective(
        params: PyTree, state: PyTree, batch: PyTree, key: Array, train: bool
    ) -> Measured:
        x, target = pair_of(batch)
        augment_key, model_key = jax.random.split(key)
        x, target = inputs(preprocess, augment if train else (), augment_key, x, target)
        if train or views == "one":
            # As in a prediction and an export, there is no key in an evaluation.
            model_key = model_key if train else None
            output, state = model.apply(params, state, x, train=train, key=model_key)
        else:
            output = output_of_views(partial(model.apply, params, state), x, views)
        losses, values = scored(loss, metrics, output, target)
        return losses, state, values

    return Objective(objective, finish_means(metrics))


def output_of_views(apply: Callable[..., tuple[PyTree, PyTree]], x: Array, views: str) -> PyTree:
    """The mean of a model's outputs over several views of each image of a batch."""
    if getattr(x, "ndim", None) != 4:
        axes = "(height, width, channels)"
        raise ValueError(f"views: an example must be an image {axes}, got a batch {jnp.shape(x)}")
    shown, (_, height, width, _) = [(1.0, x)], x.shape
    if views == "flipped_and_shifted":
        padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), "reflect")
        moved = [padded[:, i : i + height, i : i + width] for i in (0, 2)]
        shown = [(0.5, x), *((0.25, each) for each in moved)]
    shares = jnp.array([share / 2 for share, _ in shown for _ in range(2)])
    images = jnp.stack([view for _, each in shown for view in (each, each[:, :, ::-1])])
    output, _ = apply(images.reshape(-1, *x.shape[1:]), train=False, key=None)
    if any(looks_like_image(out.shape[1:], (height, width)) for out in jax.tree.leaves(output)):
        fix = 'use views="one"'
        raise UserError(f"views: the mean of outputs that are images would mix places; {fix}")
    each = lambda out: out.reshape(len(shares), -1, *out.shape[1:])  # noqa: E731
    return jax.tree.map(lambda out: jnp.tensordot(shares, each(out), 1), output)


@checked
def mixup(
    model: Model,
    loss: LossFunction,
    metrics: Metrics,
    preprocess: Functions,
    augment: Functions,
    alpha: Positive = 0.2,
) -> Objective:
    """Train on mixtures of two examples, with the same mixture of their losses; evaluate as
    usual."""

    if getattr(model, "exact_inputs", False):
        fix = "give an mlp one-hot categories instead"
        raise UserError(f"objective: mixup would mix the codes of categories into others; {fix}")

    def mix(key: Array, x: PyTree, target: PyTree) -> tuple[PyTree, PyTree, PyTree, Array]:
        for leaf in jax.tree.leaves(x):  # images may still be integers
            if jnp.issubdtype(leaf.dtype, jnp.integer) and leaf.ndim < 4:
                found = f"{leaf.dtype}{list(leaf.shape[1:])}"
                raise UserError(f"mixup: an input holds integers, {found}; it mixes only floats")
        share = jax.random.beta(key, alpha, alpha)
        x = jax.tree.map(lambda a: share * a + (1 - share) * a[::-1], x)
        return x, target, jax.tree.map(lambda a: a[::-1], target), share

    return of_mixtures(mix, model, loss, metrics, preprocess, augment)


@checked
def cutmix(
    model: Model,
    loss: LossFunction,
    metrics: Metrics,
    preprocess: Functions,
    augment: Functions,
    alpha: Positive = 1.0,
) -> Objective:
    """Train on images with a rectangle of another image in them, with the mixture of the two losses
    by area (Yun et al., 2019); evaluate as usual. A target that is an image gets the rectangle of
    the other target."""

    def mix(key: Array, x: Array, target: PyTree) -> tuple[Array, PyTree, PyTree, Array]:
        if not hasattr(x, "ndim") or x.ndim != 4:
            found = jax.tree.map(jnp.shape, x)
            axes = "(height, width, channels)"
            raise ValueError(f"cutmix: an example must be an image {axes}, got a batch {found}")
        share_key, centre_key = jax.random.split(key)
        side = jnp.sqrt(1 - jax.random.beta(share_key, alpha, alpha)) / 2
        _, height, width, _ = x.shape
        sizes = jnp.array((height, width))
        centre = jax.random.randint(centre_key, (2,), 0, sizes)
        half = (side * sizes).astype(int)
        first, end = jnp.maximum(centre - half, 0), jnp.minimum(centre + half, sizes)
        rows, columns = (
            (first[i] <= jnp.arange(n)) & (jnp.arange(n) < end[i])
            for i, n in enumerate((height, width))
        )
        cut = rows[:, None] & columns

        def with_rectangle(a: Array) -> Array:
            return jnp.where(cut.reshape(*cut.shape, *(1,) * (a.ndim - 3)), a[::-1], a)

        def of_target(a: Array, other: Array) -> Array:
            return with_rectangle(a) if is_image(a.shape[1:], (height, width)) else other

        both = (
            jax.tree.map(of_target, target, others)
            for others in (target, jax.tree.map(lambda a: a[::-1], target))
        )
        return with_rectangle(x), *both, 1 - cut.mean()

    return of_mixtures(mix, model, loss, metrics, preprocess, augment)


def of_mixtures(
    mix: Callable[[Array, PyTree, PyTree], tuple[PyTree, PyTree, PyTree, Array]],
    model: Model,
    loss: LossFunction,
    metrics: Metrics,
    preprocess: Functions,
    augment: Functions,
) -> Annotated[Objective, "no part"]:
    """Train on `mix(key, x, target) -> (x, target, other target, share)`, which mixes each example
    with its counterpart in the reversed batch; `share` is the weight of the first target in the
    loss."""
    plain = supervised(model, loss, metrics, preprocess, augment)

    def objective(
        params: PyTree, state: PyTree, batch: PyTree, key: Array, train: bool
    ) -> Measured:
        if not train:
            return plain(params, state, batch, key, train)
        x, target = pair_of(batch)
        augment_key, model_key, mix_key = jax.random.split(key, 3)
        pair = inputs(preprocess, augment, augment_key, x, target)
        x, target, other, share = mix(mix_key, *pair)
        output, state = model.apply(params, state, x, train=True, key=model_key)
        both = [of_examples("loss", loss, output, each) for each in (target, other)]
        losses, terms = summed(jax.tree.map(partial(mixed, share), *both, is_leaf=is_weighted))
        return losses, state, metrics_per_example(metrics, output, target, terms)

    return Objective(objective, plain.finish)


@checked
def denoising(
    model: Model,
    loss: LossFunction,
    metrics: Metrics,
    preprocess: Functions,
    augment: Functions,
    noise: NonNegative = 0.5,
) -> Objective:
    """Train an autoencoder: the clean input is the target of the noisy one; labels are ignored."""

    def objective(
        params: PyTree, state: PyTree, batch: PyTree, key: Array, train: bool
    ) -> Measured:
        augment_key, noise_key, model_key = jax.random.split(key, 3)
        augmentation = augment if train else ()
        clean, _ = inputs(preprocess, augmentation, augment_key, x_of(batch), None)
        noisy = clean + noise * jax.random.normal(noise_key, clean.shape, clean.dtype)
        output, state = model.apply(params, state, noisy, train=train, key=model_key)
        if output.size != clean.size:
            sizes = f"an example has {clean[0].size} numbers, its output {output[0].size}"
            fix = f"as by model.args.num_classes={clean[0].size}"
            raise UserError(f"objective: denoising: {sizes}; make them the same, {fix}")
        output = output.reshape(clean.shape)
        losses, values = scored(loss, metrics, output, clean)
        return losses, state, values

    return Objective(objective, finish_means(metrics))


def pair_of(batch: PyTree) -> tuple[PyTree, PyTree]:
    """A batch, which must be a pair of inputs and targets."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        x, target = batch
        return x, target
    form = f"one of {len(batch)}" if isinstance(batch, tuple | list) else "an array"
    form = f"a dict of {', '.join(map(str, batch))}" if isinstance(batch, dict) else form
    fix = "return (x, target) from the dataset, the loader or its collate_fn"
    raise UserError(f"data: this objective needs pairs, (x, target), and a batch is {form}; {fix}")


def x_of(batch: PyTree) -> PyTree:
    """The inputs of a batch, which may have no targets."""
    return batch[0] if isinstance(batch, tuple | list) else batch


def preprocessed(preprocess: Functions, x: PyTree) -> PyTree:
    """A batch of raw inputs, preprocessed example by example, as in an evaluation."""
    for fn in preprocess:
        x = jax.vmap(fn)(x)
    return x


def inputs(
    preprocess: Functions,
    augment: Functions,
    key: Array,
    x: PyTree,
    target: PyTree,
) -> tuple[PyTree, PyTree]:
    """(x, target) of a batch with the raw inputs preprocessed and augmented example by example, and
    the targets augmented with them; None for a target that is not used. Augmentations with the
    attribute `of_raw`, such as changes of colours, come before preprocessing. Those with
    `by_epoch` have been applied before: see `configured` of training/recipe.py."""
    batch_size = len(jax.tree.leaves(x)[0])

    def all_augmented(x: PyTree, target: PyTree, of_raw: bool) -> tuple[PyTree, PyTree]:
        for i, fn in enumerate(augment):
            if not is_marked(fn, "by_epoch") and is_marked(fn, "of_raw") == of_raw:
                keys = jax.random.split(jax.random.fold_in(key, i), batch_size)
                x, target = augmented(fn, keys, x, target)
        return x, target

    x, target = all_augmented(x, target, of_raw=True)
    return all_augmented(preprocessed(preprocess, x), target, of_raw=False)


def augmented(
    fn: Callable[..., Augmented], keys: ArrayLike, x: PyTree, target: PyTree
) -> tuple[PyTree, PyTree]:
    """(x, target) of a batch after an augmentation of every example. `keys` are the random keys, or
    the number of the epoch."""
    axis = 0 if jnp.ndim(keys) else None
    if target is not None and "target" in parameters_of(fn):
        return jax.vmap(fn, (axis, 0, 0))(keys, x, target)
    size = x.shape[1:3] if getattr(x, "ndim", None) == 4 and not is_marked(fn, "of_values") else ()
    if size and any(is_image(leaf.shape[1:], size) for leaf in jax.tree.leaves(target)):
        name = getattr(getattr(fn, "func", fn), "__name__", type(fn).__name__)
        raise UserError(
            f"augment: {name} gets the image alone, and the target is an image, too; if it moves "
            f"pixels, let it take (key, x, target) and return (x, target), else mark it: "
            f"{name}.of_values = True"
        )
    return jax.vmap(fn, (axis, 0))(keys, x), target


def is_image(shape: tuple[int, ...], size: tuple[int, int]) -> bool:
    """Whether an array of a target belongs to an image of this (height, width) pixel by pixel. An
    image of another size, or with other axes first, is an error, since it cannot be augmented."""
    if shape[:2] != tuple(size) and looks_like_image(shape, size):
        raise UserError(
            f"data: the target {list(shape)} looks like an image, but its first axes are not "
            f"the height and width of the input, {size[0]} and {size[1]}; make it such an image, "
            "or write an augmentation that takes (key, x, target)"
        )
    return shape[:2] == tuple(size)


def looks_like_image(shape: tuple[int, ...], size: tuple[int, int]) -> bool:
    """Whether two axes in a row have the ratio of (height, width)."""
    height, width = size
    return any(a > 1 and a * width == b * height for a, b in pairwise(shape))


def is_marked(fn: Callable, attribute: str) -> bool:
    """Whether a function, also under functools.partial, has an attribute."""
    return getattr(getattr(fn, "func", fn), attribute, False)


def augmented_by_epoch(augment: Functions, epoch: ArrayLike, batch: PyTree) -> PyTree:
    """A batch whose raw inputs went through the functions with the attribute `by_epoch`, which get
    the number of the epoch instead of a key."""
    x, *rest = batch if isinstance(batch, tuple | list) else (batch,)
    target = rest[0] if len(rest) == 1 else None
    for fn in augment:
        if is_marked(fn, "by_epoch"):
            x, target = augmented(fn, epoch, x, target)
    if not isinstance(batch, tuple | list):
        return x
    return (x, target) if len(rest) == 1 else (x, *rest)


def outputs(
    model: Model,
    preprocess: Functions,
    params: PyTree,
    state: PyTree,
    x: PyTree,
) -> PyTree:
    """The model's outputs for a batch of raw inputs, as in an evaluation."""
    return model.apply(params, state, preprocessed(preprocess, x), train=False, key=None)[0]


def scored(
    loss: LossFunction,
    metrics: Metrics,
    output: PyTree,
    target: PyTree,
) -> tuple[PyTree, dict[str, PyTree]]:
    """(loss per example, {metric: value per example}) of a batch of outputs."""
    losses, terms = summed(of_examples("loss", loss, output, target))
    return losses, metrics_per_example(metrics, output, target, terms)


def summed(losses: PyTree) -> tuple[PyTree, dict[str, PyTree]]:
    """(the loss per example, {name: term per example}), where only a dict of terms has any. Terms
    with weights are not added, since each of them has its own mean."""
    terms = losses if isinstance(losses, dict) else {}
    weighted = any(map(is_weighted, terms.values()))
    total = sum(terms.values()) if terms and not weighted else losses
    return total, {f"loss_{name}": term for name, term in terms.items()}


def mixed(share: Float[Array, ""], a: Array | Weighted, b: Array | Weighted) -> Array | Weighted:
    """The mixture of two losses of an example, whose weights are mixed, too."""
    if not (isinstance(a, Weighted) and isinstance(b, Weighted)):
        return share * jnp.asarray(a) + (1 - share) * jnp.asarray(b)
    weight = share * a.weight + (1 - share) * b.weight
    total = share * a.weight * a.value + (1 - share) * b.weight * b.value
    return Weighted(total / jnp.where(weight == 0, 1, weight), weight)


def metrics_per_example(
    metrics: Metrics,
    output: PyTree,
    target: PyTree,
    terms: dict[str, PyTree],
) -> dict[str, PyTree]:
    """{name: value per example} of the terms of the loss and of `metrics`, {name: function}."""
    if taken := terms.keys() & metrics.keys():
        names = ", ".join(sorted(taken))
        raise UserError(f"metrics: {names}: is the name of a term of the loss; use another label")
    of_metric = lambda name, fn: of_examples(f"metric {name}", fn, output, target)  # noqa: E731
    return terms | {name: of_metric(name, fn) for name, fn in metrics.items()}


def of_examples(
    part: str, function: Callable[..., PyTree], output: PyTree, target: PyTree
) -> PyTree:
    """A loss or a metric of each example; a note on an error says which one failed."""
    try:
        values = jax.vmap(function)(output, target)
    except Exception as error:
        error.add_note(OF_PART + part)
        raise
    check_value(part, values)
    return values


def means_of(values: PyTree) -> PyTree:
    """The mean over the examples of each value, weighted if it is Weighted."""

    def mean(value: Array | Weighted) -> Array:
        if isinstance(value, Weighted):
            return jnp.average(value.value, axis=0, weights=value.weight)
        return value.mean(0)

    return jax.tree.map(mean, values, is_leaf=is_weighted)


def finish_means(
    metrics: Metrics,
) -> Callable[[dict[str, PyTree]], dict[str, PyTree]]:
    """The function from the means of the metrics to the reported values."""

    def finish_of(metric: Callable[..., Metric] | None) -> Callable[[PyTree], PyTree]:
        function = getattr(metric, "func", metric)  # of a functools.partial
        return getattr(function, "finish", lambda mean: mean)

    return lambda means: {name: finish_of(metrics.get(name))(mean) for name, mean in means.items()}


def with_precision(model: Model, precision: str) -> Model:
    """The model that computes in `precision`: params and inputs are cast, the output is float32
    again."""
    if precision == "float32":
        return model
    dtype = jnp.dtype(precision)

    def cast(tree: PyTree, dtype: DTypeLike) -> PyTree:
        def cast_leaf(a: Array) -> Array:
            return a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a

        return jax.tree.map(cast_leaf, tree)

    def apply(
        params: PyTree, state: PyTree, x: PyTree, *, train: bool = False, key: Array | None = None
    ) -> tuple[PyTree, PyTree]:
        if not getattr(model, "exact_inputs", False):
            # One number per example, such as the time of diffusion, keeps its precision.
            x = jax.tree.map(lambda a: a if jnp.ndim(a) == 1 else cast(a, dtype), x)
        out, state = model.apply(cast(params, dtype), state, x, train=train, key=key)
        return cast(out, jnp.float32), state

    return model._replace(apply=apply)


def traced(
    objective: Objective, params: PyTree, state: PyTree, batch: PyTree, train: bool
) -> Traced:
    """An objective, traced for arguments of these shapes by `jax.jit`."""
    call = lambda p, s, b: objective(p, s, b, jax.random.key(0), train)  # noqa: E731
    return jax.jit(call).trace(params, state, batch)


def values_of(trace: Traced) -> dict[str, PyTree]:
    """{label: shapes} of what a traced objective returns for each example, with the loss."""
    losses, _, metrics = trace.out_info
    return {**metrics, "loss": losses}
