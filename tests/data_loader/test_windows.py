"""Windows of tokens: each token is predicted once per epoch, in windows that begin elsewhere; files
of tokens in every form, and the mistakes in them."""

import json

import numpy as np
import pytest

from data_loader.base import fingerprint, loaded
from data_loader.loader import batches, collate, epoch_order, split
from data_loader.tokens import IGNORED, Stream, Windows, tokens
from utils import UserError

pytestmark = pytest.mark.contract

RNG = np.random.default_rng(0)
TOKENS = RNG.permutation(997).astype(np.uint16)  # all different, so that each has one place


def windows(pieces=1, length=16, **keywords):
    named = [(f"file {i}", piece) for i, piece in enumerate(np.array_split(TOKENS, pieces))]
    return Windows(Stream(named), length, 997, **keywords)


def whole_epoch(dataset):
    """All examples of an epoch, as one batch."""
    return next(dataset.read_batches([np.arange(len(dataset))], collate))


@pytest.mark.parametrize("pieces", [1, 3, 90])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("length", [16, 83, 996])
def test_each_token_is_predicted_once_per_epoch_from_the_one_before(pieces, shifted, length):
    dataset = windows(pieces, length)
    for epoch in range(3):
        x, y = whole_epoch(dataset.in_epoch(7, epoch) if shifted else dataset)
        assert x.shape == y.shape == (len(dataset), length) and x.dtype == y.dtype == np.int32
        place = np.argsort(TOKENS)  # of each token
        counted = y != IGNORED
        assert (place[y[counted]] == place[x[counted]] + 1).all()
        assert sorted(place[y[counted]]) == list(range(1, 997))
        if not shifted:
            assert (x.ravel()[:996] == TOKENS[:-1]).all()


def test_the_windows_of_an_epoch_depend_on_the_seed_and_the_epoch_alone():
    dataset = windows()
    first = {
        (seed, epoch): dataset.in_epoch(seed, epoch)[0][0][0]
        for seed in range(4)
        for epoch in (1, 2)
    }
    assert len(set(map(int, first.values()))) == 8
    assert windows().in_epoch(5, 2).in_epoch(3, 1)[0][0][0] == first[3, 1]
    assert dataset[0][0][0] == TOKENS[0]  # the dataset itself stays


def test_batches_are_the_examples_in_the_order_of_the_epoch():
    dataset = windows(pieces=2).in_epoch(0, 1)
    order, _ = epoch_order(len(dataset), 8, seed=0, epoch=1, shuffle=True)
    for row, (x, y) in zip(order, dataset.read_batches(order, collate), strict=True):
        for i, index in enumerate(row):
            np.testing.assert_array_equal(dataset[int(index)], (x[i], y[i]))
    (reversed_batch,) = dataset.read_batches(order[:1], lambda examples: collate(examples[::-1]))
    np.testing.assert_array_equal(reversed_batch[0][0], dataset[int(order[0][-1])][0])


def test_a_set_that_is_split_off_has_no_token_in_common_with_training_in_any_epoch():
    train, val = split(windows(), 0.2, seed=0)
    assert not hasattr(train, "in_epoch")
    order = np.arange(len(train))[None], np.arange(len(val))[None]
    labels = [next(batches(s, o))[1] for s, o in zip((train, val), order, strict=True)]
    seen = [set(y[y != IGNORED].tolist()) for y in labels]
    assert not seen[0] & seen[1] and len(seen[0] | seen[1]) == 996


