"""The state of a run, which `fit` returns, and of which callbacks get a View."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


@dataclass
class Run:
    """A run in progress, or done."""

    runner: Any
    epochs: int
    steps: int | None  # in an epoch; None where nobody knows
    epoch: int = 0  # the one in progress, or the last one
    completed: int = 0  # epochs trained to their end
    position: int = 0  # batches taken of the epoch in progress
    step: int = 0  # batches taken in all
    metrics: dict = field(
        default_factory=dict
    )  # of the latest line: within an epoch, or at its end
    arrays: dict = field(default_factory=dict)  # what is measured for callbacks alone
    per_step: dict = field(
        default_factory=dict
    )  # the values of the steps since the last line, where a callback needs them
    evaluated: list = field(default_factory=list)  # the sets that were measured in this epoch
    history: list = field(default_factory=list)  # a row an epoch
    stopped: bool = False
    signal: str | None = None  # the signal that stopped it
    untested: bool = False  # whether it was to be tested at its end, and was not
    tested: Any = None  # (params, state) of the first replica while other weights than the latest are measured
    published: bool = True  # whether the trackers ended as well; where one is stuck, so would be the interpreter's exit

    def states(self):
        """The TrainState of each replica. Its arrays are gone with the next step: copy what must outlive a hook."""
        return self.runner.replica_states()

    @property
    def params(self):
        """A copy of the weights that are evaluated (of the first replica): the averaged ones where there are such."""
        ts = self.states()[0]
        return jax.tree.map(
            jnp.copy, self.tested[0] if self.tested else ts.params if ts.ema is None else ts.ema
        )

    @property
    def state(self):
        """A copy of the running statistics that go with `params`."""
        return jax.tree.map(jnp.copy, self.tested[1] if self.tested else self.states()[0].state)

    @property
    def cut_short(self):
        """Whether it was stopped before all of it was done."""
        return self.stopped and (self.untested or not self.finished)

    @property
    def finished(self):
        """Whether every epoch was trained to its end."""
        return self.completed >= self.epochs
