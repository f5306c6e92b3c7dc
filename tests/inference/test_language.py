"""An exported language model: its files write what JAX writes, and text needs no JAX."""

import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from inference import convert_tflite, predict
from inference.demo.text import page_tokenizer
from inference.export import step_function
from inference.generate import LOGITS, NEXT, POSITION, TOKEN, Decoder, draw, steps
from inference.load import load
from inference.runtimes import open_model
from model.generate import generate
from model.gpt import gpt
from model.layers.blocks import unrolled
from model.sampling import Sampling
from tests.inference.test_demo import needs_page
from tests.processes import ROOT, captured, run
from utils import UserError, named_leaves

GREEDY = Sampling(temperature=0)
ARGS = {"dim": 32, "depth": 2, "heads": 2, "kv_heads": 1, "positions": "rotary", "scan": True}
CONFIG = {
    "title": "Little",
    "model": {"name": "gpt", "args": ARGS},
    "data": {"name": "stories", "args": {"count": 30, "length": 24}},
    "loader": {"batch_size": 8},
    "loss": "cross_entropy",
    "optimizer": {"name": "adamw", "args": {"lr": 0.01}},
    "training": {"epochs": 1},
    "logging": {"report": False},
}


COUNTING = {TOKEN: ((None,), np.int32), POSITION: ((None,), np.int32), "read": ((None, 6), "i4")}


class Counting:
    """A decode step without a network: after a token comes the next number, and the cache holds
    what was read."""

    def __call__(self, arrays):
        rows = np.arange(len(arrays[TOKEN]))
        read = arrays["read"].copy()
        read[rows, arrays[POSITION]] = arrays[TOKEN]
        logits = np.eye(10, dtype=np.float32)[(arrays[TOKEN] + 1) % 10]
        new = {NEXT + POSITION: arrays[POSITION] + 1, NEXT + "read": read}
        return {LOGITS: logits} | new


def test_a_full_text_is_read_again_from_its_second_half_and_a_shorter_one_as_a_whole():
    counting, seen = Counting(), []

    def call(arrays):
        seen.append((arrays[POSITION].tolist(), arrays["read"].tolist()))
        return counting(arrays)

    decoder = Decoder(call, COUNTING, 6)
    new = list(steps(decoder, [[1, 2, 3, 4], [7]], 6, lambda logits: logits.argmax(-1)))
    np.testing.assert_array_equal(np.transpose(new), [[5, 6, 7, 8, 9, 0], [8, 9, 0, 1, 2, 3]])
    positions = [position for position, _ in seen]
    # Three steps read the prompts; the text of the first is full after three more.
    assert positions[3:6] == [[3, 0], [4, 1], [5, 2]]
    # It is read again from its second half; the other one, with room for more, as a whole.
    assert positions[6:] == [[0, 0], [1, 1], [2, 2], [2, 3], [3, 4], [4, 5]]
    # The first 7 is hidden by its position, and written again.
    assert seen[9][1] == [[5, 6, 7, 0, 0, 0], [7, 8, 9, 0, 0, 0]]


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), [1, 1, 1, 1, 1]),
        (Sampling(top_k=2), [1, 0, 0, 0, 1]),
        (Sampling(vocab_size=4), [1, 1, 1, 1, 0]),
        # The probabilities are 0.46, 0.06, 0.17, 0.02, 0.28: the first two have 0.74.
        (Sampling(top_p=0.7), [1, 0, 0, 0, 1]),
        (Sampling(top_p=0.76), [1, 0, 1, 0, 1]),
        (Sampling(temperature=0), [1, 0, 0, 0, 0]),
        (Sampling(temperature=0.5), [1, 1, 1, 1, 1]),
    ],
)
def test_tokens_are_drawn_with_their_probabilities(sampling, kept):
    logits = np.array([2.0, 0.0, 1.0, -1.0, 1.5], np.float32)
    weights = np.where(kept, np.exp(logits / (sampling.temperature or 1)), 0)
    drawn = draw(np.random.default_rng(0), np.tile(logits, (20_000, 1)), sampling)
    shares = np.bincount(drawn, minlength=5) / len(drawn)
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=0.015)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{}, {"scan": True, "kv_heads": 2, "qk_norm": True}])
def test_the_step_writes_what_generate_writes(arguments):
    """Also past the end of the context, and for prompts of different lengths."""
    model = gpt((12,), 11, dim=16, depth=2, **arguments)
    params = jax.tree.map(lambda p: 5 * p, model.init(jax.random.key(0))[0])
    prompts = [np.array([1, 2, 3, 4, 5]), np.array([7])]
    expected = generate(model, params, prompts, 30, GREEDY)
    weights = unrolled({"params": params, "state": {}})
    cache = model.cache(2)["cache"]
    names = list(named_leaves(cache))
    structure = jax.tree.structure(cache)
    step = jax.jit(lambda arrays: step_function(model, structure, names, weights, arrays))
    inputs = {name: (leaf.shape, leaf.dtype) for name, leaf in named_leaves(cache).items()}
    call = lambda arrays: jax.tree.map(np.asarray, step(arrays))  # noqa: E731
    decoder = Decoder(call, inputs | {TOKEN: ((2,), np.int32)}, 12)
    found = list(steps(decoder, prompts, 30, lambda logits: logits.argmax(-1)))
    np.testing.assert_array_equal(np.transpose(found), expected)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("little")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    code, _, err = run(folder, "-c", "config.json")
    assert code == 0, err
    (path,) = folder.glob("saved/Little/*/checkpoint-epoch_1.params")
    return path


