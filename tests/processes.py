"""train.py in processes of its own, its caches and runs in a folder of the test's."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def start(place, *arguments, program="train.py", devices=None):
    command = [sys.executable, str(ROOT / program), *map(str, arguments)]
    environment = os.environ | {"XDG_CACHE_HOME": str(place / "cache")}
    if devices:
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def run(place, *arguments, **keywords):
    """(exit code, standard output, standard error) of a process run to its end; never a traceback."""
    process = start(place, *arguments, **keywords)
    out, err = process.communicate(timeout=300)
    assert "Traceback" not in out + err, err
    return process.returncode, out, err