def test_documents_that_are_kept_apart_have_segments_and_predict_only_themselves():
    end = 9
    stream = Stream([("a", np.array([1, 2, end, 3, 4, 5, end, 6, 7], np.uint16))])
    dataset = Windows(stream, 5, 10, boundary=end)
    x, y = whole_epoch(dataset)
    assert x["tokens"].tolist() == [[1, 2, 9, 3, 4], [5, 9, 6, 1, 2]]
    assert x["segments"].tolist() == [[1, 1, 1, 2, 2], [1, 1, 2, 0, 0]]
    assert y.tolist() == [[2, 9, -1, 4, 5], [9, -1, 7, -1, -1]]
    for epoch in range(20):  # also where the stream begins again within a window
        x, y = whole_epoch(dataset.in_epoch(1, epoch))
        pairs = {(a, b) for a, b in zip(x["tokens"].ravel(), y.ravel(), strict=True) if b >= 0}
        assert pairs == {(1, 2), (2, 9), (3, 4), (4, 5), (5, 9), (6, 7)}
        for tokens_of_row, segments in zip(x["tokens"], x["segments"], strict=True):
            parts = [set(tokens_of_row[segments == s]) for s in set(segments) - {0}]
            assert all(p <= {1, 2, 9} or p <= {3, 4, 5, 9} or p <= {6, 7} for p in parts), parts


# Files.


def write(path, array, header=None):
    data = np.asarray(array)
    start = b""
    if header:
        numbers = np.zeros(256, "<i4")
        numbers[:3] = header, 1, len(data)
        start = numbers.tobytes()
    path.write_bytes(start + data.tobytes())
    return str(path)


@pytest.mark.parametrize(
    "form", ["uint16", "uint32", "llm.c", "llm.c wide", "npy", "npy signed", "npy big"]
)
def test_a_file_of_every_form_has_the_same_tokens(tmp_path, form):
    path, arguments = tmp_path / ("a.npy" if "npy" in form else "a.bin"), {}
    if form == "npy":
        np.save(path, TOKENS)
    elif form == "npy signed":
        np.save(path, TOKENS.astype(np.int64))
    elif form == "npy big":
        np.save(path, TOKENS.astype(">u2"))
    elif form == "uint32":
        arguments = {"dtype": "uint32"}
        write(path, TOKENS.astype("<u4"))
    elif form == "llm.c wide":
        write(path, TOKENS.astype("<u4"), 20240801)
    else:
        write(path, TOKENS, 20240520 if form == "llm.c" else None)
    data = tokens(str(path), length=20, vocab_size=997, **arguments)
    assert data.vocab_size == 997 and data.ignore_label == IGNORED and data.sizes == {"train": 50}
    x, _ = whole_epoch(loaded(data)["train"])
    np.testing.assert_array_equal(x.ravel()[:996], TOKENS[:-1])


def test_several_files_are_one_row_of_tokens_in_the_order_of_their_names(tmp_path):
    for i, piece in enumerate(np.array_split(TOKENS, 4)):
        write(tmp_path / f"train_{i:06}.bin", piece, 20240520)
    write(tmp_path / "val.bin", TOKENS[:100])
    data = tokens(
        str(tmp_path / "train_*.bin"), str(tmp_path / "val.bin"), length=10, vocab_size=997
    )
    sets = loaded(data)
    assert data.sizes == {"train": 100, "val": 10}
    np.testing.assert_array_equal(whole_epoch(sets["train"])[0].ravel()[:996], TOKENS[:-1])
    assert "train_000000.bin and 3 more files" in sets["train"].source


def test_only_what_is_used_of_a_file_is_read(tmp_path):
    path = tmp_path / "large.bin"
    with open(path, "wb") as file:  # a sparse file of 64 GB
        file.truncate(2**36)
    data = tokens(str(path), length=1024, vocab_size=50257)
    dataset = loaded(data)["train"]
    assert len(dataset) == 2**35 // 1024
    (batch,) = dataset.in_epoch(0, 1).read_batches(np.array([[0, len(dataset) - 1, 5]]), collate)
    assert batch[0].shape == (3, 1024)
    fingerprint(dataset)


