"""What a person at a terminal sees, and where log lines go."""

import json
import logging
import logging.config
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path

logger = logging.getLogger("main")


def show_on_console():
    """Send log lines to standard output if logging is not set up, as in a notebook."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler(sys.stdout))


def be_silent():
    """Log only errors, as all processes but process 0 do."""
    logger.setLevel(logging.ERROR)


def set_up_logging(root, file):
    """Set up logging as in logger_config.json, with the log file in the run's folder."""
    logging.raiseExceptions = False  # a full disk is reported once, not at every line
    config = json.loads((Path(root) / "logger_config.json").read_text(encoding="utf-8"))
    config["handlers"]["file"]["filename"] = str(file)
    logging.config.dictConfig(config)


def in_notebook():
    """Whether this is a notebook, whose output is no terminal but shows progress bars too."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "IPKernelApp" in getattr(shell, "config", ())


class ProgressBar:
    """The watcher that draws a tqdm bar over the steps of an epoch where the output is a terminal
    or a notebook; log lines then print above it."""

    def __init__(self):
        self.resources, self.bar = ExitStack(), None

    def on_epoch_start(self, run):
        self.close(run)  # a run that went back to a checkpoint begins its epoch again
        if not (sys.stderr.isatty() or in_notebook()):
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without ipywidgets, the bar is one of text
            from tqdm.auto import tqdm
        from tqdm.contrib.logging import logging_redirect_tqdm

        self.resources.enter_context(logging_redirect_tqdm([logger]))
        settings = {"total": run.steps, "initial": run.position, "unit": "step", "leave": False}
        self.bar = self.resources.enter_context(tqdm(desc=f"Epoch {run.epoch}", **settings))

    def on_chunk(self, run, report):
        if self.bar:
            self.bar.update(report.steps)

    def on_stop(self, run):
        self.close(run)

    def on_values(self, run, name, values):
        self.close(run)  # the epoch's steps are done

    def close(self, run):
        self.resources.close()
        self.bar = None
