"""The user's own modules: copied into the run's folder, used from there, hidden by no others."""

import importlib
import json
import shutil

import numpy as np
import pytest

from inference import predict
from inference.load import load
from tests.processes import ROOT, run
from utils import UserError
from wiring import own_modules
from wiring.build import build
from wiring.own_modules import TOOLKIT, look_in, own_files

pytestmark = pytest.mark.usefixtures("clean_imports")

NET = '''
import jax
import vast_layers.dense as dense
from model.base import Model

def net(num_classes: int) -> Model:
    """One dense layer."""
    return Model(
        lambda key: (dense.make(key, 784, num_classes), {}),
        lambda params, state, x, *, train=False, key=None: (dense.use(params, x), state),
    )
'''
DENSE = """
import jax

def make(key, a, b):
    return {"weight": jax.random.normal(key, (a, b)) / 28}

def use(params, x):
    return x.reshape(len(x), -1) @ params["weight"]
"""
SCALE = "def halved(x):\n    return x.astype(float) / 510\n"


@pytest.fixture
def project(tmp_path):
    """A user's folder: a file, a package of which one file is not imported, and a plain folder."""
    files = {
        "vast_net.py": NET,
        "vast_layers/__init__.py": "",
        "vast_layers/dense.py": DENSE,
        "vast_layers/later.py": "",
        "vast_plain/scale.py": SCALE,
        "vast_plain/unused.py": "",
        "vast_unused.py": "",
    }
    for name, text in files.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "project"


OWN = {"vast_net.py", "vast_layers/__init__.py", "vast_layers/dense.py", "vast_layers/later.py"}
OWN |= {"vast_plain/scale.py"}


def dotted(config):
    return config | {"model": "vast_net.net", "preprocess": ["vast_plain.scale.halved"]}


def test_the_files_that_were_imported_are_known(project, valid, monkeypatch):
    monkeypatch.chdir(project.parent)
    parts = build(dotted(valid), "c", folders=look_in(project))
    assert {str(path) for path in parts.own_files()} == OWN
    assert all(file.is_relative_to(project) for file in parts.own_files().values())


def test_a_file_of_rawtree_is_not_the_users(valid, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert own_files(look_in(ROOT)) == {}


def test_every_module_of_rawtree_is_known():
    packages = {path.parent.name for path in ROOT.glob("*/*.py")}
    assert {path.stem for path in ROOT.glob("*.py")} | packages == set(TOOLKIT)


@pytest.mark.slow
def test_a_run_is_used_from_another_folder_without_the_users_files(
    project, valid, monkeypatch, capsys
):
    config = dotted(valid) | {"training": {"epochs": 1}}
    (project / "mine.json").write_text(json.dumps(config))
    assert run(project, "-c", "mine.json")[0] == 0
    (folder,) = (project / "saved" / "Test").iterdir()
    copies = folder / own_modules.COPIES
    assert {str(path.relative_to(copies)) for path in copies.rglob("*.py")} == OWN
    moved = project.parent / "moved"
    shutil.move(folder, moved)
    shutil.rmtree(project)
    other = project.parent / "other"
    other.mkdir()
    code, out, err = run(other, "--evaluate", moved, "--trust")
    assert code == 0, err
    assert "test_accuracy" in json.loads(out)["metrics"]
    monkeypatch.chdir(other)
    np.savez("x.npz", x=np.zeros((2, 28, 28, 1), np.uint8))
    checkpoint = str(moved / "checkpoint-epoch_1.params")
    assert predict.main([checkpoint, "x.npz"]) == 2
    assert "pass --trust if you trust it" in capsys.readouterr().err
    assert load(moved, trust=True).predict(np.zeros((2, 28, 28, 1), np.uint8)).shape[0] == 2
    assert predict.main([checkpoint, "x.npz", "--trust"]) == 0
    assert capsys.readouterr().out.count("x.npz[") == 2


@pytest.mark.parametrize(
    ("files", "name", "path"),
    [
        ({"utils.py": "def net(): pass"}, "utils.net", "utils.py"),
        ({"model/mine.py": "def net(): pass"}, "model.mine.net", "model"),
        (
            {"training/own.py": "", "vast_a.py": "from training.own import x\ndef net(): pass"},
            "vast_a.net",
            "training",
        ),
        (
            {"train.py": "", "vast_b.py": "from train import halve\ndef net(): pass"},
            "vast_b.net",
            "train.py",
        ),
    ],
)
def test_a_clash_with_a_module_of_rawtree_is_explained(
    tmp_path, valid, files, name, path, monkeypatch
):
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    ours = ROOT / ("utils" if path == "utils.py" else path)
    message = rf"c: model: .*{tmp_path / path} is hidden by Rawtree's own {ours}; .* my_{path}$"
    with pytest.raises(UserError, match=message):
        build(valid | {"model": name}, "c", folders=look_in(tmp_path))


def test_a_file_hidden_by_a_folder_is_explained(tmp_path, monkeypatch):
    (tmp_path / "elsewhere" / "vast_space").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    module = importlib.import_module("vast_space")  # it has no file
    (tmp_path / "vast_space.py").write_text("")
    fix = "rename it, as in my_vast_space.py"
    by = tmp_path / "elsewhere" / "vast_space"
    expected = f"; {tmp_path / 'vast_space.py'} is hidden by the folder {by}; {fix}"
    assert own_modules.hidden_file(module, [tmp_path]) == expected
