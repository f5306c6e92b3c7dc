"""Run the trials of a sweep in parallel processes, or many trials in one process, as a program; a
signal stops them so that they can be resumed."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from signal import Signals
from typing import Any, NamedTuple

from search.program import OUTCOME
from search.trial import MARK
from training.devices.launcher import Interrupts, share_of_gpus
from utils import DONE, FAILED, PACKAGE, STOPPED, WINDOWS, cut, echo, first_line, printable
from utils.files import atomic_write, read_json
from wiring.config import show


class Worker(NamedTuple):
    """A process that runs a trial."""

    process: Any
    trial: Any
    until: int | None
    errors: Any  # the file that its stderr goes to
    slot: int


def run_all(sweep, command, environment, lock):
    """Run the trials that are left; returns the exit code. The processes inherit `lock`; `command`
    starts one of them, but for the arguments that name its trial."""
    workers, processes, slots = [], [], set(range(sweep.spec.workers))
    interrupts = Interrupts(processes)
    if sweep.due()[0] or sweep.may_propose():
        echo(sweep.form_text(), flush=True)
    try:
        while not interrupts.count and (number := sweep.next_program()) is not None:
            run_program(sweep, number, processes, interrupts, (command, environment, lock))
        while True:
            trials, until = sweep.due()
            busy = [worker.trial for worker in workers]
            idle = [trial for trial in trials if trial not in busy]
            free = sorted(slots - {worker.slot for worker in workers})
            if free and not interrupts.count:
                if idle:
                    worker = started(sweep, idle[0], until, free[0], (command, environment, lock))
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


def run_program(sweep, number, processes, interrupts, how):
    """Run a program to its end, or until a signal, and record what became of its trials."""
    folder, trials = sweep.program_dir(number), sweep.trials_of(number)
    doing = "continues" if folder.exists() else "starts"
    process, errors = spawned(["--program", str(sweep.folder), str(number)], {}, *how)
    processes.append(process)
    print_line(folder.name, f"{doing} with {len(trials)} trials")
    if interrupts.count:  # it came while the process started
        process.terminate()
    while process.poll() is None:
        time.sleep(0.05)
    processes.remove(process)
    code, text = process.returncode, read_stderr(errors)
    left = [trial for trial in trials if not trial.over]
    if interrupts.count and code != DONE:
        print_line(folder.name, "stopped, to be continued")
    elif code == DONE:
        outcome = read_json(folder / OUTCOME)
        for trial in left:
            why = outcome[str(trial.number)]
            if why is None:
                sweep.record(trial, finished=True)
                print_end(sweep, trial)
            else:
                note_failure(sweep, trial, why)
        shutil.rmtree(folder, ignore_errors=True)  # all of it is in the folders of the trials
    elif sweep.spec.form == "auto" and code != STOPPED:
        why = first_line(reason(code, text))
        atomic_write(stderr_file(sweep, folder.name), text.encode())
        sweep.use_processes(f"{folder.name} failed: {why}")
        shutil.rmtree(folder, ignore_errors=True)
        print_line(folder.name, f"failed, so each trial runs in a process of its own: {why}")
    else:
        for trial in left:
            note_failure(sweep, trial, reason(code, text), text)


def started(sweep, trial, until, slot, how):
    """The Worker of a trial."""
    words = ["--trial", str(sweep.folder), str(trial.number), str(until or 0)]
    shares = share_of_gpus(slot, sweep.spec.workers, option="workers:")
    stderr_file(sweep, trial.name).unlink(missing_ok=True)
    process, errors = spawned(words, shares, *how)
    doing = "continues" if trial.epochs else "starts"
    print_line(trial.name, f"{doing}{ending(until)}; {values_of(trial)}")
    return Worker(process, trial, until, errors, slot)


def spawned(words, variables, command, environment, lock):
    """(a process in a session of its own, so that Ctrl-C reaches it only through this process; the
    file that its stderr goes to)"""
    own = {} if WINDOWS else {"start_new_session": True, "pass_fds": [lock]}
    errors = tempfile.TemporaryFile()  # noqa: SIM115
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": errors}
    command = [sys.executable, *command, *words]
    return subprocess.Popen(command, env=environment | variables, **streams, **own), errors


def read_stderr(errors):
    """The text that a process wrote into the file of its stderr, which is closed."""
    errors.seek(0)
    text = errors.read().decode(errors="replace")
    errors.close()
    return text


def settle(sweep, worker, interrupted):
    """Record what became of a trial whose process has ended."""
    code, trial, text = worker.process.returncode, worker.trial, read_stderr(worker.errors)
    if interrupted and code != DONE:
        print_line(trial.name, "stopped, to be continued")
        return
    paused = code == STOPPED and worker.until and sweep.run_dir(trial).is_dir()
    if code == DONE or paused:
        sweep.record(trial, finished=code == DONE)
        if trial.finished or trial.epochs >= worker.until:
            print_end(sweep, trial)
            return
    note_failure(sweep, trial, reason(code, text), text)


def print_end(sweep, trial):
    """Print how far a trial came, and its score."""
    score = trial.score(trial.epochs)
    none = f"no finite {sweep.monitor} at the end of an epoch"
    value = none if score is None else f"{sweep.monitor} {score:.4f}"
    how = "finished" if trial.finished else "paused"
    print_line(trial.name, f"{how} after epoch {trial.epochs}: {value}")


def note_failure(sweep, trial, why, text=""):
    """Record why a trial has failed, and what its process printed."""
    sweep.record_failure(trial, why)
    print_line(trial.name, f"failed: {first_line(why)}")
    if text:
        atomic_write(stderr_file(sweep, trial.name), text.encode())


def stderr_file(sweep, name):
    """The file that keeps what a failed trial or program printed on stderr."""
    return sweep.folder / f"{name}.stderr.txt"


def reason(code, text):
    """Why a process failed: the reason that it printed, or how it ended."""
    printed = [line.removeprefix(MARK) for line in text.splitlines() if line.startswith(MARK)]
    if printed:
        return cut(json.loads(printed[-1]), 1000)
    if code == STOPPED:
        return "was stopped by a signal from outside of the sweep"
    return f"was ended by {Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def ending(until):
    return f", until epoch {until}" if until else ""


def values_of(trial):
    """The values of a trial on one line."""
    return ", ".join(f"{key}={show(value)}" for key, value in trial.values.items())


def print_line(name, text):
    print(printable(f"{name} {text}", keep=""), flush=True)


def command_of(script, trusted):
    """The command of the processes of a sweep, without the arguments that name their trial."""
    # -P: Python imports nothing from the working folder.
    program = ["-P", "-m", "rawtree", "sweep"] if PACKAGE else [str(Path(script))]
    return [*program, *(["--trust"] if trusted else [])]
