"""python train.py -c config.json [path.to.key=value ...]: config -> parts -> fit -> exit code."""

import argparse
import gc
import json
import logging
import logging.config
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path

from utils import RunError, UserError, first_line
from wiring.build import build
from wiring.config import read
from wiring.parts import KINDS, listing

ROOT = Path(__file__).resolve().parent
DONE, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 75  # exit codes; 75: stopped by a signal with a checkpoint written

logger = logging.getLogger("main")


def main(argv=None):
    """Run the command line; a mistake of the user's, or a fault of the machine, ends in one message and an exit code."""
    arguments = parse(argv)
    gc.disable()  # while modules load and shapes are traced there is no garbage, and looking for it takes a fifth of the time
    sys.path.append(os.getcwd())  # a dotted name may stand beside the config
    end_at_signals()
    try:
        if arguments.list:
            print(*(listing(kind) for kind in chosen_kinds(arguments.list)), sep="\n\n")
            return DONE
        file, trusted = config_file(arguments)
        parts = build(read(file, arguments.overrides), file.name, trusted)
        return check(parts) if arguments.check else train(parts, arguments)
    except UserError as error:
        return fail(error, BAD_INPUT)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (RunError, OSError) as error:
        return fail(error, FAILED)
    except Exception as error:
        if not isinstance(error, MemoryError) and "Out of memory" not in str(error):
            to_log(traceback.format_exc())
            raise
        hint = "take a smaller loader.batch_size, cut batches with training.accumulate, or stream with loader.device_budget_mb=0"
        return fail(f"Out of memory: {first_line(error)}\n{hint}", FAILED)


def parse(argv):
    parser = argparse.ArgumentParser(description="Train the model that a config file describes.")
    parser.add_argument("-c", "--config", help="the config file (default: config.json, or that of the run to go on with)")
    parser.add_argument(
        "overrides", nargs="*", metavar="path.to.key=value", help="a value to use instead, as optimizer.args.lr=0.01"
    )
    parser.add_argument("--check", action="store_true", help="validate, print the resolved config and the model, train nothing")
    parser.add_argument("--list", nargs="?", const="all", metavar="KIND", help="print every name that a config can use")
    parser.add_argument(
        "--resume", metavar="RUN", help="go on with a run: its folder, one of its checkpoints, or auto: the latest unfinished one"
    )
    parser.add_argument("--override", action="store_true", help="go on with a run though its config or its data has changed")
    parser.add_argument("--trust", action="store_true", help="let the config of a run import what its dotted names say")
    return parser.parse_intermixed_args(argv)


def config_file(arguments):
    """(the config file, whether what it names may be imported): what a run left behind is data, not the user's own code."""
    if arguments.config or arguments.resume in (None, "auto"):
        return Path(arguments.config or "config.json"), True
    from training.resume import run_folder_of

    return run_folder_of(arguments.resume) / "config.json", arguments.trust


def chosen_kinds(name):
    """The kinds to list."""
    if name != "all" and name not in KINDS:
        raise UserError(f"--list: there is no kind {name!r}; there are {', '.join(KINDS)}")
    return KINDS if name == "all" else [name]


def check(parts):
    """Print what would run."""
    from training.summary import table

    template = shapes(parts)
    print(json.dumps(parts.config, indent=2))
    print(table(template.params))
    return DONE


def end_at_signals(folder=None):
    """Until the loop takes over, and when a signal comes twice, the process ends at once; an exception would get lost in a
    callback of JAX's, or tear down what it is still compiling. What was killed can be gone on with anyway."""

    def end(_number, _frame):
        saved = folder is not None and any(folder.glob("checkpoint-*"))
        if folder is not None and not (folder / "config.json").exists():
            shutil.rmtree(folder, ignore_errors=True)  # nothing has run
        more = "; the run can be gone on with from its last checkpoint" if saved else "; nothing was saved"
        os.write(2, f"Interrupted{more}\n".encode())
        os._exit(STOPPED if saved else FAILED)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def shapes(parts, resumed=False):
    """A TrainState of shapes, once the parts are known to fit the data and each other, and what is monitored to be measured."""
    from training.checkpoint.pretrained import pretrained_from
    from training.checkpoint.storage import check_format
    from training.fit import compose, configured
    from training.summary import blueprint, check_monitors, trace_shapes

    pieces = (parts.model, parts.loss, parts.metrics, parts.preprocess, parts.augment)
    try:
        objective = compose(parts.objective, *pieces, parts.training.precision)
        example, batch_size = parts.data.example, parts.loader.batch_size
        params, state, reported = trace_shapes(parts.model, objective, parts.optimizer, example, batch_size)
        check_monitors(monitors(parts), evaluated_sets(parts), reported)
        for part in [part for part in (parts.checkpoint, *parts.callbacks) if hasattr(part, "sign")]:
            part.sign()
        check_format(parts.checkpoint.format)
        if parts.training.pretrained and not resumed:
            pretrained_from(parts.training.pretrained).check(params, state)
        update = configured(parts.update, objective, parts.optimizer, parts.training)(unroll=False)
        return blueprint(objective, update, params, state, example, batch_size)
    except UserError as error:
        raise UserError(f"{parts.source}: {error}") from error


