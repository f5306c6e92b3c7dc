"""LoRA: factors that are added to the frozen weights of any model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.base import Model
from model.convnext import convnext
from model.generate import generate
from model.gpt import gpt
from model.layers.blocks import unrolled
from model.layers.conv import conv2d, conv2d_init
from model.layers.embedding import embedding, embedding_init
from model.layers.linear import linear, linear_init
from model.lora import lora
from model.mlp import mlp
from model.resnet import resnet
from model.vit import vit
from utils import named_leaves

pytestmark = pytest.mark.contract

rng = np.random.default_rng(0)
ATTENTION = "blocks/.*/(query|value)/weight"


def drawn(model):
    """Random (params, state) of a model, in which all factors count."""
    trees = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda a: rng.uniform(0.1, 1, a.shape).astype(np.float32), trees)


def test_an_adapted_perceptron_computes_the_formula():
    base = mlp((4,), 3, dims=(5,))
    model = lora(base, ("hidden/.*/weight",), rank=2, alpha=6)
    params, state = drawn(model)
    w, x = state["frozen"], rng.normal(size=(7, 4)).astype(np.float32)
    plain = np.asarray(w["hidden/0/weight"])
    a, b = (np.asarray(params["hidden/0/weight"][name]) for name in "ab")
    assert a.shape == (4, 2) and b.shape == (2, 5)
    merged, _ = model.merge(params, state)
    np.testing.assert_allclose(merged["hidden"][0]["weight"], plain + 3 * a @ b, atol=1e-6)
    # the factors as a path of their own, beside the frozen weights
    y = x @ plain + 6 / 2 * (x @ a) @ b + w["hidden/0/bias"]
    y = np.maximum(y, 0) @ w["head/weight"] + w["head/bias"]
    np.testing.assert_allclose(model.apply(params, state, x)[0], y, rtol=1e-5, atol=1e-5)


MODELS = {
    "gpt": (gpt((8,), 32, dim=16, depth=2, heads=2), (ATTENTION, "tokens/weight")),
    "convnext": (convnext((8, 8, 1), 3, dims=(4, 8), depths=(1, 1)), (".*/weight",)),
    "resnet": (resnet((8, 8, 3), 3, widths=(4, 8), depths=(1, 1)), (".*conv.*/weight",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same_with_merged_factors(name):
    base, leaves = MODELS[name]
    model = lora(base, leaves, rank=3)
    x = rng.integers(0, 32, (2, 8)) if name == "gpt" else rng.normal(size=(2, 8, 8, 3))
    x = x[..., :1] if name == "convnext" else x
    x = x if name == "gpt" else x.astype(np.float32)
    params, state = drawn(model)
    merged = model.merge(params, state)
    apply, plain = (jax.jit(m.apply, static_argnames="train") for m in (model, base))
    for train in (False, True):
        adapted, after = apply(params, state, x, train=train)
        expected, plain_after = plain(*merged, x, train=train)
        scale = np.abs(expected).max()
        np.testing.assert_allclose(adapted, expected, atol=1e-6 * scale)
        assert after["frozen"].keys() == state["frozen"].keys()
        assert named_leaves(after).keys() - named_leaves(plain_after).keys() == {
            f"frozen/{leaf}" for leaf in state["frozen"]
        }


@pytest.mark.slow
def test_every_block_of_scan_has_factors_of_its_own():
    sizes, name = {"dim": 8, "depth": 3, "heads": 2}, "attention/query/weight"
    bases = [gpt((4,), 16, **sizes, scan=scan) for scan in (False, True)]
    models = [lora(base, (ATTENTION,), rank=2, dora=True) for base in bases]
    start, _ = jax.jit(models[1].init)(jax.random.key(0))
    a = start[f"blocks/0-2/{name}"]["a"]
    assert a.shape == (3, 8, 2) and len(set(map(float, a[:, 0, 0]))) == 3
    params, state = drawn(models[1])
    merged = unrolled(models[1].merge(params, state)[0])
    for i in range(3):
        factors = {k: leaf[i] for k, leaf in params[f"blocks/0-2/{name}"].items()}
        summed = state["frozen"][f"blocks/0-2/{name}"][i] + factors["a"] @ factors["b"]
        expected = factors["length"] * summed / np.linalg.norm(summed, axis=0)
        block = merged["blocks"][i]["attention"]["query"]["weight"]
        np.testing.assert_allclose(block, expected, atol=1e-5)
    names = named_leaves(jax.eval_shape(models[0].init, jax.random.key(0))[0])
    assert f"blocks/2/{name}/a" in names  # so a checkpoint of one form is read into the other


@pytest.mark.slow
def test_an_adapted_decoder_generates_as_its_merged_form():
    base, _ = MODELS["gpt"]
    model = lora(base, (ATTENTION,), rank=2)
    params, state = drawn(model)
    merged, _ = model.merge(params, state)
    [expected] = generate(base, merged, [[1, 2, 3]], 12, seed=3)
    [written] = generate(model, params, [[1, 2, 3]], 12, seed=3, state=state)
    np.testing.assert_array_equal(written, expected)


def test_an_adapted_model_begins_as_its_base():
    base = mlp((4,), 3, dims=(5,))
    model = lora(base, (".*/weight",), rank=2)
    merged = model.merge(*model.init(jax.random.key(1)))
    jax.tree.map(np.testing.assert_array_equal, merged, base.init(jax.random.key(1)))


def test_what_is_trained_whole_stays_in_the_params():
    model = lora(mlp((4,), 3, dims=(5,)), (".*/weight",), rank=2, whole=("head/.*",))
    params, state = model.init(jax.random.key(0))
    assert params["head/weight"].shape == (5, 3) and "head/bias" in params
    assert state["frozen"].keys() == {"hidden/0/weight", "hidden/0/bias"}
    np.testing.assert_array_equal(
        model.merge(params, state)[0]["head"]["bias"], params["head/bias"]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"leaves": ("hiden/0/weight",)},
            "leaves: 'hiden/0/weight' matches no name; near ones are h",
        ),
        ({"leaves": ("hidden/0/bias",)}, r"leaves: hidden/0/bias \(5,\) is not a matrix"),
        ({"leaves": ("(",)}, "leaves: '\\(' is an invalid regex"),
        ({"leaves": ("head/weight",), "whole": ("neck/.*",)}, "whole: 'neck/.*' matches no name"),
        ({"leaves": ("head/weight",), "alpha": 0.0}, "alpha: must be a finite number above 0"),
        ({"leaves": ("head/weight",), "rank": 0}, "rank: must be at least 1"),
        ({"leaves": ()}, "leaves: must name at least one"),
        (
            {"leaves": (".*/weight",), "rank": 5},
            r"rank: must be at most 4, got 5; .* is that of hidden/0/weight \(4, 5\)",
        ),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        lora(mlp((4,), 3, dims=(5,)), **arguments)


def test_the_rank_may_be_above_that_of_some_weights():
    lora(mlp((4,), 3, dims=(5,)), (".*/weight",), rank=4)  # the head (5, 3) has at most 3
    lora(of_three_layers(), ("conv/.*",), rank=8)  # a kernel (3, 3, 6, 8) has 54 rows
    with pytest.raises(ValueError, match="rank: must be at most 8, got 9"):
        lora(of_three_layers(), ("conv/.*",), rank=9)
    stacked = vit((8, 8, 1), 3, dim=16, depth=2, heads=2, patch=4, scan=True)
    with pytest.raises(ValueError, match="rank: must be at most 16, got 17"):
        lora(stacked, (".*/query/weight",), rank=17)


def of_three_layers():
    """A model with an embedding, a convolution and a linear layer."""

    def init(key):
        return {
            "embed": embedding_init(key, 12, 6),
            "conv": conv2d_init(key, 6, 8, 3, bias=False),
            "linear": linear_init(key, 8, 4),
        }, {}

    def apply(params, state, x, *, train=False, key=None):
        y = conv2d(params["conv"], embedding(params["embed"], x))
        return linear(params["linear"], y.mean((1, 2))), state

    return Model(init, apply)


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [{}, {"rank_stabilized": True}, {"dora": True}], ids=["lora", "stabilized", "dora"]
)
def test_peft_computes_the_same(form):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")

    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(12, 6)
            self.conv = torch.nn.Conv2d(6, 8, 3, padding=1, bias=False)
            self.linear = torch.nn.Linear(8, 4)

        def forward(self, x):
            return self.linear(self.conv(self.embed(x).permute(0, 3, 1, 2)).mean((2, 3)))

    names = ["embed", "conv", "linear"]
    settings = {"r": 3, "lora_alpha": 5, "target_modules": names, "init_lora_weights": False}
    settings |= {"use_rslora": "rank_stabilized" in form, "use_dora": "dora" in form}
    theirs = peft.get_peft_model(Theirs(), peft.LoraConfig(**settings))
    arrays = {
        name: a.detach().numpy().copy() for name, a in theirs.base_model.model.named_parameters()
    }
    shape = arrays["conv.base_layer.weight"].shape
    conv_a = arrays["conv.lora_A.default.weight"].transpose(2, 3, 1, 0)
    state = {
        "embed/weight": arrays["embed.base_layer.weight"],
        "conv/weight": arrays["conv.base_layer.weight"].transpose(2, 3, 1, 0),
        "linear/weight": arrays["linear.base_layer.weight"].T,
        "linear/bias": arrays["linear.base_layer.bias"],
    }
    pairs = {
        "embed": (
            arrays["embed.lora_embedding_A.default"].T,
            arrays["embed.lora_embedding_B.default"].T,
        ),
        "conv": (conv_a, arrays["conv.lora_B.default.weight"][:, :, 0, 0].T),
        "linear": tuple(arrays[f"linear.lora_{k}.default.weight"].T for k in "AB"),
    }
    assert shape == (8, 6, 3, 3)
    params = {f"{name}/weight": {"a": a, "b": b} for name, (a, b) in pairs.items()}
    if "dora" in form:  # other lengths than those at the beginning
        for name in names:
            theirs_of = arrays[f"{name}.lora_magnitude_vector.default.weight"]
            change = rng.uniform(0.5, 2, theirs_of.shape).astype(np.float32)
            with torch.no_grad():
                module = getattr(theirs.base_model.model, name).lora_magnitude_vector["default"]
                module.weight.mul_(torch.tensor(change))
            shape = params[f"{name}/weight"]["a"].shape[:-1]
            length = (theirs_of * change).reshape(*[1] * len(shape), -1)
            params[f"{name}/weight"]["length"] = length
    model = lora(of_three_layers(), (".*/weight",), rank=3, alpha=5, **form)
    x = rng.integers(0, 12, (2, 5, 5))
    with torch.no_grad():
        expected = theirs(torch.tensor(x)).numpy()
    output, _ = model.apply(params, {"frozen": state}, x)
    np.testing.assert_allclose(output, expected, atol=1e-6 * np.abs(expected).max() + 1e-6)
    merged, _ = model.merge(params, {"frozen": state})
    kernel = theirs.merge_and_unload().conv.weight.detach().numpy().transpose(2, 3, 1, 0)
    np.testing.assert_allclose(merged["conv"]["weight"], kernel, atol=1e-6)
    # `a` is drawn from the same distribution: uniform, up to 1 / sqrt(rows)
    drawn = model.init(jax.random.key(0))[0]["conv/weight"]["a"]
    assert 0.9 < jnp.abs(drawn).max() * np.sqrt(6 * 9) <= 1
