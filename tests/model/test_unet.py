"""unet: against PyTorch with the same weights, and what it does with times and classes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.unet import sinusoids, unet
from tests.model.compare import normal, quick_jit, random_params
from utils import named_leaves

pytestmark = pytest.mark.contract

SIZES = {"widths": (4, 8), "depth": 2, "heads": 2, "groups": 2, "patch": 2}


def small(**changes):
    """(the model, random params that leave its numbers small, inputs)."""
    model = unet((8, 12, 3), 5, **SIZES | changes)
    params, _ = random_params(model.init)
    params = jax.tree.map(lambda a: a / np.float32(a[..., 0].size ** 0.5), params)
    x = {"image": normal(1, 3, 8, 12, 3), "time": np.float32([0, 0.3, 1])}
    return model, params, x | {"label": np.int32([0, 4, -1])}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"widths": (4,), "patch": 1, "depth": 1, "attended": 0}])
def test_it_equals_pytorch_with_the_same_weights(changes):
    torch = pytest.importorskip("torch")
    model, params, x = small(**changes)
    sizes = SIZES | {"attended": 1} | changes
    theirs = torch_unet(torch, jax.tree.map(torch.tensor, params), x, sizes)
    ours = np.asarray(quick_jit(model.apply)(params, {}, x)[0])
    assert ours.shape == (3, 8, 12, 3)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=2e-5 * np.abs(ours).max())


def torch_unet(torch, params, x, sizes):
    """The same network in PyTorch's own operations, of images with the channels first."""
    functional, silu = torch.nn.functional, torch.nn.functional.silu

    def conv(p, y, **options):
        return functional.conv2d(y, p["weight"].permute(3, 2, 0, 1), p["bias"], **options)

    def linear(p, y):
        return functional.linear(y, p["weight"].T, p.get("bias"))

    def pixels(p, y, factor):
        """A linear map, whose results are a square of pixels."""
        order = np.arange(len(p["bias"])).reshape(factor, factor, -1).transpose(2, 0, 1).ravel()
        weight = p["weight"][:, order].T[..., None, None]
        y = functional.conv2d(y, weight, p["bias"][order])
        return functional.pixel_shuffle(y, factor)

    def norm(p, y):
        return functional.group_norm(y, sizes["groups"], p["scale"], p["bias"], 1e-6)

    def attend(p, y):
        flat, own = norm(p["norm"], y).flatten(2).mT, p["attention"]
        heads = [
            linear(own[name], flat).unflatten(2, (sizes["heads"], -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        ]
        out = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return y + linear(own["out"], out).mT.reshape(y.shape)

    def block(p, y):
        z = conv(p["conv1"], silu(norm(p["norm1"], y)), padding=1)
        z = z + linear(p["condition"], silu(known))[..., None, None]
        z = conv(p["conv2"], silu(norm(p["norm2"], z)), padding=1)
        if "shortcut" in p:
            y = linear(p["shortcut"], y.movedim(1, 3)).movedim(3, 1)
        return attend(p["attention"], y + z) if "attention" in p else y + z

    first, second = params["time"]
    waves = torch.tensor(np.asarray(sinusoids(x["time"], first["weight"].shape[0])))
    label = torch.tensor(x["label"] + 1)  # the first row is that of no class
    known = linear(second, silu(linear(first, waves)))
    known = known + functional.embedding(label, params["label"]["weight"])
    y = conv(params["stem"], torch.tensor(x["image"]).movedim(3, 1), stride=sizes["patch"])
    seen = []
    for i, level in enumerate(params["down"]):
        y = conv(level["shrink"], y, stride=2) if i else y
        assert len(level["blocks"]) == sizes["depth"]
        for own in level["blocks"]:
            y = block(own, y)
            seen.append(y)
    y = block(params["middle"][0], y)
    y = block(params["middle"][2], attend(params["middle"][1], y))
    attended = [["attention" in one for one in level["blocks"]] for level in params["up"]]
    last = len(sizes["widths"]) - sizes["attended"]
    assert attended == [[i >= last] * sizes["depth"] for i in range(len(sizes["widths"]))]
    for i, level in reversed(list(enumerate(params["up"]))):
        for own in level["blocks"]:
            y = block(own, torch.cat([y, seen.pop()], dim=1))
        y = pixels(level["enlarge"], y, 2) if i else y
    return pixels(params["head"], silu(norm(params["norm"], y)), sizes["patch"]).movedim(1, 3)


@pytest.mark.slow
def test_time_and_class_matter_and_a_gradient_reaches_every_weight():
    model, params, x = small(depth=1)
    run = quick_jit(model.apply)
    out = np.asarray(run(params, {}, x)[0])
    for name, other in (("time", 0.5), ("label", 1)):
        changed = x | {name: np.r_[np.asarray(other, x[name].dtype), x[name][1:]]}
        found = np.asarray(run(params, {}, changed)[0])
        assert np.abs(found[0] - out[0]).max() > 1e-3, name
        np.testing.assert_array_equal(found[1:], out[1:])  # other examples
    past = np.asarray(run(params, {}, x | {"label": np.int32([0, 4, 5])})[0])
    np.testing.assert_array_equal(past[:2], out[:2])
    assert np.isnan(past[2]).all()  # there is no class 5
    weights = normal(5, *out.shape)
    loss = lambda params: (model.apply(params, {}, x)[0] * weights).sum()  # noqa: E731
    grads = named_leaves(quick_jit(jax.grad(loss))(params))
    assert [name for name, grad in grads.items() if not (jnp.abs(grad) > 1e-6).any()] == []


def test_without_classes_there_is_no_label():
    model = unet((4, 4, 1), 0, widths=(4,), groups=2)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    assert "label" not in params and set(model.inputs()) == {"image", "time"}
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct((2, *a.shape), a.dtype), model.inputs())
    out, _ = jax.eval_shape(model.apply, params, {}, batch)
    assert out.shape == (2, 4, 4, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"widths": (4, 8, 8)}, r"widths: 3 widths and patch 2 need .* multiples of 8, got 8 x 12"),
        ({"widths": ()}, "widths: needs at least one width"),
        ({"groups": 3}, "groups: 3 must divide the width 4"),
        ({"heads": 3}, "heads: 3 must divide the width 8"),
        ({"heads": 8, "attended": 2}, "heads: 8 must divide the width 4"),
    ],
)
def test_a_bad_argument_is_refused_by_its_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        unet(**{"input_shape": (8, 12, 3), "num_classes": 5} | SIZES | arguments)


def test_images_alone_are_refused_with_the_objective_that_adds_the_time():
    model = unet((4, 4, 1), 2, widths=(8,))
    with pytest.raises(
        ValueError, match=r"needs a dict .*, got an array; the objective denoising_"
    ):
        jax.eval_shape(
            lambda key: model.apply(*model.init(key), normal(0, 2, 4, 4, 1)), jax.random.key(0)
        )
