"""The user's own modules: in which folders dotted names find them, which files were imported, and
which of them a module of Rawtree hides."""

import importlib
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIES = "user_modules"  # the folder of a run that holds the user's modules as they were
TOOLKIT = ("benchmarks", "data_loader", "file_io", "huge_pages", "inference", "model", "ranges")
TOOLKIT += ("search", "sweep", "tests", "train", "training", "utils", "wiring")


def look_in(folder):
    """The folders from which the dotted names of a trusted config may import: this one and the
    working folder, after the modules that a run has copied. None of them is on sys.path yet."""
    copies, folders = Path(folder).resolve() / COPIES, [Path(folder).resolve(), Path.cwd()]
    return [copies, *folders] if copies.is_dir() else folders


def import_from(folders, name):
    """Import the module of a trusted config's dotted name, and what it needs.

    A folder goes on sys.path only where it holds such a module. Otherwise any package that a
    library imports if it is installed would be imported from there: the folder may be a stranger's.
    """
    put_on_path([folder for folder in folders if Path(folder).name == COPIES], name)
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not put_on_path(folders, error.name):
                raise


def put_on_path(folders, name):
    """Add the first of the folders that holds a module and is not on sys.path; whether one was."""
    for folder in map(str, folders):
        if folder not in sys.path and PathFinder.find_spec(name.partition(".")[0], [folder]):
            import jax

            jax.devices()  # JAX has imported its plugins now, and does not find any in the folder
            sys.path.insert(0 if Path(folder).name == COPIES else len(sys.path), folder)
            return True
    return False


def own_files(folders):
    """{path below its folder: file} of the user's modules that were imported from these folders. Of
    a package, all files are the user's, since some may be imported later."""
    found = {}
    for name, module in list(sys.modules.items()):
        top, file = name.partition(".")[0], getattr(module, "__file__", None) or ""
        for folder in map(Path, folders):
            if file.endswith(".py") and is_own(top, folder) and Path(file).is_relative_to(folder):
                relative = Path(file).relative_to(folder)
                if relative.parts[0] in (top, f"{top}.py"):
                    found.setdefault(relative, Path(file))
                    found |= {path: folder / path for path in files_of_package(folder, top)}
                    break
    return found


def is_own(top, folder):
    """Whether a module of this name in a folder is the user's."""
    return top not in TOOLKIT or Path(folder).resolve() != ROOT


def files_of_package(folder, top):
    """The paths of all modules of a package below its folder; none without an __init__.py."""
    if not (folder / top / "__init__.py").is_file():
        return
    for parent, inner, files in os.walk(folder / top):
        inner[:] = [name for name in inner if not name.startswith((".", "__pycache__"))]
        for name in files:
            if name.endswith(".py"):
                yield (Path(parent) / name).relative_to(folder)


def clash(name, folders):
    """What to do about a module of the user's that has the name of one of Rawtree's, which is the
    one that is imported; "" if there is none."""
    top = str(name).partition(".")[0]
    for folder in folders if top in TOOLKIT else ():
        for path in (Path(folder) / top, Path(folder) / f"{top}.py"):
            if path.exists() and is_own(top, folder):
                theirs = ROOT / top if (ROOT / top).is_dir() else ROOT / f"{top}.py"
                new = path.with_stem(f"my_{top}").name
                return f"{path} is hidden by Rawtree's own {theirs}; rename it, as in {new}"
    return ""
