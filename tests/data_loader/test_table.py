"""Tables: what a column holds, rows as numbers, errors with their place, and a run from a CSV file
to an exported model."""

import json
import zipfile
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest

from data_loader.base import loaded
from data_loader.table import csv, encoded, parquet, read_csv, rows_of
from inference import convert_tflite
from inference.load import load_to_export, prepare
from inference.runtimes import open_model
from model.lora import lora
from model.projected import projected
from model.tabular import tabular as tabular_model
from tests.processes import run
from training.checkpoint.safetensor_file import read_record
from training.objective import with_precision
from training.preprocess import fitted, tabular
from utils import UserError

TRAIN = """\
name, age,city,rooms,sold
a,31,Oslo,2,yes
b,NA,"Rome, Italy",3,no
c,4.5e1,Oslo,2,yes
d,27,,10,no
"""
TEST = "sold,rooms,name,city,age\nno,4,e,Paris,\nyes,10,f,Oslo,50\n"


@pytest.fixture
def tables(tmp_path):
    (tmp_path / "train.csv").write_text("\ufeff" + TRAIN, encoding="utf-8")
    (tmp_path / "test.csv").write_text(TEST)
    return {"train": str(tmp_path / "train.csv"), "test": str(tmp_path / "test.csv")}


def table(tables, **arguments):
    return csv(
        **tables, **{"target": "sold", "leave_out": ("name",), "categories": ("rooms",)} | arguments
    )


def test_columns_hold_numbers_or_the_places_of_categories(tables):
    data = table(tables)
    assert data.columns == {"age": (), "city": ("Oslo", "Rome, Italy"), "rooms": ("2", "3", "10")}
    assert data.classes == ("no", "yes") and data.num_classes == 2
    assert data.sizes == {"train": 4, "test": 2}
    sets = loaded(data)
    x, y = sets["train"].arrays
    expected = [[31, 1, 1], [np.nan, 2, 2], [45, 1, 1], [27, 0, 3]]
    np.testing.assert_array_equal(x, np.float32(expected))
    assert y.tolist() == [1, 0, 1, 0] and y.dtype == np.int32
    # In the test set the columns have another order, and values that training has not seen.
    x, y = sets["test"].arrays
    np.testing.assert_array_equal(x, np.float32([[np.nan, 0, 0], [50, 1, 3]]))
    assert y.tolist() == [0, 1]


def test_a_category_is_found_whether_its_number_is_written_with_a_fraction(tmp_path):
    """pandas writes integers with a gap as 1.0; a code such as 02134 stays a text."""
    cells = ["1.0", "2.0", "02134", "2134", "", "7", "7.0"]
    (tmp_path / "train.csv").write_text("z,y\n" + "".join(f"{cell},a\n" for cell in cells))
    columns = csv(str(tmp_path / "train.csv"), "y", categories=("z",)).columns
    place = {value: i for i, value in enumerate(columns["z"], 1)}
    (tmp_path / "new.csv").write_text('z\n1\n2.00\n02134\n2134.0\n7\n7.0\n7.00\n3\n""\n')
    known = ["1.0", "2.0", "02134", "2134", "7", "7.0"]
    expected = [*map(place.get, known), 0, 0, 0]
    assert rows_of(tmp_path / "new.csv", columns)[:, 0].tolist() == expected


