"""python sweep.py -c config.json grid.json [path.to.key=value ...]: many trials of one config."""

if __name__ == "__main__":  # first of all: it may start Python again
    from training.devices.huge_pages import start_again_with_them

    start_again_with_them()

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from utils import DONE, UserError, echo, open_closed_streams, quoted, run_command
from utils.files import check_links, read_json
from wiring.config import override, parse_words
from wiring.vary import of_replica

ROOT = Path(__file__).resolve().parent

if TYPE_CHECKING:
    from search.sweep_folder import Sweep


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; a mistake of the user's ends in one message and an exit code."""
    open_closed_streams()
    arguments = parse(argv)
    return run_command(lambda: run(arguments))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train many trials of a config, and compare them.")
    add = parser.add_argument
    add("spec", nargs="?", help="the JSON file that says which keys vary, and over which values")
    add("overrides", nargs="*", metavar="path.to.key=value", help="as training.epochs=3")
    add("-c", "--config", help="the config file (default: config.json)")
    add("--check", action="store_true", help="check all trials, print their values, run nothing")
    add("--resume", metavar="FOLDER", help="continue a sweep, also beside other hosts")
    add("--retry", action="store_true", help="run the trials again that failed")
    add("--report", metavar="FOLDER", help="write the comparison of a sweep that is not finished")
    add("--best", metavar="FOLDER", help="print the resolved config of the best trial")
    add("--trial", nargs=2, metavar=("N", "FOLDER"), help="train one trial of a sweep, here")
    add("--trust", action="store_true", help="let a config import code that is not named with -c")
    arguments = parse_words(parser, argv)
    commands = ("spec", "resume", "report", "best", "trial")
    named = [name for name in commands if getattr(arguments, name)]
    if len(named) != 1:
        parser.error(
            "name the spec of a sweep, as in: python sweep.py -c config.json grid.json; "
            "or one of --resume, --report, --best and --trial with the folder of a sweep"
        )
    if arguments.check and not arguments.spec:
        parser.error("--check goes with a spec")
    if arguments.trial and not arguments.trial[0].isdecimal():
        parser.error("--trial takes the number of a trial, and the folder of its sweep")
    return arguments


def run(arguments: argparse.Namespace) -> int:
    """Do what the arguments of the command line request."""
    from search.sweep_folder import read_sweep
    from training.devices.signals import end_at_signals

    end_at_signals()  # until the trials run, or JAX might lose the KeyboardInterrupt of Ctrl-C
    if arguments.trial:
        return train_trial(arguments)
    if arguments.report:
        from search.page import write_page

        print(write_page(read_sweep(arguments.report)))
        return DONE
    if arguments.best:
        print(json.dumps(best_config(read_sweep(arguments.best)), indent=2))
        return DONE
    import jax

    from search.checks import check_stored, checked_sweep
    from search.spec import read_spec

    jax.config.update("jax_platforms", "cpu")  # the accelerators are for the trials
    if arguments.resume:
        sweep = read_sweep(arguments.resume)
        check_stored(sweep, arguments.trust)
        return train_all(arguments, sweep, arguments.trust)
    file = Path(arguments.config or "config.json")
    # As in train.py: the config.json of a working folder may come from someone else.
    trusted = bool(arguments.config or arguments.trust or Path.cwd() == ROOT)
    spec = read_spec(Path(arguments.spec))
    sweep = checked_sweep(file, arguments.overrides, spec, trusted)
    if arguments.check:
        from search.loop import print_line, values_of

        for trial in sweep.trials:
            print_line(trial.name, values_of(trial))
        echo(sweep.form_text())
        return DONE
    return train_all(arguments, sweep, trusted)


def best_config(sweep: "Sweep") -> dict[str, Any]:
    """The resolved config of the best trial, to train with it again as a run of its own. Of trials
    that differ only in their seed, it is the first one."""
    group = sweep.ranked()[0] if sweep.trials else None
    if group is None or group.failed or not group.scores():
        raise UserError(f"{sweep.folder}: no trial has a value of {sweep.monitor} yet")
    trial, own = group.trials[0], ("$schema", "title", "run_name")  # a run by itself has its own
    resolved = of_replica(read_json(sweep.run_dir(trial) / "config.json"), trial.replica or 0)
    kept = {key: value for key, value in resolved.items() if key not in own}
    config = {key: sweep.config[key] for key in own if key in sweep.config} | kept
    if trial.replica is not None and sweep.stops_at_nonfinite():
        config = override(config, "training.on_nonfinite=stop")
    base = sweep.config.get("checkpoint", {}).get("dir", "saved")
    return override(config, f"checkpoint.dir={json.dumps(base)}")


def train_all(arguments: argparse.Namespace, sweep: "Sweep", trusted: bool) -> int:
    """Train what is left of a sweep, in its folder, and write the comparison."""
    from search import engines, loop
    from search.page import write_page
    from search.sweep_folder import FILE, merged, read_sweep

    sweep.folder.mkdir(parents=True, exist_ok=True)
    check_links(sweep.folder)
    if arguments.spec:
        is_new = not (sweep.folder / FILE).exists()
        sweep = sweep if is_new else merged(sweep, read_sweep(sweep.folder))
        sweep.save()
    sweep = read_sweep(sweep.folder)
    if arguments.retry:
        sweep.retry()
    command = engines.command_of(ROOT / "sweep.py", trusted)
    if sweep.spec.engine == "slurm":
        print(f"Submit the trials: sbatch {quoted(engines.write_array(sweep, command))}")
        return DONE
    start = engines.started_ray() if sweep.spec.engine == "ray" else engines.start_here
    code = loop.train_all(sweep, command, start)
    print(f"Report: {write_page(read_sweep(sweep.folder))}")
    return code


def train_trial(arguments: argparse.Namespace) -> NoReturn:
    """--trial: what the processes of a sweep run, and those of an array of SLURM."""
    import gc

    from search.trial import train_trial
    from train import leave
    from training.devices.launcher import end_with_parent

    if os.environ.get("SWEEP_PROCESS") == str(os.getppid()):
        end_with_parent()
    gc.set_threshold(20_000, 20, 20)  # as in train.py
    number, folder = arguments.trial
    leave(train_trial(ROOT, folder, int(number), arguments.trust))


if __name__ == "__main__":
    sys.exit(main())
