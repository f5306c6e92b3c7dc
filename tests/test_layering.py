"""What each layer may import, read from the source, and what must not be imported at startup."""

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OWN = {
    "utils",
    "wiring",
    "model",
    "data_loader",
    "training",
    "inference",
    "search",
    "train",
    "rawtree",
    "sweep",
}

# What each layer may import from this project, and whether its files may import jax at the top.
ALLOWED = {
    "utils": ({"utils"}, False),  # with utils/files.py and utils/forms.py
    "wiring": (
        {"utils", "wiring", "training.kinds", "training.base", "training.options"}
        | {"training.devices.options", "model.base", "data_loader.base"},
        False,
    ),
    "model": ({"utils", "model"}, True),
    "data_loader": ({"utils", "data_loader"}, False),
    "training": (
        {"utils", "training", "data_loader.base", "data_loader.loader", "data_loader.nest"}
        | {"data_loader.tokenizers", "model.base"}
        # sample_text lets a model write; an objective trains and samples by the same formulas
        | {"model.generate", "model.diffusion"},
        True,
    ),
    "search": ({"utils", "wiring", "training", "search"}, False),
    "inference": (
        {
            "utils",
            "wiring",
            "inference",
            "model.base",
            "model.generate",
            "model.layers",
            "model.sampling",
            "data_loader",
        }
        | {"training.checkpoint", "training.objective", "training.preprocess"},
        True,
    ),
    # The commands, and the files of a new project, which import as any user's do.
    "rawtree": ({"rawtree"}, True),
}
# The rooms of training/, and the rooms below them that each may import besides the spine.
ROOMS = {
    "augment": set(),
    "objectives": set(),
    "devices": set(),
    "watching": {"devices"},
    "checkpoint": {"devices", "watching"},
    "report": {"watching"},
    "commands": {"devices", "watching", "checkpoint", "report"},
}
ASSEMBLER = "fit"  # the one file of the spine that may import rooms, since it puts a run together
HEAVY = {"optax", "flax", "tensorflow", "tf2onnx", "onnx", "onnxruntime", "ai_edge_litert", "wandb"}
HEAVY |= {"tensorboard", "matplotlib", "orbax", "PIL", "tqdm", "safetensors", "google"}
HEAVY |= {"array_record", "crc32c", "tokenizers", "equinox", "haiku", "optuna", "ray"}
HEAVY |= {"mlflow", "trackio", "pyarrow"}
# Folders whose files may import these at the top, since the files are only imported when needed.
LAZY = {"tf_ops": {"tensorflow"}}


class WithoutTypes(ast.NodeTransformer):
    """Leaves out `if TYPE_CHECKING:`, whose imports are for annotations and never run."""

    def visit_If(self, node):
        is_for_types = getattr(node.test, "id", None) == "TYPE_CHECKING"
        return node.orelse if is_for_types else self.generic_visit(node)


