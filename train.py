"""python train.py -c config.json [path.to.key=value ...]: the command line."""

if __name__ == "__main__":  # first, since it may start Python again
    from training.devices.huge_pages import start_again_with_them

    start_again_with_them()

import argparse
import gc
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from training.devices.signals import end_at_signals
from training.kinds import KINDS
from utils import (
    BAD_INPUT,
    DONE,
    FAILED,
    PACKAGE,
    UserError,
    echo,
    open_closed_streams,
    shown_if_slow,
)
from wiring.build import build
from wiring.config import (
    Layer,
    override,
    parse_words,
    read_layers,
    refuse_elsewhere,
    table_of_sources,
)
from wiring.own_modules import look_in
from wiring.parts import listing

if TYPE_CHECKING:
    from training.base import Parts

ROOT = Path(__file__).resolve().parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; a mistake, or a fault of the machine, ends with one message."""
    open_closed_streams()
    arguments = parse(argv)
    # Loading modules and tracing shapes leaves little garbage, and collecting it at every 700th
    # object would take an eighth of the time to start.
    gc.set_threshold(20_000, 20, 20)
    end_at_signals()
    try:
        return do(arguments)
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (Exception, SystemExit) as error:  # the user's code may call sys.exit
        from training.commands.failure import failed, post_mortem

        if arguments.post_mortem and (error.__cause__ or not isinstance(error, UserError)):
            post_mortem(error)
        return failed(error)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the model that a config file describes.")
    add = parser.add_argument
    add("-c", "--config", help="the config file (default: config.json, or that of the named run)")
    add("overrides", nargs="*", metavar="path.to.key=value", help="such as optimizer.args.lr=0.01")
    add("--check", action="store_true", help="validate, print the resolved config and the model")
    add("--list", nargs="?", const="all", metavar="KIND", help="print every name a config can use")
    add("--resume", metavar="RUN", help="a run's folder, one of its checkpoints, or auto")
    add("--override", action="store_true", help="resume although config or data have changed")
    add("--trust", action="store_true", help="trust a run's config: dotted names, files, hosts")
    add("--evaluate", metavar="CHECKPOINT", help="print the metrics of a checkpoint as JSON")
    add("--best", action="store_true", help="with --evaluate RUN: its best checkpoint")
    add("--watch", metavar="RUN", help="evaluate every checkpoint of a run as it appears")
    add("--report", nargs="+", action="extend", metavar="RUN", help="write report.html of the runs")
    add(
        "--find-lr",
        nargs="?",
        type=steps_of_test,
        const=100,
        metavar="STEPS",
        help="raise the learning rate over 100 steps (at least 20), and suggest one",
    )
    add("--find-batch", action="store_true", help="try batch sizes, and suggest one")
    add("--processes", type=int, metavar="N", help="start N processes here that train together")
    add("--fast-dev-run", action="store_true", help="two steps of everything, then delete them")
    add("--debug", action="store_true", help="compile nothing: print and breakpoint() see values")
    add("--post-mortem", action="store_true", help="open the debugger where an error was raised")
    arguments = parse_words(parser, argv)
    commands = ("check", "list", "resume", "evaluate", "watch", "report", "find_lr", "find_batch")
    if empty := [name for name, value in vars(arguments).items() if value == ""]:
        parser.error(f"--{empty[0]} is empty; was a variable of the shell not set?")
    given = [f"--{name.replace('_', '-')}" for name in commands if getattr(arguments, name)]
    if len(given) > 1 and given != ["--check", "--resume"]:
        parser.error(f"{' and '.join(given)} do not go together")
    if arguments.best and given != ["--evaluate"]:
        parser.error("--best goes with --evaluate")
    if arguments.fast_dev_run and given:
        parser.error(f"--fast-dev-run and {given[0]} do not go together")
    processes = arguments.processes
    if arguments.debug and (processes or 1) > 1:
        parser.error(
            "--debug and --processes do not go together: "
            "without compilation, processes cannot share an array"
        )
    if processes is not None and (processes < 1 or (given and given != ["--resume"])):
        parser.error("--processes takes a number from 1, and goes with training alone")
    return arguments


def steps_of_test(text: str) -> int:
    """The number after --find-lr."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"takes a number of steps, got {text!r}; put it last")
    return int(text)


