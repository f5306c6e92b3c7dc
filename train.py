"""python train.py -c config.json [path.to.key=value ...]: config -> parts -> fit -> exit code."""

if __name__ == "__main__":  # first of all: it may start Python once more
    from huge_pages import start_again_with_them

    start_again_with_them()

import argparse
import gc
import json
import logging
import os
import sys
import traceback
from bdb import BdbQuit
from dataclasses import replace
from pathlib import Path

from training.runs.signals import end_at_signals
from utils import BAD_INPUT, DONE, FAILED, RunError, UserError, first_line
from wiring.build import build
from wiring.config import override, read
from wiring.parts import KINDS, listing

ROOT = Path(__file__).resolve().parent

logger = logging.getLogger("main")


def main(argv=None):
    """Run the command line; a mistake of the user's, or a fault of the machine, ends in one message and an exit code."""
    arguments = parse(argv)
    gc.disable()  # while modules load and shapes are traced there is no garbage, and looking for it takes a fifth of the time
    sys.path.append(os.getcwd())  # a dotted name may stand where one runs it
    end_at_signals()
    try:
        return run(arguments)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if arguments.post_mortem and (error.__cause__ or not isinstance(error, UserError)):
            post_mortem(error)
        return failed(error)


def parse(argv):
    parser = argparse.ArgumentParser(description="Train the model that a config file describes.")
    say = parser.add_argument
    say(
        "-c",
        "--config",
        help="the config file (default: config.json, or that of the run that is named)",
    )
    say(
        "overrides",
        nargs="*",
        metavar="path.to.key=value",
        help="a value to use instead, as optimizer.args.lr=0.01",
    )
    say(
        "--check",
        action="store_true",
        help="validate, print the resolved config and the model, train nothing",
    )
    say(
        "--list",
        nargs="?",
        const="all",
        metavar="KIND",
        help="print every name that a config can use",
    )
    say(
        "--resume",
        metavar="RUN",
        help="go on with a run: its folder, one of its checkpoints, or auto: the latest unfinished one",
    )
    say(
        "--override",
        action="store_true",
        help="go on with a run though its config or its data has changed",
    )
    say(
        "--trust",
        action="store_true",
        help="let the config of a run import what its dotted names say",
    )
    say(
        "--evaluate",
        metavar="CHECKPOINT",
        help="measure a checkpoint on the held-out sets, and print the metrics as JSON",
    )
    say(
        "--watch",
        metavar="RUN",
        help="measure every checkpoint of a run as it appears, until the run has ended",
    )
    say(
        "--report",
        nargs="+",
        metavar="RUN",
        help="write report.html into the folder of a run, or compare several in the first",
    )
    say(
        "--processes",
        type=int,
        metavar="N",
        help="start so many processes here that train together, to try it out",
    )
    say(
        "--fast-dev-run",
        action="store_true",
        help="two steps of everything, in a folder that is gone afterwards",
    )
    say(
        "--debug",
        action="store_true",
        help="compile nothing, so that print and breakpoint() see values; slow",
    )
    say(
        "--post-mortem", action="store_true", help="open the debugger where an exception was raised"
    )
    arguments = parser.parse_intermixed_args(argv)
    does = ("check", "list", "resume", "evaluate", "watch", "report")
    if len(said := [f"--{name}" for name in does if getattr(arguments, name)]) > 1 and said != [
        "--check",
        "--resume",
    ]:
        parser.error(f"{' and '.join(said)} do not go together")
    if arguments.fast_dev_run and said:
        parser.error(f"--fast-dev-run and {said[0]} do not go together")
    if arguments.debug and (arguments.processes or 1) > 1:
        parser.error(
            "--debug and --processes do not go together: without compilation, processes cannot share an array"
        )
    if arguments.processes is not None and (
        arguments.processes < 1 or (said and said != ["--resume"])
    ):
        parser.error("--processes takes a number from 1, and goes with training alone")
    return arguments


def run(arguments):
    """Do what is asked for."""
    if arguments.list:
        print(*(listing(kind) for kind in chosen_kinds(arguments.list)), sep="\n\n")
        return DONE
    if arguments.report:
        from training.report.page import write_report

        print(write_report([Path(folder) for folder in arguments.report]))
        return DONE
    if arguments.debug:
        import jax

        jax.config.update("jax_disable_jit", True)
    file, trusted = config_file(arguments)
    if trusted:
        sys.path.append(str(file.resolve().parent))  # a dotted name may stand beside the config
    if (
        arguments.processes or 1
    ) > 1 and "JAX_PROCESS_ID" not in os.environ:  # which those that are started have
        from training.checkpoint.storage import check_format
        from training.devices.launcher import launch

        config = read(file, arguments.overrides)
        if config.get("distributed"):
            raise UserError(
                "--processes: leave `distributed` out of the config; the processes that it starts know of each other"
            )
        parts = build(config, file.name, trusted)  # a mistake is told before anything is started
        check_format(parts.checkpoint.format, arguments.processes)
        return launch(arguments.processes)
    config = read(file, arguments.overrides)
    if not (arguments.check or arguments.evaluate or arguments.watch):
        from training.devices import joining

        joining.join(config.get("distributed"))
    if arguments.fast_dev_run:
        return fast_dev_run(file, config)
    parts = build(config, file.name, trusted)
    if arguments.check:
        return check(parts)
    from training.runs.program_cache import keep_programs

    keep_programs()
    if arguments.evaluate or arguments.watch:
        from training.runs.evaluate import evaluate, watch

        return (
            evaluate(parts, arguments.evaluate)
            if arguments.evaluate
            else watch(parts, arguments.watch)
        )
    from training.runs.start import train

    return train(parts, ROOT, arguments.resume, arguments.override)


