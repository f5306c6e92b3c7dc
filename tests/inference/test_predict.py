"""`predict.py`: a checkpoint and what was exported from it say the same of the same inputs."""

import csv
import json
import os
import re
import shutil

import numpy as np
import pytest

from data_loader.digits import digits
from inference import predict, predictor
from tests.inference.conftest import CONFIG
from tests.inference.test_demo import linear_model

COUNT = 70  # more than a batch


@pytest.fixture
def ask(tmp_path, capsys, monkeypatch):
    """ask(model, *inputs) -> (exit code, what was said)"""
    monkeypatch.chdir(tmp_path)

    def command(model, *arguments):
        code = predict.main([str(model), *map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return command


@pytest.fixture
def drawn(tmp_path):
    """(an npz of raw digits, their labels)"""
    dataset = digits(train_size=10, test_size=COUNT).load()["test"]
    x, y = zip(*(dataset[i] for i in range(COUNT)), strict=True)
    np.savez(tmp_path / "drawn.npz", x=np.stack(x))
    return tmp_path / "drawn.npz", np.array(y)


def rows(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def test_every_form_of_a_model_says_the_same(small, convert, ask, drawn, tmp_path):
    npz, labels = drawn
    assert convert("--name", "plain", "--formats", "onnx")[0] == 0
    assert (
        convert("--name", "raw", "--formats", "onnx", "--with-preprocess", "--with-softmax")[0] == 0
    )
    assert (
        convert("--name", "nchw", "--formats", "onnx", "--input-layout", "nchw", "--batch", 8)[0]
        == 0
    )
    models = [
        small.checkpoint,
        *(tmp_path / "out" / name / f"{name}.onnx" for name in ("plain", "raw", "nchw")),
    ]
    said, values = [], []
    for model in models:
        code, out, err = ask(model, npz, "--csv", "answers.csv", "--top", 2)
        assert code == 0, err
        found = rows("answers.csv")
        assert list(found[0]) == ["input", "class", *(f"p_{i}" for i in range(10))]
        said.append([line.split(":")[0] for line in out.splitlines()])
        values.append([[float(row[f"p_{i}"]) for i in range(10)] for row in found])
    assert said[0][0].startswith("drawn.npz[0]  ") and len(said[0]) == COUNT
    assert said[1:] == said[:1] * 3
    np.testing.assert_allclose(np.sum(values[0], -1), 1, atol=1e-5)
    for other in values[1:]:
        np.testing.assert_allclose(other, values[0], atol=1e-5)
    assert (np.argmax(values[0], -1) == labels).mean() > 0.6


@pytest.fixture
def pictures(drawn, tmp_path):
    """A folder of three drawn digits, and a file that one finds in such folders."""
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "pictures").mkdir()
    for i, x in enumerate(np.load(drawn[0])["x"][:3]):
        image.fromarray(x[..., 0]).save(tmp_path / "pictures" / f"{i}.png")
    (tmp_path / "pictures" / ".DS_Store").write_bytes(b"no picture")
    return tmp_path / "pictures"


def test_images_are_read_in_the_size_of_the_model(small, ask, drawn, pictures):
    code, out, _ = ask(small.checkpoint, "pictures")
    assert code == 0
    told = [line.split("  ", 1) for line in out.splitlines()]
    _, of_arrays, _ = ask(small.checkpoint, drawn[0])
    assert [rest for _, rest in told] == [
        line.split("  ", 1)[1] for line in of_arrays.splitlines()[:3]
    ]
    assert [name for name, _ in told] == [f"pictures/{i}.png" for i in range(3)]


def test_images_are_read_and_answered_batch_by_batch(small, ask, pictures, tmp_path):
    (pictures / "9.png").write_bytes(b"no picture")
    code, out, err = ask(small.checkpoint, "pictures", "--batch", 2, "--csv", "answers.csv")
    assert code == 2 and err.startswith("pictures/9.png: not a readable image")
    assert [line.split("  ")[0] for line in out.splitlines()] == [
        "pictures/0.png",
        "pictures/1.png",
    ]
    assert not list(tmp_path.glob("*answers.csv*"))


def test_names_of_classes_are_told_where_they_are_known(small, ask, drawn, pictures, tmp_path):
    for i in range(10):
        shutil.copytree(pictures, tmp_path / "classes" / f"no. {i}")
    data = {"name": "folder", "args": {"dir": "classes", "image_size": [28, 28], "color": "gray"}}
    (tmp_path / "named.json").write_text(json.dumps(CONFIG | {"data": data}))
    _, plain, _ = ask(small.checkpoint, drawn[0], "--csv", "plain.csv")
    _, told, _ = ask(small.checkpoint, drawn[0], "--csv", "named.csv", "-c", "named.json")
    assert told.replace("no. ", "") == plain != told
    for before, after in zip(rows("plain.csv"), rows("named.csv"), strict=True):
        assert (after["class"], after["p_no. 3"]) == (f"no. {before['class']}", before["p_3"])


def test_arrays_that_are_prepared_already(small, ask, drawn, tmp_path):
    npz, _ = drawn
    np.save(tmp_path / "ready.npy", np.load(npz)["x"].astype(np.float32) / 255)
    code, _, err = ask(small.checkpoint, "ready.npy")
    assert code == 2 and "to_unit" in err and "--prepared" in err
    code, out, _ = ask(small.checkpoint, "ready.npy", "--prepared")
    assert code == 0
    assert out.replace("ready.npy", "drawn.npz") == ask(small.checkpoint, npz)[1]


@pytest.fixture
def linear(tmp_path):
    """linear.onnx, a file of others, which multiplies four numbers by `linear`; and some.npy, two times four numbers."""
    from onnx import TensorProto

    np.save(tmp_path / "some.npy", np.arange(8).reshape(2, 4) / 8)
    linear_model(tmp_path / "WHOLE.ONNX", (4,), 3, TensorProto.INT32)
    return linear_model(tmp_path / "linear.onnx", (4,), 3, TensorProto.FLOAT)


def report(folder, **told):
    (folder / "config.json").write_text(json.dumps({"loss": "cross_entropy"}))
    (folder / "verification.json").write_text(json.dumps({"form": {}} | told))


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def table(path):
    """(the names of the columns, the numbers after the input's name and the class)"""
    found = rows(path)
    first = 2 if "class" in found[0] else 1
    return list(found[0]), np.array([list(map(float, list(row.values())[first:])) for row in found])


@pytest.mark.parametrize(
    ("told", "config", "classes"),
    [
        (None, None, False),  # nothing is known of it
        (None, "mse", False),
        (None, "cross_entropy", True),
        ("numbers", None, False),
        ("logits", None, True),
        ("probabilities", None, True),
    ],
)
def test_classes_are_told_only_where_the_outputs_are_some(
    linear, ask, tmp_path, told, config, classes
):
    if told:
        report(tmp_path, answers=told)
    (tmp_path / "loss.json").write_text(json.dumps({"loss": {"name": config}}))
    code, out, err = ask(
        "linear.onnx", "some.npy", "--csv", "answers.csv", *(["-c", "loss.json"] if config else [])
    )
    assert code == 0, err
    product = np.load("some.npy").astype(np.float32) @ linear
    columns, found = table("answers.csv")
    assert columns == [
        "input",
        *(["class", "p_0", "p_1", "p_2"] if classes else ["output_0", "output_1", "output_2"]),
    ]
    np.testing.assert_allclose(
        found, softmax(product) if classes and told != "probabilities" else product, atol=1e-6
    )
    assert (": " in out) == classes


def test_a_checkpoint_of_a_regression_answers_numbers(small, ask, drawn, tmp_path):
    (tmp_path / "mse.json").write_text(json.dumps(CONFIG | {"loss": "mse", "metrics": []}))
    code, out, err = ask(small.checkpoint, drawn[0], "-c", "mse.json", "--csv", "numbers.csv")
    assert code == 0, err
    ask(small.checkpoint, drawn[0], "--csv", "classes.csv")
    names, numbers = table("numbers.csv")
    assert names == ["input", *(f"output_{i}" for i in range(10))]
    assert out.splitlines()[0].endswith(" ...")  # there are ten
    np.testing.assert_allclose(softmax(numbers), table("classes.csv")[1], atol=1e-6)


def test_names_of_classes_beside_an_exported_file(linear, ask, tmp_path):
    report(tmp_path, answers="logits", classes=["ant", "bee", "cat"])
    _, out, _ = ask("linear.onnx", "some.npy", "--csv", "answers.csv", "--top", 1)
    shares = softmax(np.load("some.npy") @ linear)
    best = [["ant", "bee", "cat"][i] for i in shares.argmax(-1)]
    assert out.splitlines() == [
        f"some.npy[{i}]  {best[i]}: {shares[i].max():.4f}" for i in range(2)
    ]
    assert table("answers.csv")[0] == ["input", "class", "p_ant", "p_bee", "p_cat"]
    assert [row["class"] for row in rows("answers.csv")] == best


def test_numbers_are_taken_in_the_type_of_the_model(linear, ask, tmp_path):
    _, wanted, _ = ask("linear.onnx", "some.npy")  # float64, as NumPy makes them
    np.save(tmp_path / "half.npy", np.load("some.npy").astype(">f2"))
    assert ask("linear.onnx", "half.npy") == (0, wanted.replace("some", "half"), "")
    np.save(tmp_path / "bytes.npy", np.arange(8, dtype=np.uint8).reshape(2, 4))
    with open("LONG.NPY", "wb") as file:
        np.save(file, np.load("bytes.npy").astype(np.int64))
    code, wanted, _ = ask("WHOLE.ONNX", "bytes.npy")
    assert code == 0 and ask("WHOLE.ONNX", "LONG.NPY")[1] == wanted.replace("bytes.npy", "LONG.NPY")
    np.save(tmp_path / "long.npy", np.full((2, 4), 2**40))
    code, _, err = ask("WHOLE.ONNX", "long.npy")
    assert (
        code == 2
        and "int32[4], this is int64[4]; its numbers, 1099511627776 to 1099511627776, do not fit"
        in err
    )


@pytest.mark.parametrize(
    ("report", "config", "message"),
    [
        (
            "{",
            "{}",
            "verification.json: is not what an export writes: .*; export again, or move the model",
        ),
        ('{"form": {}}', "{}", "it has no 'answers'"),
        (
            '{"form": {}, "answers": "words"}',
            "{}",
            "answers are 'words', none of logits, probabilities, numbers",
        ),
        ('{"form": {}, "answers": "logits"}', "{", "config.json: line 1, column 2: not JSON"),
        (
            '{"form": {}, "answers": "logits"}',
            '{"preprocess": 5}',
            "config.json: preprocess: must be a list, found 5",
        ),
        (
            '{"form": {}, "answers": "logits"}',
            None,
            "config.json: there is no such file; name a config with -c",
        ),
    ],
)
def test_a_damaged_file_beside_the_model_is_told(linear, ask, tmp_path, report, config, message):
    (tmp_path / "verification.json").write_text(report)
    if config:
        (tmp_path / "config.json").write_text(config)
    code, _, err = ask("linear.onnx", "some.npy")
    assert code == 2 and re.search(message, err), err


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "odd.npz: holds no arrays; save some with numpy.savez('odd.npz', x=...)"),
        (
            {"x": np.float32(3)},
            "odd.npz: input is a single float32; give an array with one row for each input",
        ),
        ({"x": np.zeros((0, 4))}, "odd.npz: holds no inputs; its shape is [0, 4]"),
        ({"x": np.array([{}])}, "odd.npz: cannot be read: Object arrays cannot be loaded"),
        (
            {"x": np.zeros(4)},
            "takes float32[4], this is float64[]; the first axis counts the inputs",
        ),
        ({"x": np.array([list("abcd")])}, "takes float32[4], this is <U1[4]"),
        (
            {"x": np.zeros((2, 4), np.uint8)},
            "this is uint8[4]; name the config that tells its preprocessing, -c config.json",
        ),
        (None, "odd.npz: cannot be read: File is not a zip file"),
    ],
)
def test_odd_arrays_are_refused(linear, ask, tmp_path, arrays, message):
    np.savez(tmp_path / "odd.npz", **({"x": np.zeros((2, 4))} if arrays is None else arrays))
    if arrays is None:
        (tmp_path / "odd.npz").write_bytes((tmp_path / "odd.npz").read_bytes()[:100])
    code, out, err = ask("linear.onnx", "odd.npz")
    assert code == 2 and message in err and not out, err


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: 1 / 0, "linear.onnx: fails on some.npy[0] to some.npy[1]: division by zero\n"),
        (
            lambda _: {"mean": np.zeros(())},
            "linear.onnx: of 2 inputs, mean has the shape []: that is no row for each\n",
        ),
    ],
)
def test_a_model_that_fails_or_has_no_row_for_each_input(linear, ask, monkeypatch, answer, message):
    made = predictor.Predictor(
        answer, {"x": ((4,), np.dtype("float32"))}, None, (), predictor.NHWC, "numbers", []
    )
    monkeypatch.setattr(predictor, "opened", lambda _: made)
    assert ask("linear.onnx", "some.npy")[2] == message