def test_sets_that_different_tokenizers_made_are_refused(tmp_path):
    paths = []
    for name, about in {"a": ABOUT, "b": ABOUT | {"end_of_text": 6}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokens.json").write_text(json.dumps(about))
        paths.append(write(tmp_path / name / "x.bin", TOKENS.astype("<u4")))
    with pytest.raises(UserError, match="/b: its tokens were made with another tokenizer than"):
        tokens(paths[0], paths[1], length=16)
    (tmp_path / "b" / "tokens.json").write_text(json.dumps(ABOUT))
    assert tokens(paths[0], paths[1], length=16).vocab_size == 997


ABOUT = {"dtype": "uint32", "vocab_size": 997, "end_of_text": 5, "bytes_per_token": 3.5}


def test_what_tokenize_says_of_its_files_is_used(tmp_path):
    path = write(tmp_path / "train.bin", TOKENS.astype("<u4"))
    (tmp_path / "tokens.json").write_text(json.dumps(ABOUT))
    data = tokens(path, length=16, documents="apart")
    assert data.vocab_size == 997 and data.bytes_per_token == 3.5
    (x, _), end = loaded(data)["train"][0], 5
    assert (x["segments"] == 1 + np.cumsum(np.r_[0, x["tokens"][:-1] == end])).all()


WIDE, NARROW = TOKENS.astype("<u4"), TOKENS


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (WIDE.tobytes(), {}, r"every second number is 0, as in a file of uint32 .* set dtype"),
        (
            NARROW.tobytes()[:-2],
            {"dtype": "uint32"},
            "is it .* of another dtype, uint16",
        ),
        (NARROW.tobytes() + b"1", {}, r"has 1995 bytes, no whole number of uint16: it is damaged"),
        (b"", {}, "it is empty"),
        (NARROW.tobytes(), {"vocab_size": 500}, r"a\.bin: token \d+ is \d+, outside .* 0\.\.499"),
        (NARROW[:16].tobytes(), {}, r"the train set has 16 tokens, too few for one window of 16"),
        (np.int32([20240520, 1, 9] + [0] * 253).tobytes(), {}, "its header promises 9 tokens"),
        (
            np.int32([20240520, 1, 0] + [0] * 253).tobytes(),
            {"dtype": "uint32"},
            "its header says uint16, dtype is uint32",
        ),
    ],
)
def test_a_file_of_another_type_or_size_is_an_error(tmp_path, content, arguments, message):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(UserError, match=message):
        tokens(str(tmp_path / "a.bin"), **{"length": 16, "vocab_size": 997} | arguments)


def test_a_token_outside_the_vocabulary_in_the_middle_of_a_file_is_named_when_it_is_read(tmp_path):
    array = np.zeros(10**6, np.uint16)
    array[::7] = 3
    array[123_456] = 800
    dataset = loaded(tokens(write(tmp_path / "b.bin", array), length=64, vocab_size=500))["train"]
    with pytest.raises(UserError, match=r"b\.bin: token 123456 is 800, outside .* 0\.\.499"):
        dataset[123_456 // 64]
    signed = tmp_path / "c.npy"
    np.save(signed, np.array([1, 2, -1] * 100))
    with pytest.raises(UserError, match=r"c\.npy: token 2 is -\d+, outside the vocabulary"):
        tokens(str(signed), length=16, vocab_size=500)


def test_what_is_missing_is_named(tmp_path):
    path = write(tmp_path / "a.bin", TOKENS)
    with pytest.raises(ValueError, match=r"^vocab_size: is unknown; set it"):
        tokens(path, length=16)
    with pytest.raises(ValueError, match=r"^end_of_text: is unknown; to keep documents apart"):
        tokens(path, length=16, vocab_size=997, documents="apart")
    with pytest.raises(ValueError, match=r"^end_of_text: is 997;"):
        tokens(path, length=16, vocab_size=997, documents="apart", end_of_text=997)
    with pytest.raises(UserError, match="no such file"):
        tokens(str(tmp_path / "none.bin"), length=16, vocab_size=997)


def test_the_fingerprint_sees_changes_all_over_the_tokens():
    prints = [fingerprint(windows())]
    for place in (0, 500, 996):
        changed = TOKENS.copy()
        changed[place] += 1
        prints.append(fingerprint(Windows(Stream([("a", changed)]), 16, 999)))
    prints.append(fingerprint(windows(length=17)))
    assert len(set(prints)) == 5
    assert fingerprint(windows(pieces=3)) == prints[0]
