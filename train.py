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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the loop takes over, both signals just end the run
    try:
        if arguments.list:
            print(*(listing(kind) for kind in chosen_kinds(arguments.list)), sep="\n\n")
            return DONE
        parts = build(read(arguments.config, arguments.overrides), Path(arguments.config).name)
        return check(parts) if arguments.check else train(parts)
    except UserError as error:
        return fail(error, BAD_INPUT)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (RunError, OSError) as error:
        return fail(error, FAILED)
    except KeyboardInterrupt:
        return fail("Interrupted; nothing more was saved", FAILED)
    except Exception as error:
        if not isinstance(error, MemoryError) and "Out of memory" not in str(error):
            raise
        hint = "take a smaller loader.batch_size, cut batches with training.accumulate, or stream with loader.device_budget_mb=0"
        return fail(f"Out of memory: {first_line(error)}\n{hint}", FAILED)


def parse(argv):
    parser = argparse.ArgumentParser(description="Train the model that a config file describes.")
    parser.add_argument("-c", "--config", default="config.json", help="the config file (default: config.json)")
    parser.add_argument(
        "overrides", nargs="*", metavar="path.to.key=value", help="a value to use instead, as optimizer.args.lr=0.01"
    )
    parser.add_argument("--check", action="store_true", help="validate, print the resolved config and the model, train nothing")
    parser.add_argument("--list", nargs="?", const="all", metavar="KIND", help="print every name that a config can use")
    return parser.parse_intermixed_args(argv)


def chosen_kinds(name):
    """The kinds to list."""
    if name != "all" and name not in KINDS:
        raise UserError(f"--list: there is no kind {name!r}; there are {', '.join(KINDS)}")
    return KINDS if name == "all" else [name]


def check(parts):
    """Print what would run."""
    from training.summary import table

    params = shapes(parts)
    print(json.dumps(parts.config, indent=2))
    print(table(params))
    return DONE


def shapes(parts):
    """The parameters as shapes, once the parts are known to fit the data and each other, and what is monitored to be measured."""
    from training.checkpoint import Pretrained
    from training.fit import compose
    from training.summary import check_monitors, trace_shapes

    pieces = (parts.model, parts.loss, parts.metrics, parts.preprocess, parts.augment)
    try:
        objective = compose(parts.objective, *pieces, parts.training.precision)
        example, batch_size = parts.data.example, parts.loader.batch_size
        params, state, reported = trace_shapes(parts.model, objective, parts.optimizer, example, batch_size)
        check_monitors(monitors(parts), evaluated_sets(parts), reported)
        if parts.training.pretrained:
            Pretrained(parts.training.pretrained).check(params, state)
    except UserError as error:
        raise UserError(f"{parts.source}: {error}") from error
    return params


def monitors(parts):
    """{place in the config: the metric that is monitored there}"""
    callbacks = {f"callbacks.{i}.args.monitor": getattr(c, "monitor", None) for i, c in enumerate(parts.callbacks)}
    return {"checkpoint.monitor": parts.checkpoint.monitor} | callbacks


def evaluated_sets(parts):
    """The sets that metrics are measured on."""
    held_out = ["val"] if parts.loader.val_size else []
    return [*parts.data.sizes, *held_out] if parts.training.eval_every else ["train"]


def train(parts):
    """Make the run's folder, load the data, fit."""
    from data_loader.base import loaded
    from training import run_folder
    from training.checkpoint import Checkpoints
    from training.fit import fit
    from training.summary import count

    params = shapes(parts)
    folder = run_folder.new_folder(parts.checkpoint.dir, parts.title)
    set_up_logging(folder / "train.log")
    try:
        sets = loaded(parts.data)
    except BaseException:
        shutil.rmtree(folder)  # nothing has run
        raise
    run_folder.describe(folder, parts.config, parts.facts, sets, ROOT)
    announce(parts, sets, folder, count(params))
    gc.enable()
    checkpoints = Checkpoints(folder, parts.checkpoint, {"config": parts.config, "facts": parts.facts})
    run = fit(
        parts.model,
        **sets,
        loss=parts.loss,
        metrics=parts.metrics,
        optimizer=parts.optimizer,
        preprocess=parts.preprocess,
        augment=parts.augment,
        objective=parts.objective,
        update=parts.update,
        callbacks=[*parts.callbacks, checkpoints],
        seed=parts.seed,
        log_every=parts.logging.every_steps,
        metrics_file=folder / "metrics.jsonl",
        **vars(parts.loader),
        **vars(parts.training),
    )
    return STOPPED if run.signal and not run.finished else DONE


def announce(parts, sets, folder, parameters):
    """The first lines of a run."""
    from training.run_folder import source

    logger.info("Start Training! [%s]", parts.title)
    logger.info("The model has %d parameters", parameters)
    for name, dataset in sets.items():
        logger.info("%s data: %d examples from %s", name.capitalize(), parts.data.sizes[name], source(dataset))
    logger.info("Run folder: %s", folder)


def set_up_logging(file):
    """Logging as logger_config.json has it, its file in the run's folder."""
    logging.raiseExceptions = False  # a full disk is told once, not at every line
    config = json.loads((ROOT / "logger_config.json").read_text())
    config["handlers"]["file"]["filename"] = str(file)
    logging.config.dictConfig(config)


def fail(error, code):
    """Say one message, also to the run's log; no traceback, since the mistake is not in this program."""
    print(error, file=sys.stderr)
    record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, str(error), (), None)
    for handler in logger.handlers:
        if isinstance(handler, logging.FileHandler) and os.path.exists(handler.baseFilename):
            handler.handle(record)
    return code


if __name__ == "__main__":
    sys.exit(main())
