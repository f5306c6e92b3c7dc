"""Who may import whom, read from the source; and what starting up must not import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OWN = {"utils", "wiring", "model", "data_loader", "training", "inference", "train"}

# What each layer may import of the project's own, and whether jax may stand at the top of its files.
ALLOWED = {
    "utils": (set(), False),
    "wiring": ({"utils", "wiring"}, False),
    "model": ({"model"}, True),
    "data_loader": ({"utils", "data_loader"}, False),
    "training": (
        {"utils", "training", "data_loader.base", "data_loader.loader", "data_loader.nest"},
        True,
    ),
    "inference": (
        {"utils", "wiring", "inference", "model.base", "model.layers", "data_loader"}
        | {"training.checkpoint", "training.objective"},
        True,
    ),
}
HEAVY = {
    "optax",
    "flax",
    "tensorflow",
    "tf2onnx",
    "onnx",
    "onnxruntime",
    "ai_edge_litert",
    "wandb",
    "tensorboard",
    "matplotlib",
}
HEAVY |= {"orbax", "PIL", "tqdm", "safetensors", "grain", "array_record", "crc32c"}
LAZY = {
    "tf_ops": {"tensorflow"}
}  # folders whose files are themselves imported where they are needed alone


def imports(path, top_only=False):
    """The dotted names that a file imports."""
    tree = ast.parse(path.read_text())
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from training import loss` imports training.loss, `from training.base import Loss` training.base
            is_package = (ROOT / node.module.replace(".", "/")).is_dir()
            yield from (
                (f"{node.module}.{alias.name}" for alias in node.names)
                if is_package
                else [node.module]
            )


def files(layer):
    return [ROOT / "utils.py"] if layer == "utils" else sorted((ROOT / layer).rglob("*.py"))


@pytest.mark.parametrize("layer", ALLOWED)
def test_layers_import_only_what_lies_below(layer):
    allowed, jax_at_top = ALLOWED[layer]
    for path in files(layer):
        for name in imports(
            path, top_only=layer == "wiring"
        ):  # wiring reaches up, but inside functions alone
            if name.split(".")[0] in OWN:
                assert any(name == a or name.startswith(f"{a}.") for a in allowed), (
                    f"{path} imports {name}"
                )
        top = {name.split(".")[0] for name in imports(path, top_only=True)}
        assert jax_at_top or "jax" not in top, f"{path} imports jax at its top"
        heavy = top & HEAVY - LAZY.get(path.parent.name, set())
        assert not heavy, (
            f"{path} imports {heavy} at its top; do it inside the function that needs it"
        )


def test_what_imports_heavy_things_at_its_top_is_imported_inside_functions():
    for path in [
        path for layer in ALLOWED for path in files(layer) if path.parent.name not in LAZY
    ]:
        assert not any(
            set(name.split(".")) & LAZY.keys() for name in imports(path, top_only=True)
        ), path


def test_data_loading_never_imports_jax_anywhere():
    for path in files("data_loader"):
        assert not any(name.split(".")[0] == "jax" for name in imports(path)), path


def test_checking_a_config_loads_nothing_heavy():
    code = "import sys, train; train.main(['--check']); print('\\n'.join(sorted(sys.modules)), file=sys.stderr)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    loaded = {name.split(".")[0] for name in run.stderr.splitlines()}
    assert "jax" in loaded
    assert not loaded & HEAVY, loaded & HEAVY


def test_files_and_functions_stay_short_enough_to_read():
    for layer in ALLOWED:
        for path in [*files(layer), ROOT / "train.py"]:
            source = path.read_text()
            assert source.count("\n") <= 300, f"{path} is too long"
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef):
                    assert node.end_lineno - node.lineno < 60, f"{path}: {node.name} is too long"
