"""`python -m inference.generate`: the text that a run logged as a sample, and one message for each
mistake."""

import json

import numpy as np
import pytest

import train
from data_loader.tokenizers.plain import ByteTokenizer
from inference.generate import check_tokenizer, checked_text, main, parse
from inference.load import load
from utils import UserError

CONFIG = {
    "title": "Tiny",
    "model": {"name": "gpt", "args": {"dim": 8, "depth": 1, "heads": 1}},
    "data": {"name": "stories", "args": {"count": 20, "length": 16}},
    "loader": {"batch_size": 32},
    "loss": "cross_entropy",
    "metrics": ["bits_per_byte"],
    "optimizer": {"name": "adamw", "args": {"lr": 0.01}},
    "training": {"epochs": 1, "limit_batches": 3, "ema": 0.9},
    "logging": {"report": False},
    "callbacks": [{"name": "sample_text", "args": {"prompts": ["Once upon"], "top_k": 5}}],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("generate")
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG | {"checkpoint": {"dir": str(folder)}, "run_name": "run"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        assert train.main(["-c", str(config)]) == 0
    return folder / "Tiny" / "run"


@pytest.mark.slow
def test_the_command_writes_what_the_run_logged_as_its_last_sample(run, capsys):
    assert main([str(run), "--best", "--prompt", "Once upon", "--top-k", "5"]) == 0
    row = json.loads((run / "samples.jsonl").read_text().splitlines()[-1])
    printed = capsys.readouterr()
    assert printed.out == row["prompt"] + row["text"] + "\n"
    assert "checkpoint-epoch_1.params (the best: val_loss" in printed.err


@pytest.mark.slow
def test_a_loaded_decoder_takes_texts_of_any_length_up_to_its_context(run):
    loaded = load(run)
    tokens = loaded.tokenizer.encode("Once upon a time")
    whole = loaded.predict(tokens[None])
    assert whole.shape == (1, 16, loaded.tokenizer.vocab_size)
    np.testing.assert_allclose(loaded.predict(tokens[None, :5]), whole[:, :5], atol=1e-5)
    with pytest.raises(UserError, match="takes texts of up to 16 tokens, got 17"):
        loaded.predict(np.zeros((1, 17), int))
    with pytest.raises(UserError, match=r"add an axis in front, as x\[None\]"):
        loaded.predict(tokens[:5])


@pytest.mark.slow
@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_outside_the_vocabulary_is_refused_with_its_place(run, token):
    loaded = load(run)
    tokens = np.zeros((3, 4), int)
    tokens[2, 1] = token
    with pytest.raises(UserError, match=rf"predict: input 2: token 1 is {token}, outside the"):
        loaded.predict(tokens)
    last = np.full((1, 4), loaded.tokenizer.vocab_size - 1)
    assert np.isfinite(loaded.predict(last)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"prompt": None}, "generate: prompt must be a text, got NoneType"),
        ({"prompt": b"O"}, "generate: prompt must be a text, got bytes"),
        ({"tokens": 0}, "tokens: must be an integer of at least 1, got 0"),
        ({"seed": -1}, "seed: must be an integer from 0 to"),
        ({"top_k": 2.5}, "top_k: must be at least 1, and an integer, got 2.5"),
    ],
)
def test_a_mistake_in_python_is_an_error_of_the_user(run, words, message):
    with pytest.raises(UserError, match=message):
        load(run).generate(**{"prompt": "O"} | words)


MISTAKES = {
    "prompt: line 1, column 2: the character 'Ω' (U+03A9)": ["--prompt", "OΩ"],
    "prompt: has 17 tokens, the model's context has 16": ["--prompt", "a" * 17],
    "latin.txt: byte 3 (0xe9, in line 1) is not UTF-8": ["--prompt-file", "latin.txt"],
    "--tokenizer: bytes.json is another tokenizer": ["--tokenizer", "bytes.json", "--prompt", "O"],
    "--tokens: must be at least 1": ["--tokens", "0", "--prompt", "O"],
    "top_p: must be above 0": ["--top-p", "0", "--prompt", "O"],
    "--seed: must be from 0 to 4294967294, got 4294967295": ["--seed", "4294967295", "--samples=2"],
    r"--prompt: is not UTF-8: character 1 is '\udcff'": ["--prompt", "a\udcff"],
}


@pytest.mark.slow
@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_message(run, capsys, monkeypatch, message):
    monkeypatch.chdir(run)
    (run / "latin.txt").write_bytes("caf\u00e9 au lait".encode("latin1"))
    (run / "bytes.json").write_text('{"type": "bytes"}')
    assert main([str(run), *MISTAKES[message]]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and "Traceback" not in shown.err and not shown.out


def test_a_prompt_is_read_as_the_text_of_a_run(tmp_path):
    """Without the mark at its beginning and the line breaks of Windows."""
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfOnce\r\nupon")
    arguments = parse(["run", "--prompt-file", str(tmp_path / "a.txt")])
    assert checked_text(arguments)[0] == "Once\nupon"


def test_a_tokenizer_with_fewer_tokens_than_the_model_is_told_of(capsys):
    check_tokenizer(ByteTokenizer(), None, 300, "t.json")
    assert "t.json has 257 tokens, the model knows 300" in capsys.readouterr().err
    check_tokenizer(ByteTokenizer(), ByteTokenizer(), 300, "t.json")  # as its run had
    assert capsys.readouterr().err == ""