def do(arguments: argparse.Namespace) -> int:
    """Run the command that the arguments select, and return its exit code."""
    if arguments.list:
        return list_parts(arguments.list)
    if arguments.report:
        return report(arguments.report)
    if arguments.debug:
        import jax

        jax.config.update("jax_disable_jit", True)
    file, trusted = config_file(arguments)
    config, layers = read_layers(file, arguments.overrides, trusted)
    if not (trusted or named_run(arguments)):  # a run that is named is resumed where it lies
        refuse_elsewhere(file, config, layers)
    where = {"source": file.name, "trusted": trusted, "folders": look_in(file.parent)}
    build_parts = partial(build, **where, layers=layers)
    if (arguments.processes or 1) > 1 and "JAX_PROCESS_ID" not in os.environ:
        return launch_processes(arguments.processes, config, build_parts)
    finds = arguments.find_lr or arguments.find_batch
    trains = not (arguments.check or arguments.evaluate or arguments.watch or finds)
    if trains:
        from training.devices import joining

        joining.join(config.get("distributed"))
    if arguments.fast_dev_run:
        return fast_dev_run(config, build_parts)
    if finds:  # these commands try rates or sizes themselves
        config |= {"schedule": None}
    if arguments.check:
        return check(build_parts(config), config, layers)
    with shown_if_slow(f"Importing JAX and building the parts of {file.name}", early=trains):
        parts = build_parts(config)
    from training.devices.program_cache import keep_programs

    keep_programs()
    if arguments.find_lr:
        from training.commands.find_lr import find_lr

        return find_lr(parts, arguments.find_lr)
    if arguments.find_batch:
        from training.commands.find_batch import find_batch

        return find_batch(parts)
    if arguments.evaluate or arguments.watch:
        from training.commands.evaluate import evaluate, watch

        if arguments.evaluate:
            return evaluate(parts, arguments.evaluate, arguments.best)
        return watch(parts, arguments.watch)
    from training.commands.start import train

    return train(parts, ROOT, arguments.resume, arguments.override)


def config_file(arguments: argparse.Namespace) -> tuple[Path, bool]:
    """(the config file, whether it is trusted, so that its dotted names are imported). A config
    that is named with -c is trusted, and so is the one in this folder; that of a run, or of any
    other working directory, only with --trust."""
    named = named_run(arguments)
    if arguments.config or not named:
        own = arguments.config or arguments.trust or Path.cwd() == ROOT
        return Path(arguments.config or "config.json"), bool(own)
    from training.checkpoint.resume import run_folder_of

    option, run = named
    return run_folder_of(run, f"--{option}") / "config.json", arguments.trust


def named_run(arguments: argparse.Namespace) -> tuple[str, str] | None:
    """(the option that names a run or a checkpoint, what it names), or None."""
    options = ("resume", "evaluate", "watch")
    given = ((option, getattr(arguments, option)) for option in options)
    return next(((option, named) for option, named in given if named and named != "auto"), None)


def list_parts(kind: str) -> int:
    """--list: print every name of a kind, or of all."""
    if kind != "all" and kind not in KINDS:
        raise UserError(f"--list: there is no kind {kind!r}; there are {', '.join(KINDS)}")
    kinds = KINDS if kind == "all" else [kind]
    print(*(listing(kind) for kind in kinds), sep="\n\n")
    return DONE


def report(folders: list[str]) -> int:
    """--report: write report.html."""
    from training.report.page import write_report

    print(write_report([Path(folder) for folder in folders]))
    return DONE


