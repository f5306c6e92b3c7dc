"""The command that ships a checkpoint: what it writes, what it refuses, and that nothing is left of what fails."""

import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from inference import exporter, packages, to_onnx, verify
from inference.load import NHWC, Form, load
from inference.runtimes import open_model
from tests.processes import ROOT
from training.checkpoint import storage
from utils import RunError

ONNX = ("--name", "small", "--formats", "onnx")


def left(tmp_path):
    """What lies in the output folder, hidden files too."""
    return (
        sorted(path.name for path in (tmp_path / "out").iterdir())
        if (tmp_path / "out").exists()
        else []
    )


def report(tmp_path, name="small"):
    return json.loads((tmp_path / "out" / name / "verification.json").read_text())


def outputs(path, **inputs):
    return open_model(path)(inputs)["output"]


def by_jax(small, inputs, form=NHWC):
    shipped = load(small.config, small.checkpoint, form=form)
    return jax.jit(shipped.function)(shipped.weights, inputs)


def test_both_formats_compute_what_jax_does(small, convert, tmp_path):
    code, said = convert("--name", "small")
    assert code == 0, said
    assert left(tmp_path) == ["small"]
    folder = tmp_path / "out" / "small"
    assert {p.name for p in folder.iterdir()} == {
        "small.onnx",
        "small.tflite",
        "config.json",
        "model",
        "verification.json",
    }
    assert (folder / "model" / "mlp.py").read_text() == (ROOT / "model" / "mlp.py").read_text()
    assert json.loads((folder / "config.json").read_text())["model"] == json.loads(
        small.config.read_text()
    )["model"] | {"args": {"dims": [16], "activation": "relu", "dropout": 0.0}}
    x = np.random.default_rng(0).random((5, 28, 28, 1), np.float32)
    for each, found in report(tmp_path)["formats"].items():
        wanted = by_jax(small, x)
        np.testing.assert_allclose(
            outputs(folder / f"small.{each}", input=x),
            wanted,
            rtol=0,
            atol=1e-5 * np.abs(wanted).max(),
        )
        assert (
            found["route"] == "native"
            and found["bytes"] == (folder / f"small.{each}").stat().st_size
        )
        assert {(check["data"], check["batch"]) for check in found["checks"]} == {
            (kind, size) for kind in ("random", "real") for size in (1, 3, 64)
        }
        assert found["inputs"] == {"input": "float32[None, 28, 28, 1]"}
        assert found["outputs"] == {"output": "float32[None, 10]"}
        assert f"small.{each}: input float32[batch, 28, 28, 1] -> output float32[batch, 10]" in said
        assert re.search(
            rf"^small.{each} +native +{found['nodes']} .* random +1 +{found['checks'][0]['absolute_error']:.1e}",
            said,
            re.M,
        )


def test_int8_is_smaller_and_tells_its_accuracy(convert, tmp_path):
    code, said = convert("--name", "small", "--quantize", "int8", "--samples", 50)
    assert code == 0, said
    for found in report(tmp_path)["formats"].values():
        before, after = found["test_set"]["before"], found["test_set"]["after"]
        assert before["accuracy"] > 0.6 and abs(after["accuracy"] - before["accuracy"]) <= 0.03
        assert found["bytes"] < 0.5 * 4 * 12730
        assert f"accuracy {before['accuracy']:.4f} -> {after['accuracy']:.4f}" in said


@pytest.mark.parametrize(
    ("arguments", "form", "shape", "dtype"),
    [
        (["--batch", "4"], NHWC, (4, 28, 28, 1), np.float32),
        (
            ["--input-layout", "nchw", "--with-softmax"],
            Form("nchw", softmax=True),
            (2, 1, 28, 28),
            np.float32,
        ),
        (
            ["--with-preprocess", "--input", "(1, 28, 28, 1)"],
            Form(preprocess=True),
            (2, 28, 28, 1),
            np.uint8,
        ),
    ],
)
def test_the_form_of_what_goes_in_and_comes_out(
    small, convert, tmp_path, arguments, form, shape, dtype
):
    code, said = convert(*ONNX, *arguments)
    assert code == 0, said
    path = tmp_path / "out" / "small" / "small.onnx"
    x = np.random.default_rng(0).integers(0, 256, shape).astype(dtype) / (
        1 if dtype == np.uint8 else np.float32(255)
    )
    np.testing.assert_allclose(
        outputs(path, input=x.astype(dtype)), by_jax(small, x.astype(dtype), form), atol=1e-5
    )
    sizes, type_ = open_model(path).inputs["input"]
    assert (sizes[0], type_) == (4 if "--batch" in arguments else None, dtype)


