"""The second start that gives a process huge pages: the same process by all that one can see, and only where it is wanted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from huge_pages import are_of_use

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import os, sys
if __name__ == "__main__":
    print("start", flush=True)
    from huge_pages import start_again_with_them
    start_again_with_them()
    print(os.getpid(), sys.argv[1:], sys.flags.optimize, sys.flags.dev_mode, os.environ.get("GLIBC_TUNABLES"), flush=True)
"""
ON = pytest.mark.skipif(not are_of_use(), reason="no huge pages here")


def started(tmp_path, *command, **environment):
    """(how often it started, what it told) of the script."""
    (tmp_path / "script.py").write_text(SCRIPT)
    wanted = {
        key: value
        for key, value in os.environ.items()
        if key not in ("GLIBC_TUNABLES", "RAWTREE_HUGE_PAGES")
    }
    environment = wanted | {"PYTHONPATH": f"{ROOT}:{tmp_path}"} | environment
    process = subprocess.Popen(
        [sys.executable, *command], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    lines = process.communicate()[0].splitlines()
    assert process.returncode == 0
    return lines.count("start"), lines[-1].replace(str(process.pid), "same")


@ON
@pytest.mark.parametrize("named", [["script.py"], ["-m", "script"]])
def test_it_starts_once_more_as_it_was(tmp_path, named):
    told = started(tmp_path, "-O", "-X", "dev", *named, "a b", "--c")
    assert told == (2, "same ['a b', '--c'] 1 True glibc.malloc.hugetlb=1")


@ON
def test_other_tunables_stay(tmp_path):
    told = started(tmp_path, "script.py", GLIBC_TUNABLES="glibc.malloc.arena_max=4")
    assert told == (2, "same [] 0 False glibc.malloc.arena_max=4:glibc.malloc.hugetlb=1")


@pytest.mark.parametrize(
    "environment", [{"RAWTREE_HUGE_PAGES": "0"}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}]
)
def test_who_has_decided_is_left_alone(tmp_path, environment):
    assert started(tmp_path, "script.py", **environment) == (
        1,
        f"same [] 0 False {environment.get('GLIBC_TUNABLES')}",
    )


def test_another_program_that_runs_the_script_is_not_started_again(tmp_path):
    (tmp_path / "other.py").write_text(
        "import runpy, sys\nsys.argv = ['script.py']\nrunpy.run_path('script.py', run_name='__main__')"
    )
    assert started(tmp_path, "other.py") == (1, "same [] 0 False None")


def test_what_trains_nothing_starts_once(tmp_path):
    assert started(tmp_path, "script.py", "--check") == (1, "same ['--check'] 0 False None")
