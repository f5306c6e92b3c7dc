"""python train.py -c config.json [path.to.key=value ...]: config -> parts -> fit -> exit code."""

import argparse
import json
import logging
import logging.config
import os
import sys
from pathlib import Path

from utils import RunError, UserError
from wiring.build import build
from wiring.config import read
from wiring.parts import KINDS, listing

ROOT = Path(__file__).resolve().parent
DONE, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 75  # exit codes; 75: stopped by a signal with a checkpoint written

logger = logging.getLogger("main")


def main(argv=None):
    """Run the command line; every mistake of the user's ends in one message and an exit code."""
    arguments = parse(argv)
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
        return fail("interrupted before the first step", FAILED)


def parse(argv):
    parser = argparse.ArgumentParser(description="Train the model that a config file describes.")
    parser.add_argument("-c", "--config", default="config.json", help="the config file (default: config.json)")
    parser.add_argument(
        "overrides", nargs="*", metavar="path.to.key=value", help="a value to use instead, as optimizer.args.lr=0.01"
    )
    parser.add_argument("--check", action="store_true", help="validate, print the resolved config and the model, train nothing")
    parser.add_argument("--list", nargs="?", const="all", metavar="KIND", help="print every name that a config can use")
    return parser.parse_args(argv)


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
    """The parameters as shapes, once the model is known to fit the data, and what is monitored to be measured."""
    from training.fit import compose
    from training.summary import check_monitors, trace_shapes

    pieces = (parts.model, parts.loss, parts.metrics, parts.preprocess, parts.augment)
    objective = compose(parts.objective, *pieces, parts.training.precision)
    try:
        params, reported = trace_shapes(parts.model, objective, parts.data.example, parts.loader.batch_size)
        check_monitors(monitors(parts), evaluated_sets(parts), reported)
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
    """Load the data, make the run's folder, fit."""
    from training import run_folder
    from training.checkpoint import Checkpoints
    from training.fit import fit
    from training.summary import count

    params = shapes(parts)
    set_up_logging()
    sets = parts.data.load()
    folder = run_folder.new_folder(parts.checkpoint.dir, parts.title)
    set_up_logging(folder / "train.log")
    run_folder.describe(folder, parts.config, parts.facts, sets, ROOT)
    announce(parts, sets, folder, count(params))
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


def set_up_logging(file=None):
    """Logging as logger_config.json has it; without a file, to the console alone."""
    config = json.loads((ROOT / "logger_config.json").read_text())
    if file:
        config["handlers"]["file"]["filename"] = str(file)
    else:
        del config["handlers"]["file"]
        config["loggers"]["main"]["handlers"].remove("file")
    logging.config.dictConfig(config)


def fail(error, code):
    """Say one message; no traceback, since the mistake is not in this program."""
    logger.error("%s", error) if logger.hasHandlers() else print(error, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
