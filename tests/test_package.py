"""Rawtree as a package: what the wheel holds, a project of a user's own in which it is installed,
and the same project with a clone."""

import ast
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from rawtree import build_wheel, new
from rawtree.__main__ import COMMANDS

from tests.processes import call, captured
from wiring.own_modules import TOOLKIT

pytestmark = pytest.mark.usefixtures("clean_imports")
ROOT = Path(__file__).resolve().parents[1]
MARK = "import os\nopen(os.environ['MARK'], 'w').close()\n"


# The wheel.


def test_imports_of_the_project_get_the_name_of_the_package():
    text = """import os
from utils import (
    A,
)
from utils_of_others import B
from rawtree.model import x
def f():
    if x: from model.layers.linear import linear  # from utils import C
    return "from model import y"
"""
    changed = build_wheel.with_prefix(text).splitlines()
    assert changed[1] == "from rawtree.utils import ("
    assert (
        changed[7].lstrip().startswith("if x: from rawtree.model.layers.linear import linear  # ")
    )
    unchanged = [line for i, line in enumerate(text.splitlines()) if i not in (1, 7)]
    assert [line for i, line in enumerate(changed) if i not in (1, 7)] == unchanged
    with pytest.raises(SystemExit, match=r"line 1: write this as `from \.\.\. import"):
        build_wheel.with_prefix("import model.base\n")


# Tables of modules, whose readers put PACKAGE in front.
TABLES = ("training/kinds.py", "wiring/parts_page.py")


@pytest.mark.slow
def test_no_module_of_the_wheel_names_one_as_in_a_clone():
    ours = set(TOOLKIT) - {"rawtree"}
    paths = {path.as_posix() for path in build_wheel.shipped().values() if path.suffix == ".py"}
    for path in paths:
        nodes = list(ast.walk(ast.parse(build_wheel.content(ROOT / path))))
        with_prefix = {id(n) for f in nodes if isinstance(f, ast.JoinedStr) for n in f.values}
        for node in nodes:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Constant) and not (path in TABLES or id(node) in with_prefix):
                file = f"{node.value}".replace(".", "/") + ".py"
                names += [node.value] if "/" in file and file in paths else []
            assert not {name.split(".")[0] for name in names} & ours, f"{path}: {names}"


def test_the_wheel_holds_every_file_that_the_code_reads():
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    if not listed:
        pytest.skip("this is no checkout of git")
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"benchmarks", "tests"}
    wanted = {f for f in listed if f.split("/")[0] in packages and not f.endswith(".txt")}
    wanted |= {f for f in listed if "/" not in f and f.endswith(".py")}
    wanted |= {"config.schema.json", "logger_config.json"}
    wanted |= {f for f in listed if f.startswith("configs/")}
    assert {Path(path).as_posix() for path in build_wheel.shipped().values()} == wanted


def test_what_is_required_begins_at_the_tested_versions():
    lines = build_wheel.metadata("1.0").splitlines()
    required = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist")]
    assert any(re.fullmatch(r"jax~=0\.\d+\.\d+", text) for text in required)
    assert any(re.fullmatch(r"safetensors>=[\d.]+", text) for text in required)
    (tensorflow,) = [text for text in required if text.startswith("tensorflow")]
    assert tensorflow.endswith('; extra == "export"')
    (records,) = [text for text in required if text.startswith("array_record")]
    assert records.endswith('(sys_platform != "win32") and extra == "optional"')


# In a clone.


def test_in_a_clone_the_name_of_the_package_is_another_name_for_its_folders():
    import rawtree.model.layers
    from rawtree.model.layers.linear import linear as same

    import model.layers
    from model.layers.linear import linear

    assert same is linear and rawtree.model.layers is model.layers
    assert model.layers.__spec__.name == "model.layers"
    assert importlib.util.find_spec("model").submodule_search_locations
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("rawtree.no_such_module")


