"""Log once that a run waits for its data, and what to do about it."""

import logging
import time

SHARE = 0.3  # of the time that training waits for data
SECONDS = 10.0  # of training before the share is judged
ADVICE = (
    "make the dataset's __getitem__ or the collate_fn cheaper, or store the examples with "
    "write_records, which worker processes read"
)

logger = logging.getLogger("main")


class WaitingForData:
    """The watcher that logs once if training waits for data for more than SHARE of the time.
    Compiling and evaluations do not count; `advice` says what to do."""

    def __init__(self, feed, advice=None):
        self.feed, self.advice = feed, advice or ADVICE
        self.seconds = self.waited = 0.0  # so far
        self.logged = False

    def on_epoch_start(self, run):
        self.mark = time.monotonic(), self.feed.waited

    on_compiled = on_epoch_start

    def on_chunk(self, run, report):
        before, waited = self.mark
        self.mark = time.monotonic(), self.feed.waited
        self.seconds += self.mark[0] - before
        self.waited += self.mark[1] - waited
        if self.logged or self.seconds < SECONDS or self.waited < SHARE * self.seconds:
            return
        self.logged = True
        share = min(self.waited / self.seconds, 1)
        logger.warning("Training waits for data %.0f%% of the time: %s", 100 * share, self.advice)
