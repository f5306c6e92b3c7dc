"""Models whose layers become loops or transposed products, from a checkpoint to both formats."""

import numpy as np
import pytest

from inference.load import load
from inference.runtimes import open_model
from tests.inference.conftest import read_report
from tests.inference.test_convert import trained

ROWS = np.random.default_rng(0).normal(size=(96, 18, 6)).astype(np.float32)


@pytest.fixture
def sequences(tmp_path):
    """The config of data of sequences, whose class is the feature with the largest mean."""
    labels = ROWS.mean(1).argmax(-1).astype(np.int32)
    np.savez(tmp_path / "sequences.npz", x=ROWS, y=labels)
    files = {"train": str(tmp_path / "sequences.npz"), "test": str(tmp_path / "sequences.npz")}
    return {"name": "arrays", "args": files}


def check_files(checkpoint, x, convert, tmp_path):
    """Both files come from the native route, and compute what the loaded model predicts."""
    expected = load(checkpoint).predict(x)
    code, printed = convert(
        "--name", "small", "--route", "native", "--with-preprocess", config=None, weights=checkpoint
    )
    assert code == 0, printed
    formats = read_report(tmp_path)["formats"]
    assert {name: report["route"] for name, report in formats.items()} == {
        "tflite": "native",
        "onnx": "native",
    }
    for format in formats:
        model = open_model(tmp_path / "out" / "small" / f"small.{format}")
        np.testing.assert_allclose(model({"input": x})["output"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", pytest.param("gru", marks=pytest.mark.torture)])
def test_a_recurrent_network_is_exported_natively(sequences, cell, convert, tmp_path):
    args = {"cell": cell, "dim": 8, "depth": 2, "bidirectional": True}
    model = {"name": "rnn", "args": args}
    checkpoint = trained(tmp_path, model=model, data=sequences, preprocess=[])
    check_files(checkpoint, ROWS[:5], convert, tmp_path)


@pytest.mark.torture
def test_a_mixer_is_exported_natively(convert, tmp_path):
    model = {"name": "mixer", "args": {"patch": 7, "dim": 16, "depth": 2}}
    checkpoint = trained(tmp_path, model=model)
    pixels = np.random.default_rng(0).integers(0, 256, (5, 28, 28, 1), np.uint8)
    check_files(checkpoint, pixels, convert, tmp_path)