@pytest.fixture
def project(tmp_path):
    """What `rawtree new` writes."""
    code, out, err = captured(tmp_path, lambda: new.main(["my_project"]))
    assert code == 0 and not err
    assert out.splitlines()[1].startswith("  cd my_project && ")
    return tmp_path / "my_project"


@pytest.mark.slow
def test_the_commands_in_the_readme_of_a_project_of_a_clone_work(project):
    readme = (project / "README.md").read_text()
    assert not re.search(r"(^|`)rawtree ", readme, re.MULTILINE)
    assert "rawtree[export]" not in readme and "any names" not in readme
    block = r"```\nexport PYTHONPATH=(.*)\n```\n\n```\n(.*?)```"
    [(where, commands)] = re.findall(block, readme, re.DOTALL)
    lines = [line for line in commands.splitlines() if "--check" in line or "schema" in line]
    for line in [*lines, "python -m pytest --collect-only"]:
        command = line.replace("python", sys.executable, 1)
        variables = os.environ | {"PYTHONPATH": where}
        done = subprocess.run(command, shell=True, cwd=project, env=variables, timeout=300)
        assert done.returncode == 0, line
    assert len(lines) == 2


def change(project, **keys):
    """Change keys of the project's config."""
    path = project / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_a_new_project_is_checked_and_completed(project):
    code, out, err = call(project, "-c", "config.json", "--check")
    assert code == 0, err
    shown = json.loads(out[: out.index("\n}\n") + 2])
    assert shown["title"] == "my_project"
    assert [shown[k]["name"] for k in ("model", "data", "loss")] == [
        "my_model.small_net",
        "my_data.spirals",
        "my_loss.focal",
    ]
    schema = json.loads((project / "config.schema.json").read_text())
    config = json.loads((project / "config.json").read_text())
    jsonschema.validate(config, schema)
    wrong = config | {"model": {"name": "small_net", "args": {"widht": 3}}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


def test_a_part_of_ones_own_comes_before_that_of_rawtree(project):
    text = (project / "my_model.py").read_text()
    (project / "my_model.py").write_text(text.replace("def small_net", "def mlp"))
    (project / "my_scripts.py").write_text("raise SystemExit('this is no part')")
    (project / "configs").mkdir()
    change(project, model="mlp")
    shutil.move(project / "config.json", project / "configs" / "config.json")
    code, out, err = call(project, "-c", "configs/config.json", "--check")
    assert code == 0, err
    assert '"my_model.mlp"' in out
    (project / "my_model.py").unlink()
    code, out, err = call(project, "-c", "configs/config.json", "--check")
    assert code == 0 and '"name": "mlp"' in out


def test_mistakes_with_ones_own_parts_are_explained(project):
    def check(*words):
        code, _, err = call(project, "--check", *words)
        assert code == 2
        return err

    err = check()  # the parts after the first are only listed
    assert "'my_data.spirals' would import code, and this config was not named with -c" in err
    assert "loss: 'my_loss.focal' would import code, too\n" in err and err.count("--trust") == 1
    change(project, model="smal_net", loss="plain", data="spirals")
    (project / "my_other.py").write_text("def plain(output, target):\n    return 0.0\n")
    err = check("-c", "config.json")
    assert "no model 'smal_net'; did you mean 'small_net'?" in err
    assert "my_other.py has a function 'plain', but without `-> Loss`" in err
    (project / "my_other.py").write_text("def spirals() -> Data:\n    retrun 1\n")
    (project / "my_data.py").unlink()
    change(project, model="small_net", loss="focal")
    err = check("-c", "config.json")
    assert "data: 'my_other.spirals' cannot be imported: " in err
    assert "my_other.py, line 2: invalid syntax" in err
    (project / "my_other.py").write_text("def focal() -> Loss: ...\n")
    err = check("-c", "config.json")
    assert "'focal' is defined in my_loss.py and in my_other.py; rename one of them" in err


def test_a_file_with_the_name_of_a_library_is_explained(project):
    (project / "statistics.py").write_text("def spread() -> Metric: ...\n")
    change(project, metrics=["spread"])
    code, _, err = call(project, "-c", "config.json", "--check")
    assert code == 2 and f"{project / 'statistics.py'} is hidden by " in err
    assert "rename it, as in my_statistics.py" in err


def test_the_plain_names_of_a_run_are_those_of_rawtree(project):
    """The config of a run names a part of the user's own by its dotted name."""
    run = project / "saved" / "T" / "run"
    run.mkdir(parents=True)
    config = json.loads((project / "config.json").read_text())
    (run / "environment.json").write_text("{}")
    config |= {"data": "my_data.spirals", "loss": "cross_entropy", "model": "mlp"}
    (run / "config.json").write_text(json.dumps(config))
    text = (project / "my_model.py").read_text()
    (project / "my_model.py").write_text(text.replace("def small_net", "def mlp"))
    code, out, err = call(project, "-c", "saved/T/run/config.json", "--check")
    assert code == 0 and '"name": "mlp"' in out, err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("full", "full: is not empty, it has config.json; choose another folder"),
        ("file", "file: exists and is no folder; choose another name"),
        ("link", "link: exists and is no folder; choose another name"),
        ("file/below", "file/below: cannot be written: Not a directory"),
        ("", "'': must be usable as the name of a folder, found ''"),
        ("/", "'/': must be usable as the name of a folder, found \"\""),
        ("a\nb", r"'a\nb': must be usable as the name of a folder"),
        ("n" * 300, "which takes at most 200 bytes, found 300"),
    ],
)
def test_a_project_replaces_nothing(tmp_path, name, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    code, out, err = captured(tmp_path, lambda: new.main([name]))
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"full", "file", "link"}
    assert (tmp_path / "full" / "config.json").read_text() == "mine"