def test_columns_of_texts_have_categories_also_if_all_are_digits(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as parquet_file

    columns = {"zip": ["02134", "2134"], "codes": [7, 8], "y": ["0", "1"]}
    columns["kind"] = pyarrow.array(["1", "2"]).dictionary_encode()
    parquet_file.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    data = parquet(str(tmp_path / "a.parquet"), "y")
    assert data.columns == {"zip": ("02134", "2134"), "codes": (), "kind": ("1", "2")}
    assert data.classes == ("0", "1")


def test_a_target_of_numbers_is_a_regression_unless_it_is_named_a_category(tables):
    data = table(tables, target="rooms", categories=())
    assert data.num_classes is None and data.classes is None
    y = data.load()["train"].arrays[1]
    assert y.tolist() == [2, 3, 2, 10] and y.dtype == np.float32
    data = table({"train": tables["train"]}, target="rooms")
    assert data.classes == ("2", "3", "10")  # as numbers, not as texts


def test_a_row_becomes_standardized_numbers_flags_and_one_hot_categories(tables):
    data = table(tables)
    x, y = data.load()["train"].arrays
    (ready,) = fitted([of_columns(data.columns)], (x, y))
    ages = np.array([31, 45, 27.0])
    standard = (ages - ages.mean()) / ages.std()
    expected = np.zeros((4, 2 + 2 + 3), np.float32)
    expected[[0, 2, 3], 0] = standard
    expected[1, 1] = 1  # the age is missing
    expected[[0, 2], 2] = expected[1, 3] = 1  # the city
    expected[[0, 2], 4] = expected[1, 5] = expected[3, 6] = 1  # the rooms
    np.testing.assert_allclose(jax.vmap(ready)(x), expected, atol=1e-6)


def of_columns(columns, **arguments):
    return partial(tabular, columns=columns, **arguments)


def test_a_category_that_only_held_out_rows_have_counts_as_unknown():
    columns = {"a": (), "b": ("k", "l", "m"), "c": ("p", "q")}
    x = np.float32([[1, 1, 1], [3, 3, 2], [5, 2, 1]])  # the last row is held out
    (ready,) = fitted([of_columns(columns)], (x[:2], np.zeros(2)))
    assert ready.keywords["unseen"] == ((), (2,), ())
    np.testing.assert_allclose(ready(x[1]), [1, 0, 0, 0, 1, 0, 1])
    np.testing.assert_allclose(ready(x[2]), [3, 0, 0, 0, 0, 1, 0])
    (ready,) = fitted([of_columns(columns, one_hot=False)], (x[:2], np.zeros(2)))
    np.testing.assert_allclose([ready(row)[2:] for row in x], [[1, 1], [3, 2], [0, 1]])


@pytest.mark.slow
def test_the_model_embeds_the_categories_of_each_column(tables):
    data = table(tables)
    x, y = data.load()["train"].arrays
    (ready,) = fitted([of_columns(data.columns, one_hot=False)], (x, y))
    inputs = jax.vmap(ready)(x)
    assert inputs.shape == (4, 4)
    np.testing.assert_array_equal(inputs[:, 2:], x[:, 1:])
    model = tabular_model((4,), 2, data.columns, embed_dim=3, dims=(5,))
    params, state = model.init(jax.random.key(0))
    assert [p["weight"].shape for p in params["embeddings"]] == [(3, 3), (4, 3)]
    out, _ = model.apply(params, state, inputs)
    city, rooms = (np.asarray(p["weight"]) for p in params["embeddings"])
    ids = x[:, 1:].astype(int)
    joined = np.concatenate([inputs[:, :2], city[ids[:, 0]], rooms[ids[:, 1]]], 1)
    (hidden,), head = params["hidden"], params["head"]
    by_hand = np.maximum(joined @ hidden["weight"] + hidden["bias"], 0)
    np.testing.assert_allclose(out, by_hand @ head["weight"] + head["bias"], atol=1e-5)
    with pytest.raises(ValueError, match='"one_hot": false'):
        tabular_model((7,), 2, data.columns)


@pytest.mark.slow
def test_half_precision_keeps_the_categories_apart():
    columns = {"a": (), "b": tuple(map(str, range(1000)))}
    model = tabular_model((3,), 2, columns)
    params, state = model.init(jax.random.key(0))
    params["embeddings"][0]["weight"] *= 50
    x = jnp.array([[0.5, 0, code] for code in (257, 258, 259, 999, 1000)])
    out, _ = with_precision(model, "bfloat16").apply(params, state, x)
    np.testing.assert_allclose(out, model.apply(params, state, x)[0], rtol=0.05, atol=0.05)
    unknown = (model.apply(params, state, jnp.array([[0.5, 0, c]]))[0] for c in (0.0, -3.0))
    np.testing.assert_array_equal(*unknown)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    assert model.apply(half, state, x)[0].dtype == jnp.bfloat16
    around = projected((3,), model, 4, 3), lora(model, ("head/weight",), 1)
    assert all(other.exact_inputs for other in around)
    assert not tabular_model((2,), 2, {"a": ()}).exact_inputs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("45e1", ""), None),
        (("4.5e1", "old"), r"train.csv, line 4, column 'age': 'old' is not a number, as most"),
        (("c,4.5e1", "c,x,4.5e1"), r"train.csv, line 4: has 6 cells, .* names 5 columns"),
        (("2,yes\nb", "2,\nb"), r"train.csv, line 2, column 'sold': the target is missing"),
        (("name, age", "age, age"), r"train.csv, line 1: there are two columns 'age'"),
        (("name, age", ",age"), r"train.csv, line 1: column 1 has no name"),
        (('"Rome', 'Ro"me'), r"train.csv, line 3: has 6 cells"),
        (("name,", '"na"me,'), r"train.csv, line 1: ',' expected .*; check the quotation marks"),
        (('Italy"', "Italy"), r"train.csv, line 5: unexpected end of data; check the quotation"),
        ((TRAIN[TRAIN.index("a,31") :], ""), r"train.csv: has no rows"),
        ((TRAIN, ""), r"train.csv: is empty$"),
        (("sold", "gone"), r"target: .*train.csv has no column 'sold' \(name, age, city, rooms, g"),
        ((TRAIN, "age;sold\n1;yes\n"), r"no column 'sold' \(age;sold\); set `separator`"),
    ],
)
def test_mistakes_in_a_table_are_errors_with_their_place(tables, tmp_path, change, message):
    (tmp_path / "train.csv").write_text(TRAIN.replace(*change))
    if message is None:
        table(tables)
        return
    with pytest.raises(UserError, match=message):
        table(tables)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEST.replace("50", "fifty"), r"test.csv, line 3, column 'age': must be a finite number"),
        (
            TEST.replace("no,4", "maybe,4"),
            r"line 2, column 'sold': .* no class 'maybe' \(no, yes\)",
        ),
        (TEST.replace("city", "town"), r"columns: .*test.csv has no column 'city'"),
        (TEST.replace("50", "inf"), r"line 3, column 'age': must be a finite number"),
    ],
)
def test_a_test_set_unlike_the_training_set_is_an_error_with_its_place(
    tables, tmp_path, text, message
):
    (tmp_path / "test.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        table(tables)


def test_wrong_files_and_arguments_are_errors(tables, tmp_path):
    (tmp_path / "latin.csv").write_bytes("name,sold\nJosé,1\n".encode("latin-1"))
    (tmp_path / "ids.csv").write_text("id,y\n" + "".join(f"k{i},{i}\n" for i in range(200)))
    (tmp_path / "empty.csv").write_text("a,y\n,1\nNA,2\n")
    for file, message in (
        ("none.csv", "none.csv: no such file"),
        ("latin.csv", "latin.csv: is not UTF-8"),
        ("ids.csv", "column 'id' has 200 different texts in 200 rows; name it in leave_out"),
        ("empty.csv", "column 'a' has no values at all; name it in leave_out"),
    ):
        with pytest.raises(UserError, match=message):
            csv(str(tmp_path / file), "sold" if file == "latin.csv" else "y")
    with pytest.raises(ValueError, match=r"^leave_out: names the target 'sold'"):
        table(tables, leave_out=("sold",))
    with pytest.raises(ValueError, match=r"^separator: must be one character"):
        table(tables, separator="::")


def test_parquet_files_give_what_csv_files_give(tables, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as parquet_file

    columns = {
        "name": ["a", "b", "c", "d"],
        "age": pyarrow.array([31.0, None, 45.0, 27.0]),
        "city": ["Oslo", "Rome, Italy", "Oslo", None],
        "rooms": pyarrow.array([2, 3, 2, 10], pyarrow.int16()),
        "sold": ["yes", "no", "yes", "no"],
    }
    parquet_file.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    arguments = {"target": "sold", "leave_out": ("name",), "categories": ("rooms",)}
    data = parquet(str(tmp_path / "train.parquet"), **arguments)
    expected = table({"train": tables["train"]})
    assert data.columns == expected.columns and data.classes == expected.classes
    for ours, theirs in zip(
        data.load()["train"].arrays, expected.load()["train"].arrays, strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    columns["rooms"] = pyarrow.array([2.0, None, 3.0, 10.0])  # as pandas stores them with a gap
    parquet_file.write_table(pyarrow.table(columns), tmp_path / "test.parquet")
    train, test = (str(tmp_path / f"{name}.parquet") for name in ("train", "test"))
    sets = parquet(train, test=test, **arguments).load()
    column = list(data.columns).index("rooms")
    places = {name: dataset.arrays[0][:, column].tolist() for name, dataset in sets.items()}
    assert places == {"train": [1, 2, 1, 3], "test": [1, 0, 2, 3]}
    (tmp_path / "bad.parquet").write_text("PAR1 not")
    with pytest.raises(UserError, match=r"bad.parquet: cannot be read"):
        parquet(str(tmp_path / "bad.parquet"), "sold")


CONFIG = {
    "title": "Houses",
    "model": {"name": "mlp", "args": {"dims": [16]}},
    "data": {"name": "csv", "args": {"train": "train.csv", "target": "sold"}},
    "loader": {"batch_size": 32, "val_size": 40},
    "preprocess": ["tabular"],
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "optimizer": {"name": "adamw", "args": {"lr": 0.02}},
    "training": {"epochs": 15},
    "logging": {"report": False},
}


def houses(path, count):
    """Whether a house is sold follows from its city, and whether its price is known and low."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        city, price = random.choice(["Oslo", "Rome", "Bonn"]), random.normal(5e5, 1e5)
        known = random.random() < 0.8
        sold = city == "Oslo" or (city == "Rome" and known and price < 5e5)
        rows.append(f"{city},{price:.0f},{sold}" if known else f"{city},,{sold}")
    path.write_text("\n".join(["city,price,sold", *rows]) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("embedded", [False, pytest.param(True, marks=pytest.mark.torture)])
def test_a_run_from_a_csv_file_to_an_exported_model(tmp_path, monkeypatch, embedded):
    config = CONFIG
    if embedded:
        config = CONFIG | {
            "model": {"name": "tabular", "args": {"dims": [16], "embed_dim": 4}},
            "preprocess": [{"name": "tabular", "args": {"one_hot": False}}],
        }
    houses(tmp_path / "train.csv", 400)
    (tmp_path / "c.json").write_text(json.dumps(config))
    code, _, err = run(tmp_path, "-c", "c.json")
    assert code == 0, err
    (folder,) = tmp_path.glob("saved/Houses/*")
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["val_accuracy"] > 0.9
    code, _, err = run(tmp_path, "-c", "c.json", "--resume", folder, "training.epochs=16")
    assert code == 0, err
    # The statistics are those that the run has recorded, not those of another table.
    newest = max(folder.glob("*.params"), key=lambda path: path.stat().st_mtime)
    code, out, err = run(tmp_path, "-c", "c.json", "--evaluate", newest)
    assert code == 0, err
    assert json.loads(out)["metrics"]["val_accuracy"] > 0.9

    # The model can be used without the table: the checkpoint knows its columns.
    checkpoint = max(folder.glob("*.params"), key=lambda path: path.stat().st_mtime)
    columns = read_record(checkpoint)["facts"]["columns"]
    assert columns == {"city": ["Bonn", "Oslo", "Rome"], "price": []}
    (tmp_path / "new.csv").write_text("price,city\n400000,Oslo\n,Oslo\n400000,Rome\n,Bonn\n")
    x = encoded(read_csv(str(tmp_path / "new.csv"), frozenset([""]), ","), columns)
    (tmp_path / "train.csv").unlink()
    monkeypatch.chdir(tmp_path)
    exported = load_to_export(None, checkpoint)
    assert exported.parts.facts["columns"] == columns
    ready = prepare(exported.preprocess, exported.form, x)
    assert np.isfinite(ready).all()
    logits = exported.function(exported.weights, ready)
    assert np.argmax(logits, 1).tolist() == [1, 1, 1, 0]

    # Its files take rows of the table, and contain the columns and the statistics.
    options = ["--name", "houses", "--out", "out", "--with-preprocess", "--route", "native"]
    assert convert_tflite.main(["-w", str(checkpoint), *options]) == 0
    files = tmp_path / "out" / "houses"
    for name in ("houses.onnx", "houses.tflite"):
        found = open_model(files / name)({"input": x})["output"]
        np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-4)
    stored = {entry.key: entry.value for entry in onnx.load(files / "houses.onnx").metadata_props}
    with zipfile.ZipFile(files / "houses.tflite") as archive:
        facts = json.loads(archive.read("metadata.json"))
    assert json.loads(stored["columns"]) == facts["columns"] == columns
    assert "preprocess" not in facts and facts["classes"] == ["False", "True"]
