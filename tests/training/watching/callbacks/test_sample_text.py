"""sample_text: what a model writes while it is trained, against its own weights; and that training
does not notice."""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_loader.tokenizers.plain import ByteTokenizer, CharacterTokenizer, characters
from data_loader.tokens import IGNORED, Stream, Windows
from model.base import Model
from tests.runs import json_lines
from tests.training.watching.callbacks.fake import view
from training.fit import fit
from training.loss import cross_entropy
from training.optimizers import adam
from training.report.page import write_report
from training.watching.callbacks.sample_text import FILE, sample_text
from utils import UserError

LETTERS = CharacterTokenizer("ab\nc<")
VOCABULARY, CONTEXT = LETTERS.vocab_size, 8


def bigrams(cache=True):
    """The next token depends on the one before alone."""

    def init(key):
        return {"table": jax.random.normal(key, (VOCABULARY, VOCABULARY))}, {}

    def empty(size):
        blocks = [jnp.zeros((size, 1, CONTEXT, 1))]
        return {"cache": {"position": jnp.zeros(size, jnp.int32), "blocks": blocks}}

    apply = lambda params, state, x, **_: (params["table"][x], state)  # noqa: E731
    return Model(init, apply, empty if cache else None)


MODEL = bigrams()
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, 400).astype(np.uint16)
WINDOWS = Windows(Stream([("tokens", TOKENS)]), CONTEXT, VOCABULARY, tokenizer=LETTERS)
LOSS = partial(cross_entropy, ignore_label=IGNORED)
SETTINGS = {"loss": LOSS, "epochs": 2, "batch_size": 10, "log": {"every_steps": 2}}
PROMPTS = ("ab", "c<a", "")


def run(folder=None, callbacks=(), train=WINDOWS, **settings):
    optimizer = adam(lr=0.3)  # so that the texts change
    settings = SETTINGS | {"optimizer": optimizer, "callbacks": list(callbacks)} | settings
    return fit(settings.pop("model", MODEL), train, folder=folder, **settings)


def lines(folder):
    return json_lines(folder / FILE)


class Weights:
    """Keeps the table that is evaluated, after every step."""

    def __init__(self, kill=None):
        self.tables, self.kill, self.every = {}, kill, {"steps": 1}

    def on_steps(self, view):
        self.tables[view.step] = np.asarray(view.params["table"])
        if view.step == self.kill:
            raise KeyboardInterrupt


def likeliest(table, prompt, tokens):
    """What a greedy model writes."""
    row = LETTERS.encode(prompt).tolist() if prompt else [LETTERS.end_of_text]
    written = []
    for _ in range(tokens):
        row.append(int(table[row[-1]].argmax()))
        if row[-1] == LETTERS.end_of_text:
            break
        written.append(row[-1])
    return LETTERS.decode(written)


@pytest.mark.parametrize("ema", [None, pytest.param(0.9, marks=pytest.mark.slow)])
def test_texts_are_those_of_the_evaluated_weights_of_their_step(tmp_path, ema, caplog):
    caplog.set_level(logging.INFO, "main")
    weights = Weights()
    options = {"temperature": 0.0, "every": {"steps": 3, "epochs": 2}}
    samples = sample_text(PROMPTS, tokens=20, **options)  # more than the context
    done = run(tmp_path, [samples, weights], ema=ema)
    rows = lines(tmp_path)
    assert [row["step"] for row in rows] == [s for s in (3, 6, 9, 10) for _ in PROMPTS]
    assert done.step == 10 and [row["epoch"] for row in rows] == [1] * 3 + [2] * 9
    for row, prompt in zip(rows, PROMPTS * 4, strict=True):
        assert row["prompt"] == prompt
        assert row["text"] == likeliest(weights.tables[row["step"]], prompt, 20)
    assert len({row["text"] for row in rows}) > 3
    shown = [r.getMessage() for r in caplog.records if "[sample]" in r.getMessage()]
    assert len(shown) == len(rows) and all("\n" not in line for line in shown)
    expected = " ".join((rows[-3]["prompt"] + rows[-3]["text"]).split())
    assert shown[-3] == f"Step 10 [sample] {expected}"
    page = write_report([tmp_path]).read_text()
    assert "Samples" in page and "step 3" in page


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_training_is_the_same_with_and_without_samples(tmp_path, replicas):
    samples = sample_text(PROMPTS, tokens=5, every={"steps": 3})
    with_samples = run(tmp_path, [samples], replicas=replicas)
    without = run(replicas=replicas)
    for one, other in zip(with_samples.states(), without.states(), strict=True):
        np.testing.assert_array_equal(one.params["table"], other.params["table"])
    assert [row["train_loss"] for row in with_samples.history] == [
        row["train_loss"] for row in without.history
    ]


@pytest.mark.slow
def test_a_resumed_run_writes_the_same_texts_once(tmp_path):
    def samples():
        return sample_text(PROMPTS[:2], tokens=9, temperature=2.0, every={"steps": 1})

    run(tmp_path / "whole", [samples()])
    every = {"checkpoint": {"every_steps": 4}}
    with pytest.raises(KeyboardInterrupt):  # at step 7, after its texts
        run(tmp_path / "killed", [samples(), Weights(kill=7)], **every)
    assert lines(tmp_path / "killed")[-1]["step"] == 7
    run(tmp_path / "killed", [samples(), Weights()], resume=True, **every)
    assert (tmp_path / "killed" / FILE).read_bytes() == (tmp_path / "whole" / FILE).read_bytes()
    assert len(lines(tmp_path / "whole")) == 20


@pytest.mark.slow
def test_fit_takes_a_tokenizer_where_the_data_has_none(tmp_path):
    pairs = WINDOWS.rows(range(20))
    run(tmp_path, [sample_text(("ab",), tokens=4, tokenizer=LETTERS)], pairs, epochs=1)
    assert [row["step"] for row in lines(tmp_path)] == [2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": None}, "sample_text: the data has no tokenizer"),
        ({"model": bigrams(cache=False)}, "sample_text: the model cannot generate: it has no"),
        ({"prompts": ("ab", "ax")}, "sample_text: prompt 1: .*'x'"),
        ({"prompts": ("ab", "a" * 9)}, "sample_text: prompt 1: has 9 tokens, .* context has 8"),
        ({"tokenizer": ByteTokenizer()}, None),
    ],
)
def test_what_cannot_write_is_refused_before_the_first_step(changes, message):
    seen = view(tokenizer=changes.pop("tokenizer", LETTERS), model=changes.pop("model", MODEL))
    callback = sample_text(**changes)
    if message is None:
        return callback.on_start(seen)
    with pytest.raises(UserError, match=message):
        callback.on_start(seen)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="prompts: is empty"):
        sample_text(())
    with pytest.raises(ValueError, match="tokenizer: is not trained yet"):
        sample_text(tokenizer=characters())
    with pytest.raises(ValueError, match="temperature"):
        sample_text(temperature=-1.0)
