"""One job at a time in a thread, so that writing to disk does not stall training."""

import threading


class Background:
    """Keeps what a job raised for whoever asks. A process that must end at once does not wait for the thread."""

    def __init__(self):
        self.thread, self.error = None, None

    def start(self, job):
        """Begin a job; the one before must be done."""
        self.thread = threading.Thread(
            target=self.attempt, args=(job,), name="checkpoint", daemon=True
        )
        self.thread.start()

    def attempt(self, job):
        """Run a job and keep what it raises."""
        try:
            job()
        except BaseException as error:  # whatever it is, the main thread must hear of it
            self.error = error

    def join(self):
        """Wait until no job is running."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def check(self):
        """Raise what a finished job raised."""
        error, self.error = self.error, None
        if error is not None:
            raise error