def imports(path, top_only=False):
    """The dotted names that a file imports."""
    tree = WithoutTypes().visit(ast.parse(path.read_text()))
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from training import loss` imports training.loss, but
            # `from training.base import Loss` imports training.base.
            is_package = (ROOT / node.module.replace(".", "/")).is_dir()
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names if is_package else [node.module]


def files(layer):
    exported = {path.parent for path in (ROOT / layer).glob("*/verification.json")}
    return [p for p in sorted((ROOT / layer).rglob("*.py")) if not exported & set(p.parents)]


@pytest.mark.parametrize("layer", ALLOWED)
def test_layers_import_only_the_layers_below_them(layer):
    allowed, jax_at_top = ALLOWED[layer]
    for path in files(layer):
        # wiring imports upwards, but only inside functions.
        for name in imports(path, top_only=layer == "wiring"):
            is_allowed = any(name == a or name.startswith(f"{a}.") for a in allowed)
            assert is_allowed or name.split(".")[0] not in OWN, f"{path} imports {name}"
        top = {name.split(".")[0] for name in imports(path, top_only=True)}
        assert jax_at_top or "jax" not in top, f"{path} imports jax at its top"
        heavy = top & HEAVY - LAZY.get(path.parent.name, set())
        assert not heavy, f"{path} imports {heavy} at its top; import inside the function instead"


def rooms_of(path):
    """The rooms of training/ that a file imports, and "fit" if it imports the assembler."""
    names = {name.split(".")[1] for name in imports(path) if name.startswith("training.")}
    return names & {*ROOMS, ASSEMBLER}


def test_only_commands_and_what_users_import_stand_at_the_root():
    assert {path.name for path in ROOT.glob("*.py")} == {"train.py", "sweep.py"}


def test_every_folder_of_training_is_a_room():
    folders = {path.parent.name for path in (ROOT / "training").glob("*/*.py")}
    assert folders == set(ROOMS)


def test_the_spine_imports_no_room():
    spine = [path for path in (ROOT / "training").glob("*.py") if path.stem != ASSEMBLER]
    assert len(spine) < 23
    for path in spine:
        assert not rooms_of(path), path


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_below_it(room):
    allowed = ROOMS[room] | {room} | ({ASSEMBLER} if room == "commands" else set())
    for path in (ROOT / "training" / room).rglob("*.py"):
        assert rooms_of(path) <= allowed, f"{path} imports {rooms_of(path) - allowed}"


def stores(tree):
    """(object, attribute, line) of every assignment to an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = node.value
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            yield getattr(owner, "id", None), node.attr, node.lineno


@pytest.mark.slow
def test_no_function_of_training_writes_a_field_of_an_object_of_another_module():
    """Functions return values, and the owner assigns them. The memory of a callback is the protocol
    by which a resumed run gives it back."""
    for path in sorted((ROOT / "training").rglob("*.py")):
        tree = ast.parse(path.read_text())
        own = {attribute for name, attribute, _ in stores(tree) if name == "self"} | {"memory"}
        fields = [node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
        own |= {field.id for field in fields if isinstance(field, ast.Name)}
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
            given = {
                argument.arg for argument in ast.walk(function.args) if hasattr(argument, "arg")
            }
            for name, attribute, line in stores(function):
                where = f"{path}:{line} writes {name}.{attribute}"
                assert name not in given - {"self"} or attribute in own, where


@pytest.mark.slow
def test_files_that_import_heavy_packages_at_their_top_are_imported_inside_functions():
    paths = [path for layer in ALLOWED for path in files(layer) if path.parent.name not in LAZY]
    for path in paths:
        for name in imports(path, top_only=True):
            assert not set(name.split(".")) & LAZY.keys(), path


def test_data_loading_never_imports_jax():
    for path in files("data_loader"):
        assert not any(name.split(".")[0] == "jax" for name in imports(path)), path


@pytest.mark.slow
def test_checking_a_config_imports_no_heavy_package():
    code = "import sys, train; train.main(['--check'])\n"
    code += "print('\\n'.join(sorted(sys.modules)), file=sys.stderr)"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    loaded = {name.split(".")[0] for name in run.stderr.splitlines()}
    assert "jax" in loaded
    assert not loaded & HEAVY, loaded & HEAVY


# Packages.


def packages_of(file):
    """{package: its version or ""} of a requirements file, without the files that it includes."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    named = [re.match(r"([A-Za-z][\w.-]*)(?:==([\w.]+))?(?:;|$)", line) for line in lines]
    return {normalized(match[1]): match[2] or "" for match in named if match}


def normalized(package):
    return re.sub(r"[-_.]+", "-", package).lower()


def packages_imported(paths, top_only=False):
    """(file, the packages that have a module which it imports) of all that are installed."""
    providers = packages_distributions()
    known = {*OWN, *sys.stdlib_module_names, "tests", "benchmarks"}
    for path in paths:
        modules = {name.split(".")[0] for name in imports(path, top_only)} - known
        for module in modules & providers.keys():
            yield path, {normalized(name) for name in providers[module]}


@pytest.mark.slow
def test_requirements_has_every_package_that_anything_imports():
    required = packages_of("requirements.txt")
    assert all(required.values()), "a version is missing"
    required |= {"zstandard": ""}  # JAX uses it
    users = {
        "equinox": "",
        "dm-haiku": "",
        "optuna": "",
        "ray": "",
    }  # the user's own libraries: model/adapters.py
    # Used where they are installed; Trackio needs an older Pillow than the one above.
    required |= dict.fromkeys(("mlflow", "mlflow-skinny", "trackio", "pyarrow", "datasets"), "")
    paths = [path for layer in ALLOWED for path in files(layer)]
    for path, packages in packages_imported(paths):
        assert packages & (required | users).keys(), f"{path} imports {packages}"
    # The last two are used where they are installed; they need the same build of torch.
    required |= packages_of("tests/references.txt") | {"timm": "", "torchvision": ""}
    for path, packages in packages_imported((ROOT / "tests").rglob("*.py")):
        assert packages & required.keys(), f"{path} imports {packages}"


@pytest.mark.parametrize(
    "file", ["training/requirements.txt", "training/optional.txt", "inference/requirements.txt"]
)
def test_a_smaller_set_of_packages_has_the_versions_of_the_whole_one(file):
    packages = packages_of(file)
    assert packages.keys() <= packages_of("requirements.txt").keys()
    assert not any(packages.values()), "versions are in ../requirements.txt alone"
    assert "-c ../requirements.txt" in (ROOT / file).read_text(encoding="utf-8").splitlines()


def test_training_starts_with_the_packages_of_training_alone():
    paths = [path for layer in ALLOWED if layer != "inference" for path in files(layer)]
    for path, packages in packages_imported([*paths, ROOT / "train.py"], top_only=True):
        assert packages & packages_of("training/requirements.txt").keys(), f"{path}: {packages}"


# What users import: tests with the mark `contract` import nothing else of the project.
USED = ("train", "sweep", "utils", "model", "data_loader", "training.options")
USED += ("training.fit", "training.optimizers", "training.transforms", "training.schedules")
USED += ("training.loss", "training.metrics", "training.preprocess", "training.augment")
USED += ("training.objective", "training.objectives", "training.watching.callbacks")
USED += ("training.watching.trackers", "inference.load", "inference.functions")


def test_tests_with_the_mark_contract_import_only_what_users_import():
    marked = [p for p in (ROOT / "tests").rglob("test_*.py") if "mark.contract" in p.read_text()]
    marked.remove(Path(__file__))
    assert len(marked) > 30
    for path in marked:
        for name in imports(path):
            is_own = name.split(".")[0] in OWN
            is_used = any(name == used or name.startswith(f"{used}.") for used in USED)
            assert is_used or not is_own, f"{path} imports {name}"
