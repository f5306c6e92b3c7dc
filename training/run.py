"""What callbacks see of a run, and what `fit` returns."""

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
    metrics: dict = field(default_factory=dict)  # of the latest line: within an epoch, or at its end
    history: list = field(default_factory=list)  # a row an epoch
    stopped: bool = False
    signal: str | None = None  # the signal that stopped it

    def states(self):
        """The TrainState of each replica. Its arrays are gone with the next step: copy what must outlive a hook."""
        return self.runner.replica_states()

    @property
    def params(self):
        """A copy of the trained weights (of the first replica): the averaged ones where there are such."""
        ts = self.states()[0]
        return jax.tree.map(jnp.copy, ts.params if ts.ema is None else ts.ema)

    @property
    def state(self):
        """A copy of the running statistics that go with `params`."""
        return jax.tree.map(jnp.copy, self.states()[0].state)

    @property
    def finished(self):
        """Whether every epoch was trained to its end."""
        return self.completed >= self.epochs
