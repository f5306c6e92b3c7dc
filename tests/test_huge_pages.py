"""The second start with huge pages: the process looks unchanged, and it happens only if wanted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from training.devices.huge_pages import are_available

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import os, sys
if __name__ == "__main__":
    print("start", flush=True)
    from training.devices.huge_pages import start_again_with_them
    start_again_with_them()
    tunables = os.environ.get("GLIBC_TUNABLES")
    print(os.getpid(), sys.argv[1:], sys.flags.optimize, sys.flags.dev_mode, tunables, flush=True)
"""
OTHER_PROGRAM = """
import runpy, sys
sys.argv = ["script.py"]
runpy.run_path("script.py", run_name="__main__")
"""
needs_huge_pages = pytest.mark.skipif(not are_available(), reason="no huge pages here")


def run_script(tmp_path, *command, **environment):
    """(number of starts, last line) of the script; the process id in the line reads "same"."""
    (tmp_path / "script.py").write_text(SCRIPT)
    inherited = {
        key: value
        for key, value in os.environ.items()
        if key not in ("GLIBC_TUNABLES", "RAWTREE_HUGE_PAGES")
    }
    environment = inherited | {"PYTHONPATH": f"{ROOT}:{tmp_path}"} | environment
    process = subprocess.Popen(
        [sys.executable, *command], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    lines = process.communicate()[0].splitlines()
    assert process.returncode == 0
    return lines.count("start"), lines[-1].replace(str(process.pid), "same")


@needs_huge_pages
@pytest.mark.parametrize("script", [["script.py"], ["-m", "script"]])
def test_the_second_start_keeps_process_id_arguments_and_flags(tmp_path, script):
    starts, line = run_script(tmp_path, "-O", "-X", "dev", *script, "a b", "--c")
    assert starts == 2
    assert line == "same ['a b', '--c'] 1 True glibc.malloc.hugetlb=1"


@needs_huge_pages
def test_other_tunables_are_kept(tmp_path):
    starts, line = run_script(tmp_path, "script.py", GLIBC_TUNABLES="glibc.malloc.arena_max=4")
    assert starts == 2
    assert line == "same [] 0 False glibc.malloc.arena_max=4:glibc.malloc.hugetlb=1"


@pytest.mark.parametrize(
    "environment", [{"RAWTREE_HUGE_PAGES": "0"}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}]
)
def test_the_users_own_setting_is_respected(tmp_path, environment):
    tunables = environment.get("GLIBC_TUNABLES")
    assert run_script(tmp_path, "script.py", **environment) == (1, f"same [] 0 False {tunables}")


def test_a_program_that_runs_the_script_by_runpy_is_not_started_again(tmp_path):
    (tmp_path / "other.py").write_text(OTHER_PROGRAM)
    assert run_script(tmp_path, "other.py") == (1, "same [] 0 False None")


def test_a_command_that_trains_nothing_starts_once(tmp_path):
    assert run_script(tmp_path, "script.py", "--check") == (1, "same ['--check'] 0 False None")