def test_an_interrupt_is_one_line(linear, ask, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(predictor, "ready", interrupt)
    assert ask("linear.onnx", "some.npy", "--csv", "answers.csv") == (130, "", "interrupted\n")
    assert not list(tmp_path.glob("*answers.csv*"))


def test_nobody_reads_any_more(linear, ask, tmp_path, monkeypatch, capsys):
    (tmp_path / "answers.csv").write_text("as before")
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        with pytest.raises(SystemExit) as stop:
            predict.main(["linear.onnx", "some.npy", "--csv", "answers.csv"])
        monkeypatch.undo()
    assert stop.value.code == 141
    assert (tmp_path / "answers.csv").read_text() == "as before"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.onnx", "drawn.npz"], "missing.onnx: there is no such file"),
        (
            ["drawn.npz", "drawn.npz"],
            "drawn.npz: is a zip file, as torch.save and numpy.savez write",
        ),
        (["broken.onnx", "drawn.npz"], "broken.onnx: cannot be read as onnx"),
        (
            ["CHECKPOINT", "drawn.npz", "--key", "images"],
            "drawn.npz: has no images, only x; name one with --key",
        ),
        (
            ["CHECKPOINT", "wide.npy", "--prepared"],
            "the model takes float32[28, 28, 1], this is float32[28, 30, 1]",
        ),
        (
            ["CHECKPOINT", "nothing.png"],
            "nothing.png: there is no such file or folder; name images, a folder of them, or an npz",
        ),
        (
            ["CHECKPOINT", "drawn.npz", "nothing.png"],
            "nothing.png: there is no such file or folder",
        ),
        (["CHECKPOINT", "drawn.npz", "wide.npy"], "is to stand alone"),
        (["CHECKPOINT", "nowhere"], "nowhere: there is no such file or folder"),
        (["CHECKPOINT", "empty"], "empty: no images in this folder; known endings: .bmp"),
    ],
)
def test_bad_input_is_one_message(small, ask, drawn, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    np.save(tmp_path / "wide.npy", np.zeros((2, 28, 30, 1), np.float32))
    code, _, err = ask(*(small.checkpoint if text == "CHECKPOINT" else text for text in arguments))
    assert code == 2 and message in err, err
