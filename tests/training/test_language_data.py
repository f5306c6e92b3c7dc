"""Runs on tokens: the facts and the tokenizer of the data reach model, metrics, checkpoint and
Loaded; the windows of each epoch are the same after a kill; another tokenizer is refused."""

import json
import os
import signal
from functools import partial

import jax
import numpy as np
import pytest

import train
from data_loader.loader import epoch_order
from data_loader.tokenizers.plain import characters
from data_loader.tokens import IGNORED, Stream, Windows
from inference.load import load
from tests.runs import json_lines, rows_of
from training.fit import fit, ignoring
from training.loss import cross_entropy
from training.metrics import bits_per_byte, perplexity
from training.optimizers import adam
from utils import UserError
from wiring.build import build

MODULE = """
import jax, jax.numpy as jnp
from model.base import Model

def bigrams(input_shape: tuple[int, ...], vocab_size: int) -> Model:
    def init(key):
        return {"table": jax.random.normal(key, (vocab_size, vocab_size)) + 0 * input_shape[0]}, {}

    def apply(params, state, x, *, train=False, key=None):
        return params["table"][x["tokens"] if isinstance(x, dict) else x], state

    return Model(init, apply)
"""
CONFIG = {
    "title": "Bigrams",
    "model": "my_bigrams.bigrams",
    "data": {"name": "stories", "args": {"count": 30, "length": 16}},
    "loader": {"batch_size": 32},
    "loss": "cross_entropy",
    "metrics": ["perplexity", "bits_per_byte", "accuracy"],
    "optimizer": {"name": "adamw", "args": {"lr": 0.05}},
    "training": {"epochs": 2},
    "logging": {"every_steps": 5, "report": False},
}


