"""`predict.py`: a checkpoint and the files exported from it give the same predictions."""

import csv
import json
import shutil

import jax
import numpy as np
import pytest

from inference.load import Form
from inference.predictor import Predictor, image_shape, prepare_batch
from tests.inference.conftest import CONFIG, DIGITS, read_report
from tests.processes import run
from training.checkpoint import safetensor_file
from training.preprocess import to_unit
from utils import UserError


def rows(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def table(path):
    """(the column names, the numbers after the input's name and the class)"""
    content = rows(path)
    first = 2 if "class" in content[0] else 1
    numbers = [list(map(float, list(row.values())[first:])) for row in content]
    return list(content[0]), np.array(numbers)


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def write_report(folder, **report):
    """Make a folder look like an export."""
    (folder / "config.json").write_text(json.dumps({"loss": "cross_entropy"}))
    (folder / "verification.json").write_text(json.dumps({"form": {}} | report))


@pytest.mark.slow
def test_a_checkpoint_and_its_exports_agree(small, convert, run_predict, drawn, tmp_path):
    npz, labels = drawn
    exports = {
        "plain": (),
        "raw": ("--with-preprocess", "--with-softmax"),
        "nchw": ("--input-layout", "nchw", "--batch", 8),
    }
    for name, options in exports.items():
        assert convert("--name", name, "--formats", "onnx", *options)[0] == 0
    files = [tmp_path / "out" / name / f"{name}.onnx" for name in exports]
    names, probabilities = [], []
    for model in (small.checkpoint, *files):
        code, out, err = run_predict(model, npz, "--csv", "predictions.csv", "--top", 2)
        assert code == 0, err
        names.append([line.split(":")[0] for line in out.splitlines()])
        columns, numbers = table("predictions.csv")
        assert columns == ["input", "class", *(f"p_{i}" for i in range(10))]
        probabilities.append(numbers)
    assert names[0][0].startswith("drawn.npz[0]  ") and len(names[0]) == DIGITS
    assert names[1:] == names[:1] * 3
    np.testing.assert_allclose(np.sum(probabilities[0], -1), 1, atol=1e-5)
    for other in probabilities[1:]:
        np.testing.assert_allclose(other, probabilities[0], atol=1e-5)
    assert (np.argmax(probabilities[0], -1) == labels).mean() > 0.6


@pytest.fixture
def pictures(drawn, tmp_path):
    """A folder of three drawn digits, and a file that macOS leaves in such folders."""
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "pictures").mkdir()
    for i, x in enumerate(np.load(drawn[0])["x"][:3]):
        image.fromarray(x[..., 0]).save(tmp_path / "pictures" / f"{i}.png")
    (tmp_path / "pictures" / ".DS_Store").write_bytes(b"not an image")
    return tmp_path / "pictures"


def test_images_are_resized_to_the_model(small, run_predict, drawn, pictures):
    code, out, _ = run_predict(small.checkpoint, "pictures")
    assert code == 0
    lines = [line.split("  ", 1) for line in out.splitlines()]
    _, of_arrays, _ = run_predict(small.checkpoint, drawn[0])
    array_lines = of_arrays.splitlines()[:3]
    assert [rest for _, rest in lines] == [line.split("  ", 1)[1] for line in array_lines]
    assert [name for name, _ in lines] == [f"pictures/{i}.png" for i in range(3)]


def test_each_batch_of_images_is_printed_before_the_next_is_read(
    small, run_predict, pictures, tmp_path
):
    (pictures / "9.png").write_bytes(b"not an image")
    code, out, err = run_predict(
        small.checkpoint, "pictures", "--batch", 2, "--csv", "predictions.csv"
    )
    assert code == 2 and "\npictures/9.png: not a readable image" in err
    names = [line.split("  ")[0] for line in out.splitlines()]
    assert names == ["pictures/0.png", "pictures/1.png"]
    assert not list(tmp_path.glob("*predictions.csv*"))


def test_known_class_names_are_printed(small, run_predict, drawn, pictures, tmp_path):
    for i in range(10):
        shutil.copytree(pictures, tmp_path / "classes" / f"no. {i}")
    data = {"name": "folder", "args": {"dir": "classes", "image_size": [28, 28], "color": "gray"}}
    (tmp_path / "named.json").write_text(json.dumps(CONFIG | {"data": data}))
    model, npz = small.checkpoint, drawn[0]
    _, unnamed, _ = run_predict(model, npz, "--csv", "unnamed.csv")
    _, named, _ = run_predict(model, npz, "--csv", "named.csv", "-c", "named.json")
    assert named.replace("no. ", "") == unnamed != named
    for before, after in zip(rows("unnamed.csv"), rows("named.csv"), strict=True):
        assert (after["class"], after["p_no. 3"]) == (f"no. {before['class']}", before["p_3"])


