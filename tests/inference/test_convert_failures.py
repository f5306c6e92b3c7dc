"""The export command when something fails: one message, the exit code, and no partial output."""

import json
import os

import numpy as np
import pytest

from inference import exporter, packages, runtimes, to_onnx, verify
from inference.child import Child
from inference.runtimes import open_model
from tests.inference.conftest import output_folder, read_report
from tests.inference.crashes import open_unless_tflite
from utils import RunError

ONNX = ("--name", "small", "--formats", "onnx")


@pytest.mark.slow
def test_an_existing_export_is_only_replaced_with_force(convert, tmp_path):
    assert convert(*ONNX)[0] == 0
    path = tmp_path / "out" / "small" / "small.onnx"
    before = path.stat().st_mtime_ns
    code, printed = convert(*ONNX)
    assert code == 2 and "already exists" in printed and "--force" in printed
    assert path.stat().st_mtime_ns == before
    assert convert(*ONNX, "--force")[0] == 0
    assert path.stat().st_mtime_ns > before


def test_a_folder_that_is_not_an_export_is_never_replaced(convert, tmp_path):
    (tmp_path / "out" / "small").mkdir(parents=True)
    code, printed = convert(*ONNX, "--force")
    assert code == 2 and "is not an export" in printed
    assert output_folder(tmp_path) == ["small"]


@pytest.mark.slow
def test_force_keeps_files_that_the_export_did_not_write(convert, tmp_path):
    assert convert(*ONNX)[0] == 0
    (tmp_path / "out" / "small" / "notes.txt").write_text("precious")
    code, printed = convert("--name", "small", "--formats", "tflite", "--force")
    assert code == 0 and "Removed with the earlier export: small.onnx" in printed
    assert (tmp_path / "out" / "small" / "notes.txt").read_text() == "precious"


@pytest.mark.slow
def test_the_folder_of_a_killed_process_is_removed(convert, tmp_path):
    """Also of one that had the number of this process, as in another container."""
    for process in (999999999, os.getpid()):
        (tmp_path / "out" / f".small.{process}.tmp").mkdir(parents=True)
    assert convert(*ONNX)[0] == 0
    assert output_folder(tmp_path) == ["small"]


@pytest.mark.parametrize("process", [999999999, os.getpid()], ids=["ended", "itself"])
def test_an_export_that_a_killed_process_was_replacing_is_restored(convert, tmp_path, process):
    out = tmp_path / "out"
    former = out / f".small.{process}.former"
    others = [f".small.{os.getppid()}.former", f".small.v2.{process}.former"]  # running, another
    for name in others:
        write_export(out / name)
    write_export(former)
    (out / f".small.{process}.tmp").mkdir()
    code, printed = convert(*ONNX)
    assert code == 2 and "already exists" in printed
    assert output_folder(tmp_path) == sorted([*others, "small"])
    assert (out / "small" / "notes.txt").read_text() == "precious"
    (out / "small" / "notes.txt").unlink()
    write_export(former)
    assert convert(*ONNX)[0] == 2
    assert output_folder(tmp_path) == sorted([*others, "small"])
    assert (out / "small" / "notes.txt").read_text() == "precious"
    (out / "small" / "verification.json").unlink()
    write_export(former)
    code, printed = convert(*ONNX)
    assert code == 2 and "is not an export" in printed and former.exists()


