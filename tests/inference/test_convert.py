"""The export command: what it writes, from which checkpoints, configs and models."""

import json
import re
import shutil
import subprocess
import sys
import zipfile

import jax
import numpy as np
import onnx
import pytest
from safetensors.numpy import save_file

from inference.functions import export
from inference.load import NHWC, Form, load, load_to_export
from inference.runtimes import open_model
from model.diffusion import sample
from tests.inference.conftest import CONFIG, MODELS, output_folder, own_weights, read_report
from tests.model.compare import random_params
from tests.processes import ROOT
from tests.processes import run as process
from training.checkpoint import safetensor_file, storage
from utils import UserError, named_leaves
from wiring.build import build

ONNX = ("--name", "small", "--formats", "onnx")


def outputs(path, **inputs):
    return open_model(path)(inputs)["output"]


def jax_outputs(small, inputs, form=NHWC):
    loaded = load_to_export(small.config, small.checkpoint, form=form)
    return jax.jit(loaded.function)(loaded.weights, inputs)


@pytest.mark.slow
def test_both_formats_compute_what_jax_computes_beside_the_config_and_the_code(
    small, convert, tmp_path
):
    code, printed = convert("--name", "small")
    assert code == 0, printed
    folder = tmp_path / "out" / "small"
    x = np.random.default_rng(0).random((5, 28, 28, 1), np.float32)
    expected = jax_outputs(small, x)
    for format, report in read_report(tmp_path)["formats"].items():
        path = folder / f"small.{format}"
        tolerance = {"rtol": 0, "atol": 1e-5 * np.abs(expected).max()}
        np.testing.assert_allclose(outputs(path, input=x), expected, **tolerance)
        assert report["route"] == "native" and report["bytes"] == path.stat().st_size
        assert {(check["data"], check["batch"]) for check in report["checks"]} == {
            (kind, size) for kind in ("random", "real") for size in (1, 3, 64)
        }
        assert report["inputs"] == {"input": "float32[None, 28, 28, 1]"}
        assert report["outputs"] == {"output": "float32[None, 10]"}
        signature = "input float32[batch, 28, 28, 1] -> output float32[batch, 10]"
        assert f"small.{format}: {signature}" in printed
        error = f"{report['checks'][0]['absolute_error']:.1e}"
        row = rf"^small.{format} +native +{report['nodes']} .* random +1 +{error}"
        assert re.search(row, printed, re.M)

    files = {"small.onnx", "small.tflite", "config.json", "model", "verification.json"}
    assert output_folder(tmp_path) == ["small"]
    assert {path.name for path in folder.iterdir()} == files
    assert (folder / "model" / "mlp.py").read_text() == (ROOT / "model" / "mlp.py").read_text()
    assert read_report(tmp_path)["model"] == str(small.checkpoint.parent / "model")
    written = json.loads((folder / "config.json").read_text())["model"]
    args = {"dims": [16], "activation": "relu", "dropout": 0.0}
    assert written == json.loads(small.config.read_text())["model"] | {"args": args}


