"""The page on which a language model writes: its tokenizers and its sampling, in a browser, are
those of Python; and what the page cannot do is refused."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from data_loader.tokenizers.bpe import CL100K, GPT2, O200K
from data_loader.tokenizers.plain import ByteTokenizer, CharacterTokenizer
from inference.demo import page, runtime
from inference.demo.page import part
from inference.demo.text import page_tokenizer, write_text_page
from inference.generate import draw
from model.sampling import Sampling
from tests.training.browser import PROGRAM
from utils import UserError

needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
TEXTS = [
    "",
    "Once upon a time, there's a fox. I'M, we'LL, they'Ve 'tis 'S '\u017f \u212a",
    "  two  spaces\n\n\n and \t tabs \r\n \x85 \xa0\u3000wide\u2028lines \ufeffmark\u180e\x1c  ",
    "1234567 3.14 ½ ٣٤٥ Ⅻ x² 2nd",
    "e\u0301 cafe\u0301 caf\xe9 n\u0303 \u0301alone Å\u030a",
    "日本語のテキスト 中文 한국어 हिन्दी ไทย العربية עברית Ελληνικά Русский ǅ ǈ ʰ",
    "😀👩\u200d👩\u200d👧\u200d👦🇩🇪👍🏽 a😀b \U0001f468\u200d💻 \U0001d4b3\U0001d4ce 𐍈",
    "<|endoftext|>x<|endoftext|><|endo <a b> <a b>c",
    'if x[0] != "a"://\n\treturn {$y}\\n #!? ... --- /path/to/file.py @me',
    "zzzzzzzzzzzzzzzzzzzz aaaaaaaaaaaaaaa",
    "__proto__ constructor toString",
]


def in_page(chromium, name, body, **values):
    """The value of the `body` of a function, with the script `name` of a page and some values."""
    chromium.ask("Page.navigate", url="about:blank")
    names = "".join(f"const {key} = {json.dumps(value)};\n" for key, value in values.items())
    return chromium.js(f"(() => {{\n{part(name)}\n{names}{body}\n}})()")


def compare(chromium, tokenizer, texts):
    """The page's tokenizer encodes these texts as Python does, and decodes them token by token."""
    body = """
        const {encode, bytesOf} = tokenizerOf(known);
        return texts.map((text) => {
            const tokens = encode(text), textOf = textDecoder();
            return [tokens, tokens.map((token) => textOf(bytesOf(token))).join("") + textOf()];
        });"""
    found = in_page(chromium, "tokens.js", body, known=page_tokenizer(tokenizer), texts=texts)
    for text, (tokens, decoded) in zip(texts, found, strict=True):
        assert tokens == tokenizer.encode(text).tolist(), text
        assert decoded == text


def made_bpe(pattern=None, whole=False, vocab_size=600):
    """A byte-pair tokenizer of the texts, with a regex of its own, and one more mark."""
    library = pytest.importorskip("tokenizers")
    from data_loader.tokenizers.bpe import Bpe, UntrainedBpe

    made = UntrainedBpe(vocab_size, 1).train(TEXTS * 3).made
    if pattern:
        split = library.pre_tokenizers.Split(library.Regex(pattern), "isolated")
        level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = library.pre_tokenizers.Sequence([split, level])
    made.add_tokens(["<a b>", "<a b>c"])
    if whole:
        content = json.loads(made.to_str())
        content["model"]["ignore_merges"] = True
        made = library.Tokenizer.from_str(json.dumps(content))
    return Bpe(made)


@needs_chromium
def test_bytes_and_characters_are_those_of_python(chromium):
    compare(chromium, ByteTokenizer(), TEXTS)
    alphabet = "".join(sorted(set("".join(TEXTS))))
    compare(chromium, CharacterTokenizer(alphabet), TEXTS)


@needs_chromium
@pytest.mark.parametrize("pattern", [None, GPT2, CL100K, O200K], ids=["level", "2", "100k", "200k"])
def test_byte_pairs_are_those_of_huggingface(chromium, pattern):
    compare(chromium, made_bpe(pattern, whole=pattern is not None), TEXTS)


@needs_chromium
def test_texts_that_no_one_chose_have_the_same_byte_pairs(chromium):
    """Characters of all blocks of Unicode up to version 13, in an order without sense."""
    random, blocks = np.random.default_rng(0), [(0x20, 0x7F), (0xA0, 0x24F), (0x370, 0x3FF)]
    blocks += [(0x400, 0x4FF), (0x5D0, 0x5EB), (0x620, 0x64B), (0x900, 0x950), (0xE01, 0xE3B)]
    blocks += [(0x2000, 0x2070), (0x3041, 0x3097), (0x4E00, 0x9FFC), (0x1F300, 0x1F650)]
    texts = []
    for _ in range(200):
        low, high = blocks[random.integers(len(blocks))]
        codes = [*random.integers(low, high, 12), *random.integers(9, 128, 12)]
        texts.append("".join(map(chr, random.permutation(codes))))
    for pattern in (None, CL100K, O200K):
        compare(chromium, made_bpe(pattern), texts)