def write_export(folder):
    """The folder of an export with a file of the user's own."""
    folder.mkdir(parents=True)
    (folder / "small.tflite").write_text("a model")
    (folder / "verification.json").write_text('{"files": ["small.tflite", "verification.json"]}')
    (folder / "notes.txt").write_text("precious")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--formats", "torch"], "--formats: unknown value 'torch'; choose from tflite, onnx"),
        (
            ["--quantize", "int4"],
            "--quantize: unknown value 'int4'; choose from float16, dynamic, int8",
        ),
        (["--route", "xla"], "--route: unknown value 'xla'; choose from auto, native, jax2tf"),
        (["--input-layout", "hwcn"], "--input-layout: unknown value 'hwcn'"),
        (["--opset", "17"], "--opset: must be 18 to 23, got 17"),
        (["--batch", "0"], "--batch: must be at least 1, got 0"),
        (["--input", "28x28"], "--input: '28x28' is not a shape"),
        (["--name", ""], "--name: '' is not a valid folder name"),
        (["--tolerance", "0"], "--tolerance: must be more than 0, got 0"),
        (["--tolerance", "nan"], "--tolerance: must be more than 0, got nan"),
        (["--batches", "3", "0"], "--batches: must be numbers from 1, got 3 0"),
        (["--batch", "2", "--batches", "2"], "--batches: the batch is fixed by --batch 2"),
        (["--inputs", "gone.npz"], "--inputs: gone.npz: cannot be read"),
        (["--name", "../elsewhere"], "--name: '../elsewhere' is not a valid folder name"),
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
        (["--formats", "model.args.dims=[16]"], "--formats: has no value"),
        (["--input", "7", "28", "28", "1"], "a shape must begin with the batch size 1"),
        (["--demo", "--batch", "4"], "--demo: runs one example at a time"),
        (
            ["--formats", "onnx", "--input", "1", "28", "28", "3"],
            "the file has (784, 16), the model has (2352, 16)",
        ),
        (["--formats", "tflite", "--demo"], "--demo: runs the ONNX file; add onnx to --formats"),
    ],
)
def test_bad_input_is_one_message(convert, tmp_path, arguments, message):
    code, printed = convert("--name", "small", *arguments)
    assert code == 2 and message in printed, printed
    assert output_folder(tmp_path) == []


def test_a_changed_model_points_to_the_copy_of_the_run(small, convert):
    _, printed = convert(*ONNX, "model.args.activation=gelu")
    assert str(small.checkpoint.parent / "model") in printed


def test_a_model_that_rejects_its_input_is_reported(convert, small, tmp_path):
    model = {"name": "vit", "args": {"patch": 5}}
    config = tmp_path / "vit.json"
    config.write_text(json.dumps(json.loads(small.config.read_text()) | {"model": model}))
    code, printed = convert(*ONNX, config=config)
    assert code == 2 and "patch: 5 must divide" in printed


@pytest.mark.slow
def test_quantization_does_not_hide_a_wrong_graph(convert, tmp_path, monkeypatch):
    def write_wrong_weight(traced, path, opset=20):
        weights = traced.weights | {"head/weight": traced.weights["head/weight"] * 1.001}
        write(traced._replace(weights=weights), path, opset)

    write = to_onnx.write_onnx
    monkeypatch.setattr(to_onnx, "write_onnx", write_wrong_weight)
    code, printed = convert(*ONNX, "--quantize", "dynamic", "--route", "native")
    assert code == 1 and "does not compute what JAX computes" in printed
    assert "the tolerance is 1e-05" in printed
    assert output_folder(tmp_path) == []


def test_an_error_over_the_tolerance_leaves_nothing_behind(convert, tmp_path, monkeypatch):
    monkeypatch.setitem(verify.TOLERANCE, "float32", 0.0)
    code, printed = convert(*ONNX, "--route", "native")
    assert code == 1 and "small.onnx: does not compute what JAX computes: on " in printed
    assert output_folder(tmp_path) == []


def test_an_interrupt_leaves_nothing_behind(convert, tmp_path, monkeypatch):
    def interrupted(self, format, path):
        path.write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(exporter.Exporter, "native", interrupted)
    code, printed = convert(*ONNX)
    assert code == 130 and printed.strip().endswith("Stopped; nothing was written")
    assert output_folder(tmp_path) == []


def wrong_numbers(self, path):
    weights = self.traced.weights
    traced = self.traced._replace(weights=weights | {"head/bias": weights["head/bias"] + 1})
    to_onnx.write_onnx(traced, path)


def index_error(self, path):
    raise IndexError("list index out of range")


