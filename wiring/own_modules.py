"""The user's own modules: in which folders dotted names find them, which files were imported, and
which of them a module of Rawtree hides."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIES = "user_modules"  # the folder of a run that holds the user's modules as they were
TOOLKIT = ("benchmarks", "data_loader", "huge_pages", "inference", "model", "tests", "train")
TOOLKIT += ("ranges", "training", "utils", "wiring")


def look_in(folder):
    """Let dotted names import from a folder, and from the working folder; the modules that a run
    has copied come before all others. Return the folders."""
    copies, folders = Path(folder).resolve() / COPIES, [Path(folder).resolve(), Path.cwd()]
    if copies.is_dir():
        folders = [copies, *folders]
        sys.path[:0] = [str(copies)] if str(copies) not in sys.path else []
    sys.path += [str(each) for each in folders if str(each) not in sys.path]
    return folders


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