@needs_chromium
def test_a_character_that_the_model_never_saw_is_named_with_its_place(chromium):
    body = """
        try { tokenizerOf(known).encode("ab\\na😀"); } catch (error) { return error.message; }
    """
    known = page_tokenizer(CharacterTokenizer("\nab"))
    assert in_page(chromium, "tokens.js", body, known=known) == (
        "Line 2, column 2: the model never saw the character “😀” (U+1F600). It knows 3 others."
    )


@needs_chromium
def test_tokens_are_drawn_with_the_probabilities_of_python(chromium):
    logits = np.random.default_rng(1).normal(0, 0.7, 12).astype(np.float32)
    logits[7] = logits[3]  # a tie
    samplings = [
        *(Sampling(), Sampling(0.5), Sampling(2.0, top_k=3), Sampling(top_p=0.8), Sampling(0)),
        *(Sampling(top_k=1), Sampling(1.3, 5, 0.6), Sampling(top_p=1e-6), Sampling(1e-3, 4, 0.999)),
    ]
    body = """
        return samplings.map((sampling) => {
            const random = randomNumbers(5), counts = new Array(logits.length).fill(0);
            for (let i = 0; i < 10000; i++) counts[draw(logits, sampling, random)]++;
            return counts;
        });"""
    options = [
        {"temperature": each.temperature, "topK": each.top_k, "topP": each.top_p}
        for each in samplings
    ]
    found = in_page(chromium, "tokens.js", body, logits=logits.tolist(), samplings=options)
    for sampling, counts in zip(samplings, found, strict=True):
        drawn = draw(np.random.default_rng(0), np.tile(logits, (10_000, 1)), sampling)
        shares = np.bincount(drawn, minlength=12) / len(drawn)
        np.testing.assert_allclose(np.array(counts) / 10_000, shares, atol=0.02)
        assert (np.array(counts) > 0).tolist() == (shares > 0).tolist(), sampling


def refused(**changes):
    """The message for a tokenizer.json with these changes, as key__key=value."""
    letters = {letter: i for i, letter in enumerate(page_tokenizer(made_bpe())["letters"])}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    model = {"type": "BPE", "vocab": letters, "merges": []}
    content = {"model": model, "added_tokens": [], "normalizer": None, "decoder": level}
    content["pre_tokenizer"] = dict(level)
    for path, value in changes.items():
        *above, key = path.split("__")
        place = content
        for name in above:
            place = place[name]
        place[key] = value
    tokenizer = SimpleNamespace(
        to_json=lambda: json.dumps(content), end_of_text=None, vocab_size=len(letters)
    )
    with pytest.raises(UserError, match=r"^--demo: .*; leave out --demo, .*predict\.py") as error:
        page_tokenizer(tokenizer)
    return str(error.value)


def test_a_tokenizer_that_the_page_cannot_follow_is_refused():
    flags = {"content": "<m>", "id": 256, "single_word": False, "lstrip": True, "rstrip": False}

    def split(pattern, **others):
        step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        return {"type": "Sequence", "pretokenizers": [step | {"invert": False} | others, level]}

    for changes, message in [
        ({"model__type": "Unigram"}, 'tokenizer\'s model "Unigram"'),
        ({"model__dropout": 0.1}, "model.dropout 0.1"),
        ({"model__vocab": {"a": 0}}, "has no token for the byte"),
        ({"normalizer": {"type": "NFC"}}, 'normalizer {"type": "NFC"}'),
        ({"decoder": None}, "decoder null"),
        ({"added_tokens": [flags]}, "token '<m>': lstrip true"),
        ({"pre_tokenizer": None}, "pre_tokenizer null"),
        ({"pre_tokenizer__type": "Whitespace"}, 'pre_tokenizer "Whitespace"'),
        ({"pre_tokenizer__add_prefix_space": True}, "pre_tokenizer.add_prefix_space true"),
        ({"pre_tokenizer": split("a", behavior="Removed")}, 'behavior "Removed"'),
        ({"pre_tokenizer": split(r"\p{L}+|\w+")}, r"does not know its part \w+"),
        ({"pre_tokenizer": split(r"\p{L}++")}, "does not know its part ++"),
        ({"pre_tokenizer": split("(?i)a")}, "does not know its part (?i)a"),
    ]:
        assert message in refused(**changes), changes
    with pytest.raises(UserError, match="--demo: the run has recorded no tokenizer"):
        page_tokenizer(None)


def test_a_model_that_is_too_large_for_a_page_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "runtime", lambda: {runtime.SCRIPT: b"", runtime.PROGRAM: b""})
    monkeypatch.setattr(page, "LONGEST", 2**20)
    model, html = tmp_path / "m_decode.onnx", tmp_path / "m.html"
    model.write_bytes(np.random.default_rng(0).bytes(2**20))
    arguments = (model, html, "m", 8, page_tokenizer(ByteTokenizer()))
    with pytest.raises(UserError, match=r"m_decode.onnx is larger .* --quantize dynamic"):
        write_text_page(*arguments)
    assert not html.exists()
    model.write_bytes(b"small")
    write_text_page(*arguments)
    assert '"context": 8' in html.read_text()
