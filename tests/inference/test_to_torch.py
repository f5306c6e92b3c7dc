"""Ready rule files, against the libraries whose weights they are for: with random weights, both
models compute the same, in both directions."""

from functools import partial

import jax
import numpy as np
import pytest

from inference import to_torch
from model.convnext import convnext
from model.gpt import gpt
from model.layers.blocks import unrolled
from model.mobilenet import mobilenet
from model.resnet import resnet
from model.vit import vit
from tests.model.compare import quick_jit
from training.checkpoint.pretrained import Pretrained
from training.checkpoint.rules import converted, read_rules, ready_files
from training.checkpoint.storage import save
from utils import map_named, named_leaves

pytestmark = pytest.mark.slow
rng = np.random.default_rng(0)
TOKENS = rng.integers(0, 96, (2, 12))
# the second image is brighter: the means of two images of noise would be the same
IMAGES = (rng.normal(size=(2, 64, 64, 3)) + np.reshape([0, 2], (2, 1, 1, 1))).astype(np.float32)
CLASSES = 5


# --- each returns (their model, ours, an input of ours)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 96, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    ours = gpt((16,), 96, dim=32, depth=2, heads=4, feed_forward="gelu_tanh")
    return GPT2LMHeadModel(GPT2Config(**sizes)), ours, TOKENS


def llama(tied=False, qk_norm=False):
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    config = Qwen3Config if qk_norm else LlamaConfig
    config = config(**sizes, rms_norm_eps=1e-5, tie_word_embeddings=tied, head_dim=8)
    form = {"positions": "rotary", "norm": "rms", "feed_forward": "swiglu", "bias": False}
    form |= {"kv_heads": 2, "hidden": 88, "tied": tied, "qk_norm": qk_norm}
    ours = gpt((16,), 96, dim=32, depth=2, heads=4, **form)
    return (Qwen3ForCausalLM if qk_norm else LlamaForCausalLM)(config), ours, TOKENS


def our_resnet(widths, depths, bottleneck=False):
    sizes = {"widths": widths, "depths": depths, "bottleneck": bottleneck}
    return resnet((64, 64, 3), CLASSES, **sizes, large_images=True)


def transformers_resnet(depths, bottleneck):
    from transformers import ResNetConfig, ResNetForImageClassification

    widths = (8, 12, 16, 20)
    outputs = [4 * width if bottleneck else width for width in widths]
    sizes = {"embedding_size": 8, "hidden_sizes": outputs, "depths": depths}
    kind = "bottleneck" if bottleneck else "basic"
    config = ResNetConfig(**sizes, layer_type=kind, num_labels=CLASSES)
    return ResNetForImageClassification(config), our_resnet(widths, depths, bottleneck), IMAGES


def torchvision_resnet(name, depths, bottleneck):
    import torchvision

    theirs = getattr(torchvision.models, name)(num_classes=CLASSES)
    return theirs, our_resnet((64, 128, 256, 512), depths, bottleneck), IMAGES


def our_vit(eps=1e-6):
    sizes = {"patch": 16, "dim": 32, "depth": 2, "heads": 4}
    return vit((64, 64, 3), CLASSES, **sizes, pool="token", eps=eps)


def transformers_vit():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"image_size": 64, "patch_size": 16, "hidden_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "intermediate_size": 128, "num_labels": CLASSES}
    return ViTForImageClassification(ViTConfig(**sizes)), our_vit(1e-12), IMAGES


def timm_vit():
    from timm.models.vision_transformer import VisionTransformer

    sizes = {"embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": CLASSES}
    return VisionTransformer(64, 16, **sizes), our_vit(), IMAGES


def torchvision_vit():
    from torchvision.models import VisionTransformer

    sizes = {"hidden_dim": 32, "mlp_dim": 128, "num_classes": CLASSES}
    return VisionTransformer(64, 16, 2, 4, **sizes), our_vit(), IMAGES


DIMS, DEPTHS = (8, 12, 16, 20), (3, 3, 9, 3)


def our_convnext():
    form = {"head_dim": None, "residual": True, "bias": True, "layer_scale": 1e-6, "expansion": 4}
    return convnext((64, 64, 3), CLASSES, dims=DIMS, depths=DEPTHS, **form)


def transformers_convnext():
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=DIMS, depths=DEPTHS, num_labels=CLASSES)
    return ConvNextForImageClassification(config), our_convnext(), IMAGES