@pytest.mark.slow
def test_a_loaded_run_is_exported_with_its_preprocessing(small, tmp_path):
    loaded, path = load(small.checkpoint), tmp_path / "a.onnx"
    pixels = np.random.default_rng(0).integers(0, 256, (5, 28, 28, 1), np.uint8)
    export(loaded, None, pixels, path)
    np.testing.assert_allclose(
        outputs(path, input=pixels), loaded.predict(pixels), rtol=1e-4, atol=1e-5
    )
    facts = {prop.key: prop.value for prop in onnx.load(path).metadata_props}
    assert facts["outputs_are"] == "logits" and "preprocess" not in facts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_equal_blocks_that_were_trained_as_one_are_exported_one_after_the_other(
    small, tmp_path, name
):
    """So that the files are those of the same model without `scan`."""
    args = {"resnet": {"widths": [4]}, "vit": {"dim": 8, "heads": 2, "patch": 7}}[name]
    config = json.loads(small.config.read_text(encoding="utf-8"))
    programs = []
    for scan in (False, True):
        model = {"name": name, "args": args | {"depth": 2, "scan": scan}}
        (tmp_path / "scan.json").write_text(json.dumps(config | {"model": model}))
        if not scan:
            init = build(config | {"model": model}, "config.json").model.init
            params, state = random_params(init)
            weights = named_leaves(params) | named_leaves({"state": state})
            save_file({n: np.asarray(a) for n, a in weights.items()}, tmp_path / "a.safetensors")
        loaded = load_to_export(tmp_path / "scan.json", tmp_path / "a.safetensors")
        x = np.zeros((2, 28, 28, 1), np.float32)
        programs.append((str(jax.make_jaxpr(loaded.function)(loaded.weights, x)), loaded.weights))
    (plain, weights), (scanned, same) = programs
    assert plain == scanned
    jax.tree.map(np.testing.assert_array_equal, same, weights)


def trained(folder, **changes):
    """The checkpoint of a short run of a config with these changes."""
    data = {"name": "digits", "args": {"train_size": 96, "test_size": 40}}
    config = CONFIG | {"data": data, "training": {"epochs": 1}} | changes
    (folder / "own.json").write_text(json.dumps(config))
    code, _, printed = process(folder, "-c", "own.json")
    assert code == 0, printed
    (checkpoint,) = folder.glob("saved/Small/*/checkpoint-epoch_1.params")
    return checkpoint


@pytest.mark.torture
def test_a_mobilenet_is_exported_natively(convert, tmp_path):
    checkpoint = trained(tmp_path, model={"name": "mobilenet", "args": {"width": 0.25}})
    options = ("--name", "small", "--route", "native")
    code, printed = convert(*options, config=None, weights=checkpoint)
    assert code == 0, printed
    formats = read_report(tmp_path)["formats"]
    assert {name: report["route"] for name, report in formats.items()} == {
        "tflite": "native",
        "onnx": "native",
    }


@pytest.mark.torture
def test_a_diffusion_model_is_evaluated_loaded_and_exported_by_what_it_takes(convert, tmp_path):
    """That is not what the data has: noisy images, times and labels."""
    half = {"name": "normalize", "args": {"mean": [0.5], "std": [0.5]}}
    checkpoint = trained(
        tmp_path,
        model={"name": "unet", "args": {"widths": [4, 8], "groups": 2, "heads": 2, "patch": 2}},
        preprocess=["to_unit", half],
        loss="mse",
        metrics=[],
        objective="denoising_diffusion",
        training={"epochs": 1, "ema": 0.5},
        callbacks=[{"name": "draw_samples", "args": {"labels": [1, 7], "each": 1, "steps": 2}}],
    )
    folder = checkpoint.parent
    assert (folder / "pictures" / "samples.png").read_bytes().startswith(b"\x89PNG")
    code, printed, _ = process(tmp_path, "-c", "own.json", "--evaluate", checkpoint)
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    logged = [row["test_loss"] for row in map(json.loads, rows) if "test_loss" in row]
    assert code == 0 and json.loads(printed)["metrics"]["test_loss"] == pytest.approx(logged[-1])
    loaded = load(checkpoint)
    images = sample(loaded.model, loaded.params, jax.random.key(0), [3, -1], steps=2, guidance=2)
    assert images.shape == (2, 28, 28, 1) and np.abs(images).max() <= 1
    x = {"image": np.asarray(images), "time": np.float32([0.1, 0.9]), "label": np.int32([3, -1])}
    expected = loaded.predict(x)
    with pytest.raises(UserError, match="takes inputs of image float32"):
        loaded.predict(np.zeros((2, 28, 28, 1), np.uint8))
    code, printed = convert(*ONNX, "--route", "native", config=None, weights=checkpoint)
    assert code == 0, printed
    assert "the model takes other inputs than those of the data" in printed
    takes = {"image": [None, 28, 28, 1], "time": [None], "label": [None]}
    for format in read_report(tmp_path)["formats"]:
        model = open_model(tmp_path / "out" / "small" / f"small.{format}")
        assert {name: list(shape) for name, (shape, _) in model.inputs.items()} == takes
        tolerance = {"rtol": 0, "atol": 1e-5 * np.abs(expected).max()}
        np.testing.assert_allclose(model(x)["output"], expected, **tolerance)
    for option in (["--input", "1", "28", "28", "1"], ["--with-preprocess"]):
        code, printed = convert(*ONNX, "--force", *option, config=None, weights=checkpoint)
        assert code == 2 and "Traceback" not in printed and option[0] in printed


