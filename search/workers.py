"""Run the trials of a sweep in processes, so many at once; a signal stops them to be resumed."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from signal import Signals
from typing import Any, NamedTuple

from search.trial import MARK
from training.devices.launcher import Interrupts, end_with_parent, share_of_gpus
from utils import DONE, FAILED, PACKAGE, STOPPED, WINDOWS, cut, first_line
from wiring.config import show


class Worker(NamedTuple):
    """A process that runs a trial."""

    process: Any
    trial: Any
    until: int | None
    errors: Any  # the file that its stderr goes to
    slot: int


def run_all(sweep, command, environment, lock):
    """Run what is left of a sweep; the exit code. `command` is that of a trial, without its number.
    The processes inherit `lock`."""
    workers, processes, slots = [], [], set(range(sweep.spec.workers))
    interrupts = Interrupts(processes)
    try:
        while True:
            trials, until = sweep.due()
            busy = [worker.trial for worker in workers]
            idle = [trial for trial in trials if trial not in busy]
            free = sorted(slots - {worker.slot for worker in workers})
            if free and not interrupts.count:
                if idle:
                    worker = started(sweep, idle[0], until, free[0], command, environment, lock)
                    workers.append(worker)
                    processes.append(worker.process)
                    if interrupts.count:  # it came while the process started
                        worker.process.terminate()
                    continue
                if sweep.may_propose():
                    sweep.add_proposed()
                    continue
            if not workers:
                break
            for worker in [worker for worker in workers if worker.process.poll() is not None]:
                workers.remove(worker)
                processes.remove(worker.process)
                settle(sweep, worker, interrupts.count)
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
    if interrupts.count:
        return STOPPED
    return FAILED if all(trial.failed is not None for trial in sweep.trials) else DONE


def started(sweep, trial, until, slot, command, environment, lock):
    """The Worker of a trial, in a session of its own, so that Ctrl-C reaches it only through us."""
    words = [*command, str(trial.number), str(until or 0)]
    shares = share_of_gpus(slot, sweep.spec.workers, option="workers:")
    own = {} if WINDOWS else {"start_new_session": True, "preexec_fn": end_with_parent}
    own |= {} if WINDOWS else {"pass_fds": [lock]}
    printed(sweep, trial).unlink(missing_ok=True)
    errors = tempfile.TemporaryFile()  # noqa: SIM115
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": errors}
    process = subprocess.Popen([sys.executable, *words], env=environment | shares, **streams, **own)
    say(trial, f"{'continues' if trial.epochs else 'starts'}{ending(until)}; {values_of(trial)}")
    return Worker(process, trial, until, errors, slot)


def settle(sweep, worker, interrupted):
    """Note what became of a trial whose process has ended."""
    code, trial = worker.process.returncode, worker.trial
    worker.errors.seek(0)
    text = worker.errors.read().decode(errors="replace")
    worker.errors.close()
    if interrupted and code != DONE:
        say(trial, "stopped, to be continued")
        return
    if code == DONE or (code == STOPPED and worker.until):
        sweep.record(trial, finished=code == DONE)
        if trial.finished or trial.epochs >= worker.until:
            score = trial.score(trial.epochs)
            value = f"{sweep.monitor} {score:.4f}" if score is not None else "no finite value"
            how = "finished" if trial.finished else "paused"
            say(trial, f"{how} after epoch {trial.epochs}: {value}")
            return
    why = reason(code, text)
    sweep.record_failure(trial, why)
    say(trial, f"failed: {first_line(why)}")
    printed(sweep, trial).write_text(text, encoding="utf-8")


def printed(sweep, trial):
    """The file that keeps what a trial that failed printed on stderr."""
    return sweep.folder / f"{trial.name}.stderr.txt"


def reason(code, text):
    """Why a process failed: what it said, or how it ended."""
    said = [line.removeprefix(MARK) for line in text.splitlines() if line.startswith(MARK)]
    if said:
        return cut(json.loads(said[-1]), 1000)
    if code == STOPPED:
        return "was stopped by a signal from outside of the sweep"
    return f"was ended by {Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def ending(until):
    return f", until epoch {until}" if until else ""


def values_of(trial):
    """The values of a trial on one line."""
    return ", ".join(f"{key}={show(value)}" for key, value in trial.values.items())


def say(trial, text):
    print(f"{trial.name} {text}", flush=True)


def command_of(script, folder, trusted):
    """The command of a trial, without its number."""
    program = ["-m", "rawtree", "sweep"] if PACKAGE else [str(Path(script))]
    return [*program, *(["--trust"] if trusted else []), "--trial", str(folder)]
