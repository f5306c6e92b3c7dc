"""Rules between the arrays of another library and a model: both ways, and mistakes in them."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from training.checkpoint.pretrained import Pretrained, check_arguments, resized
from training.checkpoint.rules import converted, read_rules, ready_files, written
from training.checkpoint.storage import save
from training.options import TrainingOptions
from utils import UserError

RULES = [
    [r"(?:base\.)?conv\.weight", "conv/weight", "OIHW->HWIO"],
    [r"(?:base\.)?place", "place", "1TD->TD"],
    [r"layers\.(\d+)\.(?P<side>up|down)\.weight", r"layers/\1/\g<side>/weight", "OI->11IO"],
    [r"layers\.(\d+)\.qkv\.weight", [rf"layers/\1/{n}/weight" for n in "qkv"], "OI->IO"],
    [r"layers\.(\d+)\.qkv\.bias", [r"layers/\1/q/bias", None, r"layers/\1/v/bias"]],
    [r"layers\.(\d+)\.mask", None],
    [r"bn\.running_(mean|var)", r"state/norm/\1"],
    [r"bn\.num_batches_tracked", None, "zero for state/norm/mean"],
    [r"key\.bias", None, "zeros like layers/0/q/bias"],
    [r"head", "out/weight"],
    [r"head", None, "copy of place"],
]
rng = np.random.default_rng(0)
CONV, PLACE, UP = rng.random((5, 3, 2, 4)), rng.random((1, 7, 6)), rng.random((2, 3))
QKV, BIAS = rng.random((4 + 2 + 2, 6)), np.r_[1.0, 2, 3, 4, 0, 0, 5, 6]  # the key's bias is zeros
THEIRS = {
    "base.conv.weight": CONV,
    "base.place": PLACE,
    "layers.0.up.weight": UP,
    "layers.11.down.weight": UP + 1,
    "layers.0.qkv.weight": QKV,
    "layers.0.qkv.bias": BIAS,
    "bn.running_mean": rng.random(3),
    "bn.running_var": rng.random(3),
    "bn.num_batches_tracked": np.array(0),
    "key.bias": np.zeros(4),
    "head": PLACE,
}
OURS = {
    "conv/weight": CONV.transpose(2, 3, 1, 0),
    "place": PLACE[0],
    "layers/0/up/weight": UP.T[None, None],
    "layers/11/down/weight": UP.T[None, None] + 1,
    "layers/0/q/weight": QKV.T[:, :4],
    "layers/0/k/weight": QKV.T[:, 4:6],
    "layers/0/v/weight": QKV.T[:, 6:],
    "layers/0/q/bias": BIAS[:4],
    "layers/0/v/bias": BIAS[6:],
    "state/norm/mean": THEIRS["bn.running_mean"],
    "state/norm/var": THEIRS["bn.running_var"],
}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name, strict=True)


def test_arrays_become_leaves_and_leaves_the_same_arrays():
    rules = read_rules(RULES)
    file = THEIRS | {"layers.0.mask": np.ones(3), "head": PLACE}
    assert_equal(converted("file", rules, file, OURS)[0], OURS)
    theirs = THEIRS | {"head": PLACE[0]}  # a copy of the leaf as it is
    assert_equal(written(rules, OURS), theirs)


def test_the_same_from_a_file_of_rules_with_words_and_without_the_optional_part(tmp_path):
    words = {"UNIT": {"first": "blocks/0", "second": "blocks/1"}, "N": {"w": "weight", "b": "bias"}}
    rules = {"about": "a net", "where": words, "rules": [["(?:net\\.)?UNIT\\.N", "UNIT/N"]]}
    (tmp_path / "net.json").write_text(json.dumps(rules))
    rules = read_rules(str(tmp_path / "net.json"))
    file = {"net.first.w": np.ones(2), "second.b": np.zeros(3)}
    ours = {"blocks/0/weight": np.ones(2), "blocks/1/bias": np.zeros(3)}
    assert_equal(converted("file", rules, file, ours)[0], ours)
    assert_equal(written(rules, ours), {"net.first.w": np.ones(2), "net.second.b": np.zeros(3)})


@pytest.mark.parametrize("name", ready_files())
def test_every_ready_file_can_be_applied_backwards(name):
    with pytest.raises(UserError, match="no rule writes 1 of the 1 leaves: other"):
        written(read_rules(name), {"other": np.zeros(1)})


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("gtp2", "rules: no rule file 'gtp2'; there are "),
        ([["a"]], "rules: a rule is [regex, name of a leaf or list of names or null], with"),
        ([["a", 3]], 'got ["a", 3]'),
        ([["a", []]], 'got ["a", []]'),
        ([["a(", "b"]], "rules: 'a(' is not a regular expression"),
        ([["a", "b", "OI"]], 'rules: ["a", "b", "OI"]: the form must name the same axes on both'),
        ([["a", "b", "OI->IJ"]], "must name the same axes on both sides"),
        ([["a", "b", "OO->OO"]], "once each"),
        ([["a", "b", 1]], "the form must be one text"),
        ([["a", None, "ones"]], "with null, the form must be one of 'zeros like NAME', 'copy"),
    ],
)
def test_a_rule_that_is_none_is_refused(rules, message):
    with pytest.raises(UserError, match=re.escape(message)):
        read_rules(rules)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"about": "nothing"}, "must have the key rules"),
        ({"rules": 3}, "rules must be a list, got 3"),
        ({"rules": [["a", "b"]], "where": {"WORD": {}}}, "no regex of a rule has the word 'WORD'"),
        ({"rules": [["a", "b"]], "where": ["a"]}, "where must be an object of objects"),
    ],
)
def test_a_bad_file_of_rules_is_refused(content, message, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        read_rules(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (["layer.0", "a"], "cannot be applied backwards: '.' stands outside of a group"),
        ([r"layer\d", "a"], r"backwards: '\\\\d' stands outside of a group"),
        ([r"layer(\d)", "a"], "'a' does not contain group 1 of the regex"),
        ([r"(?:a|b)", "a"], "is neither a group nor optional"),
        (["x", ["a", "c"]], "the model has no c"),
        (["x", "a", "OIH->HIO"], r"a has the shape \(2, 3\), which does not fit"),
        (["x", "b"], "no rule writes 1 of the 1 leaves: a"),
    ],
)
def test_what_cannot_be_written_is_an_error(rule, message):
    with pytest.raises(UserError, match=message):
        written(read_rules([rule]), {"a": np.zeros((2, 3))})


# --- from files


def test_the_message_names_the_array_its_shape_and_the_rule(tmp_path):
    save_file({"fc.weight": np.zeros((5, 3), np.float32)}, tmp_path / "a.safetensors")
    params = {"head": {"weight": jnp.zeros((4, 5))}}
    rule = [r"fc\.weight", "head/weight", "OI->IO"]
    with pytest.raises(UserError) as caught:
        Pretrained(tmp_path / "a.safetensors", rules=[rule]).check(params, {})
    assert str(caught.value).splitlines()[1].strip() == (
        "head/weight (in the file: fc.weight (5, 3), by training.pretrained.rules: "
        r'["fc\\.weight", "head/weight", "OI->IO"]): the file has (3, 5), the model has (4, 5)'
    )
    wrong = [[r"fc\.weight", "head/weight", "OIHW->HWIO"]]
    with pytest.raises(UserError, match=r"fc.weight has the shape \(5, 3\), which does not fit"):
        Pretrained(tmp_path / "a.safetensors", rules=wrong).check(params, {})
    params = {"head": {"weight": jnp.zeros((3, 5))}}
    with pytest.raises(UserError, match=r'\(transpose it\)\n  a rule with a form .* "OI->IO"'):
        Pretrained(tmp_path / "a.safetensors", rename=[rule[:2]]).check(params, {})


def put_shards(folder):
    arrays = {f"layer{i}": np.full(2, i, np.float32) for i in range(3)}
    files = {name: f"model-0000{i % 2}.safetensors" for i, name in enumerate(arrays)}
    for file in files.values():
        save_file({name: arrays[name] for name in arrays if files[name] == file}, folder / file)
    index = {"metadata": {"total_size": 24}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def test_the_files_of_an_index_are_read_and_so_is_their_folder(tmp_path):
    index = put_shards(tmp_path)
    (tmp_path / "config.json").write_text("{}")  # of the other library
    params = {f"layer{i}": jnp.zeros(2) for i in range(3)}
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        found, _ = Pretrained(path)(params, {})
        assert {name: array.tolist() for name, array in found.items()} == {
            f"layer{i}": [i, i] for i in range(3)
        }
    for file, message in (
        ("model-00001.safetensors", "which it does not"),
        ("../a", "same folder"),
    ):
        changed = index | {"weight_map": index["weight_map"] | {"layer2": file}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(changed))
        with pytest.raises(UserError, match=message):
            Pretrained(tmp_path)


def test_a_pickle_is_refused_with_the_way_to_convert_it(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\3\4" + b"0" * 90)
    with pytest.raises(UserError, match=r"pytorch_model.bin: is a zip file.*torch.load.*save_file"):
        Pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match="is a folder without model"):
        Pretrained(tmp_path)


def test_a_position_embedding_is_interpolated_where_that_is_allowed(tmp_path):
    grid = np.arange(16, dtype=np.float32).reshape(16, 1)  # rises by 1 to the right, by 4 downwards
    save(tmp_path / "a.params", {"params": {"positions": np.r_[[[99]], grid]}}, {})
    like = {"positions": jnp.zeros((65, 1))}
    with pytest.raises(UserError, match=r"positions: the file has \(17, 1\), the model has \(65"):
        Pretrained(tmp_path / "a.params").check(like, {})
    params, _ = Pretrained(tmp_path / "a.params", interpolate=["positions"])(like, {})
    assert params["positions"][0] == 99  # the class token keeps its vector
    inner = params["positions"][1:].reshape(8, 8)[3:5, 3:5]
    assert (np.diff(inner, axis=0) > 1).all() and (np.diff(inner, axis=1) > 0.3).all()
    np.testing.assert_allclose(inner + inner[::-1, ::-1], 15)  # the middle of the image stays there
    with pytest.raises(UserError, match=r"pretrained.interpolate: the rule 'place' matches no"):
        Pretrained(tmp_path / "a.params", interpolate=["place"]).check(like, {})
    with pytest.raises(UserError, match="the file has"):  # no square grid
        Pretrained(tmp_path / "a.params", interpolate=["positions"]).check(
            {"positions": jnp.zeros((64 + 3, 1))}, {}
        )


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [(3, 7), (14, 16), (8, 5)])
def test_interpolation_is_that_of_torch(old, new):
    torch = pytest.importorskip("torch")
    grid = np.random.default_rng(1).normal(size=(old * old, 3)).astype(np.float32)
    image = torch.from_numpy(grid).reshape(1, old, old, 3).permute(0, 3, 1, 2)
    image = torch.nn.functional.interpolate(image, (new, new), mode="bicubic", align_corners=False)
    expected = image.permute(0, 2, 3, 1).reshape(new * new, 3).numpy()
    np.testing.assert_allclose(resized(grid, expected.shape), expected, atol=1e-5)


# --- in the config


@pytest.mark.parametrize("rules", ["gpt2", [["a", None]], [[r"a(\d)", [r"b\1", None], "OI->IO"]]])
def test_the_option_takes_rules(rules):
    option = {"path": "a", "rules": rules, "interpolate": ["positions/.*"]}
    assert TrainingOptions(pretrained=option).pretrained == option


@pytest.mark.parametrize("rules", ["", 3, ["gpt2"]])
def test_the_option_refuses_what_are_no_rules(rules):
    with pytest.raises(ValueError, match=r"^pretrained.rules.*: must be a "):
        TrainingOptions(pretrained={"path": "a", "rules": rules})


def test_a_model_that_would_compute_something_else_is_refused():
    def check(rules="gpt2", name="gpt", **arguments):
        pretrained = {"path": "a", "rules": rules}
        model = {"name": name, "args": arguments}
        check_arguments({"training": {"pretrained": pretrained}, "model": model})

    check(feed_forward="gelu_tanh", positions="learned")
    check("resnet18", "resnet", depths=(2, 2, 2, 2), bottleneck=False)
    check(name="my_models.gpt", feed_forward="gelu")
    check([["a", "b"]], feed_forward="gelu")
    expected = r'^model.args.feed_forward: the weights of rules gpt2 need "gelu_tanh", got "gelu"$'
    with pytest.raises(UserError, match=expected):
        check(feed_forward="gelu")