@pytest.mark.slow
def test_int8_is_smaller_and_prints_its_accuracy(convert, tmp_path):
    code, printed = convert(*ONNX, "--quantize", "int8", "--samples", 50)
    assert code == 0, printed
    for report in read_report(tmp_path)["formats"].values():
        before, after = report["test_set"]["before"], report["test_set"]["after"]
        assert before["accuracy"] > 0.6 and abs(after["accuracy"] - before["accuracy"]) <= 0.03
        assert report["bytes"] < 0.5 * 4 * 12730
        assert f"accuracy {before['accuracy']:.4f} -> {after['accuracy']:.4f}" in printed


@pytest.mark.slow
def test_a_warning_names_the_weights_that_stay_in_float32(small, convert, tmp_path):
    """Those of the first convolution, which int8 leaves out."""
    args = {"patch": 7, "dim": 32, "heads": 2, "depth": 1}
    config = json.loads(small.config.read_text()) | {"model": {"name": "vit", "args": args}}
    (tmp_path / "vit.json").write_text(json.dumps(config))
    params, _ = build(config, "config.json").model.init(jax.random.key(0))
    save_file(named_leaves(jax.tree.map(np.asarray, params)), tmp_path / "vit.safetensors")
    files = {"config": tmp_path / "vit.json", "weights": tmp_path / "vit.safetensors"}
    options = (*ONNX, "--quantize", "int8", "--samples", 20, "--tolerance", 9)
    code, printed = convert(*options, **files)
    assert code == 0, printed
    report = read_report(tmp_path)["formats"]["onnx"]
    share = 4 * 49 * 32 / report["bytes"]
    assert report["float32_weights"] == {"patches/weight": round(share, 4)}
    left = f"stays in float32: patches/weight ({share:.1%} of the file)"
    assert f"Warning: onnx in int8: {left}" in printed
    code, printed = convert(*options, "--force", "--exclude", "patches/weight", **files)
    assert code == 0 and "stays in float32" not in printed, printed


@pytest.mark.slow
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
        (["--input", "1, 1, 28, 28"], Form("nchw"), (2, 1, 28, 28), np.float32),
        (
            ["--with-preprocess", "--input", "(1, 28, 28, 1)"],
            Form(preprocess=True),
            (2, 28, 28, 1),
            np.uint8,
        ),
    ],
)
def test_options_change_the_inputs_and_outputs(
    small, convert, tmp_path, arguments, form, shape, dtype
):
    code, printed = convert(*ONNX, *arguments)
    assert code == 0, printed
    path = tmp_path / "out" / "small" / "small.onnx"
    x = np.random.default_rng(0).integers(0, 256, shape)
    x = x.astype(dtype) if dtype == np.uint8 else x.astype(dtype) / np.float32(255)
    expected = jax_outputs(small, x, form)
    np.testing.assert_allclose(outputs(path, input=x), expected, atol=1e-5)
    sizes, input_dtype = open_model(path).inputs["input"]
    assert (sizes[0], input_dtype) == (4 if "--batch" in arguments else None, dtype)