def test_a_taken_name_is_refused_unless_forced(convert, tmp_path):
    assert convert(*ONNX)[0] == 0
    before = (tmp_path / "out" / "small" / "small.onnx").stat().st_mtime_ns
    code, said = convert(*ONNX)
    assert code == 2 and "is there already" in said and "--force" in said
    assert (tmp_path / "out" / "small" / "small.onnx").stat().st_mtime_ns == before
    assert convert(*ONNX, "--force")[0] == 0
    assert (tmp_path / "out" / "small" / "small.onnx").stat().st_mtime_ns > before
    (tmp_path / "out" / "mine").mkdir()
    code, said = convert("--name", "mine", "--formats", "onnx", "--force")
    assert code == 2 and "is no export" in said
    assert left(tmp_path) == ["mine", "small"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--formats", "torch"], "--formats: no 'torch'; there are tflite, onnx"),
        (["--quantize", "int4"], "--quantize: no 'int4'; there are float16, dynamic, int8"),
        (["--route", "xla"], "--route: no 'xla'; there are auto, native, jax2tf"),
        (["--input-layout", "hwcn"], "--input-layout: no 'hwcn'"),
        (["--opset", "17"], "--opset: must be 18 to 23, got 17"),
        (["--batch", "0"], "--batch: must be at least 1, got 0"),
        (["--input", "28x28"], "--input: '28x28' is no shape"),
        (["--name", "../elsewhere"], "--name: '../elsewhere' is no name"),
        (
            ["--formats", "onnx", "model.args.dims=[32]"],
            "head/weight: the file has (16, 10), the model has (32, 10)",
        ),
        (
            ["--formats", "onnx", "model.args.activation=gelu"],
            "has changed its meaning since this was written",
        ),
        (
            ["--formats", "onnx", "model.args.dimz=3"],
            "model.args.dimz: mlp has no such argument; did you mean 'dims'?",
        ),
        (
            ["--formats", "onnx", "optimizer.name=nonsense"],
            "optimizer.name: no optimizer 'nonsense'",
        ),
        (
            ["--formats", "onnx", "title=../elsewhere"],
            "title: must be usable as a folder name",
        ),
        (["--formats", "model.args.dims=[16]"], "--formats: names none"),
        (["--input", "7", "28", "28", "1"], "a shape begins with the batch, 1"),
        (["--demo", "--batch", "4"], "--demo: gives one example at a time"),
        (
            ["--formats", "onnx", "--input", "1", "28", "28", "3"],
            "the file has (784, 16), the model has (2352, 16)",
        ),
        (["--formats", "tflite", "--demo"], "--demo: runs the ONNX file; add onnx to --formats"),
    ],
)
def test_bad_input_is_one_message(convert, tmp_path, arguments, message):
    code, said = convert("--name", "small", *arguments)
    assert code == 2 and message in said, said
    assert left(tmp_path) == []


def test_a_changed_model_points_to_the_copy_of_the_run(small, convert):
    _, said = convert(*ONNX, "model.args.activation=gelu")
    assert str(small.checkpoint.parent / "model") in said


def test_force_keeps_what_the_export_did_not_write(convert, tmp_path):
    assert convert(*ONNX)[0] == 0
    (tmp_path / "out" / "small" / "notes.txt").write_text("precious")
    code, said = convert("--name", "small", "--formats", "tflite", "--force")
    assert code == 0 and "Gone with the earlier export: small.onnx" in said
    assert (tmp_path / "out" / "small" / "notes.txt").read_text() == "precious"


def test_what_was_made_meanwhile_is_not_replaced(convert, tmp_path, monkeypatch):
    def made_meanwhile(self, stem):
        (tmp_path / "out" / "small").mkdir()
        (tmp_path / "out" / "small" / "thesis.txt").write_text("precious")
        return reports(self, stem)

    reports = exporter.Exporter.reports
    monkeypatch.setattr(exporter.Exporter, "reports", made_meanwhile)
    code, said = convert(*ONNX)
    assert code == 2 and "is no export" in said
    assert (
        left(tmp_path) == ["small"]
        and (tmp_path / "out" / "small" / "thesis.txt").read_text() == "precious"
    )