def config_file(arguments):
    """(the config file, whether what it names may be imported): what a run left behind is data, not the user's own code."""
    option = next(
        (name for name in ("resume", "evaluate", "watch") if getattr(arguments, name)), None
    )
    named = option and getattr(arguments, option)
    if arguments.config or named in (None, "auto"):
        return Path(arguments.config or "config.json"), True
    from training.runs.resume import run_folder_of

    return run_folder_of(named, f"--{option}") / "config.json", arguments.trust


def chosen_kinds(name):
    """The kinds to list."""
    if name != "all" and name not in KINDS:
        raise UserError(f"--list: there is no kind {name!r}; there are {', '.join(KINDS)}")
    return KINDS if name == "all" else [name]


def check(parts):
    """Print what would run."""
    from training.devices.sharding import Plan, mesh_on_paper
    from training.runs.shape_check import table
    from training.runs.start import shapes

    template = shapes(parts)
    mesh, wrong = mesh_on_paper(parts.mesh)
    print(json.dumps(parts.config, indent=2))
    print(table(template.params, Plan(mesh, parts.sharding)))
    if wrong:
        raise UserError(f"{parts.source}: {wrong}")
    return DONE


def fast_dev_run(file, config):
    """Two steps of everything, so that what is wrong anywhere shows within seconds; nothing is left of it."""
    from training.devices import processes
    from training.runs import signals as stop
    from training.runs.start import train

    base = (
        (config.get("checkpoint") or {}).get("dir", "saved") if processes.several() else None
    )  # which all hosts see
    with processes.temporary_folder("fast-dev-run-", base) as folder:
        stop.TEMPORARY.append(folder)
        config = override(override(config, "resume=null"), f"checkpoint.dir={folder}")
        quick = {"wandb": ("mode", "offline"), "jsonl": ("file", "tracked.jsonl")}
        for name, (key, value) in quick.items():
            for i in places((config.get("logging") or {}).get("trackers"), name):
                config = override(config, f"logging.trackers.{i}.args.{key}={value}")
        for i in places(config.get("callbacks"), "profiler"):
            config = override(config, f'callbacks.{i}.args={{"first_step": 1, "n_steps": 1}}')
        parts = build(config, file.name)  # by the real number of steps, which schedules need
        parts.training = replace(
            parts.training, epochs=1, limit_batches=2, eval_every=1, eval_initial=True
        )
        parts.logging = replace(parts.logging, every_steps=1)
        code = train(parts, ROOT)
        logging.shutdown()
    if processes.is_first():
        print(
            "Two steps of everything went well; their folder is gone"
            if code == DONE
            else "Stopped; the folder is gone"
        )
    return code


def places(nodes, name):
    """Where a list of a config names a part."""
    nodes = enumerate(nodes if isinstance(nodes, list) else ())
    return [
        i
        for i, node in nodes
        if node == name or (isinstance(node, dict) and node.get("name") == name)
    ]


def post_mortem(error):
    """Open the debugger in the frame where it began."""
    import pdb

    while error.__cause__:
        error = error.__cause__
    traceback.print_exception(error)
    pdb.post_mortem(error.__traceback__)


def failed(error):
    """Tell what went wrong; only a bug, which is no mistake of the user's, comes with its traceback."""
    from training.watching.hooks import CallbackFailed

    if isinstance(error, UserError):
        return fail(error, BAD_INPUT)
    if isinstance(error, RunError | OSError):
        return fail(error, FAILED)
    processes = sys.modules.get("training.devices.processes")
    if processes and (gone := processes.lost(error)):
        return fail(gone, FAILED)
    if isinstance(error, MemoryError) or "Out of memory" in str(error):
        hint = "take a smaller loader.batch_size, cut batches with training.accumulate, or stream with loader.device_budget_mb=0"
        return fail(f"Out of memory: {first_line(error)}\n{hint}", FAILED)
    to_log("".join(traceback.format_exception(error)))
    if isinstance(error, CallbackFailed):
        return fail(
            f"{error}\nThe traceback is in train.log; --post-mortem opens the debugger there",
            FAILED,
        )
    if isinstance(error, BdbQuit):
        return fail("Left the debugger", FAILED)
    if (
        processes and processes.several()
    ):  # which would wait for each other when the interpreter ends
        traceback.print_exception(error)
        return FAILED
    raise error


def fail(error, code):
    """Say one message, also to the run's log; no traceback, since the mistake is not in this program."""
    print(error, file=sys.stderr)
    to_log(str(error))
    return code


def to_log(message):
    """Write an error to the run's log alone."""
    record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, message, (), None)
    for handler in logger.handlers:
        if isinstance(handler, logging.FileHandler) and os.path.exists(handler.baseFilename):
            handler.handle(record)


def leave(code):
    """End with an exit code, also where threads still compile what a failed run no longer needs."""
    programs, processes = (
        sys.modules.get(f"training.{name}") for name in ("programs", "processes")
    )
    compiling = programs and programs.still_compiling()
    # One that failed must not wait for the others, which may never come to their end.
    alone = code in (FAILED, BAD_INPUT) and processes and processes.several()
    if alone or (code != DONE and compiling):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