def convert(checkpoint, folder, *options):
    """(exit code, printed text) of the export command."""
    arguments = ["-w", checkpoint, "--out", folder, "--name", "little", *options]
    code, out, err = captured(folder, lambda: convert_tflite.main(list(map(str, arguments))))
    return code, out + err


@pytest.fixture(scope="module")
def exported(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    code, printed = convert(checkpoint, folder)
    assert code == 0, printed
    return SimpleNamespace(folder=folder / "little", printed=printed, checkpoint=checkpoint)


@pytest.mark.torture
def test_the_step_in_onnx_moves_no_cache(exported):
    """It writes one token, and its nodes read the arrays of the cache as they are: to choose
    between old and new numbers, or to transpose them, took twice as long in ONNX Runtime."""
    onnx = pytest.importorskip("onnx")
    graph = onnx.load(exported.folder / "little_decode.onnx").graph
    readers = {
        (node.op_type, i)
        for node in graph.node
        for i, name in enumerate(node.input)
        if re.fullmatch(r"(next/)?blocks/\d/(keys|values)", name)
    }
    # The keys' last two axes: ONNX Runtime makes one node of this and the product after it.
    assert readers == {("ScatterElements", 0), ("Transpose", 0), ("MatMul", 1)}
    orders = [
        list(node.attribute[0].ints)
        for node in graph.node
        if node.op_type == "Transpose" and node.input[0].endswith("/keys")
    ]
    assert orders == 2 * [[0, 1, 3, 2]]


def write(folder, *options):
    """(exit code, standard output, standard error) of predict.py."""
    return captured(ROOT, lambda: predict.main([str(folder), *map(str, options)]))


@pytest.mark.slow
def test_both_formats_hold_the_whole_text_and_the_step_and_write_as_jax(exported):
    files = {"little.onnx", "little_decode.onnx", "little.tflite", "config.json", "model"}
    files |= {"tokenizer.json", "verification.json"}
    assert {path.name for path in exported.folder.iterdir()} == files
    formats = json.loads((exported.folder / "verification.json").read_text())["formats"]
    assert set(formats) == {"onnx", "tflite"}
    for name, report in formats.items():
        step = report["decode"]
        assert (report["route"], step["route"]) == ("native", "native")
        assert report["sizes"]["input"] == ["batch", "length"]
        assert step["greedy"] == {"tokens": 200, "texts": 2, "same": 1.0}
        assert step["inputs"]["blocks/1/keys"] == "float32[None, 1, 24, 16]"
        assert f"{step['file']}{' decode' * (name == 'tflite')}: 100.0% of 2 x 200 greedy" in (
            exported.printed
        )
    # One TFLite file shares the weights of both functions.
    whole = open_model(exported.folder / "little.tflite")
    logits = whole({"input": np.zeros((2, 5), np.int32)})["output"]
    assert logits.shape[:2] == (2, 5)
    both = formats["onnx"]["bytes"] + formats["onnx"]["decode"]["bytes"]
    assert formats["tflite"]["bytes"] < 0.9 * both


@pytest.mark.slow
@pytest.mark.parametrize("file", ["", "little.onnx", "little_decode.onnx", "little.tflite"])
def test_greedy_text_is_that_of_the_checkpoint(exported, file):
    options = ("--prompt", "Once", "--temperature", 0, "--tokens", 40)
    code, out, err = write(exported.folder / file, *options)
    assert code == 0, err
    assert out == load(exported.checkpoint).generate("Once", 40, temperature=0) + "\n"


@pytest.mark.slow
def test_the_seed_decides_the_text_and_no_jax_is_needed(exported):
    options = ["--prompt", "The", "--tokens", "30", "--top-k", "9", "--top-p", "0.9"]
    code = "import sys; sys.modules['jax'] = sys.modules['tensorflow'] = None\n"
    code += "from inference.predict import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(exported.folder), *options]
    pipes = {"capture_output": True, "text": True, "cwd": ROOT}
    process = subprocess.run([*command, "--seed", "3"], timeout=100, **pipes)
    assert process.returncode == 0, process.stderr
    texts = [write(exported.folder, *options, "--seed", seed)[1] for seed in (3, 4)]
    assert process.stdout == texts[0] != texts[1] and texts[0].startswith("The")


@pytest.mark.slow
def test_a_text_of_a_loaded_checkpoint_depends_on_the_seed_alone(checkpoint):
    loaded = load(checkpoint)
    texts = [loaded.generate("The", 20, top_k=9, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith("The")
    with pytest.raises(UserError, match="prompt: has 30 tokens, the model's context has 24"):
        loaded.generate("a" * 30)
    with pytest.raises(UserError, match=r"generate: .*the options are temperature, top_k, top_p"):
        loaded.generate("a", temprature=1)


@pytest.mark.slow
def test_mistakes_are_named(exported, tmp_path):
    folder = exported.folder
    other = tmp_path / "tokenizer.json"
    other.write_text('{"type": "bytes"}')
    (tmp_path / "empty").mkdir()
    without = tmp_path / "without"
    shutil.copytree(folder, without)
    (without / "tokenizer.json").unlink()
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "verification.json").write_text('{"formats": {"onnx": {"file": "a.onnx"}}}')
    for model, options, message in [
        (folder, ("--prompt", "a" * 30), "prompt: has 30 tokens, the model's context has 24"),
        (folder, ("--prompt", "a€"), "prompt: line 1, column 2: the character '€'"),
        (folder, ("--prompt", "a", "--tokens", 0), "--tokens: must be at least 1, got 0"),
        (folder, ("--prompt", "a", "--top-p", 2), "top_p: must be above 0 and at most 1"),
        (
            folder,
            ("--prompt", "a", "--tokenizer", other),
            "is another tokenizer than the one that the run recorded",
        ),
        (without, ("--prompt", "a"), "has no tokenizer.json; pass the tokenizer"),
        (without, ("--prompt", "a", "--tokenizer", other), "has 257 tokens, the model knows"),
        (plain, ("--prompt", "a"), "has no decode step; name the export of a language model"),
        (tmp_path / "empty", ("--prompt", "a"), "is not an export: it has no verification.json"),
        (exported.checkpoint.parent, ("--prompt", "a"), "python -m inference.generate"),
        (tmp_path / "none", ("--prompt", "a"), "no such file or folder"),
        (exported.checkpoint, ("--prompt", "a"), "python -m inference.generate"),
        (folder, ("x.png", "--prompt", "a"), "leave out the inputs"),
        (folder, ("--prompt", "a", "--top", 2), "--top: goes with inputs; leave it out"),
        (folder, ("--prompt", "a", "--csv", "a.csv"), "--csv: goes with inputs; leave it out"),
        (folder, ("x.npz", "--top-k", 2), "--top-k: goes with --prompt; leave it out"),
        (folder, (), "INPUT: is missing"),
    ]:
        code, out, err = write(model, *options)
        assert (code, out) == (2, ""), (options, err)
        assert message in err and err.count("\n") == 1, err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpoint", "little.onnx", "little.tflite"])
@pytest.mark.parametrize("token", [-1, 9999])
def test_a_token_outside_the_vocabulary_has_no_prediction(exported, tmp_path, kind, token):
    """For which JAX returns NaN, and each runtime something else."""
    model = exported.checkpoint if kind == "checkpoint" else exported.folder / kind
    tokens = np.ones((2, 24), np.int32)
    np.savez(tmp_path / "x.npz", x=tokens)
    code, _, err = write(model, tmp_path / "x.npz")
    assert code == 0, err
    tokens[1, 3] = token
    np.savez(tmp_path / "x.npz", x=tokens)
    code, out, err = write(model, tmp_path / "x.npz")
    assert (code, out) == (2, "")
    assert f"x.npz[1]: token 3 is {token}, outside the vocabulary 0.." in err


@pytest.mark.slow
def test_arrays_for_an_export_are_for_its_whole_text(exported, tmp_path):
    np.savez(tmp_path / "x.npz", x=np.ones((2, 24), np.int32))
    code, _, err = write(exported.folder, tmp_path / "x.npz")
    assert code == 2 and "for exported files" in err and "_decode" not in err


@pytest.mark.slow
def test_small_weights_write_almost_the_same_and_a_batch_may_be_fixed(checkpoint, tmp_path):
    options = ("--quantize", "dynamic", "--batch", 2, "--formats", "onnx")
    code, printed = convert(checkpoint, tmp_path, *options)
    assert code == 0, printed
    report = json.loads((tmp_path / "little" / "verification.json").read_text())["formats"]["onnx"]
    assert report["decode"]["inputs"]["token"] == "int32[2]"
    assert report["decode"]["greedy"]["texts"] == 2 and report["decode"]["greedy"]["same"] > 0.7
    text = write(tmp_path / "little", "--prompt", "The", "--tokens", 20, "--temperature", 0)[1]
    assert text.startswith("The") and len(text) > 10


@pytest.mark.slow
@needs_page
def test_the_page_writes_what_the_checkpoint_and_the_file_write(checkpoint, tmp_path, chromium):
    """Past the end of the context, too, which has 24 tokens."""
    code, printed = convert(checkpoint, tmp_path, "--demo", "--formats", "onnx")
    assert code == 0, printed
    folder = tmp_path / "little"
    files = json.loads((folder / "verification.json").read_text())["files"]
    assert {"little.html", "little.onnx", "little_decode.onnx"} <= {*files}
    chromium.open(folder / "little.html")
    for prompt in ("Once", "", "She was very gl"):
        text = load(checkpoint).generate(prompt, 60, temperature=0)
        options = ("--prompt", prompt, "--temperature", 0, "--tokens", 60)
        assert write(folder, *options)[1] == text + "\n"
        assert chromium.js(f"write({prompt!r}, {{tokens: 60, temperature: 0}})") == text
    assert chromium.complaints() == []


@pytest.mark.slow
def test_a_page_without_a_tokenizer_is_refused_before_anything_is_written(
    checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr("inference.export.runtime", lambda: None)
    monkeypatch.setattr("inference.export.page_tokenizer", lambda _: page_tokenizer(None))
    code, printed = convert(checkpoint, tmp_path, "--demo", "--formats", "onnx")
    assert code == 2 and "\n--demo: the run has recorded no tokenizer" in printed, printed
    assert not list(tmp_path.iterdir())
