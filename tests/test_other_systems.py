"""Windows and macOS: the project's code runs without what these systems lack. The systems
themselves are imitated, see other_system.py."""

import subprocess
import sys

import pytest

from tests.processes import ROOT
from utils import relative_path


@pytest.mark.slow
@pytest.mark.parametrize("system", ["windows", pytest.param("macos", marks=pytest.mark.torture)])
def test_all_commands_work_without_what_another_system_lacks(system, tmp_path):
    command = [sys.executable, ROOT / "tests" / "other_system.py", system, tmp_path]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("All of it works\n")
    assert "Traceback" not in done.stderr


def test_a_path_on_another_drive_is_named_in_full(monkeypatch):
    def other_drive(path, start):
        raise ValueError("path is on mount 'D:', start on mount 'C:'")

    monkeypatch.setattr("os.path.relpath", other_drive)
    assert relative_path(r"D:\mine\own.py") == r"D:\mine\own.py"