def test_every_command_exists():
    for module, _ in COMMANDS.values():
        assert callable(importlib.import_module(module).main)
    page = (ROOT / "docs" / "own_project.md").read_text()
    readme = (ROOT / "rawtree" / "template" / "README.md").read_text()
    import train

    for text in (page, readme):
        for words in re.findall(r"rawtree train([^`\n#]*)", text):
            train.parse(words.split())
        assert set(re.findall(r"^rawtree (\w+)", text, re.MULTILINE)) <= COMMANDS.keys()


# Installed.


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A function that runs a program of a fresh environment in which pip has installed Rawtree from
    the URL of a git repository, without the network. The packages that it needs are those of the
    environment of this test."""
    folder = tmp_path_factory.mktemp("installed")
    repository, environment = folder / "clone", folder / "env"
    names = [*build_wheel.shipped().values(), "pyproject.toml", "README.md", "LICENSE"]
    names += ["requirements.txt", "training/requirements.txt", "training/optional.txt"]
    for name in [*names, "inference/requirements.txt"]:
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, repository / name)
    git = ["git", "-C", repository, "-c", "user.name=A", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True, timeout=60)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    program = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", program, "--disable-pip-version-check"]
    options = ["-q", "--no-index", "--no-deps", f"git+file://{repository}"]
    subprocess.run([*pip, "install", *options], check=True, timeout=300)
    (packages,) = environment.glob("lib/python3*/site-packages")
    theirs = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "theirs.pth").write_text("\n".join(theirs))
    assert not (repository / "build").exists()

    def run(place, *words, program="rawtree", code=0, **variables):
        command = [environment / "bin" / program, *map(str, words)]
        done = subprocess.run(
            command,
            cwd=place,
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | variables,
        )
        assert "Traceback" not in done.stderr and done.returncode == code, done.stdout + done.stderr
        return done.stdout, done.stderr

    return run


@pytest.mark.slow
def test_the_commands_of_the_package(installed, tmp_path):
    overview, _ = installed(tmp_path)
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", overview, re.MULTILINE)
    assert installed(tmp_path, "--help")[0] == overview
    assert "no command 'trian'; did you mean 'train'?" in installed(tmp_path, "trian", code=2)[1]
    for name in ("train", "convert", "tokenize"):
        assert installed(tmp_path, name, "--help")[0].startswith(f"usage: rawtree {name} ")
    assert "as in: rawtree train -c config.json" in installed(tmp_path, "train", code=2)[1]
    assert "gpt(" in installed(tmp_path, "train", "--list", "model")[0]


@pytest.mark.slow
def test_a_new_project_trains_within_a_minute_resumes_and_is_exported(installed, tmp_path):
    begin = time.monotonic()
    installed(tmp_path, "new", "my_project")
    place = tmp_path / "my_project"
    words = ["train", "-c", "config.json"]
    out, _ = installed(place, *words, "training.epochs=2", XDG_CACHE_HOME=str(tmp_path))
    assert "Epoch 1 [test] accuracy" in out and time.monotonic() - begin < 60
    (run,) = (place / "saved" / "my_project").iterdir()
    subprocess.run(["git", "init", "-q"], cwd=place, check=True)  # perhaps it is a stranger's
    setting = ["config", "core.fsmonitor", f"touch {tmp_path / 'mark'} #"]
    subprocess.run(["git", *setting], cwd=place, check=True)
    installed(place, *words, "--resume", run, "--override")
    assert not (tmp_path / "mark").exists()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["epoch"] == 20 and rows[-1]["test_accuracy"] > 0.95
    assert {path.name for path in (run / "user_modules").iterdir()} == {
        "my_data.py",
        "my_loss.py",
        "my_model.py",
    }
    checkpoint = run / "checkpoint-epoch_20.params"
    words = ["convert", "-w", checkpoint, "--formats", "onnx"]
    assert "pass --trust" in installed(place, *words, code=2)[1]
    out, _ = installed(place, *words, "-c", "config.json")
    assert "Written: inference/my_project" in out
    assert "4 passed" in installed(place, "-m", "pytest", "-q", program="python")[0]


UTILS = """
from rawtree.model.layers.linear import linear, linear_init
NAME = "the user's own"
"""
MODEL = """
import utils
from training import WIDTH
from rawtree.model.base import Model