def test_names_recorded_in_a_checkpoint_reach_predictions_and_exports(
    small, run_predict, convert, drawn, tmp_path
):
    arrays, record = safetensor_file.read(small.checkpoint)
    record["classes"] = [f"number {i}" for i in range(10)]
    safetensor_file.write(tmp_path / "checkpoint-epoch_2.params", arrays, record)
    code, of_checkpoint, _ = run_predict("checkpoint-epoch_2.params", drawn[0])
    assert code == 0 and "number " in of_checkpoint.splitlines()[0]
    weights = tmp_path / "checkpoint-epoch_2.params"
    code, out = convert("--name", "named", "--formats", "onnx", weights=weights, config=None)
    assert code == 0, out
    assert read_report(tmp_path, "named")["classes"] == record["classes"]
    assert run_predict("out/named/named.onnx", drawn[0])[1] == of_checkpoint


def test_arrays_may_be_preprocessed_already(small, run_predict, drawn, tmp_path):
    npz, _ = drawn
    np.save(tmp_path / "ready.npy", np.load(npz)["x"].astype(np.float32) / 255)
    code, _, err = run_predict(small.checkpoint, "ready.npy")
    assert code == 2 and "to_unit" in err and "--prepared" in err
    code, out, _ = run_predict(small.checkpoint, "ready.npy", "--prepared")
    assert code == 0
    assert out.replace("ready.npy", "drawn.npz") == run_predict(small.checkpoint, npz)[1]


TABLE = {
    "data": {
        "name": "csv",
        "args": {"train": "train.csv", "target": "sold", "separator": ";", "missing": ["-"]},
    },
    "loader": {"batch_size": 4},
    "preprocess": ["tabular"],
    "training": {"epochs": 1},
    "checkpoint": {"monitor": None},
}


