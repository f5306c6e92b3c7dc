"""Data of the user's own in a config: a collate_fn that changes the form of a batch, options for
evaluation, and iterables of batches."""

import json

import jax
import numpy as np
import pytest

from data_loader.base import Data, loaded
from model.base import Model
from tests.processes import run
from training.commands.start import checked_recipe
from training.fit import fit
from training.optimizers import sgd
from training.options import LoaderOptions
from utils import UserError
from wiring.build import build

MODULE = """
import jax
import jax.numpy as jnp
import numpy as np
from data_loader.base import Data
from data_loader.loader import epoch_order
from model.base import Model

LETTERS = [np.random.default_rng(i).integers(1, 9, 2 + i % 5, np.int32) for i in range(60)]


class Words:
    classes = ("short", "long")

    def __init__(self, first, last):
        self.words = LETTERS[first:last]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return self.words[i], np.int32(len(self.words[i]) > 4)


def words() -> Data:
    return made({"train": Words(0, 40), "test": Words(40, 60)}, np.zeros(0, np.int32))


def made(sets, x):
    sizes = {"train": 40, "test": 20}
    return Data((x, np.int32(0)), sizes, lambda: sets, 2, classes=("short", "long"))


def pad(examples, *, length: int = 6):
    x = np.zeros((len(examples), length), np.int32)
    for row, (word, _) in zip(x, examples):
        row[: len(word)] = word
    mask = x > 0
    return {"letters": x, "mask": mask}, np.array([y for _, y in examples], np.int32)


class Padded:
    def __init__(self, words, size):
        self.words, self.size = words, size

    def __len__(self):
        return len(self.words) // self.size

    def __iter__(self):
        for rows in epoch_order(len(self.words), self.size, seed=0, epoch=1, shuffle=False)[0]:
            yield pad([self.words[i] for i in rows])


def stream() -> Data:
    sets = {"train": Padded(Words(0, 40), 8), "test": Padded(Words(40, 60), 10)}
    x = {"letters": np.zeros(6, np.int32), "mask": np.zeros(6, bool)}
    return made(sets, x)


def bag(num_classes: int, letters: int = 9) -> Model:
    def init(key):
        return {"table": jax.random.normal(key, (letters, num_classes))}, {}

    def apply(params, state, x, *, train=False, key=None):
        scores = params["table"][x["letters"]] * x["mask"][..., None]
        return scores.sum(1), state

    return Model(init, apply)
"""
CONFIG = {
    "title": "Words",
    "model": "my_words.bag",
    "data": "my_words.words",
    "loader": {
        "batch_size": 8,
        "shuffle": False,
        "collate_fn": "my_words.pad",
        "eval_batch_size": 10,
        "eval_collate_fn": {"name": "my_words.pad", "args": {"length": 9}},
    },
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "optimizer": {"name": "sgd", "args": {"lr": 0.1}},
    "training": {"epochs": 2},
}
STREAMED = CONFIG | {"data": "my_words.stream"}
STREAMED["loader"] = {"batch_size": 8, "eval_batch_size": 10}


@pytest.fixture
def my_words(tmp_path, monkeypatch):
    """The module, which is imported again in each test."""
    (tmp_path / "my_words.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "my_words", raising=False)
    return tmp_path


def metrics(folder, title):
    (path,) = folder.glob(f"saved/{title}/*/metrics.jsonl")
    lines = map(json.loads, path.read_text().splitlines())
    return [{k: line[k] for k in line if k.startswith(("train_", "test_"))} for line in lines]


@pytest.mark.slow
def test_ragged_examples_and_ones_own_loader_train_alike_and_can_be_evaluated(my_words):
    (my_words / "a.json").write_text(json.dumps(CONFIG | {"title": "Ragged"}))
    (my_words / "b.json").write_text(json.dumps(STREAMED | {"title": "Streamed"}))
    for name in "ab":
        code, _, err = run(my_words, "-c", f"{name}.json")
        assert code == 0, err
    ragged = metrics(my_words, "Ragged")
    assert ragged == metrics(my_words, "Streamed") and len(ragged) == 2
    (folder,) = my_words.glob("saved/Ragged/*")
    code, out, err = run(my_words, "-c", "a.json", "--evaluate", folder)
    assert code == 0, err
    assert json.loads(out)["metrics"]["test_loss"] == ragged[-1]["test_loss"]


def test_shapes_are_traced_through_the_collate_fn(my_words):
    parts = build(CONFIG, "c")
    assert {name: leaf.shape for name, leaf in parts.example[0].items()} == {
        "letters": (6,),
        "mask": (6,),
    }
    _, template = checked_recipe(parts)
    assert template.params["table"].shape == (9, 2)
    one_input = {"name": "my_words.pad", "args": {"length": 0}}
    with pytest.raises(UserError, match=r"c: loader.collate_fn.*has no such argument"):
        build(CONFIG | {"loader": {"collate_fn": one_input | {"args": {"len": 7}}}}, "c")


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            {"collate_fn": "numpy.zeros"},
            r"c: loader.collate_fn fails: .*copies of the data's `example`",
        ),
        (
            {"collate_fn": "my_words.pad", "eval_collate_fn": "numpy.zeros"},
            r"c: loader.eval_collate_fn fails: ",
        ),
        ({"collate_fn": "my_words.pad", "eval_batch_size": 0}, "eval_batch_size: must be at least"),
        ({}, r"model, loss or metrics do not fit the data"),  # nothing pads, and nothing masks
    ],
)
def test_a_collate_fn_that_does_not_fit_is_found_by_the_check(my_words, loader, message):
    with pytest.raises(UserError, match=message):
        checked_recipe(build(CONFIG | {"loader": loader}, "c"))


