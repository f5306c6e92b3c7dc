"""Write a web page on which a language model continues a text, with its tokenizer in JavaScript."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_loader.base import Tokenizer
from data_loader.tokenizers.bpe import GPT2, byte_letters
from inference.demo.page import document
from utils import UserError
from utils.files import atomic_write

FIX = "leave out --demo, and let the files write with predict.py --prompt"
# What the regexes of Oniguruma, with which HuggingFace's tokenizers split text, and those of
# JavaScript have in common, and what `javascript` translates.
ESCAPED = r"\\[pP]\{[A-Z][a-z]?\}|\\[sSdrnt]|\\[.*+?^$(){}|\[\]\\/]"
COMMON = re.compile(
    rf"(?:{ESCAPED}|\[\^?(?:{ESCAPED}|\\-|[^\\\[\]&])+\]|\(\?i:['A-Za-z|]+\)|\(\?[:!=]|\((?!\?)"
    r"|[)|]|(?:[*+?]|\{\d+(?:,\d*)?\})(?!\+)|[^\\()\[\]{}|*+?^$.])*"
)
CLASSES = {r"\s": r"\p{White_Space}", r"\S": r"\P{White_Space}", r"\d": r"\p{Nd}"}
CASES = {"s": "sS\N{LATIN SMALL LETTER LONG S}", "k": "kK\N{KELVIN SIGN}"}  # other letters have two


def write_text_page(
    step: Path, page: Path, title: str, context: int, tokenizer: dict[str, Any]
) -> None:
    """Write a page for the ONNX file of a decode step; `tokenizer` is what `page_tokenizer`
    returns."""
    facts = {"title": title, "context": context}
    content = json.dumps(tokenizer).encode()
    text = document(step, facts, "text", "tokens", tokenizer=content)
    atomic_write(page, text.encode())


def page_tokenizer(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The facts about a tokenizer that the page needs; raises if the page cannot split text as the
    tokenizer does."""
    if tokenizer is None:
        raise UserError(
            "--demo: the run has recorded no tokenizer, so the page could not read a prompt; name "
            "it in the config's data when you train, or leave out --demo"
        )
    content = json.loads(tokenizer.to_json())
    facts = bpe(content) if "model" in content else content
    return facts | {"end": tokenizer.end_of_text, "count": tokenizer.vocab_size}


def bpe(content: dict[str, Any]) -> dict[str, Any]:
    """The facts of HuggingFace's tokenizer.json, of byte-pair encoding in GPT-2's form."""
    model, added = content["model"], content["added_tokens"]
    check("model", model["type"], "BPE")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        check(f"model.{key}", model.get(key) or None, None)
    check("normalizer", content["normalizer"], None)
    check("decoder", (content["decoder"] or {}).get("type"), "ByteLevel")
    for token in added:
        for flag in ("single_word", "lstrip", "rstrip"):
            check(f"token {token['content']!r}: {flag}", token[flag], False)
    letters = byte_letters()
    if missing := [byte for byte, letter in letters.items() if letter not in model["vocab"]]:
        raise UserError(f"--demo: the tokenizer has no token for the byte {missing[0]}; {FIX}")
    special = {token["content"]: token["id"] for token in added}
    names = {token: name for name, token in (model["vocab"] | special).items()}
    return {
        "type": "bpe",
        "tokens": [names.get(token) for token in range(1 + max(names))],
        "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]],
        "letters": "".join(letters[byte] for byte in range(256)),
        "patterns": [javascript(pattern) for pattern in patterns(content["pre_tokenizer"])],
        "special": special,
        "whole": bool(model.get("ignore_merges")),  # whether a piece that is a token stays whole
    }


def check(name: str, found: object, known: object) -> None:
    if found != known:
        raise UserError(
            f"--demo: the page does not know the tokenizer's {name} {json.dumps(found)}; {FIX}"
        )


def patterns(splitter: dict[str, Any] | None) -> Iterator[str]:
    """The regexes that split a text one after the other; its last step makes bytes of it."""
    splitter = splitter or {}
    steps = splitter["pretokenizers"] if splitter.get("type") == "Sequence" else [splitter]
    for step in steps:
        is_last = step is steps[-1]
        check("pre_tokenizer", step.get("type"), "ByteLevel" if is_last else "Split")
        if not is_last:
            check("pre_tokenizer.behavior", step["behavior"], "Isolated")
            check("pre_tokenizer.invert", step["invert"], False)
            check("pre_tokenizer.pattern", [*step["pattern"]], ["Regex"])
            yield step["pattern"]["Regex"]
        elif step.get("use_regex", True):
            yield GPT2
    check("pre_tokenizer.add_prefix_space", steps[-1]["add_prefix_space"], False)


def javascript(pattern: str) -> str:
    """A regex of Oniguruma as one of JavaScript; raises at what these two may understand in
    different ways."""
    known = COMMON.match(pattern)
    assert known  # it matches nothing, too
    if (end := known.end()) < len(pattern):
        raise UserError(
            f"--demo: the tokenizer splits text by the regex {pattern}, and the page does not know "
            f"its part {pattern[end : end + 20]}; {FIX}"
        )
    pattern = re.sub(r"\(\?i:([^()]*)\)", lambda group: f"(?:{in_any_case(group[1])})", pattern)
    return re.sub(r"\\.", lambda escape: CLASSES.get(escape[0], escape[0]), pattern)


def in_any_case(pattern: str) -> str:
    cases = lambda letter: CASES.get(letter, letter + letter.upper())  # noqa: E731
    return re.sub("[A-Za-z]", lambda letter: f"[{cases(letter[0].lower())}]", pattern)
