"""Log once that a run waits for its data, and what to do about it."""

import logging

SHARE = 0.3  # of the time that training waits for data
SECONDS = 10.0  # of training before the share is judged
ADVICE = (
    "make the dataset's __getitem__ or the collate_fn cheaper, or store the examples with "
    "write_records, which worker processes read"
)

logger = logging.getLogger("main")


class WaitingForData:
    """The observer that logs once if training waits for data for more than SHARE of the time.
    Compiling and evaluations do not count; `advice` says what to do."""

    late = True

    def __init__(self, clock, advice=None):
        self.every = {"seconds": 1.0}
        self.clock, self.advice, self.logged = clock, advice or ADVICE, False

    def on_steps(self, run):
        seconds, waited = self.clock.seconds, self.clock.waited
        if self.logged or seconds < SECONDS or waited < SHARE * seconds:
            return
        self.logged = True
        share = 100 * min(waited / seconds, 1)
        logger.warning("Training waits for data %.0f%% of the time: %s", share, self.advice)
