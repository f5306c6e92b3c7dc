"""`predict.py`: a checkpoint and what was exported from it say the same of the same inputs."""

import csv

import numpy as np
import pytest

from data_loader.digits import digits
from inference import predict

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
    assert convert("--name", "raw", "--formats", "onnx", "--with-preprocess", "--with-softmax")[0] == 0
    assert convert("--name", "nchw", "--formats", "onnx", "--input-layout", "nchw", "--batch", 8)[0] == 0
    models = [small.checkpoint, *(tmp_path / "out" / name / f"{name}.onnx" for name in ("plain", "raw", "nchw"))]
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


def test_images_are_read_in_the_size_of_the_model(small, ask, drawn, tmp_path):
    image = pytest.importorskip("PIL.Image")
    npz, _ = drawn
    (tmp_path / "pictures").mkdir()
    for i, x in enumerate(np.load(npz)["x"][:3]):
        image.fromarray(x[..., 0]).save(tmp_path / "pictures" / f"{i}.png")
    code, out, _ = ask(small.checkpoint, "pictures")
    assert code == 0
    told = [line.split("  ", 1) for line in out.splitlines()]
    _, of_arrays, _ = ask(small.checkpoint, npz)
    assert [rest for _, rest in told] == [line.split("  ", 1)[1] for line in of_arrays.splitlines()[:3]]
    assert [name for name, _ in told] == [f"pictures/{i}.png" for i in range(3)]


def test_arrays_that_are_prepared_already(small, ask, drawn, tmp_path):
    npz, _ = drawn
    np.save(tmp_path / "ready.npy", np.load(npz)["x"].astype(np.float32) / 255)
    code, _, err = ask(small.checkpoint, "ready.npy")
    assert code == 2 and "to_unit" in err and "--prepared" in err
    code, out, _ = ask(small.checkpoint, "ready.npy", "--prepared")
    assert code == 0
    assert out.replace("ready.npy", "drawn.npz") == ask(small.checkpoint, npz)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.onnx", "drawn.npz"], "missing.onnx: there is no such file"),
        (["drawn.npz", "drawn.npz"], "drawn.npz"),
        (["broken.onnx", "drawn.npz"], "broken.onnx: cannot be read as onnx"),
        (["CHECKPOINT", "drawn.npz", "--key", "images"], "drawn.npz: has no images, only x; name one with --key"),
        (["CHECKPOINT", "wide.npy", "--prepared"], "the model takes float32[28, 28, 1], this is float32[28, 30, 1]"),
        (["CHECKPOINT", "nothing.png"], "nothing.png"),
        (["CHECKPOINT", "drawn.npz", "wide.npy"], "is to stand alone"),
        (["CHECKPOINT", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_message(small, ask, drawn, tmp_path, arguments, message):
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    np.save(tmp_path / "wide.npy", np.zeros((2, 28, 30, 1), np.float32))
    code, _, err = ask(*(small.checkpoint if text == "CHECKPOINT" else text for text in arguments))
    assert code == 2 and message in err, err
