"""Rawtree as a package: `rawtree.model` where pip has installed it, and in a clone another name for
the folder `model`.

The wheel holds the folders of a clone inside this one, with `rawtree.` before every import of each
other (rawtree/build_wheel.py). So nothing of Rawtree has a name that a project may want for its own
files, and no import is redirected while the program runs. In a clone, whose folders lie beside this
one, `rawtree.model` must be the very module `model`: loaded twice, its classes would differ.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


class OtherName(MetaPathFinder, Loader):
    """Imports `rawtree.NAME` as `NAME`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, own = name.partition(".")
        is_here = package != __name__ or (HERE / own.partition(".")[0]).with_suffix(".py").exists()
        return None if is_here else ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.name.partition(".")[2])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        own = module.__spec__  # the import has put it there
        assert own
        module.__spec__ = own.loader_state


HERE = Path(__file__).resolve().parent
IS_CLONE = not (HERE / "model").is_dir()
if IS_CLONE:
    sys.meta_path.insert(0, OtherName())
