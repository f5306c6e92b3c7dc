"""The loop of a sweep: start the trials that are due, until all are over. Other processes, also of
other hosts, may train trials of the same sweep; a signal stops those of this one, to be resumed."""

import time
from collections.abc import Callable
from signal import SIGTERM, Signals
from typing import NamedTuple, Protocol, TypeAlias

from search.claims import is_claimed
from search.sweep_folder import Sweep, Trial, propose, read_sweep
from training.devices.launcher import Interrupts
from utils import DONE, FAILED, STOPPED, echo, first_line, printable
from utils.forms import show

AGAIN = 2.0  # seconds after which the folder is read again, as other processes change it


class Process(Protocol):
    """What starts here or on another machine, such as a Popen."""

    def poll(self) -> int | None: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...
    def wait(self) -> object: ...


Start: TypeAlias = Callable[[list[str], int, int], Process]


class Worker(NamedTuple):
    """A process that trains a trial, or a program."""

    process: Process
    run: str
    until: int | None


def train_all(sweep: Sweep, command: list[str], start: Start) -> int:
    """Train what is left of a sweep, by `start(command, slot, workers)`; returns the exit code."""
    workers, processes, is_waiting = {}, [], False  # {slot: Worker}
    interrupts = Interrupts(processes)
    if sweep.due()[0] or sweep.may_propose():
        echo(sweep.form_text(), flush=True)
    try:
        while workers or not interrupts.count:
            sweep = read_sweep(sweep.folder)
            slots = [] if interrupts.count else range(sweep.spec.workers)
            for slot in [slot for slot in slots if slot not in workers]:
                sweep, run = next_run(sweep, {worker.run for worker in workers.values()})
                if run is None:
                    break
                number, until = sweep.members(run)[0].number, sweep.due()[1]
                words = [*command, "--trial", str(number), str(sweep.folder)]
                process = start(words, slot, sweep.spec.workers)
                workers[slot] = Worker(process, run, until)
                processes.append(process)
                if interrupts.count:  # it came while the process started
                    process.send_signal(SIGTERM)
                print_start(sweep, run, until)
            if not workers:
                if not sweep.due()[0]:
                    break
                if not is_waiting:
                    echo("Waiting for trials that other processes train", flush=True)
                is_waiting = True
            for slot, code in wait(workers).items():
                worker = workers.pop(slot)
                processes.remove(worker.process)
                settle(sweep, worker, code, interrupts.count)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
    if interrupts.count:
        return STOPPED
    return FAILED if all(trial.failed is not None for trial in sweep.trials) else DONE


def next_run(sweep: Sweep, own: set[str]) -> tuple[Sweep, str | None]:
    """(the sweep, the name of a run that is due and that no process trains, or None)"""
    while True:
        due = [run for run in sweep.due()[0] if run not in own]
        free = next((run for run in due if not is_claimed(sweep.folder, run)), None)
        if free or not sweep.may_propose():
            return sweep, free
        sweep = propose(sweep)


def wait(workers: dict[int, Worker]) -> dict[int, int]:
    """{slot: exit code} of the processes that have ended, once there is one, or after AGAIN
    seconds."""
    deadline = time.monotonic() + AGAIN
    while time.monotonic() < deadline:
        codes = {slot: worker.process.poll() for slot, worker in workers.items()}
        if ended := {slot: code for slot, code in codes.items() if code is not None}:
            return ended
        time.sleep(0.05)
    return {}


def settle(before: Sweep, worker: Worker, code: int, interrupted: int) -> None:
    """Print what became of a run whose process has ended, and note if it ended by itself."""
    run = worker.run
    sweep = read_sweep(before.folder)
    if interrupted and code != DONE:
        print_line(run, "stopped, to be continued")
        return
    due, until = sweep.due()
    if code != DONE and run in due and until == worker.until and sweep.form == before.form:
        sweep.fail(sweep.members(run), ending(code))
        sweep = read_sweep(sweep.folder)
    if sweep.form != before.form:
        print_line(run, f"failed, so each trial runs in a process of its own: {sweep.why}")
        return
    for trial in sweep.members(run):
        if trial.failed is not None:
            print_line(trial.name, f"failed: {first_line(trial.failed)}")
        elif trial.finished or trial.epochs >= (worker.until or 1):
            score, how = trial.score(), "finished" if trial.finished else "paused"
            none = f"no finite {sweep.monitor} at the end of an epoch"
            value = none if score is None else f"{sweep.monitor} {score:.4f}"
            print_line(trial.name, f"{how} after epoch {trial.epochs}: {value}")
        else:
            print_line(trial.name, "is trained by another process")


def ending(code: int) -> str:
    """How a process ended that did not say why."""
    if code == STOPPED:
        return "was stopped by a signal from outside of the sweep"
    return f"was ended by {Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def print_start(sweep: Sweep, run: str, until: int | None) -> None:
    trials = sweep.members(run)
    doing = "continues" if (sweep.folder / run / "config.json").exists() else "starts"
    what = f"; {values_of(trials[0])}" if len(trials) == 1 else f" with {len(trials)} trials"
    print_line(run, f"{doing}{f', until epoch {until}' if until else ''}{what}")


def values_of(trial: Trial) -> str:
    """The values of a trial on one line."""
    return ", ".join(f"{key}={show(value)}" for key, value in trial.values.items())


def print_line(name: str, text: str) -> None:
    print(printable(f"{name} {text}", keep=""), flush=True)
