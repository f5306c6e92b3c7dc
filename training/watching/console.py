"""What a person at a terminal sees besides the log lines."""

import json
import logging
import logging.config
import sys
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger("main")


@contextmanager
def progress_bar(epoch, steps, position=0):
    """A tqdm bar over the steps of an epoch where the output is a terminal; log lines then print above it."""
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
    """A bar that nobody sees."""

    def update(self, _taken):
        pass


def show_on_console():
    """Let log lines reach standard output where nobody has set logging up, as in a notebook."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler(sys.stdout))


def be_silent():
    """Say nothing but errors: of several processes one speaks for all."""
    logger.setLevel(logging.ERROR)


def set_up_logging(root, file):
    """Logging as logger_config.json has it, its file in the run's folder."""
    logging.raiseExceptions = False  # a full disk is told once, not at every line
    config = json.loads((Path(root) / "logger_config.json").read_text())
    config["handlers"]["file"]["filename"] = str(file)
    logging.config.dictConfig(config)