def timm_convnext():
    from timm.models.convnext import ConvNeXt

    return ConvNeXt(dims=DIMS, depths=DEPTHS, num_classes=CLASSES), our_convnext(), IMAGES


def torchvision_convnext():
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    plan = zip(DIMS, (*DIMS[1:], None), DEPTHS, strict=True)
    theirs = ConvNeXt([CNBlockConfig(*stage) for stage in plan], num_classes=CLASSES)
    return theirs, our_convnext(), IMAGES


def our_mobilenet(size):
    return mobilenet((64, 64, 3), CLASSES, size=size, large_images=True)


def torch_mobilenet(size):
    from tests.nets_of_others.torch_mobilenet import MobileNet

    return MobileNet(size, CLASSES), our_mobilenet(size), 30 * IMAGES  # strong, as it fades


def torchvision_mobilenet(size):
    import torchvision

    theirs = getattr(torchvision.models, f"mobilenet_v3_{size}")(num_classes=CLASSES)
    return theirs, our_mobilenet(size), 30 * IMAGES


SMALL, LARGE = ((2, 2, 2, 2), False), ((3, 4, 6, 3), True)
CASES = [
    ("transformers", "gpt2", gpt2),
    ("transformers", "llama", llama),
    ("transformers", "llama", lambda: llama(tied=True)),
    ("transformers", "llama", lambda: llama(qk_norm=True)),
    ("transformers", "transformers_resnet18", lambda: transformers_resnet(*SMALL)),
    ("transformers", "transformers_resnet50", lambda: transformers_resnet(*LARGE)),
    ("torchvision", "resnet18", lambda: torchvision_resnet("resnet18", *SMALL)),
    ("torchvision", "resnet50", lambda: torchvision_resnet("resnet50", *LARGE)),
    ("transformers", "transformers_vit", transformers_vit),
    ("timm", "vit", timm_vit),
    ("torchvision", "torchvision_vit", torchvision_vit),
    ("transformers", "transformers_convnext_tiny", transformers_convnext),
    ("timm", "convnext_tiny", timm_convnext),
    ("torchvision", "torchvision_convnext_tiny", torchvision_convnext),
    ("torch", "mobilenet_v3_small", lambda: torch_mobilenet("small")),
    ("torch", "mobilenet_v3_large", lambda: torch_mobilenet("large")),
    ("torchvision", "mobilenet_v3_small", lambda: torchvision_mobilenet("small")),
    ("torchvision", "mobilenet_v3_large", lambda: torchvision_mobilenet("large")),
]


@pytest.mark.parametrize("rules", ["gpt2", "llama"])
def test_packed_documents_are_each_as_alone_in_the_library(rules):
    """The library reads them one by one."""
    pytest.importorskip("transformers")
    theirs, ours, _ = {"gpt2": gpt2, "llama": llama}[rules]()
    theirs, shapes = randomized(theirs), jax.eval_shape(ours.init, jax.random.key(0))
    arrays = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    found, _ = converted("theirs", read_rules(rules), arrays, named_leaves(shapes[0]))
    params = map_named(lambda name, leaf: found[name], shapes[0])
    lengths = (3, 7, 2)
    segments = np.repeat([[1, 2, 3]], lengths, axis=1)
    logits, _ = quick_jit(ours.apply)(params, {}, {"tokens": TOKENS[:1], "segments": segments})
    documents = np.split(TOKENS[:1], np.cumsum(lengths)[:-1], axis=1)
    expected = np.concatenate([their_logits(theirs, document) for document in documents], axis=1)
    assert_close(np.asarray(logits)[0], expected[0])


def test_every_ready_rule_file_is_compared():
    assert {rules for _, rules, _ in CASES} == set(ready_files())


def random(name, shape):
    """Random numbers like those of a trained leaf: zeros and ones could hide a mistake."""
    numbers = rng.normal(size=shape).astype(np.float32)
    if len(shape) > 1:
        return numbers / np.sqrt(np.prod(shape) / max(shape))
    if name.endswith("var"):
        return 0.5 + abs(numbers)
    return 0.2 * numbers + ("bias" not in name and "mean" not in name)


def randomized(model):
    """A torch model with random weights and statistics."""
    import torch

    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.from_numpy(random(name, tensor.shape)))
    return model.eval()


