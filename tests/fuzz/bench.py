"""Run mutants in another process, which may hang, grow or die, and judge what they did.

A Bench starts that process and gives it one mutant after another. Each is run by the function that
a command calls, so that Python and JAX start only once.
"""

import faulthandler
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import NamedTuple

import train
from tests.processes import ROOT, captured

# What a command may take: seconds of all cores together, since on a busy machine the time by the
# clock says little (a command that waits is ended after five times as long), and memory.
SECONDS, BYTES = 20, 2 * 2**30
LONGEST = 20_000  # characters of a message
CODES = {0, 1, 2}


class Command(NamedTuple):
    """A command to try on a mutant."""

    name: str  # as it is printed
    call: Callable  # () -> exit code
    shows: str = ""  # what stdout has if it succeeds
    line: tuple = ()  # the arguments of train.py, if that is what is called
    quick: bool = False  # takes some 0.1 s


def of_train(name, line, shows="", quick=False):
    """The Command of some arguments of train.py."""
    return Command(name, lambda: train.main(list(line)), shows, tuple(line), quick)


class Bench:
    """A process that runs mutants."""

    def __init__(self, folder):
        self.folder, self.process = Path(folder), None

    def faults(self, kind, base, seed):
        """What is wrong with how the commands of a mutant ended, one text each; and how many of
        them ended with each exit code."""
        process = self.process = self.process or self.started()
        process.stdin.write(json.dumps([kind, base, seed]) + "\n")
        process.stdin.flush()
        faults, codes = [], []
        while True:
            line = self.line(process)
            if line is None:
                process.send_signal(signal.SIGUSR1)  # it shows where it is
                time.sleep(0.5)
                process.kill()
                process.wait()
                self.process = None
                command = (self.folder / "command").read_text()
                errors = (self.folder / "stderr").read_text(errors="replace")[-2000:]
                died = "takes too long" if process.returncode == -9 else "ended the process"
                return [*faults, f"{command}: {died} ({process.returncode})\n{errors}"], codes
            result = json.loads(line)
            if result == "done":
                return faults, codes
            codes.append(result["code"])
            faults += [result["fault"]] if result["fault"] else []

    def line(self, process):
        """The next line of the process; None if it died, or works on a command for too long."""
        used, wall = seconds_of(process.pid), time.monotonic()
        while True:
            with suppress(Empty):
                return self.lines.get(timeout=0.5)
            late = time.monotonic() - wall > 5 * SECONDS  # other programs use the machine, too
            # Twice: what a mutant needs may be made first, such as a run. `judged` counts exactly.
            if late or seconds_of(process.pid) - used > 2 * SECONDS:
                return None

    def read(self, process, lines):
        """Pass on the lines of the process, and None at its end."""
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    def started(self):
        environment = os.environ | {"XDG_CACHE_HOME": str(self.folder / "cache")}
        environment |= dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
        environment |= {"HOME": str(self.folder), "TF_CPP_MIN_LOG_LEVEL": "3"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with open(self.folder / "stderr", "w") as errors:
            command = [sys.executable, "-m", "tests.fuzz.bench", str(self.folder)]
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=errors, **pipes)
        self.lines = Queue()
        Thread(target=self.read, args=(process, self.lines), daemon=True).start()
        return process

    def close(self):
        if self.process:
            self.process.stdin.close()
            self.process.wait()


def seconds_of(pid):
    """The seconds of processor time that a process used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# In the other process.


def serve(folder):
    """Run the mutants named on stdin."""
    import jax

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1)
    limit_memory()
    for line in sys.stdin:
        kind, base, seed = json.loads(line)
        for result in results(Path(folder), kind, base, seed):
            print(json.dumps(result), file=out, flush=True)
        jax.clear_caches()  # the programs of one mutant are of no use to the next
        print(json.dumps("done"), file=out, flush=True)


def limit_memory():
    """Let this process grow by no more than BYTES, once it has started."""
    import jax

    jax.jit(lambda x: x + 1)(1.0).block_until_ready()
    held = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmData")
    )
    resource.setrlimit(resource.RLIMIT_DATA, (held + BYTES, resource.RLIM_INFINITY))


def kinds():
    """{kind: the module that makes its mutants}"""
    from tests.fuzz import checkpoints, configs, data, itself, sweeps

    named = {"configs": configs, "checkpoints": checkpoints, "data": data, "sweeps": sweeps}
    return named | {"itself": itself}


def results(folder, kind, base, seed, quick=False):
    """{"code": of a command, "fault": what is wrong with it or None} for each command of a mutant;
    of the quick ones only, if so."""
    module, work = kinds()[kind], Path(tempfile.mkdtemp(dir=folder, prefix="mutant-"))
    try:
        module.prepare(folder, work)
        for command in module.commands(base, seed, work):
            if quick and not command.quick:
                continue
            name = f"{kind} {base} {seed}: {command.name}"
            (folder / "command").write_text(name)
            code, fault = judged(command, work)
            yield {"code": code, "fault": f"{name}\n{fault}" if fault else None}
    finally:
        shutil.rmtree(work, ignore_errors=True)


def judged(command, work):
    """(the exit code of a command, what is wrong with how it ended or None)"""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak of memory
    before, start = peak(), time.process_time()
    try:
        code, out, err = captured(work, command.call)
    except BaseException:
        return None, traceback.format_exc()[-3000:]
    used = time.process_time() - start
    if used > SECONDS or peak() - before > BYTES:
        return code, f"took {used:.0f} s and {(peak() - before) / 2**20:.0f} MiB"
    return code, fault_of(command, work, code, out, err)


def fault_of(command, work, code, out, err):
    """What is wrong with how a command ended, or None."""
    if (work / "struck").exists():
        return "code of the mutant ran"
    if "Traceback" in out + err:
        return f"a traceback:\n{(out + err)[-3000:]}"
    if code not in CODES:
        return f"exit code {code}:\n{(out + err)[-1000:]}"
    if code == 0 and command.shows not in out:
        return f"says nothing of its success:\n{(out + err)[-1000:]}"
    if code and not any(": " in line for line in err.splitlines()):
        return f"names no place: {err!r}"
    if len(err) > LONGEST:
        return f"a message of {len(err)} characters: {err[:300]} ... {err[-300:]}"
    return None


def peak():
    """The peak memory of this process since it was reset."""
    from utils import peak_of_process

    return peak_of_process()


if __name__ == "__main__":
    serve(sys.argv[1])