def check(parts: "Parts", config: dict[str, Any], layers: Sequence[Layer]) -> int:
    """--check: print the resolved config and the model and, if the config extends other files, from
    which file each value comes."""
    from training.commands.shape_check import table_of_params
    from training.commands.start import checked_recipe
    from training.watching.console import check_logging

    check_logging(ROOT)
    recipe, template = checked_recipe(parts)
    print(json.dumps(parts.config, indent=2))
    if len(layers) > 1:
        print("Values that each file sets (all others are defaults):")
        echo(table_of_sources(config, layers))
    echo(table_of_params(template.params, recipe.plan))
    try:
        recipe.plan.on_devices()
    except UserError as error:
        raise UserError(f"{parts.source}: {error}") from error
    return DONE


def launch_processes(
    count: int, config: dict[str, Any], build_parts: "Callable[[dict[str, Any]], Parts]"
) -> int:
    """--processes: start processes that train together; mistakes are reported before they start."""
    from training.checkpoint.storage import check_format
    from training.devices.launcher import launch

    if config.get("distributed"):
        fix = "leave `distributed` out of the config; it connects the processes itself"
        raise UserError(f"--processes: {fix}")
    import jax

    jax.config.update("jax_platforms", "cpu")  # the accelerators are for the processes
    parts = build_parts(config)
    check_format(parts.checkpoint.format, count)
    return launch(count)


def fast_dev_run(config: dict[str, Any], build_parts: "Callable[[dict[str, Any]], Parts]") -> int:
    """--fast-dev-run: two steps of everything in a temporary folder, so that any mistake shows
    within seconds."""
    from training import processes
    from training.commands.start import train

    parts = build_parts(config)  # the values that are changed below must be valid
    # With several processes, all hosts must see the folder.
    base = parts.checkpoint.dir if processes.several() else None
    with processes.temporary_folder("fast-dev-run-", base) as folder:
        if not processes.several():
            end_at_signals(temporary=folder)
        config = override(override(config, "resume=null"), f"checkpoint.dir={folder}")
        trackers = config.get("logging", {}).get("trackers")
        os.environ["TRACKIO_DIR"] = str(folder)
        harmless = {"wandb": "mode=offline", "jsonl": "file=tracked.jsonl"}
        harmless["mlflow"] = f"uri={(Path(folder).absolute() / 'mlruns').as_uri()}"
        for name, setting in harmless.items():
            for i in positions(trackers, name):
                config = override(config, f"logging.trackers.{i}.args.{setting}")
        for i in positions(config.get("callbacks"), "profiler"):
            config = override(config, f'callbacks.{i}.args={{"first_step": 1, "n_steps": 1}}')
        # Built with the real number of steps, which schedules need.
        parts = build_parts(config)
        two_steps = {"epochs": 1, "limit_batches": 2, "eval_every": 1, "eval_initial": True}
        two_steps |= {"max_steps": None, "max_seconds": None}
        parts.training = replace(parts.training, **two_steps)
        parts.logging = replace(parts.logging, every_steps=1)
        code = train(parts, ROOT, temporary=folder)
        logging.shutdown()
    if processes.is_first():
        finished = "Two steps of everything went well; their folder is deleted"
        print(finished if code == DONE else "Stopped; the folder is deleted")
    return code


def positions(nodes: Any, name: str) -> list[int]:
    """The positions at which a list of a config names a part."""
    nodes = nodes if isinstance(nodes, list) else []
    names = [node.get("name") if isinstance(node, dict) else node for node in nodes]
    return [i for i, other in enumerate(names) if other == name]


def leave(code: int) -> NoReturn:
    """End with an exit code. A process that failed does not wait for threads that still compile
    programs, nor for other processes, which may never end."""
    processes = sys.modules.get(f"{PACKAGE}training.processes")
    compiling = any(thread.name.startswith("compile") for thread in threading.enumerate())
    alone = code in (FAILED, BAD_INPUT) and processes and processes.several()
    if alone or (code != DONE and compiling):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