def test_a_collate_fn_that_pads_to_the_longest_of_a_batch_is_refused_when_the_data_is_read(
    my_words,
):
    parts = build(CONFIG, "c")

    def longest(examples):
        return np.stack([x for x, _ in examples]), np.stack([y for _, y in examples])

    with pytest.raises(UserError, match=r"the train set is .*must give all batches one form"):
        loaded(parts.data, LoaderOptions(collate_fn=longest))


class Rows:
    """An iterable of batches, as a DataLoader would be."""

    def __init__(self, count, rows, form=(4,)):
        self.count, self.rows, self.form = count, rows, form

    def __len__(self):
        return self.count

    def __iter__(self):
        return (
            (np.zeros((self.rows, *self.form), np.float32), np.zeros(self.rows, np.int32))
            for _ in range(self.count)
        )


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (Rows(5, 16), "has 5 batches, but `sizes` and loader.batch_size make 4; `sizes` counts"),
        (Rows(4, 8), "has batches of 8 examples, loader.batch_size says 16; set both"),
        (Rows(4, 16, (5,)), r"in a batch of the train set are .*f\[5\].*`example` says .*f\[4\]"),
        (iter(Rows(4, 16)), "is an iterator, which can be read only once"),
        (7, "cannot be read by index; .*or __iter__ that yields batches"),
    ],
)
def test_an_iterable_that_does_not_fit_its_data_is_refused(train, message):
    example = (np.zeros(4, np.float32), np.int32(0))
    data = Data(example, {"train": 64}, lambda: {"train": train}, 2)
    with pytest.raises(UserError, match=message):
        next(iter(loaded(data, LoaderOptions(batch_size=16))["train"]))


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({"train": 1}, "load must be a function that returns {set: dataset}, got dict"),
        (lambda split: {}, r"load: <lambda>\(split\) must take \(\)"),
        (lambda: {"train": (np.zeros((9, 4)), np.zeros(9))}, r"has 2 .*says 9; .*Arrays\(x, y\)"),
    ],
)
def test_a_load_that_returns_no_sets_is_refused(load, message):
    data = Data((np.zeros(4), np.float64(0)), {"train": 9}, load)
    with pytest.raises(UserError, match=f"^data: .*{message}"):
        loaded(data)


@pytest.mark.slow
def test_another_batch_size_of_evaluations_changes_no_metric():
    x = np.random.default_rng(0).normal(size=(90, 3)).astype(np.float32)
    y = x.argmax(1)

    def init(key):
        return {"weight": jax.random.normal(key, (3, 3))}, {}

    def apply(params, state, x, **_):
        return x @ params["weight"], state

    def trained(**options):
        model = Model(init, apply)
        row = fit(
            model,
            (x[:40], y[:40]),
            (x[40:], y[40:]),
            optimizer=sgd(0.1),
            epochs=1,
            batch_size=8,
            **options,
        ).history[-1]
        return {key: row[key] for key in ("train_loss", "test_loss", "test_accuracy")}

    plain = trained()
    for options in ({"eval_batch_size": 50}, {"eval_batch_size": 7, "device_budget_mb": 0}):
        assert trained(**options) == pytest.approx(plain, rel=1e-6)