@pytest.mark.slow
def test_the_code_of_the_run_is_copied_not_that_of_today(small, convert, tmp_path):
    run = shutil.copytree(small.checkpoint.parent, tmp_path / "run")
    with open(run / "model" / "mlp.py", "a", encoding="utf-8") as file:
        file.write("# as it was then\n")
    weights = run / small.checkpoint.name
    assert convert(*ONNX, config=None, weights=weights)[0] == 0
    copied = (tmp_path / "out" / "small" / "model" / "mlp.py").read_text(encoding="utf-8")
    assert copied.endswith("# as it was then\n")
    (run / "environment.json").unlink()  # so that this is not the folder of a run
    assert convert(*ONNX, "--force", config=None, weights=weights)[0] == 0
    assert read_report(tmp_path)["model"] == str(ROOT / "model")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch_mean", "scalar", "two_outputs"])
def test_an_output_may_depend_on_the_whole_batch(own, convert, name):
    code, printed = convert(*ONNX, **own(name))
    assert code == 0, printed


@pytest.mark.torture
@pytest.mark.parametrize("formats", [("onnx", "stablehlo"), ("tflite",)], ids=" ".join)
def test_images_of_any_size_with_names(convolution, convert, tmp_path, formats):
    """A convnext: convolutions with SAME, patches, depthwise ones, and a mean of all pixels."""
    options = ["--free", "1:8*height:8-", "2:8*width", "--input", "1", "16", "16", "1"]
    options += ["--input-names", "image", "--output-names", "logits"]
    code, printed = convert("--name", "small", "--formats", *formats, *options, **convolution)
    assert code == 0, printed
    signature = "image float32[batch, 8*height, 8*width, 1] -> logits float32[batch, 10]"
    loaded = load_to_export(convolution["config"], convolution["weights"], shape=(16, 16, 1))
    x = np.random.default_rng(0).random((2, 16, 40, 1), np.float32)
    expected = jax.jit(loaded.function)(loaded.weights, x)
    for format in formats:
        assert f"small.{format}: {signature}" in printed
        assert read_report(tmp_path)["formats"][format]["route"] in ("native", "jax")
        [result] = open_model(tmp_path / "out" / "small" / f"small.{format}")({"image": x}).values()
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_files_say_what_they_are(small, convert, tmp_path):
    import onnx

    run = shutil.copytree(small.checkpoint.parent, tmp_path / "run")
    arrays, record = storage.load(small.checkpoint)
    classes = [f"digit {i}" for i in range(10)]
    safetensor_file.write(run / small.checkpoint.name, arrays, record | {"classes": classes})
    code, printed = convert("--name", "small", config=None, weights=run / small.checkpoint.name)
    assert code == 0, printed
    folder = tmp_path / "out" / "small"
    recorded = json.loads((run / "environment.json").read_text())
    stored = {entry.key: entry.value for entry in onnx.load(folder / "small.onnx").metadata_props}
    with zipfile.ZipFile(folder / "small.tflite") as archive:
        facts = json.loads(archive.read("metadata.json"))
        assert archive.read("labels.txt").decode().splitlines() == classes
    for key, value in facts.items():
        assert stored[key] == (value if isinstance(value, str) else json.dumps(value))
    assert (facts["title"], facts["source"]) == ("Small", small.checkpoint.name)
    assert facts["outputs_are"] == "logits"
    assert facts["preprocess"] == [{"name": "to_unit", "args": {}}]
    assert facts["classes"] == classes and facts.get("code_commit") == recorded["git_commit"]
    data = (folder / "small.tflite").read_bytes()
    assert b"TFLITE_METADATA" in data and b"M001" in data


