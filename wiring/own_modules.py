"""The user's own modules: in which folders dotted names are looked up, which files were imported,
and which of them a module of Rawtree hides."""

import ast
import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from utils import PACKAGE, UserError
from utils.files import read_file

ROOT = Path(__file__).resolve().parents[1]
COPIES = "user_modules"  # the folder of a run that holds copies of the user's modules
TOOLKIT = ("benchmarks", "data_loader", "inference", "model", "rawtree", "search", "sweep")
TOOLKIT += ("tests", "train", "training", "utils", "wiring")
TOOLKIT = ("rawtree",) if PACKAGE else TOOLKIT
# Files that a run or an export writes. The plain names of its config are Rawtree's, and the names
# of the user's own parts were resolved to dotted names.
WRITTEN = ("environment.json", "verification.json")
UNREADABLE = "?"  # the return annotation of a function in a file that is not valid Python


def look_in(folder: str | Path) -> list[Path]:
    """The folders from which the dotted names of a trusted config may import: this one and the
    working folder, after the modules that a run has copied. None of them is on sys.path yet."""
    copies, folders = Path(folder).resolve() / COPIES, [Path(folder).resolve(), Path.cwd()]
    return [copies, *folders] if copies.is_dir() else folders


def import_from(folders: Sequence[Path], name: str) -> ModuleType:
    """Import the module of a trusted config's dotted name, and the modules that it needs.

    A folder is added to sys.path only if it holds such a module. Otherwise any optional package
    that a library tries to import could be imported from a folder of another user.
    """
    put_on_path([folder for folder in folders if Path(folder).name == COPIES], name)
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not put_on_path(folders, error.name):
                raise


def put_on_path(folders: Sequence[Path], name: str) -> bool:
    """Add to sys.path the first of the folders that holds a module and is not on it. Return whether
    one was added."""
    for folder in map(str, folders):
        if folder not in sys.path and PathFinder.find_spec(name.partition(".")[0], [folder]):
            import jax

            jax.devices()  # JAX has imported its plugins now, and does not find any in the folder
            sys.path.insert(0 if Path(folder).name == COPIES else len(sys.path), folder)
            return True
    return False


def own_parts(annotation: str, folders: Sequence[Path]) -> tuple[dict[str, str], dict[str, Path]]:
    """({name: dotted name} of the functions with this return annotation in the user's own files,
    {name: file} of all other functions there).

    The files are beside a config, and in the working directory if the config is below it. They are
    read, not imported, since importing all of them would run scripts that the config does not use.
    """
    found, others = {}, {}
    for path in project_files(folders):
        for name, returned in functions_in(path, path.stat().st_mtime_ns).items():
            if returned not in (annotation, UNREADABLE):
                others.setdefault(name, path)
            elif name in found:
                both = f"{found[name].partition('.')[0]}.py and in {path.name}"
                raise UserError(f"{name!r} is defined in {both}; rename one of them")
            else:
                found[name] = f"{path.stem}.{name}"
    return found, others


def project_files(folders: Sequence[Path]) -> Iterator[Path]:
    """The files in which the plain names of a config are looked up before Rawtree's."""
    folders = [folder for folder in folders if folder.name != COPIES]
    if not folders or any((folders[0] / name).exists() for name in WRITTEN):
        return
    for folder in dict.fromkeys(folders):
        if folders[0].is_relative_to(folder) and folder != ROOT:
            files = (p for p in sorted(folder.glob("*.py")) if p.is_file())  # not a broken link
            yield from (p for p in files if p.stem.isidentifier())


@cache
def functions_in(path: Path, _changed: int) -> dict[str, str]:
    """{name: the last word of its return annotation} of the public functions of a file."""
    try:
        text = read_file(path).decode(errors="replace")
    except OSError:
        return {}
    try:
        defined = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        found = {node.name: ast.unparse(node.returns or ast.Constant("")) for node in defined}
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested deeply
        found = dict.fromkeys(re.findall(r"^def (\w+)", text, re.MULTILINE), UNREADABLE)
    words = {name: returned.strip("'\"").split(".")[-1] for name, returned in found.items()}
    return {name: word for name, word in words.items() if not name.startswith("_")}


def hidden_file(module: ModuleType, folders: Sequence[Path]) -> str:
    """The hint for an imported module that hides a user's file of the same name; "" if none."""
    top, file = module.__name__.partition(".")[0], getattr(module, "__file__", None)
    by = file or f"the folder {next(iter(getattr(module, '__path__', [])), top)}"
    for path in [Path(folder) / f"{top}.py" for folder in folders]:
        if path.is_file() and not (file and Path(file).is_relative_to(path.parent)):
            return f"; {path} is hidden by {by}; rename it, as in my_{top}.py"
    return ""


def own_files(folders: Sequence[Path]) -> dict[Path, Path]:
    """{path below its folder: file} of the user's modules that were imported from these folders,
    and of all files of their packages, since some may be imported later."""
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


def is_own(top: str, folder: str | Path) -> bool:
    """Whether a module of this name in a folder is the user's."""
    return top not in TOOLKIT or Path(folder).resolve() != ROOT


def files_of_package(folder: Path, top: str) -> Iterator[Path]:
    """The paths of all modules of a package below its folder; none without an __init__.py."""
    if not (folder / top / "__init__.py").is_file():
        return
    for parent, inner, files in os.walk(folder / top):
        inner[:] = [name for name in inner if not name.startswith((".", "__pycache__"))]
        for name in files:
            if name.endswith(".py"):
                yield (Path(parent) / name).relative_to(folder)


def clash(name: str | None, folders: Sequence[Path]) -> str:
    """The hint for a user's module with the name of one of Rawtree's, which is imported instead; ""
    if there is none."""
    top = str(name).partition(".")[0]
    for folder in folders if top in TOOLKIT else ():
        for path in (Path(folder) / top, Path(folder) / f"{top}.py"):
            if path.exists() and is_own(top, folder):
                theirs = ROOT / top if (ROOT / top).is_dir() else ROOT / f"{top}.py"
                theirs = ROOT if PACKAGE else theirs
                new = path.with_stem(f"my_{top}").name
                return f"{path} is hidden by Rawtree's own {theirs}; rename it, as in {new}"
    return ""