assert utils.NAME == "the user's own"

def mlp(input_shape: tuple[int, ...], num_classes: int) -> Model:
    def init(key):
        return {"own": utils.linear_init(key, input_shape[0], num_classes)}, {"width": WIDTH}
    def apply(params, state, x, *, train=False, key=None):
        return utils.linear(params["own"], x), state
    return Model(init, apply)
"""
DATA = """
import numpy as np
from rawtree.data_loader.base import Arrays, Data

def points() -> Data:
    def load():
        x = np.random.default_rng(0).normal(size=(128, 4)).astype(np.float32)
        y = x[:, :3].argmax(1).astype(np.int32)
        return {"train": Arrays(x[:96], y[:96]), "test": Arrays(x[96:], y[96:])}
    example = (np.zeros(4, np.float32), np.zeros((), np.int32))
    return Data(example, {"train": 96, "test": 32}, load, num_classes=3)
"""
CONFIG = {
    "title": "Own",
    "model": "mlp",
    "data": "points",
    "loader": {"batch_size": 32},
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "optimizer": {"name": "adamw", "args": {"lr": 0.1}},
    "training": {"epochs": 2},
}


@pytest.fixture
def colliding(tmp_path):
    """A project whose files have the names of Rawtree's folders and modules in a clone."""
    files = {"utils.py": UTILS, "model.py": MODEL, "data_loader.py": DATA, "wiring.py": MARK}
    files |= {"training/__init__.py": "import jax.numpy as jnp\nWIDTH = jnp.ones(3)\n"}
    files |= {"train.py": MARK, "utils/forms.py": MARK, "inference/__init__.py": MARK}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.slow