def test_what_a_killed_process_left_is_swept(convert, tmp_path):
    (tmp_path / "out" / ".small.999999999.tmp").mkdir(parents=True)
    assert convert(*ONNX)[0] == 0
    assert left(tmp_path) == ["small"]


def test_a_quantized_file_hides_no_wrong_graph(convert, tmp_path, monkeypatch):
    def off(traced, path, opset=20):
        other = {
            name: array * 1.001 if name == "head/weight" else array
            for name, array in traced.weights.items()
        }
        write(traced._replace(weights=other), path, opset)

    write = to_onnx.write_onnx
    monkeypatch.setattr(to_onnx, "write_onnx", off)
    code, said = convert(*ONNX, "--quantize", "dynamic")
    assert code == 1 and "does not compute what JAX does" in said and "allowed is 1e-05" in said
    assert left(tmp_path) == []


MODELS = """
import jax, jax.numpy as jnp
from model.base import Model

def made(apply):
    return Model(lambda key: ({"w": jnp.ones((784, 10))}, {}), lambda p, s, x, **_: (apply(p, x.reshape(x.shape[0], -1)), s))

def mixing(input_shape: tuple[int, ...]) -> Model:
    return made(lambda p, x: x @ p["w"] - (x @ p["w"]).mean(0))

def scalar(input_shape: tuple[int, ...]) -> Model:
    return made(lambda p, x: (x @ p["w"]).sum())

def nothing(input_shape: tuple[int, ...]) -> Model:
    return made(lambda p, x: jnp.log(-1 - (x @ p["w"]) ** 2))

def two(input_shape: tuple[int, ...]) -> Model:
    return made(lambda p, x: {"a": x @ p["w"], "input": x})

def in_pairs(input_shape: tuple[int, ...]) -> Model:
    return made(lambda p, x: (x @ p["w"]).reshape(2, -1, 10).mean(0))

def broken(input_shape: tuple[int, ...]) -> Model:
    return made(lambda p, x: undefined(x))
"""


@pytest.fixture
def own(small, tmp_path):
    """own(name) -> {config, weights} of a model that a user wrote beside the config."""
    (tmp_path / "own_models.py").write_text(MODELS)
    save_file({"w": np.ones((784, 10), np.float32)}, tmp_path / "own.safetensors")

    def configured(name):
        config = json.loads(small.config.read_text()) | {"model": f"own_models.{name}"}
        (tmp_path / "own.json").write_text(json.dumps(config))
        return {"config": tmp_path / "own.json", "weights": tmp_path / "own.safetensors"}

    return configured


@pytest.mark.parametrize("name", ["mixing", "scalar", "two"])
def test_an_output_need_not_be_one_of_each_example_alone(own, convert, tmp_path, name):
    code, said = convert(*ONNX, **own(name))
    assert code == 0, said


def test_a_model_may_take_some_sizes_of_a_batch_alone(own, convert):
    code, said = convert(*ONNX, **own("in_pairs"))
    assert code == 2 and "cannot reshape" in said and "own_models.py:" in said
    code, said = convert(*ONNX, "--batch", 4, **own("in_pairs"))
    assert code == 0, said


def test_what_cannot_be_right_is_refused(own, convert, tmp_path):
    code, said = convert(*ONNX, **own("nothing"))
    assert code == 1 and "no finite number" in said
    code, said = convert(*ONNX, **own("broken"))
    assert code == 2 and "name 'undefined' is not defined" in said and "own_models.py:" in said
    code, said = convert(*ONNX, "--with-softmax", **own("two"))
    assert code == 2 and "--with-softmax: is for one output; the model has a, input" in said
    assert left(tmp_path) == []


def test_other_data_than_it_was_trained_on_is_told(convert, tmp_path):
    code, said = convert(*ONNX, "--quantize", "int8", "data.args.train_size=600")
    assert code == 2 and "is not what the checkpoint was trained on" in said
    code, said = convert(*ONNX, "--quantize", "float16", "data.args.train_size=600")
    assert code == 0 and "Scored on other data" in said


