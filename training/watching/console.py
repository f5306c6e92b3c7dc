"""What a person at a terminal sees, and where log lines go."""

import json
import logging
import logging.config
import sys
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger("main")


@contextmanager
def progress_bar(epoch, steps, position=0):
    """A tqdm bar over the steps of an epoch, below the log lines; Silent outside a terminal."""
    if not sys.stderr.isatty():
        yield Silent()
        return
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    with (
        logging_redirect_tqdm([logger]),
        tqdm(total=steps, initial=position, desc=f"Epoch {epoch}", unit="step", leave=False) as bar,
    ):
        yield bar


class Silent:
    """A progress bar that is not shown."""

    def update(self, _taken):
        pass


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
    config = json.loads((Path(root) / "logger_config.json").read_text())
    config["handlers"]["file"]["filename"] = str(file)
    logging.config.dictConfig(config)
