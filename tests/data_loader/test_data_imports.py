"""data_loader imports neither jax nor slow packages; factories are found by their annotation."""

import importlib
import inspect
import pkgutil
import subprocess
import sys

import numpy as np
import pytest

import data_loader
from data_loader.base import Arrays, Data
from utils import UserError

MODULES = [f"data_loader.{module.name}" for module in pkgutil.iter_modules(data_loader.__path__)]


def test_importing_every_module_imports_neither_jax_nor_optional_packages():
    heavy = ("jax", "tqdm", "PIL", "torch", "google", "array_record", "tokenizers", "datasets")
    code = f"import sys, {', '.join(MODULES)}; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "[]", result.stderr


def test_the_parts_are_the_functions_annotated_to_return_data():
    parts = set()
    for name in MODULES:
        module = importlib.import_module(name)
        for function in vars(module).values():
            if (
                inspect.isfunction(function)
                and function.__module__ == name
                and function.__annotations__.get("return") is Data
            ):
                parts.add(function.__name__)
                arguments = inspect.signature(function).parameters.values()
                assert all(a.annotation is not a.empty for a in arguments), name
    drawn = {"digits", "pen_digits", "stories"}
    files = {"arrays", "csv", "folder", "grain", "huggingface", "parquet", "text", "tokens"}
    files.add("webdataset")
    assert parts == {"mnist", "fashion_mnist", "cifar10"} | drawn | files


def test_arrays_of_different_lengths_are_refused():
    with pytest.raises(UserError, match=r"here: every array .* lengths \{'x': 3, 'y': 2\}"):
        Arrays(np.zeros(3), np.zeros(2), "here")
    assert len(Arrays({"a": np.zeros(3), "b": np.zeros((3, 2))}, np.zeros(3))) == 3