@pytest.mark.slow
def test_rows_of_a_table_are_encoded_as_in_training(run_predict, convert, tmp_path):
    """A file to predict has other rows and columns than that of the training, and no target."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | TABLE))
    rows = "age;city;sold\n31;Oslo;yes\n-;Rome;no\n45;Oslo;yes\n27;Bonn;no\n"
    (tmp_path / "train.csv").write_text(rows)
    code, _, err = run(tmp_path, "-c", "config.json")
    assert code == 0, err
    (tmp_path / "train.csv").unlink()
    (checkpoint,) = tmp_path.glob("saved/Small/*/*.params")
    (tmp_path / "new.csv").write_text("city;id;age\nRome;7;-\n\nParis;8;50\nOslo;9;-1.5e1\n")
    np.save(tmp_path / "rows.npy", np.float32([[np.nan, 3], [50, 0], [-15, 2]]))  # by hand
    options = ("--formats", "onnx", "--name")
    for words in (["plain"], ["raw", "--with-preprocess"]):
        code, out = convert(*options, *words, weights=checkpoint, config=None)
        assert code == 0, out
    models = [checkpoint, checkpoint.parent, "out/plain/plain.onnx", "out/raw/raw.onnx"]
    _, expected, _ = run_predict(checkpoint, "rows.npy")
    assert "yes: " in expected and len(set(expected.splitlines())) == 3
    for model in models:
        code, out, err = run_predict(model, "new.csv", "--csv", "predictions.csv")
        assert (code, out.replace("new.csv", "rows.npy")) == (0, expected), err
    for text, message in (
        ("age;town\n1;Oslo\n", "new.csv, line 1: has no column 'city', which the model needs"),
        ("age;city\n1;Oslo\nold;Oslo\n", "new.csv, line 3, column 'age': must be a finite number"),
        ("age;city\n1;Oslo;2\n", "new.csv, line 2: has 3 cells"),
    ):
        (tmp_path / "new.csv").write_text(text)
        code, out, err = run_predict(models[2], "new.csv")
        assert code == 2 and message in err and not out, err


def test_images_get_the_size_that_the_preprocessing_takes():
    inputs = {"x": ((24, 24, 1), np.dtype("float32"))}
    cropped = lambda x: x[4:-4, 4:-4] / 255.0  # noqa: E731
    predictor = Predictor(None, inputs, None, (cropped,), Form(), "numbers", [])
    assert image_shape("a.png", predictor._replace(raw_shape=(32, 32, 1))) == (32, 32, 1)
    with pytest.raises(UserError, match=r"a\.png: the config's preprocess makes \[16, 16, 1\] of"):
        image_shape("a.png", predictor)
    assert image_shape("a.png", predictor._replace(preprocess=(to_unit,))) == (24, 24, 1)
    first = {"x": ((1, 24, 20), np.dtype("float32"))}
    nchw = predictor._replace(inputs=first, preprocess=(), form=Form("nchw"))
    assert image_shape("a.png", nchw) == (24, 20, 1)


def test_several_inputs_are_preprocessed_together():
    raw = {"a": np.uint8([[0, 255]]), "b": np.float32([[2.0]])}
    scaled = lambda x: {"b": x["b"] * x["a"][1] / 255, "a": x["a"] / 255}  # noqa: E731
    inputs = {"a": ((2,), np.dtype("float32")), "b": ((1,), np.dtype("float32"))}
    predictor = Predictor(None, inputs, None, (scaled,), Form(), "numbers", [])
    with pytest.raises(UserError, match="takes all inputs of the model together; export it with"):
        prepare_batch(predictor, raw, is_prepared=False)
    known = predictor._replace(structure=jax.tree.structure(raw))
    ready = prepare_batch(known, raw, is_prepared=False)
    assert {name: array.tolist() for name, array in ready.items()} == {"a": [[0, 1]], "b": [[2]]}
    ready = {name: array.astype(np.float32) for name, array in raw.items()}
    assert prepare_batch(predictor, ready, is_prepared=True)["a"].tolist() == [[0, 255]]


@pytest.mark.parametrize(
    ("reported", "loss", "has_classes"),
    [
        (None, None, False),  # neither a report nor a config
        (None, "mse", False),
        (None, "cross_entropy", True),
        ("numbers", None, False),
        ("logits", None, True),
        ("probabilities", None, True),
    ],
)
def test_classes_are_printed_only_if_the_outputs_are_classes(
    linear, run_predict, tmp_path, reported, loss, has_classes
):
    if reported:
        write_report(tmp_path, output_kind=reported)
    (tmp_path / "loss.json").write_text(json.dumps({"loss": {"name": loss}}))
    options = ["-c", "loss.json"] if loss else []
    code, out, err = run_predict("linear.onnx", "some.npy", "--csv", "predictions.csv", *options)
    assert code == 0, err
    product = np.load("some.npy").astype(np.float32) @ linear
    columns, numbers = table("predictions.csv")
    expected_columns = ["class", "p_0", "p_1", "p_2"]
    if not has_classes:
        expected_columns = ["output_0", "output_1", "output_2"]
    assert columns == ["input", *expected_columns]
    expected = softmax(product) if has_classes and reported != "probabilities" else product
    np.testing.assert_allclose(numbers, expected, atol=1e-6)
    assert (": " in out) == has_classes


def test_names_of_classes_and_files_do_not_steer_the_terminal(linear, run_predict, tmp_path):
    names = ["\x1b]0;x\x07", "two\nlines", "\u202ereversed"]
    write_report(tmp_path, output_kind="logits", classes=names)
    shutil.move("some.npy", "some\x1b[8m.npy")
    code, out, _ = run_predict("linear.onnx", "some\x1b[8m.npy")
    assert code == 0 and len(out.splitlines()) == 2
    for shown in (r"some\x1b[8m.npy", r"\x1b]0;x\x07: ", r"two\nlines: ", r"\u202ereversed: "):
        assert out.count(shown) == 2
    assert not {*"\x1b\x07\u202e"} & {*out}


def test_a_regression_checkpoint_returns_numbers(small, run_predict, drawn, tmp_path):
    (tmp_path / "mse.json").write_text(json.dumps(CONFIG | {"loss": "mse", "metrics": []}))
    regression = ("-c", "mse.json", "--csv", "numbers.csv")
    code, out, err = run_predict(small.checkpoint, drawn[0], *regression)
    assert code == 0, err
    run_predict(small.checkpoint, drawn[0], "--csv", "classes.csv")
    columns, numbers = table("numbers.csv")
    assert columns == ["input", *(f"output_{i}" for i in range(10))]
    assert out.splitlines()[0].endswith(" ...")  # only eight of the ten are printed
    np.testing.assert_allclose(softmax(numbers), table("classes.csv")[1], atol=1e-6)


def test_class_names_come_from_the_report_of_an_export(linear, run_predict, tmp_path):
    names = ["ant", "bee", "cat"]
    write_report(tmp_path, output_kind="logits", classes=names)
    _, out, _ = run_predict("linear.onnx", "some.npy", "--csv", "predictions.csv", "--top", 1)
    probabilities = softmax(np.load("some.npy") @ linear)
    best = [names[i] for i in probabilities.argmax(-1)]
    lines = [f"some.npy[{i}]  {best[i]}: {probabilities[i].max():.4f}" for i in range(2)]
    assert out.splitlines() == lines
    assert table("predictions.csv")[0] == ["input", "class", "p_ant", "p_bee", "p_cat"]
    assert [row["class"] for row in rows("predictions.csv")] == best


def test_numbers_are_cast_to_the_dtype_of_the_model(linear, run_predict, tmp_path):
    _, expected, _ = run_predict("linear.onnx", "some.npy")  # float64, NumPy's default
    np.save(tmp_path / "half.npy", np.load("some.npy").astype(">f2"))
    result = run_predict("linear.onnx", "half.npy")
    assert result == (0, expected.replace("some", "half"), "")
    np.save(tmp_path / "bytes.npy", np.arange(8, dtype=np.uint8).reshape(2, 4))
    with open("LONG.NPY", "wb") as file:
        np.save(file, np.load("bytes.npy").astype(np.int64))
    code, expected, _ = run_predict("INTEGERS.ONNX", "bytes.npy")
    out = run_predict("INTEGERS.ONNX", "LONG.NPY")[1]
    assert code == 0 and out == expected.replace("bytes.npy", "LONG.NPY")
    np.save(tmp_path / "long.npy", np.full((2, 4), 2**40))
    code, _, err = run_predict("INTEGERS.ONNX", "long.npy")
    numbers = "its numbers, 1099511627776 to 1099511627776, do not fit"
    assert code == 2 and f"int32[4], this is int64[4]; {numbers}" in err
