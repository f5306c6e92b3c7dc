"""python sweep.py -c config.json grid.json [path.to.key=value ...]: many trials of one config."""

if __name__ == "__main__":  # first of all: it may start Python again
    from training.devices.huge_pages import start_again_with_them

    start_again_with_them()

import argparse
import json
import math
import os
import sys
from pathlib import Path

from utils import DONE, UserError, echo, open_closed_streams, run_command
from utils.files import read_json
from wiring.config import override, parse_words

ROOT = Path(__file__).resolve().parent


def main(argv=None):
    """Run the command line; a mistake of the user's ends in one message and an exit code."""
    open_closed_streams()
    arguments = parse(argv)
    if arguments.trial or arguments.program:
        from train import leave

        leave(train(arguments))
    return run_command(lambda: run(arguments))


def parse(argv):
    parser = argparse.ArgumentParser(description="Train many trials of a config, and compare them.")
    add = parser.add_argument
    add("spec", nargs="?", help="the JSON file that says which keys vary, and over which values")
    add("overrides", nargs="*", metavar="path.to.key=value", help="as training.epochs=3")
    add("-c", "--config", help="the config file (default: config.json)")
    add("--check", action="store_true", help="check all trials, print their values, run nothing")
    add("--resume", metavar="FOLDER", help="continue a sweep, as the same command would")
    add("--retry", action="store_true", help="run the trials again that failed")
    add("--report", metavar="FOLDER", help="write the comparison of a sweep that is not finished")
    add("--best", metavar="FOLDER", help="print the resolved config of the best trial")
    add("--trust", action="store_true", help="let a config import code that is not named with -c")
    add("--trial", nargs=3, metavar=("FOLDER", "NUMBER", "EPOCH"), help=argparse.SUPPRESS)
    add("--program", nargs=2, metavar=("FOLDER", "NUMBER"), help=argparse.SUPPRESS)
    arguments = parse_words(parser, argv)
    commands = ("spec", "resume", "report", "best", "trial", "program")
    named = [name for name in commands if getattr(arguments, name)]
    if len(named) != 1:
        parser.error(
            "name the spec of a sweep, as in: python sweep.py -c config.json grid.json; "
            "or one of --resume, --report and --best with the folder of a sweep"
        )
    if arguments.check and not arguments.spec:
        parser.error("--check goes with a spec")
    return arguments


def run(arguments):
    """Do what the arguments of the command line request."""
    from search import sweep_folder
    from training.devices.signals import end_at_signals

    end_at_signals()  # until the trials run, or JAX might lose the KeyboardInterrupt of Ctrl-C
    if arguments.report:
        from search.page import write_page

        print(write_page(sweep_folder.read_sweep(arguments.report)))
        return DONE
    if arguments.best:
        print(json.dumps(best_config(sweep_folder.read_sweep(arguments.best)), indent=2))
        return DONE
    import jax

    jax.config.update("jax_platforms", "cpu")  # the accelerators are for the trials
    if arguments.resume:
        from search.checks import check_stored

        sweep = sweep_folder.read_sweep(arguments.resume)
        check_stored(sweep, arguments.trust)
        return train_all(arguments, sweep, arguments.trust)
    from search.checks import checked_sweep
    from search.spec import read_spec

    spec = read_spec(Path(arguments.spec))
    file = Path(arguments.config or "config.json")
    # As in train.py: the config.json of a working folder may come from someone else.
    trusted = bool(arguments.config or arguments.trust or Path.cwd() == ROOT)
    sweep = checked_sweep(file, arguments.overrides, spec, trusted)
    if arguments.check:
        from search.workers import print_line, values_of

        for each in sweep.trials:
            print_line(each.name, values_of(each))
        echo(sweep.form_text())
        return DONE
    return train_all(arguments, sweep, trusted)


def best_config(sweep):
    """The resolved config of the best trial, to train with it again as a run of its own."""
    trial = sweep.ranked()[0] if sweep.trials else None
    if trial is None or trial.failed is not None or trial.score(math.inf) is None:
        raise UserError(f"{sweep.folder}: no trial has a value of {sweep.monitor} yet")
    config = read_json(sweep.run_dir(trial) / "config.json")
    own = ("$schema", "title", "run_name")  # a run outside of a sweep has its own
    kept = {key: value for key, value in config.items() if key not in own}
    config = {key: sweep.config[key] for key in own if key in sweep.config} | kept
    base = sweep.config.get("checkpoint", {}).get("dir", "saved")
    return override(config, f"checkpoint.dir={json.dumps(base)}")


def train_all(arguments, sweep, trusted):
    """Run what is left of a sweep, in its folder, and write the comparison."""
    from search.page import write_page
    from search.samplers import check_installed
    from search.sweep_folder import FILE, lock, merged, read_sweep
    from search.workers import command_of, run_all

    check_installed(sweep.spec)
    sweep.folder.mkdir(parents=True, exist_ok=True)
    handle = lock(sweep.folder)
    try:
        if (sweep.folder / FILE).exists():
            stored = read_sweep(sweep.folder)  # by now no other process changes it
            sweep = stored if arguments.resume else merged(sweep, stored)
        if arguments.retry:
            sweep.retry()
        sweep.save()
        command = command_of(ROOT / "sweep.py", trusted)
        code = run_all(sweep, command, dict(os.environ), handle)
        print(f"Report: {write_page(sweep)}")
    finally:
        os.close(handle)
    return code


def train(arguments):
    """--trial and --program: what the processes of a sweep run."""
    import gc

    from search.program import train_program
    from search.sweep_folder import read_sweep
    from search.trial import reported, train_trial
    from training.devices.launcher import end_with_parent
    from training.devices.signals import end_at_signals

    gc.set_threshold(20_000, 20, 20)  # as in train.py
    end_with_parent()
    end_at_signals()
    run, (folder, *numbers) = train_trial, arguments.trial or [None]
    if arguments.program:
        run, (folder, *numbers) = train_program, arguments.program
    numbers = map(int, numbers)
    return reported(lambda: run(ROOT, read_sweep(folder), *numbers, arguments.trust))


if __name__ == "__main__":
    sys.exit(main())