def test_a_project_may_have_files_of_the_same_names_as_rawtree(installed, colliding, monkeypatch):
    monkeypatch.setenv("MARK", str(colliding / "mark"))
    installed(colliding, "train", "-c", "config.json")
    (run,) = (colliding / "saved" / "Own").iterdir()
    words = ["train", "-c", "config.json", "--resume", run, "training.epochs=3"]
    out, _ = installed(colliding, *words)
    assert "STARTING EPOCH 3" in out and "STARTING EPOCH 2" not in out
    other = colliding / "other"
    other.mkdir()
    own = {"utils.py", "model.py", "data_loader.py", "training"}
    assert {path.name for path in (run / "user_modules").iterdir()} == own
    shown, _ = installed(other, "train", "--evaluate", run, "--trust")
    assert "test_accuracy" in json.loads(shown)["metrics"]
    checkpoint = run / "checkpoint-epoch_3.params"
    installed(other, "convert", "-w", checkpoint, "--formats", "onnx", "--trust", "--name", "own")
    assert (other / "inference" / "own" / "own.onnx").exists()
    assert not (colliding / "mark").exists()


RECORDS = """
from data_loader import points
from rawtree.data_loader.records import write_records
for name, dataset in points().load().items():
    write_records(name, dataset)
"""
PARSE = """
import utils
from rawtree.data_loader.base import Parsed
from rawtree.data_loader.records import numpy_example

def doubled(record) -> Parsed:
    x, y = numpy_example(record)
    return 2 * x, y
"""


@pytest.mark.torture
def test_other_processes_of_the_package(installed, colliding, monkeypatch):
    """TensorFlow's, those that train together, those that prepare text, and those that read."""
    monkeypatch.setenv("MARK", str(colliding / "mark"))
    words = ["train", "-c", "config.json", "--processes", "2"]
    out, _ = installed(colliding, *words, JAX_PLATFORMS="cpu")
    assert "[1] " in out or "[0] " in out
    (run,) = (colliding / "saved" / "Own").iterdir()
    (checkpoint,) = run.glob("checkpoint-epoch_2.*")
    words = ["convert", "-c", "config.json", "-w", checkpoint]
    out, _ = installed(colliding, *words, "--out", "out", "--formats", "tflite")
    assert (colliding / "out" / "Own" / "Own.tflite").exists()
    for i in range(3):
        (colliding / f"{i}.txt").write_text("some words of a text\n" * 2000)
    words = ["tokenize", "0.txt", "1.txt", "2.txt", "--out", "tokens", "--processes", "2"]
    installed(colliding, *words)
    assert (colliding / "tokens" / "train.bin").stat().st_size > 10_000
    installed(colliding, "-c", RECORDS, program="python")
    (colliding / "parse.py").write_text(PARSE)
    files = {name: f"{name}-*.array_record" for name in ("train", "test")}
    args = files | {"num_classes": 3, "workers": 2, "parse": "doubled"}
    data = json.dumps({"name": "grain", "args": args})
    out, _ = installed(colliding, "train", "-c", "config.json", f"data={data}")
    assert "Epoch 2 [test] accuracy" in out
    assert not (colliding / "mark").exists()


@pytest.mark.slow
def test_a_strangers_folder_puts_no_module_into_the_package(installed, tmp_path, monkeypatch):
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    run = tmp_path / "run"
    run.mkdir()
    modules = ["model", "utils", "wiring", "jax", "numpy", "rawtree", "train", "mlp"]
    for name in [*modules, "argparse", "importlib", "jax_plugins"]:
        (run / f"{name}.py").write_text(MARK + "def mlp() -> Model: ...\n")
    config = CONFIG | {"data": {"name": "digits", "args": {"train_size": 64, "test_size": 32}}}
    config["preprocess"] = ["to_unit"]
    (run / "config.json").write_text(json.dumps(config))
    (run / "environment.json").write_text("{}")
    installed(run, "train", "--check")
    installed(run, "train", "--list", "model")
    _, err = installed(run, "train", "--evaluate", ".", code=2)
    (run / "environment.json").unlink()
    _, err = installed(run, "train", "--check", code=2)
    assert "is defined in" in err or "would import code" in err
    assert not (tmp_path / "mark").exists()
