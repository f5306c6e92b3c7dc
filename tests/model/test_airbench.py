"""The network of airbench94 against PyTorch, its first weights, and its recipes."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from data_loader import cifar10 as files
from model.airbench import airbench, whitening
from tests.model.compare import normal, quick_jit
from tests.processes import captured
from training.fit import fit
from training.optimizers import sgd
from training.transforms import frozen, groups
from utils import named_leaves

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
SMALL = airbench((10, 11, 3), 5, widths=(4, 30))
# Neighbouring pixels and colours depend on each other, as in photographs.
SMOOTH = normal(0, 600, 10, 11, 3).cumsum(1).cumsum(2) @ np.array([[1, 1, 0], [0, 1, 1], [0, 0, 1]])


@pytest.mark.slow
def test_equals_pytorch_in_training_and_evaluation():
    torch = pytest.importorskip("torch")
    params, state = quick_jit(SMALL.init)(jax.random.key(0))
    params = jax.tree.map(lambda p: p + 0.1 * normal(p.size, *p.shape), params)
    x = normal(1, 6, 10, 11, 3)
    p = jax.tree.map(lambda a: torch.tensor(np.asarray(a)), params)

    def conv(name, y, padding):
        weight = name["weight"].permute(3, 2, 0, 1)
        return torch.nn.functional.conv2d(y, weight, name.get("bias"), padding=padding)

    def reference(train):
        y = torch.nn.functional.gelu(conv(p["whiten"], torch.tensor(x).permute(0, 3, 1, 2), 0))
        for block, running in zip(p["blocks"], state["blocks"], strict=True):
            y = torch.nn.functional.max_pool2d(conv(block["first"], y, 1), 2)
            for i in (1, 2):
                old = running[f"norm{i}"]
                norm = torch.nn.BatchNorm2d(y.shape[1], eps=1e-12, momentum=0.4).train(train)
                norm.weight.data = block[f"norm{i}"]["scale"]
                norm.bias.data = block[f"norm{i}"]["bias"]
                y = torch.nn.functional.gelu(norm(y))
                means[train].append((old["mean"], norm.running_mean.numpy()))
                y = conv(block["second"], y, 1) if i == 1 else y
        return y.amax((2, 3)) @ p["head"]["weight"] / 9

    means = {True: [], False: []}
    for train in (True, False):
        out, new = quick_jit(SMALL.apply, static_argnames="train")(params, state, x, train=train)
        with torch.no_grad():
            expected = reference(train).numpy()
        np.testing.assert_allclose(out, expected, atol=1e-4 * np.abs(expected).max())
        ours = [b[f"norm{i}"]["mean"] for b in new["blocks"] for i in (1, 2)]
        for mean, (_, theirs) in zip(ours, means[train], strict=True):
            np.testing.assert_allclose(mean, theirs, atol=1e-4)


def test_has_as_many_parameters_as_the_original():
    """1.97 million: 24 filters of 2x2, six convolutions, their biases, and the last layer."""
    params, _ = jax.eval_shape(airbench((32, 32, 3), 10).init, jax.random.key(0))
    sizes = {name: leaf.size for name, leaf in named_leaves(params).items() if "scale" not in name}
    convolutions = 9 * (24 * 64 + 64 * 64 + 64 * 256 + 3 * 256 * 256)
    assert sum(sizes.values()) == 24 * 13 + convolutions + 2 * (64 + 256 + 256) + 2560


def test_the_whitened_patches_are_uncorrelated_with_mean_square_1():
    weight = whitening(SMOOTH, 2)
    assert weight.shape == (2, 2, 3, 24)
    patches = [SMOOTH[:, i : i + 2, j : j + 2].reshape(-1, 12) for i in range(9) for j in range(10)]
    out = np.concatenate(patches) @ weight.reshape(12, 24)[:, :12]
    moments = out.T @ out / len(out)
    np.testing.assert_allclose(moments - np.diag(np.diag(moments)), 0, atol=1e-10)
    assert ((np.diag(moments) > 0.98) & (np.diag(moments) < 1)).all()  # EPS is part of them
    np.testing.assert_array_equal(weight[..., :12], -weight[..., 12:])


def test_the_convolutions_begin_as_the_identity():
    params, _ = quick_jit(SMALL.init)(jax.random.key(0))
    same = params["blocks"][1]["first"]["weight"][..., :4]
    expected = np.zeros((3, 3, 4, 4))
    expected[1, 1] = np.eye(4)
    np.testing.assert_array_equal(same, expected)
    rest = params["blocks"][1]["first"]["weight"][..., 4:]
    assert 0.9 / 6 < abs(rest).max() <= 1 / 6  # 1 / sqrt(9 * 4)


def test_an_image_that_the_pools_would_use_up_is_an_error():
    with pytest.raises(ValueError, match=r"3 widths need images of at least 9x9 pixels"):
        airbench((8, 32, 3), 10)


@pytest.mark.slow
def test_a_new_run_takes_the_whitening_from_its_training_images_and_a_resumed_one_does_not(
    tmp_path,
):
    x, y = SMOOTH.astype(np.float32), np.arange(600) % 5
    rules = (("whiten/weight|.*/scale", frozen()), (".*", sgd(0.01)))
    settings = {"optimizer": groups(rules), "batch_size": 200, "folder": tmp_path}
    run = fit(SMALL, (x, y), epochs=1, **settings)
    expected = whitening(x, 2)
    np.testing.assert_allclose(run.params["whiten"]["weight"], expected, rtol=1e-4, atol=1e-4)
    never = SMALL._replace(fit=lambda *_: 1 / 0)
    again = fit(never, (x, y), epochs=2, resume="override", **settings)
    assert again.step == 6
    np.testing.assert_array_equal(again.params["whiten"]["weight"], run.params["whiten"]["weight"])


@pytest.fixture
def made_cifar10(tmp_path, monkeypatch):
    """Files of 64 images each, whose class is the brightness of one colour."""
    monkeypatch.setattr(files, "PER_FILE", 64)
    random = np.random.default_rng(0)
    for name in [*files.FILES["train"], *files.FILES["test"]]:
        labels = np.arange(64, dtype=np.uint8) % 10
        pixels = random.integers(0, 128, (64, 3, 1024), np.uint8)
        pixels[np.arange(64), labels % 3] += labels[:, None] * 12
        records = np.concatenate([labels[:, None], pixels.reshape(64, -1)], 1)
        (tmp_path / name).write_bytes(records.tobytes())
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["cifar10_90", "cifar10_94", pytest.param("cifar10_mobilenet", marks=pytest.mark.torture)],
)
def test_a_recipe_trains_and_evaluates(name, made_cifar10):
    import train

    few = ["loader.batch_size=64", "training.max_steps=6", "training.epochs=2"]
    few += ["schedule.args.warmup_epochs=1"]
    few += {"cifar10_mobilenet": []}.get(name, ["model.args.widths=[8,16,16]"])
    given = ["-c", str(ROOT / "configs" / f"{name}.json"), f"data.args.dir={made_cifar10}", *few]
    code, out, err = captured(made_cifar10, lambda: train.main(given))
    assert code == 0 and "Traceback" not in out + err, err
    [folder] = (made_cifar10 / "saved").glob("*/*/config.json")
    rows = [json.loads(line) for line in (folder.parent / "metrics.jsonl").open()]
    assert any("test_accuracy" in row for row in rows), rows