def monitors(parts):
    """{place in the config: the metric that is monitored there}"""
    callbacks = {f"callbacks.{i}.args.monitor": getattr(c, "monitor", None) for i, c in enumerate(parts.callbacks)}
    return {"checkpoint.monitor": parts.checkpoint.monitor} | callbacks


def evaluated_sets(parts):
    """The sets that metrics are measured on."""
    held_out = ["val"] if parts.loader.val_size else []
    return [*parts.data.sizes, *held_out] if parts.training.eval_every else ["train"]


def train(parts, arguments):
    """Begin a run in a folder of its own, or go on with one."""
    from training import resume

    named, run, why = arguments.resume or parts.resume, None, None
    if named == "auto":
        run, why = resume.unfinished(parts.checkpoint.dir, parts.title)
    elif named:
        run = resume.opened(resume.run_folder_of(named), named)
    template = shapes(parts, resumed=run is not None)
    if run is None:
        return fit_in(*begun(parts, why), parts, template)
    if end := resume.at_its_end(run, parts.training.epochs, arguments.override):
        print(end)
        return DONE
    return fit_in(run, *taken_up(run, parts, template, arguments.override), parts, template)


def begun(parts, why):
    """A new run: its folder, its data, and the record for its checkpoints. `why` tells that there was none to go on with."""
    from data_loader.base import loaded
    from training import resume, run_folder

    run = resume.opened(run_folder.new_folder(parts.checkpoint.dir, parts.title))
    end_at_signals(run.folder)
    set_up_logging(run.folder / "train.log")
    if why:
        logger.info("%s: beginning a new one", why)
    try:
        sets = loaded(parts.data)
        record = run_folder.record(parts.config, parts.facts, sets)
        run_folder.describe(run.folder, record, sets, ROOT)
    except BaseException:
        shutil.rmtree(run.folder)  # nothing has run
        raise
    return run, sets, record


def taken_up(run, parts, template, override):
    """The data and the record of a run that is gone on with, once they are known to be the same as then, or insisted on."""
    from data_loader.base import loaded
    from training import recovery, resume, run_folder

    end_at_signals(run.folder)
    sets = loaded(parts.data)
    record = run_folder.record(parts.config, parts.facts, sets)
    changes = resume.changes(run, record, override)
    recovery.check_fits(run.found, template, parts.training.replicas)  # nothing in the folder was touched so far
    resume.tidied(run)
    set_up_logging(run.folder / "train.log")
    for message in [*run.passed_over, *run_folder.changes_of_environment(run.folder, ROOT)]:
        logger.warning(message)
    for change in changes:
        logger.info(change)
    run_folder.update(run.folder, record, ROOT)
    return sets, record


def fit_in(run, sets, record, parts, template):
    """Train in a run's folder."""
    from training import run_folder
    from training.fit import fit

    announce(parts, sets, run, template.params)
    gc.enable()
    done = fit(
        parts.model,
        **sets,
        loss=parts.loss,
        metrics=parts.metrics,
        optimizer=parts.optimizer,
        preprocess=parts.preprocess,
        augment=parts.augment,
        objective=parts.objective,
        update=parts.update,
        callbacks=parts.callbacks,
        seed=parts.seed,
        log_every=parts.logging.every_steps,
        folder=run.folder,
        checkpoint=parts.checkpoint,
        record=record,
        resume=run,
        **vars(parts.loader),
        **vars(parts.training),
    )
    if done.signal and not done.finished:
        return STOPPED
    run_folder.finish(run.folder, done)
    return DONE


def announce(parts, sets, run, params):
    """The first lines of a run."""
    from training.run_folder import source
    from training.summary import count

    logger.info("Start Training! [%s]", parts.title)
    logger.info("The model has %d parameters", count(params))
    for name, dataset in sets.items():
        logger.info("%s data: %d examples from %s", name.capitalize(), parts.data.sizes[name], source(dataset))
    logger.info("Run folder: %s", run.folder)
    if run.found:
        logger.info("Going on from %s, after step %d", run.found.name, run.found.record["step"])
    if not parts.checkpoint.save_optimizer_state:
        logger.warning("checkpoint.save_optimizer_state is false: a run that is killed cannot be gone on with")


def set_up_logging(file):
    """Logging as logger_config.json has it, its file in the run's folder."""
    logging.raiseExceptions = False  # a full disk is told once, not at every line
    config = json.loads((ROOT / "logger_config.json").read_text())
    config["handlers"]["file"]["filename"] = str(file)
    logging.config.dictConfig(config)


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


if __name__ == "__main__":
    sys.exit(main())