def crash(self, path):
    with Child() as child:
        child.call("measuring samples", os.abort)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (wrong_numbers, "onnx: small.onnx: does not compute what JAX computes: on "),
        (index_error, "onnx: IndexError: list index out of range ("),
        (crash, "onnx: measuring samples ended its process: Aborted"),
    ],
)
def test_if_the_native_route_fails_in_any_way_the_other_is_tried(
    convert, tmp_path, monkeypatch, fail, message
):
    native = exporter.Exporter.native
    monkeypatch.setattr(exporter.Exporter, "native", lambda self, format, path: fail(self, path))
    monkeypatch.setattr(exporter.Exporter, "by_jax2tf", native)
    code, printed = convert(*ONNX)
    assert code == 0 and message in printed and "; trying jax2tf instead" in printed, printed
    report = read_report(tmp_path)["formats"]["onnx"]
    assert report["route"] == "jax2tf" and report["native_fails"] in printed
    for options in (["--route", "native"], ["--quantize", "dynamic", "--exclude", "head/.*"]):
        code, printed = convert(*ONNX, *options, "--force")
        assert code == 1 and message in printed and "trying" not in printed
        assert "Traceback" not in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "code", "intact"), [("tflite", 3, "onnx"), ("onnx", 4, "tflite")]
)
def test_if_one_format_fails_the_other_is_written(
    convert, tmp_path, monkeypatch, broken, code, intact
):
    native = exporter.Exporter.native

    def fail_for_one(self, format, path):
        if format == broken:
            path.write_bytes(b"half of it")
            raise RunError("the disk is full of holes")
        native(self, format, path)

    monkeypatch.setattr(exporter.Exporter, "native", fail_for_one)
    name = "small [v2]"  # of the config; as a pattern, it would not match itself
    exit_code, printed = convert(f"title={name}", "--route", "native")
    error = f"{broken}: the disk is full of holes"
    assert exit_code == code and error in printed
    folder = tmp_path / "out" / name
    assert (folder / f"{name}.{intact}").exists() and not (folder / f"{name}.{broken}").exists()
    assert read_report(tmp_path, name)["failed"] == {broken: error}


@pytest.mark.slow
def test_if_a_runtime_crashes_on_one_file_the_other_is_written(convert, tmp_path, monkeypatch):
    monkeypatch.setattr(runtimes, "open_model", open_unless_tflite)
    code, printed = convert("--name", "small", "--route", "native", "--formats", "tflite", "onnx")
    crashed = "running small.tflite ended its process: Aborted (Check failed: rank == 2 (3 vs. 2))"
    assert code == 3 and crashed in printed, printed
    report = read_report(tmp_path)
    assert list(report["formats"]) == ["onnx"] and crashed in report["failed"]["tflite"]
    assert not (tmp_path / "out" / "small" / "small.tflite").exists()
    x = np.random.default_rng(0).random((5, 28, 28, 1), np.float32)
    assert open_model(tmp_path / "out" / "small" / "small.onnx")({"input": x})["output"].any()


def test_an_output_folder_that_cannot_be_created_is_reported(convert, tmp_path):
    (tmp_path / "out").write_text("a file")
    code, printed = convert(*ONNX)
    assert code == 2 and "choose another folder with --out" in printed


def test_missing_packages_are_named(convert, tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == "onnx" else True)
    code, printed = convert(*ONNX)
    assert code != 0 and "onnx" in printed
    assert "pip install -r inference/requirements.txt" in printed
    assert output_folder(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--exclude", "dense/.*"], "--exclude: names what --quantize leaves in float32"),
        (["--exclude", "(", "--quantize", "int8"], "--exclude: '(' is not a regex: missing )"),
        (
            ["--exclude", "haed/.*", "--quantize", "dynamic"],
            "--exclude: 'haed/.*' matches no weight; there are head/bias, head/weight, hidden/0/",
        ),
        (
            [
                "--exclude",
                "head/.*",
                "--quantize",
                "dynamic",
                "--formats",
                "tflite",
                "--route",
                "jax2tf",
            ],
            "--exclude: the jax2tf route gives weights in TFLite no names; use --route native",
        ),
    ],
)
def test_an_exclude_that_cannot_be_followed_is_refused(convert, arguments, message):
    code, printed = convert("--formats", "onnx", *arguments)
    assert code == 2 and printed.splitlines()[-1].startswith(message), printed
