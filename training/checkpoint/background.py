"""One job at a time in a thread, so that writing to disk does not stall training."""

from threading import Thread


class Background:
    """Runs one job in a daemon thread (an exiting process does not wait) and keeps its error."""

    def __init__(self):
        self.thread, self.error = None, None

    def start(self, job):
        """Start a job; the previous one must have ended."""
        self.thread = Thread(target=self.attempt, args=(job,), name="checkpoint", daemon=True)
        self.thread.start()

    def attempt(self, job):
        """Run a job and keep any error."""
        try:
            job()
        except BaseException as error:  # the main thread must see every kind of error
            self.error = error

    def join(self):
        """Wait until no job is running."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def check(self):
        """Raise the error of a finished job, if any."""
        error, self.error = self.error, None
        if error is not None:
            raise error
