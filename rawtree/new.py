"""rawtree new my_project: a folder with a config and parts of your own, which trains at once."""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from rawtree.utils import PACKAGE, UserError, quoted, run_command
from rawtree.utils.forms import local_path
from rawtree.wiring.config import no_folder_name

TEMPLATE = Path(__file__).resolve().with_name("template")
CLONE = TEMPLATE.parents[1]
NAME = "my_project"  # what the files of the template call the project
MAY_BE_THERE = {".git", ".venv"}  # one may have made these first


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; a user's mistake ends in one message and an exit code."""
    parser = argparse.ArgumentParser(description="Start a project of your own in a new folder.")
    parser.add_argument("folder", help="the folder to make; its name is the title of the config")
    return run_command(lambda: write(parser.parse_args(argv).folder))


def write(named: str) -> None:
    """Write the files of the template, and print what to do next."""
    folder = local_path("folder", named) if named else Path()
    check(named, folder)
    name = folder.resolve().name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(path for path in TEMPLATE.iterdir() if path.is_file()):
            called = json.dumps(name)[1:-1] if path.suffix == ".json" else name
            text = path.read_text(encoding="utf-8").replace(NAME, called)
            text = text if PACKAGE or path.name != "README.md" else for_clone(text)
            (folder / path.name).write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from error
    from rawtree.wiring.schema import write as write_schema

    write_schema(folder)
    train = "rawtree train" if PACKAGE else f"python {quoted(CLONE / 'train.py')}"
    print(f"Written: {folder}. Train it, and read its README.md:")
    print(f"  cd {quoted(folder)} && {train} -c config.json")


def for_clone(readme: str) -> str:
    """The README of a project that uses a clone, where no command `rawtree` is installed."""
    path = quoted(CLONE)
    readme = re.sub(r"(^|`)rawtree (?=\w)", r"\1python -m rawtree ", readme, flags=re.MULTILINE)
    needed = f"-r {quoted(CLONE / 'requirements.txt')}"
    readme = readme.replace('"rawtree[export]"', needed)
    readme = readme.replace("  # the tests", f"{'':12}# the tests")  # below the other comments
    names = "Your files can have any names, `model.py` and\n`utils.py` too."
    fewer = "None of your files may be named\nas a folder or module of Rawtree, as `model.py`."
    readme = readme.replace(names, fewer)
    first = "This project uses a clone of Rawtree. Say in each terminal where that is:"
    lines = ["## Commands", "", first, "", "```", f"export PYTHONPATH={path}", "```"]
    return readme.replace("## Commands", "\n".join(lines))


def check(named: str, folder: Path) -> None:
    """Raise if the folder cannot become a project."""
    if why := no_folder_name(folder.resolve().name) if named else "found ''":
        raise UserError(f"{named!r}: must be usable as the name of a folder, {why}")
    if folder.is_dir() and not folder.is_symlink():
        if found := sorted({path.name for path in folder.iterdir()} - MAY_BE_THERE):
            raise UserError(f"{folder}: is not empty, it has {found[0]}; choose another folder")
    elif folder.exists() or folder.is_symlink():
        raise UserError(f"{folder}: exists and is no folder; choose another name")