def test_models_that_cannot_be_exported_are_refused(own, convert, tmp_path):
    code, printed = convert(*ONNX, **own("all_nan"))
    assert code == 1 and "no finite number" in printed
    code, printed = convert(*ONNX, **own("broken"))
    assert code == 2 and "name 'undefined' is not defined" in printed
    assert "own_models.py:" in printed
    code, printed = convert(*ONNX, "--with-softmax", **own("two_outputs"))
    message = "--with-softmax: needs a model with one output; this one has a, input"
    assert code == 2 and message in printed
    assert output_folder(tmp_path) == []


@pytest.mark.slow
def test_a_checkpoint_needs_no_config_but_its_own_imports_nothing(small, convert, tmp_path):
    code, printed = convert(*ONNX, config=None)
    assert code == 0, printed
    arrays, record = storage.load(small.checkpoint)
    record["config"]["model"]["name"] = "os.system"
    safetensor_file.write(tmp_path / "evil.params", arrays, record)
    evil = {"config": None, "weights": tmp_path / "evil.params"}
    code, printed = convert("--name", "evil", "--formats", "onnx", **evil)
    assert code == 2 and "'os.system' would import code" in printed and "--trust" in printed


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", "beside", "copied"])
def test_a_trusted_checkpoint_finds_the_modules_of_its_config(small, convert, tmp_path, where):
    """Where one stands, beside the checkpoint, and in the copy that its run has made."""
    arrays, record = storage.load(small.checkpoint)
    arrays = {"params/" + name: leaf for name, leaf in own_weights().items()}
    record["config"]["model"] = f"found_{where}.root"
    run = tmp_path / "run"
    folder = {"here": tmp_path, "beside": run, "copied": run / "user_modules"}[where]
    folder.mkdir(parents=True, exist_ok=True), run.mkdir(exist_ok=True)
    (folder / f"found_{where}.py").write_text(MODELS, encoding="utf-8")
    safetensor_file.write(run / "checkpoint-epoch_1.params", arrays, record)
    stored = {"config": None, "weights": run / "checkpoint-epoch_1.params"}
    code, printed = convert(*ONNX, "--trust", **stored)
    assert code == 0, printed
    assert (tmp_path / "out" / "small" / "user_modules" / f"found_{where}.py").is_file()


@pytest.mark.slow
def test_other_data_than_the_training_data_is_reported(convert):
    other_data = "data.args.train_size=600"
    code, printed = convert(*ONNX, "--quantize", "int8", other_data)
    assert code == 2 and "is not the data that the checkpoint was trained on" in printed
    code, printed = convert(*ONNX, "--quantize", "float16", other_data)
    assert code == 0 and "Scored on other data" in printed


@pytest.mark.slow
def test_without_data_random_inputs_are_used(small, convert, tmp_path):
    data = {"name": "arrays", "args": {"train": "gone.npz"}}
    config = tmp_path / "gone.json"
    config.write_text(json.dumps(json.loads(small.config.read_text()) | {"data": data}))
    code, printed = convert(*ONNX, config=config)
    assert code == 0 and "random inputs only" in printed and "gone.npz" in printed, printed
    report = read_report(tmp_path)
    assert report["data"].startswith("none: ")
    assert {check["data"] for check in report["formats"]["onnx"]["checks"]} == {"random"}
    int8 = ("--name", "int8", "--formats", "onnx", "--quantize", "int8")
    code, printed = convert(*int8, config=config)
    assert code == 2 and "--quantize int8: takes its ranges from training data" in printed


@pytest.mark.slow
def test_onnx_alone_does_not_import_tensorflow(small, tmp_path):
    program = (
        "import sys; from inference import convert_tflite\n"
        "code = convert_tflite.main(sys.argv[1:])\n"
        "packages = {name.split('.')[0] for name in sys.modules}\n"
        "sys.exit(code or bool(packages & {'tensorflow', 'tf2onnx', 'ai_edge_litert'}))"
    )
    options = ["-c", small.config, "-w", small.checkpoint, "--formats", "onnx", "--out", tmp_path]
    command = [sys.executable, "-c", program, *options]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
