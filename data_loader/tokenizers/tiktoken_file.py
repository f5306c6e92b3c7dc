"""The .tiktoken files of OpenAI: lines of a token's bytes in base64 and its number.

They hold no merges: two tokens may be joined if their joint bytes are a token, the one with the
smallest number first. HuggingFace's `tokenizers` needs a list of merges in this order.
"""

import base64

from data_loader.tokenizers.bpe import MOST_TOKENS, bpe_of
from utils import UserError

GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
CL100K = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"""
    r"""| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
O200K = (
    rf"""[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    rf"""|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
MOST_BYTES = 2**24  # of a file; the largest that are published have 4 million
LONGEST = 2**10  # bytes of a token: every place where it can be cut in two is tried
END = "<|endoftext|>"
MIDDLE = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
# By the name of the file: (the regex that splits text, {special token: its number}).
KNOWN = {
    "gpt2": (GPT2, {END: 50256}),
    "r50k_base": (GPT2, {END: 50256}),
    "p50k_base": (GPT2, {END: 50256}),
    "cl100k_base": (CL100K, {END: 100257, **MIDDLE, "<|endofprompt|>": 100276}),
    "o200k_base": (O200K, {END: 199999, "<|endofprompt|>": 200018}),
}


def tokenizer_of(path, data, pattern=None):
    """The tokenizer in the bytes of a .tiktoken file. A file's published name gives the regex and
    the special tokens; in any other file, `pattern` is the regex, and the token that ends a
    document is the number after all others."""
    ranks = read_ranks(path, data)
    if path.stem not in KNOWN and pattern is None:
        raise UserError(
            f"{path}: the regex that splits its text is not in the file; set `pattern`, or give "
            f"the file its published name ({', '.join(KNOWN)})"
        )
    known, special = KNOWN.get(path.stem, (None, {END: 1 + max(ranks.values())}))
    letters = byte_letters()
    name = {token: "".join(letters[byte] for byte in token) for token in ranks}

    def make(library):
        split, levels = library.pre_tokenizers.Split, library.pre_tokenizers.ByteLevel
        vocabulary = {name[token]: rank for token, rank in ranks.items()} | special
        merges = [(name[left], name[right]) for left, right in merges_of(ranks)]
        made = library.Tokenizer(library.models.BPE(vocabulary, merges, ignore_merges=True))
        made.pre_tokenizer = library.pre_tokenizers.Sequence(
            [
                split(library.Regex(pattern or known), "isolated"),
                levels(add_prefix_space=False, use_regex=False),
            ]
        )
        made.decoder = library.decoders.ByteLevel()
        made.add_special_tokens(list(special))
        return made

    return bpe_of(make, path)


def read_ranks(path, data):
    """{bytes of a token: its number} of a .tiktoken file."""
    ranks = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            token, rank = base64.b64decode(token, validate=True), int(rank)
            if not 0 < len(token) <= LONGEST or not 0 <= rank < MOST_TOKENS:
                raise ValueError("its length or its number cannot be that of a token")
            ranks[token] = rank
        except ValueError as error:
            raise UserError(
                f"{path}: line {number} is not a token in base64 and its number ({error}); "
                "copy the file again"
            ) from error
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise UserError(f"{path}: has no token for the byte {missing[0]}; copy the file again")
    return ranks


def merges_of(ranks):
    """All pairs of tokens that make up a token, in the order in which they are joined."""
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [(a, b) for a, b in cuts if a in ranks and b in ranks]
        yield from sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def byte_letters():
    """{byte: the visible character by which GPT-2's files name it}."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in visible}
    hidden = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