def test_stopped_by_hand_nothing_is_left(convert, tmp_path, monkeypatch):
    def stopped(self, each, path):
        path.write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(exporter.Exporter, "native", stopped)
    code, said = convert(*ONNX)
    assert code == 130 and said.strip() == "Stopped; nothing was written"
    assert left(tmp_path) == []


def test_a_model_that_refuses_its_input_is_told(convert, small, tmp_path):
    config = tmp_path / "vit.json"
    config.write_text(
        json.dumps(
            json.loads(small.config.read_text()) | {"model": {"name": "vit", "args": {"patch": 5}}}
        )
    )
    code, said = convert(*ONNX, config=config)
    assert code == 2 and "patch: 5 must divide" in said


def test_over_the_tolerance_nothing_is_left(convert, tmp_path, monkeypatch):
    monkeypatch.setitem(verify.TOLERANCE, "float32", 0.0)
    code, said = convert(*ONNX)
    assert code == 1 and "small.onnx: does not compute what JAX does: on " in said
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("broken", "code", "stands"), [("tflite", 3, "onnx"), ("onnx", 4, "tflite")]
)
def test_one_format_that_fails_does_not_spoil_the_other(
    convert, tmp_path, monkeypatch, broken, code, stands
):
    native = exporter.Exporter.native

    def half(self, each, path):
        if each == broken:
            path.write_bytes(b"half of it")
            raise RunError("the disk is full of holes")
        native(self, each, path)

    monkeypatch.setattr(exporter.Exporter, "native", half)
    found, said = convert("--name", "small")
    assert found == code and f"{broken}: the disk is full of holes" in said
    folder = tmp_path / "out" / "small"
    assert (folder / f"small.{stands}").exists() and not (folder / f"small.{broken}").exists()
    assert report(tmp_path)["failed"] == {broken: f"{broken}: the disk is full of holes"}


def test_a_place_that_cannot_be_written_is_told(convert, tmp_path):
    (tmp_path / "out").write_text("a file")
    code, said = convert(*ONNX)
    assert code == 2 and "choose another place with --out" in said


def test_packages_that_are_not_there_are_named(convert, tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == "onnx" else True)
    code, said = convert(*ONNX)
    assert code != 0 and "onnx" in said and "pip install -r inference/requirements.txt" in said
    assert left(tmp_path) == []


def test_a_checkpoint_needs_no_config_but_imports_nothing_of_its_own(small, convert, tmp_path):
    code, said = convert(*ONNX, config=None)
    assert code == 0, said
    arrays, record = storage.load(small.checkpoint)
    record["config"]["model"]["name"] = "os.system"
    from training.checkpoint import safetensor_file

    safetensor_file.write(tmp_path / "evil.params", arrays, record)
    code, said = convert(
        "--name", "evil", "--formats", "onnx", config=None, weights=tmp_path / "evil.params"
    )
    assert code == 2 and "pass --trust" in said


def test_without_its_data_random_inputs_must_do(small, convert, tmp_path):
    gone = json.loads(small.config.read_text()) | {
        "data": {"name": "arrays", "args": {"train": "gone.npz"}}
    }
    (tmp_path / "gone.json").write_text(json.dumps(gone))
    code, said = convert(*ONNX, config=tmp_path / "gone.json")
    assert code == 0 and "random inputs alone" in said and "gone.npz" in said, said
    assert report(tmp_path)["data"].startswith("none: ")
    assert {check["data"] for check in report(tmp_path)["formats"]["onnx"]["checks"]} == {"random"}
    code, said = convert(
        "--name", "int8", "--formats", "onnx", "--quantize", "int8", config=tmp_path / "gone.json"
    )
    assert code == 2 and "--quantize int8: takes its ranges from training data" in said


def test_onnx_alone_needs_no_tensorflow(small, tmp_path):
    code = "import sys; from inference import convert_tflite; code = convert_tflite.main(sys.argv[1:])\n"
    code += "sys.exit(code or any(m.split('.')[0] in ('tensorflow', 'tf2onnx', 'ai_edge_litert') for m in sys.modules))"
    command = [
        sys.executable,
        "-c",
        code,
        "-c",
        small.config,
        "-w",
        small.checkpoint,
        "--formats",
        "onnx",
        "--out",
        tmp_path,
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
