"""train.py in processes of its own, its caches and runs in a folder of the test's."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from training.devices.launcher import free_port

ROOT = Path(__file__).resolve().parents[1]


def start(place, *arguments, program="train.py", devices=None):
    command = [sys.executable, str(ROOT / program), *map(str, arguments)]
    environment = os.environ | {"XDG_CACHE_HOME": str(place / "cache")}
    if devices:
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        command,
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def run(place, *arguments, **keywords):
    """(exit code, standard output, standard error) of a process run to its end; never a traceback."""
    process = start(place, *arguments, **keywords)
    out, err = process.communicate(timeout=300)
    assert "Traceback" not in out + err, err
    return process.returncode, out, err


def start_all(program, *arguments, processes=2, devices=1, by_config=False, **environment):
    """Several Pythons that run the same program, with the variables by which they find each other, or the keys of a config."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    environment |= {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [
        sys.executable,
        *(["-c", program] if "\n" in program else [program]),
        *map(str, arguments),
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started, coordinator = [], f"127.0.0.1:{free_port()}"
    for i in range(processes):
        keys = {"coordinator": coordinator, "num_processes": processes, "process_id": i}
        variables = {
            "JAX_COORDINATOR_ADDRESS": coordinator,
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(i),
        }
        own = (
            {"args": [*command, f"distributed={json.dumps(keys)}"]}
            if by_config
            else {"args": command}
        )
        own["env"] = environment | ({} if by_config else variables)
        started.append(subprocess.Popen(**own, cwd=environment.get("PLACE", ROOT), **pipes))
    return started


def marked(mark):
    """The processes that have this text in their environment, as they inherited it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is not ours
            found += [path.parent.name] if mark.encode() in path.read_bytes() else []
    return found


def finished(started, timeout=120, code=0):
    """What each wrote to stdout and stderr, once all have ended, with this exit code unless it is None; none outlives it."""
    try:
        said = [process.communicate(timeout=timeout) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (out, err) in zip(started, said, strict=True):
        assert code is None or process.returncode == code, out + err
    return said
