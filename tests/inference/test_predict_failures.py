"""`predict.py` when something fails: one message and the exit code."""

import os
import re

import numpy as np
import pytest

from inference import predict, predictor


@pytest.mark.parametrize(
    ("report", "config", "message"),
    [
        (
            "{",
            "{}",
            "verification.json: is not a report of an export: .*; export again, or move the model",
        ),
        ('{"form": {}}', "{}", "it has no 'output_kind'"),
        (
            '{"form": {}, "output_kind": "words"}',
            "{}",
            "output_kind must be one of logits, probabilities, numbers, got 'words'",
        ),
        (
            '{"form": {}, "output_kind": "logits"}',
            "{",
            "config.json: line 1: not JSON: the file ends before",
        ),
        (
            '{"form": {}, "output_kind": "logits"}',
            '{"preprocess": 5}',
            "config.json: preprocess: must be a list, found 5",
        ),
        ("[" * 20_000, None, "verification.json: is not a report of an export: it is nested more"),
        (
            '{"form": {"softmax": "yes"}, "output_kind": "logits"}',
            None,
            "verification.json: is not a report of an export: form must say layout, preprocess",
        ),
        (
            '{"form": {"layout": 5}, "output_kind": "logits"}',
            None,
            "form must say layout, preprocess",
        ),
        (
            '{"form": {}, "output_kind": "logits"}',
            None,
            "config.json: there is no such file; name a config with -c",
        ),
    ],
)
def test_a_damaged_file_beside_the_model_is_reported(
    linear, run_predict, tmp_path, report, config, message
):
    (tmp_path / "verification.json").write_text(report)
    if config:
        (tmp_path / "config.json").write_text(config)
    code, _, err = run_predict("linear.onnx", "some.npy")
    assert code == 2 and re.search(message, err), err


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "odd.npz: holds no arrays; save some with numpy.savez('odd.npz', x=...)"),
        (
            {"x": np.float32(3)},
            "odd.npz: input is a single float32; pass an array with one row per input",
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
            "this is uint8[4]; pass the config with its preprocessing, -c config.json",
        ),
        (None, "odd.npz: cannot be read: File is not a zip file"),
    ],
)
def test_unsuitable_arrays_are_refused(linear, run_predict, tmp_path, arrays, message):
    np.savez(tmp_path / "odd.npz", **({"x": np.zeros((2, 4))} if arrays is None else arrays))
    if arrays is None:
        (tmp_path / "odd.npz").write_bytes((tmp_path / "odd.npz").read_bytes()[:100])
    code, out, err = run_predict("linear.onnx", "odd.npz")
    assert code == 2 and message in err and not out, err


def test_an_interrupt_prints_one_line(linear, run_predict, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(predictor, "prepare_batch", interrupt)
    result = run_predict("linear.onnx", "some.npy", "--csv", "predictions.csv")
    assert result == (130, "", "interrupted\n")
    assert not list(tmp_path.glob("*predictions.csv*"))


def test_a_closed_pipe_ends_the_program_quietly(linear, run_predict, tmp_path, monkeypatch, capsys):
    (tmp_path / "predictions.csv").write_text("input,unchanged")
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        with pytest.raises(SystemExit) as stop:
            predict.main(["linear.onnx", "some.npy", "--csv", "predictions.csv"])
        monkeypatch.undo()
    assert stop.value.code == 141
    assert (tmp_path / "predictions.csv").read_text() == "input,unchanged"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.onnx", "drawn.npz"], "missing.onnx: no such file"),
        (
            ["drawn.npz", "drawn.npz"],
            "drawn.npz: is a zip file, as torch.save and numpy.savez write",
        ),
        (["broken.onnx", "drawn.npz"], "broken.onnx: cannot be read as onnx"),
        (["CHECKPOINT", "te.csv"], "te.csv: the model is not known to be one of a table; if it is"),
        (
            ["CHECKPOINT", "drawn.npz", "--key", "images"],
            "drawn.npz: has no images, only x; pass another --key",
        ),
        (
            ["CHECKPOINT", "wide.npy", "--prepared"],
            "the model takes float32[28, 28, 1], this is float32[28, 30, 1]",
        ),
        (
            ["CHECKPOINT", "nothing.png"],
            "nothing.png: no such file or folder; pass images, a folder of them, an npz",
        ),
        (["CHECKPOINT", "drawn.npz", "nothing.png"], "nothing.png: no such file or folder"),
        (["CHECKPOINT", "drawn.npz", "wide.npy"], "cannot be combined with other inputs"),
        (["CHECKPOINT", "nowhere"], "nowhere: no such file or folder"),
        (["CHECKPOINT", "empty"], "empty: no images in this folder; known endings: .bmp"),
    ],
)
def test_bad_input_is_one_message(small, run_predict, drawn, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.onnx").write_bytes(b"not a model")
    (tmp_path / "te.csv").write_text("a,b\n1,2\n")
    np.save(tmp_path / "wide.npy", np.zeros((2, 28, 30, 1), np.float32))
    arguments = [small.checkpoint if text == "CHECKPOINT" else text for text in arguments]
    code, _, err = run_predict(*arguments)
    assert code == 2 and message in err, err


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("some.npy", "--csv: some.npy is one of the files that are read; choose another name"),
        ("./linear.onnx", "--csv: linear.onnx is one of the files"),
        ("link.csv", "--csv: link.csv is one of the files"),
        ("notes.csv", "--csv: notes.csv exists and is not a table of predictions; choose another"),
    ],
)
def test_the_table_of_predictions_replaces_no_other_file(
    linear, run_predict, tmp_path, output, message
):
    (tmp_path / "notes.csv").write_text("name,price\n")
    (tmp_path / "link.csv").symlink_to("some.npy")
    (tmp_path / "folder").mkdir()
    code, out, err = run_predict("linear.onnx", "some.npy", "--csv", "folder")
    assert code == 2 and "--csv: folder is a folder; name a file, as" in err and not out, err
    before = (tmp_path / output).read_bytes()
    code, out, err = run_predict("linear.onnx", "some.npy", "--csv", output)
    assert code == 2 and message in err and not out, err
    assert (tmp_path / output).read_bytes() == before
    for _ in range(2):  # its own table is replaced
        assert run_predict("linear.onnx", "some.npy", "--csv", "new.csv")[0] == 0
