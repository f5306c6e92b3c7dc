"""Start train.py and other programs as processes, with caches and runs in a folder of the test."""

import gc
import io
import json
import logging
import logging.config
import os
import signal
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from unittest import mock

import train
from training.devices.launcher import free_port
from training.devices.signals import handled

ROOT = Path(__file__).resolve().parents[1]
SMALL = {  # a config of a run of ten steps in an epoch
    "model": {"name": "mlp", "args": {"dims": [16]}},
    "data": {"name": "digits", "args": {"train_size": 640, "test_size": 100}},
    "loader": {"batch_size": 64},
    "preprocess": ["to_unit"],
    "loss": "cross_entropy",
    "optimizer": {"name": "adamw", "args": {"lr": 0.01}},
}
TWO_EPOCHS = SMALL | {
    "title": "Small",
    "metrics": ["accuracy"],
    "training": {"epochs": 2},
    "checkpoint": {"monitor": "test_loss"},
    "logging": {"every_steps": 5},
}


def start(folder, *arguments, program="train.py", devices=None):
    command = [sys.executable, str(ROOT / program), *map(str, arguments)]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    if devices:
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, **pipes, text=True, env=environment)


def run(folder, *arguments, **keywords):
    """(exit code, stdout, stderr) of a process run to its end, which must not print a traceback."""
    process = start(folder, *arguments, **keywords)
    out, err = process.communicate(timeout=300)
    assert "Traceback" not in out + err, err
    return process.returncode, out, err


def call(folder, *arguments):
    """The same as `run`, by a call of train.main in this process. That saves the start of Python
    and JAX where a command ends before it opens a run, as for a mistake in the config."""
    code, out, err = captured(folder, lambda: train.main([str(text) for text in arguments]))
    assert "Traceback" not in out + err, err
    return code, out, err


def captured(folder, main):
    """(exit code, stdout, stderr) of a function of a command line, called in a folder; afterwards
    this process is as before."""
    out, err, modules, path = io.StringIO(), io.StringIO(), set(sys.modules), sys.path.copy()
    handlers, threshold = {n: signal.getsignal(n) for n in handled()}, gc.get_threshold()
    logger = logging.getLogger("main")
    logging_before = logger.handlers.copy(), logger.level, logger.propagate
    try:
        # dictConfig would close the handlers of other libraries, which write into pytest's streams.
        unclosed = mock.patch("logging.config._clearExistingHandlers")
        with unclosed, chdir(folder), redirect_stdout(out), redirect_stderr(err):
            code = main()
    except SystemExit as end:  # of argparse
        code = end.code
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if str(folder) in (getattr(sys.modules[name], "__file__", None) or ""):
                del sys.modules[name]  # another test may have a module of this name
        for number, handler in handlers.items():
            signal.signal(number, handler)
        gc.set_threshold(*threshold)
        logger.handlers, logger.level, logger.propagate = logging_before
    return code, out.getvalue(), err.getvalue()


def wait_for_line(process, text):
    """Read the output of a process up to the first line that contains this text."""
    for line in process.stdout:
        if text in line:
            return


def start_all(program, *arguments, processes=2, devices=1, by_config=False, **environment):
    """Several Python processes that run the same program and find each other by environment
    variables, or with `by_config` by the keys of a config."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    environment |= {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, *(["-c", program] if "\n" in program else [program])]
    command += map(str, arguments)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started, coordinator = [], f"127.0.0.1:{free_port()}"
    for i in range(processes):
        keys = {"coordinator": coordinator, "num_processes": processes, "process_id": i}
        own_command = [*command, f"distributed={json.dumps(keys)}"] if by_config else command
        variables = {
            "JAX_COORDINATOR_ADDRESS": coordinator,
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(i),
        }
        own_environment = environment | ({} if by_config else variables)
        folder = environment.get("PLACE", ROOT)
        started.append(subprocess.Popen(own_command, env=own_environment, cwd=folder, **pipes))
    return started


def marked(mark):
    """The ids of the processes that were started with this text in their environment."""
    ids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or belongs to another user
            ids += [path.parent.name] if mark.encode() in path.read_bytes() else []
    return ids


def finished(started, timeout=120, code=0):
    """The (stdout, stderr) of each process after all have ended, with this exit code unless it is
    None; kills what still runs after the timeout."""
    try:
        outputs = [process.communicate(timeout=timeout) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (out, err) in zip(started, outputs, strict=True):
        assert code is None or process.returncode == code, out + err
    return outputs