def their_logits(model, x):
    import torch

    x = torch.from_numpy(x if x.ndim == 2 else x.transpose(0, 3, 1, 2))
    with torch.no_grad():
        out = model(x)
    return getattr(out, "logits", out).numpy()


def assert_close(found, expected):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found / scale, expected / scale, rtol=0, atol=1e-5)
    assert np.abs(expected[0] - expected[1]).max() > 0.01 * scale  # it depends on the input


@pytest.fixture(scope="module", params=CASES, ids=[f"{c[1]}-{i}" for i, c in enumerate(CASES)])
def case(request):
    """(the name of the rules, their model, ours, an input)"""
    library, rules, make = request.param
    pytest.importorskip(library)
    theirs, ours, x = make()
    return rules, randomized(theirs), ours, x


def test_weights_of_the_library_compute_the_same_here(case, tmp_path):
    rules, theirs, ours, x = case
    path = tmp_path / "model.safetensors"
    if hasattr(theirs, "save_pretrained"):
        path = tmp_path  # a folder, as its models are published
        theirs.save_pretrained(path, max_shard_size="20KB" if rules == "gpt2" else "5GB")
    else:
        from safetensors.torch import save_file

        save_file(theirs.state_dict(), path)
    weights = Pretrained(path, rules=rules)(*ours.init(jax.random.key(0)))
    assert_close(quick_jit(ours.apply)(*weights, x)[0], their_logits(theirs, x))


def test_our_weights_compute_the_same_in_the_library(case, tmp_path):
    from safetensors.torch import load_file

    rules, theirs, ours, x = case
    shapes = jax.eval_shape(ours.init, jax.random.key(0))
    params, state = map_named(lambda name, leaf: random(name, leaf.shape), shapes)
    save(tmp_path / "a.params", {"params": params, "state": state}, {})
    out = tmp_path / "model.safetensors"
    assert to_torch.main([str(tmp_path / "a.params"), str(out), "--rules", rules]) == 0
    if hasattr(theirs, "save_pretrained"):
        theirs.config.save_pretrained(tmp_path)
        theirs, info = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info.values()), info
    if rules != "transformers_vit":  # whose names in a file are not those of its modules
        theirs.load_state_dict(load_file(out), strict=True)
    theirs.eval()
    assert_close(their_logits(theirs, x), quick_jit(ours.apply)(params, state, x)[0])


EQUAL = {  # models with several equal blocks, whose rules have one pattern for all blocks
    "gpt2": partial(gpt, (8,), 20, dim=16, depth=2, heads=2, feed_forward="gelu_tanh"),
    "vit": partial(vit, (32, 32, 3), CLASSES, patch=16, dim=16, depth=3, heads=2, pool="token"),
    "resnet50": partial(
        resnet, (32, 32, 3), CLASSES, widths=(4, 6, 8, 10), depths=(3, 4, 6, 3), bottleneck=True,
        large_images=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("rules", EQUAL)
def test_stacked_blocks_are_written_one_by_one_and_read_into_both_forms(rules, tmp_path):
    models = {name: EQUAL[rules](scan=name == "scan") for name in ("plain", "scan")}
    shapes = {n: jax.eval_shape(model.init, jax.random.key(0)) for n, model in models.items()}
    stacked = map_named(lambda name, a: np.float32(random(name, a.shape)), shapes["scan"])
    trees = {"scan": stacked, "plain": tuple(map(unrolled, stacked))}
    assert named_leaves(trees["plain"]).keys() == named_leaves(shapes["plain"]).keys()
    assert len(named_leaves(stacked)) < len(named_leaves(trees["plain"]))
    arrays = {}
    for name, (params, state) in trees.items():
        save(tmp_path / f"{name}.params", {"params": params, "state": state}, {})
        out = tmp_path / f"{name}.safetensors"
        arrays[name] = to_torch.to_torch(tmp_path / f"{name}.params", out, rules)
    assert arrays["plain"].keys() == arrays["scan"].keys()
    for name, array in arrays["plain"].items():
        np.testing.assert_array_equal(arrays["scan"][name], array, err_msg=name)
    for name, expected in trees.items():
        found = Pretrained(tmp_path / "plain.safetensors", rules=rules)(*shapes[name])
        found, expected = named_leaves(found), named_leaves(expected)
        assert found.keys() == expected.keys()
        for leaf, array in expected.items():
            np.testing.assert_array_equal(found[leaf], array, err_msg=leaf)