def bigrams(vocab_size):
    scope = {}
    exec(MODULE, scope)
    return scope["bigrams"]((1,), vocab_size)


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """An empty folder with the module of the model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "my_bigrams.py").write_text(MODULE)
    return tmp_path


# The facts.


@pytest.mark.parametrize("documents", ["joined", "apart"])
def test_the_facts_of_the_data_reach_model_loss_and_metrics(workdir, documents):
    config = json.loads(json.dumps(CONFIG))
    config["data"]["args"]["documents"] = documents
    parts = build(config, "config.json")
    assert parts.facts["input_shape"] == (16,)
    assert parts.facts["vocab_size"] == parts.data.tokenizer.vocab_size
    assert parts.facts["bytes_per_token"] == parts.data.bytes_per_token
    assert parts.config["loss"]["args"]["ignore_label"] == IGNORED
    resolved = {metric["name"]: metric["args"] for metric in parts.config["metrics"]}
    assert resolved["accuracy"] == resolved["bits_per_byte"] == {"ignore_label": IGNORED}
    config["loss"] = {"name": "cross_entropy", "args": {"ignore_label": 3}}
    assert build(config, "config.json").config["loss"]["args"]["ignore_label"] == 3
    config["data"] = "digits"
    with pytest.raises(UserError, match=r"metrics\.1\.args: bits_per_byte needs 'bytes_per_token'"):
        build(config | {"model": "mlp"}, "config.json")
    plain = build(config | {"model": "mlp", "metrics": [], "loss": "cross_entropy"}, "config.json")
    assert plain.config["loss"]["args"]["ignore_label"] is None


def test_what_an_argument_says_about_ignored_labels_counts():
    loss, own = partial(cross_entropy, ignore_label=None), lambda logits, label: label.mean()
    assert ignoring(-1, loss) is loss and ignoring(-1, own) is own
    assert ignoring(None, cross_entropy) is cross_entropy
    assert ignoring(-1, perplexity).keywords == {"ignore_label": -1}


@pytest.mark.slow
def test_bits_per_byte_is_the_loss_of_the_text_over_its_bytes():
    rng = np.random.default_rng(0)
    logits, label = rng.normal(size=(3, 8, 11)).astype(np.float32), rng.integers(0, 11, (3, 8))
    label[0, 3:] = IGNORED
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    counted = label != IGNORED
    bits = -np.log2(np.take_along_axis(chances, np.maximum(label, 0)[..., None], -1))[..., 0]
    value, weight = jax.vmap(
        lambda x, y: bits_per_byte(x, y, bytes_per_token=3.5, ignore_label=IGNORED)
    )(logits, label)
    assert weight.tolist() == [3, 8, 8]
    expected = bits[counted].sum() / (3.5 * counted.sum())
    np.testing.assert_allclose((value * weight).sum() / weight.sum(), expected, rtol=1e-5)
    loss = cross_entropy(logits[1], label[1])
    np.testing.assert_allclose(
        bits_per_byte(logits[1], label[1], bytes_per_token=1), loss / np.log(2), rtol=1e-6
    )
    with pytest.raises(ValueError, match="bytes_per_token: must be a finite number above 0, got 0"):
        bits_per_byte(logits[1], label[1], bytes_per_token=0)


# Whole runs.


@pytest.mark.slow
def test_the_tokenizer_travels_from_the_text_to_the_loaded_model(workdir):
    (workdir / "config.json").write_text(json.dumps(CONFIG))
    assert train.main(["-c", "config.json"]) == 0
    (folder,) = (workdir / "saved" / "Bigrams").iterdir()
    data = build(CONFIG, "config.json").data
    assert (folder / "tokenizer.json").read_text() == data.tokenizer.to_json()
    rows = json_lines(folder / "metrics.jsonl")
    row = rows[-1]
    assert row["val_perplexity"] == pytest.approx(np.exp(row["val_loss"]), rel=1e-4)
    bits = row["val_loss"] / np.log(2) / data.bytes_per_token
    assert row["val_bits_per_byte"] == pytest.approx(bits, rel=1e-4)
    (checkpoint,) = folder.glob("checkpoint-epoch_2.params")
    for path in folder.iterdir():  # the checkpoint alone is enough
        if path.is_file() and path != checkpoint:
            path.unlink()
    loaded = load(checkpoint, trust=True)
    tokens = loaded.tokenizer.encode("Anna went")
    assert loaded.tokenizer.decode(tokens) == "Anna went"
    inputs = tokens[None].astype(np.int32).repeat(2, 1)[:, :16]
    assert loaded.predict(inputs).shape == (1, 16, loaded.tokenizer.vocab_size)


@pytest.mark.slow
def test_a_model_is_loaded_although_its_text_was_extended(workdir):
    (workdir / "a.txt").write_text("abcd efgh\n" * 60)
    data = {"name": "text", "args": {"train": "a.txt", "length": 8}}
    (workdir / "config.json").write_text(json.dumps(CONFIG | {"data": data}))
    assert train.main(["-c", "config.json", "--fast-dev-run"]) == 0
    assert train.main(["-c", "config.json", "training.epochs=1"]) == 0
    (folder,) = (workdir / "saved" / "Bigrams").iterdir()
    (workdir / "a.txt").write_text("abcd efgh xyz\n" * 60)
    loaded = load(folder, trust=True)
    assert loaded.tokenizer.vocab_size == 11
    assert loaded.predict(np.zeros((2, 8), np.int32)).shape == (2, 8, 11)
    (workdir / "a.txt").unlink()
    assert load(folder, trust=True).predict(np.zeros((2, 8), np.int32)).shape == (2, 8, 11)


class Stop:
    """Sends a signal at a step."""

    def __init__(self, step):
        self.step = step

    def on_steps(self, run):
        if run.step >= self.step and not run.signal:
            os.kill(os.getpid(), signal.SIGTERM)


TOKENS = np.random.default_rng(0).integers(0, 20, 2000).astype(np.uint16)


def run_of(folder, **settings):
    """A run of three epochs with 13 steps each over a stream of two files."""
    files = [("a.bin", TOKENS[:700]), ("b.bin", TOKENS[700:])]
    train_set = Windows(Stream(files), 16, 20)
    settings = {"epochs": 3, "batch_size": 10, "log": {"every_steps": 1}, "seed": 3} | settings
    return fit(
        bigrams(20),
        train_set,
        Windows(Stream(files[:1]), 16, 20),
        folder=folder,
        optimizer=adam(lr=0.1),
        loss=lambda x, y: cross_entropy(x, y, ignore_label=IGNORED),
        metrics=[lambda x, y: perplexity(x, y, ignore_label=IGNORED)],
        **settings,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """(the run, its rows)"""
    folder = tmp_path_factory.mktemp("undisturbed")
    return run_of(folder / "whole"), rows_of(folder / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, 13, 20])
def test_a_killed_run_on_windows_that_move_ends_with_the_same_bits(tmp_path, undisturbed, step):
    whole, expected_rows = undisturbed
    first = run_of(tmp_path / "killed", callbacks=[Stop(step)])
    assert first.step < whole.step == 39
    resumed = run_of(tmp_path / "killed", resume=True)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    assert rows_of(tmp_path / "killed") == expected_rows


class Look:
    """Notes what a callback sees."""

    def __init__(self):
        self.seen = []

    def on_row(self, run, row):
        self.seen.append((run.tokenizer, run.first_examples(3)))


@pytest.mark.slow
def test_a_callback_sees_the_tokenizer_and_the_first_examples_of_the_first_epoch():
    tokenizer, look = characters().train(["abcdefghijklmnopqrs"]), Look()
    data = Windows(Stream([("a", TOKENS[:300])]), 16, 20, tokenizer=tokenizer)
    settings = {"epochs": 1, "batch_size": 4, "seed": 6, "callbacks": [look], "loss": of_tokens}
    fit(bigrams(20), data, optimizer=adam(), **settings)
    ((found, examples),) = look.seen
    assert found.to_json() == tokenizer.to_json()
    order, _ = epoch_order(len(data), 4, seed=6, epoch=1, shuffle=True)
    for index, (x, _) in zip(order[0], examples, strict=False):
        np.testing.assert_array_equal(x, data.in_epoch(6, 1)[int(index)][0])


@pytest.mark.slow
def test_the_windows_move_in_training_but_never_in_an_evaluation(tmp_path, monkeypatch):
    seen, read = [], Windows.read_batches

    def noted(self, order, collate_fn):
        seen.append((len(self), self.first, len(order)))
        return read(self, order, collate_fn)

    monkeypatch.setattr(Windows, "read_batches", noted)
    run_of(tmp_path / "run")
    firsts = [first for size, first, _ in seen if size == 125]
    assert len(set(firsts)) == 3 and 0 not in firsts
    assert {first for size, first, _ in seen if size == 44} == {0}
    seen.clear()
    run_of(None, shuffle=False)
    assert {first for _, first, _ in seen} == {0}


@pytest.mark.slow
def test_replicas_have_windows_of_their_own(tmp_path):
    both = run_of(None, replicas=2, seed=3)
    for i, states in enumerate(both.states()):
        alone = run_of(None, seed=3 + i)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            states.params,
            alone.params,
        )


@pytest.mark.slow
def test_the_command_refuses_another_tokenizer_also_with_override(workdir, capsys):
    (workdir / "a.txt").write_text("abcd efgh\n" * 200)
    data = {"name": "text", "args": {"train": "a.txt", "length": 16}}
    loader, small = {"batch_size": 4}, {"epochs": 1}
    config = CONFIG | {"data": data, "run_name": "run", "loader": loader, "training": small}
    (workdir / "c.json").write_text(json.dumps(config))
    assert train.main(["-c", "c.json"]) == 0
    run = workdir / "saved" / "Bigrams" / "run"
    before = (run / "tokenizer.json").read_text()
    words = ["--resume", str(run), "--override", "--trust", "training.epochs=2"]
    other = json.dumps({"name": "characters", "args": {"alphabet": "hgfedcba \n"}})
    assert train.main([*words, f"data.args.tokenizer={other}"]) == 2
    assert "the data has another tokenizer, not the run's" in capsys.readouterr().err
    assert (run / "tokenizer.json").read_text() == before
    assert train.main([*words, "optimizer.args.lr=0.01"]) == 0  # which may change


def of_tokens(logits, label):
    return cross_entropy(logits, label, ignore_label=IGNORED)
